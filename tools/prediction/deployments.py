"""The ways to use a number of devices, each with its predicted steps, and the formula that predicts them.

A device reads memory and computes at the same time, so that the slower one counts. Kernels follow one another: a launch
costs time between them. Of the collectives, a stated share overlaps with the other work, if there is as much of it::

    work = max(bytes / bandwidth, operations / rate)
    step = work + launches * launch + collectives - min(overlap * collectives, work)

A collective over ``m`` devices in each of ``k`` nodes passes each byte of the whole tensor between the devices of a
node, then the part of each device between nodes, ``rounds`` times (2 for a sum, else 1)::

    collective = rounds * bytes * ((m - 1) / m / within + (k - 1) / k / m / between) + latencies

This is the time of hierarchical ring algorithms, with every link in use. If a device sends something else to each other
one, it sends all of it itself, to devices of its node and of others::

    collective = bytes * ((m - 1) / m / k / within + (k - 1) / k / between) + latencies
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from hal.config import ParallelConfig
from hal.errors import ConfigError

from .assumptions import Assumptions
from .step_work import Exchange, SplitModel, StepKind, StepWork, split_model_of


@attrs.frozen
class StepTime:
    """The predicted duration of a step, in seconds.

    Attributes:
        memory: of reading and writing memory.
        compute: of matrix products; overlaps with ``memory``.
        launches: of launching kernels.
        collectives: of collectives, apart from the part that overlaps with memory and compute.
    """

    memory: float
    compute: float
    launches: float
    collectives: float

    @property
    def total(self) -> float:
        """The duration of the step."""
        return max(self.memory, self.compute) + self.launches + self.collectives


def step_time(work: StepWork, assumed: Assumptions) -> StepTime:
    """Return the predicted duration of a step of which each rank does ``work``."""
    device = assumed.device
    memory = work.memory.total / (device.bandwidth_gb_per_s * 1e9 * device.bandwidth_efficiency)
    compute = work.compute.total / (device.tflop_per_s * 1e12 * device.flop_efficiency)
    collectives = sum(collective_time(each, assumed) for each in work.exchanges)
    return StepTime(
        memory=memory,
        compute=compute,
        launches=work.launches * device.launch_us * 1e-6,
        collectives=collectives - min(assumed.overlap * collectives, max(memory, compute)),
    )


def collective_time(exchange: Exchange, assumed: Assumptions) -> float:
    """Return the predicted duration of a collective, in seconds.

    Ranks fill nodes one after the other. If the last node is not full, the formula takes the average number.
    """
    nodes = -(-exchange.ranks // max(1, assumed.devices_per_node // exchange.stride))
    each = exchange.ranks / nodes
    within, between = assumed.within, assumed.between
    if exchange.personal:
        inside, outside = (each - 1) / exchange.ranks, (nodes - 1) / nodes
    else:
        inside, outside = (each - 1) / each, (nodes - 1) / nodes / each
    seconds = exchange.rounds * exchange.nbytes * (inside / within.bytes_per_s + outside / between.bytes_per_s)
    latency = (within.latency_us if each > 1 else 0.0) + (between.latency_us if nodes > 1 else 0.0)
    return seconds + latency * 1e-6


def fits(held: int, assumed: Assumptions) -> bool:
    """Return whether a rank's weights and states, in bytes, fit in the memory of a device."""
    return held <= assumed.device.memory_gib * 2**30 * assumed.device.usable_memory


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
