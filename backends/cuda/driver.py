"""The CUDA driver: what it needs is probed without torch, and CUDA is initialised when it is opened."""

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
"""What the option ``kernels`` may name."""
INDUCTOR = ("paged_attention", "quant_linear_dynamic", "quant_linear_static", "store_kv_cache")
"""What Inductor leaves to the kernels. The rest it fuses, and projections it gives to cuBLAS itself."""

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
        device_index: the GPU's index, among those that the process sees.
        kernels: by operation, the library that its kernel must be from: flashinfer, triton or torch, such as
            ``{"paged_attention": "torch"}``; ``reference`` runs it without a kernel. The others are chosen when the
            driver is opened.
    """

    device_index: int = attrs.field(default=0, validator=_at_least_0)
    kernels: dict[str, str] = attrs.field(factory=dict, validator=_known)


class CudaBackend(Backend):
    """An opened GPU. Made by :class:`CudaDriver`.

    Device, streams, events and memory are those of :class:`hal.Device`, by torch's device-generic runtime.
    """

    def __init__(
        self, device: torch.device, name: str, capability: tuple[int, int], chosen: Mapping[str, Chosen]
    ) -> None:
        import torch

        from hal.device.device import Device

        from .gpu import limits

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
        # One for all captures: graphs that share a pool share memory if they were captured on the same stream.
        self.capture_stream = torch.cuda.Stream(device)

    def activate(self) -> None:
        """As any backend; and make its device the current one of this thread, where kernels are launched."""
        import torch

        super().activate()
        torch.cuda.set_device(self.device.torch)

    def enter(self) -> Any:
        """As any backend; and make its device the current one of this thread, where kernels are launched."""
        import torch

        before = torch.cuda.current_device()
        if before != self.device.torch.index:
            torch.cuda.set_device(self.device.torch)
        return super().enter(), before

    def leave(self, token: Any) -> None:
        """Make the device current that was."""
        import torch

        table, before = token
        super().leave(table)
        if before != self.device.torch.index:
            torch.cuda.set_device(before)

    def graph(self) -> Graph:
        """A new, empty CUDA graph."""
        from .graph import CudaGraph

        return CudaGraph(self.device.torch.index, self.capture_stream)

    def explain(self, error: BaseException) -> HalError | None:
        """What CUDA's error, or torch's exception, means."""
        from .failures import explain

        return explain(error)

    def _release(self) -> None:
        """The workspaces and plans of kernels."""
        for kernel in self.kernels.values():
            if (release := getattr(kernel, "release", None)) is not None:
                release()

    @contextmanager
    def counting_launches(self) -> Iterator[Counter[str]]:
        """By torch's profiler: kernels, copies and fills, those in graphs too."""
        from collections import Counter

        from torch.profiler import ProfilerActivity, profile

        found: Counter[str] = Counter()
        self.device.synchronize()  # what was launched before is not to be counted
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield found
            self.device.synchronize()
        for event in profiler.events():
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
                found[event.name] += 1


class CudaDriver(Driver):
    """NVIDIA's GPUs; in ``auto``'s order before the CPU."""

    name = "cuda"
    api_version = (2, 0)
    priority = 10
    requires = ("torch>=2.11", "triton>=3.4")
    variables = ("CUDA_", "NVIDIA_", "FLASHINFER_", "TRITON_")

    def probe(self) -> Probe:
        """Look for a torch for CUDA, NVIDIA's driver, a GPU and the permission to use it, importing nothing."""
        return probe()

    def open(self, options: Mapping[str, Any]) -> CudaBackend:
        """Initialise CUDA, take the device, and settle which library's kernel each operation has.

        Raises:
            ConfigError: an option is wrong, or asks for a device or library that is not there.
            DriverUnavailable: torch cannot use CUDA, or the GPU is too old.
        """
        chosen = read(CudaOptions, options, "options of the cuda driver")
        import torch

        from .gpu import OLDEST
        from .libraries import kernels_for

        try:
            torch.cuda.init()
            count = torch.cuda.device_count()
        except (RuntimeError, AssertionError) as error:  # of a torch that was built without CUDA
            raise DriverUnavailable(
                f"torch {torch.__version__} cannot use CUDA: {str(error).partition('. ')[0]}",
                self._remedy("look that nvidia-smi shows the GPU, and that its driver is as new as torch's CUDA"),
            ) from error
        index = chosen.device_index
        if index >= count:
            raise ConfigError(
                f"the device_index {index} was asked for, and there are {count} GPUs",
                f"give one of 0 to {count - 1}" if count else "look whether CUDA_VISIBLE_DEVICES hides them",
            )
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        if capability < OLDEST:
            raise DriverUnavailable(
                f"{properties.name} has compute capability {properties.major}.{properties.minor}, and the driver needs "
                f"{OLDEST[0]}.{OLDEST[1]}",
                "use a GPU of the Turing generation or later, or another backend",
            )
        device = torch.device("cuda", index)
        kernels = kernels_for(device, capability, chosen.kernels)
        log.info("opened %s, compute capability %d.%d, CUDA %s", properties.name, *capability, torch.version.cuda)
        log.info("kernels: %s", ", ".join(f"{name} {found.library}" for name, found in sorted(kernels.items())))
        return CudaBackend(device, properties.name, capability, kernels)

    def devices(self, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The options with which each GPU is opened; those given alone, if they name one."""
        import torch

        if "device_index" in options:
            return (options,)
        return [{**options, "device_index": index} for index in range(torch.cuda.device_count())]

    def _remedy(self, otherwise: str) -> str:
        found = self.probe()
        return otherwise if found.available else found.hint
