"""Families that :mod:`hal.nn` assembles, against Hugging Face transformers, on random checkpoints."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers import comparison
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

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

SEEDS = range(8)  # test_the_configurations_cover_what_they_should checks them.
COMPILED = range(3)  # Compiling takes seconds each.


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


FAMILIES = {"qwen2": qwen2, "gemma3": gemma3}


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
    return comparison.build(draw_config(family, seed), seed, tmp_path_factory.mktemp(family), older)


def check(case: Case, compiler: str) -> None:
    logits, hidden = our_outputs(case.runner(compiler), case)
    assert difference(logits, [their_logits(case.model, sequence) for sequence in case.sequences]) <= TOLERANCE
    assert difference(hidden, [their_hidden(case.model, sequence) for sequence in case.sequences]) <= TOLERANCE


@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_logits(case: Case, compiler: str) -> None:
    check(case, compiler)


@pytest.mark.parametrize(
    "case",
    [(family, seed) for family in FAMILIES for seed in COMPILED],
    ids=lambda case: "{},seed={}".format(*case),
    indirect=True,
)
@pytest.mark.parametrize("compiler", ["piecewise", "inductor"])
def test_logits_of_other_compilers(case: Case, compiler: str) -> None:
    check(case, compiler)


def test_prefill_after_a_cached_prefix(case: Case) -> None:
    theirs = [their_logits(case.model, sequence) for sequence in case.sequences]
    assert difference(our_logits(case.runner(), case, cuts=case.cuts), theirs) <= TOLERANCE
