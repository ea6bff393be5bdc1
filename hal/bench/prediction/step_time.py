"""The formula: the time of a step, from a rank's work and the stated figures of devices and links.

A device reads memory and computes at the same time, so that the slower one counts. Kernels and collectives follow one
another: a launch costs time between kernels, and collectives do not overlap with computation::

    step = max(bytes / bandwidth, operations / rate) + launches * launch + sum of collectives

A collective over ``m`` devices in each of ``k`` nodes passes each byte of the whole tensor between the devices of a
node, then the part of each device between nodes, ``rounds`` times (2 for a sum, else 1)::

    collective = rounds * bytes * ((m - 1) / m / within + (k - 1) / k / m / between) + latencies

This is the time of hierarchical ring algorithms, with every link in use.
"""

from __future__ import annotations

import attrs

from hal.bench.prediction.assumptions import Assumptions
from hal.bench.prediction.step_work import Exchange, StepWork


@attrs.frozen
class StepTime:
    """The predicted duration of a step, in seconds.

    Attributes:
        memory: of reading and writing memory.
        compute: of matrix products; overlaps with ``memory``.
        launches: of launching kernels.
        collectives: of collectives.
    """

    memory: float
    compute: float
    launches: float
    collectives: float

    @property
    def total(self) -> float:
        """The duration of the step."""
        return max(self.memory, self.compute) + self.launches + self.collectives


def step_time(work: StepWork, ranks: int, assumed: Assumptions) -> StepTime:
    """Return the predicted duration of a step of ``ranks`` ranks that split each layer."""
    device = assumed.device
    return StepTime(
        memory=work.memory.total / (device.bandwidth_gb_per_s * 1e9 * device.bandwidth_efficiency),
        compute=work.compute.total / (device.tflop_per_s * 1e12 * device.flop_efficiency),
        launches=work.launches * device.launch_us * 1e-6,
        collectives=sum(collective_time(each, ranks, assumed) for each in work.exchanges),
    )


def collective_time(exchange: Exchange, ranks: int, assumed: Assumptions) -> float:
    """Return the predicted duration of a collective, in seconds.

    Ranks fill nodes one after the other. If the last node is not full, the formula takes the average number.
    """
    nodes = -(-ranks // assumed.devices_per_node)
    each = ranks / nodes
    within, between = assumed.within, assumed.between
    seconds = exchange.rounds * exchange.nbytes * (each - 1) / each / within.bytes_per_s
    seconds += exchange.rounds * exchange.nbytes * (nodes - 1) / nodes / each / between.bytes_per_s
    latency = (within.latency_us if each > 1 else 0.0) + (between.latency_us if nodes > 1 else 0.0)
    return seconds + latency * 1e-6


def fits(work: StepWork, assumed: Assumptions) -> bool:
    """Return whether a rank's weights and states fit in the memory of a device."""
    return work.held <= assumed.device.memory_gib * 2**30 * assumed.device.usable_memory
