"""Tests of latent and sparse attention's operators: values, and what they refuse. Each case changes one thing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from support.ones import bf16, f32, half, i8, i32, i64
from support.refusals import Row, check_fails, check_refused, check_works
from torch import Tensor

FUSED = torch_npu.npu_fused_infer_attention_score


def decode(**changes: Any) -> Any:
    """Run latent attention with two sequences of one query each."""
    cache, given = half(8, 16, 512), {"num_heads": 4, "num_key_value_heads": 1, "scale": 1.0, "input_layout": "BSND"}
    given |= {"query": half(2, 1, 4, 512), "query_rope": half(2, 1, 4, 64), "key": cache, "value": cache}
    given |= {"key_rope": half(8, 16, 64), "block_table": i32(2, 4), "block_size": 16}
    return FUSED(**{**given, "actual_seq_lengths_kv": [3, 20], **changes})


def packed(queries: int) -> Any:
    """Run the second version of latent attention, with so many packed queries of one sequence."""
    cache, given = half(8, 16, 512), {"num_query_heads": 4, "num_key_value_heads": 1, "input_layout": "TND"}
    given |= {"query": half(queries, 4, 512), "query_rope": half(queries, 4, 64), "key": cache, "value": cache}
    given |= {"key_rope": half(8, 16, 64), "block_table": i32(1, 4), "block_size": 16, "softmax_scale": 1.0}
    given |= {"actual_seq_qlen": [queries], "actual_seq_kvlen": [40]}
    return torch_npu.npu_fused_infer_attention_score_v2(**given)


def plain(**changes: Any) -> Any:
    """Run attention with heads of 128 and 64 elements, and packed sequences of two and three tokens."""
    keys = bf16(5, 4, 128)
    given = {"query": bf16(5, 4, 128), "query_rope": bf16(5, 4, 64), "key": keys, "value": keys, "num_heads": 4}
    given |= {"key_rope": bf16(5, 4, 64), "input_layout": "TND", "scale": 1.0}
    return FUSED(**{**given, "actual_seq_lengths": [2, 5], "actual_seq_lengths_kv": [2, 5], **changes})


def indexer(**changes: Any) -> Any:
    """Select 4 keys for two sequences of one and two queries."""
    given = {"query": half(3, 8, 128), "key": half(8, 16, 1, 128), "weights": half(3, 8), "block_table": i32(2, 4)}
    given |= {"actual_seq_lengths_query": lens(1, 3), "actual_seq_lengths_key": lens(3, 20)}
    given |= {"layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 4}
    return torch_npu.npu_lightning_indexer(**{**given, **changes})


def sparse(**changes: Any) -> Any:
    """Attend to position 0 with the same sequences."""
    latents, chosen = half(8, 16, 1, 512), i32(3, 1, 4) - 2
    chosen[..., 0] = 0
    given = {"query": half(3, 4, 512), "query_rope": half(3, 4, 64), "key": latents, "value": latents}
    given |= {"key_rope": half(8, 16, 1, 64), "sparse_indices": chosen, "scale_value": 1.0, "block_table": i32(2, 4)}
    given |= {"actual_seq_lengths_query": lens(1, 3), "actual_seq_lengths_kv": lens(3, 20), "attention_mode": 2}
    return torch_npu.npu_sparse_flash_attention(**{**given, "layout_query": "TND", "layout_kv": "PA_BSND", **changes})


def store(**changes: Any) -> Any:
    """Write three tokens to caches of blocks of 16."""
    given = {"kv": half(3, 1, 1, 576), "gamma": half(512), "cos": half(3, 1, 1, 64), "sin": half(3, 1, 1, 64)}
    given |= {"index": torch.arange(3).npu(), "k_cache": half(4, 16, 1, 64), "ckv_cache": half(4, 16, 1, 512)}
    return torch_npu.npu_kv_rmsnorm_rope_cache(**{**given, "cache_mode": "PA_BNSD", **changes})


def test_plain_attention_in_other_layouts() -> None:
    """Heads of 128 and 64 elements give the same in TND and by heads."""
    draw = torch.Generator().manual_seed(0)
    tensors = {"query": 128, "query_rope": 64, "key": 128, "key_rope": 64, "value": 128}
    packed = {name: torch.randn(5, 4, dim, generator=draw).bfloat16() for name, dim in tensors.items()}
    expected = plain(**{name: each.npu() for name, each in packed.items()})[0].cpu()
    turned = {name: each.transpose(0, 1).contiguous().npu() for name, each in packed.items()}
    assert torch.equal(plain(**turned, input_layout="NTD")[0].cpu(), expected.transpose(0, 1))
    alone = {name: each[None, 2:].npu() for name, each in packed.items()}  # the second sequence
    lengths = {"actual_seq_lengths": None, "actual_seq_lengths_kv": None}
    assert torch.equal(plain(**alone, **lengths, input_layout="BSND")[0].cpu()[0], expected[2:])


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).npu()


def refusals() -> Iterator[Row]:
    yield decode, {"key_rope": None}, "must be given together"
    yield decode, {"query_rope": half(2, 1, 4, 32)}, r"query_rope must have shape \[2, 1, 4, 64\]"
    yield decode, {"key_rope": half(8, 16, 32)}, r"key_rope must have shape \[8, 16, 64\]"
    yield decode, {"key_rope": bf16(8, 16, 64)}, "the dtype of what it belongs to"
    heads = {"num_heads": 3, "query": half(2, 1, 3, 512), "query_rope": half(2, 1, 3, 64)}
    yield decode, heads, "must be 1, 2, 4, 8, 16, 32, 64 or 128, but is 3"
    many = {"query": half(1, 17, 4, 512), "query_rope": half(1, 17, 4, 64), "block_table": i32(1, 4)}
    yield decode, {**many, "actual_seq_lengths_kv": [20]}, "at most 16 queries of 512 elements"
    yield decode, {"softmax_lse_flag": True}, "takes no softmax_lse_flag"
    yield decode, {"sparse_mode": 2, "atten_mask": torch.ones(2048, 2048).bool().npu()}, "must be 0, 3 or 4"
    wide = {"query": half(2, 1, 4, 256), "query_rope": half(2, 1, 4, 64), "key": half(8, 16, 256)}
    yield decode, {**wide, "value": wide["key"]}, "must be 512 or 128, but is 256"
    yield decode, {"input_layout": "BSND_BNSD"}, "input_layout with query_rope must be"
    yield plain, {"input_layout": "TND_NTD"}, "takes no input_layout TND_NTD"

    yield indexer, {"query": half(3, 8, 64), "key": half(8, 16, 1, 64)}, "query must have shape"
    yield indexer, {"key": half(8, 16, 2, 128)}, "key must have one head"
    yield indexer, {"query": half(3, 65, 128), "weights": half(3, 65)}, "at most 64 heads, but has 65"
    yield indexer, {"weights": bf16(3, 8)}, "weights must have the query's dtype, or float32"
    yield indexer, {"weights": half(3, 4)}, "weights must have shape"
    yield indexer, {"sparse_count": 2049}, "sparse_count must be 1 to 2048"
    yield indexer, {"sparse_mode": 1}, "sparse_mode must be 0 or 3"
    yield indexer, {"pre_tokens": 5}, "must have their defaults"
    yield indexer, {"actual_seq_lengths_query": i64(2)}, "the lengths must be one of Int"
    yield indexer, {"actual_seq_lengths_key": None}, "require the lengths of keys"
    yield indexer, {"actual_seq_lengths_key": lens(3)}, "the lengths must have shape"
    yield indexer, {"block_table": None}, "requires a block_table"
    yield indexer, {"key": half(8, 24, 1, 128)}, "a multiple of 16, and at most 1024, but is 24"
    yield indexer, {"layout_key": "BSND"}, "must be PA_BSND or that of the query"
    yield indexer, {"query": half(3, 128, 8).mT, "weights": half(3, 8)}, "query must be contiguous"
    yield indexer, {"return_value": True}, "return_value must be False with PA_BSND"

    yield sparse, {"query": half(3, 3, 512), "query_rope": half(3, 3, 64)}, "or 128 heads, but has 3"
    yield sparse, {"attention_mode": 0}, "attention_mode must be 2"
    yield sparse, {"query_rope": None}, "requires query_rope and key_rope"
    yield sparse, {"key_rope": half(8, 16, 1, 32)}, "key_rope must have shape"
    yield sparse, {"sparse_indices": i32(3, 2, 4)}, "sparse_indices must have shape"
    yield sparse, {"sparse_indices": i64(3, 1, 4)}, "sparse_indices must be one of Int"
    yield sparse, {"value": half(8, 16, 1, 1024)[..., ::2]}, "value and key_rope must be contiguous"
    yield sparse, {"key_rope": half(8, 16, 1, 128)[..., ::2]}, "value and key_rope must be contiguous"
    yield sparse, {"sparse_block_size": 16}, "sparse_block_size other than 1 is not emulated"
    yield sparse, {"key": i8(8, 16, 1, 512)}, "key must have the query's dtype"

    blocks = {"k_cache": half(4, 8, 1, 64), "ckv_cache": half(4, 8, 1, 512)}
    yield store, blocks, "a multiple of 16, but have 8 and 8"
    yield store, {"ckv_cache": half(4, 32, 1, 512)}, "equally many tokens, a multiple of 16, but have 16 and 32"
    few = {"k_cache": half(2, 16, 1, 64), "ckv_cache": half(2, 16, 1, 512)}
    yield store, few, r"at least ceil\(S / block_size\) \* B = 3 blocks, but have 2"


def test_refusals() -> None:
    check_works((decode, plain, indexer, sparse, store))
    unpaged = {"key": half(2, 20, 1, 512), "key_rope": half(2, 20, 1, 64), "block_table": None}
    decode(**unpaged, value=unpaged["key"])
    indexer(weights=f32(3, 8))
    packed(17)
    check_refused(refusals())


def at_run_time() -> Iterator[Row]:
    yield sparse, {"sparse_indices": i32(3, 1, 4) * 3}, "must be positions of the sequence, then -1"
    unordered = i32(3, 1, 4) - 2
    unordered[..., 1] = 0
    yield sparse, {"sparse_indices": unordered}, "must be positions of the sequence, then -1"
    yield indexer, {"actual_seq_lengths_key": lens(3, 65)}, "a length is 65, but must be 0 to 64"


def test_contents(capfd: pytest.CaptureFixture[str]) -> None:
    check_fails(at_run_time(), capfd)


def test_the_order_is_that_of_scores_then_of_positions() -> None:
    keys = torch.zeros(1, 16, 1, 128, dtype=torch.half)
    keys[0, :5, 0, 0] = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])
    query = torch.zeros(2, 1, 128, dtype=torch.half)
    query[:, 0, 0] = 1.0
    found, _ = indexer(
        query=query.npu(),
        key=keys.npu(),
        weights=half(2, 1),
        block_table=i32(1, 1) - 1,
        actual_seq_lengths_query=lens(2),
        actual_seq_lengths_key=lens(5),
        sparse_count=6,
    )
    assert found.tolist() == [[[1, 3, 2, 0, -1, -1]], [[1, 3, 2, 0, 4, -1]]]
    every, _ = indexer(
        query=query.npu(),
        key=keys.npu(),
        weights=half(2, 1),
        block_table=i32(1, 1) - 1,
        actual_seq_lengths_query=lens(2),
        actual_seq_lengths_key=lens(5),
        sparse_count=6,
        sparse_mode=0,
    )
    assert every.tolist() == [[[1, 3, 2, 0, 4, -1]]] * 2


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_layouts_agree(layout: str) -> None:
    """Two sequences of 2 queries and 9 keys, in each layout without blocks and in blocks."""
    draw = torch.Generator().manual_seed(5)
    query, rope = (torch.randn(4, 4, size, generator=draw).half() for size in (512, 64))
    latents, ropes = (torch.randn(18, 1, size, generator=draw).half() for size in (512, 64))
    chosen = torch.tensor([[8, 2, -1], [0, 8, 7], [1, -1, -1], [8, 4, 2]], dtype=torch.int32).unsqueeze(1)
    packed = layout == "TND"

    def shaped(tensor: Tensor, rows: int) -> Tensor:
        return (tensor if packed else tensor.unflatten(0, (2, rows))).npu()

    queries = [shaped(each, 2) for each in (query, rope, chosen)]
    options = {"scale_value": 0.1, "attention_mode": 2, "sparse_mode": 0, "layout_query": layout}
    options |= {"actual_seq_lengths_query": lens(2, 4) if packed else None, "query_rope": queries[1]}

    def attended(keys: Tensor, ropes: Tensor, **paging: Any) -> Tensor:
        found = torch_npu.npu_sparse_flash_attention(
            queries[0], keys, keys, queries[2], key_rope=ropes, **options, **paging
        )
        return found[0].cpu().view(4, 4, 512).float()

    dense = attended(
        shaped(latents, 9),
        shaped(ropes, 9),
        layout_kv=layout,
        actual_seq_lengths_kv=lens(9, 18) if packed else None,
    )
    blocks = [torch.nn.functional.pad(each.unflatten(0, (2, 9)), (0, 0, 0, 0, 0, 7)).npu() for each in (latents, ropes)]
    table = torch.tensor([[0], [1]], dtype=torch.int32).npu()
    in_blocks = attended(*blocks, layout_kv="PA_BSND", block_table=table, actual_seq_lengths_kv=lens(9, 9))
    assert torch.equal(dense, in_blocks)
    for token, positions in enumerate(chosen.squeeze(1).tolist()):
        rows = [9 * (token // 2) + each for each in positions if each >= 0]
        keys = torch.cat((latents, ropes), -1).squeeze(1)[rows].float()
        scores = torch.cat((query, rope), -1)[token].float() @ keys.T * 0.1
        torch.testing.assert_close(dense[token], scores.softmax(-1) @ keys[:, :512], rtol=2e-3, atol=2e-3)
