"""Tests for configs and attention of models, apart from numerics, which test_transformers.py compares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hal.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

import hal
from hal.config import read_model_config
from hal.errors import ConfigError, OperationError
from hal.nn import Attention
from hal.ops import AttentionOptions

SMALL: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "head_dim": 4,
    "tie_word_embeddings": True,
}


def build(**changes: Any) -> Qwen3ForCausalLM:
    with torch.device("meta"):
        return Qwen3ForCausalLM.from_config(SMALL | changes)


def test_linear_scaling_lengthens_the_sequences_of_a_model() -> None:
    assert build().max_length == 32
    assert build(rope_scaling={"type": "linear", "factor": 4.0}).max_length == 128


def windows(**changes: Any) -> list[int | None]:
    config = read_model_config(Qwen3Config, SMALL | {"use_sliding_window": True} | changes)
    return [config.window(layer) for layer in range(config.num_hidden_layers)]


@pytest.mark.parametrize(("given", "scale"), [(None, 0.25), (AttentionOptions(3.0), 3.0)])
def test_attention_scales_the_scores(cpu: hal.Backend, given: AttentionOptions | None, scale: float) -> None:
    batch = hal.step.Batch.build([[1, 2, 3]], [[1]], block_size=4)
    query, key, value = torch.randn(3, 3, 2, 16, generator=torch.Generator().manual_seed(1)).unbind()
    cache = {name: torch.zeros(2, 4, 2, 16) for name in ("key", "value")}
    found = Attention(2, 16, given)(query, key, value, batch, cache)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~torch.ones(3, 3).tril().bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("hqk,khd->qhd", weights, value).flatten(1))


@pytest.mark.parametrize("window", [0, -1])
def test_attention_refuses_a_window_without_the_token_itself(window: int) -> None:
    with pytest.raises(OperationError, match=f"the window {window}, .*\n.* 1 or more, or to None"):
        AttentionOptions(0.25, window=window)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan")])
def test_attention_refuses_a_softcap_that_no_score_can_have(softcap: float) -> None:
    with pytest.raises(OperationError, match=r"the softcap .*\n.* more than 0, or to None"):
        AttentionOptions(0.25, softcap=softcap)


def test_windows_of_layers() -> None:
    assert windows(sliding_window=6, max_window_layers=2) == [None, None, 6, 6]
    assert windows(sliding_window=6) == [None] * 4, "as many full layers as the default of transformers"
    assert windows(max_window_layers=3) == [None, None, None, 4096]
    assert windows(max_window_layers=0, sliding_window=None) == [None] * 4
    assert windows(max_window_layers=0, sliding_window=6, use_sliding_window=False) == [None] * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(max_window_layers=4, sliding_window=6, layer_types=types) == [6, None, 6, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "unknown value 'linear_attention'"),
        ({"hidden_act": "mish"}, "unknown value 'mish'.*silu"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"sliding_window": 0, "use_sliding_window": True}, "sliding_window is 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "remove one"),
        ({"hidden_size": "8"}, "expected int, found str '8'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_both_spellings_of_rope_parameters() -> None:
    new = build(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    beside = build(rope_parameters={"rope_type": "default"}, rope_theta=5e5)
    assert beside.model.rotary.rope == new.model.rotary.rope
    old = build(rope_theta=5e5, rope_scaling=None)
    assert new.model.rotary.rope == old.model.rotary.rope
    assert new.model.rotary.rope.rope_theta == 5e5
