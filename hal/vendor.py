"""What vendors subclass and return: drivers, backends, devices, graphs and compilers.

A driver is a subclass of :class:`hal.vendor.Driver`. Names are imported on first use, so that a driver can be imported
and probed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.public_names import imported_on_use
from hal.version import API_VERSION

if TYPE_CHECKING:
    from hal.device.device import Device, Event, Limits, MemoryStats, Stream
    from hal.device.graph import Graph
    from hal.device.host_device import HostDevice
    from hal.device.host_values import HostValues
    from hal.drivers.backend import Backend
    from hal.drivers.compiler import Compiler, Outputs, PhaseForm, Plan
    from hal.drivers.driver import Driver, Probe
    from hal.drivers.stowed_weight import StowedWeight
    from hal.execution.capture.captured_form import Bucket, CapturedForm
    from hal.execution.capture.full_graph import FullGraphForm, GraphMaker
    from hal.execution.context import FormContext
    from hal.ops.kernels.partial_kernel import AddedKernel, FormKernels, PartialKernel
    from hal.ops.kernels.prepared_arguments import PreparingKernel

__all__ = [
    "API_VERSION",
    "AddedKernel",
    "Backend",
    "Bucket",
    "CapturedForm",
    "Compiler",
    "Device",
    "Driver",
    "Event",
    "FormContext",
    "FormKernels",
    "FullGraphForm",
    "Graph",
    "GraphMaker",
    "HostDevice",
    "HostValues",
    "Limits",
    "MemoryStats",
    "Outputs",
    "PartialKernel",
    "PhaseForm",
    "Plan",
    "PreparingKernel",
    "Probe",
    "StowedWeight",
    "Stream",
]

__getattr__ = imported_on_use(
    __name__,
    {
        "AddedKernel": "hal.ops.kernels.partial_kernel",
        "Backend": "hal.drivers.backend",
        "Bucket": "hal.execution.capture.captured_form",
        "CapturedForm": "hal.execution.capture.captured_form",
        "Compiler": "hal.drivers.compiler",
        "Device": "hal.device.device",
        "Driver": "hal.drivers.driver",
        "Event": "hal.device.device",
        "PhaseForm": "hal.drivers.compiler",
        "FormContext": "hal.execution.context",
        "FormKernels": "hal.ops.kernels.partial_kernel",
        "FullGraphForm": "hal.execution.capture.full_graph",
        "Graph": "hal.device.graph",
        "GraphMaker": "hal.execution.capture.full_graph",
        "HostDevice": "hal.device.host_device",
        "HostValues": "hal.device.host_values",
        "Limits": "hal.device.device",
        "MemoryStats": "hal.device.device",
        "Outputs": "hal.drivers.compiler",
        "PartialKernel": "hal.ops.kernels.partial_kernel",
        "Plan": "hal.drivers.compiler",
        "PreparingKernel": "hal.ops.kernels.prepared_arguments",
        "Probe": "hal.drivers.driver",
        "StowedWeight": "hal.drivers.stowed_weight",
        "Stream": "hal.device.device",
    },
)
