"""Options and prerequisites of torch_npu's compiler npugraph_ex."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from hal.errors import ConfigError, nearest

from ..emulation import is_active
from ..failures import first_line
from ..options import NpuOptions

FIXED: Mapping[str, Any] = {
    "frozen_parameter": True,  # the addresses of all inputs are constant
    "clone_input": False,
    "reuse_graph_pool_in_same_fx": False,
    "unsafe_skip_npugraph_capture_validation": True,  # the validation would capture again, with other outputs
}
"""Compiler options that hal sets, because hal guarantees what they assume."""
DEFAULTS: Mapping[str, Any] = {"capture_error_mode": "thread_local"}
"""Options whose default hal changes: other threads may copy and allocate during a capture."""
REFUSED: Mapping[str, str] = {
    **dict.fromkeys((*FIXED, "use_graph_pool", "mode"), "hal sets it"),
    **dict.fromkeys(("dump_tensor_data", "data_dump_stage", "data_dump_dir"), "nothing would be dumped"),
    **dict.fromkeys(("clone_output", "record_statistics_debug_info"), "it would have no effect"),
    "force_eager": 'the graph would not be captured; use the compiler "eager" instead',
    "force_recapture": "every step would be captured again",
    "static_kernel_compile": "set the driver's option static_kernels",
}
NOT_EMULATED = ("deadlock_check", "super_kernel_optimize")
OP_COMPILER = "op_compiler"
"""CANN's command that compiles kernels for the shapes of one graph."""


def compiler_options(options: NpuOptions, *, in_place: bool = True) -> dict[str, Any]:
    """Return the compiler's options for the driver's options.

    Args:
        options: the driver's options.
        in_place: whether the compiler may let operations write their results into their inputs.

    Raises:
        ConfigError: an option is unknown, has an invalid value, or is not supported on this machine.
    """
    config: Any = _package().CompilerConfig
    known = [name for name in vars(config()) if not name.startswith("_")]
    for name, value in options.npugraph_ex.items():
        if name in REFUSED:
            raise ConfigError(f"the option npugraph_ex sets {name!r}", f"remove {name}: {REFUSED[name]}")
        if name not in known:
            raise ConfigError(
                f"the option npugraph_ex sets {name!r}, which torch_npu does not have; {nearest(name, known)}",
                f"use one of {', '.join(sorted(known))}",
            )
        if value and name in NOT_EMULATED and is_active():
            raise ConfigError(
                f"the option npugraph_ex sets {name!r}, which the emulated CANN does not support", f"remove {name}"
            )
        try:
            setattr(config(), name, value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the option npugraph_ex sets {name!r} to {value!r}: {first_line(error)}", f"correct {name}"
            ) from error
    static = {"static_kernel_compile": True} if options.static_kernels else {}
    if not in_place and options.npugraph_ex.get("inplace_pass"):
        raise ConfigError(
            "the option npugraph_ex sets 'inplace_pass', which gives wrong states of recurrent layers in steps of "
            "several tokens",
            "remove inplace_pass, or leave out draft and compilation.queries",
        )
    safe = {} if in_place else {"inplace_pass": False}
    return {**DEFAULTS, **options.npugraph_ex, **FIXED, **static, **safe}


def check_static_kernels() -> None:
    """Check that CANN can compile kernels for a graph's shapes.

    Raises:
        ConfigError: CANN's op_compiler is missing.
    """
    if is_active() or shutil.which(OP_COMPILER) is None:
        missing = "which the emulated CANN lacks" if is_active() else "which is not on the PATH"
        raise ConfigError(
            f"the option static_kernels requires CANN's {OP_COMPILER}, {missing}",
            f"remove static_kernels, or install {OP_COMPILER}",
        )


def check_device(index: int) -> None:
    """Check that torch_npu can update lengths on a device: it does so only on the first device of a process.

    Raises:
        ConfigError: the process has used npugraph_ex on another device.
    """
    module = _package("npugraph_ex._acl_concrete_graph.acl_graph")
    stream = getattr(module.CapturedGraphUpdateAndReplay, "_update_stream", None)
    if stream is not None and stream.device_index != index:
        raise ConfigError(
            f"npugraph_ex cannot run on NPU {index}: this process has run it on NPU {stream.device_index}, and "
            "torch_npu updates lengths on one device per process, so that replays on others would wait forever",
            'run one process per NPU, or use the compiler "graph"',
        )


def _package(name: str = "npugraph_ex") -> Any:
    """Import a module of the package, and restore the handlers of SIGINT and SIGTERM that it replaces."""
    if threading.current_thread() is not threading.main_thread():
        return import_module(name)  # the package sets handlers only in the main thread
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    module = import_module(name)
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    return module
