"""Where commands write. It is tried before they work, so that no work is lost."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

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


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {error.strerror}", "name another, in a folder that is there and that you may write"
    )
