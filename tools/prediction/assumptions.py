"""The stated figures of devices and links, read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs

from hal import ops
from hal.config import read, read_file
from hal.config.settings import ExpertsMode
from hal.errors import ConfigError, nearest


def _positive(instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be more than 0, not {value}")


def _share(instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{attribute.name} must be more than 0 and at most 1, not {value}")


def _part(instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{attribute.name} must be from 0 to 1, not {value}")


def _at_least_one(instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value >= 1:
        raise ValueError(f"{attribute.name} must be at least 1, not {value}")


def _whole(instance: Any, attribute: attrs.Attribute[Any], modes: tuple[ExpertsMode, ...]) -> None:
    if "split" in modes:
        raise ValueError('modes has "split", which is always considered')


def _fused(instance: Any, attribute: attrs.Attribute[Any], names: tuple[str, ...]) -> None:
    known = {name for name, each in ops.catalogue().items() if each.fused}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no fused operation ({nearest(name, known)})")


@attrs.frozen(kw_only=True)
class DeviceFigures:
    """One device: what torch counts as one.

    Attributes:
        memory_gib: its memory.
        usable_memory: the share of it for weights and states; the rest is for activations and the runtime.
        bandwidth_gb_per_s: the rate at which it reads its memory, in 10**9 bytes per second.
        bandwidth_efficiency: the share of that rate that kernels reach.
        tflop_per_s: the rate of matrix products in ``dtype``, in 10**12 operations per second.
        flop_efficiency: the share of that rate that kernels reach.
        launch_us: the time between two kernels of a captured step, in microseconds.
        fused: the fused operations that its driver has kernels for.
    """

    memory_gib: float = attrs.field(validator=_positive)
    usable_memory: float = attrs.field(default=0.9, validator=_share)
    bandwidth_gb_per_s: float = attrs.field(validator=_positive)
    bandwidth_efficiency: float = attrs.field(validator=_share)
    tflop_per_s: float = attrs.field(validator=_positive)
    flop_efficiency: float = attrs.field(validator=_share)
    launch_us: float = attrs.field(validator=_positive)
    fused: tuple[str, ...] = attrs.field(default=(), validator=_fused)


@attrs.frozen(kw_only=True)
class LinkFigures:
    """The links of a device to others.

    Attributes:
        gb_per_s: the rate at which a device sends to all others together, in 10**9 bytes per second.
        efficiency: the share of that rate that collectives reach.
        latency_us: the time of a collective of a few bytes, in microseconds.
    """

    gb_per_s: float = attrs.field(validator=_positive)
    efficiency: float = attrs.field(validator=_share)
    latency_us: float = attrs.field(validator=_positive)

    @property
    def bytes_per_s(self) -> float:
        """The rate that collectives reach."""
        return self.gb_per_s * 1e9 * self.efficiency


@attrs.frozen(kw_only=True)
class ExpertFigures:
    """Mixtures of experts whose experts are whole on the ranks.

    Attributes:
        modes: the values of ``parallel.experts`` to consider beside ``split``.
        imbalance: how often tokens choose the experts of the busiest rank, relative to the mean over the ranks.
    """

    modes: tuple[ExpertsMode, ...] = attrs.field(default=(), validator=_whole)
    imbalance: float = attrs.field(default=1.0, validator=_at_least_one)


@attrs.frozen(kw_only=True)
class Assumptions:
    """What a prediction assumes; the keys of the file of ``--assume``.

    Attributes:
        name: for the report.
        sources: where each figure comes from, and which are assumed, by key.
        dtype: the dtype of weights, states and activations.
        device: one device.
        devices_per_node: devices that reach each other over the links ``within``.
        overlap: the share of a collective that overlaps with computing and reading memory.
        experts: mixtures of experts.
        within: the links between the devices of a node.
        between: the links between nodes, per device.
    """

    name: str
    sources: dict[str, str] = attrs.field(factory=dict)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: DeviceFigures
    devices_per_node: int = attrs.field(validator=_positive)
    overlap: float = attrs.field(default=0.0, validator=_part)
    experts: ExpertFigures = ExpertFigures()
    within: LinkFigures
    between: LinkFigures

    @classmethod
    def read(cls, path: Path) -> Assumptions:
        """Read a file in TOML or JSON.

        Raises:
            ConfigError: the file cannot be read, a key is unknown or missing, or a value is out of range.
        """
        if path.suffix not in (".toml", ".json"):
            raise ConfigError(f"--assume is {path}, which ends in neither .toml nor .json", "give such a file")
        return read(cls, read_file(path), str(path))
