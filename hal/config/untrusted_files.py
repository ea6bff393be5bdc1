"""Files of folders that others bring, such as a checkpoint's: every one is opened through here.

A name may be of a pipe, a device or a folder, or be one that no file system takes. All of that is a CheckpointError,
before anything is read: a pipe would be waited for without end.
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
"""More than any JSON file of a checkpoint has; the index of a model of a trillion parameters takes some tens of MB."""
AGAIN = "download or save it again"
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def is_there(file: Path) -> bool:
    """Whether a folder has an entry of that name, of whatever kind. No file has a name that no file system takes."""
    return os.path.lexists(file)


def is_plain_name(name: str) -> bool:
    """Whether a name is of an entry of a folder itself, and leads nowhere else."""
    return name not in ("", ".", "..") and not any(each in name for each in ("/", "\\", os.sep, "\0"))


def regular_file(file: Path) -> Path:
    """``file`` itself, if it is a regular file, or a link to one. A download's cache keeps files behind links.

    Raises:
        CheckpointError: it is none, is not there, or cannot be looked at.
    """
    return _regular(file)[0]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. All numbers in it are finite; JSON itself has no others.

    Raises:
        CheckpointError: there is no such file, it cannot be read, it holds no object, or a number is not finite.
    """
    if not is_there(file):
        raise CheckpointError(
            f"{file.parent} is no checkpoint: it has no {file.name}", "give the folder that holds config.json"
        )
    size = _regular(file)[1]
    if size > JSON_BYTES:
        raise CheckpointError(f"{file} is {size >> 20} MiB long, and at most {JSON_BYTES >> 20} are read", AGAIN)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        wrong = next(_not_finite(value, ""), None)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", AGAIN) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object", AGAIN)
    if wrong:
        raise CheckpointError(f"{file} has {wrong}, which is no finite number", f"correct it, or {AGAIN}")
    return value


def shown(name: str) -> str:
    """A name as errors show it: one that others chose may be of any length, and of any characters."""
    return f"{name[:60]!r}... ({len(name)} characters)" if len(name) > 80 else repr(name)


def _regular(file: Path) -> tuple[Path, int]:
    try:
        str(file).encode()  # libraries in Rust take no other paths
        found = os.stat(file)
        if stat.S_ISREG(found.st_mode):
            os.close(os.open(file, os.O_RDONLY))  # whether this user may: safetensors says of others that they are gone
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"its path is no text ({error})"
        raise CheckpointError(f"{shown(file.name)} in {file.parent} cannot be read: {reason}", AGAIN) from None
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise CheckpointError(f"{shown(file.name)} in {file.parent} is {kind}, not a file", f"remove it, or {AGAIN}")
    return file, found.st_size


def _not_finite(value: Any, path: str) -> Iterator[str]:
    """Where in a parsed JSON file numbers are not finite, and which they are."""
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
