"""Adapters on an NPU: applied equals merged, in graphs that were captured before they were loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.adapters import adapter_of
from helpers.checkpoints import random_checkpoint
from helpers.thorough import MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.ops import Draw

Opened = Callable[..., hal.Backend]

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PROMPT = list(range(3, 20))
NEW = 8


@thorough(MODE, "eager|npugraph_ex")
@pytest.mark.parametrize("compiler", ["eager", "graph", "npugraph_ex"])
def test_applied_equals_merged(tmp_path: Path, compiler: str) -> None:
    base = random_checkpoint(tmp_path / "base", **SIZES)
    weights, folders, merged = load_file(base / "model.safetensors"), {}, {}
    for seed, name in enumerate(("first", "second")):
        folders[name], merged[name] = tmp_path / name, shutil.copytree(base, tmp_path / f"merged-{name}")
        updates = adapter_of(weights, folders[name], rank=4 + seed, seed=seed)
        added = {f"{path}.weight": update for path, update in updates.items()}
        both = {path: (each.float() + added.get(path, 0.0)).to(each.dtype) for path, each in weights.items()}
        save_file(both, merged[name] / "model.safetensors")

    def opened(folder: Path, adapters: dict[str, Path]) -> hal.LLM:
        config = {"cache": {"num_tokens": 2048}, "compilation": {"capture_sizes": [1, 2]}}
        return hal.LLM(
            folder,
            backend="npu",
            dtype="float16",
            compiler=compiler,
            adapters=adapters,
            max_sequences=4,
            config=config if compiler != "eager" else {"cache": config["cache"]},
        )

    def texts(llm: hal.LLM, adapter: str | None) -> list[int]:
        options = {"max_new_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
        return list(llm.generate([PROMPT], adapter=adapter, **options)[0].token_ids)

    def logprobs(llm: hal.LLM, tokens: list[int], adapter: str | None = None) -> Tensor:
        [score] = llm.score([PROMPT], [tokens], adapter=adapter)
        return torch.tensor([each.logprob for each in score.tokens])

    found: dict[str, tuple[list[int], Tensor]] = {}
    with opened(base, folders) as llm:
        before = texts(llm, None)
        for name in folders:
            tokens = texts(llm, name)
            found[name] = tokens, logprobs(llm, tokens, name)
        llm.load_adapter("first", folders["second"])
        assert texts(llm, "first") == found["second"][0]
        assert texts(llm, None) == before
    assert found["first"][0] != before
    for name, (tokens, applied) in found.items():
        with opened(merged[name], {}) as llm:
            torch.testing.assert_close(applied, logprobs(llm, tokens), rtol=0, atol=0.03)
            best = llm.generate([[*PROMPT, *tokens[:-1]]], max_new_tokens=1, temperature=0.0, logprobs=0)[0]
            assert best.logprobs is not None
            assert applied[-1] > best.logprobs[0].logprob - 0.05, json.dumps(tokens)
    hal.open("cpu")


@pytest.mark.parametrize(("parts", "launches"), [("0:256", 4), ("0:128 1:64 2:64", 7)])
def test_launches(npu: Opened, parts: str, launches: int) -> None:
    """The same for any number of adapters and tokens; merged projections take their columns of one product."""
    backend, draw = npu(), Draw(torch.float16, "npu")
    count = 1 + parts.count(" ")
    a, b = draw.normal(8, count, 16, 64), draw.normal(8, 16, 256)
    for tokens in (1, 8):
        slots = draw.integers(-1, 8, tokens, dtype=torch.int32)
        given = draw.normal(tokens, 256), draw.normal(tokens, 64), a, b, slots, parts
        backend.device.synchronize()
        with backend.counting_launches() as found:
            hal.ops.add_lora(*given)
        assert sum(found.values()) == launches, dict(found)
