"""Whether what a driver gives its backend can be used."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from hal import ops
from hal.device.device import Device
from hal.device.limits import Limits
from hal.drivers.compiler_registry import pass_name
from hal.errors import CompileError, ConfigError, DriverIncompatible
from hal.step.state import KEY_VALUE


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_device(value: Any) -> bool:
    return isinstance(value, Device) and isinstance(getattr(value, "torch", None), torch.device)


def _is_listed(value: Any) -> bool:
    """Whether it can be gone through, again and again; a text would be taken letter by letter."""
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
    "name": (_is_text, "the driver's name, a text"),
    "device": (_is_device, "a hal.Device whose `torch` is a torch.device with its index, or a hal.HostDevice()"),
    "kernels": (lambda value: _is_table(value, lambda kernel: True), "a mapping from operations' names to callables"),
    "graphs": (lambda value: isinstance(value, bool), "True or False"),
    "compilers": (_is_listed, "a collection of hal.Compiler"),
    "aliases": (_is_table, "a mapping from texts to names of compilers"),
    "rewrites": (_is_listed, "a collection of hal.compile.Rewrite, or of functions of a graph"),
    "layers": (_are_layers, "a mapping from classes of hal.nn to callables that make a layer"),
    "native_names": (_is_table, "a mapping from the vendor's names of operations to hal's"),
    "capabilities": (_are_texts, "a collection of texts"),
    "limits": (lambda value: value is None or isinstance(value, Limits), "hal.Limits, or leave it out"),
    "inductor": (lambda value: value is None or _are_texts(value), "a collection of texts, or None"),
    "state_layout": (_is_text, "a text"),
    "sources": (_is_table, "a mapping from operations' names to names of libraries"),
}
"""What each argument of :class:`hal.Backend` must be: whether it is, and in words."""


def check_arguments(driver: Any, given: Mapping[str, Any]) -> None:
    """Raise DriverIncompatible unless each argument of a :class:`hal.Backend` is of the type that it must be.

    Args:
        driver: its name, or what it gave as that.
        given: the arguments, by name.
    """
    who = f"the driver {driver}" if _is_text(driver) else "a backend"
    for argument, value in given.items():
        is_right, wanted = _ARGUMENTS[argument]
        if not is_right(value):
            one = f": ({value!r:.60},)" if isinstance(value, str) and "collection" in wanted else ""
            raise DriverIncompatible(f"{who} has {argument} = {reprlib.repr(value)}", f"make it {wanted}{one}")


def check_opened(driver: str, backend: Any) -> None:
    """Raise DriverIncompatible unless what a driver's ``open`` returned is a backend that was made whole.

    A subclass may leave out what the base's constructor sets, or set it otherwise afterwards.

    Args:
        driver: its name.
        backend: what ``open`` returned, a :class:`hal.Backend`.
    """
    held = vars(backend)
    if missing := [each for each in _ARGUMENTS if each not in held and not hasattr(type(backend), each)]:
        raise DriverIncompatible(
            f"opening the driver {driver} gave a {type(backend).__name__} that has no {missing[0]}",
            "call super().__init__ in its constructor, with all that hal.Backend takes",
        )
    check_arguments(driver, {each: getattr(backend, each) for each in _ARGUMENTS})
    if backend.limits is None:
        raise DriverIncompatible(f"the driver {driver} has limits = None", "make them hal.Limits()")


def check_rewrites(driver: str, rewrites: Sequence[Any]) -> None:
    """Raise DriverIncompatible unless each is a function of a graph, or a rewrite that declares all its tensors.

    Each has a name of its own.
    """
    for each in rewrites:
        # Whether it is a hal.compile.Rewrite cannot be asked here: the compile stack is loaded by who compiles.
        if not (callable(each) or (hasattr(each, "pattern") and hasattr(each, "check_declared"))):
            raise DriverIncompatible(
                f"the driver {driver} has {reprlib.repr(each)} among its rewrites",
                "give hal.compile.Rewrite, or functions of a graph",
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
            "give each a name of its own, by which a configuration can turn it off",
        )


def check_layers(driver: str, layers: Iterable[type[nn.Module]]) -> None:
    """Raise DriverIncompatible unless each is a layer of hal.nn that a driver may put another in place of."""
    if wrong := [each.__name__ for each in layers if not _is_replaceable(each)]:
        raise DriverIncompatible(
            f"the driver {driver} has a layer for {', '.join(wrong)}, in whose place no driver may put one",
            "name classes of hal.nn, none of them a model or an int8 projection; the latter take kernels",
        )


def check_state_layout(driver: str, layout: str, kernels: Collection[str]) -> None:
    """Raise DriverIncompatible if an operation on keys or values that are laid out otherwise has no kernel."""
    without = [
        each.name for each in ops.catalogue().values()
        if each.touches_state and KEY_VALUE.intersection(each.state) and each.name not in kernels
    ]  # fmt: skip
    if without and layout != "canonical":
        raise DriverIncompatible(
            f"the driver {driver} lays its states out as {layout} but has no kernel for {', '.join(without)}",
            "give it those kernels, or use the canonical layout, which the references can read",
        )


def check_block_size(driver: str, size: int | None, sizes: Sequence[int]) -> None:
    """Raise ConfigError unless the backend has blocks of the size that a configuration asks for."""
    if size is not None and sizes and size not in sizes:
        raise ConfigError(
            f"cache.block_size {size} does not suit the backend {driver}", f"use one of {', '.join(map(str, sizes))}"
        )


def _is_replaceable(layer: type[nn.Module]) -> bool:
    """Whether it is a layer of hal.nn; not a model, nor what a checkpoint's quantisation fills."""
    from hal.nn import CausalLM, QuantizedLinear  # not before: few backends have layers, and opening one is to be quick

    return layer.__module__.startswith("hal.nn.") and not issubclass(layer, CausalLM | QuantizedLinear)
