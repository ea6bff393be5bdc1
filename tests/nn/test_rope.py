"""Tests for rope parameters: valid config.json entries, and the resulting frequencies against transformers."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import attrs
import pytest
import torch
from helpers.comparison import ROPES, draw_rope, transformers
from helpers.thorough import DRAW, thorough
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hal import ops
from hal.errors import ConfigError
from hal.nn import RopeParameters, RotaryEmbedding
from hal.nn.rope_parameters import ROPE_TYPES

LLAMA_3_1 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
RELEASED = {
    "Llama 3.1": {"rope_theta": 500000.0, "rope_scaling": LLAMA_3_1},
    "Llama 3.2": {"rope_theta": 500000.0, "rope_scaling": LLAMA_3_1 | {"factor": 32.0}},
    "Qwen3 at 131072 tokens": {"rope_theta": 1000000, "rope_scaling": YARN},
    "DeepSeek-V3": {
        "rope_theta": 10000,
        "rope_scaling": YARN
        | {
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "gpt-oss": {"rope_theta": 150000, "rope_scaling": YARN | {"factor": 32.0, "truncate": False}},
    "Vicuna at 16384 tokens": {"rope_scaling": {"type": "linear", "factor": 4.0}},
}


def check(rope: dict[str, Any], head_dim: int) -> None:
    ours = RopeParameters.from_config(rope)
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, **copy.deepcopy(rope))  # mutated
    )
    width = RotaryEmbedding(head_dim, ours).width
    torch.testing.assert_close(ours.inv_freq(width, torch.device("cpu")), theirs.inv_freq, rtol=1e-6, atol=0)
    assert math.isclose(ours.attention_scaling, theirs.attention_scaling, rel_tol=1e-9)

    positions = torch.tensor([0, 1, 17, 1000])
    expected = theirs(torch.empty(0), positions[None])
    for mine, other in zip(RotaryEmbedding(head_dim, ours)(positions, torch.float32), expected, strict=True):
        torch.testing.assert_close(mine, other[0], rtol=0, atol=2e-4)  # One ulp of an angle of 1000 is 6e-5.
        torch.testing.assert_close(mine[:2], other[0, :2], rtol=0, atol=2e-6)


@pytest.mark.parametrize("rope", RELEASED.values(), ids=RELEASED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_released_checkpoints(rope: dict[str, Any], head_dim: int) -> None:
    check(rope, head_dim)


@thorough(DRAW, r"\[seed=([5-9]|\d\d)-")
@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("seed", range(25), ids="seed={}".format)
def test_random_parameters(rope_type: str, seed: int) -> None:
    draw = random.Random(seed)
    check({"rope_parameters": draw_rope(draw, rope_type)}, draw.choice((16, 32, 64, 80, 128, 256)))


def test_both_spellings() -> None:
    theta = {"rope_theta": 5e5}
    new = RopeParameters.from_config({"rope_parameters": LLAMA_3_1 | theta})
    assert type(new) is ROPE_TYPES["llama3"]
    without_type = {key: value for key, value in LLAMA_3_1.items() if key != "rope_type"}
    for same in (
        {"rope_parameters": LLAMA_3_1} | theta,
        {"rope_scaling": LLAMA_3_1} | theta,
        {"rope_scaling": without_type | {"type": "llama3"}} | theta,
        {"rope_scaling": LLAMA_3_1 | {"type": "llama3"}, "rope_parameters": None} | theta,
        {"rope_scaling": LLAMA_3_1 | theta, "rope_parameters": LLAMA_3_1 | theta},
        {"rope_scaling": LLAMA_3_1 | theta, "rope_theta": 1e4},  # The table's value takes precedence.
    ):
        assert RopeParameters.from_config(same) == new
    for default in ({}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_parameters": {"rope_type": "default"}}):
        assert RopeParameters.from_config(default) == RopeParameters(rope_theta=10000.0)


def without(key: str, rope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if name != key}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarm", "factor": 2.0}, "rope_type 'yarm': did you mean 'yarn'.*known: default, linear, llama3"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic'"),
        ({"rope_type": 3}, "rope_type 3"),
        ({"rope_type": ["yarn"]}, "rope_type"),
        ({"rope_type": "default", "type": "mrope"}, "rope_type 'default' and type 'mrope'"),
        ({"type": "linear"}, "required key 'factor' is missing.*rope_type linear"),
        ({"type": "linear", "factor": None}, "required key 'factor' is missing.*rope_type linear"),
        *(
            (without(key, LLAMA_3_1), f"required key '{key}' is missing.*rope_type llama3")
            for key in LLAMA_3_1
            if key != "rope_type"
        ),
        *((without(key, YARN), f"required key '{key}' is missing.*rope_type yarn") for key in YARN if key != "type"),
        ({"rope_type": "default", "factor": 2.0}, "unknown key 'factor'"),
        (YARN | {"beta_fats": 3}, "unknown key 'beta_fats' .did you mean 'beta_fast'"),
        (YARN | {"low_freq_factor": 1.0}, "unknown key 'low_freq_factor'"),
        (YARN | {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' must be <= 1.0"),
        ({"partial_rotary_factor": 0.0}, "'partial_rotary_factor' must be > 0"),
        ({"partial_rotary_factor": True}, "expected float, found bool True"),
        (YARN | {"attn_factor": 0.878}, "attn_factor 0.878, which vLLM.*remove it, or replace it by attention_factor"),
        ({"type": "linear", "factor": 2.0, "attention_factor": 1.1}, "unknown key 'attention_factor'"),
        ({"full_attention": {"rope_type": "default"}}, "unknown key 'full_attention'"),
        (YARN | {"factor": "4"}, "expected float, found str '4'"),
        (YARN | {"truncate": 1}, "expected bool, found int 1"),
        (YARN | {"factor": 0.0}, "'factor' must be > 0"),
        (YARN | {"factor": float("inf")}, "expected a finite number, found inf.*factor"),
        (YARN | {"factor": 1e20}, "'factor' must be <= 1.8"),
        (YARN | {"factor": 1e-20}, "'factor' must be >= 5.4"),
        (YARN | {"attention_factor": 256.0}, "is 256; it must be at most 255"),
        (YARN | {"mscale": 1e4, "mscale_all_dim": 1e-9}, "mscale_all_dim, is 1387.29; it must be at most 255"),
        (YARN | {"factor": float("nan")}, "expected a finite number, found nan.*factor"),
        (YARN | {"beta_slow": 0}, "'beta_slow' must be > 0"),
        (YARN | {"attention_factor": -1.0}, "'attention_factor' must be >= 0"),
        (YARN | {"original_max_position_embeddings": 0}, "must be >= 1"),
        (YARN | {"rope_theta": 1.0}, "'rope_theta' must be > 1"),
        ({"type": ""}, "rope_type ''"),
        ([], "must be a table of keys and values, not list"),
        ("", "must be a table of keys and values, not str"),
        (0, "must be a table of keys and values, not int 0"),
        (LLAMA_3_1 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0; it must be greater than .*, 1.0"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_what_is_refused(rope: Any, message: str, spelling: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        RopeParameters.from_config({spelling: rope})
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({}, 512),
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"type": "linear", "factor": 1e19}, 2**31 - 1),
        (YARN, 131072),
        (YARN | {"factor": 1.0, "original_max_position_embeddings": 300}, 512),
        (YARN | {"factor": 1e15}, 2**31 - 1),
        (LLAMA_3_1, 512),
    ],
)
def test_linear_scaling_and_yarn_lengthen_what_config_json_says(rope: dict[str, Any], longest: int) -> None:
    assert RopeParameters.from_config({"rope_scaling": rope}).longest(512) == longest


NEUTRAL: dict[str, Any] = {
    "factor": 1.0,
    "attention_factor": 1,
    "attn_factor": 1.0,
    "extrapolation_factor": 1,
    "finetuned": True,
    "original_max_position_embeddings": 77,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
    "beta_fast": None,
    "short_factor": None,
}
"""Keys without effect in a table whose type does not read them."""


@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("key", NEUTRAL)
def test_a_key_without_effect_is_no_error(rope_type: str, key: str) -> None:
    rope = draw_rope(random.Random(0), rope_type)
    read = {field.name for field in attrs.fields(ROPE_TYPES[rope_type])}
    value = rope[key] if key in rope else NEUTRAL[key]
    if key not in read:
        assert RopeParameters.from_config({"rope_parameters": rope | {key: value}}) == RopeParameters.from_config(
            {"rope_parameters": rope}
        )
    check({"rope_parameters": {key: value} | rope}, 64)  # transformers agrees that it has none


@pytest.mark.parametrize("key", ["partial_rotary_factor", "original_max_position_embeddings", "rope_theta"])
def test_keys_beside_the_table(key: str) -> None:
    value = {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096, "rope_theta": 5e5}[key]
    check({"rope_scaling": YARN, key: value}, 64)
    check({"rope_parameters": {"rope_type": "default"}, key: value}, 64)


@pytest.mark.parametrize("rope_type", sorted({*ROPES} - {"default"}))  # Llama's class ignores the key there.
def test_a_part_of_a_head(rope_type: str) -> None:
    rope = draw_rope(random.Random(1), rope_type)
    check({"rope_parameters": rope | {"partial_rotary_factor": 0.5}}, 64)
    check({"rope_parameters": rope, "partial_rotary_factor": 0.25}, 64)


LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [1.0 + pair for pair in range(8)],
}


@pytest.mark.parametrize("original", [16, 64, 128])
@pytest.mark.parametrize("more", [{}, {"factor": 3.0}, {"attention_factor": 1.3}], ids=str)
def test_longrope_with_the_divisors_of_the_models_length(original: int, more: dict[str, Any]) -> None:
    """transformers takes those of each text's length, which here are the same: the text is as long as the model."""
    config = {"rope_parameters": LONG | more | {"original_max_position_embeddings": original}}
    config["max_position_embeddings"] = 64
    ours = RopeParameters.from_config(config)
    rotary = RotaryEmbedding(16, ours)
    assert ours.divisors == tuple(LONG["long_factor" if original < 64 else "short_factor"])
    rotary.divisors = torch.tensor(ours.divisors)
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(head_dim=16, **copy.deepcopy(config)))
    positions = torch.arange(64)
    for mine, other in zip(rotary(positions, torch.float32), theirs(torch.empty(0), positions[None]), strict=True):
        torch.testing.assert_close(mine, other[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_factor": None}, "required key 'short_factor' is missing.*rope_type longrope"),
        ({"long_factor": [1.0, "2"]}, "expected float, found str '2'"),
        ({"long_factor": [0.0] * 8}, "must be > 0"),
        ({"long_factor": [1.0] * 7}, "factors for 7 pairs, and a head has 8 rotated pairs"),
        ({"partial_rotary_factor": 0.5}, "factors for 8 pairs, and a head has 4 rotated pairs"),
        ({"original_max_position_embeddings": 1}, "must be >= 2"),
        ({"attention_factor": 256.0}, "must be <= 255"),
    ],
)
def test_longrope_that_is_refused(change: dict[str, Any], message: str) -> None:
    config = {
        "rope_parameters": LONG | {"original_max_position_embeddings": 16} | change,
        "max_position_embeddings": 64,
    }
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        RotaryEmbedding(16, RopeParameters.from_config(config))


@pytest.mark.parametrize(("factor", "width"), [(0.4, 3), (0.1, 0)])
def test_a_part_without_pairs_is_refused(factor: float, width: int) -> None:
    rope = RopeParameters.from_config({"partial_rotary_factor": factor})
    with pytest.raises(ConfigError, match=f"{factor}, so that {width} of the 8 elements of a head are rotated"):
        RotaryEmbedding(8, rope)


@pytest.mark.usefixtures("cpu")
def test_adjacent_elements_are_the_halves_in_another_order() -> None:
    rope, positions = RopeParameters(partial_rotary_factor=0.5), torch.arange(7)
    query, key = torch.randn(2, 7, 3, 16, generator=torch.Generator().manual_seed(3)).unbind()
    order = [*range(0, 8, 2), *range(1, 8, 2), *range(8, 16)]
    halves = ops.rotary_embedding(
        query[..., order], key[..., order], *RotaryEmbedding(16, rope)(positions, torch.float32)
    )
    angles = RotaryEmbedding(16, rope, interleaved=True)(positions, torch.float32)
    for one, other in zip(ops.rotary_embedding(query, key, *angles, True), halves, strict=True):
        torch.testing.assert_close(one[..., order], other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(64, RopeParameters.from_config({"rope_scaling": YARN}))
    positions = torch.arange(40)
    for rounded, exact in zip(rotary(positions, dtype), rotary(positions, torch.float32), strict=True):
        assert torch.equal(rounded, exact.to(dtype))
