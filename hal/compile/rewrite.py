"""A rewrite: a pattern of operations, and what takes its place. It is data, which the pass manager applies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
from torch import Tensor

from hal import ops
from hal.backend import Backend
from hal.compile.match import trace_pattern
from hal.ops.declaration import Operation
from hal.ops.samples import Draw, Sample

Applicable = Callable[..., str | None]


def _always(*arguments: Any) -> None:
    return None


@attrs.frozen
class Rewrite:
    """Wherever ``pattern`` is found in a graph, ``replacement`` is called instead, with the same arguments.

    Attributes:
        name: what reports and configurations call it.
        pattern: a function of tensors and numbers, of operations' nodes and torch; returns a tensor or a tuple of them.
        replacement: a node (``torch.ops.hal.add_rms_norm.default``) that takes and gives the same.
        samples: argument tuples of the pattern, on which both sides must agree; their shapes are examples.
        when: called with the arguments that were found, tensors being fake ones; says why it does not apply, or None.
        inapplicable_samples: argument tuples for which ``when`` gives a reason.
    """

    name: str
    pattern: Callable[..., Tensor | tuple[Tensor, ...]]
    replacement: Callable[..., Any]
    samples: Callable[[Draw], Iterable[Sample]]
    when: Applicable = _always
    inapplicable_samples: Callable[[Draw], Iterable[Sample]] | None = None


def of_operation(operation: Operation) -> Rewrite:
    """The rewrite that a fused operation's declaration is: its body is the pattern, its node the replacement.

    Fused operations inside the body stand for their own bodies: a driver need not have a kernel for them.
    """

    def smaller(inner: Operation) -> Callable[..., Any]:
        return inner.rebound(smaller) if inner.fused else inner.overload

    return Rewrite(operation.name, operation.rebound(smaller), operation.overload, operation.samples)


def fusions(backend: Backend) -> Sequence[Rewrite]:
    """The rewrites of all fused operations that the backend has kernels for, those that take most in first."""
    found = [each for each in ops.catalogue().values() if each.fused and each.name in backend.kernels]
    rewrites = [of_operation(each) for each in found]
    # What contains another fusion is looked for before it.
    return sorted(rewrites, key=lambda each: -len(trace_pattern(each.pattern, example(each)).nodes))


def example(rewrite: Rewrite) -> Sample:
    """Arguments that show the pattern's structure: of the samples the largest, for a size of 1 may hide some of it."""
    return max(
        rewrite.samples(Draw()), key=lambda sample: sum(each.numel() for each in sample if isinstance(each, Tensor))
    )
