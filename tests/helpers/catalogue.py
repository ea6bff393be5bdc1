"""Removes operations that tests declare from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal.ops import Operation


@contextmanager
def forgetting_operations(forgotten: dict[str, Operation] | None = None) -> Iterator[None]:
    """Remove operations declared in the block from the catalogue, so that they do not affect other tests.

    Args:
        forgotten: those of earlier blocks, which this one has again: a package that is imported declares them once.
    """
    from hal import ops
    from hal.ops.declaration import operation as declared

    known, forgotten = set(ops.catalogue()), {} if forgotten is None else forgotten
    for name, operation in forgotten.items():
        declared._catalogue[name] = operation
        declared._by_function[operation.function] = declared._by_node[operation.overload] = operation
    yield
    for name in set(ops.catalogue()) - known:
        operation = forgotten[name] = declared._catalogue.pop(name)
        del declared._by_function[operation.function]
        del declared._by_node[operation.overload]
