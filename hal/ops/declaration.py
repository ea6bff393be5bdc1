"""The declaration of operations: one function that is reference, fallback, fake and pattern at once.

``@op`` turns a body in plain torch into an :class:`Operation` and returns the function that models call. That function
is generated, one per operation, and calls its global ``_kernel``; activating a backend swaps the global. So a call
costs one Python call more than the kernel itself, and a function imported by name never goes stale. While a thread
intercepts calls, the global first asks which thread calls, so that the others notice nothing.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FunctionType, MappingProxyType
from typing import Any, ParamSpec, TypeVar

import attrs
import torch
from torch._ops import OpOverload

from hal.errors import OperationError, UnknownOperation, nearest
from hal.ops import library
from hal.ops.declaring import check_declaration
from hal.ops.rebind import rebind
from hal.ops.samples import Draw, Sample

P = ParamSpec("P")
R = TypeVar("R")

Kernel = Callable[..., Any]
Resolver = Callable[["Operation"], Kernel]
Wrap = Callable[["Operation", Kernel], Kernel]
Tolerance = Mapping[torch.dtype, tuple[float, float]]

DEFAULT_TOLERANCE: Tolerance = MappingProxyType(
    {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (2e-3, 2e-3)}
)
"""Relative and absolute tolerance by dtype: a few roundings of the result."""

log = logging.getLogger("hal.ops")
_catalogue: dict[str, Operation] = {}
_by_function: dict[Callable[..., Any], Operation] = {}
_by_node: dict[OpOverload, Operation] = {}
_interceptions: list[_Interception] = []
_lock = threading.RLock()
"""Held while what operations run is changed, so that every one of them ends up with the latest change."""


class Operation:
    """One declared operation.

    Attributes:
        name: its name in ``hal.ops`` and, as ``namespace::name``, in ``torch.ops``.
        body: the function as written.
        function: what models call.
        fused: whether the body is made of smaller operations, and so serves as a pattern.
        mutates: names of the arguments that are written in place.
        host: names of the arguments whose values a kernel may read on the host.
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
        mutates: Sequence[str],
        host: Sequence[str],
        tolerance: Tolerance,
        off_by_one: Mapping[torch.dtype, float],
        samples: Callable[[Draw], Iterable[Sample]],
    ) -> None:
        check_declaration(body, mutates=mutates, host=host, tolerance=tolerance, off_by_one=off_by_one)
        self.name = body.__name__
        self.namespace = namespace
        self.body = body
        self.fused = fused
        self.mutates = tuple(mutates)
        self.host = tuple(host)
        self.tolerance = MappingProxyType({**DEFAULT_TOLERANCE, **tolerance})
        self.off_by_one = MappingProxyType(dict(off_by_one))
        self.samples = samples
        self.signature = inspect.signature(body)
        self._globals: dict[str, Any] = {}
        self._bound: Kernel = body
        self._intercepted: Mapping[int, Kernel] = {}
        self._of_node: Mapping[int, Kernel] = {}
        self.function = _generate_function(body, self.signature, self._globals)
        self.overload = library.register(self)

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
    def touches_cache(self) -> bool:
        """Whether its body reads or writes the paged cache itself, and so needs the canonical layout."""
        return not self.fused and "key_cache" in self.signature.parameters

    @property
    def kernel(self) -> Kernel:
        """What a call in this thread runs now."""
        return self._intercepted.get(threading.get_ident(), self._bound)

    @property
    def kernel_of_node(self) -> Kernel:
        """What the node runs now where it is called in this thread: as a call does, unless calls run the node."""
        return self._of_node.get(threading.get_ident(), self._bound)

    def bind(self, kernel: Kernel) -> None:
        """Make calls run ``kernel``, from the next one on, wherever the function was imported.

        A thread inside :func:`intercepted` gets it wrapped.
        """
        with _lock:
            self._bound = kernel
            found: dict[int, Kernel] = {}
            by_node: set[int] = set()  # the threads whose calls come to the node, be it through further wrappers
            for each in _interceptions:
                found[each.thread] = each.wrap(self, found.get(each.thread, kernel))
                if found[each.thread] is self.overload:
                    by_node.add(each.thread)
            self._intercepted = {thread: wrapped for thread, wrapped in found.items() if wrapped is not kernel}
            self._of_node = {thread: each for thread, each in self._intercepted.items() if thread not in by_node}
            self._globals["_kernel"] = _by_thread(self._intercepted, kernel) if self._intercepted else kernel

    def replace(self, old: Kernel, new: Kernel) -> None:
        """Bind ``new`` if ``old`` is what is bound: another thread may have activated a backend meanwhile."""
        with _lock:
            if self._bound is old:
                self.bind(new)

    def calling(self, kernel: Kernel) -> Kernel:
        """A function with the operation's signature, defaults included, that always runs ``kernel``."""
        return _generate_function(self.body, self.signature, {"_kernel": kernel})

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments


def op(
    *,
    samples: Callable[[Draw], Iterable[Sample]],
    tolerance: Tolerance = MappingProxyType({}),
    off_by_one: Mapping[torch.dtype, float] = MappingProxyType({}),
    mutates: Sequence[str] = (),
    host: Sequence[str] = (),
    namespace: str = "hal",
    fused: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operation from its body in plain torch; the decorator returns the function that models call.

    The body must be functional torch on any device, without data-dependent Python, so that it can be traced; it is
    annotated with ``Tensor``, ``int``, ``float``, ``bool``, ``torch.dtype`` and optional ones of these, and returns
    ``Tensor``, a tuple of them, or ``None``.

    Args:
        samples: draws argument tuples that cover the operation.
        tolerance: overrides :data:`DEFAULT_TOLERANCE` by dtype.
        off_by_one: by dtype, the largest share of int8 results that may be one step off: values near the middle of two
            integers, which a rounding before moves to the other side. By default none.
        mutates: names of the arguments that are written in place.
        host: names of the arguments whose values a kernel may read on the host.
        namespace: the torch.library namespace; a vendor's own operations take the vendor's.
        fused: see :func:`fused_op`.

    Raises:
        OperationError: the name is taken; an argument cannot be given by position and by name, or it or the result is
            annotated otherwise or not at all; ``mutates`` or ``host`` name no argument; or ``tolerance`` or
            ``off_by_one`` hold what is no tolerance or share of a dtype.
    """

    def declare(body: Callable[P, R]) -> Callable[P, R]:
        if body.__name__ in _catalogue:
            raise OperationError(f"an operation {body.__name__!r} is declared already", "choose another name")
        declared = Operation(
            body, namespace=namespace, fused=fused, mutates=mutates, host=host, tolerance=tolerance,
            off_by_one=off_by_one, samples=samples,
        )  # fmt: skip
        _catalogue[declared.name] = declared
        _by_function[declared.function] = declared
        _by_node[declared.overload] = declared
        declared.bind(_resolver(declared))
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
    """Make every operation, declared now or later, run what ``resolver`` gives for it."""
    global _resolver
    with _lock:
        _resolver = resolver
        for each in _catalogue.values():
            each.bind(resolver(each))


@contextmanager
def intercepted(wrap: Wrap) -> Iterator[None]:
    """Inside the block, this thread's calls of an operation run ``wrap(operation, kernel)``. Used by graph captures.

    Other threads go on as they are. Interceptions nest, the inner one's ``kernel`` being what the outer one gave, and
    may overlap in any order. A backend that is activated inside the block is active in it and behind it: ``wrap`` gets
    the new kernels. It is called again whenever what is under it changes, so it should only make the function.

    ``wrap`` may give ``operation.overload``, the operation's node, which then runs the backend's kernel, and none of
    this thread's other interceptions: those outside it do not see the call, and those inside have seen it.
    """
    interception = _Interception(threading.get_ident(), wrap)
    try:
        with _lock:
            _interceptions.append(interception)
            _bind_anew()
        yield
    finally:
        with _lock:
            _interceptions.remove(interception)
            _bind_anew()


@attrs.frozen(eq=False)
class _Interception:
    thread: int
    wrap: Wrap


def _bind_anew() -> None:
    for each in _catalogue.values():
        each.bind(each._bound)


def _by_thread(kernels: Mapping[int, Kernel], otherwise: Kernel) -> Kernel:
    def of_this_thread(*args: Any, **kwargs: Any) -> Any:
        return kernels.get(threading.get_ident(), otherwise)(*args, **kwargs)

    return of_this_thread


def _run_reference(operation: Operation) -> Kernel:
    """Before any backend is opened, operations run their references, so that a model can be tried at a prompt."""

    def first_call(*args: Any, **kwargs: Any) -> Any:
        log.info("no backend is open: %s runs its reference", operation.name)
        operation.replace(first_call, operation.reference)
        return operation.reference(*args, **kwargs)

    return first_call


_resolver: Resolver = _run_reference


def _generate_function(
    body: Callable[..., Any], signature: inspect.Signature, namespace: dict[str, Any]
) -> Callable[..., Any]:
    defaults = {f"_default_{p.name}": p.default for p in signature.parameters.values() if p.default is not p.empty}
    namespace |= defaults
    parameters = ", ".join(
        f"{name}=_default_{name}" if f"_default_{name}" in defaults else name for name in signature.parameters
    )
    source = f"def {body.__name__}({parameters}):\n    return _kernel({', '.join(signature.parameters)})\n"
    exec(compile(source, f"<hal.ops.{body.__name__}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[body.__name__]
    function.__doc__, function.__module__ = body.__doc__, body.__module__
    function.__annotations__ = body.__annotations__
    return function
