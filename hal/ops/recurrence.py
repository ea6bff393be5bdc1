"""Recurrent layers: a causal convolution and gated delta rules, which keep a state per sequence.

:mod:`hal.ops.saved_states` says which slots they read and write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.attention import owners
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.saved_states import SLOTS, last_tokens, slots_of_steps, write_states, written_slots

_RULE_DTYPES: dict[str, Any] = {
    "query": FLOATING,
    **dict.fromkeys(("key", "value", "beta", "return"), "query"),
    "decay": torch.float32,
    "state": (torch.float32, "query"),
}


def _conv_samples(draw: Draw) -> Iterator[Sample]:
    cases: list[tuple[list[int], int, int, int, bool]] = [
        ([1], 16, 4, 0, True),
        ([5, 1, 2], 24, 4, 0, True),
        ([1, 1, 1, 1], 32, 3, 1, True),
        ([7, 3, 0], 16, 2, 0, True),  # the last sequence has no token
        ([4, 2], 40, 4, 3, True),  # the states after three tokens; the second sequence has two
        ([2, 2], 24, 4, 2, False),
        ([1] * 6, 640, 4, 0, True),  # decode
    ]
    for lengths, channels, width, saves, apart in cases:
        tokens = sum(lengths)
        bias = draw.normal(channels) if width == 3 else None
        weight, window = draw.normal(width, channels), draw.normal(SLOTS, width - 1, channels)
        steps = slots_of_steps(draw, lengths, saves, apart=apart)
        yield draw.normal(tokens, channels), weight, bias, window, *steps, width != 2, 1
    rows = draw.normal(6, 64)[:, 16:48]  # a part of a projection
    yield rows, draw.normal(4, 32), None, draw.normal(SLOTS + 2, 3, 32), *slots_of_steps(draw, [4, 2]), True, 1
    for lengths, width, dilation, saves in (([1, 1, 1], 4, 3, 0), ([20, 1, 3], 4, 3, 0), ([5, 2], 3, 2, 3)):
        weight, window = draw.normal(width, 24), draw.normal(SLOTS, (width - 1) * dilation, 24)
        yield draw.normal(sum(lengths), 24), weight, None, window, *slots_of_steps(draw, lengths, saves), True, dilation


@op(
    samples=_conv_samples,
    axes={
        "x": "tokens channels",
        "weight": "width channels",
        "bias": "channels",
        "window": "num_slots (width-1)*dilation channels",
        "return": "tokens channels",
    },
    dtypes={
        "x": FLOATING,
        "weight": "x",
        "bias": "x",
        "window": "x",
        "return": "x",
    },
    rowwise=None,
    state=("window",),
    mutates=("window",),
    weights=("weight",),
    host=("query_start_loc_host",),
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    silu: bool,
    dilation: int = 1,
) -> Tensor:
    """Convolve each channel along each sequence: a token sees its own row and the ``width - 1`` before it.

    With a ``dilation`` of more than 1, the rows that it sees are so far apart. The rows before a sequence's new tokens
    are in its window, zeros for a new sequence. Computed in float32, and rounded once. Sequence ``i`` has the tokens
    from ``query_start_loc[i]`` to ``query_start_loc[i + 1]``. Tokens past the last sequence return any value.

    Args:
        x: ``[tokens, channels]``, floating.
        weight: ``[width, channels]``, of x's dtype, with a width of 2 or more; the last row is for a token itself. Or
            as :meth:`hal.Backend.prepare_weights` returned it.
        bias: ``[channels]``, of x's dtype, or None.
        window: ``[num_slots, (width - 1) * dilation, channels]``, of x's dtype, written in place: the last rows of a
            sequence.
        read_slots: ``[sequences]``, int32: the slot of each sequence's window.
        write_slots: ``[sequences, saves]``, int32: slots of the windows after each of the last ``saves`` tokens of the
            sequence, in order; None for the slot that was read, after the last token. Where a sequence has fewer
            tokens, the first slots are not written. Sequences may share only slots that are never read (padding), where
            the result is undefined.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        query_start_loc_host: a CPU copy of ``query_start_loc``.
        silu: whether the result is ``silu`` of the sum.
        dilation: the distance of the rows that a token sees, 1 or more.

    Returns:
        ``[tokens, channels]``, of x's dtype.
    """
    width, kept_rows, sequences = weight.shape[0], window.shape[1], read_slots.shape[0]
    token, owner = owners(x.shape[0], query_start_loc)
    owner = owner.clamp(max=sequences - 1)
    before = window[read_slots.long()]  # [sequences, kept_rows, channels]

    def rows(token: Tensor, owner: Tensor, back: int) -> Tensor:
        """Return the rows of x, or of the window, that are ``back`` tokens before the given ones of sequences."""
        place = token - back - query_start_loc.long()[owner]
        old = before[owner, (place + kept_rows).clamp(0, kept_rows - 1)]
        new = x[(token - back).clamp(min=0)]
        return torch.where((place >= 0).unsqueeze(-1), new, old)

    total = x.float() * weight[-1].float()
    for back in range(1, width):
        total = total + rows(token, owner, back * dilation).float() * weight[width - 1 - back].float()
    if bias is not None:
        total = total + bias.float()

    columns = written_slots(read_slots, write_slots)
    last, kept = last_tokens(query_start_loc, columns.shape[1])
    sequence = torch.arange(sequences, device=x.device)[:, None].expand_as(last)
    values = torch.stack([rows(last, sequence, back) for back in range(kept_rows - 1, -1, -1)], dim=2)
    write_states(window, columns, values, kept)
    return (functional.silu(total) if silu else total).to(x.dtype)


def _gates_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, heads in ((1, 4), (7, 32), (0, 8), (64, 16)):
        pair = draw.normal(tokens, 2 * heads, scale=3.0)
        factor = draw.integers(1, 160, heads).float() / -10
        yield pair[:, :heads], pair[:, heads:], factor, draw.normal(heads, scale=2.0).float()
    wide = draw.normal(3, 8, scale=30.0)  # beyond the threshold of softplus
    yield wide, wide, -draw.normal(8).float().exp(), draw.normal(8).float()


@op(
    samples=_gates_samples,
    axes={
        "a": "tokens heads",
        "b": "tokens heads",
        "factor": "heads",
        "dt_bias": "heads",
        "return": ("tokens heads", "tokens heads"),
    },
    dtypes={
        "a": FLOATING,
        "b": "a",
        "factor": torch.float32,
        "dt_bias": torch.float32,
        "return": (torch.float32, "a"),
    },
    rowwise="tokens",
)
def delta_rule_gates(a: Tensor, b: Tensor, factor: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decay and the rate of :func:`gated_delta_rule`, computed in float32.

    They are ``factor * softplus(a + dt_bias)`` and ``sigmoid(b)``.

    Args:
        a: ``[tokens, heads]``, floating.
        b: as ``a``.
        factor: ``[heads]``, float32, at most 0: ``-exp(A_log)`` in the source.
        dt_bias: ``[heads]``, float32.

    Returns:
        The logarithm of the decay, ``[tokens, heads]``, float32, at most 0; and the rate, of b's shape and dtype.

    Source: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule*, 2024.
    """
    decay = factor * functional.softplus(a.float() + dt_bias)
    return decay, torch.sigmoid(b.float()).to(b.dtype)


def _delta_rule_samples(draw: Draw) -> Iterator[Sample]:
    cases: list[tuple[list[int], tuple[int, int], tuple[int, int], int, bool]] = [
        ([1], (2, 2), (16, 32), 0, True),
        ([1, 1, 1], (2, 4), (32, 16), 1, True),  # decode
        ([70, 1, 5], (1, 3), (16, 24), 0, True),  # more than a chunk, beside others
        ([64, 0, 128], (1, 2), (32, 16), 0, True),  # whole chunks; a sequence without tokens
        ([3, 3, 3], (2, 4), (16, 8), 3, True),  # the states after each token
        ([67, 2], (2, 2), (8, 16), 4, True),
        ([2, 2], (1, 2), (16, 32), 2, False),
        ([1] * 6, (2, 4), (64, 64), 0, True),  # decode with the state in query's dtype
        ([2, 2], (2, 2), (16, 24), 0, True),
    ]
    for index, (lengths, (key_heads, value_heads), (key_dim, value_dim), saves, apart) in enumerate(cases):
        tokens = sum(lengths)
        query, key = (functional.normalize(draw.normal(tokens, key_heads, key_dim).float(), dim=-1) for _ in range(2))
        decay = -draw.normal(tokens, value_heads).float().abs() * (0.1, 1.0, 8.0)[index % 3]
        state = draw.normal(SLOTS + index % 2, value_heads, value_dim, key_dim)
        yield (
            query.to(draw.dtype),
            key.to(draw.dtype),
            draw.normal(tokens, value_heads, value_dim),
            decay,
            torch.sigmoid(draw.normal(tokens, value_heads).float()).to(draw.dtype),
            state if index in (1, 7, 8) else state.float(),
            *slots_of_steps(draw, lengths, saves, apart=apart),
            key_dim**-0.5,
        )


@op(
    samples=_delta_rule_samples,
    axes={
        "query": "tokens key_heads key_dim",
        "key": "tokens key_heads key_dim",
        "value": "tokens value_heads value_dim",
        "decay": "tokens value_heads",
        "beta": "tokens value_heads",
        "state": "num_slots value_heads value_dim key_dim",
        "return": "tokens value_heads value_dim",
    },
    dtypes=_RULE_DTYPES,
    rowwise=None,
    state=("state",),
    mutates=("state",),
    host=("query_start_loc_host",),
    tolerance={torch.float32: (1e-4, 1e-4)},
)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    scale: float,
) -> Tensor:
    """Apply the gated delta rule to each sequence, for prefill and decode.

    For each token in order, a head's state ``S``, ``[value_dim, key_dim]``, becomes ``S = exp(decay) * S``, then
    ``S = S + beta * (value - S @ key) * key``, and the result is ``scale * S @ query``. Value heads share key heads in
    groups of ``value_heads / key_heads``. Computed in float32, and rounded once. Sequence ``i`` has the tokens from
    ``query_start_loc[i]`` to ``query_start_loc[i + 1]``. Tokens past the last sequence return any value.

    A kernel may compute token by token or in chunks of tokens, whose results differ by rounding. The lengths of key and
    query are at most about 1, as after :func:`l2_norm`.

    Args:
        query: ``[tokens, key_heads, key_dim]``, floating.
        key: as ``query``.
        value: ``[tokens, value_heads, value_dim]``, of query's dtype.
        decay: ``[tokens, value_heads]``, float32: the logarithm of the factor of the state, at most 0.
        beta: ``[tokens, value_heads]``, of query's dtype: the rate at which the state takes the value, from 0 to 1.
        state: ``[num_slots, value_heads, value_dim, key_dim]``, float32 or of query's dtype, written in place; zeros
            for a new sequence. It is rounded to its dtype after the sequence's tokens.
        read_slots: ``[sequences]``, int32: the slot of each sequence's state.
        write_slots: ``[sequences, saves]``, int32: slots of the states after each of the last ``saves`` tokens of the
            sequence, in order; None for the slot that was read, after the last token. Where a sequence has fewer
            tokens, the first slots are not written. Sequences may share only slots that are never read (padding), where
            the result is undefined.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        query_start_loc_host: a CPU copy of ``query_start_loc``.
        scale: factor of the result.

    Returns:
        ``[tokens, value_heads, value_dim]``, of query's dtype.

    Source: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule*, 2024.
    """
    given = beta, state, read_slots, write_slots, query_start_loc
    return _delta_rule(query, key, value, decay.unsqueeze(-1), *given, scale)


def _channel_samples(draw: Draw) -> Iterator[Sample]:
    for query, key, value, decay, beta, state, *steps in _delta_rule_samples(draw):
        heads, key_dim = value.shape[1], key.shape[2]
        query, key = (each[:, :1].expand(-1, heads, -1).contiguous() for each in (query, key))
        channels = draw.integers(1, 9, heads, key_dim).float() / 4
        yield query, key, value, decay.unsqueeze(-1) * channels, beta, state, *steps


@op(
    samples=_channel_samples,
    axes={
        "query": "tokens heads key_dim",
        "key": "tokens heads key_dim",
        "value": "tokens heads value_dim",
        "decay": "tokens heads key_dim",
        "beta": "tokens heads",
        "state": "num_slots heads value_dim key_dim",
        "return": "tokens heads value_dim",
    },
    dtypes=_RULE_DTYPES,
    rowwise=None,
    state=("state",),
    mutates=("state",),
    host=("query_start_loc_host",),
    tolerance={torch.float32: (1e-4, 1e-4)},
)
def channel_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    scale: float,
) -> Tensor:
    """Apply :func:`gated_delta_rule` with a decay for each channel of a key: ``S = S * exp(decay)``.

    Args:
        query: ``[tokens, heads, key_dim]``, floating.
        key: as ``query``.
        value: ``[tokens, heads, value_dim]``, of query's dtype.
        decay: ``[tokens, heads, key_dim]``, float32: the logarithm of the factor of the state's columns, at most 0.
        beta: ``[tokens, heads]``, of query's dtype: the rate at which the state takes the value, from 0 to 1.
        state: ``[num_slots, heads, value_dim, key_dim]``, as of :func:`gated_delta_rule`.
        read_slots: see there, like the arguments that follow.
        write_slots, query_start_loc, query_start_loc_host, scale: see there.

    Returns:
        ``[tokens, heads, value_dim]``, of query's dtype.

    Source: Kimi Team, *Kimi Linear: An Expressive, Efficient Attention Architecture*, 2025.
    """
    return _delta_rule(query, key, value, decay, beta, state, read_slots, write_slots, query_start_loc, scale)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """Compute :func:`gated_delta_rule` with the decays ``[tokens, heads, channels]``, of which one may serve all."""
    tokens, heads, _ = value.shape
    sequences = read_slots.shape[0]
    token, owner = owners(tokens, query_start_loc)
    own = owner == torch.arange(sequences, device=query.device)[:, None]  # [sequences, tokens]
    first = query_start_loc.long()[owner.clamp(max=sequences - 1)]
    groups = heads // key.shape[1]
    before = state[read_slots.long()].float()  # [sequences, heads, value_dim, key_dim]
    # Sequences share products below, in which a NaN of one would reach the others. It stays out of them.
    broken = torch.stack([each.isnan().flatten(1).any(1) for each in (query, key, value, decay, beta)]).any(0)
    lost = (own & broken).any(1) | before.isnan().flatten(1).any(1)  # [sequences]
    before = before.masked_fill(lost[:, None, None, None], 0.0)
    broken = (own & lost[:, None]).any(0)
    query, key, value = (each.masked_fill(broken[:, None, None], 0.0) for each in (query, key, value))
    decay, beta = decay.masked_fill(broken[:, None, None], 0.0), beta.masked_fill(broken[:, None], 0.0)
    q, k = (each.float().unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2).transpose(0, 1) for each in (query, key))
    v, rate = value.float().transpose(0, 1), beta.float().t().unsqueeze(-1)  # [heads, tokens, ...]

    # Sums of decays since the first token of the step, in float64, because differences of large ones matter.
    total = decay.double().cumsum(0).transpose(0, 1)
    total = torch.cat((total.new_zeros(heads, 1, total.shape[2]), total), 1)  # [heads, tokens + 1, channels]
    since = (total[:, 1:] - total[:, first]).float().exp()
    apart = (total[:, 1:, None] - total[:, None, 1:]).float()
    earlier = own.t().float() @ own.float() > 0  # of one sequence
    earlier = (earlier & (token[:, None] >= token)).unsqueeze(-1)
    weights = apart.masked_fill(~earlier, float("-inf")).exp()

    def products(x: Tensor) -> Tensor:
        """Return the products of each token's row of x with the faded keys before it, ``[heads, tokens, tokens]``."""
        if weights.shape[-1] == 1:
            return weights.squeeze(-1) * (x @ k.transpose(1, 2))
        return (x.unsqueeze(2) * k.unsqueeze(1) * weights).sum(-1)

    # One triangular system has the changes of all tokens: each depends on those before it. Its inverse serves here,
    # because linalg.solve_triangular cannot be traced in inference mode with symbolic sizes.
    matrix = (rate * products(k)).tril(-1)
    matrix = matrix + (token[:, None] == token).float()
    others = ~own[:, None, :, None]

    def recalled(x: Tensor) -> Tensor:
        """Return the products of each token's row of x with its sequence's state, ``[heads, tokens, value_dim]``."""
        return torch.einsum("htk,shvk->shtv", since * x, before).masked_fill(others, 0.0).sum(0)

    inverse: Tensor = torch.linalg.inv_ex(matrix.double()).inverse.float()
    change = inverse @ (rate * (v - recalled(k)))
    result: Tensor = recalled(q)
    result = result + products(q) @ change

    columns = written_slots(read_slots, write_slots)
    last, kept = last_tokens(query_start_loc, columns.shape[1])
    at = last.clamp(min=0)
    left = (total[:, at + 1].unsqueeze(3) - total[:, None, None, 1:]).float()  # [heads, sequences, saves, tokens, ...]
    seen = own[:, None] & (token <= last.unsqueeze(-1))
    left = left.masked_fill(~seen.unsqueeze(-1), float("-inf")).exp()
    old = (total[:, at + 1] - total[:, query_start_loc.long()[:-1], None]).float().exp()
    added = torch.einsum("hsjtk,htv->sjhvk", left * k[:, None, None], change)
    after = old.permute(1, 2, 0, 3).unsqueeze(-2) * before[:, None] + added
    write_states(state, columns, after.masked_fill(lost[:, None, None, None, None], float("nan")), kept)
    result = (result * scale).transpose(0, 1).masked_fill(broken[:, None, None], float("nan"))
    return result.to(query.dtype)
