"""A rewrite: a pattern of operations, and what takes its place. It is data, which the pass manager applies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import attrs
import torch
from torch import Tensor, fx

from hal import ops
from hal.compile.fx.alias_analysis import Memory
from hal.compile.rewrite.match import Matcher
from hal.compile.rewrite.pattern import other_units, outputs_of, trace_pattern
from hal.compile.rewrite.proof_samples import DRAWN, check_sides, forms_of
from hal.drivers.backend import Backend
from hal.errors import CompileError, OperationError
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.operation import Operation
from hal.ops.declaration.parse_constraints import constraints_of
from hal.ops.declaration.samples import Draw, Sample

Applicable = Callable[..., str | None]


def _arguments(name: str, pattern: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(pattern).parameters.values()
    except (TypeError, ValueError):
        parameters = None
    if parameters is None or any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        raise CompileError(
            f"the pattern of the rewrite {name} does not name its arguments",
            "make it a function with an argument for each, by whose names axes and dtypes are declared",
        )
    return [each.name for each in parameters]


def _annotations(pattern: Callable[..., Any]) -> Mapping[str, Any]:
    """What is known of a pattern's arguments before any sample is drawn; it need not be annotated."""
    try:
        return get_type_hints(pattern)
    except (NameError, TypeError):
        return {}


def _always(*arguments: Any) -> None:
    return None


@attrs.frozen
class Rewrite:
    """Wherever ``pattern`` is found in a graph, ``replacement`` is called instead, with the same arguments.

    Attributes:
        name: what reports and configurations call it.
        pattern: a function of tensors and numbers, of operations' nodes and torch; returns one or a tuple.
        replacement: takes and gives the same: a node (``torch.ops.hal.add_rms_norm.default``), or a function of some.
        samples: argument tuples of the pattern, on which both sides must agree.
        when: called with the arguments that were found, tensors being fake ones; says why it does not apply, or None.
        inapplicable_samples: argument tuples for which ``when`` gives a reason.
        axes: by tensor argument of the pattern, its axes, as an operation declares them; see
            :mod:`hal.ops.declaration.axes`: ``{"x": "... width", "weight": "width"}``. It is applied to no other
            shapes. Required; those of the results, by ``return``, need not be given.
        dtypes: likewise, its dtype; see :mod:`hal.ops.declaration.dtypes`. Required.
        constraints: both.

    Raises:
        CompileError: ``axes`` or ``dtypes`` are left out, or cannot be read.
    """

    name: str
    pattern: Callable[..., Tensor | tuple[Tensor, ...]]
    replacement: Callable[..., Any]
    samples: Callable[[Draw], Iterable[Sample]]
    when: Applicable = _always
    inapplicable_samples: Callable[[Draw], Iterable[Sample]] | None = None
    axes: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True, eq=False)
    dtypes: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True, eq=False)
    constraints: Constraints = attrs.field(init=False, repr=False)

    @constraints.default
    def _read_constraints(self) -> Constraints:
        names = _arguments(self.name, self.pattern)
        kinds = _annotations(self.pattern)
        tensors = {name for name, kind in kinds.items() if kind in (Tensor, Tensor | None)}
        try:
            return constraints_of(
                f"the rewrite {self.name}",
                arguments=names,
                tensors=tensors,
                others={name: kind for name, kind in kinds.items() if name not in tensors and name in names},
                results=None,
                axes=self.axes,
                dtypes=self.dtypes,
            )
        except OperationError as error:
            raise CompileError(error.problem, error.remedy) from None

    def check_declared(self) -> None:
        """Demand that every tensor in the samples is declared, and that every sample is as declared.

        Raises:
            CompileError: names the argument.
        """
        for dtype in DRAWN:
            for number, sample in enumerate(self.samples(Draw(dtype))):
                self._check_sample(f"sample {number} of {dtype}", sample)

    def _check_sample(self, what: str, sample: Sample) -> None:
        names = self.constraints.arguments
        for name, value in zip(names, sample, strict=False):
            if isinstance(value, Tensor) and self.constraints.shape(name) is None:
                raise CompileError(
                    f"the rewrite {self.name} does not declare the axes and dtype of {name}, a tensor in {what}",
                    f'add entries such as axes={{"{name}": "tokens width"}} and dtypes={{"{name}": FLOATING}}',
                )
        if (reason := self.constraints.unmet(sample)) is not None:
            raise CompileError(
                f"the rewrite {self.name}: {what} is not as declared: {reason}",
                "correct the declaration, or the sample",
            )


@attrs.frozen
class Form:
    """A rewrite for arguments of one form, of which some may be None, as it is known before any graph is seen.

    Attributes:
        example: arguments that show the pattern's structure.
        structure: the pattern's graph, traced with them.
    """

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
        forms = [form for samples in forms_of(rewrite.samples) for form in _forms_of(rewrite, samples)]
        if not _derived(rewrite):
            rewrite.check_declared()
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


def _forms_of(rewrite: Rewrite, samples: Sequence[Sample]) -> Iterator[Form]:
    """The form that samples show, and those for numbers with which the pattern calls more, or less."""
    shown = _largest(samples)
    for arguments in (shown, *other_units(rewrite.pattern, shown)):
        structure = trace_pattern(rewrite.pattern, arguments)
        Matcher.check(rewrite.pattern, arguments, structure)
        yield Form(arguments, structure)


@functools.cache
def of_operation(operation: Operation) -> Rewrite:
    """The rewrite that a fused operation's declaration is: its body is the pattern, its node the replacement.

    Fused operations inside the body stand for their own bodies: a driver need not have a kernel for them.
    """

    def smaller(inner: Operation) -> Callable[..., Any]:
        return inner.rebound(smaller) if inner.fused else inner.overload

    return Rewrite(
        operation.name, operation.rebound(smaller), operation.overload, operation.samples, axes=operation.axes,
        dtypes=operation.dtypes,
    )  # fmt: skip


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
