"""A stand-in for sgl_kernel_npu, SGLang's own operators for NPUs, which are compiled for hardware and not on PyPI.

Its modules have what dense models call, in operators of torch and torch_npu. What SGLang imports beyond that is refused
when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class _Refusing(MetaPathFinder, Loader):
    """Finds the modules that are not here, and gives them functions that refuse."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        def absent(name: str) -> Callable[..., NoReturn]:
            if name.startswith("__"):
                raise AttributeError(name)

            def refuse(*_: Any, **__: Any) -> NoReturn:
                raise NotImplementedError(f"the stand-in for sgl_kernel_npu has no {module.__name__}.{name}")

            return refuse

        module.__getattr__ = absent  # type: ignore[method-assign]


sys.meta_path.append(_Refusing())
