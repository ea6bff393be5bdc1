"""Hiding of torch extensions that the benchmark does not use from the libraries that it compares with."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GROUP = "torch.backends"
"""Entry-point group in which ``import torch`` looks up device extensions."""


@contextmanager
def only_imported_extensions() -> Iterator[None]:
    """Hide torch extensions that are not imported yet.

    transformers imports every installed device extension, and fails if one cannot be imported, for example for lack of
    the vendor's runtime. hal's driver has already imported the extension that the device needs. transformers caches its
    lookup, so import it and create its models inside the block.

    Python treats a module that is None in ``sys.modules`` as missing. The entries are removed at the end of the block.
    They affect the whole process, so no other thread may open a backend meanwhile.
    """
    packages = {entry.module.partition(".")[0] for entry in importlib.metadata.entry_points(group=GROUP)}
    hidden = packages - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # typeshed knows modules alone
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]
