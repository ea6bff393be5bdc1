"""The ways to use a number of devices, each with its predicted steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from hal.bench.prediction.assumptions import Assumptions
from hal.bench.prediction.step_time import StepTime, fits, step_time
from hal.bench.prediction.step_work import Exchange, SplitModel, StepKind, StepWork, split_model_of
from hal.config import ParallelConfig
from hal.errors import ConfigError


@attrs.frozen
class Workload(StepKind):
    """A step of all devices together, with the sequences of all copies of the model.

    Attributes:
        name: for the report.
    """

    name: str = attrs.field(kw_only=True)


CONTEXT = 4096
"""Tokens in the cache of each sequence of :data:`WORKLOADS`, or in a prompt."""
WORKLOADS = (
    *(Workload(size, context=CONTEXT, name=f"decode {size}") for size in (1, 32, 256)),
    Workload(1, queries=CONTEXT, name="prefill"),
)


@attrs.frozen
class Deployment:
    """A way to use devices.

    Attributes:
        parallel: how they share the model: ``data`` copies, which share the sequences, each split between ``tensor``
            ranks.
        workload: the step.
        work: of a rank of the copy with the most sequences.
        time: of the step.
        fits: whether weights and states fit in the memory of a device.
        layer: the collectives of a layer.
    """

    parallel: ParallelConfig
    workload: Workload
    work: StepWork
    time: StepTime
    fits: bool
    layer: tuple[Exchange, ...]

    @property
    def name(self) -> str:
        """The copies and ranks, and how they share experts if these are whole, such as ``2 x 8 dispatch``."""
        shape = f"{self.parallel.data} x {self.parallel.tensor}"
        return shape if self.parallel.experts == "split" else f"{shape} {self.parallel.experts}"

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all devices together, per second."""
        return self.workload.tokens / self.time.total


class Planner:
    """Predicts the steps of one model on devices of one kind.

    Args:
        config: the model's config.json.
        assumed: the stated figures.
    """

    def __init__(self, config: Mapping[str, Any], assumed: Assumptions) -> None:
        self._config, self._assumed = config, assumed

    def deployments(self, devices: int, workload: Workload) -> list[Deployment]:
        """Return the ways to use ``devices`` devices, fewest ranks per copy first; those with whole experts come last.

        Raises:
            ConfigError: the model cannot be built from the config.
        """
        return [self._deployment(model, parallel, workload) for parallel, model in self._models(devices)]

    def best(self, devices: int, workload: Workload) -> Deployment | None:
        """Return the deployment with the shortest step among those that fit in memory, or None."""
        fitting = [
            self._deployment(model, parallel, workload)
            for parallel, model in self._models(devices)
            if fits(model.held(_kind(parallel, workload)), self._assumed)
        ]
        return min(fitting, key=lambda each: each.time.total, default=None)

    def _deployment(self, model: SplitModel, parallel: ParallelConfig, workload: Workload) -> Deployment:
        assumed, imbalance = self._assumed, self._assumed.experts.imbalance
        kind = _kind(parallel, workload)
        work = model.work(kind, imbalance)
        layer = tuple(model.layer_exchanges(kind, imbalance))
        return Deployment(parallel, workload, work, step_time(work, assumed), fits(work.held, assumed), layer)

    def _models(self, devices: int) -> Iterator[tuple[ParallelConfig, SplitModel]]:
        """Yield the ways in which ``devices`` devices can share the model."""
        sparse = self._model(ParallelConfig()).sparse  # which raises if the model cannot be built at all
        splits = [tensor for tensor in range(1, devices + 1) if devices % tensor == 0]
        for mode in ("split", *self._assumed.experts.modes) if sparse and devices > 1 else ("split",):
            for tensor in splits:
                parallel = ParallelConfig(tensor=tensor, data=devices // tensor, experts=mode)
                try:
                    yield parallel, self._model(parallel)
                except ConfigError:  # The ranks cannot share the heads, the experts or a layer.
                    continue

    def _model(self, parallel: ParallelConfig) -> SplitModel:
        dtype: torch.dtype = getattr(torch, self._assumed.dtype)
        return split_model_of(self._config, parallel, dtype, self._assumed.device.fused)


def _kind(parallel: ParallelConfig, workload: Workload) -> StepKind:
    """Return the step of the copy with the most sequences."""
    return StepKind(-(-workload.sequences // parallel.data), workload.queries, workload.context)
