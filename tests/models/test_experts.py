"""Mixtures of experts: routers, refusals, and the trained checkpoint; test_assembled.py has logits of families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import comparison
from helpers.comparison import TOLERANCE, Case
from helpers.published_configs import CONFIGS
from helpers.reference import open_runner, prompts
from helpers.thorough import EXHAUSTIVE, MODE, thorough

import hal
from hal.checkpoint.model_registry import find_model
from hal.errors import CheckpointError, ConfigError, NumericsError

transformers = pytest.importorskip("transformers", reason="transformers is what our logits are compared with")


@pytest.fixture
def qwen3(tmp_path: Path) -> Case:
    config = transformers.Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        attn_implementation="eager",
    )
    return comparison.build(config, 7, tmp_path / "qwen3_moe")


def test_most_experts_get_no_token(qwen3: Case) -> None:
    """The scores are multiples of one number, so that each token takes the first two experts or the last two."""
    with torch.no_grad():
        for layer in qwen3.model.model.layers:
            gate = layer.mlp.gate.weight
            gate.copy_(torch.arange(len(gate))[:, None] * gate[:1])
    qwen3.model.save_pretrained(qwen3.path)
    assert qwen3.difference() <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_experts_per_tok": 9}, ConfigError, "9 experts per token of 8"),
        ({"num_experts_per_tok": 0}, ConfigError, "0 experts per token of 8"),
        ({"num_local_experts": 9}, CheckpointError, "experts.8"),
        ({"num_local_experts": 7}, CheckpointError, "experts.7"),
        ({"num_local_experts": 1 << 30}, ConfigError, "more than 65536"),
        ({"moe_intermediate_size": 23}, CheckpointError, "experts.0"),
        ({"mlp_only_layers": [1]}, CheckpointError, r"layers.1.mlp.gate_proj.weight"),
        ({"decoder_sparse_step": 2}, CheckpointError, r"layers.0.mlp.gate_proj.weight"),
        ({"mlp_only_layers": [-1]}, ConfigError, "mlp_only_layers"),
    ],
    ids=str,
)
def test_numbers_that_do_not_fit(
    change: dict[str, Any], error: type[Exception], message: str, qwen3: Case, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        open_runner(qwen3.rewritten(tmp_path, lambda config: config.update(change)))


def test_the_base_of_mixtrals_rotation_by_default() -> None:
    """It is not that of the other families."""
    config = {key: value for key, value in CONFIGS["Mixtral-8x7B-Instruct-v0.1"].items() if key != "rope_theta"}
    with torch.device("meta"):
        rope: Any = find_model("MixtralForCausalLM").from_config(config).get_submodule("model.rotary")
    assert rope.rope.rope_theta == transformers.MixtralConfig().rope_parameters["rope_theta"] == 1e6


def test_a_router_with_nan_is_reported(qwen3: Case) -> None:
    with torch.no_grad():
        qwen3.model.model.layers[1].mlp.gate.weight[3] = float("nan")
    qwen3.model.save_pretrained(qwen3.path)
    with pytest.raises(NumericsError):
        list(hal.generate(open_runner(qwen3.path), [[1, 2, 3]], hal.SamplingParams(max_new_tokens=2)))


NEW_TOKENS = 24


@pytest.fixture(scope="module")
def continuations(trained_experts: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts and how transformers continues them greedily, in float32."""
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(trained_experts, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # to the full length
    found = []
    for prompt in prompts(trained_experts):
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        made = model.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append((prompt, made[0, len(prompt) :].tolist()))
    return found


@thorough(MODE, r"\[piecewise")
@thorough(EXHAUSTIVE, r"\[inductor")
@pytest.mark.parametrize("compiler", ["graph", "piecewise", "inductor"])
def test_greedy_tokens_of_the_trained_checkpoint(
    compiler: str, continuations: list[tuple[list[int], list[int]]], trained_experts: Path
) -> None:
    runner = open_runner(trained_experts, compiler, dtype="float32")
    made: list[list[int]] = [[] for _ in continuations]
    params = hal.SamplingParams(max_new_tokens=NEW_TOKENS)
    for token in hal.generate(runner, [prompt for prompt, _ in continuations], params):
        made[token.prompt_index].append(token.token_id)
    assert made == [tokens for _, tokens in continuations]
