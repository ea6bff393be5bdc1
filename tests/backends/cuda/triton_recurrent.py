"""Triton's kernels of recurrent layers against the references. test_triton_kernels.py runs this in a separate process.

The interpreter takes its time: `make test` runs what is not marked as thorough.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hal.backends.triton import KERNELS
from hal.backends.triton.recurrent.delta_rule import advance
from helpers.triton_checking import DEVICE, DTYPES, RECURRENT, check, every_dtype, further, moved
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.errors import OperationError
from hal.ops import Draw, Sample

agree = partial(check, sides=("after",))
"""In one run, between fences at the tensors' ends."""


@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_some_declared_samples(name: str) -> None:
    dtype = DTYPES[len(name) % 3]
    cases = [*ops.operation(name).samples(Draw(dtype, seed=1))]
    for sample in cases[::2]:
        agree(name, dtype, sample)
    assert len(cases) > 4


@every_dtype
@further
@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_declared_samples(name: str, dtype: torch.dtype) -> None:
    cases = 0
    for sample in ops.operation(name).samples(Draw(dtype, seed=0)):
        check(name, dtype, sample)
        cases += 1
    assert cases > 4


def steps(draw: Draw, lengths: Sequence[int], saves: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Slots to read and to write, the last of which is that of the read, and the starts of sequences."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    slots = draw.permutation(len(lengths) * (saves + 1))
    write = slots[: len(lengths) * saves].view(len(lengths), saves).clone() if saves else None
    read = slots[-len(lengths) :].clone()
    if write is not None:
        write[:, -1] = read
    return read, write, starts, starts


def rule(
    draw: Draw,
    lengths: Sequence[int],
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (16, 16),
    saves: int = 0,
    rate: float = 0.1,
) -> Sample:
    tokens, (key_heads, value_heads), (key_dim, value_dim) = sum(lengths), heads, dims
    query_key = functional.normalize(draw.normal(tokens, 2 * key_heads, key_dim).float(), dim=-1).to(draw.dtype)
    return (
        *query_key.chunk(2, dim=1),
        draw.normal(tokens, value_heads * value_dim + 8)[:, 8:].unflatten(1, (-1, value_dim)),
        -draw.normal(tokens, value_heads).float().abs() * rate,
        torch.sigmoid(draw.normal(tokens, value_heads).float()).to(draw.dtype),
        draw.normal(len(lengths) * (saves + 1), value_heads, value_dim, key_dim).float(),
        *steps(draw, lengths, saves),
        key_dim**-0.5,
    )


def in_chunks(*arguments: Any) -> Tensor:
    """The kernel with chunks for any lengths: in the interpreter in any dtype, and on a GPU as the driver has them."""
    chunks = DEVICE.type == "cpu" or arguments[0].dtype is not torch.float32
    return advance(*arguments[:9], arguments[10], chunks)


class TestDeltaRule:
    """Token by token and by chunks of 64 tokens."""

    @pytest.mark.parametrize(("lengths", "saves"), [([9, 64, 0, 1], 0), ([65, 8, 130], 0), ([67, 2, 64], 3)], ids=str)
    def test_any_lengths(self, lengths: list[int], saves: int) -> None:
        sample = rule(Draw(seed=sum(lengths)), lengths, saves=saves, dims=(16, 24))
        agree("gated_delta_rule", torch.float32, sample, in_chunks)

    @further
    @pytest.mark.parametrize("saves", [0, 1, 2, 10, 70])
    @pytest.mark.parametrize("length", [1, 9, 63, 64, 65, 127, 128, 129, 200])
    def test_every_length_about_a_chunk(self, length: int, saves: int) -> None:
        draw = Draw(seed=length + saves)
        for kernel in (KERNELS["gated_delta_rule"], in_chunks):
            agree("gated_delta_rule", torch.float32, rule(draw, [length, 3], saves=saves), kernel)
        half = rule(Draw(torch.float16, seed=length), [3, length], saves=saves)
        agree("gated_delta_rule", torch.float16, half)

    @every_dtype
    @further
    @pytest.mark.parametrize(
        ("heads", "dims"), [((1, 1), (7, 5)), ((3, 6), (24, 40)), ((2, 2), (64, 16)), ((1, 4), (128, 128))], ids=str
    )
    def test_heads_of_any_shape(self, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
        draw = Draw(dtype, seed=heads[1])
        for lengths in ([1, 1, 1], [70, 2]):
            agree("gated_delta_rule", dtype, rule(draw, lengths, heads, dims))
            if dtype is torch.float32:
                agree("gated_delta_rule", dtype, rule(draw, lengths, heads, dims), in_chunks)

    @pytest.mark.parametrize("rate", [0.0, 30.0])
    def test_keys_that_repeat(self, rate: float) -> None:
        """Sums of powers of their products would overflow. States that decay at once leave no NaN."""
        query, key, value, decay, beta, *others = rule(Draw(seed=3), [150], rate=rate)
        sample = (query, key[:1].expand_as(key), value, decay, torch.ones_like(beta), *others)
        agree("gated_delta_rule", torch.float32, sample, in_chunks)

    def test_padding_tokens_write_no_state(self) -> None:
        """Those past the last sequence, and sequences without tokens."""
        for kernel in (KERNELS["gated_delta_rule"], in_chunks):
            sample = moved(rule(Draw(seed=4), [70, 0, 12]))
            sample[8] = torch.tensor([0, 70, 70, 71], dtype=torch.int32, device=DEVICE)
            before = sample[5].clone()
            kernel(*sample)
            untouched = sample[6][1].long()
            assert torch.equal(sample[5][untouched], before[untouched])
            wanted = [each.cpu() if isinstance(each, Tensor) else each for each in sample]
            wanted[5] = before.cpu()
            for place in range(5):
                wanted[place] = wanted[place][:71]
            wanted[9] = wanted[8]
            ops.operation("gated_delta_rule").reference(*wanted)
            torch.testing.assert_close(sample[5].cpu(), wanted[5], rtol=1e-4, atol=1e-4)

    def test_a_sequence_is_its_own(self) -> None:
        """NaN in one does not reach others."""
        for kernel in (KERNELS["gated_delta_rule"], in_chunks):
            sample = moved(rule(Draw(seed=5), [66, 3, 65]))
            sample[2][67] = float("nan")
            found = kernel(*sample)
            assert found[67:69].isnan().all()
            assert found[:66].isfinite().all()
            assert found[69:].isfinite().all()
            broken = sample[5].isnan().flatten(1).any(1)
            assert broken.nonzero().flatten().tolist() == [int(sample[6][1])]


class TestConvolution:
    """The convolution and its windows."""

    def sample(
        self, draw: Draw, lengths: Sequence[int], channels: int, width: int, saves: int, *, bias: bool = False
    ) -> Sample:
        return (
            draw.normal(sum(lengths), channels + 8)[:, 3:-5],
            draw.normal(width, channels),
            draw.normal(channels) if bias else None,
            draw.normal(len(lengths) * (saves + 1), width - 1, channels),
            *steps(draw, lengths, saves),
            bias,
        )

    @pytest.mark.parametrize(("lengths", "saves"), [([40, 1, 0, 17], 0), ([2, 1, 3], 4)], ids=str)
    def test_any_lengths(self, lengths: list[int], saves: int) -> None:
        dtype = DTYPES[len(lengths) % 3]
        agree("causal_conv1d", dtype, self.sample(Draw(dtype, seed=1), lengths, 200, 4, saves))

    @every_dtype
    @further
    @pytest.mark.parametrize("width", [2, 3, 4, 6, 9])
    @pytest.mark.parametrize("saves", [0, 1, 3, 6])
    def test_every_length_about_a_block(self, width: int, saves: int, dtype: torch.dtype) -> None:
        draw = Draw(dtype, seed=width)
        for length in (1, 2, 4, 5, 15, 16, 17, 33):
            sample = self.sample(draw, [length, 1, 3], 24, width, saves, bias=saves == 3)
            agree("causal_conv1d", dtype, sample)


@pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)
def test_gates_beyond_the_range_of_their_exponentials(dtype: torch.dtype) -> None:
    steep = torch.tensor([[-300.0, -30.0, -9.0, 0.0, 9.0, 19.0, 21.0, 300.0]], dtype=dtype)
    sample = (steep, steep, -torch.ones(8), torch.zeros(8))
    decay, _ = agree("delta_rule_gates", dtype, sample)
    wanted = -functional.softplus(steep.double())
    torch.testing.assert_close(decay.cpu().double(), wanted, rtol=1e-5, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    draw = Draw(seed=0)
    query, key, value, decay, beta, state, read, _, starts, host, scale = rule(draw, [2, 1])
    rest = read, None, starts, host, scale
    x, weight, window = draw.normal(3, 8), draw.normal(4, 8), draw.normal(2, 3, 8)
    tail = None, starts, host, True
    for name, sample in (
        ("gated_delta_rule", (query, key[:2], value, decay, beta, state, *rest)),
        ("gated_delta_rule", (query, key, value[:, :1].expand(-1, 3, -1), decay, beta, state, *rest)),
        ("gated_delta_rule", (query, key, value, decay.half(), beta, state, *rest)),
        ("gated_delta_rule", (query, key, value, decay, beta, state.transpose(2, 3)[:, :, :, :8], *rest)),
        ("gated_delta_rule", (query, key, value, decay, beta, state.half(), *rest)),
        ("gated_delta_rule", (query, key, value, decay, beta, state, read.long(), *rest[1:])),
        ("gated_delta_rule", (query, key, value, decay, beta, state, read, None, starts[:2], host, scale)),
        ("causal_conv1d", (x, weight[:, :7], None, window, read, *tail)),
        ("causal_conv1d", (x, weight, None, window[:, :2], read, *tail)),
        ("causal_conv1d", (x, weight, x[0, :7], window, read, *tail)),
        ("causal_conv1d", (x, weight, None, window.half(), read, *tail)),
        ("causal_conv1d", (x, weight, None, window, read[:1], *tail)),
        ("gated_rms_norm", (x, x[:2], x[0], 1e-6)),
        ("gated_rms_norm", (x, x, x[0, :7], 1e-6)),
        ("delta_rule_gates", (x, x[:, :7], x[0], x[0])),
        ("delta_rule_gates", (x, x, x[0].half(), x[0])),
        ("l2_norm", (x.int(), 1e-6)),
    ):
        with pytest.raises(OperationError, match=f"{name} was given"):
            KERNELS[name](*moved(sample))
