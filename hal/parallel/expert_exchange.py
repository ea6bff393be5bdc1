"""Kernels of expert dispatch and combine, for every backend that brings no better ones.

They call the backend's kernels of the operations in the bodies: one :func:`hal.ops.all_to_all` in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hal.ops.declaration.operation import operation
from hal.ops.kernels.kernel_table import Kernel

KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {name: operation(name).body for name in ("expert_combine", "expert_dispatch")}
)
"""Kernels by operation. They run in every group."""
