"""The arguments of an operation's graph node, whose schema has no type for options.

The last argument of an operation may be its options, an object of a frozen attrs class. Models, operations and kernels
pass on this object. A graph node takes the object's fields instead, in their order, so that graphs hold plain numbers.
Both forms are derived from the class, which alone declares an option.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

import attrs
import torch
from torch import fx

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_options(kind: Any) -> bool:
    """Return whether an argument's annotation is a class of options."""
    return isinstance(kind, type) and attrs.has(kind)


class NodeForm:
    """The form that an operation's arguments have in its graph node.

    Args:
        body: the operation's body, whose declaration has been checked.

    Attributes:
        options: the class of the operation's options; None if it has none.
        signature: the node's signature, with resolved annotations.
        optional: its arguments that may be None or have a default, with that value.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        kinds, declared = get_type_hints(body), inspect.signature(body)
        self._declared = declared
        parameters = [each.replace(annotation=kinds[name]) for name, each in declared.parameters.items()]
        self.options: type[Any] | None = None
        if parameters and is_options(parameters[-1].annotation):
            self.options = parameters.pop().annotation
            parameters += inspect.signature(attrs.resolve_types(self.options)).parameters.values()
        self._before = len(declared.parameters) - (self.options is not None)
        returned = None if kinds["return"] is NoneType else kinds["return"]
        self.signature = declared.replace(parameters=parameters, return_annotation=returned)
        self.optional = {
            each.name: None if each.default is each.empty else each.default
            for each in parameters
            if each.default is not each.empty or NoneType in get_args(each.annotation)
        }

    def prototype(self) -> Callable[..., Any]:
        """Return a function of the node's signature, for torch to infer the schema from."""

        def prototype() -> None:
            raise AssertionError("only the signature is read")

        prototype.__signature__ = self.signature  # type: ignore[attr-defined]
        return prototype

    def caller(self, overload: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Generate a function ``name`` that takes the operation's arguments and calls its node."""
        declared = self._declared.parameters
        namespace: dict[str, Any] = {
            f"_default_{each.name}": each.default for each in declared.values() if each.default is not each.empty
        }
        header = [f"{each}=_default_{each}" if f"_default_{each}" in namespace else each for each in declared]
        given, without = list(declared), ""
        if self.options is not None:
            last = given.pop()
            fields = [field.name for field in attrs.fields(self.options)]
            default = namespace.pop(f"_default_{last}", None)
            if default is not None:  # Dynamo cannot wrap an object that is a default, and so meets its plain numbers
                header[-1] = f"{last}=None"
                numbers = [repr(getattr(default, field)) for field in fields]
                without = f"    if {last} is None:\n        return _overload({', '.join(given + numbers)})\n"
            given += [f"{last}.{field}" for field in fields]
        namespace["_overload"] = overload
        exec(f"def {name}({', '.join(header)}):\n{without}    return _overload({', '.join(given)})\n", namespace)
        return namespace[name]  # type: ignore[no-any-return]

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Return the operation's arguments of a call of its node."""
        if kwargs or (self.options is not None and len(args) < self._before):
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        if self.options is None:
            return args
        options: Any = self.options
        fields = args[self._before :]
        symbolic = any(isinstance(each, _SYMBOLIC) for each in fields)  # as in a trace; such numbers have no hash
        return (*args[: self._before], options(*fields) if symbolic else _packed(options, *fields))

    def unpack(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the node for a call of the operation with all arguments."""
        return args if self.options is None else (*args[:-1], *attrs.astuple(args[-1], recurse=False))

    def of_node(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the node's arguments that calls ``function`` with the operation's."""
        if self.options is None:
            return function

        def from_node(*args: Any) -> Any:
            return function(*self.pack(args, {}))

        from_node.__signature__ = self.signature  # type: ignore[attr-defined]
        from_node.__annotations__ = {each.name: each.annotation for each in self.signature.parameters.values()}
        return from_node

    def has_variable_options(self, args: Sequence[Any]) -> bool:
        """Return whether an option of a call in a graph is another node's result."""
        return self.options is not None and any(isinstance(each, fx.Node) for each in args[self._before :])


@functools.lru_cache(maxsize=1024, typed=True)
def _packed(options: Any, *fields: Any) -> Any:
    """Return an object of a class of options, the same one for equal fields."""
    return options(*fields)
