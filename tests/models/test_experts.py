"""Mixtures of experts against Hugging Face transformers, on random checkpoints of three families."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import comparison
from helpers.comparison import TOLERANCE, Case, spell_as_before_version_5
from helpers.published_configs import CONFIGS
from helpers.reference import open_runner, prompts
from helpers.thorough import AGAIN, DRAW, EXHAUSTIVE, FAMILY, MODE, thorough

import hal
from hal.checkpoint.model_registry import find_model
from hal.errors import CheckpointError, ConfigError, NumericsError

transformers = pytest.importorskip("transformers", reason="transformers is what our logits are compared with")

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")
SEEDS = range(100, 140)
COMPILED = (100, 111, 113, 134)  # compiling takes seconds each; these have all that changes a graph


def draw_config(family: str, seed: int) -> Any:
    """A configuration with 4 to 64 experts, of which 1 to 8 are chosen, and dense layers between in two families."""
    draw = random.Random(seed)
    kv_heads, layers = draw.choice((1, 2)), draw.randint(1, 4)
    experts = draw.choice((4, 8, 16, 64))
    common: dict[str, Any] = {
        "vocab_size": draw.choice((97, 256)),
        "hidden_size": draw.choice((48, 80, 96)),
        "intermediate_size": draw.choice((40, 56, 72)),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * draw.choice((1, 2, 4)),
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4))},
        "tie_word_embeddings": draw.random() < 0.5,
        "num_experts_per_tok": draw.randint(1, min(8, experts)),
        "attn_implementation": "eager",
    }
    if family == "mixtral":
        window = draw.choice((None, 5, 13))
        return transformers.MixtralConfig(
            **common, head_dim=draw.choice((16, 32)), num_local_experts=experts, sliding_window=window
        )
    common["hidden_size"] = common["num_attention_heads"] * draw.choice((16, 32))
    sparse = {
        "num_experts": experts,
        "moe_intermediate_size": draw.choice((16, 24, 48)),
        "norm_topk_prob": draw.random() < 0.5,
        "decoder_sparse_step": draw.choice((1, 1, 2)),
        "mlp_only_layers": [layer for layer in range(layers) if draw.random() < 0.25],
    }
    window = {"use_sliding_window": True, "sliding_window": draw.randint(5, 20)} if draw.random() < 0.3 else {}
    if family == "qwen3_moe":
        heads = {"head_dim": draw.choice((16, 32)), "attention_bias": draw.random() < 0.5}
        return transformers.Qwen3MoeConfig(**common, **sparse, **window, **heads)
    shared = {"shared_expert_intermediate_size": draw.choice((24, 64)), "qkv_bias": draw.random() < 0.5}
    if window:
        window["max_window_layers"] = draw.randint(1, 4)
    return transformers.Qwen2MoeConfig(**common, **sparse, **window, **shared)


def older(config: dict[str, Any], draw: random.Random) -> None:
    spell_as_before_version_5(config, draw)


@pytest.fixture(scope="module", params=[(family, seed) for family in FAMILIES for seed in SEEDS], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, seed = request.param
    return comparison.build(draw_config(family, seed), seed, tmp_path_factory.mktemp(family), older)


@thorough(EXHAUSTIVE, r", 1(0[5-9]|1[2-9])\)")
@thorough(DRAW, r"\[.*, 1(0[2-9]|[1-3]\d)\)|\[.*, 101\)")
@thorough(EXHAUSTIVE, r"\[.*, 1[23]\d\)|, 1(0[2-9]|1\d)(?<=[02468])\)-eager|, 1(0[2-9]|1\d)(?<=[13579])\)-graph")
@thorough(FAMILY, r"\[\('(mixtral|qwen2_moe)', 100\)-graph")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_logits(case: Case, compiler: str) -> None:
    assert case.difference(compiler) <= TOLERANCE


@thorough(MODE, r"\[piecewise-\('qwen3_moe', 100")
@thorough(EXHAUSTIVE, r"\[inductor-\(('qwen2_moe|'mixtral|'qwen3_moe', 113)|\[piecewise-\('qwen3_moe', 1(13|34)")
@thorough(DRAW, r"\[.*, 1[13]\d\)")
@thorough(AGAIN, r"\[inductor")
@thorough(FAMILY, r"\[piecewise-\('(qwen2_moe|mixtral)")
@thorough(EXHAUSTIVE, r"\[inductor-\('(qwen2_moe|mixtral)', 100|\[inductor-\('\w+', 1(11|34)")
@thorough(EXHAUSTIVE, r"\[piecewise-\('(qwen2_moe|mixtral)', 1(13|34)\)")
@pytest.mark.parametrize("case", [(family, seed) for family in FAMILIES for seed in COMPILED], ids=str, indirect=True)
@pytest.mark.parametrize("compiler", ["piecewise", "inductor"])
def test_logits_of_compiled_steps(case: Case, compiler: str) -> None:
    assert case.difference(compiler) <= TOLERANCE


def test_the_configurations_cover_what_they_should() -> None:
    for family in FAMILIES:
        for seeds in (SEEDS, SEEDS[:20], COMPILED):
            configs = [draw_config(family, seed) for seed in seeds]
            experts = {getattr(each, "num_experts", None) or each.num_local_experts for each in configs}
            assert len(experts) >= (2 if seeds is COMPILED else 4)
            assert len({each.num_experts_per_tok for each in configs}) >= (2 if seeds is COMPILED else 7)
        if family != "mixtral":
            assert {bool(each.mlp_only_layers) for each in configs} == {False, True}
            every = [draw_config(family, seed) for seed in SEEDS[:20]]  # those of `make test-all`
            assert {(each.norm_topk_prob, each.decoder_sparse_step) for each in every} == {
                (norm, step) for norm in (False, True) for step in (1, 2)
            }
            assert {each.use_sliding_window for each in every} == {False, True}


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


@pytest.mark.parametrize("change", [{"norm_topk_prob": False}, {"num_experts_per_tok": 3}], ids=str)
def test_a_wrong_config_would_be_noticed(change: dict[str, Any], qwen3: Case, tmp_path: Path) -> None:
    wrong = qwen3.rewritten(tmp_path, lambda config: config.update(change))
    assert qwen3.difference(path=wrong) > TOLERANCE


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


@thorough(MODE, r"\[eager")
@thorough(MODE, r"\[(piecewise|inductor)")
@thorough(EXHAUSTIVE, r"\[inductor")
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise", "inductor"])
def test_greedy_tokens_of_the_trained_checkpoint(
    compiler: str, continuations: list[tuple[list[int], list[int]]], trained_experts: Path
) -> None:
    runner = open_runner(trained_experts, compiler, dtype="float32")
    made: list[list[int]] = [[] for _ in continuations]
    params = hal.SamplingParams(max_new_tokens=NEW_TOKENS)
    for token in hal.generate(runner, [prompt for prompt, _ in continuations], params):
        made[token.prompt_index].append(token.token_id)
    assert made == [tokens for _, tokens in continuations]
