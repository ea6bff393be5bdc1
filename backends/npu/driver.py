"""The NPU driver. It probes without torch_npu, and imports torch_npu when it is opened."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.config import read
from hal.drivers.compiler import Compiler, PhaseForm
from hal.drivers.driver import Driver, Probe
from hal.drivers.torch_build import FindSpec
from hal.errors import ConfigError, DriverUnavailable

from . import emulation
from .installed_cann import installed_cann
from .options import NpuOptions, number_of
from .soc import Generation, generation_of
from .torch_build import check_build, refused_build

if TYPE_CHECKING:
    from hal.execution.context import FormContext

    from .backend import NpuBackend


DEVICES = Path("/dev")
MANAGER = "davinci_manager"
"""The device file that CANN opens first; the NPUs themselves are davinci0, davinci1 and so on."""
CONTAINER = "davinci0 and its like, davinci_manager, devmm_svm and hisi_hdc"
INSTALL = (
    "pip install torch-npu in a separate environment with torch's CPU build, in the release for that torch (torch-npu "
    "2.13.0 for torch 2.13); in a checkout, `make demo` makes .venv/npu"
)
EMULATE = "or run on an emulated NPU: set the driver option emulator, pass --emulate, or set HAL_NPU_EMULATOR=1"


def probe(
    environ: Mapping[str, str] = os.environ,
    devices: Path = DEVICES,
    find_spec: FindSpec = importlib.util.find_spec,
    access: Callable[[Path, int], bool] = os.access,
) -> Probe:
    """Check for torch_npu, a build of torch that fits it, CANN, an NPU and access to it; report the first failure."""
    if find_spec("torch_npu") is None:
        return Probe(False, "torch_npu is not installed", f"{INSTALL}; {EMULATE}")
    if (refused := refused_build(find_spec)) is not None:
        return refused
    if emulation.is_active():
        return Probe(True, "the emulated CANN is active")
    if installed_cann(environ) is None:
        return Probe(
            False,
            "torch_npu is installed, but no CANN: libascendcl.so was not found",
            f"install CANN and source its set_env.sh; {EMULATE}",
        )
    npus = sorted(each for each in devices.glob("davinci[0-9]*") if each.name[7:].isdigit())
    if not npus:
        return Probe(
            False,
            f"CANN is installed, but no NPU was found: {devices}/davinci0 does not exist",
            f"install the Ascend driver; in a container, pass the devices {CONTAINER}; {EMULATE}",
        )
    usable = [each for each in npus if access(each, os.R_OK | os.W_OK)]
    manager = devices / MANAGER
    closed = [] if usable else npus[:1]
    if manager.exists() and not access(manager, os.R_OK | os.W_OK):
        closed.append(manager)
    if closed:
        return Probe(
            False,
            f"no permission to use {closed[0]}",
            f"add the user to the group that owns it (HwHiAiUser); {EMULATE}",
        )
    return Probe(True, f"CANN and {len(usable)} {'NPU' if len(usable) == 1 else 'NPUs'}")


def probe_emulated(
    find_spec: FindSpec = importlib.util.find_spec, which: Callable[[str], str | None] = shutil.which
) -> Probe:
    """Check for the prerequisites of an emulated NPU."""
    if find_spec("torch_npu") is None:
        return Probe(False, "torch_npu is not installed, and the emulated NPU requires it", INSTALL)
    if (refused := refused_build(find_spec)) is not None:
        return refused
    if not emulation.is_active():
        try:
            emulation.check_compiler(which)
        except DriverUnavailable as error:
            return Probe(False, error.problem, error.remedy)
    return Probe(True, "an emulated NPU")


log = logging.getLogger("hal.npu")


class NpuDriver(Driver):
    """The driver of the Ascend NPU. ``auto`` prefers it where it is available."""

    name = "npu"
    api_version = (4, 0)
    priority = 20
    requires = ("torch==2.13.*", "torch-npu==2.13.0")
    variables = ("ASCEND", "EMULATED_CANN", "TORCH_NPU", "TASK_QUEUE_ENABLE")

    def probe(self) -> Probe:
        """Check for torch_npu, CANN, an NPU and access to it, without importing torch_npu."""
        return probe()

    def probe_for(self, options: Mapping[str, Any]) -> Probe:
        """Probe for the given options: for the emulated NPU's prerequisites if ``emulator`` is set."""
        return self.probe() if self._read(options).emulator == "off" else probe_emulated()

    def open(self, options: Mapping[str, Any]) -> NpuBackend:
        """Import torch_npu, on an emulated CANN if ``emulator`` is set, and open the device.

        Raises:
            ConfigError: an option is invalid, or requests a device or feature that the machine lacks.
            DriverUnavailable: torch_npu cannot be imported, also because of torch's build, or finds no CANN or NPU.
        """
        chosen = self._read(options)
        if chosen.emulator != "off":
            if chosen.emulator_options or not emulation.is_active():
                # The ranks of this machine have a device each, whose number is LOCAL_RANK.
                asked = {"devices": _ranks_here(), **chosen.emulator_options}
                emulation.activate(force=chosen.emulator == "force", **asked)
        elif chosen.emulator_options:
            raise ConfigError(
                f"emulator_options are {chosen.emulator_options}, but the option emulator is not set",
                'set "emulator": "on", or remove emulator_options',
            )
        torch = _import_torch_npu()
        count = torch.npu.device_count()
        if chosen.device >= count:
            raise ConfigError(
                f"the option device is {chosen.device}, and the process sees {count} NPUs",
                f"set device to 0 to {count - 1}" if count else "check whether ASCEND_RT_VISIBLE_DEVICES hides them",
            )
        torch.npu.set_device(chosen.device)
        soc = torch.npu.get_device_name(chosen.device)
        generation = generation_of(soc)
        if chosen.nz_weights:
            torch.npu.config.allow_internal_format = True  # otherwise torch_npu silently keeps the format of weights
        log.info("opened %s, generation %s, on torch_npu %s", soc, generation.name, version("torch_npu"))
        from .backend import NpuBackend

        return NpuBackend(chosen, soc, generation, _compilers(generation))

    def devices(self, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the options for each NPU visible to the process, or only for the one that ``device`` names."""
        if "device" in options:
            return (options,)
        return tuple({**options, "device": index} for index in range(_import_torch_npu().npu.device_count()))

    def _read(self, options: Mapping[str, Any]) -> NpuOptions:
        default = "on" if emulation.is_active() else "off"
        # May be 1 or true: HAL_NPU_EMULATOR=1, or {"emulator": true} in a config.
        given = {**options, "emulator": emulation.switch_of(options.get("emulator", default))}
        return read(NpuOptions, given, "options of the npu driver")


class NpugraphEx(Compiler):
    """torch_npu's compiler ``npugraph_ex``: one compiled and captured graph of the whole step for each size."""

    name = "npugraph_ex"
    reads = frozenset({"passes", "cache_dir", "queries"})

    def make(self, context: FormContext) -> PhaseForm:
        """Return the form that compiles and captures the steps."""
        from .npugraph_ex.compiler import make_form

        return make_form(context)


def _ranks_here() -> int:
    try:
        return number_of("LOCAL_WORLD_SIZE", 1)
    except ValueError as error:
        raise ConfigError(str(error), "unset it, or set it to the number of ranks on this machine") from None


def _compilers(generation: Generation) -> tuple[Compiler, ...]:
    """Return npugraph_ex if the generation supports graphs and torch_npu has the compiler."""
    import torch_npu

    has = hasattr(getattr(torch_npu.npu, "npugraph_ex", None), "compile_fx")
    return (NpugraphEx(),) if generation.graphs and has else ()


def _import_torch_npu() -> Any:
    check_build()
    import torch

    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise DriverUnavailable(
            f"torch_npu cannot be imported: {error}",
            "source CANN's set_env.sh before Python starts, install matching releases of torch, torch_npu and CANN, or "
            "set the option emulator",
        ) from error
    return torch
