"""The options of torch_npu's compiler npugraph_ex, and what has to be there for it."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from hal.errors import ConfigError, nearest

from ..emulator import is_active
from ..failures import first_line
from ..options import NpuOptions

OURS: Mapping[str, Any] = {
    "frozen_parameter": True,  # all inputs lie where they lay
    "clone_input": False,
    "reuse_graph_pool_in_same_fx": False,
    "unsafe_skip_npugraph_capture_validation": True,  # which would capture again, to other outputs
}
"""Options of the package that say what hal makes sure of."""
DEFAULTS: Mapping[str, Any] = {"capture_error_mode": "thread_local"}
"""Those that hal has other defaults for: other threads may copy and allocate during a capture."""
REFUSED: Mapping[str, str] = {
    **dict.fromkeys((*OURS, "use_graph_pool", "mode"), "hal sets it"),
    **dict.fromkeys(("dump_tensor_data", "data_dump_stage", "data_dump_dir"), "nothing would be dumped"),
    **dict.fromkeys(("clone_output", "record_statistics_debug_info"), "it would be without effect"),
    "force_eager": 'the graph would not be captured; for that there is the compiler "eager"',
    "force_recapture": "every step would be captured again",
    "static_kernel_compile": "set the driver's option static_kernels",
}
NOT_EMULATED = ("deadlock_check", "super_kernel_optimize")
OP_COMPILER = "op_compiler"
"""CANN's command that compiles kernels for the shapes of one graph."""


def compiler_options(options: NpuOptions) -> dict[str, Any]:
    """What the package is told, for the driver's options.

    Raises:
        ConfigError: one is unknown, has a wrong value, or cannot be had here.
    """
    config: Any = _package().CompilerConfig
    known = [name for name in vars(config()) if not name.startswith("_")]
    for name, value in options.npugraph_ex.items():
        if name in REFUSED:
            raise ConfigError(f"the options npugraph_ex set {name}", f"leave it out: {REFUSED[name]}")
        if name not in known:
            raise ConfigError(
                f"the options npugraph_ex have {name!r}, and torch_npu has no such; {nearest(name, known)}",
                f"it has {', '.join(sorted(known))}",
            )
        if value and name in NOT_EMULATED and is_active():
            raise ConfigError(f"the options npugraph_ex set {name}, which the emulated CANN has not", "leave it out")
        try:
            setattr(config(), name, value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the options npugraph_ex set {name}: {first_line(error)}", "correct it") from error
    static = {"static_kernel_compile": True} if options.static_kernels else {}
    return {**DEFAULTS, **options.npugraph_ex, **OURS, **static}


def check_static_kernels() -> None:
    """Raise ConfigError where kernels cannot be compiled for a graph's shapes."""
    if is_active() or shutil.which(OP_COMPILER) is None:
        what = "the emulated CANN has none" if is_active() else "it is not on the PATH"
        raise ConfigError(
            f"the option static_kernels takes CANN's {OP_COMPILER}, and {what}", "leave the option out, or install it"
        )


def check_device(index: int) -> None:
    """Raise ConfigError if torch_npu updates lengths on another device: it does on the first of a process only."""
    module = _package("npugraph_ex._acl_concrete_graph.acl_graph")
    stream = getattr(module.CapturedGraphUpdateAndReplay, "_update_stream", None)
    if stream is not None and stream.device_index != index:
        raise ConfigError(
            f"npugraph_ex on NPU {index}, and this process ran it on NPU {stream.device_index}: torch_npu updates "
            "lengths on one device of a process, and replays on others would wait forever",
            'run one process for each NPU, or use the compiler "graph"',
        )


def _package(name: str = "npugraph_ex") -> Any:
    """Import a module of the package, and keep that from taking SIGINT and SIGTERM: it ignores them once it had one."""
    if threading.current_thread() is not threading.main_thread():
        return import_module(name)  # it takes none there
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    module = import_module(name)
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    return module
