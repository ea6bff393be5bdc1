"""Which kernels calls of operations run: tables of kernels, one of which is current in each context.

A generated function reads one ContextVar and calls the kernel at its operation's number. A runner makes its backend's
table current for a step, so that several backends serve in one process, each in any thread. Where none is current, the
default table holds: that of the backend that was activated last. A capture or trace puts a table that wraps the current
one in its place.
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
"""From an operation to what it runs."""
Wrap = Callable[[Any, Kernel], Kernel]
"""From an operation, and what it would run, to what it runs instead."""

_lock = threading.RLock()
"""Held while tables change, so that every one of them ends up with the latest change."""
_operations: list[Any] = [None]
"""All that were declared; each one's number is its place here. None has the number 0."""
_tables: WeakSet[Table] = WeakSet()


class Table:
    """What each operation runs, by its number.

    Attributes:
        calls: what a call runs, in a plain list, which Python indexes faster than any other; first the table itself.
        nodes: what its node in a graph runs where it is called: the same, unless calls run the node itself.
        meaning: a Resolver, or for a table over another a Wrap.
        under: the table that this one wraps; None for one that is resolved.
        root: the resolved table at the bottom.
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
            (_tables if under is None else under._over).add(self)  # not before: a wrap may have raised

    def resolve(self, meaning: Any) -> None:
        """Take what ``meaning`` gives for every operation: a Resolver, or a Wrap for a table over another."""
        with _lock:
            self.meaning = meaning
            for number, operation in enumerate(_operations):
                if operation is not None:
                    self._fill(number)

    def put(self, number: int, kernel: Kernel) -> None:
        """Make one operation run ``kernel``, here and, wrapped, in all tables over this one."""
        with _lock:
            self._set(number, kernel, kernel)

    def over(self, root: Table) -> Table:
        """The table that wraps ``root`` as this one wraps its own root."""
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
        # A call that comes to the node runs the backend's kernel, and none of the wrappers on its way.
        by_node = wrapped is operation.overload or self.under.nodes[number] is not below
        self._set(number, wrapped, self.root.calls[number] if by_node else wrapped)

    def _set(self, number: int, call: Kernel, node: Kernel) -> None:
        for kernels in (self.calls, self.nodes):
            kernels.extend([_undeclared] * (number + 1 - len(kernels)))
        self.calls[number], self.nodes[number] = call, node
        for each in list(self._over):
            each._fill(number)


def _undeclared(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("an operation was called before it was declared to its end")


def _nothing(operation: Any) -> Kernel:
    return operation.body  # type: ignore[no-any-return]


DEFAULT = Table(_nothing)
_current: ContextVar[list[Any]] = ContextVar("hal_kernels", default=DEFAULT.calls)
kernels = _current.get
"""What calls in this context run, by the number of the operation."""


def current() -> Table:
    """The table that calls in this context run."""
    table: Table = _current.get()[0]
    return table


def next_number() -> int:
    """A number for an operation that is being declared."""
    with _lock:
        _operations.append(None)
        return len(_operations) - 1


def declare(operation: Any) -> None:
    """Give every table the kernel of an operation, which has its number."""
    with _lock:
        _operations[operation.number] = operation
        for each in list(_tables):
            each._fill(operation.number)


def replace(number: int, old: Kernel, new: Kernel) -> None:
    """Put ``new`` wherever ``old`` is what an operation runs, for good."""
    with _lock:
        for each in list(_tables):
            if each.calls[number] is old:
                each.put(number, new)


@contextmanager
def bound(table: Table) -> Iterator[None]:
    """Inside the block, calls in this context run ``table``, within whatever wraps the current one."""
    token = enter(table)
    try:
        yield
    finally:
        leave(token)


def enter(table: Table) -> Any:
    """Make ``table`` current; see :func:`bound`. Returns what :func:`leave` takes."""
    calls = _current.get()
    if calls is table.calls:
        return None
    before: Table = calls[0]
    return None if before.root is table else _current.set(before.over(table).calls)


def leave(token: Any) -> None:
    """End what :func:`enter` began."""
    if token is not None:
        _current.reset(token)


@contextmanager
def intercepted(wrap: Wrap) -> Iterator[None]:
    """Inside the block, this context's calls of an operation run ``wrap(operation, kernel)``. Used by graph captures.

    Other threads go on as they are. Interceptions nest, the inner one's ``kernel`` being what the outer one gave, and
    may overlap in any order. A backend that is activated inside the block is active in it and behind it, and a runner's
    step inside it is intercepted on its own backend: ``wrap`` gets the new kernels. It is called again whenever what is
    under it changes, so it should only make the function.

    ``wrap`` may give ``operation.overload``, the operation's node, which then runs the backend's kernel, and none of
    this context's other interceptions: those outside it do not see the call, and those inside have seen it.
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
    """Empty the tables that ``before`` is made of and ``after`` is not.

    Each refers to itself, and its kernels to what was captured, which would live until the next garbage collection.
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
    """A wrap, apart from others of the same function."""

    def __init__(self, wrap: Wrap) -> None:
        self._wrap = wrap

    def __call__(self, operation: Any, kernel: Kernel) -> Kernel:
        return self._wrap(operation, kernel)


def _without(interception: _Interception, table: Table) -> Table:
    """The table that wraps the same root as ``table`` does, but for one interception."""
    if table.under is None:
        return table
    if table.meaning is interception:
        return table.under
    under = _without(interception, table.under)
    return table if under is table.under else Table(table.meaning, under)
