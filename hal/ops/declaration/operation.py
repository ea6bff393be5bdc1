"""Declarations of operations: one function serves as reference, fallback, fake implementation and pattern.

``@op`` turns a function in plain torch into an :class:`Operation`, and returns the function that models call. That
function is generated per operation, and calls the operation's kernel in the current table; see
:mod:`hal.ops.kernels.kernel_table`. A call costs one Python call more than the kernel, and imported functions never
become stale.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import FunctionType, MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch

from hal.errors import OperationError, UnknownOperation, nearest
from hal.ops.declaration import torch_library
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.declaration_checks import (
    NOT_DECLARED,
    check_declaration,
    check_rowwise,
    read_constraints,
    with_step_arguments,
)
from hal.ops.declaration.node_form import NodeForm
from hal.ops.declaration.rebind import generate_function, rebind
from hal.ops.forms import Form
from hal.ops.kernels import kernel_table
from hal.ops.kernels.kernel_table import Kernel, Resolver

P = ParamSpec("P")
R = TypeVar("R")

Tolerance = Mapping[torch.dtype, tuple[float, float]]
OverShards = Callable[[Sequence[Sample]], Sequence[Any]]

DEFAULT_TOLERANCE: Tolerance = MappingProxyType(
    {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (2e-3, 2e-3)}
)
"""Relative and absolute tolerance by dtype, for a few roundings of the result."""

log = logging.getLogger("hal.ops")
_catalogue: dict[str, Operation] = {}
_by_function: dict[Callable[..., Any], Operation] = {}
_by_node: dict[object, Operation] = {}


class Operation:
    """One declared operation.

    Attributes:
        number: its index in kernel tables.
        name: its name in ``hal.ops`` and, as ``namespace::name``, in ``torch.ops``.
        body: the decorated function.
        function: the function that models call.
        fused: whether the body calls smaller operations, and so serves as a pattern.
        axes: the declared axes by tensor argument, and of the results under ``return``; see
            :mod:`~hal.ops.declaration.axes`.
        dtypes: the declared dtypes, by the same keys; see :mod:`hal.ops.declaration.dtypes`.
        constraints: both, for checking calls.
        rowwise: the axis along which each row of the results and of mutated arguments depends only on the same row of
            the arguments; None if there is none.
        state: arguments that a model keeps between steps, such as caches.
        mutates: arguments that are written in place.
        buffers: the mutated arguments that are not state.
        host: arguments whose values a kernel may read on the host.
        weights: arguments that a driver may prepare at load, with :meth:`hal.Backend.prepare_weights`.
        prepared_as: the operation that they are prepared for: this one, or one that reads the same tensors.
        rare: whether a driver with another layout of its caches may lack a kernel for it; see :func:`op`.
        tolerance: the relative and absolute tolerance of kernels against the reference, by dtype.
        off_by_one: the largest share of quantized results (int8, uint8) that may be off by one, by dtype.
        samples: yields argument tuples that cover the operation.
        over_shards: the results of a collective on every rank, from the arguments of every rank; else None.
        overload: the graph node's target, which takes the fields of options as separate arguments; see
            :mod:`hal.ops.declaration.node_form`.
        node: calls the graph node with the operation's arguments. The overload itself, if the operation has no options.
        node_form: converts the arguments of a node.
        collective: whether the ranks of a group call it together. Its argument ``group`` names the group.
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
        prepared_as: str | None,
        rare: bool,
        tolerance: Tolerance,
        off_by_one: Mapping[torch.dtype, float],
        samples: Callable[[Draw], Iterable[Sample]],
        over_shards: OverShards | None,
    ) -> None:
        check_declaration(
            body,
            mutates=mutates,
            host=host,
            state=state,
            buffers=buffers,
            weights=weights,
            tolerance=tolerance,
            off_by_one=off_by_one,
            collective=over_shards is not None,
        )
        self.signature = inspect.signature(body)
        axes, dtypes = (
            with_step_arguments(self.signature.parameters, each, index) for index, each in enumerate((axes, dtypes))
        )
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
        self.prepared_as, self.rare = prepared_as or self.name, rare
        self.tolerance = MappingProxyType({**DEFAULT_TOLERANCE, **tolerance})
        self.off_by_one = MappingProxyType(dict(off_by_one))
        self.samples = samples
        self.over_shards, self.collective = over_shards, over_shards is not None
        self.node_form = NodeForm(body)
        self.number = kernel_table.next_number()
        self.function = generate_function(body, self.signature, {"_get": kernel_table.kernels}, self.number)
        self.overload = torch_library.register(self)
        self.node: Kernel = self.overload
        if self.node_form.options is not None:
            self.node = self.node_form.caller(self.overload, self.name)

    def __repr__(self) -> str:
        return f"<operation {self.qualified_name}>"

    @property
    def qualified_name(self) -> str:
        """The name in torch.library, such as ``hal::rms_norm``."""
        return f"{self.namespace}::{self.name}"

    @property
    def schema(self) -> str:
        """The schema in torch.library."""
        return str(self.overload._schema)

    @property
    def takes_forms(self) -> bool:
        """Whether its options are the form of its weights."""
        return self.node_form.options is Form

    @cached_property
    def reference(self) -> Kernel:
        """The body with every operation in it replaced by its reference, so that no driver's kernel runs."""
        return self.rebound(lambda operation: operation.reference)

    @cached_property
    def pattern(self) -> Kernel:
        """The body with every operation in it replaced by its graph node."""
        return self.rebound(lambda operation: operation.node)

    def rebound(self, meaning: Resolver) -> Kernel:
        """Return the body with every operation in it replaced by ``meaning`` of that operation."""

        def substitute(value: Any) -> Any:
            operation = _by_function.get(value) if isinstance(value, FunctionType) else None
            return value if operation is None else meaning(operation)

        return rebind(self.body, substitute)

    @property
    def touches_state(self) -> bool:
        """Whether the body itself accesses state, and so needs the canonical layout.

        A fused operation passes its state to the operations that it calls.
        """
        return bool(self.state) and not self.fused

    @property
    def kernel(self) -> Kernel:
        """The kernel that a call in this context runs."""
        kernel: Kernel = kernel_table.current().calls[self.number]
        return kernel

    @property
    def kernel_of_node(self) -> Kernel:
        """The kernel that the graph node runs in this context: the same as a call's, unless calls run the node."""
        kernel: Kernel = kernel_table.current().nodes[self.number]
        return kernel

    def replace(self, old: Kernel, new: Kernel) -> None:
        """Replace the kernel ``old`` with ``new`` in all tables."""
        kernel_table.replace(self.number, old, new)

    def calling(self, kernel: Kernel) -> Kernel:
        """Return a function with the operation's signature, including defaults, that always runs ``kernel``."""
        return generate_function(self.body, self.signature, {"_get": lambda: (kernel,)}, 0)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name, including defaults."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def node_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the operation's arguments of a graph node by name, including defaults."""
        return self.arguments(self.node_form.pack(args, kwargs), {})


def op(
    *,
    samples: Callable[[Draw], Iterable[Sample]],
    axes: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    rowwise: str | None = NOT_DECLARED,
    state: Sequence[str] = (),
    mutates: Sequence[str] = (),
    buffers: Sequence[str] = (),
    host: Sequence[str] = (),
    weights: Sequence[str] = (),
    prepared_as: str | None = None,
    rare: bool = False,
    tolerance: Tolerance = MappingProxyType({}),
    off_by_one: Mapping[torch.dtype, float] = MappingProxyType({}),
    namespace: str = "hal",
    fused: bool = False,
    over_shards: OverShards | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operation by its reference implementation. Returns the function that models call.

    The body must be functional torch code for any device, without data-dependent Python, so that it can be traced. Its
    arguments are annotated as ``Tensor``, ``int``, ``float``, ``bool``, ``str``, ``torch.dtype``, or one of these or
    None. The last one may be the operation's options, a frozen attrs class of numbers and strings. It returns
    ``Tensor``, a tuple of them, or ``None``.

    Args:
        samples: yields argument tuples that cover the operation.
        axes: the axes by tensor argument, and of the results under ``return`` (a tuple if there are several):
            ``{"x": "... width", "weight": "width", "return": "... width"}``. See :mod:`~hal.ops.declaration.axes`.
            Required, except for the arguments that every step has, such as ``block_table``; see
            :data:`~hal.ops.declaration.declaration_checks.STEP_ARGUMENTS`.
        dtypes: the dtypes, by the same keys: a ``torch.dtype``, :data:`hal.ops.FLOATING` (the step's), the name of an
            argument with the same dtype, or, for an argument, a tuple of these. Required.
        rowwise: the axis along which each row of the results and of mutated arguments depends only on the same row of
            the arguments with this axis. None if there is none. Required: tests derive calls with one row, with no
            rows, and with NaN in one row from it.
        state: arguments that a model keeps between steps, read or written, such as caches.
        mutates: arguments that are written in place. Each must be in ``state`` or ``buffers``.
        buffers: mutated arguments that are not state, such as memory that the caller provides for a result.
        host: arguments whose values a kernel may read on the host.
        weights: arguments that a driver may prepare at load, with :meth:`hal.Backend.prepare_weights`.
        prepared_as: another operation with these weights, if they are prepared for that one, because both read the same
            tensors. A kernel takes the form of that operation.
        rare: whether few models call it. A driver with another layout of its caches than the canonical one may then
            lack a kernel for it, and refuses the calls.
        tolerance: overrides :data:`DEFAULT_TOLERANCE` by dtype.
        off_by_one: the largest share of int8 results that may be off by one, by dtype, for values near the midpoint of
            two integers. By default none may.
        namespace: the torch.library namespace; a vendor's operations use the vendor's.
        fused: see :func:`fused_op`.
        over_shards: declares a collective, whose argument ``group`` names the ranks. Takes a list with the arguments of
            every rank, in their order, and returns the list of their results. The body is then the meaning for ranks
            that all hold the same tensors, and so for a group of one.

    Raises:
        OperationError: the name is taken; an argument cannot be passed by position and by name; an annotation is
            missing or unsupported; options are not last or not frozen; axes or dtypes of a tensor are missing or
            malformed; ``rowwise`` is missing, or not an axis of an argument and all results; ``state``, ``mutates``,
            ``buffers``, ``host`` or ``weights`` contains a name that is not an argument; ``prepared_as`` is no
            operation with these weights; a mutated argument is neither state nor a buffer; a collective has no argument
            ``group``; or ``tolerance`` or ``off_by_one`` is invalid.
    """

    def declare(body: Callable[P, R]) -> Callable[P, R]:
        if body.__name__ in _catalogue:
            raise OperationError(f"an operation {body.__name__!r} is already declared", "choose another name")
        if prepared_as is not None and (other := set(weights) - set(operation(prepared_as).weights)):
            raise OperationError(
                f"{body.__name__}: prepared_as is {prepared_as!r}, which has no weight {min(other)!r}",
                "name an operation with the same weights",
            )
        declared = Operation(
            body,
            namespace=namespace,
            fused=fused,
            axes=axes,
            dtypes=dtypes,
            rowwise=rowwise,
            state=state,
            mutates=mutates,
            buffers=buffers,
            host=host,
            weights=weights,
            prepared_as=prepared_as,
            rare=rare,
            tolerance=tolerance,
            off_by_one=off_by_one,
            samples=samples,
            over_shards=over_shards,
        )
        _catalogue[declared.name] = declared
        _by_function[declared.function] = declared
        _by_node[declared.overload] = declared
        kernel_table.declare(declared)
        return declared.function

    return declare


def fused_op(
    *, samples: Callable[[Draw], Iterable[Sample]], **declaration: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operation that calls smaller ones. Its body is also the pattern that finds it. See :func:`op`."""
    return op(samples=samples, fused=True, **declaration)


def catalogue() -> Mapping[str, Operation]:
    """Return all declared operations, by name."""
    return MappingProxyType(_catalogue)


def operation(which: str | Callable[..., Any]) -> Operation:
    """Return the operation with a name, or of a function of ``hal.ops``."""
    found = _catalogue.get(which) if isinstance(which, str) else _by_function.get(which)
    if found is None:
        raise UnknownOperation(f"no operation is named {which!r}", nearest(str(which), _catalogue))
    return found


def operation_of_node(target: object) -> Operation | None:
    """Return the operation that a graph node with this target calls, or None if it calls none."""
    return _by_node.get(target)


def activate(resolver: Resolver) -> None:
    """Set the default kernels of all operations, declared now or later, to those that ``resolver`` returns."""
    kernel_table.DEFAULT.resolve(resolver)


def _run_reference(operation: Operation) -> Kernel:
    """Return a kernel that logs and runs the reference, for use before a backend is opened, such as in a prompt."""

    def first_call(*args: Any, **kwargs: Any) -> Any:
        log.info("no backend is open: %s runs its reference implementation", operation.name)
        operation.replace(first_call, operation.reference)
        return operation.reference(*args, **kwargs)

    return first_call


activate(_run_reference)
