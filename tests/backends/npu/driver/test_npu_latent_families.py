"""Tests that models with latent, sparse and block attention give the same tokens with every compiler of the NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import lookups, published_configs
from helpers.thorough import FAMILY, MODE, spread, thorough

import hal

pytestmark = pytest.mark.usefixtures("one_thread")

LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
INDEX = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 16}
GLM = {**LATENTS, **INDEX, "qk_head_dim": 96, "head_dim": 64}
DECODE, PROMPT = "FusedInferAttentionScoreV3", "FusedInferAttentionScoreV4"
SELECT, ATTEND = "LightningIndexer", "SparseFlashAttention"
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "DeepSeek-V2-Lite": (LATENTS, {DECODE: 12, PROMPT: 4}),
    "DeepSeek-V3": (LATENTS, {DECODE: 18, PROMPT: 6}),
    "DeepSeek-V3.2": ({**LATENTS, **INDEX}, {SELECT: 24, ATTEND: 24}),
    "GLM-5": (GLM, {SELECT: 24, ATTEND: 24}),
    "GLM-5.2": (GLM, {SELECT: 16, ATTEND: 32}),
    "DeepSeek-V4-Flash": ({}, {}),
    "Kimi-Linear-48B-A3B-Instruct": (LATENTS, {DECODE: 6, PROMPT: 2}),
    "MiniMax-M3": ({}, {}),
    "Qwen3.8-Flash-Next": ({}, {}),
}
"""By the name of a published config: sizes that CANN's operators take, and the launches of these in all steps.

Two steps have prompts, and six do not.
"""
COMPILERS = ("graph", "piecewise", "npugraph_ex")
BLOCKS = [[1], [2], [3]]


def compilation(compiler: str, folder: Path) -> dict[str, Any]:
    given: dict[str, Any] = {"compiler": compiler}
    if compiler != "eager":
        given["capture_sizes"] = [3]
    if compiler == "piecewise":
        given["prefill"] = {"capture_sizes": [32, 64]}
    if compiler == "npugraph_ex":
        given["cache_dir"] = str(folder)
    return given


def generated(runner: hal.Runner) -> list[int]:
    """Return the greedy tokens of a prompt in two chunks, of shorter ones beside it, and of decode steps."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 96, (length,), generator=draw).tolist() for length in (40, 9, 25)]
    tokens = []

    def step(rows: list[list[int]], cached: list[int]) -> list[int]:
        slots = {"slots": [1, 2, 3][: len(rows)]} if runner.states.spec.num_slots else {}
        batch = runner.batch(rows, BLOCKS[: len(rows)], cached=cached, **slots)
        found: list[int] = runner.step(batch).logits.argmax(-1).tolist()
        tokens.extend(found)
        return found

    _, second = step([prompts[0][:20], prompts[1]], [0, 0])
    last = step([prompts[0][20:], [second], prompts[2]], [20, 9, 0])
    for turn in range(6):
        last = step([[each] for each in last], [40 + turn, 10 + turn, 25 + turn])
    return tokens


@thorough(FAMILY, r"-(DeepSeek-V2|DeepSeek-V3\]|DeepSeek-V4|GLM-5\]|Kimi|MiniMax|Qwen)")
@thorough(MODE, r"\[(graph|npugraph_ex)-(DeepSeek-V3\.2|GLM-5\.2)")
@spread
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_compiler_gives_the_eager_tokens(compiler: str, name: str, tmp_path: Path) -> None:
    changes, operators = FAMILIES[name]
    path = published_configs.write(tmp_path / name, name, **changes)
    found = []
    for each in ("eager", compiler):
        config = {"backend": "npu", "dtype": "float16", "cache": {"num_tokens": 128 * 5, "num_sequences": 8}}
        backend = hal.open({**config, "compilation": compilation(each, tmp_path)})
        with hal.Runner(hal.load_model(path, backend), backend) as runner, backend.counting_launches() as launched:
            found.append(generated(runner))
        assert {name: launched[name] for name in operators} == operators
    assert found[0] == found[1]


@thorough(MODE, r"\[graph")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_answers_2000_tokens_later(compiler: str, tmp_path: Path) -> None:
    """The trained checkpoint's, with CANN's operators, whose 64 selected positions have the definitions."""
    config = {"backend": "npu", "dtype": "float16", "cache": {"num_tokens": 128 * 20}, "max_prefill_tokens": 512}
    given = {"compiler": compiler} | ({} if compiler == "eager" else {"capture_sizes": [1]})
    backend = hal.open({**config, "compilation": given})
    asked, launched = lookups.Text.of(hal.Checkpoint.open(lookups.FOLDER)), backend.counting_launches()
    with hal.Runner(hal.load_model(lookups.FOLDER, backend), backend) as runner, launched as launches:
        found = lookups.share(lookups.answered(runner, asked, chunk=512), asked)
    assert found >= lookups.RIGHT
    assert launches[SELECT] == launches[ATTEND] > 0
