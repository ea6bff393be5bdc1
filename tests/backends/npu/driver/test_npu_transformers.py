"""Tests of models of transformers on the emulated NPU: tokens, and launches with and without hal's operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated_cann
import pytest
import torch
from helpers import transformers_families
from helpers.thorough import EXHAUSTIVE, FAMILY, LONG, thorough
from helpers.tiny_transformers import FAMILIES, generate, model_of, prompts_of

import hal

pytest.importorskip("transformers", reason="these tests run models of transformers")

SIZES = {"head_dim": 64, "hidden_size": 64}
LAUNCHES = {"Qwen3": (56, 13), "Llama": (40, 12), "Mixtral": (68, 17), "Qwen3Moe": (84, 19)}
"""Of a decode layer, without hal's operations and with them, as docs/how-to/use-with-transformers.md has them."""


def launches(family: str, prepare: Callable[[Any], object], *, queries: int) -> Counter[str]:
    """Return the launches that a second layer adds to a step, by kernel."""
    found = []
    for layers in (1, 2):
        torch.compiler.reset()
        model = model_of(family, layers=layers, dtype=torch.bfloat16, **SIZES).to("npu")
        prepare(model)
        prompt = torch.tensor(prompts_of(7), device="npu")
        with torch.inference_mode():
            for _ in range(2):
                cache = model(prompt, use_cache=True).cache if queries == 1 else None
                tokens = prompt[:, :queries]
                torch.npu.synchronize()
                with emulated_cann.trace() as trace:
                    model(tokens, cache=cache, use_cache=cache is not None)
        found.append(trace.counts())
    return found[1] - found[0]


def eager_and_compiled(family: str, npu: Callable[..., hal.Backend], queries: int) -> tuple[Counter[str], Counter[str]]:
    """Return the launches of a layer of the model, eager and compiled."""
    npu(dtype="bfloat16")
    plain = launches(family, lambda model: None, queries=queries)
    fused = launches(family, lambda model: model.compile(backend="hal"), queries=queries)
    torch.compiler.reset()
    return plain, fused


@thorough(LONG)
@thorough(EXHAUSTIVE, r"\[(Qwen3|Mixtral)\]")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_launches_of_a_decode_layer(family: str, npu: Callable[..., hal.Backend]) -> None:
    plain, fused = eager_and_compiled(family, npu, queries=1)
    assert (sum(plain.values()), sum(fused.values())) == LAUNCHES[family], f"{plain}, {fused}"
    assert fused["AddRmsNorm"] == 2
    assert fused["FusedInferAttentionScoreV3"] == 1
    assert fused["SwiGlu"] == 1


@thorough(LONG)
@thorough(EXHAUSTIVE, r"\[(Qwen3|Mixtral)\]")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_layer_launches_fewer_kernels(family: str, npu: Callable[..., hal.Backend]) -> None:
    plain, fused = eager_and_compiled(family, npu, queries=7)
    assert sum(fused.values()) < 0.4 * sum(plain.values()), f"{plain}, {fused}"


@thorough(LONG)
@thorough(EXHAUSTIVE, r"\[(Llama|Qwen3|Mixtral)\]")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, npu: Callable[..., hal.Backend]) -> None:
    npu(dtype="float16")
    model, prompts = model_of(family, dtype=torch.float16, **SIZES).to("npu"), prompts_of(9, 4, 14)
    expected = generate(model, prompts, 8)
    torch.compiler.reset()
    model.compile(backend="hal", dynamic=True)
    assert generate(model, prompts, 8) == expected
    torch.compiler.reset()


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@thorough(FAMILY, r"\[(?!llama)")
@pytest.mark.parametrize(("family", "launches"), [("llama", 12), ("qwen3", 14), ("glm4", 16), ("stablelm", 17)])
def test_the_launches_of_a_layer_of_transformers_own_code(
    family: str, launches: int, npu: Callable[..., hal.Backend], tmp_path: Path
) -> None:
    found = []
    for layers in (1, 2):
        kinds = {"layer_types": ["full_attention"] * layers} if family == "qwen3" else {}
        made = transformers_families.model_of(family, num_hidden_layers=layers, **WIDE, **kinds)
        made.save_pretrained(tmp_path / str(layers))
        backend = npu(
            dtype="bfloat16", model_source="transformers", compilation={"compiler": "graph", "capture_sizes": [4]}
        )
        model = hal.load_model(tmp_path / str(layers), backend)
        with backend, hal.Runner(model, backend) as runner:
            runner.step(runner.batch([[5, 6, 7]], [[1]]))
            batch = runner.batch([[8]], [[1]], cached=[3])
            runner.step(batch)
            with backend.counting_launches() as counted:
                runner.step(batch)
                backend.device.synchronize()
            found.append(sum(counted.values()))
    assert found[1] - found[0] == launches
