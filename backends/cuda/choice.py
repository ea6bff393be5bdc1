"""The choice of a kernel library for each operation, made when the driver is opened and listed by `hal ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from hal import ops
from hal.errors import ConfigError, nearest
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import FormKernels

REFERENCE = "reference"
"""The value in the option ``kernels`` that runs an operation without a kernel."""
TORCH_FIRST = frozenset(
    {"embedding", "gelu", "greedy_sample", "layer_norm", "linear", "mask_logits", "penalize", "rms_norm", "sample"}
)
"""Operations whose torch kernel is preferred to Triton's: torch needs one launch, or is the only library with it."""
TRITON_FIRST = frozenset({"add_rms_norm"})
"""Operations with one launch in Triton and three in FlashInfer, which overwrites arguments and so requires copies."""


@attrs.frozen
class Library:
    """A source of kernels.

    Attributes:
        name: the library's name in the option ``kernels``.
        kernels: the library's kernels, by operation.
        problem: why the library cannot be used on this machine, without kernels; empty if it can.
        remedy: how to make it usable.
    """

    name: str
    kernels: Mapping[str, Kernel] = attrs.field(factory=dict)
    problem: str = ""
    remedy: str = ""


@attrs.frozen
class Chosen:
    """The chosen kernel of an operation, and the name of its library, or the names of one for each form of weights."""

    library: str
    kernel: Kernel


def choose(libraries: Sequence[Library], forced: Mapping[str, str]) -> dict[str, Chosen]:
    """Return the kernel of each operation for which a library has one.

    Args:
        libraries: the libraries in order of preference; :data:`TORCH_FIRST` and :data:`TRITON_FIRST` are exceptions.
        forced: the required library of an operation, or :data:`REFERENCE`.

    Raises:
        ConfigError: an operation or library is unknown, or the library cannot be used, or it lacks the operation.
    """
    for name in forced:
        if name not in ops.catalogue():
            raise ConfigError(
                f"the option kernels names {name!r}, which is not an operation", nearest(name, ops.catalogue())
            )
    chosen = {}
    for name in ops.catalogue():
        wanted = forced.get(name)
        if wanted == REFERENCE:
            continue
        having = [each for each in _in_order(name, libraries) if name in each.kernels]
        if wanted is not None:
            first = _forced(name, wanted, libraries)
            having = [first, *(each for each in having if each is not first)]
        if having:
            chosen[name] = _of_forms(name, having, forced=wanted is not None)
    return chosen


def _of_forms(operation: str, libraries: Sequence[Library], *, forced: bool) -> Chosen:
    """Return the first library's kernel, with those of the others for weights in forms that it does not take.

    A forced library that has a kernel for every form is chosen alone.
    """
    first = libraries[0]
    kernel = first.kernels[operation]
    found = {each.name: each.kernels[operation] for each in libraries}
    by_form = {name: each for name, each in found.items() if isinstance(each, FormKernels)}
    if not isinstance(kernel, FormKernels) or len(by_form) == 1 or (forced and kernel.otherwise):
        return Chosen(first.name, kernel)
    kernels = [pair for each in by_form.values() for pair in each.kernels]
    otherwise = next((each.otherwise for each in by_form.values() if each.otherwise), None)
    return Chosen(", other forms ".join(by_form), FormKernels(operation, kernels, otherwise))


def _in_order(operation: str, libraries: Sequence[Library]) -> Sequence[Library]:
    if operation in TORCH_FIRST:
        return sorted(libraries, key=lambda each: each.name == "triton")
    if operation in TRITON_FIRST:
        return sorted(libraries, key=lambda each: each.name != "triton")
    return libraries


def _forced(operation: str, wanted: str, libraries: Sequence[Library]) -> Library:
    library = next((each for each in libraries if each.name == wanted), None)
    if library is None:
        known = [*(each.name for each in libraries), REFERENCE]
        raise ConfigError(f"kernels.{operation} is {wanted!r}, which is not a library", nearest(wanted, known))
    if operation in library.kernels:
        return library
    usable = [each.name for each in libraries if operation in each.kernels]
    others = [f"{each.name} cannot ({each.problem})" for each in libraries if each.problem and each is not library]
    found = library.problem or f"{wanted} has no kernel for {operation}"
    instead = "; ".join([f"use {', '.join([*usable, REFERENCE])}", *others])
    raise ConfigError(
        f"kernels.{operation} is {wanted!r}: {found}", f"{library.remedy}; or {instead}" if library.remedy else instead
    )
