"""Tests of families that two ranks split: merged projections, sinks, biases of experts, norms over all heads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_configs, rank_programs
from helpers.ranks import in_ranks
from helpers.thorough import EXHAUSTIVE, FAMILY, thorough


@thorough(EXHAUSTIVE, r"\[(Olmo|Phi|Qwen3.5)")
@thorough(FAMILY, r"\[(?!gpt-oss)")
@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss-20b-BF16",
        "Olmo-3-7B-Instruct",
        "Phi-4-mini-instruct",
        "GLM-4.6",
        "MiniMax-M2",
        "MiniMax-M3",
        "DeepSeek-V3",
        "DeepSeek-V3.2",
        "DeepSeek-V4-Flash",
        "GLM-5.2",
        "GLM-5.3-Flash",
        "Kimi-Linear-48B-A3B-Instruct",
        "gemma-4-E2B-it",
        "gemma-4-26B-A4B-it",
        "Qwen3-Next-80B-A3B-Instruct",
        "Qwen3.5-0.8B",
        "Qwen3.8-Flash-Next",
    ],
)
def test_the_same_logits(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, {"tensor": 2})


@thorough(EXHAUSTIVE, r"\[(all_gather|all_to_all-[GK])")
@thorough(FAMILY)
@pytest.mark.parametrize(
    ("experts", "name"),
    [
        ("all_gather", "Qwen3-Next-80B-A3B-Instruct"),
        ("all_to_all", "Qwen3-Next-80B-A3B-Instruct"),
        ("all_gather", "DeepSeek-V3"),
        ("dispatch", "DeepSeek-V3.2"),
        ("all_to_all", "GLM-5.2"),
        ("all_to_all", "Kimi-Linear-48B-A3B-Instruct"),
        ("all_to_all", "Qwen3.8-Flash-Next"),
    ],
)
def test_other_layers_beside_whole_experts(experts: str, name: str, tmp_path: Path) -> None:
    check(name, tmp_path, {"tensor": 2, "experts": experts})


def check(name: str, tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Compare two ranks with one, which takes more memory."""
    checkpoint = str(published_configs.write(tmp_path / name, name))
    alone = rank_programs.logits(checkpoint, "float32", {})
    for rank in in_ranks("logits", 2, checkpoint=checkpoint, dtype="float32", parallel=parallel):
        torch.testing.assert_close(rank["logits"], alone["logits"], rtol=1e-4, atol=1e-4)
        assert rank["held"] < 0.7 * alone["held"]


@thorough(FAMILY)
@thorough(EXHAUSTIVE, r"\[Qwen(3VL|2_5|3_5Moe)")
@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3VLMoe", "Qwen2_5_VL", "Qwen3_5", "Qwen3_5Moe"])
def test_the_same_logits_of_images(family: str, tmp_path: Path) -> None:
    """The text model is split, and the tower is not."""
    from helpers.seeing import build, story  # needs transformers

    model, draw = build(family, 3, tmp_path), random.Random(3)
    stories = [story(draw, model, kinds) for kinds in (["image"], [], ["image", "video"])]
    alone = rank_programs.image_logits(str(tmp_path), stories, {})
    for rank in in_ranks("image_logits", 2, checkpoint=str(tmp_path), stories=stories, parallel={"tensor": 2}):
        torch.testing.assert_close(rank["logits"], alone["logits"], rtol=1e-4, atol=1e-4)
