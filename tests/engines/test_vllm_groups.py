"""Tests that models whose layers are in several cache groups give the tokens of hal.generate inside vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.distributions import installed
from helpers.vllm_programs import found_by, needs_vllm

WINDOW = 20


def groups_of(folder: Path, kind: str) -> Path:
    """Write a random checkpoint: three recurrent layers of four, or two of three with a window."""
    import torch
    import transformers
    from helpers.comparison import randomize

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "max_position_embeddings": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    recurrent = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    windows = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    further: dict[str, dict[str, Any]] = {
        "Qwen3Next": {"num_hidden_layers": 8, **recurrent, **experts},
        "Gemma3Text": {"num_hidden_layers": 6, "layer_types": windows, "sliding_window": WINDOW},
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, **further[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(model, 1)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.copy_(torch.linspace(-4, 2, parameter.numel()))
    model.save_pretrained(folder)
    return folder


EAGER: dict[str, Any] = {"compiler": "eager"}
GRAPH: dict[str, Any] = {"compiler": "graph", "capture_sizes": [1, 2, 4]}
PIECES: dict[str, Any] = {**GRAPH, "compiler": "piecewise", "prefill": {"capture_sizes": [64]}}


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "compilation", "caching"),
    [
        ("Qwen3Next", EAGER, False),
        ("Qwen3Next", PIECES, True),
        ("Qwen3Next", GRAPH, True),
        ("Gemma3Text", EAGER, True),
        ("Gemma3Text", GRAPH, False),
    ],
    ids=lambda each: each["compiler"] if isinstance(each, dict) else str(each),
)
def test_random_requests(tmp_path: Path, kind: str, compilation: dict[str, Any], caching: bool) -> None:
    """Pages that no sequence has hold NaN. The cache is so small that requests are preempted."""
    found = found_by(
        "vllm_groups.main",
        tmp_path,
        groups_of(tmp_path / "model", kind),
        hal={
            "backend": "cpu",
            "cache": {"block_size": 16, "num_sequences": 16},
            "compilation": compilation,
        },
        vllm={
            "max_num_seqs": 6,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": caching,
            "num_gpu_blocks_override": 40,
        },
        dtype="float32",
        longest=256,
        requests=200,
        seed=1,
    )
    assert found["wrong"] == [], "seed 1"
    (counts,) = found["counts"]
    assert counts["groups"] > 1
    assert counts["bytes"] == counts["counted bytes"]
    assert counts["decode"]
    assert counts["chunks"]
    assert counts["resumed"]
    assert bool(counts["prefix hits"]) == caching


@needs_vllm
@pytest.mark.skipif(not installed("torch-npu"), reason="torch_npu is not installed")
@pytest.mark.parametrize("caching", [False, True])
def test_random_requests_on_an_emulated_npu(tmp_path: Path, caching: bool) -> None:
    """A token may differ where two logits are closer than twice the error of float16 after the same tokens."""
    found = found_by(
        "vllm_groups.main",
        tmp_path,
        groups_of(tmp_path / "model", "Qwen3Next"),
        hal={"backend": "npu", "cache": {"num_sequences": 16}, "compilation": GRAPH},
        vllm={
            "max_num_seqs": 6,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": caching,
            "num_gpu_blocks_override": 24,
        },
        dtype="float16",
        longest=256,
        requests=200,
        seed=1,
    )
    assert found["wrong"] == [], "seed 1"
    assert len(found["ties"]) <= 10, "seed 1"
    assert found["counts"][0]["decode"]
    assert found["counts"][0]["chunks"]


@needs_vllm
def test_blocks_before_a_window_are_freed(tmp_path: Path) -> None:
    """In the same bytes, more requests run together if layers with windows have blocks of their own."""
    together = {}
    for apart in (True, False):
        found = found_by(
            "vllm_groups.main",
            tmp_path,
            groups_of(tmp_path / f"model{apart}", "Gemma3Text"),
            hal={"backend": "cpu", "cache": {"block_size": 16}},
            vllm={
                "max_num_seqs": 24,
                "max_num_batched_tokens": 64,
                "enable_prefix_caching": False,
                "kv_cache_memory_bytes": 1 << 20,
                "disable_hybrid_kv_cache_manager": not apart,
            },
            dtype="float32",
            longest=256,
            requests=60,
            seed=1,
        )
        assert found["wrong"] == [], "seed 1"
        (counts,) = found["counts"]
        together[counts["groups"]] = counts["together"]
    assert together.keys() == {1, 3}
    assert together[3] > together[1]
