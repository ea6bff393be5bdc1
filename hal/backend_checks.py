"""Whether what a driver gives its backend can be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from hal import ops
from hal.compilers import pass_name
from hal.errors import DriverIncompatible
from hal.nn import CausalLM, QuantizedLinear


def check_names(driver: str, **given: Any) -> None:
    """Raise DriverIncompatible unless each argument is a collection of texts; one text would be taken letter by letter.

    Args:
        driver: its name.
        given: arguments of :class:`hal.Backend`, by name.
    """
    for argument, names in given.items():
        if isinstance(names, str) or not all(isinstance(each, str) for each in names):
            raise DriverIncompatible(
                f"the driver {driver} has {argument} = {names!r}",
                f"make it a collection of texts: ({names!r},)" if isinstance(names, str) else "name each by a text",
            )


def check_rewrites(driver: str, rewrites: Sequence[Any]) -> None:
    """Raise DriverIncompatible unless each is a rewrite or a function of a graph, with a name of its own."""
    for each in rewrites:
        # Whether it is a hal.compile.Rewrite cannot be asked here: the compile stack is loaded by who compiles.
        if not (callable(each) or (hasattr(each, "pattern") and hasattr(each, "replacement"))):
            raise DriverIncompatible(
                f"the driver {driver} has {each!r} among its rewrites",
                "give hal.compile.Rewrite, or functions of a graph",
            )
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


def check_cache_layout(driver: str, layout: str, kernels: Collection[str]) -> None:
    """Raise DriverIncompatible if an operation that touches a cache laid out otherwise has no kernel."""
    without = [each.name for each in ops.catalogue().values() if each.touches_cache and each.name not in kernels]
    if without and layout != "canonical":
        raise DriverIncompatible(
            f"the driver {driver} lays its cache out as {layout} but has no kernel for {', '.join(without)}",
            "give it those kernels, or use the canonical layout, which the references can read",
        )


def _is_replaceable(layer: type[nn.Module]) -> bool:
    """Whether it is a layer of hal.nn; not a model, nor what a checkpoint's quantisation fills."""
    return layer.__module__.startswith("hal.nn.") and not issubclass(layer, CausalLM | QuantizedLinear)
