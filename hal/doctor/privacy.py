"""Removal of personal names from findings, for bug reports."""

from __future__ import annotations

import getpass
import re
from pathlib import Path
from typing import Any

import cattrs

from hal.doctor.findings import Findings


def without_names(findings: Findings) -> Findings:
    """Return the findings with the home folder replaced by ``~``, and the user's name in paths by ``USER``."""
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
    """Return the home folder, unless it is missing or the root folder."""
    try:
        home = Path.home()
    except RuntimeError:
        return []
    return [str(home)] if len(home.parts) > 1 else []


def _user() -> list[str]:
    """Return the user's name, unless it is unknown or root."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # as in some containers
        return []
    return [] if user == "root" else [user]
