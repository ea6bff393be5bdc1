"""Tests of PyTorch's own operators on the emulated NPU; scripts/operators_of_torch.py defines the outcomes."""

from __future__ import annotations

import pytest
from helpers.thorough import EXHAUSTIVE, thorough
from support import TESTS
from support.children import python


@thorough(EXHAUSTIVE, "all")
@pytest.mark.parametrize(
    "options",
    [pytest.param(("--draw=12", "--samples=3", "--seed=1"), id="drawn"), pytest.param((), id="all")],
)
def test_no_operator_is_wrong(options: tuple[str, ...]) -> None:
    done = python(str(TESTS / "scripts" / "operators_of_torch.py"), *options, timeout=3600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert "operators" in done.stdout
