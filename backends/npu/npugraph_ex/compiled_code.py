"""Compilation of steps by npugraph_ex, with a cache of the generated code.

The compiler gets the lowered step directly (``torch_npu.npu.npugraph_ex.compile_fx``). torch.compile would pass it
through AOTAutograd, which copies caches instead of writing them in place.
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
from torch import Tensor, fx
from torch._guards import TracingContext, tracing

from hal.config import CompileCache, cache_folder, content_key, home_of, private_folder
from hal.errors import CompileError, ConfigError

from ..failures import first_line
from .native_nodes import NativeStep

log = logging.getLogger("hal.npu")

CODE = "step.py"

Namespace = dict[str, Any]


class CodeCache:
    """A compiler of steps, with a cache keyed by graph, inputs, options and versions.

    The process executes cached code, so a folder that other users can write to is not used. Options with callables
    have no stable key, and disable the cache.

    Args:
        folder: the cache folder; None is hal's cache folder.
        options: the compiler's options.

    Attributes:
        hits: the number of steps read from the cache.

    Raises:
        ConfigError: the folder is relative to a home folder, and the user has none.
    """

    def __init__(self, folder: str | None, options: Mapping[str, Any]) -> None:
        base = cache_folder("npugraph_ex") if folder is None else home_of(folder) / "npugraph_ex"
        self._cache, self._options, self.hits = CompileCache(base), dict(options), 0
        self._keeps = not any(callable(each) for each in options.values())

    def compile(self, step: NativeStep) -> Namespace:
        """Return the namespace of the module that torch_npu generates for a step; ``kernel`` is the compiled function.

        Raises:
            CompileError: torch_npu cannot compile the step, or would not update its lengths.
        """
        key = self._key(step)
        code = self._read(key) if self._keeps else None
        if code is not None:
            with suppress(Exception):
                names = _check(step, _run(code))
                self.hits += 1
                return names
            log.warning("recompiling: the cached code in %s fails with this torch_npu", self._cache.folder / key)
        code = self.generate(step)
        if self._keeps:
            self._write(key, code)
        try:
            return _check(step, _run(code))
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(f"the code that npugraph_ex generated fails: {first_line(error)}", _REMEDY) from error

    def generate(self, step: NativeStep) -> str:
        """Generate the code of a step, ignoring the cache.

        Raises:
            CompileError: torch_npu cannot compile the step.
        """
        extra: dict[str, Any] = {}
        if self._options.get("static_kernel_compile"):
            folder = self._cache.folder / f"static-{self._key(step)}"
            try:
                own = private_folder(self._cache.folder) and private_folder(folder)
            except OSError as error:
                raise CompileError(f"static kernels cannot be stored in {folder}: {error}", _FOLDER) from error
            if not own:
                raise CompileError(
                    f"static kernels cannot be stored in {folder}, which other users may write to", _FOLDER
                )
            extra = {
                "static_kernel_compile.use_cache_compile": True,
                "static_kernel_compile.compile_cache_dir": str(folder),
                "static_kernel_compile.cann_version": torch_npu.npu.utils.get_cann_version(),
                "static_kernel_compile.deterministic": torch.are_deterministic_algorithms_enabled(),
                "static_kernel_compile.deterministic_level": torch_npu.npu._get_deterministic_level(),
            }
        try:
            with torch.no_grad(), tracing(TracingContext(step.mode)), logging_warnings():
                _call_by_packet(step.graph)
                compiled = torch_npu.npu.npugraph_ex.compile_fx(step.graph, step.examples, self._options)
                code = compiled.get_code(extra)
        except Exception as error:
            raise CompileError(f"npugraph_ex failed: {first_line(error)}", _REMEDY) from error
        if not isinstance(code, str):
            raise CompileError(
                f"npugraph_ex generates no code for the options {self._options}", "remove the driver option npugraph_ex"
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
        """Return cached code; None if there is none, or the cache cannot be read or trusted."""
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
            pass  # _read has logged it
        except OSError as error:
            log.warning("the compile cache %s cannot be written: %s", self._cache.folder, error)


_FOLDER = "set compilation.cache_dir to a folder that only you can write to"
_REMEDY = 'use the compiler "graph", which captures the kernels without npugraph_ex'


def _call_by_packet(graph: fx.GraphModule) -> None:
    """Call npu_weight_quant_batchmatmul by the name of all its overloads, of which it has one.

    For the name of an overload, torch_npu 2.13 sets an option that its compiler does not have, and fails.
    """
    operator = torch.ops.npu.npu_weight_quant_batchmatmul
    for node in graph.graph.find_nodes(op="call_function", target=operator.default):
        node.target = operator
    graph.recompile()


def _run(code: str) -> Namespace:
    names: Namespace = {"__name__": "npugraph_ex_code"}
    exec(compile(code, "<npugraph_ex>", "exec"), names)
    return names


def _check(step: NativeStep, names: Namespace) -> Namespace:
    """Check that torch_npu updates every length, and return ``names``.

    A length that it does not update would keep its captured value, or cause another capture.

    Raises:
        CompileError: torch_npu does not update some length.
    """
    info = names["aclgraph_cache_info"]
    if info.unupdated_sym_input_index or len(info.ops_update_rulers) != len(step.readers):
        reading = sorted({str(node.target) for node in step.readers})
        raise CompileError(
            f"npugraph_ex updates the lengths of only {len(info.ops_update_rulers)} of the {len(step.readers)} "
            f"operations that read them ({', '.join(reading)})",
            _REMEDY,
        )
    return names


def _write_code(folder: Path, code: str) -> None:
    (folder / CODE).write_text(code, encoding="utf-8")


@contextmanager
def logging_warnings() -> Iterator[None]:
    """Redirect Python's warnings to the log: torch_npu warns about options that hal sets deliberately."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for each in caught:
        log.info("torch_npu: %s", each.message)
