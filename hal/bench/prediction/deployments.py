"""The ways to use a number of devices, each with its predicted steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from hal.bench.prediction.assumptions import Assumptions
from hal.bench.prediction.step_time import StepTime, fits, step_time
from hal.bench.prediction.step_work import SplitModel, StepKind, StepWork, split_model_of
from hal.errors import ConfigError


@attrs.frozen
class Workload:
    """A step of all devices together.

    Attributes:
        name: for the report.
        sequences: sequences of all copies of the model.
        queries: new tokens of each sequence.
        context: tokens of each sequence in the cache.
    """

    name: str
    sequences: int
    queries: int = 1
    context: int = 0

    @property
    def tokens(self) -> int:
        """The number of new tokens."""
        return self.sequences * self.queries


CONTEXT = 4096
"""Tokens in the cache of each sequence of :data:`WORKLOADS`, or in a prompt."""
WORKLOADS = (
    *(Workload(f"decode {size}", size, context=CONTEXT) for size in (1, 32, 256)),
    Workload("prefill", 1, queries=CONTEXT),
)


@attrs.frozen
class Deployment:
    """A way to use devices: ``data`` copies of a model, each split between ``tensor`` ranks.

    Attributes:
        tensor: ranks that split each layer.
        data: copies of the model, which share the sequences.
        workload: the step.
        work: of a rank of the copy with the most sequences.
        time: of the step.
        fits: whether weights and states fit in the memory of a device.
    """

    tensor: int
    data: int
    workload: Workload
    work: StepWork
    time: StepTime
    fits: bool

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
        self._models: dict[int, SplitModel] = {}

    def deployments(self, devices: int, workload: Workload) -> list[Deployment]:
        """Return the ways to use ``devices`` devices, fewest ranks per copy first.

        Raises:
            ConfigError: the model cannot be built from the config.
        """
        return [self._deployment(tensor, devices // tensor, workload) for tensor in self._splits(devices)]

    def best(self, devices: int, workload: Workload) -> Deployment | None:
        """Return the deployment with the shortest step among those that fit in memory, or None."""
        fitting = [each for each in self.deployments(devices, workload) if each.fits]
        return min(fitting, key=lambda each: each.time.total, default=None)

    def _deployment(self, tensor: int, data: int, workload: Workload) -> Deployment:
        kind = StepKind(-(-workload.sequences // data), workload.queries, workload.context)
        work = self._model(tensor).work(kind)
        return Deployment(
            tensor, data, workload, work, step_time(work, tensor, self._assumed), fits(work, self._assumed)
        )  # fmt: skip

    def _splits(self, devices: int) -> Iterator[int]:
        """Yield the divisors of ``devices`` between which the model can be split."""
        for tensor in range(1, devices + 1):
            if devices % tensor:
                continue
            try:
                self._model(tensor)
            except ConfigError:
                if tensor == 1:
                    raise
                continue
            yield tensor

    def _model(self, ranks: int) -> SplitModel:
        if ranks not in self._models:
            dtype: torch.dtype = getattr(torch, self._assumed.dtype)
            self._models[ranks] = split_model_of(self._config, ranks, dtype, self._assumed.device.fused)
        return self._models[ranks]


def table(planner: Planner, devices: Sequence[int], workload: Workload) -> Iterator[list[str]]:
    """Yield a row per number of devices: the best deployment and its times in milliseconds."""
    for number in devices:
        found = planner.best(number, workload)
        if found is None:
            yield [str(number), "does not fit", *[""] * 7]
            continue
        time = found.time
        parts = [
            f"{1e3 * each:.2f}" for each in (time.total, time.memory, time.compute, time.launches, time.collectives)
        ]
        held = f"{found.work.held / 2**30:.1f}"
        yield [str(number), f"{found.data} x {found.tensor}", held, *parts, f"{found.tokens_per_second:.0f}"]


COLUMNS = (
    "devices", "copies x ranks", "GiB held", "step ms", "memory ms", "compute ms", "launches ms", "collectives ms",
    "tokens/s",
)  # fmt: skip
