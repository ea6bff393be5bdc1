"""The build of the installed torch, read from its files: drivers decide by it before they import torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

FindSpec = Callable[[str], Any]


@attrs.frozen
class TorchBuild:
    """The build of a torch.

    Attributes:
        version: its version, such as 2.13.0+cpu; None if its ``version.py`` names none.
        platforms: the platforms that it is built for beside the CPU, and their versions, by the names in
            ``torch.version``.
    """

    version: str | None
    platforms: Mapping[str, str]


def installed_torch(find_spec: FindSpec = find_spec) -> TorchBuild | None:
    """Return the build of the installed torch; None if no torch is installed.

    Raises:
        OSError: its ``version.py`` cannot be read.
    """
    spec = find_spec("torch")
    origin = getattr(spec, "origin", None)
    return read_build(Path(origin).with_name("version.py")) if origin else None


def read_build(file: Path) -> TorchBuild:
    """Return the build of the torch with this ``version.py``.

    Raises:
        OSError: the file cannot be read.
    """
    text = file.read_text(encoding="utf-8")
    fields = dict(re.findall(r"""^(\w+)\s*(?::[^=]*)?=\s*['"]([^'"]*)['"]""", text, re.MULTILINE))
    version = fields.pop("__version__", None)
    fields.pop("git_version", None)
    return TorchBuild(version, fields)
