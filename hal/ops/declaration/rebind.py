"""Copies of an operation's body in which the names of operations refer to other functions.

The body of a fused operation calls smaller operations by name. In the reference these names refer to references, in a
pattern to graph nodes, and in a fallback to a backend's kernels. ``rebind`` copies the body with these names replaced.
Calls therefore need no mode, and threads do not affect each other.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, get_type_hints

Substitute = Callable[[Any], Any]
"""Maps a value to its replacement, or returns it unchanged."""


def rebind(function: Callable[..., Any], substitute: Substitute) -> Callable[..., Any]:
    """Copy ``function`` with every global, closure variable and default replaced by ``substitute`` of it.

    Helper functions of the same package are copied in the same way. Modules are wrapped, so that ``ops.rms_norm`` is
    replaced like ``rms_norm``. Tuples, lists, dicts and partials are replaced element by element. Operations reached in
    any other way, such as an import inside the body or a method, are not replaced. Such a body is invalid; running its
    reference under :func:`hal.ops.intercepted` detects it.
    """
    if not isinstance(function, FunctionType):
        return function
    return _Rebinder(substitute, function.__module__.partition(".")[0]).function(function)


class _Rebinder:
    def __init__(self, substitute: Substitute, package: str) -> None:
        self.substitute = substitute
        self.package = package
        self.done: dict[FunctionType, FunctionType] = {}

    def function(self, function: FunctionType) -> FunctionType:
        if function in self.done:
            return self.done[function]
        namespace: dict[str, Any] = {
            "__builtins__": function.__globals__["__builtins__"],
            "__name__": function.__module__,
        }
        closure = tuple(CellType() for _ in function.__closure__ or ())
        copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure or None)
        self.done[function] = copy  # before the values, because functions can refer to themselves
        copy.__defaults__ = self.value(function.__defaults__)
        copy.__kwdefaults__ = self.value(function.__kwdefaults__)
        for name in _names(function.__code__):
            if name in function.__globals__:
                namespace[name] = self.value(function.__globals__[name])
        for new, old in zip(closure, function.__closure__ or (), strict=True):
            new.cell_contents = self.value(old.cell_contents)
        return copy

    def value(self, value: Any) -> Any:
        replacement = self.substitute(value)
        if replacement is not value:
            return replacement
        if isinstance(value, FunctionType) and self.follows(value.__module__):
            return self.function(value)
        if isinstance(value, ModuleType) and self.follows(value.__name__):
            return _Module(value, self)
        if isinstance(value, partial):
            return partial(self.value(value.func), *map(self.value, value.args), **self.value(value.keywords))
        if type(value) in (tuple, list):
            return type(value)(map(self.value, value))
        if type(value) is dict:
            return {key: self.value(each) for key, each in value.items()}
        return value

    def follows(self, module: str) -> bool:
        return module.partition(".")[0] in ("hal", self.package)


class _Module:
    """A module whose attributes are replaced by a rebinder."""

    def __init__(self, module: ModuleType, rebinder: _Rebinder) -> None:
        self._module = module
        self._rebinder = rebinder

    def __getattr__(self, name: str) -> Any:
        return self._rebinder.value(getattr(self._module, name))


def _names(code: CodeType) -> Iterator[str]:
    # Not co_names, which includes attributes: `functional.linear` does not use a global named linear.
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:  # nested functions and comprehensions
        if isinstance(constant, CodeType):
            yield from _names(constant)


def generate_function(
    body: Callable[..., Any], signature: inspect.Signature, namespace: dict[str, Any], number: int
) -> Callable[..., Any]:
    """Generate a function with ``signature`` that calls ``namespace["_get"]()[number]`` with its arguments.

    Args:
        body: provides the name, docstring, module and annotations.
        signature: the signature of ``body``, including defaults.
        namespace: the globals of the generated function.
        number: the operation's index in the tables that ``_get`` returns.
    """
    defaults = {f"_default_{p.name}": p.default for p in signature.parameters.values() if p.default is not p.empty}
    namespace |= defaults
    parameters = ", ".join(
        f"{name}=_default_{name}" if f"_default_{name}" in defaults else name for name in signature.parameters
    )
    source = f"def {body.__name__}({parameters}):\n    return _get()[{number}]({', '.join(signature.parameters)})\n"
    exec(compile(source, f"<hal.ops.{body.__name__}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[body.__name__]
    function.__doc__, function.__module__ = body.__doc__, body.__module__
    # Resolved: names in the body's annotations mean nothing in the namespace of the generated function.
    function.__annotations__ = get_type_hints(body)
    return function
