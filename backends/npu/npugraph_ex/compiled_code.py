"""What torch_npu's compiler npugraph_ex makes of a step: code, which is kept for the next start.

The compiler is given the lowered step as it is (``torch_npu.npu.npugraph_ex.compile_fx``). Through torch.compile it
would get what AOTAutograd makes of that, in which caches are copied instead of written in place.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch._guards import TracingContext, tracing

from hal.config import CompileCache, cache_folder, content_key, home_of, private_folder
from hal.errors import CompileError, ConfigError

from ..failures import first_line
from .native_nodes import NativeStep

log = logging.getLogger("hal.npu")

CODE = "step.py"

Namespace = dict[str, Any]


class CodeCache:
    """Compiles steps, or takes what was compiled for the same graph, inputs, options and versions before.

    Args:
        folder: where code is kept; None takes the usual place.
        options: of the compiler.

    Callables among the options keep it from doing so: nothing is kept then.

    Code from the folder runs in this process: what others could have written there is not taken.

    Attributes:
        taken: how many steps were taken from the folder.

    Raises:
        ConfigError: the folder is in a home folder, and there is none.
    """

    def __init__(self, folder: str | None, options: Mapping[str, Any]) -> None:
        base = cache_folder("npugraph_ex") if folder is None else home_of(folder) / "npugraph_ex"
        self._cache, self._options, self.taken = CompileCache(base), dict(options), 0
        self._keeps = not any(callable(each) for each in options.values())  # which nothing could be known by

    def compile(self, step: NativeStep) -> Namespace:
        """The names of the module that torch_npu made for a step, ``kernel`` among them: the compiled function.

        Raises:
            CompileError: torch_npu cannot compile it, or would not see its lengths.
        """
        key = self._key(step)
        code = self._read(key) if self._keeps else None
        if code is not None:
            with suppress(Exception):
                names = _check(step, _run(code))
                self.taken += 1
                return names
            log.warning(
                "the compiled code in %s does not fit this torch_npu, and is made anew", self._cache.folder / key
            )
        code = self.generate(step)
        if self._keeps:
            self._write(key, code)
        try:
            return _check(step, _run(code))
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(f"the code that npugraph_ex made fails: {first_line(error)}", _REMEDY) from error

    def generate(self, step: NativeStep) -> str:
        """The code that torch_npu makes for a step, made anew.

        Raises:
            CompileError: torch_npu cannot compile it.
        """
        extra: dict[str, Any] = {}
        if self._options.get("static_kernel_compile"):
            folder = self._cache.folder / f"static-{self._key(step)}"
            try:
                own = private_folder(self._cache.folder) and private_folder(folder)
            except OSError as error:
                raise CompileError(f"static kernels cannot be kept in {folder}: {error}", _FOLDER) from error
            if not own:
                raise CompileError(f"static kernels are kept in {folder}, where others may write", _FOLDER)
            extra = {
                "static_kernel_compile.use_cache_compile": True,
                "static_kernel_compile.compile_cache_dir": str(folder),
                "static_kernel_compile.cann_version": torch_npu.npu.utils.get_cann_version(),
                "static_kernel_compile.deterministic": torch.are_deterministic_algorithms_enabled(),
                "static_kernel_compile.deterministic_level": torch_npu.npu._get_deterministic_level(),
            }
        try:
            with torch.no_grad(), tracing(TracingContext(step.mode)), repeating_warnings():
                compiled = torch_npu.npu.npugraph_ex.compile_fx(step.graph, step.examples, self._options)
                code = compiled.get_code(extra)
        except Exception as error:
            raise CompileError(f"npugraph_ex failed: {first_line(error)}", _REMEDY) from error
        if not isinstance(code, str):
            raise CompileError(
                "npugraph_ex made no code for these options", "leave the driver's options npugraph_ex out"
            )
        return code

    def _key(self, step: NativeStep) -> str:
        inputs = [
            (tuple(each.shape), each.stride(), each.dtype, str(each.device)) if isinstance(each, Tensor) else "int"
            for each in step.examples
        ]
        versions = [version("torch"), version("torch_npu"), torch_npu.npu.utils.get_cann_version()]
        parts = (step.graph.code, inputs, sorted(self._options.items()), versions, torch_npu.npu.get_device_name())
        return content_key(repr(parts))

    def _read(self, key: str) -> str | None:
        """Code that was kept; None if there is none, or the cache cannot be read or trusted."""
        try:
            entry = self._cache.get(key)
            return None if entry is None else (entry / CODE).read_text(encoding="utf-8")
        except ConfigError as error:
            log.warning("%s; %s", error.problem, _FOLDER)
        except OSError as error:
            log.warning("the compile cache %s cannot be read: %s", self._cache.folder, error)
        return None

    def _write(self, key: str, code: str) -> None:
        try:
            self._cache.put(key, lambda folder: _write_code(folder, code))
        except ConfigError:
            pass  # reading said so
        except OSError as error:
            log.warning("the compile cache %s cannot be written: %s", self._cache.folder, error)


_FOLDER = "set compilation.cache_dir to a folder of your own"
_REMEDY = 'use the compiler "graph", which captures kernels as they are'


def _run(code: str) -> Namespace:
    names: Namespace = {"__name__": "npugraph_ex_code"}
    exec(compile(code, "<npugraph_ex>", "exec"), names)
    return names


def _check(step: NativeStep, names: Namespace) -> Namespace:
    """Lengths that torch_npu does not update would stay those of the capture, and others would capture again."""
    info = names["aclgraph_cache_info"]
    if info.unupdated_sym_input_index or len(info.ops_update_rulers) != len(step.readers):
        reading = sorted({str(node.target) for node in step.readers})
        raise CompileError(
            f"npugraph_ex gives new lengths to {len(info.ops_update_rulers)} of the {len(step.readers)} operations "
            f"that read them ({', '.join(reading)})",
            _REMEDY,
        )
    return names


def _write_code(folder: Path, code: str) -> None:
    (folder / CODE).write_text(code, encoding="utf-8")


@contextmanager
def repeating_warnings() -> Iterator[None]:
    """Inside the block, Python's warnings go to the log: torch_npu warns of what hal asks for on purpose."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    for each in said:
        log.info("torch_npu: %s", each.message)
