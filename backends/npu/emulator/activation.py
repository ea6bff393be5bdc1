"""Activation of the emulated CANN, in this process and its child processes.

torch_npu's libraries refer to CANN's by SONAME. This process loads the emulated ones first, so the loader uses them;
child processes find them through ``LD_LIBRARY_PATH``. The runtime reads its options from the environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

import attrs

from hal.config import environment_options, parse_json, read
from hal.config.bounds import SECONDS, TOKENS, at_most
from hal.errors import DriverError, DriverUnavailable

from .build import LIBRARIES, MARK, build

SWITCH = "HAL_NPU_EMULATOR"
OPTIONS = "HAL_NPU_EMULATOR_OPTIONS"
HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Variables with the folder of an installed CANN."""
RUNTIME = "libascendcl.so"


Switch = Literal["off", "on", "force"]
"""Whether to emulate; ``force`` does so even if a real CANN is installed."""


DEVICES, MEMORY = 64, 1 << 37
"""The most NPUs, and bytes of one, that the emulated runtime has addresses for."""


def _seed(instance: Options, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"{attribute.name} must be at least 0, not {value}")


@attrs.frozen(kw_only=True)
class Options:
    """Options of the emulated machine; None is the runtime's default.

    Attributes:
        devices: the number of NPUs.
        memory: bytes of memory per NPU.
        soc: the SoC's name, such as Ascend910B3 or Ascend910_9391. torch_npu chooses code paths by it.
        version: CANN's version, such as 9.1.0. torch_npu chooses code paths by it.
        streams: streams per device, including those of captured graphs.
        tasks: the maximum number of tasks in the captured graphs of a device.
        stall: seconds without any running work after which a wait of the host fails instead of hanging.
        seed: the seed of a deterministic order in which streams run; None lets them run freely.
    """

    devices: int = attrs.field(default=1, validator=at_most(DEVICES))
    memory: int | None = attrs.field(default=None, validator=at_most(MEMORY))
    soc: str = "Ascend910B3"
    version: str | None = None
    streams: int | None = attrs.field(default=None, validator=at_most(TOKENS))
    tasks: int | None = attrs.field(default=None, validator=at_most(TOKENS))
    stall: int | None = attrs.field(default=None, validator=at_most(SECONDS))
    seed: int | None = attrs.field(default=None, validator=_seed)

    def to_json(self) -> str:
        """Return the value of ``HAL_NPU_EMULATOR_OPTIONS``: the options that are not None."""
        return json.dumps(attrs.asdict(self, filter=lambda _, value: value is not None))


_active: Options | None = None


def activate(*, force: bool = False, **options: Any) -> None:
    """Make torch_npu use the emulated CANN, in this process and its child processes.

    Call it before anything imports torch_npu. The first call on a machine compiles the emulated CANN, which takes about
    a minute. A second call with the same options does nothing.

    Args:
        force: use the emulated CANN even if a real one is installed.
        options: fields of :class:`Options`, such as ``devices=2``.

    Raises:
        ConfigError: an option is unknown, or has an invalid value.
        DriverUnavailable: torch_npu or g++ is missing, the emulated CANN does not support this release of torch_npu, or
            a real CANN is installed and ``force`` is not set.
        DriverError: torch_npu's import has already been attempted, the emulated CANN is active with other options, or
            it does not compile.
    """
    global _active
    chosen = read(Options, options, "emulator.activate")
    if _active is None and is_inherited():
        _active = from_environment()
    if _active is not None:
        if _active != chosen:
            raise DriverError(
                f"the emulated CANN is active with {_active}, and cannot be activated with {chosen}",
                "activate it once per process; use a separate process for other options",
            )
        return
    _refuse_if_late()
    if not force:
        refuse_real_cann()
    home = build()
    prepare(os.environ, home, chosen)
    preload(home)
    _active = chosen


def activate_from_environment() -> bool:
    """Activate if ``HAL_NPU_EMULATOR`` is set, with the options in ``HAL_NPU_EMULATOR_OPTIONS``.

    The variable has the values of the driver's option ``emulator``: 1, ``on`` or ``true`` activate, and so does
    ``force`` even if a real CANN is installed. 0, ``off``, ``false`` and the empty string do not.

    Returns:
        Whether the emulated CANN is active.

    Raises:
        ConfigError: the variable has another value, or an option is invalid.
    """
    asked = read(_Asked, {"emulator": switch_of(environment_options("npu").get("emulator", "off"))}, "environment")
    if asked.emulator != "off" and not is_inherited():
        activate(**attrs.asdict(from_environment()), force=asked.emulator == "force")
    return is_active()


@attrs.frozen
class _Asked:
    emulator: Switch


def switch_of(value: Any) -> Any:
    """Convert true, false, 1, 0 and the empty string to a :data:`Switch`; return other values unchanged."""
    if isinstance(value, int) and value in (0, 1):
        value = bool(value)
    return {True: "on", False: "off", "": "off"}.get(value, value) if isinstance(value, (bool, str)) else value


def is_active() -> bool:
    """Return whether torch_npu uses the emulated CANN in this process, or would if it were imported."""
    return _active is not None or is_inherited()


def is_inherited() -> bool:
    """Return whether ``hal emulate`` or a process that had called :func:`activate` started this one.

    The loaded CANN decides; before one is loaded, the first folder of ``LD_LIBRARY_PATH`` with a CANN decides. Folders
    without a CANN may precede it: Python packages with native libraries, such as opencv-python, prepend theirs.
    """
    if _active is not None:
        return False
    if found := loaded():
        return all(_is_ours(library.parent) for library in found)
    folders = [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    first = next((folder for folder in folders if (folder / RUNTIME).exists()), None)
    return first is not None and _is_ours(first)


def from_environment(environ: Mapping[str, str] = os.environ) -> Options:
    """Return the options in ``HAL_NPU_EMULATOR_OPTIONS``.

    Raises:
        ConfigError: it is not a JSON object, or has an unknown key or an invalid value.
    """
    return read(Options, parse_json(environ.get(OPTIONS) or "{}", OPTIONS), OPTIONS)


def prepare(environ: MutableMapping[str, str], home: Path, options: Options) -> None:
    """Set ``environ`` so that a process and its children use the emulated CANN in ``home``."""
    paths = [each for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each and not _is_ours(Path(each))]
    environ["LD_LIBRARY_PATH"] = ":".join([str(home / "lib64"), *paths])
    environ[SWITCH] = "1"
    environ[OPTIONS] = options.to_json()
    environ.update(dict.fromkeys(HOMES, str(home)), ASCEND_OPP_PATH=str(home / "opp"))
    environ.pop("ASCEND_CUSTOM_OPP_PATH", None)  # operators of a real CANN


def preload(home: Path) -> None:
    """Load the libraries, so that the loader uses them for later requests by SONAME."""
    for library in LIBRARIES:
        ctypes.CDLL(str(home / "lib64" / f"lib{library.name}.so"), mode=ctypes.RTLD_GLOBAL)


def loaded() -> list[Path]:
    """Return the paths of each libascendcl.so that this process has loaded."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.exists() else []
    return sorted({Path(line.split(None, 5)[5]) for line in lines if line.endswith(f"/{RUNTIME}")})


def refuse_real_cann(environ: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`DriverUnavailable` if a real CANN is installed."""
    found = next(real_cann(environ), None)
    if found is not None:
        raise DriverUnavailable(
            f"a real CANN is installed ({found}), and the emulated one would hide it",
            f"use the real one, or force it: emulator.activate(force=True), hal emulate --force, {SWITCH}=force",
        )


def real_cann(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Return each libascendcl.so in the environment's folders or the loader's cache that is not emulated."""
    folders = [Path(environ[name]) / "lib64" for name in HOMES if environ.get(name)]
    folders += [Path(each) for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    cache = Path("/etc/ld.so.cache")
    if cache.exists():
        names = re.findall(rb"[^\0]*/" + re.escape(RUNTIME.encode()) + rb"(?=\0)", cache.read_bytes())
        folders += [Path(os.fsdecode(name)).parent for name in names]
    for folder in folders:
        if (folder / RUNTIME).exists() and not _is_ours(folder):
            yield folder / RUNTIME


def _is_ours(libraries: Path) -> bool:
    return (libraries / MARK).exists()


def _refuse_if_late() -> None:
    if found := loaded():
        raise DriverError(
            f"a CANN is already loaded: {found[0]}", "call emulator.activate() before anything imports torch_npu"
        )
    modules = [name for name, module in sys.modules.items() if module is not None]
    if any(name == "torch_npu" or name.startswith("torch_npu.") for name in modules):
        raise DriverError(
            "torch_npu's import has already been attempted, and it cannot be imported a second time",
            "call emulator.activate() before anything imports torch_npu; `import torch` does so unless "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or run the program with `hal emulate -- python ...`",
        )
