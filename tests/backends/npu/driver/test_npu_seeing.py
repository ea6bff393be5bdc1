"""Tests that models which read images give the CPU's logits on the emulated NPU."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cann import trace
from helpers.comparison import randomize
from helpers.npu import processes
from helpers.npu.schemes import count_launches
from helpers.seeing import Story, build, config_of, our_logits, story, transformers
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal

pytestmark = pytest.mark.usefixtures("one_thread")

Seeing = Callable[..., tuple[Path, list[Story]]]
RATIO = 2.0
"""How much larger the error may be than the CPU's in the same dtype. Both differ from float32 by a few roundings."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """Return what writes the checkpoint of a family once, and draws its stories."""

    @functools.cache
    def written(family: str, seed: int = 1) -> tuple[Path, list[Story]]:
        path, draw = tmp_path_factory.mktemp(family), random.Random(seed)
        model = build(family, seed, path)
        return path, [story(draw, model, kinds) for kinds in (["image"], [], ["image", "video"])]

    return written


def logits(path: Path, stories: list[Story], **config: Any) -> Tensor:
    """Return the logits of all tokens."""
    backend = hal.open({"cache": {"num_tokens": 2048}, **config})
    with backend, hal.Runner(hal.load_model(path, backend), backend) as runner:
        return torch.cat(our_logits(runner, stories))


def check(family: str, dtype: str, compiler: str, path: Path, stories: list[Story]) -> None:
    """Compare with float32, from which the CPU's logits in the dtype differ, too.

    Of a family with experts, the median token counts: one that rounding sends to another expert is far from float32.
    """
    exact = logits(path, stories, backend="cpu", dtype="float32")
    rounded = logits(path, stories, backend="cpu", dtype=dtype)
    compilation = {"compiler": compiler, **({"capture_sizes": [2, 4]} if compiler == "graph" else {})}
    found = logits(path, stories, backend="npu", dtype=dtype, compilation=compilation)
    average = torch.median if "Moe" in family else torch.mean
    errors = [float(average((each - exact).square().mean(1)).sqrt()) for each in (found, rounded)]
    assert errors[0] <= RATIO * errors[1], errors


@thorough(MODE, r"\[Qwen")
@thorough(EXHAUSTIVE, r"\[Qwen3_5(-bfloat16-eager|-float16|Moe)|\[Qwen3VL-float16")
@pytest.mark.parametrize(
    ("family", "dtype", "compiler"),
    [
        ("Qwen3VL", "bfloat16", "graph"),
        ("Qwen3VL", "bfloat16", "eager"),
        ("Qwen3VL", "float16", "graph"),
        ("Qwen3VLMoe", "bfloat16", "graph"),
        ("Qwen2_5_VL", "bfloat16", "graph"),
        ("Qwen3_5", "bfloat16", "graph"),
        ("Qwen3_5", "bfloat16", "eager"),
        ("Qwen3_5", "float16", "graph"),
        ("Qwen3_5Moe", "bfloat16", "graph"),
    ],
)
def test_logits(family: str, dtype: str, compiler: str, seeing: Seeing) -> None:
    check(family, dtype, compiler, *seeing(family))


@thorough(EXHAUSTIVE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(2, 21))
@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3VLMoe", "Qwen2_5_VL", "Qwen3_5", "Qwen3_5Moe"])
def test_logits_of_random_configurations(family: str, seed: int, dtype: str, seeing: Seeing) -> None:
    check(family, dtype, ("eager", "graph")[seed % 2], *seeing(family, seed))


@thorough(MODE, r"float16")
@thorough(EXHAUSTIVE, r"Qwen3VL-bfloat16")
@pytest.mark.parametrize(
    ("family", "dtype"), [("Qwen2_5_VL", "bfloat16"), ("Qwen3VL", "bfloat16"), ("Qwen3VL", "float16")]
)
def test_captured_towers(family: str, dtype: str, seeing: Seeing) -> None:
    """A graph takes images of other sizes, and Qwen2.5-VL's two lists of lengths. Only float16 rounds otherwise."""
    path, stories = seeing(family)
    items = [item for each in stories for item in each.items]
    groups = [[items[0]], items, items[1:]]
    rows, found = sum(each.values.shape[0] for each in items) // 4, []
    for encoder in ({"compiler": "eager"}, {"compiler": "graph", "capture_sizes": [rows]}):
        backend = hal.open({"backend": "npu", "dtype": dtype, "compilation": {"encoder": encoder}})
        with backend, hal.Runner(hal.load_model(path, backend), backend) as runner:
            made = []
            for group in groups:
                runner.forget()
                made += [each.float().cpu() for each in runner.encode(group)]
            assert runner.encoding_replays == (3 if encoder["compiler"] == "graph" else 0)
        found.append(torch.cat(made))
    torch.testing.assert_close(*found, rtol=0, atol=0 if dtype == "bfloat16" else 1e-3 * float(found[0].abs().max()))


def test_launches_of_the_tower(seeing: Seeing) -> None:
    """Attention within all frames of all images is one launch in each layer."""
    path, stories = seeing("Qwen3VL")
    backend = hal.open({"backend": "npu", "dtype": "bfloat16"})
    with backend, hal.Runner(hal.load_model(path, backend), backend) as runner:
        depth = runner.model.encoder.config.depth  # type: ignore[union-attr]
        backend.device.synchronize()
        with trace() as tracing:
            runner.encode([item for each in stories for item in each.items])
            backend.device.synchronize()
    names = [record.name for record in tracing.records if record.kind == "kernel"]
    assert sum("FusedInferAttention" in each for each in names) == depth, names


def test_launches_of_a_text_layer_with_images() -> None:
    """Positions with three axes keep the fusions of norms and rotations. The first layers add a part of DeepStack."""
    checkpoint = processes.ROOT / "checkpoints" / "tiny-pictures"
    (found,) = count_launches(checkpoint, "bfloat16", {}, (8,), ("graph",))
    fused = {"AddRmsNorm": 2, "RmsNorm": 2, "ApplyRotaryPosEmbV2": 1, "Add": 1, "SwiGlu": 1}
    assert {name: found.layer[name] for name in fused} == fused
    page = (processes.ROOT / "docs" / "reference" / "npu-launches.md").read_text(encoding="utf-8")
    assert f"| together | {found.per_layer - fused['Add']} | 9 | 11 | 10 |" in page


def test_a_text_layer_with_images_and_a_cache_in_fractal_nz(tmp_path: Path) -> None:
    """One kernel norms, rotates by three axes and writes the cache. It takes heads of 128 alone."""
    config = config_of("Qwen3VL", 3)
    config.text_config.head_dim, config.text_config.max_position_embeddings = 128, 1024
    config.text_config.rope_parameters["mrope_section"] = [24, 20, 20]
    config.vision_config.deepstack_visual_indexes = []
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    randomize(model, 3)
    model.save_pretrained(tmp_path)
    (found,) = count_launches(tmp_path, "bfloat16", {"nz_cache": True}, (8,), ("graph",))
    names = ("Matmul", "AddRmsNorm", "QkvRmsNormRopeCache", "FusedInferAttentionScoreV3", "SwiGlu")
    assert found.layer == dict(zip(names, (4, 2, 1, 1, 1), strict=True))
    page = (processes.ROOT / "docs" / "reference" / "npu-launches.md").read_text(encoding="utf-8")
    assert f"| 13 | {found.per_layer} | 11 | 10 |" in page
    draw = random.Random(3)
    stories = [story(draw, model, kinds) for kinds in (["image"], [], ["image", "video"])]
    exact = logits(tmp_path, stories, backend="cpu", dtype="float32")
    rounded = logits(tmp_path, stories, backend="cpu", dtype="bfloat16")
    compilation = {"compiler": "graph", "capture_sizes": [2, 4]}
    npu = {"backend": "npu", "dtype": "bfloat16", "options": {"nz_cache": True}, "compilation": compilation}
    errors = [float((each - exact).square().mean().sqrt()) for each in (logits(tmp_path, stories, **npu), rounded)]
    assert errors[0] <= RATIO * errors[1], errors
