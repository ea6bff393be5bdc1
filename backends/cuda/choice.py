"""Which library's kernel runs for which operation: settled when the driver is opened, and shown by `hal ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from hal import ops
from hal.errors import ConfigError, nearest
from hal.ops.kernels.kernel_table import Kernel

REFERENCE = "reference"
"""What the option ``kernels`` names to have an operation run without a kernel."""
TORCH_FIRST = frozenset({"embedding", "greedy_sample", "linear", "rms_norm", "sample"})
"""Operations that torch computes in one launch, or that only it has: its kernel goes before ours in Triton."""
TRITON_FIRST = frozenset({"add_rms_norm"})
"""Operations of one launch in Triton and three in FlashInfer, which writes over arguments that must be copied first."""


@attrs.frozen
class Library:
    """A source of kernels.

    Attributes:
        name: what the option ``kernels`` calls it.
        kernels: by operation.
        problem: why it cannot be used here, in which case it has no kernels; else empty.
        remedy: what would make it usable.
    """

    name: str
    kernels: Mapping[str, Kernel] = attrs.field(factory=dict)
    problem: str = ""
    remedy: str = ""


@attrs.frozen
class Chosen:
    """The kernel of an operation, and the name of the library that it is from."""

    library: str
    kernel: Kernel


def choose(libraries: Sequence[Library], forced: Mapping[str, str]) -> dict[str, Chosen]:
    """The kernel of each operation that some library has one for.

    Args:
        libraries: the preferred first, where :data:`TORCH_FIRST` and :data:`TRITON_FIRST` do not say otherwise.
        forced: by operation, the name of the library that must be used, or :data:`REFERENCE`.

    Raises:
        ConfigError: an operation or library that is not known; or the library cannot be used here, or does not have it.
    """
    for name in forced:
        if name not in ops.catalogue():
            raise ConfigError(
                f"the option kernels names {name!r}, which is no operation", nearest(name, ops.catalogue())
            )
    chosen = {}
    for name in ops.catalogue():
        if name in forced:
            wanted = forced[name]
            if wanted != REFERENCE:
                chosen[name] = _forced(name, wanted, libraries)
            continue
        library = next((each for each in _in_order(name, libraries) if name in each.kernels), None)
        if library is not None:
            chosen[name] = Chosen(library.name, library.kernels[name])
    return chosen


def _in_order(operation: str, libraries: Sequence[Library]) -> Sequence[Library]:
    if operation in TORCH_FIRST:
        return sorted(libraries, key=lambda each: each.name == "triton")
    if operation in TRITON_FIRST:
        return sorted(libraries, key=lambda each: each.name != "triton")
    return libraries


def _forced(operation: str, wanted: str, libraries: Sequence[Library]) -> Chosen:
    library = next((each for each in libraries if each.name == wanted), None)
    if library is None:
        known = [*(each.name for each in libraries), REFERENCE]
        raise ConfigError(f"kernels.{operation} is {wanted!r}, which is no library", nearest(wanted, known))
    if operation in library.kernels:
        return Chosen(library.name, library.kernels[operation])
    usable = [each.name for each in libraries if operation in each.kernels]
    others = [f"{each.name} cannot ({each.problem})" for each in libraries if each.problem and each is not library]
    found = library.problem or f"{wanted} has no kernel for it"
    instead = "; ".join([f"use {', '.join([*usable, REFERENCE])}", *others])
    raise ConfigError(
        f"kernels.{operation} is {wanted!r}: {found}", f"{library.remedy}; or {instead}" if library.remedy else instead
    )
