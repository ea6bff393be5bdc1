"""With ``numerics.invariant``, the bits of a token's logits depend on its sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_writing import write_gguf
from helpers.invariant import Model, texts
from helpers.thorough import EXHAUSTIVE, LONG, thorough

import hal
from hal.errors import ConfigError, MissingKernel
from hal.quantize.quantize_checkpoint import quantize_checkpoint
from hal.step import ALL
from hal.testing.compared_call import same_bits

DENSE, EXPERTS, HYBRID, LATENT = (
    Path("checkpoints") / f"tiny-python{kind}" for kind in ("", "-moe", "-hybrid", "-latent")
)
KINDS: dict[str, tuple[Path, str | None, dict[str, Any]]] = {
    "dense": (DENSE, None, {"dtype": "float32"}),
    "experts": (EXPERTS, None, {"dtype": "float32"}),
    "hybrid": (HYBRID, None, {"dtype": "float32"}),
    "latent": (LATENT, None, {"dtype": "float32"}),
    "bfloat16": (DENSE, None, {"dtype": "bfloat16"}),
    "float16": (EXPERTS, None, {"dtype": "float16"}),
    "int8-cache": (DENSE, None, {"dtype": "float32", "cache": {"dtype": "int8"}}),
    "fp8-cache": (DENSE, None, {"dtype": "bfloat16", "cache": {"dtype": "fp8"}}),
    **{
        scheme: (DENSE, scheme, {"dtype": "bfloat16"})
        for scheme in ("w8a16", "w8a8", "w8a8_dynamic", "w4a16", "w8a16_group", "w4a8_dynamic", "fp8", "fp8_dynamic")
    },
    "w4a16-experts": (EXPERTS, "w4a16", {"dtype": "bfloat16"}),
    "w8a8_dynamic-hybrid": (HYBRID, "w8a8_dynamic", {"dtype": "float32"}),
    **{kind: (DENSE, kind, {"dtype": "float32", "quantized_weights": "kept"}) for kind in ("Q8_0", "Q4_1")},
}
"""Checkpoints, the scheme of their weights, and the configuration, by name."""


def opened(kind: str, folder: Path, count: int) -> Model:
    path, scheme, config = KINDS[kind]
    if "quantized_weights" in config:
        path = write_gguf(path, folder / "model.gguf", kind=kind)
    elif scheme is not None:
        calibration = "def read(path):\n    return path\n" * 20 if scheme == "w8a8" else None
        group = 32 if "group" in scheme or "4" in scheme else None
        quantize_checkpoint(path, folder / "quantized", scheme, calibration=calibration, group_size=group)
        path = folder / "quantized"
    return Model(path, texts(len(kind), count), **config)


@thorough(LONG, r"\[(experts|latent|w8a8_dynamic|Q4_1)\]")
@thorough(EXHAUSTIVE, r"\[(?!(dense|hybrid|w4a16|experts|latent|w8a8_dynamic|Q4_1)\])")
@pytest.mark.parametrize("kind", KINDS)
def test_other_sequences_and_steps_change_no_bit(kind: str, tmp_path: Path) -> None:
    model = opened(kind, tmp_path, 9)
    assert sum(model.check(seed) for seed in range(6)) >= 6


@thorough(EXHAUSTIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_64_change_no_bit(kind: str, tmp_path: Path) -> None:
    model = opened(kind, tmp_path, 64)
    assert sum(model.check(seed) for seed in range(100, 116)) >= 16


@pytest.mark.parametrize("checkpoint", [DENSE, LATENT], ids=lambda each: each.name)
def test_a_reused_prefix_changes_no_bit(checkpoint: Path) -> None:
    cached = 32
    first, second = ([*range(7, 7 + cached), *rest] for rest in ([300] * 5, [11, 90, 45]))
    model = Model(checkpoint, [first, second], ["eager"], dtype="float32", cache={"block_size": 16})
    runner = model.runners["eager"]
    blocks = runner.blocks.take(4) or []
    with torch.inference_mode():
        runner.step(runner.batch([first], [blocks[:3]]))
        batch = runner.batch([second[cached:]], [[*blocks[:2], blocks[3]]], cached=[cached])
        assert same_bits(runner.step(batch, ALL).logits, model.alone[1][cached:])


def test_compilers_that_compute_each_size_otherwise_are_refused() -> None:
    config: dict[str, Any] = {"backend": "cpu", "numerics": {"invariant": True}}
    with pytest.raises(ConfigError, match=r"numerics.invariant is true, but the compiler 'inductor' of decode"):
        hal.open({**config, "compilation": {"compiler": "inductor"}})


def test_an_operation_that_cannot_hold_it_is_refused_by_its_kernel() -> None:
    config: dict[str, Any] = {"backend": "cpu", "numerics": {"invariant": True}, "options": {"native": False}}
    backend = hal.open(config)
    x, starts = torch.randn(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(MissingKernel, match=r"cpu computes packed_attention with packed,"):
        backend.ops.packed_attention(x, x, x, starts, starts, 1.0, False)
    assert same_bits(backend.ops.linear(x[:, 0], x[0])[1:2], backend.ops.linear(x[1:2, 0], x[0]))


def test_models_of_another_source_are_refused() -> None:
    config: dict[str, Any] = {"backend": "cpu", "numerics": {"invariant": True}, "model_source": "transformers"}
    with hal.open(config) as backend, pytest.raises(ConfigError, match="is computed by torch's functions"):
        hal.load_model(DENSE, backend)
