"""The cache of built libraries: folders that never change, named by the hash of their inputs.

The process executes the files of the cache. It therefore uses a folder only if no user but this one or root could have
written it, and only if its files are unchanged.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from .errors import Unavailable

CACHE_DIR = "EMULATED_CANN_CACHE_DIR"
"""The environment variable that names the folder."""
CONTENTS = "contents.json"
"""The file of an entry that lists the hashes of its other files. It is written last."""
LOCK = ".lock"
ABANDONED_SECONDS = 24 * 3600
"""The age at which a temporary folder belongs to a process that died."""

log = logging.getLogger("emulated_cann")


def cache_folder() -> Path:
    """Return ``EMULATED_CANN_CACHE_DIR``, or else ``emulated-cann`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        Unavailable: the path starts with a home folder that does not exist.
    """
    folder = os.environ.get(CACHE_DIR) or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/emulated-cann"
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise Unavailable(
            f"the cache folder {folder} is in a home folder that does not exist ({error})",
            f"set {CACHE_DIR} to a writable folder",
        ) from None


def content_key(*parts: str | bytes) -> str:
    """Return the hash of sources, compiler and flags, in this order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


class LibraryCache:
    """A cache in one folder, which processes share. An entry is written under a temporary name and then renamed.

    Args:
        folder: created on first use, with its parents, with access for this user only.
        kept_seconds: entries and workspaces unused for longer are removed.
    """

    def __init__(self, folder: Path, kept_seconds: float) -> None:
        self.folder, self._kept_seconds = folder, kept_seconds
        self._lock = FileLock(folder / LOCK, mode=0o600)

    def latest(self, prefix: str) -> Path | None:
        """Return the most recently used entry whose key starts with ``prefix``, or None."""
        self._require_private()
        found = sorted(self.folder.glob(f"{prefix}*"), key=lambda entry: entry.lstat().st_mtime, reverse=True)
        return next((each for each in found if self._is_good(each, logging.WARNING)), None)

    def get_or_put(self, key: str, write: Callable[[Path], None]) -> Path:
        """Return the folder of an entry; concurrent processes write it once.

        Args:
            write: writes the entry's files into the empty folder that it receives, if the entry is missing, damaged, or
                could have been written by another user. If it raises, the entry is discarded.

        Raises:
            Unavailable: another user may write in the cache.
            OSError: the entry cannot be written.
        """
        self._require_private()
        entry = self.folder / key
        if not self._is_good(entry, logging.DEBUG):
            with self._lock:
                if not self._is_good(entry, logging.WARNING):
                    self._put(entry, write)
        return entry

    @contextmanager
    def workspace(self, name: str) -> Iterator[Path]:
        """Yield a folder that successive builds share. It is emptied if another user could have written to it.

        The folder is not locked: use it in the ``write`` of :meth:`get_or_put`.
        """
        folder = self.folder / name
        if os.path.lexists(folder) and (problem := _written_by_others(folder)):
            log.warning("%s; it is recreated", problem)
            with tempfile.TemporaryDirectory(prefix=".old-", dir=self.folder, ignore_cleanup_errors=True) as scratch:
                folder.rename(Path(scratch) / "refused")
        folder.mkdir(mode=0o700, exist_ok=True)
        os.utime(folder)
        try:
            yield folder
        finally:
            _close_to_others(folder)

    def _put(self, entry: Path, write: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory(prefix=".new-", dir=self.folder, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / entry.name
            made.mkdir()
            write(made)
            files = {str(path.relative_to(made)): _digest(path) for path in sorted(made.rglob("*")) if path.is_file()}
            (made / CONTENTS).write_text(json.dumps(files), encoding="utf-8")
            _close_to_others(made)
            if os.path.lexists(entry):
                entry.rename(Path(scratch) / "replaced")
            made.rename(entry)
            self._sweep(entry)

    def _is_good(self, entry: Path, level: int) -> bool:
        if not os.path.lexists(entry):
            return False
        if problem := _written_by_others(entry) or _damage(entry):
            log.log(level, "%s; it is recreated", problem)
            return False
        with suppress(OSError):  # The cache may be read-only, or root's.
            os.utime(entry)
        return True

    def _require_private(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.folder.stat()
        if found.st_uid == os.getuid() and found.st_mode & 0o022:
            self.folder.chmod(found.st_mode & 0o700)
        if not _is_own(self.folder, follow_symlinks=True):
            raise Unavailable(
                f"the cache folder {self.folder} belongs to user {found.st_uid} or is writable for other users, but "
                "the code in it is executed",
                f"set {CACHE_DIR} to a folder that belongs to you",
            )

    def _sweep(self, kept: Path) -> None:
        """Remove abandoned and expired entries. A process that has loaded a library keeps its mapping."""
        now = time.time()
        for each in self.folder.iterdir():
            age = ABANDONED_SECONDS if each.name.startswith(".") else self._kept_seconds
            if each not in (kept, self.folder / LOCK) and each.lstat().st_mtime < now - age:
                shutil.rmtree(each, ignore_errors=True)


def _is_own(file: Path, *, follow_symlinks: bool = False) -> bool:
    """Return whether a file or folder belongs to this user or root, and no other user can write to it."""
    found = file.stat(follow_symlinks=follow_symlinks)
    # The mode of a symbolic link is always 0777 and has no effect.
    return found.st_uid in (os.getuid(), 0) and (stat.S_ISLNK(found.st_mode) or not found.st_mode & 0o022)


def _written_by_others(folder: Path) -> str | None:
    for each in (folder, *folder.rglob("*")):
        if not _is_own(each):
            return f"another user could have written {each}"
    return f"{folder} is a link" if folder.is_symlink() else None


def _damage(entry: Path) -> str | None:
    try:
        files = json.loads((entry / CONTENTS).read_text(encoding="utf-8"))
        for name, digest in files.items():
            if (entry / name).is_symlink() or _digest(entry / name) != digest:
                return f"{entry / name} is damaged"
    except (OSError, ValueError, AttributeError) as error:
        return f"{entry} is incomplete or damaged ({type(error).__name__}: {error})"
    return None


def _close_to_others(folder: Path) -> None:
    for each in (folder, *folder.rglob("*")):
        mode = each.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode):
            each.chmod(mode & 0o700)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
