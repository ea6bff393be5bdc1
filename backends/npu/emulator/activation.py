"""Putting the emulated CANN under torch_npu: in this process, and in those that it starts.

torch_npu's libraries name CANN's by SONAME. In this process ours are loaded first, so that the loader takes them; child
processes find them through ``LD_LIBRARY_PATH``. Options reach the runtime, here and there, through the environment.
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
from hal.errors import DriverError, DriverUnavailable

from .build import LIBRARIES, MARK, build

SWITCH = "HAL_NPU_EMULATOR"
OPTIONS = "HAL_NPU_EMULATOR_OPTIONS"
HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Where a CANN says that it is installed."""
RUNTIME = "libascendcl.so"


Switch = Literal["off", "on", "force"]
"""Whether to emulate: ``force`` does so even where a real CANN is installed."""


def _at_least_1(instance: Options, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{attribute.name} must be at least 1, not {value}")


@attrs.frozen(kw_only=True)
class Options:
    """What can be chosen about the emulated machine; None leaves the choice to the runtime.

    Attributes:
        devices: how many NPUs there are.
        memory: bytes that each can allocate.
        soc: the SoC's name, by which torch_npu chooses code paths, such as Ascend910B3 or Ascend910_9391.
        version: CANN's, by which torch_npu chooses code paths too, such as 9.1.0.
        streams: how many streams a device has, those that captured graphs hold included.
        tasks: how many tasks the captured graphs of a device can hold.
        stall: seconds for which a wait of the host may see nothing run, before it fails rather than lasts for ever.
        seed: reorder whatever streams may reorder, in a way that the seed fixes; None is free-running streams.
    """

    devices: int = attrs.field(default=1, validator=_at_least_1)
    memory: int | None = attrs.field(default=None, validator=_at_least_1)
    soc: str = "Ascend910B3"
    version: str | None = None
    streams: int | None = attrs.field(default=None, validator=_at_least_1)
    tasks: int | None = attrs.field(default=None, validator=_at_least_1)
    stall: int | None = attrs.field(default=None, validator=_at_least_1)
    seed: int | None = None

    def to_json(self) -> str:
        """What ``HAL_NPU_EMULATOR_OPTIONS`` holds: whatever is not None."""
        return json.dumps(attrs.asdict(self, filter=lambda _, value: value is not None))


_active: Options | None = None


def activate(*, force: bool = False, **options: Any) -> None:
    """Put the emulated CANN under torch_npu, in this process and those that it starts.

    Call it before anything imports torch_npu. The first call on a machine compiles the emulated CANN, which takes about
    a minute. A second call with the same options does nothing.

    Args:
        force: take the emulated CANN even though a real one is installed.
        options: those of :class:`Options`, such as ``devices=2``.

    Raises:
        ConfigError: there is no such option, or it cannot have that value.
        DriverUnavailable: torch_npu or g++ is missing, torch_npu is another release than the emulated CANN serves, or
            a real CANN is installed and ``force`` is not set.
        DriverError: it is too late, because torch_npu has been imported or has failed to; the emulated CANN is active
            with other options; or it does not compile.
    """
    global _active
    chosen = read(Options, options, "emulator.activate")
    if _active is None and is_inherited():
        _active = from_environment()
    if _active is not None:
        if _active != chosen:
            raise DriverError(
                f"the emulated CANN is active with {_active}, and was asked to be with {chosen}",
                "one process has one emulated machine: activate it once, or in a process of its own",
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
    """Activate if ``HAL_NPU_EMULATOR`` is 1, with the options in ``HAL_NPU_EMULATOR_OPTIONS``.

    Returns whether the emulated CANN is active. The variable is the driver's option: ``on`` and ``true`` are 1;
    ``off``, ``false``, 0 and none leave torch_npu alone; and ``force`` activates even though a real CANN is installed.

    Raises:
        ConfigError: the variable has another value, or the options are wrong.
    """
    asked = read(_Asked, {"emulator": switch_of(environment_options("npu").get("emulator", "off"))}, "environment")
    if asked.emulator != "off" and not is_inherited():
        activate(**attrs.asdict(from_environment()), force=asked.emulator == "force")
    return is_active()


@attrs.frozen
class _Asked:
    emulator: Switch


def switch_of(value: Any) -> Any:
    """A :data:`Switch` in the forms that it may be given in: true and false, 1 and 0, and nothing. Others stay."""
    if type(value) is int and value in (0, 1):
        value = bool(value)
    return {True: "on", False: "off", "": "off"}.get(value, value) if isinstance(value, (bool, str)) else value


def is_active() -> bool:
    """Whether torch_npu, imported in this process, runs on the emulated CANN, or does so already."""
    return _active is not None or is_inherited()


def is_inherited() -> bool:
    """Whether ``hal emulate`` or a process that had called :func:`activate` started this one: the loader knows then.

    The CANN that is loaded decides; before one is loaded, the first folder of ``LD_LIBRARY_PATH`` that has one does.
    Libraries without a CANN may stand before ours there: Python packages with native libraries, such as opencv-python,
    put theirs first when they are imported.
    """
    if _active is not None:
        return False
    if found := loaded():
        return all(_is_ours(library.parent) for library in found)
    folders = [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    first = next((folder for folder in folders if (folder / RUNTIME).exists()), None)
    return first is not None and _is_ours(first)


def from_environment(environ: Mapping[str, str] = os.environ) -> Options:
    """The options that ``HAL_NPU_EMULATOR_OPTIONS`` holds.

    Raises:
        ConfigError: it is no JSON object, or has an unknown key or a wrong value.
    """
    return read(Options, parse_json(environ.get(OPTIONS) or "{}", OPTIONS), OPTIONS)


def prepare(environ: MutableMapping[str, str], home: Path, options: Options) -> None:
    """Make ``environ`` one under which a process finds the emulated CANN in ``home``, and its children after it."""
    paths = [each for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each and not _is_ours(Path(each))]
    environ["LD_LIBRARY_PATH"] = ":".join([str(home / "lib64"), *paths])
    environ[SWITCH] = "1"
    environ[OPTIONS] = options.to_json()
    environ.update(dict.fromkeys(HOMES, str(home)), ASCEND_OPP_PATH=str(home / "opp"))
    environ.pop("ASCEND_CUSTOM_OPP_PATH", None)  # operators of a real CANN


def preload(home: Path) -> None:
    """Load the libraries, so that whoever asks for them by SONAME gets these."""
    for library in LIBRARIES:
        ctypes.CDLL(str(home / "lib64" / f"lib{library.name}.so"), mode=ctypes.RTLD_GLOBAL)


def loaded() -> list[Path]:
    """Where the libascendcl.so lies that this process has loaded, if it has."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.exists() else []
    return sorted({Path(line.split(None, 5)[5]) for line in lines if line.endswith(f"/{RUNTIME}")})


def refuse_real_cann(environ: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`DriverUnavailable` where a real CANN is installed."""
    found = next(real_cann(environ), None)
    if found is not None:
        raise DriverUnavailable(
            f"a real CANN is installed here ({found}), and the emulated one would hide it",
            f"run on the real one, or insist: emulator.activate(force=True), hal emulate --force, {SWITCH}=force",
        )


def real_cann(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Every libascendcl.so that the environment or the loader's cache leads to, and that is not ours."""
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
            "torch_npu has already been imported, or has failed to: it cannot be imported a second time",
            "call emulator.activate() before anything imports torch_npu; `import torch` does so unless "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or run the program with `hal emulate -- python ...`",
        )
