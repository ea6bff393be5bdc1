"""Validation of the arguments that a driver passes to its backend."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from hal import ops
from hal.device.device import Device, Limits
from hal.drivers.compiler import pass_name
from hal.errors import CompileError, ConfigError, DriverIncompatible
from hal.ops.declaration.operation import Operation
from hal.step.state import KEY_VALUE


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_device(value: Any) -> bool:
    return isinstance(value, Device) and isinstance(getattr(value, "torch", None), torch.device)


def _is_listed(value: Any) -> bool:
    """Return whether ``value`` is a collection that can be iterated repeatedly; strings are not."""
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray)


def _are_texts(value: Any) -> bool:
    return _is_listed(value) and all(isinstance(each, str) for each in value)


def _is_table(value: Any, of: Callable[[Any], bool] = _is_text) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value)) and all(map(of, value.values()))


def _are_layers(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(each, type) and issubclass(each, nn.Module) for each in value)
        and all(map(callable, value.values()))
    )


_ARGUMENTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_text, "the driver's name, a string"),
    "device": (
        _is_device,
        "a hal.vendor.Device whose `torch` is a torch.device with its index, or a hal.vendor.HostDevice()",
    ),
    "kernels": (lambda value: _is_table(value, lambda kernel: True), "a mapping from operation names to callables"),
    "graphs": (lambda value: isinstance(value, bool), "True or False"),
    "compilers": (_is_listed, "a collection of hal.vendor.Compiler"),
    "aliases": (_is_table, "a mapping from strings to compiler names"),
    "rewrites": (_is_listed, "a collection of hal.compile.rewrite.rewrite.Rewrite, or of functions of a graph"),
    "layers": (_are_layers, "a mapping from classes of hal.nn to callables that return a layer"),
    "native_names": (_is_table, "a mapping from the vendor's operation names to hal's"),
    "capabilities": (_are_texts, "a collection of strings"),
    "limits": (lambda value: value is None or isinstance(value, Limits), "hal.vendor.Limits, or leave it out"),
    "inductor": (lambda value: value is None or _are_texts(value), "a collection of strings, or None"),
    "state_layout": (_is_text, "a string"),
    "sources": (_is_table, "a mapping from operation names to library names"),
    "conditions": (lambda value: _is_table(value, callable), "a mapping from fused operations to functions"),
    "invariant": (lambda value: _is_table(value, callable), "a mapping from operation names to callables"),
    "distributed": (
        lambda value: value is None or _is_text(value),
        "the name of a backend of torch.distributed, or None",
    ),
}
"""Type check of each argument of :class:`hal.Backend`, and the required type in words."""


def check_arguments(driver: Any, given: Mapping[str, Any]) -> None:
    """Raise DriverIncompatible unless each argument of a :class:`hal.Backend` has the required type."""
    who = f"the driver {driver}" if _is_text(driver) else "a backend"
    for argument, value in given.items():
        is_right, wanted = _ARGUMENTS[argument]
        if not is_right(value):
            one = f": ({value!r:.60},)" if isinstance(value, str) and "collection" in wanted else ""
            raise DriverIncompatible(f"{who} has {argument} = {reprlib.repr(value)}", f"make it {wanted}{one}")


def check_opened(driver: str, backend: Any) -> None:
    """Raise DriverIncompatible unless the backend that a driver's ``open`` returned is complete.

    A subclass may skip the base constructor, or overwrite its attributes with wrong values.
    """
    held = vars(backend)
    if missing := [each for each in _ARGUMENTS if each not in held and not hasattr(type(backend), each)]:
        raise DriverIncompatible(
            f"opening the driver {driver} returned a {type(backend).__name__} without the attribute {missing[0]}",
            "call super().__init__ in its constructor, with all arguments of hal.Backend",
        )
    check_arguments(driver, {each: getattr(backend, each) for each in _ARGUMENTS})
    if backend.limits is None:
        raise DriverIncompatible(f"the driver {driver} has limits = None", "set limits = hal.vendor.Limits()")


def check_rewrites(driver: str, rewrites: Sequence[Any]) -> None:
    """Raise DriverIncompatible unless each is a function of a graph, or a rewrite that declares all its tensors.

    Names must be unique.
    """
    for each in rewrites:
        # No isinstance check for Rewrite: only compilers import hal.compile.
        if not (callable(each) or (hasattr(each, "pattern") and hasattr(each, "check_declared"))):
            raise DriverIncompatible(
                f"the driver {driver} has {reprlib.repr(each)} among its rewrites",
                "use hal.compile.rewrite.rewrite.Rewrite objects, or functions of a graph",
            )
        if hasattr(each, "check_declared"):
            try:
                each.check_declared()
            except CompileError as error:
                raise DriverIncompatible(
                    f"the driver {driver} cannot be used: {error.problem}", error.remedy
                ) from error
    if twice := [each for each, count in Counter(map(pass_name, rewrites)).items() if count > 1]:
        raise DriverIncompatible(
            f"the driver {driver} has more than one rewrite named {', '.join(twice)}",
            "give each rewrite a unique name, so that a configuration can disable it",
        )


def check_layers(driver: str, layers: Iterable[type[nn.Module]]) -> None:
    """Raise DriverIncompatible unless a driver may replace each of these layer classes."""
    if wrong := [each.__name__ for each in layers if not _is_replaceable(each)]:
        raise DriverIncompatible(
            f"the driver {driver} replaces {', '.join(wrong)}, which drivers may not replace",
            "replace classes of hal.nn, except models and int8 projections; give the latter kernels",
        )


def reads_layout(operation: Operation) -> bool:
    """Return whether an operation, without a kernel, reads or writes keys or values in the canonical layout."""
    return bool(operation.touches_state and KEY_VALUE.intersection(operation.state))


def check_state_layout(driver: str, layout: str, kernels: Collection[str]) -> None:
    """Raise DriverIncompatible if the layout is not canonical and an operation on keys or values has no kernel."""
    read = [each for each in ops.catalogue().values() if reads_layout(each) and not each.rare]
    without = [each.name for each in read if each.name not in kernels]
    if without and layout != "canonical":
        raise DriverIncompatible(
            f"the driver {driver} has state_layout = {layout!r} but no kernel for {', '.join(without)}",
            'add those kernels, or set state_layout = "canonical", which the reference implementations read',
        )


def layout_refused(driver: str, layout: str, operation: Operation) -> Callable[..., Any]:
    """Return a function in place of an operation that the driver has no kernel for, which raises DriverIncompatible."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise DriverIncompatible(
            f"the driver {driver} has state_layout = {layout!r} but no kernel for {operation.name}, which was called",
            "open the driver with its canonical layout of caches, or use another one",
        )

    return refuse


def check_conditions(driver: str, conditions: Collection[str], kernels: Collection[str]) -> None:
    """Raise DriverIncompatible unless each condition is that of a fused operation with a kernel."""
    for name in conditions:
        if not ops.operation(name).fused or name not in kernels:
            reason = "has no kernel for it" if ops.operation(name).fused else "it is not a fused operation"
            raise DriverIncompatible(
                f"the driver {driver} has a condition for {name}, but {reason}", "remove the condition"
            )


def check_block_size(driver: str, size: int | None, sizes: Sequence[int]) -> None:
    """Raise ConfigError unless the backend supports the configured block size."""
    if size is not None and sizes and size not in sizes:
        raise ConfigError(
            f"the backend {driver} does not support cache.block_size {size}",
            f"set cache.block_size to one of {', '.join(map(str, sizes))}",
        )


def _is_replaceable(layer: type[nn.Module]) -> bool:
    """Return whether it is a layer of ``hal.nn`` that is neither a model nor a quantized projection."""
    from hal.nn import CausalLM  # imported late: few backends replace layers

    return layer.__module__.startswith("hal.nn.") and not issubclass(layer, CausalLM)
