"""Tests of operators that engines call: ATB's attention and helpers, the MLA prolog, merges, sampling and hash routing.

Each is called through the real torch_npu and compared with float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import EXHAUSTIVE, thorough
from support import ROOT, TESTS
from support.children import ends_well, on_soc
from support.fused_draw import HALVES, Draw, Near, Pairs, Rounded, Same, case, check, parameters
from support.fused_references import attention, in_fractals, rms_norm, rope
from support.ones import f32, half, i8, i32
from support.refusals import Row
from torch import Tensor

pytestmark = pytest.mark.usefixtures("internal_formats")

FORMS = ("plain", "v2", "unpad", "unpad_v2")
PAGED_FORMS = ("qlens", "prefix_v2", "encoder")


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys).triu(keys - queries + 1).bool()


def seen(queries: int, keys: int) -> Tensor:
    return torch.zeros(queries, keys).bool()


def by_sequence(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, masked: bool) -> Tensor:
    """Return attention of packed sequences, [tokens, N, D]."""
    parts = []
    for one, keys, values in zip(*(each.split(lengths) for each in (query, key, value)), strict=True):
        hidden = (causal if masked else seen)(len(one), len(one))
        parts.append(attention(*(each.transpose(0, 1) for each in (one, keys, values)), scale, hidden)[0])
    return torch.cat([each.transpose(0, 1) for each in parts])


@case(*HALVES, form=FORMS, dims=((64, 64), (72, 72), (192, 128)))
def self_attention(draw: Draw, form: str, dims: tuple[int, int]) -> Pairs:
    kv_heads, lengths = draw.between(1, 2), [draw.between(1, 20) for _ in range(3)]
    heads, tokens, scale = kv_heads * draw.choice([1, 4]), sum(lengths), dims[0] ** -0.5
    query, key = draw.normal(tokens, heads, dims[0]), draw.normal(tokens, kv_heads, dims[0])
    value, out = draw.normal(tokens, kv_heads, dims[1]), torch.zeros(tokens, heads, dims[1], dtype=draw.dtype).npu()
    on_npu, lens = [each.npu() for each in (query, key, value)], torch.tensor(lengths, dtype=torch.int32)
    # The mask is added in float16; in bfloat16, it holds 1.
    mask = torch.ones(32, 32, dtype=draw.dtype).triu(1) * (1 if draw.dtype == torch.bfloat16 else -10000)
    if form == "plain":
        torch_npu._npu_flash_attention(*on_npu, mask.npu(), lens, scale, heads, kv_heads, out)
    elif form == "v2":
        given = {"mask": mask.npu(), "mask_type": 1, "scale_value": scale, "num_heads": heads, "num_kv_heads": kv_heads}
        torch_npu.atb._npu_flash_attention_v2(*on_npu, lengths, **given, out=out)
    elif form == "unpad":
        torch_npu._npu_flash_attention_unpad(*on_npu, lens, scale, heads, kv_heads, out)
    else:
        torch.ops.atb._npu_flash_attention_unpad_v2(*on_npu, lens, scale, heads, kv_heads, kernel_type=2, out=out)
    yield out, Near(by_sequence(query, key, value, lengths, scale, not form.startswith("unpad")), 2)


@case(*HALVES, form=PAGED_FORMS)
def attention_with_a_prefix(draw: Draw, form: str) -> Pairs:
    kv_heads, dim = draw.between(1, 2), draw.choice([64, 128])
    heads, queries = kv_heads * draw.choice([1, 4]), [draw.between(1, 9), draw.between(1, 140)]
    keys = [queries[0] + 128, queries[1]]
    query, caches = draw.normal(sum(queries), heads, dim), [draw.normal(6, 128, kv_heads, dim) for _ in range(2)]
    table, out = draw.permutation(6)[:4].view(2, 2).to(torch.int32), torch.zeros_like(query).npu()
    mask, scale = torch.ones(128, 128, dtype=draw.dtype).triu(1).npu(), dim**-0.5
    on_npu = [query.npu(), *(cache.npu() for cache in caches), table.npu()]
    lens = [torch.tensor(each, dtype=torch.int32) for each in (queries, keys)]
    if form == "qlens":
        torch_npu._npu_flash_attention_qlens(*on_npu, mask, *lens, kv_heads, heads, scale, out)
    elif form == "prefix_v2":
        given = {"num_kv_heads": kv_heads, "num_heads": heads, "scale_value": scale}
        torch_npu.atb._npu_flash_attention_prefix_v2(*on_npu, mask, queries, keys, **given, out=out)
    else:
        out = torch_npu.atb.npu_self_attention_prefix_encoder(*on_npu, queries, keys, heads, scale, kv_heads)
    parts = []
    for one, row, length in zip(query.split(queries), table.long(), keys, strict=True):
        found = [cache[row].flatten(0, 1)[:length].transpose(0, 1) for cache in caches]
        parts.append(attention(one.transpose(0, 1), *found, scale, causal(len(one), length))[0].transpose(0, 1))
    yield out, Near(torch.cat(parts), 2)


def rows_of(cache: Tensor, row: Tensor, length: int) -> Tensor:
    """Return a sequence's part of a cache [blocks, block_size, N, D] as [N, length, D]."""
    return cache[row.long()].flatten(0, 1)[:length].transpose(0, 1)


@case(*HALVES, form=("mla", "splitfuse", "alibi"))
def paged_attention(draw: Draw, form: str) -> Pairs:
    heads, queries = draw.choice([4, 8]), [1, 1] if form != "splitfuse" else [draw.between(1, 4), draw.between(1, 4)]
    lengths, kv_heads = [draw.between(5, 30), draw.between(5, 30)], 1 if form == "mla" else 2
    dim, value_dim = (576, 512) if form == "mla" else (64, 64)
    query, scale = draw.normal(sum(queries), heads, dim), dim**-0.5
    keys, values = draw.normal(6, 16, kv_heads, dim), draw.normal(6, 16, kv_heads, dim)
    table, lens = draw.permutation(6)[:4].view(2, 2).to(torch.int32), torch.tensor(lengths, dtype=torch.int32)
    out, bias = torch.zeros(sum(queries), heads, value_dim, dtype=draw.dtype).npu(), draw.normal(2, heads, 1, 32)
    masks = [causal(count, length).float() * -10000 for count, length in zip(queries, lengths, strict=True)]
    mask = torch.cat([torch.nn.functional.pad(each, (0, 32 - each.shape[1])) for each in masks]).to(draw.dtype)
    if form == "mla":
        values = keys[..., :512]
        torch_npu._npu_paged_attention_mla(
            query.npu(), keys.npu(), kv_heads, heads, scale, table.npu(), lens, value_dim, out
        )
    elif form == "splitfuse":
        counts = torch.tensor(queries, dtype=torch.int32)
        caches = query.npu(), keys.npu(), values.npu(), table.npu(), lens, mask.npu(), counts
        torch_npu._npu_paged_attention_splitfuse(*caches, kv_heads, heads, scale, out)
    else:
        given = {"num_kv_heads": kv_heads, "num_heads": heads, "scale_value": scale, "mask_type": 2, "mask": bias.npu()}
        given |= {"value_cache": values.npu(), "out": out}
        torch_npu.atb._npu_paged_attention_v2(query.npu(), keys.npu(), table.npu(), lengths, **given)
    parts = []
    for i, one in enumerate(query.split(queries)):
        found = [rows_of(cache, table[i], lengths[i]) for cache in (keys, values)]
        hidden = causal(len(one), lengths[i]) if form == "splitfuse" else seen(len(one), lengths[i])
        added = bias[i, ..., : lengths[i]] if form == "alibi" else None
        parts.append(attention(one.transpose(0, 1), *found, scale, hidden, added)[0].transpose(0, 1))
    yield out, Near(torch.cat(parts), 2)


@case(*HALVES, mode=("krope_ctkv", "nzcache"), calculation=("calc_type_undefined", "calc_type_spec", "calc_type_ring"))
def latent_attention(draw: Draw, mode: str, calculation: str) -> Pairs:
    heads, spec = draw.choice([2, 8]), calculation == "calc_type_spec"
    queries, lengths = [draw.between(1, 4) if spec else 1 for _ in range(2)], [draw.between(6, 30), draw.between(6, 30)]
    nope, turned, scale = draw.normal(sum(queries), heads, 512), draw.normal(sum(queries), heads, 64), 576**-0.5
    caches, table = [draw.normal(6, 16, 1, 512), draw.normal(6, 16, 1, 64)], draw.permutation(6)[:4].view(2, 2)
    given = [each.npu() if mode == "krope_ctkv" else in_fractals(each.flatten(2)).npu() for each in caches]
    if mode == "nzcache":
        given = [torch_npu.npu_format_cast(each, 29) for each in given]
    options = {"cache_mode": mode, "calc_type": calculation, **({"qseqlen": queries} if spec else {})}
    tensors = nope.npu(), turned.npu(), *given, table.to(torch.int32).npu(), lengths
    call = torch_npu.atb.npu_multi_head_latent_attention
    found = call(*tensors, heads, scale, 1, *([True] if calculation == "calc_type_ring" else []), **options)
    out, lse = found if isinstance(found, tuple) else (found, None)
    keys = torch.cat(caches, -1)
    parts, sums = [], []
    for one, row, length in zip(torch.cat([nope, turned], -1).split(queries), table, lengths, strict=True):
        inputs = one.transpose(0, 1), rows_of(keys, row, length), rows_of(caches[0], row, length)
        result, total = attention(*inputs, scale, (causal if spec else seen)(len(one), length))
        parts.append(result.transpose(0, 1))
        sums.append(total.transpose(0, 1))
    yield out, Near(torch.cat(parts), 2)
    if lse is not None:
        yield lse.float(), Near(torch.cat(sums)[..., None], 1000)


@case(*HALVES, masked=(False, True))
def ring_attention(draw: Draw, masked: bool) -> Pairs:
    """The second ring merges its keys with the result of the first."""
    heads, lengths = draw.choice([2, 4]), [draw.between(2, 9), draw.between(2, 9)]
    tokens, scale = sum(lengths), 192**-0.5
    nope, turned = draw.normal(tokens, heads, 128), draw.normal(tokens, heads, 64)
    rings = [[draw.normal(tokens, heads, dim) for dim in (128, 64, 128)] for _ in range(2)]
    mask, lens = torch.ones(512, 512, dtype=draw.dtype).triu(1).npu(), torch.tensor(lengths, dtype=torch.int32)
    found: dict[str, Any] = {}
    for i, ring in enumerate(rings):
        options = {"calc_type": "calc_type_first_ring" if i == 0 else "calc_type_default", **found}
        options |= {"mask_type": "mask_type_triu" if masked and i == 0 else "no_mask", "qk_scale": scale}
        tensors = nope.npu(), turned.npu(), *(each.npu() for each in ring), mask, lens, heads, heads
        out, lse = torch_npu.atb.npu_ring_mla(*tensors, **options)
        found = {"pre_out": out, "prev_lse": lse}
    parts, sums, start = [], [], 0
    for length in lengths:
        own = slice(start, start + length)
        first, second = ([each[own].transpose(0, 1) for each in ring] for ring in rings)
        keys = torch.cat([torch.cat(each[:2], -1) for each in (first, second)], 1)
        hidden = torch.cat([causal(length, length) if masked else seen(length, length), seen(length, length)], 1)
        query = torch.cat([nope[own], turned[own]], -1).transpose(0, 1)
        result, total = attention(query, keys, torch.cat([first[2], second[2]], 1), scale, hidden)
        parts.append(result.transpose(0, 1))
        sums.append(total)
        start += length
    yield out, Near(torch.cat(parts), 4)
    yield lse, Near(torch.cat(sums, 1), 100)


@case(*HALVES, torch.int8, starts=(False, True), sums=(False, True))
def cache_load(draw: Draw, starts: bool, sums: bool) -> Pairs:
    caches = [(draw.normal(6, 16, 2, dim, dtype=torch.float32) * 9).to(draw.dtype) for dim in (32, 64)]
    table, lengths = draw.permutation(6)[:4].view(2, 2).to(torch.int32), draw.integers(1, 16, 2, dtype=torch.int32)
    first = draw.integers(0, 16, 2, dtype=torch.int32) if starts else torch.zeros(2, dtype=torch.int32)
    given = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32) if sums else lengths
    options = {"seq_starts": first.npu()} if starts else {}
    tensors = *(each.npu() for each in caches), table.npu(), given.npu()
    found = torch_npu.atb.npu_paged_cache_load(*tensors, **options, cumsum=sums)
    for actual, cache in zip(found, caches, strict=True):
        parts = [
            cache[row.long()].flatten(0, 1)[start : start + length]
            for row, start, length in zip(table, first, lengths, strict=True)
        ]
        yield actual, Same(torch.cat(parts))


@case(*HALVES)
def helpers_of_atb(draw: Draw) -> Pairs:
    x, weight, total = draw.normal(7, 5), draw.normal(7, 3), draw.normal(5, 3, dtype=torch.float32)
    on_npu = total.npu()
    torch_npu._npu_matmul_add_fp32(draw.strided(x), draw.strided(weight), on_npu)
    yield on_npu, Near(total.double() + x.double().T @ weight.double())

    tokens, width = draw.between(1, 9), draw.choice([32, 64])
    rows, gamma, beta = draw.normal(tokens, width), draw.positive(width), draw.normal(width)
    scale, offset = draw.positive(1) / 16, torch.tensor([3], dtype=torch.int8)
    quantized = torch.zeros(tokens, width, dtype=torch.int8).npu()
    torch_npu._npu_quant_rms_norm(*(each.npu() for each in (rows, gamma, beta, scale, offset)), quantized)
    expected = rms_norm(rows, gamma, beta)[0] / scale.double() + 3
    yield quantized, Rounded(expected)

    scales, points = draw.positive(width) / 8, draw.integers(-9, 9, width, dtype=torch.int8)
    torch_npu._npu_quantize_per_tensor(rows.npu(), scales.npu(), points.npu(), quantized)
    yield quantized, Rounded(rows.double() / scales.double() + points)

    scores = draw.normal(tokens, 16)
    on_npu = scores.npu()
    torch_npu._npu_group_topk(on_npu, k=2, group_num=4, n=2)
    grouped = scores.double().view(tokens, 4, 4)
    losers = grouped.topk(2).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, 2:]
    kept = torch.ones(tokens, 4).bool().scatter_(1, losers, False)
    yield on_npu, Same((grouped * kept[..., None]).view(tokens, 16).to(draw.dtype))

    key, cache = draw.normal(tokens, 2, 32), draw.normal(4, 16, 2, 32)
    slots, on_npu = draw.permutation(64)[:tokens].to(torch.int32), cache.npu()
    torch_npu._npu_reshape_and_cache_siso(key.npu(), on_npu, slots.npu())
    expected = cache.flatten(0, 1).index_put((slots.long(),), key).view_as(cache)
    yield on_npu, Same(expected)


def expert_scores(draw: Draw, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, a bias, and the expected experts and weights with 2 of 4 groups and 4 of 16 experts."""
    logits, bias = draw.normal(tokens, 16), draw.positive(16)
    scores = logits.double().sigmoid()
    grouped = (scores + bias.double()).view(tokens, 4, 4)
    losers = grouped.topk(2).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, 2:]
    lost = torch.zeros(tokens, 4).bool().scatter_(1, losers, True)
    best = grouped.masked_fill(lost[..., None], 0).view(tokens, 16).topk(4).indices
    weights = scores.gather(1, best)
    return logits, bias, best, weights / weights.sum(1, True)


@case(torch.float32, replicas=(False, True))
def fused_add_topk_div(draw: Draw, replicas: bool) -> Pairs:
    logits, bias, best, weights = expert_scores(draw, 5)
    options: dict[str, Any] = {"group_num": 4, "group_topk": 2, "n": 2, "k": 4, "scale": 2.5}
    counts, table = draw.integers(1, 3, 16, dtype=torch.int32), draw.integers(0, 99, 16, 3, dtype=torch.int32)
    if replicas:
        options |= {"mapping_num": counts.npu(), "mapping_table": table.npu(), "enable_expert_mapping": True}
        rows = torch.arange(5)[:, None]
    y, experts = torch_npu.atb.npu_fused_add_topk_div(logits.npu(), bias.npu(), **options)
    yield y, Near(weights * 2.5)
    yield experts, Same(table[best, rows % counts[best]] if replicas else best.to(torch.int32))


@case(*HALVES, torch.float32, norm=(0, 1, 2))
def hash_routing(draw: Draw, norm: int) -> Pairs:
    logits, ids = draw.normal(6, 16), draw.integers(0, 19, 6, dtype=torch.int64)
    table = torch.stack([draw.permutation(16)[:4] for _ in range(20)]).to(torch.int32)
    options = {"input_ids": ids.npu(), "tid2eid": table.npu(), "norm_type": norm, "routed_scaling_factor": 1.5}
    y, experts, scores = torch_npu.npu_moe_gating_top_k(logits.npu(), 4, **options, out_flag=True)
    wide = logits.double()
    gate = [wide.softmax(-1), wide.sigmoid(), torch.nn.functional.softplus(wide).sqrt()][norm]
    weights = gate.gather(1, table[ids].long())
    yield y, Near(1.5 * (weights / weights.sum(1, True) if norm else weights))
    yield experts, Same(table[ids])
    yield scores, Near(gate)


@case(*HALVES, torch.float32, parts=(1, 3, 16), wants_lse=(False, True))
def attention_update(draw: Draw, parts: int, wants_lse: bool) -> Pairs:
    lse, outs = [draw.normal(5, dtype=torch.float32) for _ in range(parts)], [draw.normal(5, 24) for _ in range(parts)]
    found = torch_npu.npu_attention_update([e.npu() for e in lse], [e.npu() for e in outs], int(wants_lse))
    weights = torch.stack(lse).double().softmax(0)
    yield found[0], Near((weights[..., None] * torch.stack(outs).double()).sum(0), 2)
    if wants_lse:
        yield found[1], Near(torch.stack(lse).double().logsumexp(0))


@case(*HALVES, torch.float32, sampled=(False, True), minimum=(False, True))
def top_k_top_p_sample(draw: Draw, sampled: bool, minimum: bool) -> Pairs:
    rows, size = 6, 40
    logits = torch.stack([draw.permutation(size) / 8 for _ in range(rows)]).to(draw.dtype)  # no two are equal
    k = torch.tensor([1, 5, 39, 0, 41, 7], dtype=torch.int32)
    p = torch.tensor([0.5, 0.7, 1.0, 0.3, 0.0, 0.97], dtype=draw.dtype)
    q, least = draw.positive(rows, size, dtype=torch.float32), torch.full((rows,), 0.25, dtype=draw.dtype)
    options = {"q": q.npu() if sampled else None, "min_ps": least.npu() if minimum else None, "is_need_logits": True}
    chosen, filtered = torch_npu.npu_top_k_top_p_sample(logits.npu(), k.npu(), p.npu(), **options)
    expected, picked = [], []
    for one, count, share, row in zip(logits.double(), k.tolist(), p.double(), q.double(), strict=True):
        ranked, order = one.sort(descending=True)
        limit = count if 1 <= count <= size else size
        chances = ranked[:limit].softmax(0)
        before = chances.cumsum(0) - chances
        kept = before < share if share < 1 else chances > 0
        if minimum:
            kept &= chances >= 0.25 * chances[0]
        kept[0] = True
        expected.append(torch.full_like(one, -torch.inf).scatter(0, order[:limit][kept], ranked[:limit][kept]))
        scores = torch.where(kept, chances, 0) / (row[:limit] + 1e-8 if sampled else 1)
        picked.append(order[scores.argmax()])
    yield chosen, Same(torch.stack(picked))
    yield filtered, Near(torch.stack(expected))


PAIRS = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])
"""The even elements, then the odd ones: the order in which the prolog rotates."""


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, True) / 127
    return (x / scale).round(), scale


@case(torch.bfloat16, version=(2, 3), mode=("PA_BSND", "PA_NZ", "TND"), quantization=(0, 1, 2))
def mla_prolog(draw: Draw, version: int, mode: str, quantization: int) -> Pairs:
    if version == 2 and mode == "TND":
        mode = "PA_BSND"
    tokens, width, low, heads = 3, 7168 if version == 2 else 1024, 1536, 2
    shapes = {"weight_dq": (width, low), "weight_uq_qr": (low, heads * 192), "weight_dkv_kr": (width, 576)}
    full, names = quantization == 2, list(shapes)
    is_int8 = {"weight_dq": full, "weight_uq_qr": quantization > 0, "weight_dkv_kr": full}
    weights = {
        name: draw.integers(-9, 9, *shape, dtype=torch.int8) if is_int8[name] else draw.normal(*shape) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }
    scales = {name: draw.positive(1, shapes[name][1], dtype=torch.float32) / 200 for name in names}
    x = draw.integers(-90, 90, tokens, width, dtype=torch.int8) if full else draw.normal(tokens, width)
    x_scale = draw.positive(tokens, 1, dtype=torch.float32) / 50
    up_key, gammas = draw.normal(heads, 128, 512) / 11, [draw.positive(low), draw.positive(512)]
    cos, sin = draw.normal(tokens, 64), draw.normal(tokens, 64)
    slots = draw.permutation(32)[:tokens]
    caches = [torch.zeros(2, 16, 1, dim, dtype=draw.dtype) for dim in (512, 64)]
    if mode == "TND":
        caches = [torch.zeros(tokens, 1, dim, dtype=draw.dtype) for dim in (512, 64)]
    on_npu = {name: torch_npu.npu_format_cast(each.npu(), 29) for name, each in weights.items()}
    caches_on_npu = [each.npu() for each in caches]
    given: dict[str, Any] = {"token_x": x.npu(), "weight_uk": up_key.npu(), **on_npu, "cache_mode": mode}
    given |= {"rmsnorm_gamma_cq": gammas[0].npu(), "rmsnorm_gamma_ckv": gammas[1].npu()}
    given |= {"rope_sin": sin.npu(), "rope_cos": cos.npu(), "kv_cache": caches_on_npu[0], "kr_cache": caches_on_npu[1]}
    if mode != "TND":
        given["cache_index"] = slots.npu()
    for name, short in zip(names, ("w_dq", "w_uq_qr", "w_dkv_kr"), strict=True):
        if is_int8[name]:
            given[f"dequant_scale_{short}"] = scales[name].npu()
    if full:
        given["dequant_scale_x"] = x_scale.npu()
    if version == 3:
        given |= {"weight_quant_mode": quantization, "query_norm_flag": True}
    found = getattr(torch_npu, f"npu_mla_prolog_v{version}")(**given)

    def product(rows: Tensor, name: str) -> Tensor:
        result = rows.double() @ weights[name].double()
        return result * x_scale.double() * scales[name].double() if full else result

    normed = rms_norm(product(x, "weight_dq"), gammas[0])[0]
    rows, row_scales = int8_rows(normed) if quantization else (normed, torch.ones(()))
    queries = rows @ weights["weight_uq_qr"].double() * row_scales
    if quantization:
        queries = queries * scales["weight_uq_qr"].double()
    queries = queries.view(tokens, heads, 192)
    keys = product(x, "weight_dkv_kr")
    bound = 4 if quantization else 2
    yield found[0], Near(torch.einsum("thd,hdl->thl", queries[..., :128], up_key.double()), bound)
    yield found[1], Near(rope(queries[..., 128:][..., PAIRS], cos[:, None], sin[:, None]), bound)
    if version == 3 and not quantization:
        yield found[3], Near(normed)
    for cache, expected in zip(
        caches_on_npu,
        (rms_norm(keys[:, :512], gammas[1])[0], rope(keys[:, 512:][:, PAIRS], cos, sin)),
        strict=True,
    ):
        plain = cache.cpu()
        if mode == "PA_NZ":
            plain = plain.view(2, -1, 16, 16).transpose(1, 2).reshape(2, 16, 1, -1)
        yield plain if mode == "TND" else plain.flatten(0, 1)[slots], Near(expected[:, None], 2)


def last_rows(tokens: int, keys: int) -> Tensor:
    """Return [tokens, keys], true where the tokens are the last of the keys and a key is not after a token."""
    return torch.arange(keys) <= torch.arange(keys - tokens, keys)[:, None]


@case(*HALVES)
def quantized_sparse_attention(draw: Draw) -> Pairs:
    counts, lengths, scale, heads = [1, 3], [draw.between(5, 30), draw.between(5, 30)], 576**-0.5, 4
    query = draw.normal(sum(counts), heads, 576)
    parts = draw.integers(-127, 127, 4, 16, 512, dtype=torch.int8), draw.normal(4, 16, 64)
    scales = draw.positive(4, 16, 4, dtype=torch.float32) / 64
    packed = torch.cat([parts[0], parts[1].view(torch.int8), scales.view(torch.int8)], -1)[:, :, None]
    table, indices = draw.permutation(4).view(2, 2).to(torch.int32), torch.full((sum(counts), 1, 8), -1)
    latents = (parts[0].double().unflatten(-1, (4, 128)) * scales.double()[..., None]).flatten(-2)
    keys, start, expected = torch.cat([latents, parts[1].double()], -1), 0, []
    for count, length, row in zip(counts, lengths, table.long(), strict=True):
        seen_by = last_rows(count, length)
        for token in range(count):
            chosen = draw.permutation(length)[: draw.between(1, 5)]
            indices[start + token, 0, : len(chosen)] = chosen
            allowed = chosen[seen_by[token, chosen]]
            own = keys[row].flatten(0, 1)[allowed][None]
            hidden = seen(1, len(allowed))
            expected.append(attention(query[start + token][:, None], own, own[..., :512], scale, hidden)[0][:, 0])
        start += count
    given = {"actual_seq_lengths_query": lens(1, 4).npu(), "actual_seq_lengths_kv": lens(*lengths).npu()}
    given |= {"block_table": table.npu(), "layout_query": "TND", "layout_kv": "PA_BSND", "attention_mode": 2}
    tensors = query.npu(), packed.npu(), packed.npu(), indices.to(torch.int32).npu()
    found = torch_npu.npu_kv_quant_sparse_flash_attention(*tensors, scale, 2, 2, **given)
    yield found, Near(torch.stack(expected), 2)


@case(torch.float16, torch.bfloat16, activation=("relu", "gelu", "silu", "fastgelu"), experts=(False, True))
def ffn(draw: Draw, activation: str, experts: bool) -> Pairs:
    counts, width, middle = [draw.between(0, 4) for _ in range(3)], 32, 48
    shape = (3,) if experts else ()
    x = draw.normal(sum(counts) + (0 if experts else 2), width)
    weights = draw.normal(*shape, width, middle) / 6, draw.normal(*shape, middle, width) / 7
    biases = [draw.normal(*shape, size, dtype=torch.float32) for size in (middle, width)]
    if draw.dtype == torch.float16:
        biases = [each.half() for each in biases]
    options = {"bias1": biases[0].npu(), "bias2": biases[1].npu(), **({"expert_tokens": counts} if experts else {})}
    found = torch_npu.npu_ffn(x.npu(), *(each.npu() for each in weights), activation, **options)
    yield found, Near(ffn_of(x, weights, biases, activation, counts if experts else None), 4)


def ffn_of(x: Tensor, weights: Any, biases: Any, activation: str, counts: list[int] | None) -> Tensor:
    functions = {"relu": torch.relu, "silu": torch.nn.functional.silu, "fastgelu": lambda v: v * (1.702 * v).sigmoid()}
    functions["gelu"] = lambda v: torch.nn.functional.gelu(v, approximate="tanh")
    parts = []
    for i, rows in enumerate(x.split(counts) if counts else [x]):
        first, second = ((each[i] if counts else each).double() for each in weights)
        low, high = ((each[i] if counts else each).double() for each in biases)
        parts.append(functions[activation](rows.double() @ first + low) @ second + high)
    return torch.cat(parts)


@case(*HALVES)
def ffn_with_int8_weights(draw: Draw) -> Pairs:
    x, sizes = draw.normal(5, 32), ((32, 48), (48, 32))
    weights = [draw.integers(-90, 90, *size, dtype=torch.int8) for size in sizes]
    factors, offsets = [draw.positive(size[1]) / 300 for size in sizes], [draw.normal(size[1]) for size in sizes]
    options = {f"antiquant_scale{i}": each.npu() for i, each in enumerate(factors, 1)}
    options |= {f"antiquant_offset{i}": each.npu() for i, each in enumerate(offsets, 1)}
    found = torch_npu.npu_ffn(x.npu(), *(each.npu() for each in weights), "relu", **options)
    wide = [
        (weight.double() + offset.double()) * factor.double()
        for weight, offset, factor in zip(weights, offsets, factors, strict=True)
    ]
    yield found, Near((x.double() @ wide[0]).relu() @ wide[1], 4)


@case(torch.float16)
def ffn_of_int8(draw: Draw) -> Pairs:
    x, sizes = draw.integers(-90, 90, 5, 32, dtype=torch.int8), ((32, 48), (48, 32))
    weights = [draw.integers(-90, 90, *size, dtype=torch.int8) for size in sizes]
    factors = [draw.positive(size[1], dtype=torch.float32) / 30000 for size in sizes]
    biases = [draw.integers(-900, 900, size[1], dtype=torch.int32) for size in sizes]
    scale, offset = torch.tensor([40.0]), torch.tensor([3.0])
    options = {f"deq_scale{i}": each.npu() for i, each in enumerate(factors, 1)}
    options |= {f"bias{i}": each.npu() for i, each in enumerate(biases, 1)}
    options |= {"scale": scale.npu(), "offset": offset.npu(), "output_dtype": torch.float16}
    found = torch_npu.npu_ffn(x.npu(), *(each.npu() for each in weights), "relu", **options)
    middle = ((x.double() @ weights[0].double() + biases[0]) * factors[0].double()).relu() * 40 + 3
    middle = middle.round().clamp(-128, 127)
    yield found, Near((middle @ weights[1].double() + biases[1]) * factors[1].double(), 2)


@case(torch.float32, torch.bfloat16, int4=(False, True), offset=(False, True))
def anti_quantization(draw: Draw, int4: bool, offset: bool) -> Pairs:
    values = (
        draw.integers(-8, 7, 5, 16, dtype=torch.int32) if int4 else draw.integers(-128, 127, 5, 16, dtype=torch.int8)
    )
    scale, shift = draw.positive(16), draw.normal(16)
    x = torch_npu.npu_convert_weight_to_int4pack(values.npu()) if int4 else values.npu()
    options = {"offset": shift.npu()} if offset else {}
    found = torch_npu.npu_anti_quant(x, scale.npu(), **options, dst_dtype=torch.bfloat16)
    yield found, Near((values.double() + (shift.double() if offset else 0)) * scale.double())


@case(*HALVES, torch.float32, torch.int8, pairs=(False, True))
def scatter_update(draw: Draw, pairs: bool) -> Pairs:
    data = (draw.normal(4, 3, 20, 8, dtype=torch.float32) * 9).to(draw.dtype)
    updates = (draw.normal(2, 3, 2, 8, dtype=torch.float32) * 9).to(draw.dtype)
    starts, entries = draw.integers(0, 18, 2, dtype=torch.int64), draw.permutation(4)[:2]
    indices, expected = torch.stack([entries, starts], 1) if pairs else starts, data.clone()
    for i in range(2):
        expected[entries[i] if pairs else i, :, starts[i] : starts[i] + 2] = updates[i]
    yield torch_npu.scatter_update(data.npu(), indices.npu(), updates.npu(), -2), Same(expected)
    on_npu = draw.strided(data)
    torch_npu.scatter_update_(on_npu, indices.npu(), updates.npu(), -2)
    yield on_npu, Same(expected)


@case(*HALVES, torch.float32, form=("none", "tanh"))
def gelu_mul(draw: Draw, form: str) -> Pairs:
    x = draw.normal(3, 5, 64)
    first, second = x.double().chunk(2, -1)
    expected = torch.nn.functional.gelu(first, approximate=form) * second
    yield torch_npu.npu_gelu_mul(draw.strided(x), approximate=form), Near(expected)


@case(*HALVES, torch.float32, offset=(False, True))
def group_quantization(draw: Draw, offset: bool) -> Pairs:
    counts = [draw.between(0, 4) for _ in range(3)]
    x, scale = draw.normal(sum(counts), 16), draw.positive(3, 16) * 20
    shift, ends = draw.normal(1) * 5, torch.tensor(counts).cumsum(0)
    found = torch_npu.npu_group_quant(x.npu(), scale.npu(), ends.npu(), offset=shift.npu() if offset else None)
    rows = scale.double().repeat_interleave(torch.tensor(counts), 0)
    yield found, Rounded(x.double() * rows + (shift.double() if offset else 0))


@case(torch.int64)
def advance_step(draw: Draw) -> Pairs:
    sequences, queries, block = 4, 3, 8
    tokens, positions, slots = (draw.integers(1, 99, sequences, dtype=torch.int64) for _ in range(3))
    lengths, table = draw.integers(1, 30, sequences, dtype=torch.int64), draw.permutation(16).view(sequences, 4)
    sampled = draw.integers(100, 199, queries, 1, dtype=torch.int64)
    on_npu = [each.npu() for each in (tokens, sampled, positions, lengths, slots, table)]
    torch_npu.npu_advance_step_flashattn(*on_npu, sequences, queries, block)
    own = torch.arange(sequences) < queries
    sampled = torch.nn.functional.pad(sampled[:, 0], (0, 1))
    yield on_npu[0], Same(torch.where(own, sampled, tokens))
    yield on_npu[2], Same(torch.where(own, lengths, positions))
    yield on_npu[3], Same(lengths + own)
    places = table.gather(1, (lengths // block)[:, None])[:, 0] * block + lengths % block
    yield on_npu[4], Same(torch.where(own, places, slots))


@case(torch.float32, shared=(False, True), counts=(False, True))
def grouped_finalize_routing(draw: Draw, shared: bool, counts: bool) -> Pairs:
    groups, inner, width, batch = [draw.between(0, 5) for _ in range(3)], 32, 256, 6
    rows = sum(groups) + 1  # the last row belongs to no expert
    x = draw.integers(-127, 127, rows, inner, dtype=torch.int8)
    weight = draw.integers(-127, 127, 3, inner, width, dtype=torch.int8)
    scale, factors = draw.positive(3, width) / 900, [draw.positive(rows) for _ in range(2)]
    places = draw.integers(0, batch - 1, rows, dtype=torch.int64)
    ends = torch.tensor(groups) if counts else torch.tensor(groups).cumsum(0)
    more = draw.normal(2, width, dtype=torch.bfloat16)
    options: dict[str, Any] = {"scale": scale.npu(), "pertoken_scale": factors[0].npu(), "logit": factors[1].npu()}
    options |= {"row_index": places.npu(), "output_bs": batch, "group_list_type": int(counts)}
    if shared:
        options |= {"shared_input": more.npu(), "shared_input_weight": 0.5, "shared_input_offset": 3}
    tiles = torch_npu.npu_format_cast(weight.npu(), 29)
    found = torch_npu.npu_grouped_matmul_finalize_routing(x.npu(), tiles, ends.npu(), **options)
    expected = torch.zeros(batch, width, dtype=torch.float64)
    if shared:
        expected[3:5] += 0.5 * more.double()
    experts = torch.arange(3).repeat_interleave(torch.tensor(groups))
    for i, expert in enumerate(experts):
        row = x[i].double() @ weight[expert].double() * scale[expert].double()
        expected[places[i]] += row * factors[0][i].double() * factors[1][i].double()
    yield found, Near(expected, 5)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize(("run", "arguments", "dtype", "seed"), parameters(__name__))
def test_result(run: Any, arguments: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    check(run, arguments, dtype, seed)


@pytest.mark.parametrize("neox", [False, True])
def test_rotary_embedding(neox: bool) -> None:
    """In a process of its own, because torch_npu keeps the first cosines for all later calls."""
    ends_well("-c", ROTARY, str(neox), str(TESTS), str(ROOT / "tests"))


ROTARY = """
import sys
sys.path[:0] = sys.argv[2:]
import torch, torch_npu
from support.fused_references import rope
neox = sys.argv[1] == "True"
query, key, cache = torch.randn(5, 4 * 64).half(), torch.randn(5, 2 * 64).half(), torch.randn(9, 64).half()
positions = torch.tensor([3, 0, 8, 1, 1])
on_npu = query.npu(), key.npu()
torch_npu._npu_rotary_embedding(positions.npu(), *on_npu, 64, cache.npu(), neox)
factors = [each.repeat(1, 2) if neox else each.repeat_interleave(2, 1) for each in cache[positions].chunk(2, -1)]
for actual, given in zip(on_npu, (query, key)):
    expected = rope(given.view(5, -1, 64), *(each[:, None] for each in factors), interleaved=not neox).view_as(given)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=2e-3, atol=2e-3)
print("well")
"""


INDEXER = """
import torch, torch_npu
generator = torch.Generator().manual_seed(0)
integers = lambda *shape: torch.randint(-90, 90, shape, generator=generator).to(torch.int8)
query, key, table = integers(4, 8, 128), integers(4, 16, 1, 128), torch.tensor([[3, 0], [1, 2]])
positive = lambda *shape: (torch.rand(shape, generator=generator) / 64 + 0.01).half()
weights, scales = positive(4, 8), (positive(4, 8), positive(4, 16, 1))
lens = lambda *values: torch.tensor(values, dtype=torch.int32).npu()
found = torch_npu.npu_quant_lightning_indexer(query.npu(), key.npu(), weights.npu(), *(s.npu() for s in scales), 0, 0,
    actual_seq_lengths_query=lens(1, 4), actual_seq_lengths_key=lens(20, 9), block_table=table.int().npu(),
    layout_query="TND", layout_key="PA_BSND", sparse_count=5).cpu()
for start, end, length, row in ((0, 1, 20, table[0]), (1, 4, 9, table[1])):
    keys = (key.double() * scales[1].double()[..., None])[row].flatten(0, 1)[:length, 0]
    products = (query.double() * scales[0].double()[..., None])[start:end] @ keys.T
    scores = (weights.double()[start:end, :, None] * products.relu()).sum(1)
    hidden = torch.ones(end - start, length).triu(length - end + start + 1).bool()
    assert torch.equal(found[start:end, 0], scores.masked_fill(hidden, -torch.inf).topk(5).indices.int())
print("well")
"""


def test_quantized_indexer(clean: dict[str, str]) -> None:
    """On an A3, because A2 does not have it."""
    assert on_soc("Ascend910_9391", INDEXER, clean) == "well\n"


def prompt(**changes: Any) -> None:
    names = "query", "key", "value", "mask", "seq_len", "scale_value", "num_heads", "num_kv_heads", "out"
    rows = half(5, 4, 64), half(5, 2, 64), half(5, 2, 64)
    given = dict(zip(names, (*rows, half(8, 8), lens(2, 3), 1.0, 4, 2, half(5, 4, 64)), strict=True))
    torch_npu._npu_flash_attention(**{**given, **changes})


def prefix(**changes: Any) -> None:
    names = "query", "key_cache", "value_cache", "block_table", "mask", "seq_len", "context_lens", "num_kv_heads"
    cache, mask = half(4, 128, 2, 64), half(128, 128).triu(1)
    values = half(5, 4, 64), cache, cache, i32(2, 2), mask, lens(2, 3), lens(130, 3), 2
    given = dict(zip(names, values, strict=True)) | {"num_heads": 4, "scale_value": 1.0, "out": half(5, 4, 64)}
    torch_npu._npu_flash_attention_qlens(**{**given, **changes})


def update(**changes: Any) -> None:
    given = {"lse": [f32(3), f32(3)], "local_out": [half(3, 16), half(3, 16)], "update_type": 0}
    torch_npu.npu_attention_update(**{**given, **changes})


def sample(**changes: Any) -> None:
    given = {"logits": half(2, 9), "top_k": i32(2), "top_p": half(2)}
    torch_npu.npu_top_k_top_p_sample(**{**given, **changes})


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refusals() -> Iterator[Row]:
    yield prompt, {"seq_len": lens(2, 4)}, "the lengths of the queries sum to 6, but query has 5 rows"
    yield prompt, {"seq_len": lens(2, 3).npu()}, "seq_len must be a CPU tensor"
    yield prompt, {"seq_len": lens(2, 3).long()}, "seq_len must be int32"
    yield prompt, {"num_kv_heads": 3}, "num_heads, 4, must be a multiple of num_kv_heads, 3"
    yield prompt, {"query": f32(5, 4, 64)}, "query must be one of Half, BFloat16"
    yield prompt, {"mask": half(2, 2)}, r"with S at least the longest sequence, 3, but has \[2, 2\]"
    yield prompt, {"key": half(5, 2, 32)}, "key must have the head dimension of query"
    yield prefix, {"context_lens": lens(131, 3)}, "must be a multiple of 128, but a sequence has 131 keys and 2 queries"
    yield prefix, {"mask": half(64, 64)}, r"a compressed mask must have shape \[128, 128\]"
    yield prefix, {"key_cache": half(4, 64, 2, 64), "value_cache": half(4, 64, 2, 64)}, "block_size must be 128, but is"
    wide = {"key_cache": half(4, 128, 2, 144), "value_cache": half(4, 128, 2, 144)}
    yield prefix, wide, "the head dimension must be a multiple of 16 up to 128"
    yield prefix, {"context_lens": lens(386, 3)}, "block_table has room for 256 keys, but a length is 386"
    yield update, {"lse": [f32(3)]}, "the same number of tensors, from 1 to 16, but have 1 and 2"
    yield update, {"local_out": [half(3, 12), half(3, 12)]}, "a multiple of 8 from 8 to 512, but is 12"
    yield update, {"lse": [half(3), half(3)]}, "lse must be one of Float"
    yield sample, {"top_p": f32(2)}, "top_p must be one of Half"
    yield sample, {"top_k": i32(3)}, r"top_k must have shape \[2\]"
    yield sample, {"q": i8(2, 9)}, "q must be one of Float"


CHILD = """
import sys
sys.path[:0] = sys.argv[1:]
import test_engine_operators as own, torch
from support.refusals import check_refused, check_works
check_refused(own.refusals())
check_works((own.prompt, own.prefix, own.update, own.sample))  # The process keeps working.
print("well")
"""


def test_refusals() -> None:
    """In a subprocess without torch_npu's queue, which a failed operation makes unusable."""
    ends_well("-c", CHILD, str(TESTS), str(ROOT / "tests"), TASK_QUEUE_ENABLE="0")
