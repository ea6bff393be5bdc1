"""The CPU driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch.nn import functional

from hal.backend import Backend
from hal.config import read
from hal.driver import Driver, Probe
from hal.graph import Graph
from hal.host import HostDevice
from hal.ops.declaration import Kernel

from . import kernels

KERNELS: dict[str, Kernel] = {
    "add_rms_norm": kernels.add_rms_norm,
    "embedding": functional.embedding,
    "greedy_sample": kernels.greedy_sample,
    "linear": functional.linear,
    "paged_attention": kernels.paged_attention,
    "rms_norm": kernels.rms_norm,
    "rotary_embedding": kernels.rotary_embedding,
    "silu_and_mul": kernels.silu_and_mul,
    "store_kv_cache": kernels.store_kv_cache,
}


@attrs.frozen
class CpuOptions:
    """The CPU driver has no options; any that is given is an error."""


class CpuBackend(Backend):
    """The CPU. Its graphs are tapes."""

    def graph(self) -> Graph:
        """A new tape."""
        from .tape import Tape

        return Tape()


class CpuDriver(Driver):
    """Always available, and last in ``auto``'s order."""

    name = "cpu"
    api_version = (1, 0)
    priority = 0

    def probe(self) -> Probe:
        """Available."""
        return Probe(available=True, reason="every machine has one")

    def open(self, options: Mapping[str, Any]) -> CpuBackend:
        """Open it; takes no options."""
        read(CpuOptions, options, "options of the cpu driver")
        return CpuBackend("cpu", HostDevice(), kernels=KERNELS, compilers=("eager", "graph"))
