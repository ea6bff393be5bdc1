"""Tests for attention of the emulated CANN, through the real torch_npu, against float64 on the CPU.

They combine layouts, paged caches, masks, head groups and lengths, including 0, as far as the interfaces allow.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import emulated_cann
import pytest
import torch
import torch_npu
from helpers.thorough import EXHAUSTIVE, thorough
from support.fused_draw import HALVES, ROUNDING, Draw, soil_memory
from support.fused_references import attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SEEDS = (0, 1)


@functools.cache
def causal_template() -> Tensor:
    """Return the fixed-size mask that sparse modes 2, 3 and 4 take for any lengths."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()


@attrs.define
class Batch:
    """Random sequences, and the arguments of calls on them."""

    draw: Draw
    heads: int
    kv_heads: int
    dim: int
    query_lengths: Sequence[int]
    key_lengths: Sequence[int]
    queries: list[Tensor] = attrs.field(init=False)
    keys: list[Tensor] = attrs.field(init=False)
    values: list[Tensor] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        normal = self.draw.normal
        self.queries = [normal(self.heads, length, self.dim) for length in self.query_lengths]
        self.keys = [normal(self.kv_heads, length, self.dim) for length in self.key_lengths]
        self.values = [normal(self.kv_heads, length, self.dim) for length in self.key_lengths]

    def padded(self, parts: Sequence[Tensor], rows: int) -> Tensor:
        """Return [B, N, rows, D]; padding is random, not zero."""
        full = self.draw.normal(len(parts), parts[0].shape[0], rows, self.dim)
        for one, part in zip(full, parts, strict=True):
            one[:, : part.shape[1]] = part
        return full

    def laid_out(self, parts: Sequence[Tensor], layout: str, rows: int) -> Tensor:
        """Return one tensor in an input layout, on the NPU."""
        if layout == "TND":
            return torch.cat(list(parts), 1).transpose(0, 1).contiguous().npu()
        if layout == "NTD":
            return torch.cat(list(parts), 1).npu()
        full = self.padded(parts, rows)
        return from_heads(full, layout).contiguous().npu()

    def paged(self, parts: Sequence[Tensor], table: Tensor, blocks: int, block: int, kind: str) -> Tensor:
        """Return the paged cache with the blocks of the table; other blocks are random."""
        cache = self.draw.normal(blocks, block, self.kv_heads, self.dim)
        for row, part in zip(table.long(), parts, strict=True):
            for start in range(0, part.shape[1], block):
                piece = part[:, start : start + block].transpose(0, 1)
                cache[row[start // block], : piece.shape[0]] = piece
        if kind == "BBH":
            return cache.flatten(2).npu()
        if kind == "BNBD":
            return cache.transpose(1, 2).contiguous().npu()
        return cache.permute(0, 2, 1, 3).unflatten(-1, (-1, 16)).transpose(2, 3).contiguous().npu()  # as FRACTAL_NZ

    def hidden(self, sparse: int, before: int, after: int, masks: Sequence[Tensor] | None) -> Iterator[Tensor]:
        """Return which keys each query of a sequence must not attend to."""
        for i, (queries, keys) in enumerate(zip(self.query_lengths, self.key_lengths, strict=True)):
            row, column = torch.arange(queries)[:, None], torch.arange(keys)[None]
            shifted = row + (keys - queries if sparse >= 3 else 0)
            band = (column > shifted + after) | (column < shifted - before)
            if sparse in (2, 3):
                band = column > shifted
            own = masks[i][:queries, :keys] if masks is not None else torch.zeros(queries, keys, dtype=torch.bool)
            if masks is None and sparse == 0:
                band = torch.zeros_like(own)
            yield own if sparse == 1 else own | band


def from_heads(full: Tensor, layout: str) -> Tensor:
    """Convert [B, N, S, D] to another layout."""
    if layout == "BSH":
        return full.transpose(1, 2).flatten(2)
    return full.permute({"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "NBSD": (1, 0, 2, 3)}[layout])


def to_heads(output: Tensor, layout: str, heads: int) -> Tensor:
    """Convert a layout to [B, N, S, D] or [N, T, D]."""
    if layout == "BSH":
        return output.unflatten(2, (heads, -1)).transpose(1, 2)
    if layout in ("BNSD", "NTD"):
        return output
    return output.permute({"BSND": (0, 2, 1, 3), "NBSD": (1, 0, 2, 3), "TND": (1, 0, 2)}[layout])


def compare(
    batch: Batch, layout: str, output: Tensor, lse: Tensor | None, hidden: Sequence[Tensor], scale: float, **more: Any
) -> None:
    bound = ROUNDING[batch.draw.dtype]
    found = to_heads(output.cpu().double(), layout, batch.heads)
    packed = layout in ("TND", "NTD")
    found_lse = None if lse is None else lse.cpu().squeeze(-1).T if packed else lse.cpu().squeeze(-1)
    start = 0
    for i, queries in enumerate(batch.query_lengths):
        own = {name: each[i] if isinstance(each, list) else each for name, each in more.items()}
        expected, expected_lse = attention(batch.queries[i], batch.keys[i], batch.values[i], scale, hidden[i], **own)
        one = found[:, start : start + queries] if packed else found[i, :, :queries]
        torch.testing.assert_close(one, expected, rtol=2 * bound, atol=2 * bound)
        if not packed:
            assert not found[i, :, queries:].any(), "rows beyond a sequence's length are zero"
        if found_lse is not None:
            one = found_lse[:, start : start + queries] if packed else found_lse[i, :, :queries]
            torch.testing.assert_close(one.double(), expected_lse, rtol=1e-4, atol=1e-4)
        start += queries


MASKS = ("none", "full", "all", "left", "right", "band")
SPARSE = {"none": 0, "full": 0, "all": 1, "left": 2, "right": 3, "band": 4}


OF_VERSION = {
    1: ("", "num_heads", "scale", "softmax_lse_flag", "actual_seq_lengths_kv"),
    2: ("_v2", "num_query_heads", "softmax_scale", "return_softmax_lse", "actual_seq_kvlen"),
}
"""The suffix of a version of the function, and its names of heads, scale, whether to return lse, and lengths."""


def run(
    layout: str,
    mask: str,
    cache: str | None,
    heads: tuple[int, int],
    decode: bool,
    *,
    dtype: torch.dtype,
    seed: int,
    version: int,
) -> None:
    name = f"{layout} {mask} {cache} {heads} {decode} {version}"
    draw = Draw(name, dtype, seed)
    source, _, target = layout.partition("_")
    packed = source in ("TND", "NTD")
    count, rows = draw.between(1, 4), 1 if decode else draw.between(2, 12)
    block = 16 * draw.between(1, 4) if decode or packed else 128
    key_rows = draw.between(1, 3 * block) if cache else draw.between(rows, 40)
    if packed:
        lengths = [1 if decode else draw.between(0, rows) for _ in range(count)]
    else:
        lengths = [rows if decode else draw.between(0, rows) for _ in range(count)]
    least = 1 if packed and cache else 0
    key_lengths = [draw.between(least, key_rows), *(draw.between(0, key_rows) for _ in range(count - 1))]
    any_width = layout == "TND" and mask != "left" and cache != "BNBD"
    dims = [80, 192, 256] if any_width else [64, 128] if packed or cache == "BNDB" else [16, 64, 128]
    batch = Batch(draw, *heads, draw.choice(dims), lengths, key_lengths)
    sparse, before, after = SPARSE[mask], draw.between(-2, 6), draw.between(0, 6)
    masks = None
    columns = 3 * block if cache else key_rows
    arguments: dict[str, Any] = {}
    if mask in ("full", "all"):
        drawn = torch.rand(count, rows, columns + 3, generator=draw.generator) < 0.3
        masks = list(drawn)
        arguments["atten_mask"] = (drawn.squeeze(1) if decode and draw.below(2) else drawn.unsqueeze(1)).npu()
    elif sparse:
        arguments["atten_mask"] = causal_template()
    if mask in ("full", "band"):
        arguments |= {"pre_tokens": before, "next_tokens": after}
    if cache:
        blocks = 3 * count + 2
        table = draw.permutation(blocks)[: 3 * count].view(count, 3).to(torch.int32)
        key = batch.paged(batch.keys, table, blocks, block, cache)
        value = batch.paged(batch.values, table, blocks, block, cache)
        arguments |= {"block_table": table.npu(), "block_size": block}
    else:
        key, value = (batch.laid_out(parts, source, key_rows) for parts in (batch.keys, batch.values))
    query_lengths: list[int] | None = None if decode and not packed else list(lengths)
    if packed:
        query_lengths = list(itertools.accumulate(lengths))
        key_lengths = key_lengths if cache else list(itertools.accumulate(key_lengths))
    query, scale = batch.laid_out(batch.queries, source, rows), draw.choice([0.1, 0.25])
    soil_memory()
    suffix, *names = OF_VERSION[version]
    lengths_of = "actual_seq_lengths" if version == 1 else "actual_seq_qlen"
    arguments |= dict(zip(names, (heads[0], scale, True, key_lengths), strict=True)) | {lengths_of: query_lengths}
    output, lse = getattr(torch_npu, f"npu_fused_infer_attention_score{suffix}")(
        query, key, value, num_key_value_heads=heads[1], input_layout=layout, sparse_mode=sparse, **arguments
    )
    if decode and not packed:  # with one query per sequence, modes and bands have no effect
        hidden = list(batch.hidden(1 if masks else 0, 0, 0, masks))
    else:
        hidden = list(batch.hidden(sparse, before, after, masks))
    compare(batch, target or source, output, lse, hidden, scale)


LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "TND", "NTD", "NTD_TND", "TND_NTD")
COMBINED = [
    (layout, mask, cache, heads, decode)
    for layout, mask, cache, heads, decode in itertools.product(
        LAYOUTS, MASKS, (None, "BBH", "BNBD", "BNDB"), ((4, 4), (8, 2)), (False, True)
    )
    # Refused: see test_fused_refusals.py.
    if not (layout[0] in "TN" and mask in ("full", "all")) and not (cache == "BNBD" and layout.startswith("BS"))
]
random.Random(2).shuffle(COMBINED)
PART = len(COMBINED) // 4
"""How many combinations are in a part. Each pair of values occurs in the first."""


@thorough(EXHAUSTIVE, r"\[[1-9]-")
@pytest.mark.parametrize("combined", COMBINED, ids=[f"{n // PART}-{each}" for n, each in enumerate(COMBINED)])
def test_fused_inference(combined: tuple[str, str, str | None, tuple[int, int], bool]) -> None:
    number = COMBINED.index(combined)
    run(*combined, dtype=HALVES[number % 2], seed=number // 2 % 2, version=1 + number // 4 % 2)


def test_each_pair_occurs_in_the_first_part() -> None:
    for first, second in itertools.combinations(range(5), 2):
        pairs, found = ({(each[first], each[second]) for each in of} for of in (COMBINED, COMBINED[:PART]))
        assert pairs == found


@pytest.mark.parametrize("layout", LAYOUTS[:-1])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_a_captured_log_sum_exp_is_the_eager_one(layout: str, version: int, given: bool) -> None:
    draw, source = Draw(f"captured lse {layout} {version}", torch.bfloat16, 0), layout.partition("_")[0]
    batch = Batch(draw, 4, 2, 64, [3, 3], [9, 9])
    tensors = [batch.laid_out(p, source, n) for p, n in ((batch.queries, 3), (batch.keys, 9), (batch.values, 9))]
    lengths = ([3, 6], [9, 18]) if source in ("TND", "NTD") else ([3, 2], [9, 7])
    suffix, *names = OF_VERSION[version]
    names.insert(3, "actual_seq_lengths" if version == 1 else "actual_seq_qlen")
    operation = getattr(torch_npu, f"npu_fused_infer_attention_score{suffix}")
    arguments = dict(zip(names, (4, 0.125, True, *lengths), strict=True))
    arguments |= {"num_key_value_heads": 2, "input_layout": layout}
    expected = operation(*tensors, **arguments)
    out, graph = [torch.full_like(each, torch.nan) for each in expected], torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        result = operation.out(*tensors, **arguments, out=out) if given else operation(*tensors, **arguments)
    graph.update(cpu_update_input=[{name: arguments[name] for name in names[3:]}])
    graph.replay()
    for found, one in zip(result, expected, strict=True):
        torch.testing.assert_close(found.cpu(), one.cpu(), rtol=0, atol=0)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_without_the_flag_a_log_sum_exp_that_is_given_is_left_as_it_is(captured: bool) -> None:
    """Source: aclnnFusedInferAttentionScoreV3.md, CANN 9.1, softmaxLse if softmaxLseFlag is false."""
    batch = Batch(Draw("no lse", torch.float16, 0), 4, 2, 64, [3, 3], [9, 9])
    tensors = [batch.laid_out(p, "BNSD", n) for p, n in ((batch.queries, 3), (batch.keys, 9), (batch.values, 9))]
    output, lse = torch.full_like(tensors[0], torch.nan), torch.full((1,), 7, dtype=torch.float16, device="npu")
    arguments = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.125, "input_layout": "BNSD"}
    arguments |= {"actual_seq_lengths_kv": [9, 7], "out": [output, lse]}
    if captured:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            torch_npu.npu_fused_infer_attention_score.out(*tensors, **arguments)
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [9, 7]}])
        graph.replay()
    else:
        torch_npu.npu_fused_infer_attention_score.out(*tensors, **arguments)
    assert lse.tolist() == [7]
    assert output.isfinite().all()


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize("seed", SEEDS, ids=["seed0", "seed1"])
@pytest.mark.parametrize("layout", ["BSH", "BNSD", "TND"])
def test_bias_or_sink(layout: str, seed: int) -> None:
    draw = Draw(f"bias {layout}", torch.bfloat16, seed)
    lengths, rows = ([4, 4], 4)
    batch = Batch(draw, 4, 2, 64, lengths, [9, 9])
    bias, sink = draw.normal(2, 4, rows, 9), draw.normal(4)
    packed = layout == "TND"
    output, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *(
            batch.laid_out(parts, layout, size)
            for parts, size in ((batch.queries, rows), (batch.keys, 9), (batch.values, 9))
        ),
        num_query_heads=4,
        num_key_value_heads=2,
        softmax_scale=0.125,
        input_layout=layout,
        return_softmax_lse=True,
        pse_shift=None if packed else bias.npu(),
        learnable_sink=sink.npu() if packed else None,
        actual_seq_qlen=[4, 8] if packed else None,
        actual_seq_kvlen=[9, 18] if packed else None,
    )
    hidden = list(batch.hidden(0, 0, 0, None))
    compare(
        batch, layout, output, lse, hidden, 0.125, bias=None if packed else list(bias), sink=sink if packed else None
    )


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize("seed", SEEDS, ids=["seed0", "seed1"])
@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_incremental_and_prompt(layout: str, seed: int) -> None:
    draw = Draw(f"older {layout}", torch.float16, seed)
    one = Batch(draw, 4, 2, 64, [1, 1], [draw.between(1, 20) for _ in range(2)])
    output = torch_npu.npu_incre_flash_attention(
        one.laid_out(one.queries, layout, 1),
        one.laid_out(one.keys, layout, 20),
        one.laid_out(one.values, layout, 20),
        num_heads=4,
        num_key_value_heads=2,
        scale_value=0.125,
        input_layout=layout,
        actual_seq_lengths=list(one.key_lengths),
    )
    compare(one, layout, output, None, list(one.hidden(0, 0, 0, None)), 0.125)
    many = Batch(draw, 4, 2, 64, [draw.between(1, 9) for _ in range(2)], [draw.between(1, 9) for _ in range(2)])
    output = torch_npu.npu_prompt_flash_attention(
        many.laid_out(many.queries, layout, 9),
        many.laid_out(many.keys, layout, 9),
        many.laid_out(many.values, layout, 9),
        num_heads=4,
        num_key_value_heads=2,
        scale_value=0.125,
        input_layout=layout,
        sparse_mode=3,
        atten_mask=causal_template(),
        actual_seq_lengths=list(many.query_lengths),
        actual_seq_lengths_kv=list(many.key_lengths),
    )
    compare(many, layout, output, None, list(many.hidden(3, 0, 0, None)), 0.125)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize("seed", SEEDS, ids=["seed0", "seed1"])
@pytest.mark.parametrize("version", OF_VERSION)
def test_out_with_a_workspace(version: int, seed: int) -> None:
    draw = Draw(f"out {version}", torch.float16, seed)
    batch = Batch(draw, 4, 2, 64, [1, 1], [draw.between(1, 20) for _ in range(2)])
    tensors = [batch.laid_out(p, "BSH", n) for p, n in ((batch.queries, 1), (batch.keys, 20), (batch.values, 20))]
    shared = {"num_key_value_heads": 2, "input_layout": "BSH"}
    suffix, *names = OF_VERSION[version]
    given = dict(zip(names, (4, 0.125, True, list(batch.key_lengths)), strict=True))
    get_workspace = getattr(torch_npu, f"_npu_fused_infer_attention_score{suffix}_get_max_workspace")
    operation = getattr(torch_npu, f"npu_fused_infer_attention_score{suffix}").out
    workspace = get_workspace(*tensors, **given, **shared)
    assert workspace.numel() > 0
    output, lse = torch.full_like(tensors[0], torch.nan), torch.full((2, 4, 1, 1), torch.nan, device="npu")
    operation(*tensors, **given, **shared, workspace=workspace, out=[output, lse])
    compare(batch, "BSH", output, lse, list(batch.hidden(0, 0, 0, None)), 0.125)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize("seed", SEEDS, ids=["seed0", "seed1"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["float16", "bfloat16", "float32"]
)
@pytest.mark.parametrize("mask", ["none", "causal", "rows", "batch", "heads"])
def test_scaled_dot_product(mask: str, dtype: torch.dtype, seed: int) -> None:
    draw = Draw(f"sdpa {mask}", dtype, seed)
    count, heads, kv_heads, rows, keys = (
        draw.between(1, 3),
        4,
        draw.choice([1, 2, 4]),
        draw.between(2, 9),
        draw.between(2, 20),
    )
    shapes = [(count, heads, rows, 64), (count, kv_heads, keys, 64), (count, kv_heads, keys, 64)]
    query, key, value = (draw.normal(*shape) for shape in shapes)
    shape = {"rows": (rows, keys), "batch": (count, 1, rows, keys), "heads": (1, heads, rows, keys)}.get(mask)
    seen = None if shape is None else torch.rand(shape, generator=draw.generator) < 0.7
    if seen is not None:
        seen[..., 0] = True
    soil_memory()
    with emulated_cann.trace() as trace:
        result = scaled_dot_product_attention(
            draw.strided(query),
            draw.strided(key),
            draw.strided(value),
            attn_mask=None if seen is None else seen.npu(),
            is_causal=mask == "causal",
            enable_gqa=True,
        )
    assert trace.counts()["FlashAttentionScore"] == 1
    expected = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=seen, is_causal=mask == "causal", enable_gqa=True
    )
    bound = 2 * ROUNDING[dtype]
    torch.testing.assert_close(result.cpu().double(), expected, rtol=bound, atol=bound)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize("seed", SEEDS, ids=["seed0", "seed1"])
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD", "TND"])
@pytest.mark.parametrize("sparse", [0, 2, 3, 4])
def test_flash_attention(layout: str, sparse: int, seed: int) -> None:
    draw = Draw(f"flash {layout} {sparse}", torch.bfloat16, seed)
    before, after = draw.between(1, 6), draw.between(0, 3)
    lengths = [draw.between(1, 9), draw.between(1, 9)] if layout == "TND" else [7, 7]
    batch = Batch(draw, 4, 2, 32, lengths, [n + 3 for n in lengths])
    source = "BSH" if layout == "SBH" else layout
    tensors = [batch.laid_out(parts, source, parts[0].shape[1]) for parts in (batch.queries, batch.keys, batch.values)]
    if layout == "SBH":
        tensors = [each.transpose(0, 1).contiguous() for each in tensors]
    more: dict[str, Any] = (
        {"atten_mask": causal_template(), "pre_tockens": before, "next_tockens": after} if sparse else {}
    )
    if layout == "TND":
        ends = [lengths, [n + 3 for n in lengths]]
        more |= {
            name: list(itertools.accumulate(n))
            for name, n in zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True)
        }
    soil_memory()
    output, top, total, *_ = torch_npu.npu_fusion_attention(
        *tensors, 4, layout, scale=0.2, keep_prob=1.0, sparse_mode=sparse, **more
    )
    hidden = list(batch.hidden(sparse, before, after, None))
    found = output.transpose(0, 1) if layout == "SBH" else output
    lse = (top.cpu()[..., :1] + total.cpu()[..., :1].log()).npu()
    compare(batch, source, found, lse, hidden, 0.2)


def test_the_trace_counts_floating_point_operations() -> None:
    query, key = torch.ones(2, 1, 256, dtype=torch.float16).npu(), torch.ones(2, 20, 128, dtype=torch.float16).npu()
    with emulated_cann.trace() as trace:
        torch_npu.npu_fused_infer_attention_score(
            query,
            key,
            key,
            num_heads=4,
            num_key_value_heads=2,
            scale=1.0,
            input_layout="BSH",
            actual_seq_lengths_kv=[3, 20],
        )
    assert [each.flops for each in trace.ran()] == [2.0 * 4 * (3 + 20) * (64 + 64)]
