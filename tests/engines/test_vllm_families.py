"""Tests that every family of models gives the tokens of hal.generate inside vLLM. `make test-vllm` runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import EXPERTS, random_checkpoint, trained_tokenizer, write_json
from helpers.distributions import installed
from helpers.vllm_programs import found_by, needs_vllm, run
from safetensors.torch import save_file

from hal.checkpoint.model_registry import find_model
from hal.checkpoint.weight_bindings import bindings_of

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 7,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 20},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": None,
        "num_attention_heads": 2,
    },
    # An index selects 7 tokens, fewer than most prompts have; in the second, a layer shares a selection.
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **LATENTS},
    "glm_moe_dsa": {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["full", "full", "shared"], **LATENTS},
}


def family(folder: Path, model_type: str, seed: int = 1, **overrides: Any) -> Path:
    """Write a random checkpoint of a family, with other keys of config.json."""
    folder.mkdir()
    tokenizer = trained_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        **COMMON,
        "vocab_size": tokenizer.get_vocab_size(),
        "model_type": model_type,
        **FAMILIES[model_type],
        **overrides,
    }
    config = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    write_json(folder / "config.json", config)
    with torch.device("meta"):
        model = find_model(config["architectures"][0]).from_config(config)
    draw = torch.Generator().manual_seed(seed)
    shapes = {piece.source: piece.source_shape for binding in bindings_of(model) for piece in binding.pieces()}
    save_file(
        {
            name: torch.randn(shape, generator=draw) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
            + (1 if "norm" in name else 0)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    return folder


@needs_vllm
@pytest.mark.shows("every family of models", "vLLM")
def test_every_family_gives_the_tokens_of_generate(tmp_path: Path) -> None:
    checkpoints = {name: str(family(tmp_path / name, name)) for name in FAMILIES}
    checkpoints["qwen3"] = str(random_checkpoint(tmp_path / "qwen3"))
    checkpoints["qwen3_moe"] = str(random_checkpoint(tmp_path / "qwen3_moe", **EXPERTS))
    out = tmp_path / "found.json"
    asked = {
        "checkpoints": checkpoints,
        "before": str(family(tmp_path / "before", "llama", 2)),
        "out": str(out),
        "hal": {"backend": "cpu", "compilation": {"compiler": "graph"}},
    }
    result = run("import vllm_families; vllm_families.main()", json.dumps(asked))
    assert out.exists(), result.stdout + result.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found == {name: [] for name in (*checkpoints, "reloaded", "reloaded over random weights", "specifications")}


@needs_vllm
@pytest.mark.parametrize(
    ("device", "compiler", "dtype", "block", "prompt", "longest"),
    [
        ("cpu", "eager", "float32", 16, 100, 1024),
        ("cpu", "graph", "float32", 16, 100, 1024),
        ("npu", "graph", "float16", 128, 600, 2048),
    ],
)
def test_vllm_frees_the_blocks_before_a_window(
    tmp_path: Path, device: str, compiler: str, dtype: str, block: int, prompt: int, longest: int
) -> None:
    if device == "npu" and not installed("torch-npu"):
        pytest.skip("torch_npu is not installed")
    found = found_by(
        "vllm_windows.main",
        tmp_path,
        family(tmp_path / "mistral", "mistral", max_position_embeddings=longest),
        hal={"backend": device, "compilation": {"compiler": compiler}},
        dtype=dtype,
        block=block,
        blocks=prompt // block + 6,
        prompt=prompt,
        new=30,
        longest=longest,
        seed=1,
    )
    assert found["wrong"] == []
    freeing, keeping = found["WindowWorker"], found["KeepingWorker"]
    assert freeing["together"] > keeping["together"]
    assert freeing["steps"] < keeping["steps"]
    assert freeing["dummies"] > 0 == keeping["dummies"]
