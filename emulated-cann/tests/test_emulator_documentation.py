"""Tests for the documentation of the emulated CANN: its Python runs, and its lists match the build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_cann import activation, read_refusals, symbols
from emulated_cann.build import SOURCES, Toolchain
from helpers.thorough import AGAIN, thorough
from support import DOCS, ROOT
from support.children import emulate, python

PHASE = "GetWorkspaceSize"
PAGE = DOCS / "how-to" / "use-the-emulated-cann.md"


def test_the_python_of_the_page_runs(clean: dict[str, str]) -> None:
    """Run the blocks in order in a fresh process."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    result = python("-c", "\n".join(blocks), environ=clean)
    assert result.returncode == 0, result.stderr
    assert "out of memory" in result.stdout


def test_the_script_of_the_readme_runs(clean: dict[str, str], tmp_path: Path) -> None:
    text = (ROOT / "emulated-cann" / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    result = emulate(sys.executable, str(tmp_path / "script.py"), environ=clean)
    assert f"It prints `{result.stdout.strip()}`" in text, result.stderr


def test_the_listed_operations_are_the_emulated_ones() -> None:
    listed = [name for names in read_refusals.families().values() for name in names]
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
    assert sorted(read_refusals.operations(text)) == ["InplaceNeg", "Neg", "Other"]


def test_every_family_has_a_title() -> None:
    families = read_refusals.families(SOURCES / "ops")
    assert "Others" not in families
    assert all(title and len(title) < 150 for title in families)


class TestRefusals:
    def test_each_has_a_source(self) -> None:
        found = read_refusals.refusals()  # Raises for an entry without a source or with a source in an unknown form.
        assert len(found) > 400
        assert {each.kind for each in found} == set(read_refusals.KINDS.values())
        assert all(each.source and each.title != "Others" for each in found)
        assert not [each.reason for each in found if each.kind == "documented" and "not emulated" in each.reason]

    def test_one_without_a_source(self) -> None:
        text = 'void check(In x) {\n    if (x.dim() > 4) throw Refused("x has " + text(x.dim()) + " dimensions");\n}\n'
        with pytest.raises(ValueError, match=r'ops/new\.cpp:2 refuses "x has … dimensions" without a source'):
            list(read_refusals.read(text, "ops/new.cpp"))
        source = 'DOCUMENTED("ops-nn: norm/rms_norm/docs/aclnnRmsNorm.md");\n'
        assert [each.reason for each in read_refusals.read(source + text, "ops/new.cpp")] == ["x has … dimensions"]
        with pytest.raises(ValueError, match="is not 'repository: path"):
            list(read_refusals.read('DOCUMENTED("the manual");\n' + text, "ops/new.cpp"))

    def test_a_source_holds_up_to_the_end_of_its_block(self) -> None:
        text = """
DOCUMENTED("ops-nn: norm");
int first(bool holds) {
    if (!holds) {
        UNDEFINED("it may be anything");
        return fail(kCode, format("%d of %s \\"}\\"", count, name));
    }
    require(other("not this"), holds ? "one" : "two");  // Refused("no")
    throw NotEmulated(std::string(name) + " is not emulated");
}
DOCUMENTED("runtime@9.0.0: docs (of waits); ops-math: math");
void second() { throw DeviceError(kCode, "it " "failed: " + why()); }
"""
        found = [(each.kind, each.source, each.reason) for each in read_refusals.read(text, "runtime/new.cpp")]
        assert found == [
            ("undefined", "it may be anything", '… of … "}"'),
            ("documented", "ops-nn: norm", "one"),
            ("ours", "not emulated", "… is not emulated"),
            ("documented", "runtime@9.0.0: docs (of waits); ops-math: math", "it failed: …"),
        ]
        waits, page = read_refusals.references(found[-1][1])
        assert waits.url == "https://gitcode.com/cann/runtime/tree/9.0.0/docs"
        assert (waits.remark, page.remark) == ("of waits", None)
        assert page.url == "https://gitcode.com/cann/ops-math/tree/master/math"

    @thorough(AGAIN)
    def test_the_page_has_them_all(self, tmp_path: Path) -> None:
        pytest.importorskip("sphinx", reason="the docs extra is not installed")
        text = (DOCS / "reference" / "emulator-refusals.md").read_text(encoding="utf-8")
        (tmp_path / "index.md").write_text(text, encoding="utf-8")
        settings = ["extensions=myst_parser,emulated", "root_doc=index", "smartquotes=0"]
        command = [sys.executable, "-m", "sphinx", "-Q", "-C", "-b", "pseudoxml", *(f"-D{each}" for each in settings)]
        environ = {**os.environ, "PYTHONPATH": str(DOCS / "extensions"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        subprocess.run([*command, tmp_path, tmp_path / "built"], env=environ, check=True, timeout=300)
        page = re.sub(r"\s+", " ", (tmp_path / "built" / "index.pseudoxml").read_text(encoding="utf-8"))
        absent = [each for each in read_refusals.refusals() if re.sub(r"\s+", " ", each.reason) not in page]
        assert not absent
