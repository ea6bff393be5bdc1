"""A rewrite: a pattern of operations, and what takes its place. It is data, which the pass manager applies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from hal import ops
from hal.backend import Backend
from hal.compile.match import Matcher
from hal.compile.memory import Memory
from hal.compile.pattern import outputs_of, trace_pattern
from hal.compile.terms import Drawn, Terms, check_sides, forms_of, terms_of
from hal.errors import CompileError
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
        pattern: a function of tensors and numbers, of operations' nodes and torch; returns one or a tuple.
        replacement: takes and gives the same: a node (``torch.ops.hal.add_rms_norm.default``), or a function of some.
        samples: argument tuples of the pattern, on which both sides must agree. What all of them have in common (two
            arguments of one shape or dtype, the number of dimensions, a size of 1) is demanded of every place, too.
        when: called with the arguments that were found, tensors being fake ones; says why it does not apply, or None.
        inapplicable_samples: argument tuples for which ``when`` gives a reason.
    """

    name: str
    pattern: Callable[..., Tensor | tuple[Tensor, ...]]
    replacement: Callable[..., Any]
    samples: Callable[[Draw], Iterable[Sample]]
    when: Applicable = _always
    inapplicable_samples: Callable[[Draw], Iterable[Sample]] | None = None


@attrs.frozen
class Form:
    """A rewrite for arguments of one form, of which some may be None, and what is known of it before any graph is seen.

    Attributes:
        terms: what its samples have in common.
        example: arguments that show the pattern's structure.
        structure: the pattern's graph, traced with them.
    """

    terms: Terms
    example: Sample
    structure: fx.Graph

    @property
    def calls(self) -> int:
        """Of the pattern: how much it takes in."""
        return sum(node.op == "call_function" for node in self.structure.nodes)


@functools.lru_cache(maxsize=512)
def prepare(rewrite: Rewrite) -> tuple[Form, ...]:
    """Check a rewrite, and trace its pattern in every form that its samples show; done once for each rewrite.

    Raises:
        CompileError: its sides do not give the same shapes and dtypes, or its pattern is none.
    """
    try:
        forms = [_form_of(rewrite, drawn) for drawn in forms_of(rewrite.samples)]
        if not _derived(rewrite):
            check_sides(rewrite.pattern, rewrite.replacement, rewrite.samples)
            _check_replacement(rewrite, forms)
    except CompileError as error:
        raise CompileError(f"the rewrite {rewrite.name} cannot be used: {error.problem}", error.remedy) from error
    except Exception as error:
        raise CompileError(
            f"the rewrite {rewrite.name} cannot be used: on its samples, {type(error).__name__}: {error}",
            "make its pattern and its replacement run on every sample",
        ) from error
    return tuple(sorted(forms, key=lambda form: -form.calls))


def _derived(rewrite: Rewrite) -> bool:
    """Whether both sides are one declaration, and so alike."""
    target = rewrite.replacement
    operation = ops.operation_of_node(target) if isinstance(target, torch._ops.OpOverload) else None
    return operation is not None and rewrite is of_operation(operation)


def _check_replacement(rewrite: Rewrite, forms: Iterable[Form]) -> None:
    """What a function gives is put in place of what the pattern gave, and may be written there."""
    if isinstance(rewrite.replacement, torch._ops.OpOverload):
        return  # whose outputs are in memory of their own
    for form in forms:
        graph = trace_pattern(rewrite.replacement, form.example)
        memory = Memory(graph)
        places = [place for output in outputs_of(graph) for place in memory.places(output)]
        if any(node.op == "get_attr" for node in graph.nodes):
            raise CompileError("its replacement holds a tensor of its own", "make it an argument")
        if len(set(places)) < len(places) or any(memory.is_input(place) for place in places):
            raise CompileError(
                "its replacement returns an argument, a view of one, or two views of one tensor",
                "return new tensors, for instance by clone()",
            )


def _form_of(rewrite: Rewrite, drawn: Drawn) -> Form:
    shown = _largest(sample for _, sample in drawn)
    structure = trace_pattern(rewrite.pattern, shown)
    Matcher.check(rewrite.pattern, shown, structure)
    return Form(terms_of(rewrite.pattern, drawn), shown, structure)


@functools.cache
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
    return sorted(rewrites, key=lambda each: -prepare(each)[0].calls)


def example(rewrite: Rewrite) -> Sample:
    """Arguments that show the pattern's structure: of the samples the largest, for a size of 1 may hide some of it."""
    return _largest(rewrite.samples(Draw()))


def _largest(samples: Iterable[Sample]) -> Sample:
    return max(samples, key=lambda sample: sum(each.numel() for each in sample if isinstance(each, Tensor)))
