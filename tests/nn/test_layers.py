"""Tests for layers of a driver that replace those of hal.nn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers.checkpoints import random_checkpoint
from helpers.distributions import install
from helpers.quantized import kept_layers
from torch import Tensor, nn

import hal
from hal.cli import main
from hal.errors import ConfigError, DriverIncompatible
from hal.nn import Embedding, GatedMLP, Linear, MergedLinear, RMSNorm, WeightUse
from hal.quantization.forms import INT8_DYNAMIC
from hal.quantize.quantize_checkpoint import quantize_checkpoint


class OwnNorm(RMSNorm):
    """A norm that calls torch's function."""

    def __init__(self, layer: RMSNorm) -> None:
        super().__init__(layer.weight.shape[0], layer.eps)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FaultyNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OwnMLP(GatedMLP):
    """An MLP that wraps the layers of the original."""

    def __init__(self, layer: GatedMLP) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj = layer.gate_up_proj, layer.down_proj

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        output: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return output


class OwnLinear(Linear):
    def __init__(self, layer: Linear) -> None:
        super().__init__(layer.weight.shape[1], layer.weight.shape[0], bias=layer.bias is not None)


class OwnMerged(MergedLinear):
    def __init__(self, layer: MergedLinear) -> None:
        super().__init__(layer.weight.shape[1], layer.parts, bias=layer.bias is not None)


class OwnTable(Embedding):
    def __init__(self, layer: Embedding) -> None:
        super().__init__(*layer.weight.shape)


class Own(hal.Backend):
    """The CPU's kernels, with replaced layers and prepared weights."""

    def __init__(self, layers: Any) -> None:
        self.cpu = hal.open("cpu", activate=False)
        super().__init__("own", hal.vendor.HostDevice(), kernels=self.cpu.kernels, graphs=True, layers=layers)
        self.prepared = 0

    def graph(self) -> hal.vendor.Graph:
        return self.cpu.graph()

    def prepare_weights(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        self.prepared += "weight" in weights
        return weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "checkpoint", attention_bias=True)


@pytest.fixture(autouse=True)
def _the_cpu_again(cpu: hal.Backend) -> Iterator[None]:
    yield
    cpu.activate()


def logits(folder: Path, backend: hal.Backend, compiler: str = "eager") -> Tensor:
    """Return the logits of a decode step after a short prompt."""
    compilation = hal.CompilationConfig(compiler, capture_sizes=(1,))
    backend.configure(hal.Config(backend=backend.name, dtype="float32", compilation=compilation))
    backend.activate()
    runner = hal.Runner(hal.load_model(folder, backend), backend)
    runner.step(runner.batch([[5, 6, 7]], [[1]]))
    return runner.step(runner.batch([[8]], [[1]], cached=[3])).logits.clone()


@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_they_compute_in_the_places_of_hals(folder: Path, cpu: hal.Backend, compiler: str) -> None:
    wanted = logits(folder, Own({}), compiler)
    layers = {RMSNorm: OwnNorm, GatedMLP: OwnMLP, Linear: OwnLinear, MergedLinear: OwnMerged, Embedding: OwnTable}
    torch.testing.assert_close(logits(folder, Own(layers), compiler), wanted, rtol=1e-5, atol=1e-5)
    assert (logits(folder, Own({**layers, RMSNorm: FaultyNorm}), compiler) - wanted).abs().max() > 0.1


def test_which_layers_are_replaced(folder: Path) -> None:
    backend = Own({RMSNorm: OwnNorm, GatedMLP: OwnMLP, Linear: OwnLinear, MergedLinear: lambda layer: layer})
    model: Any = hal.load_model(folder, backend)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(OwnNorm) == 2 * 4 + 1
    assert kinds.count(OwnMLP) == 2
    assert kinds.count(OwnLinear) == 2 * 2, "must be replaced inside a replaced layer too"
    assert kinds.count(MergedLinear) == 2 * 2, "must stay if the function returns it"
    assert not {RMSNorm, GatedMLP, Linear} & set(kinds)
    assert type(model.model.layers[0]).__name__ == "DecoderLayer"
    assert backend.prepared == 4 * 2 + 1, "the weights of replaced projections must be prepared like others"
    assert all(not parameter.is_meta for parameter in model.parameters())


def test_such_a_model_is_not_for_other_backends(folder: Path, cpu: hal.Backend) -> None:
    model = hal.load_model(folder, Own({RMSNorm: OwnNorm}))
    with pytest.raises(ConfigError, match="by the backend own, not by cpu"):
        hal.Runner(model, cpu)
    hal.Runner(hal.load_model(folder, Own({RMSNorm: lambda layer: layer})), cpu)


def test_projections_in_int8_stay(folder: Path, tmp_path: Path) -> None:
    quantized = quantize_checkpoint(folder, tmp_path / "int8", "w8a8_dynamic").path
    wanted = logits(quantized, Own({}))
    backend = Own({GatedMLP: OwnMLP, Linear: OwnLinear, MergedLinear: OwnMerged, RMSNorm: OwnNorm})
    torch.testing.assert_close(logits(quantized, backend), wanted, rtol=0.02, atol=0.02)
    model = hal.load_model(quantized, backend)
    kinds = {type(module) for module in model.modules()}
    assert {OwnMLP, OwnNorm} <= kinds
    assert {each.form for each in kept_layers(model).values()} == {INT8_DYNAMIC}


def widened(layer: RMSNorm) -> RMSNorm:
    return RMSNorm(layer.weight.shape[0] + 1, layer.eps)


def with_a_bias(layer: RMSNorm) -> RMSNorm:
    own = OwnNorm(layer)
    own.bias = nn.Parameter(torch.zeros(3), requires_grad=False)
    return own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda layer: nn.Identity(), "RMSNorm by Identity, which is no subclass of it"),
        (widened, "RMSNorm by a RMSNorm with other parameters: weight"),
        (with_a_bias, "RMSNorm by a OwnNorm with other parameters: bias"),
    ],
    ids=["another kind", "another shape", "another parameter"],
)
def test_what_does_not_fit_is_refused(make: Any, message: str, folder: Path) -> None:
    with pytest.raises(DriverIncompatible, match=message):
        hal.load_model(folder, Own({RMSNorm: make}))


@pytest.mark.parametrize("layer", [nn.Linear, OwnNorm, hal.nn.CausalLM, hal.nn.DecoderLM])
def test_what_no_driver_replaces(layer: type[nn.Module]) -> None:
    with pytest.raises(DriverIncompatible, match=f"the driver own replaces {layer.__name__}"):
        Own({layer: lambda original: original})


DRIVER = f"""
import hal
from {__name__} import Own, OwnNorm
from hal.nn import RMSNorm

class Driver(hal.vendor.Driver):
    name, api_version = "own", (4, 0)

    def probe(self):
        return hal.vendor.Probe(True)

    def open(self, options):
        return Own({{RMSNorm: OwnNorm}})
"""


def test_explain_lists_them(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_driver.py").write_text(DRIVER, encoding="utf-8")
    install(tmp_path, "own", "[hal.drivers]\nown = own_driver:Driver\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(main, ["explain", str(folder), "--backend", "own"])
    assert result.exit_code == 0, result.output
    assert "RMSNorm  OwnNorm       9" in result.output
