"""Kernel tables, which map operations to kernels. Each context has a current table.

A generated function reads one ContextVar, and calls the kernel at its operation's index. A runner makes its backend's
table current for each step, so that several backends can run in one process, each in any thread. Otherwise the default
table applies, that of the active backend. A capture or trace makes a table current that wraps the previous one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

Kernel = Callable[..., Any]
Resolver = Callable[[Any], Kernel]
"""Returns the kernel of an operation."""
Wrap = Callable[[Any, Kernel], Kernel]
"""Returns the replacement of an operation's kernel."""

_lock = threading.RLock()
"""Held while tables change, so that all of them end up with the latest change."""
_operations: list[Any] = [None]
"""All declared operations, by number. The number 0 is unused."""
_tables: WeakSet[Table] = WeakSet()


class Table:
    """The kernel of each operation, by number.

    Attributes:
        calls: the kernels of calls, as a plain list, which Python indexes fastest. The first element is the table
            itself.
        nodes: the kernels of graph nodes: those of calls, unless calls run the node.
        meaning: a Resolver, or a Wrap if the table wraps another.
        under: the table that this one wraps, or None.
        root: the innermost wrapped table, which has a Resolver.
    """

    def __init__(self, meaning: Any, under: Table | None = None) -> None:
        self.meaning, self.under = meaning, under
        self.root: Table = self if under is None else under.root
        self.calls: list[Any] = [self]
        self.nodes: list[Any] = [None]
        self._over: WeakSet[Table] = WeakSet()
        self._rebased: WeakKeyDictionary[Table, Table] = WeakKeyDictionary()
        with _lock:
            self.resolve(meaning)
            (_tables if under is None else under._over).add(self)  # only now, because a wrap may have raised

    def resolve(self, meaning: Any) -> None:
        """Set the kernel of every operation by ``meaning``: a Resolver, or a Wrap if the table wraps another."""
        with _lock:
            self.meaning = meaning
            for number, operation in enumerate(_operations):
                if operation is not None:
                    self._fill(number)

    def put(self, number: int, kernel: Kernel) -> None:
        """Set the kernel of one operation, here and, wrapped, in all tables that wrap this one."""
        with _lock:
            self._set(number, kernel, kernel)

    def over(self, root: Table) -> Table:
        """Return a table that wraps ``root`` in the same way as this one wraps its root."""
        if self.root is root:
            return self
        if self.under is None:
            return root
        with _lock:
            found = self._rebased.get(root)
            if found is None:
                found = self._rebased[root] = Table(self.meaning, self.under.over(root))
            return found

    def _fill(self, number: int) -> None:
        operation = _operations[number]
        if self.under is None:
            kernel = self.meaning(operation)
            self._set(number, kernel, kernel)
            return
        below = self.under.calls[number]
        wrapped = self.meaning(operation, below)
        # A call that reaches the node runs the backend's kernel, without further wrappers.
        by_node = wrapped is operation.node or self.under.nodes[number] is not below
        self._set(number, wrapped, self.root.calls[number] if by_node else wrapped)

    def _set(self, number: int, call: Kernel, node: Kernel) -> None:
        for kernels in (self.calls, self.nodes):
            if len(kernels) <= number:
                kernels.extend([_undeclared] * (len(_operations) - len(kernels)))
        self.calls[number], self.nodes[number] = call, node
        if self._over:
            for each in list(self._over):
                each._fill(number)


def _undeclared(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("an operation was called during its declaration")


def _nothing(operation: Any) -> Kernel:
    return operation.body  # type: ignore[no-any-return]


DEFAULT = Table(_nothing)
_current: ContextVar[list[Any]] = ContextVar("hal_kernels", default=DEFAULT.calls)
kernels = _current.get
"""Return the kernels of calls in this context, by the number of the operation."""


def current() -> Table:
    """Return the current table of this context."""
    table: Table = _current.get()[0]
    return table


def next_number() -> int:
    """Reserve a number for an operation that is being declared."""
    with _lock:
        _operations.append(None)
        return len(_operations) - 1


def declare(operation: Any) -> None:
    """Add an operation to every table, under its number."""
    with _lock:
        _operations[operation.number] = operation
        for each in list(_tables):
            each._fill(operation.number)


def withdraw(table: Table) -> None:
    """Stop adding operations to ``table``, whose backend was refused: its resolver may raise for a new operation."""
    with _lock:
        _tables.discard(table)


def replace(number: int, old: Kernel, new: Kernel) -> None:
    """Replace the kernel ``old`` of an operation with ``new`` in all tables, permanently."""
    with _lock:
        for each in list(_tables):
            if each.calls[number] is old:
                each.put(number, new)


@contextmanager
def bound(table: Table) -> Iterator[None]:
    """Run calls in this context with ``table`` inside the block, within the interceptions of the current table."""
    token = enter(table)
    try:
        yield
    finally:
        leave(token)


def enter(table: Table) -> Any:
    """Make ``table`` current; see :func:`bound`. Returns the token for :func:`leave`."""
    calls = _current.get()
    if calls is table.calls:
        return None
    before: Table = calls[0]
    return None if before.root is table else _current.set(before.over(table).calls)


def leave(token: Any) -> None:
    """Restore the table from before :func:`enter`."""
    if token is not None:
        _current.reset(token)


@contextmanager
def intercepted(wrap: Wrap) -> Iterator[None]:
    """Replace this context's operation calls by ``wrap(operation, kernel)`` inside the block, as graph captures do.

    Other threads are not affected. Interceptions nest, and may overlap in any order: an inner one gets the kernel that
    the outer one returned. A backend that is activated inside the block is active in it and after it. A runner's step
    inside the block is intercepted on its backend: ``wrap`` gets the kernels of that backend. ``wrap`` is called again
    whenever a kernel under it changes, so it must have no side effects.

    ``wrap`` may return ``operation.node``, which calls the operation's graph node. The node runs the backend's kernel,
    without this context's interceptions: outer ones do not see the call, and inner ones have seen it.
    """
    interception = _Interception(wrap)
    _current.set(Table(interception, current()).calls)
    try:
        yield
    finally:
        before = current()
        after = _without(interception, before)
        _current.set(after.calls)
        _forget(before, after)


def _forget(before: Table, after: Table) -> None:
    """Clear the tables of ``before`` that are not in ``after``.

    They are reference cycles, and their kernels would keep captured objects until the next garbage collection.
    """
    with _lock:
        _empty(before, after)


def _empty(before: Table, after: Table) -> None:
    kept = set[int]()
    table: Table | None = after
    while table is not None:
        kept.add(id(table))
        table = table.under
    table = before
    while table is not None and id(table) not in kept:
        for each in (table, *table._rebased.values()):
            if each.under is not None:
                each.under._over.discard(each)
            each.calls.clear()
            each.nodes.clear()
            each.meaning = None
        table._rebased.clear()
        table = table.under


class _Interception:
    """A wrap with a unique identity, even if several interceptions use the same function."""

    def __init__(self, wrap: Wrap) -> None:
        self._wrap = wrap

    def __call__(self, operation: Any, kernel: Kernel) -> Kernel:
        return self._wrap(operation, kernel)


def _without(interception: _Interception, table: Table) -> Table:
    """Return a table that wraps the same root as ``table``, without one interception."""
    if table.under is None:
        return table
    if table.meaning is interception:
        return table.under
    under = _without(interception, table.under)
    return table if under is table.under else Table(table.meaning, under)
