"""Tests for loading: memory use, weights that a driver prepares, and invalid models and checkpoints."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.models.qwen3 import Qwen3ForCausalLM
from helpers import ROOT, large_checkpoint
from helpers.checkpoints import random_checkpoint, write_json
from helpers.distributions import install
from helpers.thorough import EXHAUSTIVE, FAMILY, MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.checkpoint import model_registry, safetensors_files
from hal.errors import CheckpointError, HalError, ModelError
from hal.nn import WeightUse
from hal.quantize.quantize_checkpoint import quantize_checkpoint

PROGRAM = """
import sys, hal
options = {"pack_weights": sys.argv[3] == "packed"}
backend = hal.open({"backend": "cpu", "dtype": sys.argv[2], "options": options})
hal.load_model(sys.argv[4], backend)  # so that the modules that loading imports do not count
before = backend.device.memory_stats().allocated
model = hal.load_model(sys.argv[1], backend)
projection = model.model.embed_tokens.projection
copy = 0 if projection is None else projection.numel() * projection.element_size()
print(backend.device.memory_stats().peak - before, sum(parameter.nbytes for parameter in model.parameters()), copy)
"""


def loaded(folder: Path, dtype: str, form: str) -> tuple[int, int, int]:
    """Load a checkpoint in a process. Return its peak memory, and the bytes of the parameters and of packed copies."""
    command = [sys.executable, "-c", PROGRAM, str(folder), dtype, form, str(ROOT / "checkpoints" / "tiny-python")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights, copy = map(int, result.stdout.split())
    return peak, weights, copy


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that returns a checkpoint with a number of layers, made once."""

    @functools.cache
    def write(layers: int) -> Path:
        folder = tmp_path_factory.mktemp("large")
        large_checkpoint.write(folder, torch.float32, num_hidden_layers=layers)
        return folder

    return write


@thorough(EXHAUSTIVE, r"\[(bfloat16-packed|float32-plain)")
@thorough(MODE, r"\[float32|\[bfloat16-packed")
@pytest.mark.parametrize("form", ["packed", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory(dtype: str, form: str, large: Callable[[int], Path]) -> None:
    layers = 16 if form == "packed" else 8  # A layer that is packed exists twice meanwhile.
    peak, weights, copy = loaded(large(layers), dtype, form)
    assert weights > 300e6, "must be much more than is mapped at a time"
    assert copy in (0, 32000 * 1024 * (4 if dtype == "float32" else 2)), (
        "the tied table, if packing it is worthwhile on this machine"
    )
    assert form == "packed" or not copy
    assert peak < 1.1 * weights + copy


@thorough(MODE)
def test_peak_memory_of_an_output_projection(tmp_path: Path) -> None:
    """It is the last weight of the model, and more than a tenth of all. It exists twice while it is packed."""
    large_checkpoint.write(tmp_path, torch.bfloat16, num_hidden_layers=16, tie_word_embeddings=False)
    peak, weights, copy = loaded(tmp_path, "bfloat16", "packed")
    assert weights > 600e6
    assert copy == 0
    assert peak < 1.1 * weights


@thorough(FAMILY)
def test_peak_memory_of_experts(tmp_path: Path) -> None:
    """A checkpoint has the tensors of each expert apart; a model stacks them."""
    experts = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "num_hidden_layers": 3}
    large_checkpoint.write(tmp_path, torch.bfloat16, architectures=["Qwen3MoeForCausalLM"], **experts)
    peak, weights, copy = loaded(tmp_path, "bfloat16", "plain")
    assert weights > 600e6
    assert copy == 0
    assert peak < 1.15 * weights


@thorough(MODE, r"\[<lambda>0")
@pytest.mark.parametrize("view", [Tensor.detach, lambda weight: weight.view_as(weight), lambda weight: weight])
def test_a_driver_may_give_a_weight_back(view: Callable[[Tensor], Tensor], cpu: hal.Backend, tmp_path: Path) -> None:
    """As it is or as a view, although the loader reuses the memory in which it was assembled."""

    class Views(hal.Backend):
        def prepare_weights(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
            return {name: view(weight) for name, weight in weights.items()}

    folder = random_checkpoint(tmp_path, num_hidden_layers=64)  # so that each weight is a small part
    found = hal.load_model(folder, Views("views", cpu.device, kernels={}))
    expected = hal.load_model(folder, hal.Backend("plain", cpu.device, kernels={}))
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "no_such_package.models:Model",
            "the model ToyForCausalLM cannot be imported: ModuleNotFoundError: No module "
            "named 'no_such_package'\n.*toys 1.2; .* = no_such_package.models:Model in ",
        ),
        (f"{__name__}:NoSuchModel", "cannot be imported: AttributeError: .* has no attribute 'NoSuchModel'"),
        (f"{__name__}:Path", "is <class 'pathlib.*Path'>, not a class derived from hal.nn.CausalLM"),
        (f"{__name__}:hal", "is <module 'hal' .*, not a class derived from hal.nn.CausalLM"),
    ],
)
def test_entry_points_that_give_no_model(
    place: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "toys", f"[hal.models]\nToyForCausalLM = {place}\n", version="1.2")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=message):
        model_registry.find_model("ToyForCausalLM")


def test_a_model_class_that_is_none(cpu: hal.Backend, tmp_path: Path) -> None:
    wrong: Any = Path
    with pytest.raises(ModelError, match=r"is <class 'pathlib.*Path'>, not a class derived from"):
        hal.load_model(random_checkpoint(tmp_path), cpu, model_class=wrong)


@thorough(MODE, r"\[torch_dtype-(int8|16|named3)")
@pytest.mark.parametrize("named", ["bflaot16", "int8", 16, ["float32"]])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_is_none_is_named(key: str, named: object, cpu: hal.Backend, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    write_json(folder / "config.json", {**config, key: named})
    with pytest.raises(CheckpointError, match=re.escape(f"says {key} {named!r}, which is no floating-point dtype")):
        hal.load_model(folder, cpu)
    assert next(hal.load_model(folder, hal.open({"backend": "cpu", "dtype": "float32"})).parameters()).dtype == (
        torch.float32
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_tensor_with_values_of_its_own_is_refused(dtype: str, cpu: hal.Backend, tmp_path: Path) -> None:
    """It would be ignored. A tensor that repeats the table is part of many releases, and is not read."""
    folder = random_checkpoint(tmp_path / "source", dtype=dtype)
    file = folder / "model.safetensors"
    weights = load_file(file)
    table = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": table.to(torch.float32, copy=True)}, file)
    hal.load_model(folder, cpu)
    other = table.clone()
    other[-1, -1] += 1
    save_file({**weights, "lm_head.weight": other}, file)
    with pytest.raises(CheckpointError, match=r"lm_head.weight in .* differs from model.embed_tokens.weight"):
        hal.load_model(folder, cpu)
    with pytest.raises(CheckpointError, match=r"lm_head.weight in .* differs from model.embed_tokens.weight"):
        quantize_checkpoint(folder, tmp_path / "target", "w8a8_dynamic")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "tie_word_embeddings": False})
    hal.load_model(folder, cpu)


def test_tensors_are_compared_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "REMAP_BYTES", 100)
    folder = random_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    other = weights["model.embed_tokens.weight"].clone()
    other[-1, 0] += 1
    extra = {"one": torch.tensor(1.0), "another": torch.tensor(1.0), "third": torch.tensor(2.0)}
    save_file({**weights, "same": weights["model.embed_tokens.weight"].clone(), "other": other, **extra}, file)
    checkpoint = hal.Checkpoint.open(folder)
    assert checkpoint.equal("same", "model.embed_tokens.weight", torch.float32)
    assert not checkpoint.equal("other", "model.embed_tokens.weight", torch.float32)
    assert checkpoint.equal("one", "another", torch.float32)
    assert not checkpoint.equal("one", "third", torch.float32)


class TestModelsThatAreNotWhole:
    """Mistakes in a model's code are reported by name."""

    @staticmethod
    def refused(made: Callable[[Any], Any], message: str, cpu: hal.Backend, folder: Path) -> None:
        class Wrong(Qwen3ForCausalLM):
            @classmethod
            def from_config(cls, config: Any) -> Any:
                return made(super().from_config(config))

        with pytest.raises(HalError, match=message):
            hal.load_model(random_checkpoint(folder), cpu, model_class=Wrong)

    def test_what_is_tied_to_nothing(self, cpu: hal.Backend, tmp_path: Path) -> None:
        def made(model: Any) -> Any:
            model.tied = {"lm_head.weight": "model.embed_token.weight"}
            return model

        self.refused(made, r"(?s)'model.embed_token.weight',.* did you mean 'model.embed_tokens.weight'", cpu, tmp_path)

    def test_nothing(self, cpu: hal.Backend, tmp_path: Path) -> None:
        self.refused(lambda model: None, r"Wrong.from_config returned None", cpu, tmp_path)

    def test_an_exception(self, cpu: hal.Backend, tmp_path: Path) -> None:
        self.refused(lambda model: {}["rope"], r"Wrong cannot be created: KeyError: 'rope'", cpu, tmp_path)

    @pytest.mark.parametrize("name", ["vocab_size", "max_length", "states"])
    def test_a_number_that_is_not_set(self, name: str, cpu: hal.Backend, tmp_path: Path) -> None:
        def made(model: Any) -> Any:
            delattr(model, name)
            return model

        self.refused(made, rf"Wrong.{name} is None", cpu, tmp_path)

    def test_a_tensor_that_is_no_parameter(self, cpu: hal.Backend, tmp_path: Path) -> None:
        def made(model: Any) -> Any:
            model.model.scale = torch.empty(3, device="meta")
            return model

        self.refused(made, r"has model.scale, which no checkpoint tensor fills", cpu, tmp_path)

    def test_sizes_that_no_tensor_has(self, cpu: hal.Backend, tmp_path: Path) -> None:
        folder = random_checkpoint(tmp_path)
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", {**config, "vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1})
        with pytest.raises(ModelError, match="Qwen3ForCausalLM cannot be created: RuntimeError: "):
            hal.load_model(folder, cpu)
