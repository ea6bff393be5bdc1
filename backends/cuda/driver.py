"""The CUDA driver. It probes without torch, and initializes CUDA when it is opened."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from hal.config import read
from hal.drivers.backend import Backend
from hal.drivers.driver import Driver, Probe
from hal.errors import ConfigError, DriverUnavailable, HalError, nearest

from .probe import probe

if TYPE_CHECKING:
    from collections import Counter

    import torch

    from hal.device.graph import Graph

    from .choice import Chosen

LIBRARIES = ("flashinfer", "triton", "torch", "reference")
"""Valid values in the option ``kernels``."""
INDUCTOR = (
    "causal_conv1d",
    "channel_delta_rule",
    "expert_mlp",
    "expert_permute",
    "expert_unpermute",
    "gated_delta_rule",
    "grouped_linear",
    "paged_attention",
    "quant_expert_mlp_dynamic",
    "quant_expert_mlp_static",
    "store_kv_cache",
    "topk_route",
)
"""Operations that Inductor calls as opaque kernels; it decomposes the others, and calls cuBLAS for projections."""

log = logging.getLogger("hal.cuda")


def _at_least_0(instance: Any, attribute: attrs.Attribute[Any], value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} must be at least 0, not {value}")


def _known(instance: Any, attribute: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
    for operation, library in value.items():
        if library not in LIBRARIES:
            raise ValueError(f"{attribute.name}.{operation} is {library!r}; {nearest(library, LIBRARIES)}")


@attrs.frozen
class CudaOptions:
    """Options of the CUDA driver.

    Attributes:
        device_index: the GPU's index among the devices visible to the process.
        kernels: the library of an operation's kernel: flashinfer, triton or torch, such as
            ``{"paged_attention": "torch"}``; ``reference`` runs the operation without a kernel. For other operations,
            the driver chooses a library when it is opened. A library that has no kernel for a form of weights leaves
            it to the next one.
    """

    device_index: int = attrs.field(default=0, validator=_at_least_0)
    kernels: dict[str, str] = attrs.field(factory=dict, validator=_known)


class CudaBackend(Backend):
    """An opened GPU, created by :class:`CudaDriver`.

    Device, streams, events and memory are those of :class:`hal.vendor.Device`, on torch's device-generic runtime.
    """

    def __init__(
        self, device: torch.device, name: str, capability: tuple[int, int], chosen: Mapping[str, Chosen]
    ) -> None:
        import torch

        from hal.device.device import Device

        from .libraries import limits

        attention = chosen.get("paged_attention")
        super().__init__(
            "cuda",
            Device(device, name),
            kernels={each: found.kernel for each, found in chosen.items()},
            graphs=True,
            limits=limits(capability, pages=attention is not None and getattr(attention.kernel, "pages", False)),
            inductor=[each for each in INDUCTOR if each in chosen],
            sources={each: found.library for each, found in chosen.items()},
        )
        # One stream for all captures: graphs of a pool share memory only if they are captured on the same stream.
        self.capture_stream = torch.cuda.Stream(device)

    def activate(self) -> None:
        """Activate the backend, and make its device the thread's current one, on which kernels launch."""
        import torch

        super().activate()
        torch.cuda.set_device(self.device.torch)

    def enter(self) -> Any:
        """Enter the backend, and make its device the thread's current one, on which kernels launch."""
        import torch

        before = torch.cuda.current_device()
        if before != self.device.torch.index:
            torch.cuda.set_device(self.device.torch)
        return super().enter(), before

    def leave(self, token: Any) -> None:
        """Leave the backend, and restore the thread's current device."""
        import torch

        table, before = token
        super().leave(table)
        if before != self.device.torch.index:
            torch.cuda.set_device(before)

    def graph(self) -> Graph:
        """Return a new, empty graph."""
        from .graph import CudaGraph

        return CudaGraph(self.device.torch.index, self.capture_stream)

    def explain(self, error: BaseException) -> HalError | None:
        """Return the HalError for an exception of torch's or CUDA's; None if the device did not cause it."""
        from .failures import explain

        return explain(error)

    def _release(self) -> None:
        """Release the workspaces and plans of kernels."""
        for kernel in self.kernels.values():
            if (release := getattr(kernel, "release", None)) is not None:
                release()

    @contextmanager
    def counting_launches(self) -> Iterator[Counter[str]]:
        """Count kernels, copies and fills with torch's profiler, including those in graphs."""
        from collections import Counter

        from torch.profiler import ProfilerActivity, profile

        found: Counter[str] = Counter()
        self.device.synchronize()  # excludes earlier launches from the count
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield found
            self.device.synchronize()
        for event in profiler.events():
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
                found[event.name] += 1


class CudaDriver(Driver):
    """The driver of NVIDIA's GPUs. ``auto`` prefers it to the CPU."""

    name = "cuda"
    api_version = (4, 0)
    priority = 10
    requires = ("torch>=2.11", "triton>=3.4")
    variables = ("CUDA_", "NVIDIA_", "FLASHINFER_", "TRITON_")

    def probe(self) -> Probe:
        """Check for a CUDA build of torch, NVIDIA's driver, a GPU and access to it, without importing torch."""
        return probe()

    def open(self, options: Mapping[str, Any]) -> CudaBackend:
        """Initialize CUDA, open the device, and choose a kernel for each operation.

        Raises:
            ConfigError: an option is invalid, or requests a device or library that the machine lacks.
            DriverUnavailable: torch cannot use CUDA, or the GPU is too old.
        """
        chosen = read(CudaOptions, options, "options of the cuda driver")
        import torch

        from .libraries import OLDEST, kernels_for

        try:
            torch.cuda.init()
            count = torch.cuda.device_count()
        except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
            raise DriverUnavailable(
                f"torch {torch.__version__} cannot use CUDA: {str(error).partition('. ')[0]}",
                self._remedy("check that nvidia-smi lists the GPU, and that its driver supports torch's CUDA"),
            ) from error
        index = chosen.device_index
        if index >= count:
            raise ConfigError(
                f"the option device_index is {index}, and the process sees {count} GPUs",
                f"set device_index to 0 to {count - 1}" if count else "check whether CUDA_VISIBLE_DEVICES hides them",
            )
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        if capability < OLDEST:
            raise DriverUnavailable(
                f"{properties.name} has compute capability {properties.major}.{properties.minor}; the driver requires "
                f"at least {OLDEST[0]}.{OLDEST[1]}",
                "use a GPU of the Turing generation or later, or another backend",
            )
        device = torch.device("cuda", index)
        kernels = kernels_for(device, capability, chosen.kernels)
        log.info("opened %s, compute capability %d.%d, CUDA %s", properties.name, *capability, torch.version.cuda)
        log.info("kernels: %s", ", ".join(f"{name} {found.library}" for name, found in sorted(kernels.items())))
        return CudaBackend(device, properties.name, capability, kernels)

    def devices(self, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the options for each visible GPU, or only for the one that ``device_index`` names."""
        import torch

        if "device_index" in options:
            return (options,)
        return [{**options, "device_index": index} for index in range(torch.cuda.device_count())]

    def _remedy(self, otherwise: str) -> str:
        found = self.probe()
        return otherwise if found.available else found.hint
