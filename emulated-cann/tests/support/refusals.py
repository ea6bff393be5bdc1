"""Tables of calls that the emulated CANN refuses. Each row changes one thing in a call that works."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from support.ones import half

Row = tuple[Callable[..., Any], dict[str, Any], str]
"""A call, what changes in it, and a regular expression for the reason."""


def check_works(calls: Iterable[Callable[..., Any]]) -> None:
    """Run the calls without a change."""
    for call in calls:
        call()
    torch.npu.synchronize()


def check_refused(rows: Iterable[Row]) -> None:
    """Check that each call raises with its reason before anything runs."""
    wrong = []
    for call, changes, reason in rows:
        try:
            call(**changes)
            torch.npu.synchronize()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        if not re.search(reason, said):
            wrong.append((reason, said[:1000]))
    assert not wrong


def check_fails(rows: Iterable[Row], capfd: pytest.CaptureFixture[str]) -> None:
    """Check that each call fails on the device, because of a tensor's content, and that the device works on."""
    for call, changes, reason in rows:
        call(**changes)
        with pytest.raises(RuntimeError, match="507015") as error:
            torch.npu.synchronize()
        assert reason in str(error.value) + capfd.readouterr().err
        assert half(2).add(1).tolist() == [2, 2]
