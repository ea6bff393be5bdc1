"""The operations of recurrent layers in torch's operations, for drivers without kernels of their own.

Steps in which all sequences have the same few tokens advance token by token, and read no lengths: a captured graph
serves all steps of its shape. In the delta rule, longer sequences are cut into chunks. All products within chunks are
computed at once, then states pass from chunk to chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.kernels.kernel_table import Kernel

CHUNK = 64
"""Tokens of a chunk, a power of two. The sum of decays within a chunk is float32, which bounds its size."""
SHORT_CHUNK = 16
"""The same with decays of channels, of which each pair of tokens in a chunk has a row."""
FEW = 4
"""The most tokens of sequences that advance token by token."""


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
    """See :func:`hal.ops.causal_conv1d`. The windows and rows of all sequences become one tensor."""
    read = read_slots.long()
    written = read.unsqueeze(-1) if write_slots is None else write_slots.long()
    width, kept_rows, (sequences, saves) = weight.shape[0], window.shape[1], written.shape
    starts: list[int] = query_start_loc_host.tolist()
    before = window[read]
    queries = queries_each(x.shape[0], starts)
    if queries is not None:
        rows = torch.cat((before, x.unflatten(0, (sequences, queries))), 1)
        ends = [kept_rows + queries - back for back in range(min(saves, queries) - 1, -1, -1)]
        saved = [rows[:, end - kept_rows : end] for end in ends]
        window[written[:, -len(ends) :]] = saved[0].unsqueeze(1) if len(saved) == 1 else torch.stack(saved, 1)
        wide = rows.float().unfold(1, kept_rows + 1, 1) if queries > 1 else rows.float().transpose(1, 2).unsqueeze(1)
        total = (wide[..., ::dilation] * weight.float().t()).sum(-1)
    else:
        # Rows of x, each sequence after its window; the first rows are the windows'.
        own, places, ends, slots = list[int](), list[int](), list[int](), list[int]()
        for row, (start, stop) in enumerate(pairwise(starts)):
            own += [*range(row * kept_rows, (row + 1) * kept_rows)]
            places += range(len(own), len(own) + stop - start)
            own += range(sequences * kept_rows + start, sequences * kept_rows + stop)
            kept = min(saves, stop - start)
            ends += range(len(own) - kept + 1, len(own) + 1)
            slots += range((row + 1) * saves - kept, (row + 1) * saves)
        rows = torch.cat((before.flatten(0, 1), x))[_index(own, x)]
        places += [0] * (x.shape[0] - len(places))  # of tokens past the last sequence
        at = _index(places, x)
        total = rows[at].float() * weight[-1].float()
        for lag in range(width - 1):
            total = total + rows[(at - (width - 1 - lag) * dilation).clamp(min=0)].float() * weight[lag].float()
        last = _index(ends, x)[:, None] + torch.arange(-kept_rows, 0, device=x.device)
        window[written.flatten()[_index(slots, x)]] = rows[last]
    if bias is not None:
        total = total + bias.float()
    return (functional.silu(total) if silu else total).to(x.dtype).reshape(x.shape)


def delta_rule(
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
    """See :func:`hal.ops.gated_delta_rule` and :func:`hal.ops.channel_delta_rule`. By token, or by chunks of tokens."""
    by_channel = decay.dim() == 3
    tensors = query, key, value, decay if by_channel else decay.unsqueeze(-1), beta
    read = read_slots.long()
    written = read.unsqueeze(-1) if write_slots is None else write_slots.long()
    sequences, saves = written.shape
    starts: list[int] = query_start_loc_host.tolist()
    queries = queries_each(query.shape[0], starts)
    if queries is not None and queries <= max(FEW, saves):
        by_sequence = [each.unflatten(0, (sequences, queries)) for each in tensors]
        before = state[read].float()
        found, states = _by_token(by_sequence, before, scale, min(saves, queries))
        state[written[:, -states.shape[1] :]] = states.to(state.dtype)
        return found.flatten(0, 1).to(query.dtype)

    output = torch.zeros_like(value, memory_format=torch.contiguous_format)
    counts = [stop - start for start, stop in pairwise(starts)]
    for count in sorted({*counts}):
        if 0 < count <= max(FEW, saves):
            rows = [row for row, each in enumerate(counts) if each == count]
            tokens = _index([token for row in rows for token in range(starts[row], starts[row + 1])], query)
            own = [each[tokens].unflatten(0, (len(rows), count)) for each in tensors]
            at = _index(rows, query)
            found, states = _by_token(own, state[read[at]].float(), scale, min(saves, count))
            state[written[at, -states.shape[1] :]] = states.to(state.dtype)
            output[tokens] = found.flatten(0, 1).to(query.dtype)
    rows = [row for row, each in enumerate(counts) if each > max(FEW, saves)]
    if not rows:
        return output
    # The states after the last tokens, but for the first of these, are not at the end of a chunk.
    at, tail = _index(rows, query), saves - 1
    spans = [(starts[row], starts[row + 1] - tail) for row in rows]
    found, index, last = _by_chunk(tensors, state[read[at]].float(), spans, SHORT_CHUNK if by_channel else CHUNK)
    # A padding token has the index of the row after the last, which is cut off.
    whole = functional.pad(output, (0, 0, 0, 0, 0, 1))
    whole[index] = (found * scale).to(query.dtype)
    output, states = whole[:-1], last.unsqueeze(1)
    if tail:
        tokens = _index([token for _, end in spans for token in range(end, end + tail)], query)
        own = [each[tokens].unflatten(0, (len(rows), tail)) for each in tensors]
        found, further = _by_token(own, last, scale, tail)
        output[tokens] = found.flatten(0, 1).to(query.dtype)
        states = torch.cat((states, further), 1)
    state[written[at]] = states.to(state.dtype)
    return output


def queries_each(tokens: int, starts: list[int]) -> int | None:
    """Return the number of tokens of each sequence if it is the same for all, and they have all tokens; else None."""
    queries = tokens // max(len(starts) - 1, 1)
    return queries if queries and starts == [*range(0, tokens + 1, queries)] else None


def _index(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)


def _by_token(inputs: Sequence[Tensor], state: Tensor, scale: float, saves: int) -> tuple[Tensor, Tensor]:
    """Advance sequences with the same number of tokens.

    Args:
        inputs: query, key, value, decay and beta of :func:`hal.ops.channel_delta_rule`, ``[sequences, tokens, ...]``;
            the decay may have one channel.
        state: ``[sequences, value_heads, value_dim, key_dim]``, float32.
        scale: factor of the results.
        saves: how many states to return.

    Returns:
        The results, ``[sequences, tokens, value_heads, value_dim]``, and the states after the last ``saves`` tokens,
        ``[sequences, saves, ...]``, both float32.
    """
    query, key, value, decay, beta = inputs
    sequences, tokens, key_heads, key_dim = key.shape
    shape, found, states = state.shape, [], []
    # The value heads of a key head become rows of one product.
    query, key = (query.float() * scale).unsqueeze(-1), key.float().unsqueeze(-1)
    factor, rate, value = decay.exp().unsqueeze(-2), beta.float().unsqueeze(-1), value.float()
    for token in range(tokens):
        state = (state * factor[:, token]).view(sequences, key_heads, -1, key_dim)
        known = (state @ key[:, token]).view(sequences, -1, shape[2])
        change = (rate[:, token] * (value[:, token] - known)).view(sequences, key_heads, -1, 1)
        state = state + change * key[:, token].transpose(-1, -2)
        found.append((state @ query[:, token]).view(sequences, -1, shape[2]))
        state = state.view(shape)
        states.append(state)
    return _stacked(found), _stacked(states[-saves:])


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack along dimension 1, without a copy of a single tensor."""
    return tensors[0].unsqueeze(1) if len(tensors) == 1 else torch.stack(list(tensors), 1)


def _by_chunk(
    inputs: Sequence[Tensor], state: Tensor, spans: Sequence[tuple[int, int]], size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance sequences by chunks.

    Args:
        inputs: as of :func:`_by_token`, ``[tokens, ...]``.
        state: ``[sequences, value_heads, value_dim, key_dim]``, float32.
        spans: the first token of each sequence, and the end of its tokens.
        size: tokens of a chunk.

    Returns:
        The results of all chunks without the scale, ``[positions, value_heads, value_dim]``; the token of each
        position, the number of tokens for padding; and the states after the last tokens, all float32.
    """
    query, key, value, decay, beta = inputs
    tokens, groups = query.shape[0], value.shape[1] // key.shape[1]
    # The first chunks of all sequences come first, the longest sequence first: later chunks are those of a prefix.
    order = sorted(range(len(spans)), key=lambda row: spans[row][0] - spans[row][1])
    chunks = list(_chunks([spans[row] for row in order], size))
    index = _index(
        [token if token < stop else tokens for _, start, stop in chunks for token in range(start, start + size)], query
    )

    def cut(x: Tensor) -> Tensor:
        """Return ``[chunks, heads, size, ...]`` in float32, zeros for padding, which changes no state."""
        x = functional.pad(x, [0] * (2 * x.dim() - 1) + [1])
        chunked: Tensor = x[index].float().unflatten(0, (-1, size))
        return chunked.transpose(1, 2)

    q, k, v, rate = cut(query), cut(key), cut(value), cut(beta).unsqueeze(-1)
    total = cut(decay).cumsum(-2)
    if total.shape[-1] == 1:
        weights = (total - total.transpose(-1, -2)).tril().exp().tril()
        products, scores = ((each @ k.transpose(-1, -2)).repeat_interleave(groups, 1) * weights for each in (k, q))
        q, k = (each.repeat_interleave(groups, 1) for each in (q, k))
    else:
        later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1).unsqueeze(-1)
        faded = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(later, float("-inf")).exp() * k.unsqueeze(-3)
        products, scores = ((faded @ each.unsqueeze(-1)).squeeze(-1) for each in (k, q))
    since, left = total.exp(), (total[..., -1:, :] - total).exp()
    inverse = _inverse((rate * products).tril(-1))
    values, recalled = inverse @ (rate * v), inverse @ (rate * since * k)
    q, k, whole = q * since, k * left, since[:, :, -1:]

    state, found, done = state[_index(order, query)], [], 0
    for depth in range(chunks[-1][0] + 1):
        count = sum(each[0] == depth for each in chunks)
        at, before = slice(done, done + count), state[:count].transpose(-1, -2)
        change = values[at] - recalled[at] @ before
        found.append(q[at] @ before + scores[at] @ change)
        after = state[:count] * whole[at] + change.transpose(-1, -2) @ k[at]
        state, done = torch.cat((after, state[count:])), done + count
    return (
        torch.cat(found).transpose(1, 2).flatten(0, 1),
        index,
        state[_index(sorted(range(len(order)), key=order.__getitem__), query)],
    )


def _chunks(spans: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int, int]]:
    """Yield each chunk's number in its sequence, its first token and the sequence's end, all first chunks first."""
    for depth in range(-(-(spans[0][1] - spans[0][0]) // size)):
        for start, stop in spans:
            if start + depth * size < stop:
                yield depth, start + depth * size, stop


def _inverse(lower: Tensor) -> Tensor:
    """Return ``(1 + lower) ** -1`` of strictly lower triangular matrices ``[..., size, size]``.

    The inverse of a matrix of two blocks follows from those of its diagonal blocks. This rounds as forward substitution
    does, and needs matrix products only. A sum of powers would overflow where keys repeat.
    """
    width = lower.shape[-1]
    inverse = torch.eye(width, device=lower.device).expand_as(lower).contiguous()
    size = 1
    while size < width:
        half = (width // (2 * size), 2 * size)
        whole, given = (
            each.unflatten(-1, half).unflatten(-3, half).diagonal(0, -4, -2).movedim(-1, -3)
            for each in (inverse, lower)
        )
        first, second = slice(size), slice(size, 2 * size)
        product = whole[..., second, second] @ given[..., second, first] @ whole[..., first, first]
        whole[..., second, first] = -product
        size *= 2
    return inverse


def delta_rule_gates(a: Tensor, b: Tensor, factor: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.delta_rule_gates`. torch's sigmoid computes in float32, and rounds once."""
    return functional.softplus(a.float() + dt_bias) * factor, torch.sigmoid(b)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`hal.ops.gated_rms_norm`. torch's norm computes in float32."""
    normed = functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * functional.silu(gate.float())).to(x.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """See :func:`hal.ops.l2_norm`. It is torch's norm by the mean of squares, of which there are ``width``."""
    width = x.shape[-1]
    normed = functional.rms_norm(x.float(), (width,), None, eps / width)
    return (normed / math.sqrt(width)).to(x.dtype)


KERNELS: dict[str, Kernel] = {
    "causal_conv1d": causal_conv1d,
    "channel_delta_rule": delta_rule,
    "delta_rule_gates": delta_rule_gates,
    "gated_delta_rule": delta_rule,
    "gated_rms_norm": gated_rms_norm,
    "l2_norm": l2_norm,
}
"""Kernels by operation, for the canonical layout of states."""
