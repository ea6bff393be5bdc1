"""The declaration of operations: one function that is reference, fallback, fake and pattern at once.

``@op`` turns a body in plain torch into an :class:`Operation` and returns the function that models call. That function
is generated, one per operation, and calls what the current table of kernels has for it; see
:mod:`hal.ops.kernels.kernel_table`. So a call costs one Python call more than the kernel itself, and a function
imported by name never goes stale.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import FunctionType, MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._ops import OpOverload

from hal.errors import OperationError, UnknownOperation, nearest
from hal.ops.declaration import torch_library
from hal.ops.declaration.declaration_checks import UNSAID, check_declaration, check_rowwise, read_constraints
from hal.ops.declaration.generated_function import generate_function
from hal.ops.declaration.rebind import rebind
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.kernels import kernel_table
from hal.ops.kernels.kernel_table import Kernel, Resolver

P = ParamSpec("P")
R = TypeVar("R")

Tolerance = Mapping[torch.dtype, tuple[float, float]]

DEFAULT_TOLERANCE: Tolerance = MappingProxyType(
    {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (2e-3, 2e-3)}
)
"""Relative and absolute tolerance by dtype: a few roundings of the result."""

log = logging.getLogger("hal.ops")
_catalogue: dict[str, Operation] = {}
_by_function: dict[Callable[..., Any], Operation] = {}
_by_node: dict[OpOverload, Operation] = {}


class Operation:
    """One declared operation.

    Attributes:
        number: its place in tables of kernels.
        name: its name in ``hal.ops`` and, as ``namespace::name``, in ``torch.ops``.
        body: the function as written.
        function: what models call.
        fused: whether the body is made of smaller operations, and so serves as a pattern.
        axes: by tensor argument, and for the results by ``return``, the axes as declared; see
            :mod:`~hal.ops.declaration.axes`.
        dtypes: likewise, the dtypes as declared; see :mod:`hal.ops.declaration.dtypes`.
        constraints: both, to check calls with.
        rowwise: the axis along which each row of the results, and of what is written, depends on the same row of the
            arguments that have it, and on no other; None if there is none.
        state: names of the arguments that a model keeps between steps, such as caches.
        mutates: names of the arguments that are written in place.
        buffers: those of them that are no state.
        host: names of the arguments whose values a kernel may read on the host.
        weights: names of the arguments that a driver may bring into a form of its own when a model is loaded, with
            :meth:`hal.Backend.prepare_weight`.
        tolerance: by dtype, the relative and absolute tolerance within which a kernel must meet the reference.
        off_by_one: by dtype, the largest share of quantised (int8) results that may be one step off the reference's.
        samples: draws argument tuples that cover the operation.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        *,
        namespace: str,
        fused: bool,
        axes: Mapping[str, Any] | None,
        dtypes: Mapping[str, Any] | None,
        rowwise: str | None,
        state: Sequence[str],
        mutates: Sequence[str],
        buffers: Sequence[str],
        host: Sequence[str],
        weights: Sequence[str],
        tolerance: Tolerance,
        off_by_one: Mapping[torch.dtype, float],
        samples: Callable[[Draw], Iterable[Sample]],
    ) -> None:
        check_declaration(
            body, mutates=mutates, host=host, state=state, buffers=buffers, weights=weights, tolerance=tolerance,
            off_by_one=off_by_one,
        )  # fmt: skip
        self.constraints = read_constraints(body, axes, dtypes)
        check_rowwise(body.__name__, self.constraints, rowwise)
        self.name = body.__name__
        self.namespace = namespace
        self.body = body
        self.fused = fused
        self.axes = MappingProxyType(dict(axes or {}))
        self.dtypes = MappingProxyType(dict(dtypes or {}))
        self.rowwise = rowwise
        self.state = tuple(state)
        self.mutates = tuple(mutates)
        self.buffers = tuple(buffers)
        self.host = tuple(host)
        self.weights = tuple(weights)
        self.tolerance = MappingProxyType({**DEFAULT_TOLERANCE, **tolerance})
        self.off_by_one = MappingProxyType(dict(off_by_one))
        self.samples = samples
        self.signature = inspect.signature(body)
        self.number = kernel_table.next_number()
        self.function = generate_function(body, self.signature, {"_get": kernel_table.kernels}, self.number)
        self.overload = torch_library.register(self)

    def __repr__(self) -> str:
        return f"<operation {self.qualified_name}>"

    @property
    def qualified_name(self) -> str:
        """The name that torch.library knows, such as ``hal::rms_norm``."""
        return f"{self.namespace}::{self.name}"

    @property
    def schema(self) -> str:
        """The schema that torch.library knows."""
        return str(self.overload._schema)

    @cached_property
    def reference(self) -> Kernel:
        """The body, with every operation in it meaning its own reference, so that no driver's kernel can reach it."""
        return self.rebound(lambda operation: operation.reference)

    @cached_property
    def pattern(self) -> Kernel:
        """The body, with every operation in it meaning its node in a graph."""
        return self.rebound(lambda operation: operation.overload)

    def rebound(self, meaning: Resolver) -> Kernel:
        """The body, with every operation in it replaced by ``meaning`` of that operation."""

        def substitute(value: Any) -> Any:
            operation = _by_function.get(value) if isinstance(value, FunctionType) else None
            return value if operation is None else meaning(operation)

        return rebind(self.body, substitute)

    @property
    def touches_state(self) -> bool:
        """Whether its body itself reads or writes state, and so needs the canonical layout of it.

        A fused operation hands its state on to those that it is made of.
        """
        return bool(self.state) and not self.fused

    @property
    def kernel(self) -> Kernel:
        """What a call in this context runs now."""
        kernel: Kernel = kernel_table.current().calls[self.number]
        return kernel

    @property
    def kernel_of_node(self) -> Kernel:
        """What the node runs now where it is called in this context: as a call does, unless calls run the node."""
        kernel: Kernel = kernel_table.current().nodes[self.number]
        return kernel

    def replace(self, old: Kernel, new: Kernel) -> None:
        """Run ``new`` wherever ``old`` is what runs."""
        kernel_table.replace(self.number, old, new)

    def calling(self, kernel: Kernel) -> Kernel:
        """A function with the operation's signature, defaults included, that always runs ``kernel``."""
        return generate_function(self.body, self.signature, {"_get": lambda: (kernel,)}, 0)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments


def op(
    *,
    samples: Callable[[Draw], Iterable[Sample]],
    axes: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    rowwise: str | None = UNSAID,
    state: Sequence[str] = (),
    mutates: Sequence[str] = (),
    buffers: Sequence[str] = (),
    host: Sequence[str] = (),
    weights: Sequence[str] = (),
    tolerance: Tolerance = MappingProxyType({}),
    off_by_one: Mapping[torch.dtype, float] = MappingProxyType({}),
    namespace: str = "hal",
    fused: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operation from its body in plain torch; the decorator returns the function that models call.

    The body must be functional torch on any device, without data-dependent Python, so that it can be traced; it is
    annotated with ``Tensor``, ``int``, ``float``, ``bool``, ``torch.dtype`` and optional ones of these, and returns
    ``Tensor``, a tuple of them, or ``None``.

    Args:
        samples: draws argument tuples that cover the operation.
        axes: by tensor argument, and for the results by ``return`` (a tuple if there are several), its axes:
            ``{"x": "... width", "weight": "width", "return": "... width"}``. See :mod:`~hal.ops.declaration.axes`.
            Required.
        dtypes: likewise its dtype: a ``torch.dtype``, :data:`hal.ops.FLOATING` (the step's), the name of an argument
            that has the same, or, for an argument, a tuple of these. Required.
        rowwise: the axis along which it computes row by row: a row of each result, and of what is written, depends on
            the same row of the arguments that have this axis. None if there is none. Required: tests derive calls with
            one row, with none, and with NaN in one from it.
        state: names of the arguments that a model keeps between steps, read or written, such as caches.
        mutates: names of the arguments that are written in place. Each is in ``state`` or in ``buffers``.
        buffers: those that are written and no state, such as memory that the caller gives for a result.
        host: names of the arguments whose values a kernel may read on the host.
        weights: names of the arguments that a driver may bring into a form of its own when a model is loaded, with
            :meth:`hal.Backend.prepare_weight`.
        tolerance: overrides :data:`DEFAULT_TOLERANCE` by dtype.
        off_by_one: by dtype, the largest share of int8 results that may be one step off: values near the middle of two
            integers, which a rounding before moves to the other side. By default none.
        namespace: the torch.library namespace; a vendor's own operations take the vendor's.
        fused: see :func:`fused_op`.

    Raises:
        OperationError: the name is taken; an argument cannot be given by position and by name, or it or the result is
            annotated otherwise or not at all; axes or dtypes of a tensor are left out or cannot be read; ``rowwise`` is
            left out or no axis of an argument and all results; ``state``, ``mutates``, ``buffers``, ``host`` or
            ``weights`` name no argument; an argument that is written is neither state nor a buffer; or ``tolerance`` or
            ``off_by_one`` hold what is no tolerance or share of a dtype.
    """

    def declare(body: Callable[P, R]) -> Callable[P, R]:
        if body.__name__ in _catalogue:
            raise OperationError(f"an operation {body.__name__!r} is declared already", "choose another name")
        declared = Operation(
            body, namespace=namespace, fused=fused, axes=axes, dtypes=dtypes, rowwise=rowwise, state=state,
            mutates=mutates, buffers=buffers, host=host, weights=weights, tolerance=tolerance, off_by_one=off_by_one,
            samples=samples,
        )  # fmt: skip
        _catalogue[declared.name] = declared
        _by_function[declared.function] = declared
        _by_node[declared.overload] = declared
        kernel_table.declare(declared)
        return declared.function

    return declare


def fused_op(
    *, samples: Callable[[Draw], Iterable[Sample]], **declaration: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operation made of smaller ones; its body is also the pattern that finds it. Else as :func:`op`."""
    return op(samples=samples, fused=True, **declaration)


def catalogue() -> Mapping[str, Operation]:
    """Every declared operation, by name."""
    return MappingProxyType(_catalogue)


def operation(which: str | Callable[..., Any]) -> Operation:
    """The operation of a name, or behind a function of ``hal.ops``."""
    found = _catalogue.get(which) if isinstance(which, str) else _by_function.get(which)
    if found is None:
        raise UnknownOperation(f"there is no operation {which!r}", nearest(str(which), _catalogue))
    return found


def operation_of_node(overload: OpOverload) -> Operation | None:
    """The operation that a graph's node calls, or None if the node is none of ours."""
    return _by_node.get(overload)


def activate(resolver: Resolver) -> None:
    """Make every operation, declared now or later, run what ``resolver`` gives where no other table is current."""
    kernel_table.DEFAULT.resolve(resolver)


def _run_reference(operation: Operation) -> Kernel:
    """Before any backend is opened, operations run their references, so that a model can be tried at a prompt."""

    def first_call(*args: Any, **kwargs: Any) -> Any:
        log.info("no backend is open: %s runs its reference", operation.name)
        operation.replace(first_call, operation.reference)
        return operation.reference(*args, **kwargs)

    return first_call


activate(_run_reference)
