"""The formula: the time of a step, from a rank's work and the stated figures of devices and links.

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
