"""Tests of a driver's layers in models that ranks share: they are shared as hal's, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
import pytest
import torch
from hal.backends.cpu.driver import CpuBackend, CpuOptions
from helpers.rank_processes import run, succeeded
from helpers.thorough import PROCESSES, thorough
from torch import Tensor, nn

import hal
from hal.config.settings import ExpertsMode
from hal.nn import Experts, GroupedLinear, Weight
from hal.parallel import Mesh


class _OwnDeclaration(GroupedLinear):
    """A driver's layer that declares another weight."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__(layer.num_experts, layer.weight.shape[2], layer.parts, shard=layer.shard)

    @property
    def weights(self) -> Mapping[str, Weight]:
        weight = super().weights["weight"]
        return {"weight": attrs.evolve(weight, shard=None, group="tensor") if self.shard == "num_experts" else weight}


class _OwnProduct(GroupedLinear):
    """A driver's layer that computes in another way."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__(layer.num_experts, layer.weight.shape[2], layer.parts, shard=layer.shard)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        rows = torch.split(x[: int(counts.sum())], counts.tolist())
        done = torch.cat([each @ weight.T for each, weight in zip(rows, self.weight, strict=True)])
        return torch.cat([done, done.new_zeros(x.shape[0] - done.shape[0], done.shape[1])])


class _WithoutShard(_OwnProduct):
    def __init__(self, layer: GroupedLinear) -> None:
        GroupedLinear.__init__(self, layer.num_experts, layer.weight.shape[2], layer.parts)


class _AllExperts(Experts):
    """A driver's layer that computes all experts."""

    def __init__(self, layer: Experts) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)

    def forward(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return super().forward(hidden, weights, experts)


class _OwnExperts(_AllExperts):
    """A driver's layer that knows of exchanges."""

    def distribute(self, mode: ExpertsMode, mesh: Mesh) -> None:
        super().distribute(mode, mesh)


def _own_layers(rank: int, checkpoint: str, replaced: type[nn.Module], own: type[nn.Module], mode: str) -> list[int]:
    """Generate with a driver's layers. The backend is the CPU's otherwise."""
    torch.set_num_threads(1)
    with CpuBackend(CpuOptions(pack_weights=False)) as backend:
        backend.layers = MappingProxyType({replaced: own})
        parallel = {"tensor": 2, "experts": mode} if mode else {}
        backend.configure(hal.config.load({"backend": "cpu", "dtype": "float32", "parallel": parallel}))
        backend.activate()
        runner = hal.Runner(hal.load_model(checkpoint, backend), backend)
        return [each.token_id for each in hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=6))]


@thorough(PROCESSES)
@pytest.mark.parametrize(("replaced", "own"), [(GroupedLinear, _OwnProduct), (Experts, _OwnExperts)])
def test_layers_of_a_driver(trained_experts: Path, replaced: type[nn.Module], own: type[nn.Module]) -> None:
    alone = _own_layers(0, str(trained_experts), GroupedLinear, _OwnProduct, "")
    for mode in ("split", "all_gather"):
        assert succeeded(run(_own_layers, 2, str(trained_experts), replaced, own, mode)) == [alone] * 2


@pytest.mark.parametrize(
    ("replaced", "own", "mode", "message"),
    [
        (GroupedLinear, _OwnDeclaration, "all_gather", "experts of _OwnDeclaration, which does not declare its weight"),
        (Experts, _AllExperts, "all_gather", "experts of _AllExperts, whose forward replaces that of hal.nn.Experts"),
        (GroupedLinear, _WithoutShard, "split", "_WithoutShard whose weight is declared to be shared in another way"),
    ],
)
def test_layers_of_a_driver_that_ranks_cannot_share(
    trained_experts: Path, replaced: type[nn.Module], own: type[nn.Module], mode: str, message: str
) -> None:
    for error in run(_own_layers, 2, str(trained_experts), replaced, own, mode):
        assert isinstance(error, hal.HalError)
        assert message in str(error)
