"""What a bug report need not say: whose machine it is."""

from __future__ import annotations

import getpass
import re
from pathlib import Path
from typing import Any

import cattrs

from hal.doctor.findings import Findings


def without_names(findings: Findings) -> Findings:
    """The same, with ``~`` for the user's home, and ``USER`` where a path has the user's name."""
    hidden = [(re.compile(rf"(?<![\w./-]){re.escape(home)}(?![\w.-])"), "~") for home in _home()]
    hidden += [(re.compile(rf"(?<=[/\\]){re.escape(user)}(?![\w.-])"), "USER") for user in _user()]

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            for pattern, instead in hidden:
                value = pattern.sub(instead, value)
            return value
        if isinstance(value, dict):
            return {key: clean(each) for key, each in value.items()}
        return [clean(each) for each in value] if isinstance(value, list) else value

    return cattrs.structure(clean(cattrs.unstructure(findings)), Findings)


def _home() -> list[str]:
    """The user's home, if there is one that says anything."""
    try:
        home = Path.home()
    except RuntimeError:
        return []
    return [str(home)] if len(home.parts) > 1 else []


def _user() -> list[str]:
    """The user's name, if there is one that says anything."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # as in some containers
        return []
    return [] if user == "root" else [user]
