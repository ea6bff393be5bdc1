"""Runs Inductor's Triton kernels in Triton's interpreter.

Inductor compiles its kernels, tunes tile sizes, and launches with generated code. Here nothing is compiled: the
interpreter runs the kernel with the first tile size. CUDA math functions, which the interpreter cannot call, are
replaced by numpy's.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

BY_NUMPY = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "exp": np.exp,
    "exp2": np.exp2,
    "floor": np.floor,
    "log": np.log,
    "log2": np.log2,
    "nearbyint": np.rint,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
"""Functions of CUDA's libdevice, by name."""


def register_launches(heuristics: ModuleType) -> None:
    """Make ``torch._inductor.runtime.triton_heuristics`` launch kernels in the interpreter."""

    def run(self: Any, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        config = self.configs[0]
        parameters = list(inspect.signature(self.fn.fn).parameters)
        values = dict(zip([each for each in parameters if each not in config.kwargs], args, strict=False))
        constants = {name: value for name, value in self.triton_meta["constants"].items() if name not in values}
        tiles = {name: value for name, value in config.kwargs.items() if name in parameters}
        scope = {**constants, **values, **config.kwargs}
        grid = heuristics.GridExpr.from_meta(self.inductor_meta, {**config.kwargs, "num_warps": config.num_warps})
        exec("\n".join(grid.prefix), {"max": max}, scope)
        sizes = (eval(str(each), {"max": max}, scope) for each in (grid.x_grid, grid.y_grid, grid.z_grid))
        self.fn[tuple(sizes)](**values, **constants, **tiles, **kwargs)

    heuristics.CachingAutotuner.precompile = lambda self, *args, **kwargs: None
    heuristics.CachingAutotuner.run = run


def register_functions(helpers: ModuleType) -> None:
    """Make ``torch._inductor.runtime.triton_helpers`` compute math functions with numpy."""
    helpers.libdevice = SimpleNamespace(**{name: _interpreted(function) for name, function in BY_NUMPY.items()})


def _interpreted(function: Any) -> Any:
    """Wrap a numpy function for the interpreter's tensors; the result has the first argument's shape and dtype."""

    def call(first: Any, *others: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        arrays = [each.handle.data if isinstance(each, tl.tensor) else np.asarray(each) for each in (first, *others)]
        with np.errstate(all="ignore"):  # as on a GPU
            result = np.asarray(function(*arrays)).astype(arrays[0].dtype)
        return tl.tensor(TensorHandle(result, first.handle.dtype), first.type)

    return call
