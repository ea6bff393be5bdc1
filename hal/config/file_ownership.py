"""Who could have written a file. Code is run only from files that nobody but this user or root could have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(folder: Path) -> bool:
    """Make a folder for this user only, and return whether what lies in it can be trusted, as for :func:`is_own`.

    A folder of this user's in which others may write is closed to them. The owners of the files in it still tell what
    they put there.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if os.name == "posix" and found.st_uid == os.getuid() and found.st_mode & _OTHERS_WRITE:
        folder.chmod(found.st_mode & 0o700)
    return is_own(folder)


def is_own(file: Path, *, follow_symlinks: bool = True) -> bool:
    """Return whether a file or folder belongs to this user or root, and nobody else may write in it.

    Raises:
        OSError: there is no such file.
    """
    if os.name != "posix":
        return True
    found = file.stat(follow_symlinks=follow_symlinks)
    # A symbolic link's own mode is always 0777, and means nothing.
    return found.st_uid in (os.getuid(), 0) and (stat.S_ISLNK(found.st_mode) or not found.st_mode & _OTHERS_WRITE)


def written_by_others(folder: Path) -> str | None:
    """Say what in a folder another user could have written, or put there as a link; None if nothing.

    Raises:
        OSError: a file cannot be examined.
    """
    for each in (folder, *folder.rglob("*")):
        if not is_own(each, follow_symlinks=False):
            return f"another user could have written {each}"
    return f"{folder} is a link" if folder.is_symlink() else None


def close_to_others(folder: Path) -> None:
    """Take from others the rights that the umask left them."""
    for each in (folder, *folder.rglob("*")):
        mode = each.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode):
            each.chmod(mode & 0o700)
