"""Families with recurrent layers against Hugging Face transformers, on random checkpoints."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_configs, toys
from helpers.comparison import TOLERANCE, difference, their_logits
from helpers.random_hybrids import FAMILIES, build
from helpers.thorough import DRAW, EXHAUSTIVE, MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.checkpoint.loading import check_shared
from hal.config.settings import ParallelConfig
from hal.device.group import Group
from hal.errors import CheckpointError, ConfigError
from hal.nn import GatedDeltaNet
from hal.quantize.quantize_checkpoint import quantize_checkpoint
from hal.step import ALL

MODES = ("eager", "graph", "piecewise", "piecewise_eager", "inductor")
SEEDS = range(12)
SLACK = 3 * TOLERANCE
"""Maximum difference of logits. In chunks and token by token, those of transformers differ by half of TOLERANCE."""


def open_runner(folder: Path, mode: str = "eager", *, sequences: int = toys.SLOTS, **more: Any) -> hal.Runner:
    compilation: dict[str, Any] = {"compiler": mode}
    if mode != "eager":
        compilation["capture_sizes"] = [2] if mode == "inductor" else [2, 4]
    if mode.startswith("piecewise"):
        compilation["prefill"] = {"capture_sizes": [16]}
    config = {"dtype": "float32", "cache": {"num_tokens": 2048, "block_size": 16, "num_sequences": sequences}}
    backend = hal.open({"backend": "cpu", "compilation": compilation, **config, **more})
    runner = hal.Runner(hal.load_model(folder, backend), backend)
    with torch.inference_mode():
        for _, state in runner.states.tensors():
            state[1:] = toys.poison_of(state)  # of sequences that are gone
    return runner


def alone(model: Any, schedule: toys.Schedule) -> list[Tensor]:
    return [their_logits(model, text) for text in schedule.texts]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Path, Any]]:
    return {}


def case_of(saved: Any, tmp_path_factory: Any, family: str, seed: int) -> tuple[Path, Any]:
    if (family, seed) not in saved:
        folder = tmp_path_factory.mktemp("hybrid")
        saved[family, seed] = folder, build(folder, family, seed)
    found: tuple[Path, Any] = saved[family, seed]
    return found


@thorough(DRAW, r"\[1-")
@thorough(EXHAUSTIVE, r"\[([2-9]|\d\d)-")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_prefill_whole_and_in_chunks(saved: Any, tmp_path_factory: Any, family: str, seed: int) -> None:
    """Chunks cut the 64 tokens of the rule's own chunks at any place, and a prefix is resumed from another slot."""
    folder, model = case_of(saved, tmp_path_factory, family, seed)
    runner, draw = open_runner(folder), random.Random(seed)
    texts = [[draw.randrange(61) for _ in range(length)] for length in (150, 64, 1, 67)]
    theirs = [their_logits(model, text) for text in texts]
    blocks = [list(range(1 + 10 * row, 11 + 10 * row)) for row in range(len(texts))]
    slots = runner.slots.take(3) or []
    whole = runner.step(runner.batch(texts[:3], blocks[:3], slots=slots), ALL).logits
    ours = list(whole.clone().split([len(text) for text in texts[:3]]))
    runner.slots.give_back(slots)
    assert difference(ours, theirs[:3]) <= SLACK, f"seed {seed}"
    for size in (draw.randint(1, 5), draw.randint(6, 63), draw.randint(65, 100)):
        (slot,) = runner.slots.take(1) or []
        parts = []
        for start in range(0, 150, size):
            batch = runner.batch([texts[0][start : start + size]], blocks[:1], cached=[start], slots=[slot])
            parts.append(runner.step(batch, ALL).logits.clone())
        assert difference([torch.cat(parts)], theirs[:1]) <= SLACK, f"seed {seed}, chunks of {size}"
        runner.slots.give_back([slot])


@thorough(MODE, r"\[(graph-0|piecewise-0-(Qwen3N|Qwen4|Kimi|Glm|Deep)|piecewise_eager-0-Qwen3_5T|inductor-2-Qwen3_5T)")
@thorough(EXHAUSTIVE, r"\[(eager-[1-9]|[gp]\w+-[1-9]|\w+-\d\d-)")
@thorough(
    EXHAUSTIVE,
    r"\[(piecewise-0-Qwen3_5|piecewise_eager-0-(Qwen(3N|3_5M|4)|Kimi|Glm|Deep)|inductor-(?!2-Qwen3_5T))",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("mode", "seed"),
    [(mode, seed) for mode in MODES for seed in SEEDS],
)
def test_batches_that_change(saved: Any, tmp_path_factory: Any, mode: str, family: str, seed: int) -> None:
    """Sequences start, grow and end in the slots of others, and each gets the logits that it gets alone."""
    folder, model = case_of(saved, tmp_path_factory, family, seed)
    schedule = toys.Schedule.drawn(seed, 61, count=5)
    runner = open_runner(folder, mode)
    assert toys.check(runner, schedule, alone(model, schedule), family, 1e-3) >= 40
    assert runner.slots.num_free == toys.SLOTS


def test_the_text_model_of_a_checkpoint_that_reads_images(tmp_path: Path) -> None:
    """Its names have a prefix, experts are fused, and the other parts are skipped."""
    model = build(tmp_path, "Qwen3_5MoeText", 0)
    inner = {name.removeprefix("model."): each for name, each in model.state_dict().items()}
    tensors = {(name if name.startswith("lm_head") else f"model.language_model.{name}"): inner[name] for name in inner}
    tensors |= {"model.visual.blocks.0.norm.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4, 4)}
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    save_file({name: each.clone() for name, each in tensors.items()}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "text_config": text, "dtype": "float32"}
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = open_runner(tmp_path)
    tokens = list(range(40))
    logits = runner.step(runner.batch([tokens], [[1, 2, 3]], slots=runner.slots.take(1)), ALL).logits
    assert difference([logits], [their_logits(model, tokens)]) <= SLACK


@thorough(EXHAUSTIVE, r"\[(w8a16\]|fp8)")
@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a16_group", "w8a16", "fp8"])
def test_quantized_weights(tmp_path: Path, scheme: str) -> None:
    """The rows of a checkpoint's layer that hal divides among two layers keep their scales."""
    plain = published_configs.write(tmp_path / "plain", "Qwen3.5-0.8B")
    folder = quantize_checkpoint(
        plain, tmp_path / "quantized", scheme, group_size=8 if "group" in scheme else None
    ).path
    logits = []
    for kept in ("kept", "dequantized"):
        runner = open_runner(folder, quantized_weights=kept)
        batch = runner.batch([[*range(40)]], [[1, 2, 3]], slots=runner.slots.take(1))
        logits.append(runner.step(batch, ALL).logits)
    found, exact = logits
    assert (found - exact).norm() <= (0.1 if scheme == "w8a8_dynamic" else 1e-5) * exact.norm()


NEXT = published_configs.CONFIGS["Qwen3-Next-80B-A3B-Instruct"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads, 3, is not a multiple of linear_num_key_heads, 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim.*>= 2"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim.*<= 4"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types"),
        ({"mamba_ssm_dtype": "float64"}, "unknown value 'float64'"),
        ({"hidden_act": "gelu"}, "unknown value 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_hal_cannot_do_is_refused(changes: dict[str, Any], message: str, cpu: hal.Backend) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        hal.load_model(hal.RandomCheckpoint.of("hybrid", {**NEXT, **changes}), cpu)


def test_a_checkpoint_without_the_convolution_is_refused(tmp_path: Path, cpu: hal.Backend) -> None:
    folder = published_configs.write(tmp_path / "model", "Qwen3-Next-80B-A3B-Instruct")
    path = folder / "model.safetensors"
    save_file({name: each for name, each in load_file(path).items() if "conv1d" not in name}, path)
    with pytest.raises(CheckpointError, match=r"conv1d\.weight"):
        hal.load_model(folder, cpu)


def test_ranks_that_do_not_divide_the_key_heads_are_refused(tmp_path: Path, cpu: hal.Backend) -> None:
    folder = published_configs.write(tmp_path / "model", "Qwen3-Next-80B-A3B-Instruct")
    with pytest.raises(ConfigError, match=r"4 ranks cannot share 2 heads of 2 elements.*\n.*all weights.*: 1, 2$"):
        check_shared(hal.Checkpoint.open(folder), ParallelConfig(4))
    layer = hal.load_model(folder, cpu).get_submodule("model.layers.0.self_attn")
    assert isinstance(layer, GatedDeltaNet)
    with pytest.raises(ConfigError, match="4 ranks cannot share the 2 key heads of a recurrent layer equally"):
        layer.split(Group("test", size=4, planned=True))


def test_300_steps_leave_no_state_behind(tmp_path: Path) -> None:
    """Each sequence gets the tokens that it gets alone, in graphs and in eager steps, in slots that others had."""
    folder = published_configs.write(tmp_path / "model", "Qwen3.5-0.8B")
    schedule = toys.Schedule.drawn(5, 96, count=60)
    alone = toys.alone(open_runner(folder), schedule, "")
    runner = open_runner(folder, "graph")
    captured = [{count for _, count in step} == {1} for step in schedule.steps]
    assert 2 * len(captured) >= 300, "seed 5"
    assert sum(before != after for before, after in pairwise(captured)) > 50
    assert toys.check(runner, schedule, alone, "", 1e-3) > 2 * len(captured)
    assert runner.slots.num_free == toys.SLOTS
