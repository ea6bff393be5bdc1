"""The cache of compiled libraries and code. The key of an entry is a hash of its inputs.

This process executes the files of the cache. It therefore loads an entry only if no user but this one or root could
have written it, and only if the hashes of its files are unchanged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from hal.errors import ConfigError

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


CACHE_DIR = "HAL_CACHE_DIR"
"""The environment variable that names the cache folder. It is not a key of the configuration."""
CONTENTS = "contents.json"
"""The file of an entry that lists the hashes of its other files. It is written last."""
LOCK = ".lock"
ABANDONED_SECONDS = 24 * 3600
"""The age at which a temporary folder belongs to a process that died."""

log = logging.getLogger("hal.config")


def cache_folder(name: str) -> Path:
    """Return the folder for the compiled files of ``name``.

    It is in ``HAL_CACHE_DIR``, or else in ``torch-hal`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        ConfigError: the path starts with a home folder that does not exist.
    """
    if own := os.environ.get(CACHE_DIR):
        return home_of(own) / name
    return home_of(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torch-hal" / name


def home_of(folder: str) -> Path:
    """Return an absolute path, with ``~`` expanded.

    Raises:
        ConfigError: the home folder does not exist.
    """
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"the cache folder {folder} is in a home folder that does not exist ({error})",
            f"set {CACHE_DIR} to a writable folder",
        ) from None


def content_key(*parts: str | bytes) -> str:
    """Return the cache key for sources, compiler and flags, in this order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


class CompileCache:
    """A cache of immutable entries in one folder. An entry is a folder of files, named by its key.

    Processes and threads can share a cache: an entry is written under a temporary name and then renamed.

    Args:
        folder: created on first use, with its parents, with access for this user only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / LOCK, mode=0o600)

    def get(self, key: str) -> Path | None:
        """Return the folder of an entry, or None if the entry is missing or cannot be trusted.

        An entry that another user could have written, or that is incomplete or damaged, logs a warning.

        Raises:
            ConfigError: another user may write in the cache's folder.
            OSError: the cache's folder cannot be made or read.
        """
        return self._look_up(key, logging.WARNING)

    def latest(self, prefix: str) -> Path | None:
        """Return the most recently used entry whose key starts with ``prefix``, or None.

        Raises:
            ConfigError: another user may write in the cache's folder.
            OSError: the cache's folder cannot be made or read.
        """
        self._require_private()
        found = sorted(self.folder.glob(f"{prefix}*"), key=lambda entry: entry.lstat().st_mtime, reverse=True)
        return next((entry for each in found if (entry := self.get(each.name)) is not None), None)

    def put(self, key: str, write: Callable[[Path], None]) -> Path:
        """Write an entry, replacing one of the same key, and return its folder.

        Args:
            write: writes the entry's files into the empty folder it receives. If it raises, the entry is discarded.

        Raises:
            ConfigError: another user may write in the cache's folder.
            OSError: the entry cannot be written.
        """
        self._require_private()
        entry = self.folder / key
        with tempfile.TemporaryDirectory(prefix=".new-", dir=self.folder, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / key
            made.mkdir()
            write(made)
            files = {str(path.relative_to(made)): _digest(path) for path in sorted(made.rglob("*")) if path.is_file()}
            (made / CONTENTS).write_text(json.dumps({"key": key, "files": files}), encoding="utf-8")
            close_to_others(made)
            with self._lock:
                if os.path.lexists(entry):
                    entry.rename(Path(scratch) / "replaced")
                made.rename(entry)
                self._sweep()
        return entry

    def get_or_put(self, key: str, write: Callable[[Path], None]) -> Path:
        """Return an entry, writing it if it is missing. Concurrent processes write it once.

        Raises:
            ConfigError: another user may write in the cache's folder.
            OSError: the entry cannot be written.
        """
        found = self._look_up(key, logging.DEBUG)
        if found is None:
            with self._lock:
                found = self.get(key) or self.put(key, write)
        return found

    def _look_up(self, key: str, level: int) -> Path | None:
        self._require_private()
        entry = self.folder / key
        if not os.path.lexists(entry):
            return None
        problem = _problem(entry, key)
        if problem is not None:
            log.log(level, "%s; hal recreates it", problem)
            return None
        with suppress(OSError):  # The cache may be read-only, or root's.
            os.utime(entry)
        return entry

    def _require_private(self) -> None:
        if not private_folder(self.folder):
            raise ConfigError(
                f"the cache folder {self.folder} belongs to user {self.folder.stat().st_uid} or is writable for other "
                "users, but hal executes the code in it",
                f"set {CACHE_DIR} to a folder that belongs to you",
            )

    def _sweep(self) -> None:
        """Remove the temporary folders of processes that died."""
        for each in self.folder.glob(".*"):
            if each.name != LOCK and each.lstat().st_mtime < time.time() - ABANDONED_SECONDS:
                shutil.rmtree(each, ignore_errors=True)


def _problem(entry: Path, key: str) -> str | None:
    """Return why an entry cannot be trusted, or None if it can."""
    try:
        if problem := written_by_others(entry):
            return problem
        contents = json.loads((entry / CONTENTS).read_text(encoding="utf-8"))
        # While others could write to the cache, they could have renamed the user's entries.
        if contents["key"] != key:
            return f"{entry} holds another entry"
        for name, digest in contents["files"].items():
            file = entry / name
            if file.is_symlink() or _digest(file) != digest:
                return f"{file} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{entry} is incomplete or damaged ({type(error).__name__}: {error})"
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
