"""Activation of the emulated CANN, in this process and its child processes.

torch_npu's libraries refer to CANN's by SONAME. This process loads the emulated ones first, so the loader uses them;
child processes find them through ``LD_LIBRARY_PATH``. The runtime reads its options from the environment.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import attrs

from .build import LIBRARIES, MARK, build
from .errors import EmulationError, InvalidOption, Unavailable
from .options import OPTIONS, SWITCH, Options, from_environment, read_options, switch_in

HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_AICPU_PATH")
"""Variables with the folder of an installed CANN."""
PATHS = {"PATH": ("bin", "tools/bisheng_compiler/bin"), "PYTHONPATH": ("python/site-packages",)}
"""Folders of an installed CANN that precede those of the variables, as its set_env.sh arranges."""
RUNTIME = "libascendcl.so"

_active: Options | None = None


def activate(*, force: bool = False, **options: Any) -> None:
    """Make torch_npu use the emulated CANN, in this process and its child processes.

    Call it before anything imports torch_npu. The first call on a machine compiles the emulated CANN, which takes
    minutes. A second call with the same options does nothing.

    Args:
        force: use the emulated CANN even if a real one is installed.
        options: fields of :class:`Options`, such as ``devices=2``.

    Raises:
        InvalidOption: an option is unknown, or has an invalid value.
        Unavailable: torch_npu or g++ is missing, the emulated CANN does not support this release of torch_npu, or
            a real CANN is installed and ``force`` is not set.
        EmulationError: torch_npu's import has already been attempted, the emulated CANN is active with other options,
            or it does not compile.
    """
    global _active
    chosen = read_options(options, "activate")
    if _active is None and is_inherited():
        _active = from_environment()
        _offer_modules(Path(os.environ[HOMES[0]]))  # Programs such as pytest-xdist's workers replace sys.path.
    if _active is not None:
        if _active != chosen:
            raise EmulationError(
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
    _offer_modules(home)
    _active = chosen


def _offer_modules(home: Path) -> None:
    """Let this process import CANN's Python modules, behind all others."""
    sys.path.extend(path for each in PATHS["PYTHONPATH"] if (path := str(home / each)) not in sys.path)


def activate_from_environment() -> bool:
    """Activate if ``EMULATED_CANN`` is set, with the options in ``EMULATED_CANN_OPTIONS``.

    1, ``on`` and ``true`` activate, and so does ``force`` even if a real CANN is installed. 0, ``off``, ``false`` and
    the empty string do not.

    Returns:
        Whether the emulated CANN is active.

    Raises:
        InvalidOption: the variable has another value, or an option is invalid.
        EmulationError: as :func:`activate` does.
    """
    switch = switch_in()
    if switch != "off" and not is_inherited():
        activate(**attrs.asdict(from_environment()), force=switch == "force")
    return is_active()


def is_active() -> bool:
    """Return whether torch_npu uses the emulated CANN in this process, or would if it were imported."""
    return _active is not None or is_inherited()


def is_inherited() -> bool:
    """Return whether ``emulated-cann run`` or a process that had called :func:`activate` started this one.

    The loaded CANN decides; before one is loaded, the first folder of ``LD_LIBRARY_PATH`` with a CANN decides. Folders
    without a CANN may precede it: Python packages with native libraries, such as opencv-python, prepend theirs.
    """
    if _active is not None:
        return False
    if found := loaded():
        return all(is_emulated(library.parent) for library in found)
    folders = [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    first = next((folder for folder in folders if (folder / RUNTIME).exists()), None)
    return first is not None and is_emulated(first)


def prepare(environ: MutableMapping[str, str], home: Path, options: Options) -> None:
    """Set ``environ`` so that a process and its children use the emulated CANN in ``home``."""
    paths = [each for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each and not is_emulated(Path(each))]
    environ["LD_LIBRARY_PATH"] = ":".join([str(home / "lib64"), *paths])
    environ[SWITCH] = "1"
    environ[OPTIONS] = options.to_json()
    environ.update(dict.fromkeys(HOMES, str(home)), ASCEND_OPP_PATH=str(home / "opp"))
    for name, folders in PATHS.items():
        first = [str(home / each) for each in folders]
        others = [each for each in environ.get(name, "").split(":") if each and each not in first]
        environ[name] = ":".join([*first, *others])
    environ.pop("ASCEND_CUSTOM_OPP_PATH", None)  # operators of a real CANN
    if options.trace is not None:
        try:
            Path(options.trace).write_text("[\n]\n", encoding="ascii")
        except OSError as error:
            raise InvalidOption(
                f"trace is {options.trace}, which cannot be written: {error.strerror}",
                "name a file in a folder that is there",
            ) from error
    if options.races or options.trace is not None:
        environ.setdefault("TASK_QUEUE_ENABLE", "0")  # launches of another thread have no Python stack


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
    """Raise :class:`Unavailable` if a real CANN is installed."""
    found = next(installed_canns(environ), None)
    if found is not None:
        raise Unavailable(
            f"a real CANN is installed ({found}), and the emulated one would hide it",
            "use the real one, or force it: emulated_cann.activate(force=True), emulated-cann run --force, or "
            f"{SWITCH}=force",
        )


def installed_canns(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Return each libascendcl.so in the environment's folders or the loader's cache that is not emulated."""
    folders = [Path(environ[name]) / "lib64" for name in HOMES if environ.get(name)]
    folders += [Path(each) for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    cache = Path("/etc/ld.so.cache")
    if cache.exists():
        names = re.findall(rb"[^\0]*/" + re.escape(RUNTIME.encode()) + rb"(?=\0)", cache.read_bytes())
        folders += [Path(os.fsdecode(name)).parent for name in names]
    for folder in folders:
        if (folder / RUNTIME).exists() and not is_emulated(folder):
            yield folder / RUNTIME


def is_emulated(libraries: Path) -> bool:
    """Return whether a folder has the libraries of the emulated CANN."""
    return (libraries / MARK).exists()


def _refuse_if_late() -> None:
    if found := loaded():
        raise EmulationError(
            f"a CANN is already loaded: {found[0]}", "call emulated_cann.activate() before anything imports torch_npu"
        )
    modules = [name for name, module in sys.modules.items() if module is not None]
    if any(name == "torch_npu" or name.startswith("torch_npu.") for name in modules):
        raise EmulationError(
            "torch_npu's import has already been attempted, and it cannot be imported a second time",
            "call emulated_cann.activate() before anything imports torch_npu; `import torch` does so unless "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or run the program with `emulated-cann run -- python ...`",
        )
