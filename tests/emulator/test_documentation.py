"""What the documentation says of the emulated CANN is true: its Python runs, and what it lists is what was built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hal.backends.npu.emulator import activation, catalogue, symbols
from hal.backends.npu.emulator.build import SOURCES, Toolchain

PHASE = "GetWorkspaceSize"
PAGE = Path(__file__).parents[2] / "docs" / "emulator.md"


def test_the_python_of_the_page_runs(clean: dict[str, str]) -> None:
    """The blocks in order, in a process that nothing was prepared for."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], env=clean, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "out of memory" in result.stdout


def test_the_listed_operations_are_the_emulated_ones() -> None:
    listed = [name for names in catalogue.families().values() for name in names]
    assert len(listed) == len(set(listed))

    built = symbols.defined(activation.loaded()[0].with_name("libopapi.so"))
    stubs = symbols.refusing_stubs(Toolchain.find().torch_npu, set(listed) | {f"{name}{PHASE}" for name in listed})
    emulated = built - set(re.findall(r"^long (\w+)\(", stubs["opapi"], re.MULTILINE))
    assert {name.removesuffix(PHASE) for name in emulated if name.endswith(PHASE)} == set(listed)


def test_a_macro_is_followed() -> None:
    text = """
#define ONE(name, body) \\
    static void name(In self, Out out) { body; } \\
    ACLNN(name, .check = nothing)
#define TWO(name, body) ONE(name, body) ONE(Inplace##name, body)
TWO(Neg, out.set(at::neg(self)))
ACLNN(Other)
"""
    assert sorted(catalogue.operations(text)) == ["InplaceNeg", "Neg", "Other"]


def test_every_family_has_a_title() -> None:
    families = catalogue.families(SOURCES / "ops")
    assert "Others" not in families
    assert all(title and len(title) < 150 for title in families)
