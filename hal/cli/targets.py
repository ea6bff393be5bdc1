"""Checks that files can be written, made before the work begins so that no work is lost."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hal.cli.stdout import OutputError
from hal.errors import ConfigError


def check_file(file: Path) -> None:
    """Raise ConfigError unless ``file`` can be written or created; leave it unchanged."""
    made = not os.path.lexists(file)
    try:
        with file.open("ab"):
            pass
        if made:
            file.unlink()
    except OSError as error:
        raise _unwritable(file, error) from None


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless files can be created in ``folder``, or in its nearest existing parent; leave nothing."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputError if writing ``path``, or files in it, fails inside the block."""
    try:
        yield
    except OSError as error:
        problem = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise OutputError(problem, "free disk space, or choose another path") from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {error.strerror}", "choose a path in an existing folder with write permission"
    )
