"""Files that commands write. A target is tried before the work begins, so that no work is lost."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hal.cli.stdout import OutputError
from hal.errors import ConfigError


def check_file(file: Path) -> None:
    """Raise ConfigError unless ``file`` can be written, or made; leave it as it is."""
    made = not os.path.lexists(file)
    try:
        with file.open("ab"):
            pass
        if made:
            file.unlink()
    except OSError as error:
        raise _unwritable(file, error) from None


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless files can be made in ``folder``, or above it if it is not there; leave nothing."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputError if what is written inside the block, to ``path`` or files in it, cannot be."""
    try:
        yield
    except OSError as error:
        problem = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise OutputError(problem, "free space there, or name another place") from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {error.strerror}", "name another, in a folder that is there and that you may write"
    )
