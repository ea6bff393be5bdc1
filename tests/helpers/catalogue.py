"""Removes operations that tests declare from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def forgetting_operations() -> Iterator[None]:
    """Remove operations declared in the block from the catalogue, so that they do not affect other tests."""
    from hal import ops
    from hal.ops.declaration import operation as declared

    known = set(ops.catalogue())
    yield
    for name in set(ops.catalogue()) - known:
        operation = declared._catalogue.pop(name)
        del declared._by_function[operation.function]
        del declared._by_node[operation.overload]
