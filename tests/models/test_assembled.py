"""Families that :mod:`hal.nn` assembles, against Hugging Face transformers, on random checkpoints."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
from helpers import assembled, comparison
from helpers.comparison import (
    TOLERANCE,
    Case,
    difference,
    draw_rope,
    our_logits,
    our_outputs,
    their_hidden,
    their_logits,
)
from helpers.thorough import DRAW, FAMILY, MODE, thorough

import hal

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

SEEDS = range(1, 5)  # test_the_configurations_cover_what_they_should checks them.
COMPILED = range(1, 2)  # Compiling takes seconds each.


def sizes(draw: random.Random) -> dict[str, Any]:
    kv_heads = draw.choice((1, 2))
    return {
        "vocab_size": draw.choice((97, 256)),
        "hidden_size": draw.choice((48, 96)),
        "intermediate_size": draw.choice((56, 128)),
        "num_hidden_layers": draw.randint(2, 4),
        "num_attention_heads": kv_heads * draw.choice((1, 2, 4)),
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "tie_word_embeddings": draw.random() < 0.5,
        "attn_implementation": "eager",
    }


def qwen2(draw: random.Random) -> Any:
    given = sizes(draw)
    given["hidden_size"] = given["num_attention_heads"] * draw.choice((16, 32))
    if draw.random() < 0.6:
        given |= {"use_sliding_window": True, "sliding_window": draw.randint(5, 20)}
        given["max_window_layers"] = draw.randrange(given["num_hidden_layers"])
    rope = draw_rope(draw, draw.choice(("default", "yarn")))
    return transformers.Qwen2Config(**given, rms_norm_eps=draw.choice((1e-6, 1e-3)), rope_parameters=rope)


def gemma3(draw: random.Random) -> Any:
    given = sizes(draw)
    given["num_hidden_layers"] = draw.randint(2, 6)
    given["hidden_size"] = given["num_attention_heads"] * draw.choice((16, 24))
    given["layer_types"] = [draw.choice(("full_attention", "sliding_attention")) for _ in range(draw.randint(2, 4))]
    given["num_hidden_layers"] = len(given["layer_types"])
    ropes = {
        "full_attention": draw_rope(draw, draw.choice(("default", "linear"))),
        "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4))},
    }
    return transformers.Gemma3TextConfig(
        **given,
        head_dim=draw.choice((16, 32)),
        query_pre_attn_scalar=draw.choice((16, 24)),
        sliding_window=draw.randint(5, 20),
        final_logit_softcapping=draw.choice((None, 3.0)),
        rope_parameters=ropes,
    )


def rotated(draw: random.Random, *, part: float | None = None) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4))}
    return {"rope_parameters": rope if part is None else {**rope, "partial_rotary_factor": part}}


def heads(draw: random.Random) -> dict[str, Any]:
    """Return sizes in which the heads together are as wide as hidden_size."""
    given = sizes(draw)
    given["hidden_size"] = given["num_attention_heads"] * draw.choice((16, 32))
    return given


def cohere(draw: random.Random) -> Any:
    scale = draw.choice((0.0625, 0.5))
    return transformers.CohereConfig(
        **heads(draw), **rotated(draw), logit_scale=scale, attention_bias=draw.random() < 0.5
    )


def phi(draw: random.Random) -> Any:
    part = rotated(draw, part=draw.choice((0.25, 0.5)))
    return transformers.PhiConfig(
        **{**heads(draw), "tie_word_embeddings": False}, **part, qk_layernorm=draw.random() < 0.5
    )


def stablelm(draw: random.Random) -> Any:
    part, given = rotated(draw, part=draw.choice((0.25, 0.5))), heads(draw)
    flags = {"use_qkv_bias": draw.random() < 0.5, "use_parallel_residual": draw.random() < 0.5}
    return transformers.StableLmConfig(**given, **part, **flags, layer_norm_eps=draw.choice((1e-5, 1e-3)))


def olmo2(draw: random.Random) -> Any:
    return transformers.Olmo2Config(**heads(draw), **rotated(draw), rms_norm_eps=draw.choice((1e-6, 1e-3)))


def granite(draw: random.Random) -> Any:
    factors = {
        "embedding_multiplier": draw.choice((1.0, 12.0)),
        "logits_scaling": draw.choice((3.0, 8.0)),
        "residual_multiplier": draw.choice((0.22, 1.0)),
        "attention_multiplier": draw.choice((0.015625, 0.3)),
    }
    return transformers.GraniteConfig(**heads(draw), **rotated(draw), **factors, mlp_bias=draw.random() < 0.5)


def smollm3(draw: random.Random) -> Any:
    given = heads(draw)
    without = [draw.choice((0, 1)) for _ in range(given["num_hidden_layers"])]
    return transformers.SmolLM3Config(**given, **rotated(draw), no_rope_layers=without, pad_token_id=0)


def nemotron(draw: random.Random) -> Any:
    given = heads(draw) | {"head_dim": draw.choice((16, 32))}
    return transformers.NemotronConfig(**given, **rotated(draw, part=0.5), norm_eps=draw.choice((1e-5, 1e-3)))


FAMILIES = {
    "qwen2": qwen2,
    "gemma3": gemma3,
    "cohere": cohere,
    "phi": phi,
    "stablelm": stablelm,
    "olmo2": olmo2,
    "granite": granite,
    "smollm3": smollm3,
    "nemotron": nemotron,
}
OUTSIDE: dict[str, type[hal.nn.CausalLM]] = {
    "cohere": assembled.CohereForCausalLM,
    "phi": assembled.PhiForCausalLM,
    "stablelm": assembled.StableLmForCausalLM,
    "olmo2": assembled.Olmo2ForCausalLM,
    "granite": assembled.GraniteForCausalLM,
    "smollm3": assembled.SmolLM3ForCausalLM,
    "nemotron": assembled.NemotronForCausalLM,
}
"""Families that no entry point registers."""


def draw_config(family: str, seed: int) -> Any:
    return FAMILIES[family](random.Random(f"{family} {seed}"))


def older(config: dict[str, Any], draw: random.Random) -> None:
    """Rewrite a config.json as older checkpoints have it."""
    ropes = config["rope_parameters"]
    if "full_attention" in ropes:
        config["rope_parameters"] = ropes["full_attention"]
        config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    else:
        config.pop("layer_types", None)  # follows from other keys
    comparison.spell_as_before_version_5(config, draw)


CASES = [(family, seed) for family in FAMILIES for seed in SEEDS]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "{},seed={}".format(*case))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, seed = request.param
    respelled = None if family in OUTSIDE else older
    case = comparison.build(draw_config(family, seed), seed, tmp_path_factory.mktemp(family), respelled)
    return attrs.evolve(case, model_class=OUTSIDE.get(family))


def check(case: Case, compiler: str) -> None:
    logits, hidden = our_outputs(case.runner(compiler), case)
    assert difference(logits, [their_logits(case.model, sequence) for sequence in case.sequences]) <= TOLERANCE
    assert difference(hidden, [their_hidden(case.model, sequence) for sequence in case.sequences]) <= TOLERANCE


@thorough(DRAW, "seed=[2-4]")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_logits(case: Case, compiler: str) -> None:
    check(case, compiler)


@thorough(MODE, "inductor")
@thorough(FAMILY, "qwen2|olmo2|granite|smollm3|nemotron")
@pytest.mark.parametrize(
    "case",
    [(family, seed) for family in FAMILIES for seed in COMPILED],
    ids=lambda case: "{},seed={}".format(*case),
    indirect=True,
)
@pytest.mark.parametrize("compiler", ["piecewise", "inductor"])
def test_logits_of_other_compilers(case: Case, compiler: str) -> None:
    check(case, compiler)


@thorough(DRAW, "seed=[2-4]")
def test_prefill_after_a_cached_prefix(case: Case) -> None:
    theirs = [their_logits(case.model, sequence) for sequence in case.sequences]
    assert difference(our_logits(case.runner(), case, cuts=case.cuts), theirs) <= TOLERANCE


def test_the_configurations_cover_what_they_should() -> None:
    def drawn(family: str, key: str) -> set[Any]:
        return {getattr(draw_config(family, seed), key) for seed in SEEDS}

    assert drawn("qwen2", "use_sliding_window") == {False, True}
    assert len(drawn("gemma3", "final_logit_softcapping")) == 2
    assert drawn("cohere", "attention_bias") == drawn("cohere", "tie_word_embeddings") == {False, True}
    assert drawn("phi", "qk_layernorm") == drawn("stablelm", "use_parallel_residual") == {False, True}
    for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier"):
        assert len(drawn("granite", key)) == 2
    rotates = [draw_config("smollm3", seed).no_rope_layers for seed in SEEDS]
    assert {0, 1} in [set(each) for each in rotates]
