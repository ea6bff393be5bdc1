"""Keeping extensions of torch that no backend uses away from the libraries that hal is compared with."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GROUP = "torch.backends"
"""The entry-point group by which ``import torch`` finds vendors' extensions."""


@contextmanager
def only_imported_extensions() -> Iterator[None]:
    """Inside the block, an extension of torch that has not been imported yet counts as not installed.

    transformers imports every vendor's extension that it finds, whichever device it computes on, and fails with one
    that cannot be imported, such as one whose vendor's runtime is missing. hal's driver has imported the extension that
    the device needs when it opened its backend; no other can matter to what is measured. transformers asks once and
    remembers the answer, so import it, and make its models, inside the block.

    A module that is None in ``sys.modules`` cannot be found or imported: that is Python's own rule. The entries are
    removed again at the end. They hold for the whole process, so no other thread may open a backend meanwhile.
    """
    packages = {entry.module.partition(".")[0] for entry in importlib.metadata.entry_points(group=GROUP)}
    hidden = packages - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # typeshed knows modules alone
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]
