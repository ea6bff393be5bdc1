"""Tests for Triton's attention against the reference. Run by test_triton_kernels.py in a subprocess."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hal.backends.triton import KERNELS
from hal.backends.triton.attention import MAX_SPLITS, Tiles, attend, blocks, splits, tiles
from helpers.attending import paged_sample as drawn
from helpers.triton_checking import DEVICE, DTYPES, by_turns, check, every_dtype
from torch import Tensor

from hal import ops
from hal.errors import OperationError
from hal.ops import AttentionOptions, Draw

BLOCK = 8


def cut(tiling: Tiles, parts: int) -> Any:
    """Return the kernel with a fixed split of the work, in place of the heuristic's."""

    def kernel(*arguments: Any) -> Tensor:
        return attend(*arguments[:6], *arguments[8:], tiling, parts)

    return kernel


agree = partial(check, "paged_attention", sides=("after",))
"""One run, with protected memory at the tensors' ends, because the interpreter is slow."""


@every_dtype
def test_declared_samples(dtype: torch.dtype) -> None:
    """Each in one dtype; the conformance suite has all of them, on a GPU."""
    samples = list(ops.operation("paged_attention").samples(Draw(dtype, seed=0)))[DTYPES.index(dtype) :: 3]
    for sample in samples:
        agree(dtype, sample)
    assert len(samples) > 1


@every_dtype
def test_runs_agree_bit_by_bit(dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=1)
    for parts in (1, 3):
        check("paged_attention", dtype, drawn(draw, [1, 1], [37, 50]), cut(Tiles(1, 16, 16, 4, 2), parts))
    check("paged_attention", dtype, drawn(draw, [5, 9], [37, 9]))


@by_turns(("parts", "softcap"), [(1, None), (3, None), (1, 2.0), (3, 2.0)])
def test_softcaps_and_sinks(parts: int, softcap: float | None, dtype: torch.dtype) -> None:
    """A sink joins the softmax once, however many parts the keys have; an empty sequence returns 0."""
    draw = Draw(dtype, seed=3)
    for new, lengths, given in (
        ([1, 1, 1], [37, 0, 50], {"sinks": True}),
        ([1, 1], [37, 9], {"sinks": True, "window": 4}),
        ([5, 9], [37, 9], {"sinks": True, "causal": False}),
        ([2, 1], [20, 9], {}),
    ):
        tiling = Tiles(1 if max(new) == 1 else 4, 16, 16, 4, 2)
        sample = drawn(draw, new, lengths, heads=(4, 2), softcap=softcap, **given)
        agree(dtype, sample, cut(tiling, parts))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("first", ["query", "key"])
def test_infinities_are_neither_hidden_nor_spread(first: str, parts: int) -> None:
    """A row of scores that are all minus infinity gives NaN; if only some are, the result is that of the other keys."""
    draw = Draw(torch.float32, seed=5)
    sample = drawn(draw, [1, 1, 1], [1, 37, 50])
    query, key_cache, _, table = sample[:4]
    if first == "query":
        query[:, :, 0] = float("inf")
        key_cache[..., 0] = -1.0
    else:
        query[..., 0] = 1.0
        key_cache[table.long()[1:, :3], :, :, 0] = float("-inf")  # the first blocks of two sequences
    kernel = cut(Tiles(1, 16, 16, 4, 2), parts)
    if first == "key":
        agree(torch.float32, sample, kernel)
        return
    assert torch.isnan(ops.operation("paged_attention").reference(*sample)).all()
    assert torch.isnan(kernel(*(each.to(DEVICE) if isinstance(each, Tensor) else each for each in sample))).all()


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1), (14, 2), (8, 1), (20, 1)], ids=str)
def test_any_group(heads: tuple[int, int]) -> None:
    draw = Draw(torch.float32, seed=heads[0])
    agree(torch.float32, drawn(draw, [1, 1], [13, 30], heads=heads))
    agree(torch.float32, drawn(draw, [3, 17], [3, 30], heads=heads))


@by_turns("head_dim", [8, 80, 256])
def test_any_head_size(head_dim: int, dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=head_dim)
    agree(dtype, drawn(draw, [5, 2], [40, 9], head_dim=head_dim))
    agree(dtype, drawn(draw, [1, 1], [40, 70], head_dim=head_dim), cut(Tiles(1, 16, 16, 4, 2), 2))


@pytest.mark.parametrize("block_size", [1, 7, 16, 48])
def test_lengths_at_the_edges_of_blocks(block_size: int) -> None:
    draw = Draw(torch.float32, seed=block_size)
    lengths = [length for length in (1, block_size - 1, block_size, block_size + 1, 2 * block_size) if length]
    ones = [1] * len(lengths)
    agree(torch.float32, drawn(draw, ones, lengths, block_size=block_size, spare=0))
    agree(torch.float32, drawn(draw, lengths, lengths, block_size=block_size, spare=0))
    agree(torch.float32, drawn(draw, ones, lengths, block_size=block_size, integers=torch.int64))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_lengths_at_the_edges_of_tiles_and_parts(parts: int) -> None:
    draw = Draw(torch.float32, seed=parts)
    lengths = [15, 16, 17, 31, 32, 33, 48, 49, 64, 65]
    agree(torch.float32, drawn(draw, [1] * 10, lengths), cut(Tiles(1, 16, 16, 4, 2), parts))
    agree(torch.float32, drawn(draw, [7, 8, 9, 33], [15, 16, 33, 33]), cut(Tiles(8, 16, 16, 4, 2), parts))


@pytest.mark.parametrize("window", [1, 2, 7, BLOCK, 16, 100])
def test_windows(window: int) -> None:
    draw = Draw(torch.float32, seed=window)
    for causal in (True, False):
        agree(torch.float32, drawn(draw, [1, 1, 1], [40, 7, 17], window=window, causal=causal))
    agree(torch.float32, drawn(draw, [20, 3], [37, 3], window=window), cut(Tiles(8, 16, 16, 4, 2), 1))
    agree(torch.float32, drawn(draw, [1, 1], [60, 17], window=window), cut(Tiles(1, 16, 16, 4, 2), 3))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("queries", [1, 4])
def test_padding(queries: int, parts: int) -> None:
    """Empty sequences, sequences without queries, and padding tokens all give 0."""
    draw, kernel = Draw(torch.float32, seed=parts), cut(Tiles(queries, 16, 16, 4, 2), parts)
    found = agree(torch.float32, drawn(draw, [1, 1, 1, 1], [33, 0, 5, 0], padding=3), kernel)
    assert not found[[1, 3, 4, 5, 6]].any()
    found = agree(torch.float32, drawn(draw, [0, 5, 0, 1, 0], [9, 21, 0, 1, 0], padding=2), kernel)
    assert not found[6:].any()
    found = agree(torch.float32, drawn(draw, [2, 3], [0, 0], padding=1), kernel)
    assert not found.any()
    agree(torch.float32, drawn(draw, [0, 0], [9, 0]), kernel)  # no tokens


def test_more_parts_than_keys() -> None:
    agree(torch.float32, drawn(Draw(seed=0), [1], [37]), cut(Tiles(1, 16, 16, 4, 2), MAX_SPLITS))


def test_more_sequences_than_are_looked_at_together() -> None:
    draw = Draw(torch.float32, seed=0)
    lens = [1 + index % 3 for index in range(140)]
    for tiling in (Tiles(1, 16, 16, 4, 2), Tiles(2, 16, 16, 4, 2)):
        sample = drawn(draw, [index % 4 // 3 for index in range(140)], lens, head_dim=16, spare=0)
        agree(torch.float32, sample, cut(tiling, 1))


@pytest.mark.parametrize("seed", range(6), ids="seed={}".format)
def test_random_batches(seed: int) -> None:
    """For any lengths and any split of the work."""
    dtype = DTYPES[seed % 3]
    draw = Draw(dtype, seed=100 + seed)

    def pick(*choices: Any) -> Any:
        return choices[int(draw.integers(0, len(choices), 1))]

    count = pick(1, 2, 4)
    query_lens = [int(draw.integers(0, 8, 1)) for _ in range(count)]
    kv_lens = [new + int(draw.integers(0, 40, 1)) for new in query_lens]
    sample = drawn(
        draw,
        query_lens,
        kv_lens,
        heads=pick((2, 2), (3, 1), (5, 1)),
        head_dim=pick(16, 40, 64),
        block_size=pick(4, 5, 16),
        window=pick(None, 1, 9, 33),
        causal=pick(True, True, False),
        padding=pick(0, 1, 5),
    )
    group = sample[0].shape[1] // sample[1].shape[2]
    rows = pick(16, 32)
    agree(dtype, sample, cut(Tiles(pick(1, rows // group), rows, pick(16, 32), 4, 2), pick(1, 2)))
    agree(dtype, sample)


def test_large_scores() -> None:
    """Scores of which nearly all underflow in softmax; a later tile holds the largest, so sums are rescaled."""
    draw = Draw(torch.float16, seed=1)
    sample = drawn(draw, [1, 4], [50, 50])
    for row in sample[3].long():
        for block, page in enumerate(row):
            sample[1][page] *= float(block)
    agree(torch.float16, (*sample[:9], AttentionOptions(5.0)), cut(Tiles(1, 16, 16, 4, 2), 1))
    agree(torch.float16, (*sample[:9], AttentionOptions(5.0)), cut(Tiles(1, 16, 16, 4, 2), 3))


def test_the_cut_depends_on_shapes_alone_and_covers_all_lengths() -> None:
    for tokens, sequences, group in ((1, 1, 1), (64, 64, 8), (9, 4, 5), (8192, 3, 7), (100, 2, 71)):
        for width, itemsize in ((64, 2), (128, 2), (256, 2), (128, 4)):
            tiling = tiles(tokens, sequences, group, width, itemsize)
            assert tiling.queries == 1 if tokens <= sequences else tiling.queries >= 1
            assert tiling.queries * group <= tiling.rows
            assert min(tiling.rows, tiling.keys) >= 16
            # The last sequence's first block and the padding tokens, with the lengths that need most blocks.
            ones = tokens // tiling.queries + sequences if tiling.queries > 1 else tokens - 1
            assert ones < blocks(tokens, sequences, tiling.queries)
    assert splits(8, 4096, 132) == 16  # one long sequence: a part has at least 256 keys
    assert splits(8, 100, 132) == 1
    assert splits(1000, 4096, 132) == 1  # the device is full
    assert splits(1, 10**6, 132) == MAX_SPLITS
    assert splits(0, 4096, 132) >= 1


def test_what_does_not_fit_is_refused() -> None:
    sample = list(drawn(Draw(seed=0), [1, 1], [5, 6], heads=(4, 2)))
    wrong = {
        0: sample[0][..., :32],
        1: sample[1][:, :, :, :32],
        2: sample[2][:-1],
        3: sample[3].float(),
        4: sample[4][1:],
        5: sample[5][1:],
    }
    wrong_heads = sample[0][:, :3]
    for place, tensor in [*wrong.items(), (0, wrong_heads), (1, sample[1].half()), (1, sample[1].transpose(0, 1))]:
        arguments = [each.to(DEVICE) if isinstance(each, Tensor) else each for each in sample]
        arguments[place] = tensor.to(DEVICE)
        with pytest.raises(OperationError, match="paged_attention was given"):
            KERNELS["paged_attention"](*arguments)
