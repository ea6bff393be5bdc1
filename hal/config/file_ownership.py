"""File ownership checks. Code is executed only from files that no user but this one or root could have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(folder: Path) -> bool:
    """Create a folder for this user only, and return whether :func:`is_own` holds for it.

    A folder of this user that others can write to loses that permission. The owners of its files still tell which of
    them others wrote.

    Raises:
        OSError: the folder cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if os.name == "posix" and found.st_uid == os.getuid() and found.st_mode & _OTHERS_WRITE:
        folder.chmod(found.st_mode & 0o700)
    return is_own(folder)


def is_own(file: Path, *, follow_symlinks: bool = True) -> bool:
    """Return whether a file or folder belongs to this user or root, and no other user can write to it.

    Raises:
        OSError: the file does not exist.
    """
    if os.name != "posix":
        return True
    found = file.stat(follow_symlinks=follow_symlinks)
    # The mode of a symbolic link is always 0777 and has no effect.
    return found.st_uid in (os.getuid(), 0) and (stat.S_ISLNK(found.st_mode) or not found.st_mode & _OTHERS_WRITE)


def written_by_others(folder: Path) -> str | None:
    """Return a message about the first entry of a folder that another user could have written, or None.

    Raises:
        OSError: a file cannot be examined.
    """
    for each in (folder, *folder.rglob("*")):
        if not is_own(each, follow_symlinks=False):
            return f"another user could have written {each}"
    return f"{folder} is a link" if folder.is_symlink() else None


def close_to_others(folder: Path) -> None:
    """Remove the permissions of other users from a folder and its files."""
    for each in (folder, *folder.rglob("*")):
        mode = each.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode):
            each.chmod(mode & 0o700)
