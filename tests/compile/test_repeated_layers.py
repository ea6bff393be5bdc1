"""Tests for traces in which equal layers are traced once: they are the traces of all layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.models.deepseek_v32 import DeepseekV32ForCausalLM
from helpers.stepping import padding_of, states_of
from helpers.thorough import FAMILY, thorough
from torch import Tensor

import hal
from hal import ops
from hal.compile.fx.clean import common_subexpressions
from hal.compile.pass_manager import PassManager
from hal.compile.repeated_layers import RepeatedLayers
from hal.compile.trace import StepSizes, trace_step
from hal.nn import DecoderLayer, DecoderLM
from hal.step import StepShape

SIZES = (StepSizes(None), StepSizes(1), StepSizes(4))


@pytest.fixture
def traced_layers(monkeypatch: pytest.MonkeyPatch) -> list[DecoderLayer]:
    """Return a list that gets each layer whose code runs."""
    found: list[DecoderLayer] = []
    forward = DecoderLayer.forward

    def noted(self: DecoderLayer, *args: Any) -> Tensor:
        found.append(self)
        return forward(self, *args)

    monkeypatch.setattr(DecoderLayer, "forward", noted)
    return found


def model_of(folder: Path, change: Callable[[DecoderLM], None] = lambda model: None) -> DecoderLM:
    model = hal.load_model(folder, hal.open({"backend": "cpu", "dtype": "float32", "options": {"native": False}}))
    assert isinstance(model, DecoderLM)
    change(model)
    return model


def check(model: DecoderLM, monkeypatch: pytest.MonkeyPatch, *steps: StepSizes) -> None:
    """Check that the traces have the nodes and the results of those in which each layer is traced."""
    for sizes in steps or SIZES[:1]:
        runs = []
        for replace in (RepeatedLayers.replace, lambda self, model: None):
            with monkeypatch.context() as patch:
                patch.setattr(RepeatedLayers, "replace", replace)
                step = trace_step(model, states_of(model), sizes, whole=ops.catalogue(), decompose=False)
            PassManager(step.graph, step.mode).add(common_subexpressions).apply()
            runs.append((step, sorted(str(node.target) for node in step.graph.graph.nodes if node.op != "placeholder")))
        assert runs[0][1] == runs[1][1]
        shape = StepShape(4, 2, 0) if sizes.sequences is None else StepShape.uniform(sizes.sequences)
        batch = padding_of(model, shape)
        results = []
        for step, _ in runs:
            states = [each for _, each in states_of(model).tensors()]
            with torch.inference_mode():
                hidden, *_ = step.graph(*batch.tensors(), *step.fixed[: len(step.fixed) - len(states)], *states)
            results.append([hidden, *states])
        assert all(map(torch.equal, *results))
        assert results[0][0].abs().max() > 0


@thorough(FAMILY, "hybrid")
@pytest.mark.parametrize(
    ("folder", "kinds"),
    [("tiny-python", 1), ("tiny-python-moe", 2), ("tiny-python-hybrid", 3)],
)
def test_each_kind_is_traced_once(
    folder: str, kinds: int, repository: Path, traced_layers: list[DecoderLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(repository / "checkpoints" / folder)
    trace_step(model, states_of(model), StepSizes(None), whole=ops.catalogue(), decompose=False)
    assert len(traced_layers) == kinds < len(model.base.layers)
    check(model, monkeypatch, *SIZES)


def test_layers_that_differ_in_a_number_are_two_kinds(
    trained: Path, traced_layers: list[DecoderLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: DecoderLM) -> None:
        norm: Any = model.base.layers[1].input_layernorm
        norm.eps *= 1000

    model = model_of(trained, change)
    trace_step(model, states_of(model), StepSizes(None), whole=ops.catalogue(), decompose=False)
    assert len(traced_layers) == 2
    check(model, monkeypatch)


class Remembers(DecoderLayer):
    """A layer that scales its output by the number of its calls."""

    calls = 0

    def forward(self, hidden: Tensor, *args: Any) -> Tensor:
        self.calls += 1
        return super().forward(hidden, *args) * self.calls


def test_layers_that_change_themselves_are_all_traced(
    trained: Path, traced_layers: list[DecoderLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: DecoderLM) -> None:
        for layer in model.base.layers:
            layer.__class__ = Remembers

    model = model_of(trained, change)
    trace_step(model, states_of(model), StepSizes(None), whole=ops.catalogue(), decompose=False)
    assert len(traced_layers) == 1 + len(model.base.layers)
    check(model, monkeypatch)


def test_layers_leave_tensors_for_the_next(
    repository: Path, traced_layers: list[DecoderLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of DeepSeek-V3.2 share the angles of their indexes, which the first one makes."""
    config = json.loads((repository / "checkpoints" / "tiny-python-latent" / "config.json").read_text())
    deeper = {"num_hidden_layers": 5, "first_k_dense_replace": 5, "mlp_layer_types": ["dense"] * 5}
    model = DeepseekV32ForCausalLM.from_config({**config, **deeper})
    generator = torch.Generator().manual_seed(3)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    trace_step(model, states_of(model), StepSizes(None), whole=ops.catalogue(), decompose=False)
    assert len(traced_layers) == 2
    check(model, monkeypatch)


class Takes(DecoderLayer):
    """A layer that takes what the first one left for it, and leaves nothing."""

    def forward(self, hidden: Tensor, *args: Any) -> Tensor:
        *known, shared = args
        scale = shared.pop("scale", 2.0)
        return super().forward(hidden, *known) * scale


def test_layers_that_take_from_others_are_all_traced(
    trained: Path, traced_layers: list[DecoderLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: DecoderLM) -> None:
        for layer in model.base.layers:
            layer.__class__ = Takes
        count = len(model.base.layers)
        monkeypatch.setattr(type(model.base), "further", lambda self, *_: [({"scale": 3.0},)] * count)

    model = model_of(trained, change)
    trace_step(model, states_of(model), StepSizes(None), whole=ops.catalogue(), decompose=False)
    assert len(traced_layers) == 1 + len(model.base.layers)
    check(model, monkeypatch)
