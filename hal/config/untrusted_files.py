"""Access to files from untrusted folders, such as a checkpoint. All code opens them through this module.

A name may denote a pipe, a device or a folder, or be invalid for any file system. Each raises CheckpointError before
the file is read: reading a pipe would block forever.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hal.errors import CheckpointError

JSON_BYTES = 1 << 28
"""A limit above any JSON file of a checkpoint: the index of a model of 10**12 parameters takes some tens of MB."""
AGAIN = "download or save it again"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_there(file: Path) -> bool:
    """Return whether the path exists, as any kind of file. A name that no file system accepts does not exist."""
    return os.path.lexists(file)


def is_plain_name(name: str) -> bool:
    """Return whether a name denotes an entry of its folder, and contains no path."""
    return name not in ("", ".", "..") and not any(each in name for each in ("/", "\\", os.sep, "\0"))


def regular_file(file: Path) -> Path:
    """Return ``file`` if it is a regular file or a link to one. Download caches store files behind links.

    Raises:
        CheckpointError: the file is missing, not regular, or unreadable.
    """
    return _regular(file)[0]


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Non-finite numbers, which JSON forbids and Python accepts, are rejected.

    Raises:
        CheckpointError: the file is missing or unreadable, holds no object, or has a number that is not finite.
    """
    if not is_there(file):
        raise CheckpointError(
            f"{file.parent} is no checkpoint: it has no {file.name}", "give the folder that contains config.json"
        )
    size = _regular(file)[1]
    if size > JSON_BYTES:
        raise CheckpointError(f"{file} has {size >> 20} MiB, and the limit is {JSON_BYTES >> 20} MiB", AGAIN)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        wrong = next(_not_finite(value, ""), None)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", AGAIN) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object", AGAIN)
    if wrong:
        raise CheckpointError(f"{file} has {wrong}, which is not finite", f"write a finite number, or {AGAIN}")
    return value


def format_name(name: str) -> str:
    """Return a name for errors. Foreign names may have any length and any characters."""
    return f"{name[:60]!r}... ({len(name)} characters)" if len(name) > 80 else repr(name)


def _regular(file: Path) -> tuple[Path, int]:
    try:
        str(file).encode()  # Libraries in Rust accept only valid Unicode paths.
        found = os.stat(file)
        if stat.S_ISREG(found.st_mode):
            os.close(os.open(file, os.O_RDONLY))  # Check access: safetensors reports an unreadable file as missing.
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"its path is not valid Unicode ({error})"
        raise CheckpointError(f"{format_name(file.name)} in {file.parent} cannot be read: {reason}", AGAIN) from None
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
        raise CheckpointError(
            f"{format_name(file.name)} in {file.parent} is {kind}, not a file", f"remove it, or {AGAIN}"
        )
    return file, found.st_size


def _not_finite(value: Any, path: str) -> Iterator[str]:
    """Yield the path and value of each number in a parsed JSON file that is not finite."""
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, float | dict | list):
                yield from _not_finite(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            if isinstance(each, float | dict | list):
                yield from _not_finite(each, f"{path}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path[:200]} = {json.dumps(value)}"
