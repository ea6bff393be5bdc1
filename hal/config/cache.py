"""Folders for what hal compiles. Code from them runs in this process, so it must be this user's own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hal.errors import ConfigError

CACHE_DIR = "HAL_CACHE_DIR"
"""The variable that names the folder for what hal compiles; it is no part of a configuration."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(name: str) -> Path:
    """Where to keep what is compiled for ``name``: in ``HAL_CACHE_DIR``, ``XDG_CACHE_HOME``/torch-hal, or ~/.cache.

    Raises:
        ConfigError: it is in a home folder, and there is none.
    """
    if own := os.environ.get(CACHE_DIR):
        return home_of(own) / name
    return home_of(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torch-hal" / name


def home_of(folder: str) -> Path:
    """An absolute path; ``~`` stands for the home folder.

    Raises:
        ConfigError: there is no home folder.
    """
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"what is compiled cannot be kept in {folder}: there is no such home folder ({error})",
            f"set {CACHE_DIR} to a folder that can be written",
        ) from None


def private_folder(folder: Path) -> bool:
    """Make a folder, for this user only; whether what lies in it can be trusted, as :func:`is_own` says of it.

    One of this user's that others may write in is closed to them: what they put there is still told by its owner.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if os.name == "posix" and found.st_uid == os.getuid() and found.st_mode & _OTHERS_WRITE:
        folder.chmod(found.st_mode & 0o700)
    return is_own(folder)


def is_own(file: Path | int) -> bool:
    """Whether a file or folder, by its path or descriptor, is this user's or root's, and nobody else may write in it.

    Raises:
        OSError: there is no such file.
    """
    if os.name != "posix":
        return True
    found = os.stat(file)
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & _OTHERS_WRITE
