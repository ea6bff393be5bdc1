"""The NPU driver: what it needs is probed without torch_npu, and torch_npu is imported when it is opened."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hal.config import read
from hal.drivers.compiler import Compiler, Form
from hal.drivers.driver import Driver, Probe
from hal.errors import ConfigError, DriverUnavailable

from .emulator.activation import switch_of
from .options import NpuOptions
from .probe import probe, probe_emulated
from .soc import Generation, generation_of

if TYPE_CHECKING:
    from hal.execution.context import FormContext

    from .backend import NpuBackend

log = logging.getLogger("hal.npu")


class NpuDriver(Driver):
    """The Ascend NPU; first in ``auto``'s order where it is available."""

    name = "npu"
    api_version = (2, 0)
    priority = 20
    requires = ("torch==2.13.*", "torch-npu==2.13.0")
    variables = ("ASCEND", "TORCH_NPU", "TASK_QUEUE_ENABLE")

    def probe(self) -> Probe:
        """Look for torch_npu, CANN, an NPU and the permission to use it, importing none of them."""
        return probe()

    def probe_for(self, options: Mapping[str, Any]) -> Probe:
        """As :meth:`probe`; where the option ``emulator`` is set, whether that can be."""
        return self.probe() if self._read(options).emulator == "off" else probe_emulated()

    def open(self, options: Mapping[str, Any]) -> NpuBackend:
        """Import torch_npu, on an emulated CANN if the options say so, and take the device.

        Raises:
            ConfigError: an option is wrong, or asks for a device or ability that is not there.
            DriverUnavailable: torch_npu cannot be imported, or does not find its CANN or an NPU.
        """
        chosen = self._read(options)
        if chosen.emulator != "off":
            from . import emulator

            if chosen.emulator_options or not emulator.is_active():  # else one that was activated before will do
                emulator.activate(force=chosen.emulator == "force", **chosen.emulator_options)
        elif chosen.emulator_options:
            raise ConfigError(
                f"emulator_options are {chosen.emulator_options}, but the option emulator is not set",
                "set it, or leave them out",
            )
        torch = _import_torch_npu()
        count = torch.npu.device_count()
        if chosen.device >= count:
            raise ConfigError(
                f"the device {chosen.device} was asked for, and there are {count} NPUs",
                f"give one of 0 to {count - 1}" if count else "look whether ASCEND_RT_VISIBLE_DEVICES hides them",
            )
        torch.npu.set_device(chosen.device)
        soc = torch.npu.get_device_name(chosen.device)
        generation = generation_of(soc)
        if chosen.nz_weights:
            torch.npu.config.allow_internal_format = True  # torch_npu would silently leave weights as they are
        log.info("opened %s, generation %s, on torch_npu %s", soc, generation.name, version("torch_npu"))
        from .backend import NpuBackend

        return NpuBackend(chosen, soc, generation, _compilers(generation))

    def devices(self, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Each NPU that the process sees, unless the option ``device`` names one."""
        if "device" in options:
            return (options,)
        return tuple({**options, "device": index} for index in range(_import_torch_npu().npu.device_count()))

    def _read(self, options: Mapping[str, Any]) -> NpuOptions:
        given = {**options}
        if "emulator" in given:  # HAL_NPU_EMULATOR=1, and {"emulator": true} in a config
            given["emulator"] = switch_of(given["emulator"])
        return read(NpuOptions, given, "options of the npu driver")


class NpugraphEx(Compiler):
    """torch_npu's compiler ``npugraph_ex``: whole steps, one compiled and captured graph for each size."""

    name = "npugraph_ex"
    reads = frozenset({"passes", "cache_dir", "queries"})

    def make(self, context: FormContext) -> Form:
        """Compile and capture the steps."""
        from .npugraph_ex.compiler import make_form

        return make_form(context)


def _compilers(generation: Generation) -> tuple[Compiler, ...]:
    """npugraph_ex, where the SoC captures graphs and torch_npu has it."""
    import torch_npu

    has = hasattr(getattr(torch_npu.npu, "npugraph_ex", None), "compile_fx")
    return (NpugraphEx(),) if generation.graphs and has else ()


def _import_torch_npu() -> Any:
    import torch

    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise DriverUnavailable(
            f"torch_npu cannot be imported: {error}",
            "source CANN's set_env.sh before Python starts, and look that torch, torch_npu and CANN fit each other; or "
            "set the option emulator",
        ) from error
    return torch
