"""The declaration of a rewrite: a pattern of operations and its replacement, as data for the pass manager."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

import attrs
import torch
from torch import Tensor, fx

from hal import ops
from hal.compile.fx.alias_analysis import AliasAnalysis
from hal.compile.fx.arithmetic import number_key
from hal.compile.rewrite.match import Matcher
from hal.compile.rewrite.node_match import kind
from hal.compile.rewrite.pattern import outputs_of, trace_forms, trace_pattern
from hal.compile.rewrite.proof_samples import DRAWN, check_sides, forms_of
from hal.drivers.backend import Backend
from hal.errors import CompileError, OperationError
from hal.ops.declaration.constraints import Constraints, Draw, Sample
from hal.ops.declaration.operation import Operation
from hal.ops.declaration.parse_constraints import constraints_of

Applicable = Callable[..., str | None]


def _arguments(name: str, pattern: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(pattern).parameters.values()
    except (TypeError, ValueError):
        parameters = None
    if parameters is None or any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        raise CompileError(
            f"the pattern of the rewrite {name} does not name its arguments",
            "make it a function with a named argument for each, to which axes and dtypes refer",
        )
    return [each.name for each in parameters]


def _annotations(pattern: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a pattern's arguments, which are optional."""
    try:
        return get_type_hints(pattern)
    except (NameError, TypeError):
        return {}


def _always(*arguments: Any) -> None:
    return None


@attrs.frozen
class Rewrite:
    """A rewrite. Each match of ``pattern`` in a graph is replaced by a call of ``replacement`` on the same arguments.

    Attributes:
        name: of the rewrite in reports and configurations.
        pattern: a function of tensors and numbers that calls operations' nodes and torch; returns a tensor or a tuple.
        replacement: a node (``torch.ops.hal.add_rms_norm.default``) or a function, of the pattern's signature.
        samples: argument tuples of the pattern, on which both sides must agree.
        when: called with the matched arguments, whose tensors are fake; returns the reason to skip the site, or None.
        inapplicable_samples: argument tuples for which ``when`` returns a reason.
        optional: whether ``when`` chooses by speed, so that a skipped site needs no warning.
        axes: the axes of each tensor argument, as in an operation's declaration: ``{"x": "... width", "weight":
            "width"}``; see :mod:`hal.ops.declaration.axes`. The rewrite is not applied to other shapes. Required,
            except the key ``return``.
        dtypes: the dtype of each tensor argument; see :mod:`hal.ops.declaration.dtypes`. Required.
        constraints: the parsed ``axes`` and ``dtypes``.

    Raises:
        CompileError: ``axes`` or ``dtypes`` is missing or invalid.
    """

    name: str
    pattern: Callable[..., Tensor | tuple[Tensor, ...]]
    replacement: Callable[..., Any]
    samples: Callable[[Draw], Iterable[Sample]]
    when: Applicable = _always
    inapplicable_samples: Callable[[Draw], Iterable[Sample]] | None = None
    optional: bool = attrs.field(default=False, kw_only=True)
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
        """Check that the samples' tensors are all declared and meet their declarations.

        Raises:
            CompileError: an argument is not declared, or a sample does not meet the declaration.
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
                f"{what} of the rewrite {self.name} does not meet its declaration: {reason}",
                "correct the declaration, or the sample",
            )


@attrs.frozen
class PatternVariant:
    """The pattern of a rewrite, traced for arguments of one form, in which some may be None.

    Attributes:
        example: arguments that determine the pattern's structure.
        structure: the pattern's graph, traced with them.
    """

    example: Sample
    structure: fx.Graph

    @property
    def calls(self) -> int:
        """The number of calls in the pattern."""
        return sum(node.op == "call_function" for node in self.structure.nodes)


@functools.lru_cache(maxsize=512)
def prepare(rewrite: Rewrite) -> tuple[PatternVariant, ...]:
    """Check a rewrite, and trace its pattern in every form of its samples, once for each rewrite.

    Raises:
        CompileError: its sides differ in shapes or dtypes, or its pattern cannot be matched.
    """
    try:
        derived = _derived(rewrite)
        groups = forms_of(rewrite.samples, by_dtype=not derived)
        forms = _distinct(form for samples in groups for form in _forms_of(rewrite, samples))
        if not derived:
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


def _distinct(forms: Iterable[PatternVariant]) -> list[PatternVariant]:
    """Return the forms without those that differ from another in dtypes or sizes only."""
    found: dict[Any, PatternVariant] = {}
    for form in forms:
        places = {node: place for place, node in enumerate(form.structure.nodes)}
        calls = tuple((kind(node), tuple(places[each] for each in node.all_input_nodes)) for node in places)
        others = tuple(number_key(each) for each in form.example if not isinstance(each, Tensor))
        found.setdefault((calls, others), form)
    return list(found.values())


def _derived(rewrite: Rewrite) -> bool:
    """Return whether the rewrite is derived from an operation's declaration, and so both sides agree."""
    target = rewrite.replacement
    operation = ops.operation_of_node(target)
    return operation is not None and operation.fused and rewrite.pattern is of_operation(operation).pattern


def _check_replacement(rewrite: Rewrite, forms: Iterable[PatternVariant]) -> None:
    """Raise CompileError unless the results of a function can replace those of the pattern, and be written."""
    if isinstance(rewrite.replacement, torch._ops.OpOverload):
        return  # The outputs of an overload are new tensors.
    for form in forms:
        graph = trace_pattern(rewrite.replacement, form.example)
        memory = AliasAnalysis(graph)
        places = [place for output in outputs_of(graph) for place in memory.places(output)]
        if any(node.op == "get_attr" for node in graph.nodes):
            raise CompileError("its replacement contains a constant tensor", "make it an argument")
        if len(set(places)) < len(places) or any(memory.is_input(place) for place in places):
            raise CompileError(
                "its replacement returns an argument, a view of one, or two views of one tensor",
                "return new tensors, for instance by clone()",
            )


def _forms_of(rewrite: Rewrite, samples: Sequence[Sample]) -> Iterator[PatternVariant]:
    """Yield the form of the samples, and those for numbers with which the pattern makes more calls, or fewer."""
    for arguments, structure in trace_forms(rewrite.pattern, _largest(samples)):
        Matcher.check(rewrite.pattern, arguments, structure)
        yield PatternVariant(arguments, structure)


@functools.cache
def of_operation(operation: Operation) -> Rewrite:
    """Return the rewrite of a fused operation: its body is the pattern, its node the replacement.

    Fused operations in the body are replaced by their bodies, because a driver need not have kernels for them.
    """

    def smaller(inner: Operation) -> Callable[..., Any]:
        return inner.rebound(smaller) if inner.fused else inner.node

    form = operation.node_form
    return Rewrite(
        operation.name,
        form.of_node(operation.rebound(smaller)),
        operation.overload,
        lambda draw: map(form.unpack, operation.samples(draw)),
        axes=operation.axes,
        dtypes=operation.dtypes,
    )


def _conditional(rewrite: Rewrite, condition: Applicable | None) -> Rewrite:
    return rewrite if condition is None else attrs.evolve(rewrite, when=condition, optional=True)


def fusions(backend: Backend) -> Sequence[Rewrite]:
    """Return the rewrites of the fused operations that the backend has kernels for, the largest first.

    The backend's conditions restrict where they are applied.
    """
    found = [each for each in ops.catalogue().values() if each.fused and each.name in backend.kernels]
    return derived(found, backend.conditions)


def derived(
    operations: Iterable[Operation], conditions: Mapping[str, Applicable] = MappingProxyType({})
) -> Sequence[Rewrite]:
    """Return the rewrites of fused operations, the largest first, restricted by conditions by operation."""
    rewrites = [_conditional(of_operation(each), conditions.get(each.name)) for each in operations]
    # An operation that contains another fused one is matched before it.
    return sorted(rewrites, key=lambda each: -prepare(each)[0].calls)


def _largest(samples: Iterable[Sample]) -> Sample:
    """Return the largest sample, whose sizes show the pattern's structure: a size of 1 may hide some of it."""
    return max(samples, key=lambda sample: sum(each.numel() for each in sample if isinstance(each, Tensor)))
