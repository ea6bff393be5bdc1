"""Tests for the documentation: its Python runs, its links and names are valid, and it builds without warnings.

A page's ``python`` blocks run in order, in one namespace, from the root of the repository, in a process that is forked
from a server that has imported torch and hal. Two kinds of block are written to files of a package instead: a
``python`` block that begins with a comment such as ``# toy_llama.py`` is that module, and an ``ini`` block with entry
points is that package's metadata. Such a module whose name begins with ``test_`` is run by pytest.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from families import page as families_page
from helpers import ROOT, clones
from helpers.forked_scripts import run_script
from helpers.pages import DOCS, MODULE, PAGES, READMES, blocks, lay_out
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

import hal
from hal import config, errors
from hal.nn.rope_parameters import ROPE_TYPES

# Pages whose Python another test file runs, and why.
ELSEWHERE = {
    "use-the-emulated-cann.md": "emulated-cann/tests runs it: it needs torch_npu, and a process of its own",
    "run-on-an-npu.md": "tests/backends/npu/driver runs it, for the same reason",
    "use-with-transformers.md": "tests/engines runs it: transformers imports torch_npu, which fails without CANN",
    "run-other-models.md": "tests/sources runs it, for the same reason",
}
INSTALLED = re.compile(r"touch pyproject\.toml")
CASES = "devices or errors or graphs or leaks or runners or (operations and (rms_norm or silu_and_mul))"
"""The conformance cases of a page's driver that are run: what it names unsupported, and what it has kernels for."""


@thorough(PROCESSES, r"\[(?!README|concepts|drivers)")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=page.name, marks=pytest.mark.skipif(page.name in ELSEWHERE, reason=ELSEWHERE.get(page.name, ""))
        )
        for page in PAGES
        if any(each.language == "python" for each in blocks(page))
    ],
)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = lay_out(page, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HAL_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    status, output = run_script(script, ROOT, environment, timeout=300)
    assert status == 0, f"{page.name}:\n{output}"
    if tests := sorted(map(str, tmp_path.glob("test_*.py"))):
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-k", CASES]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        environment["PYTHONPATH"] = str(tmp_path)
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert result.returncode == 0, f"the tests of {page.name}:\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if INSTALLED.search(page.read_text(encoding="utf-8"))], ids=lambda page: page.name
)
def test_a_package_that_a_page_installs_has_a_name(page: Path) -> None:
    """Without metadata, setuptools installs it as UNKNOWN 0.0.0, which the package of the next page replaces."""
    (text,) = (block.text for block in blocks(page) if block.language == "ini")
    parser = ConfigParser()
    parser.read_string(text)
    assert {"name", "version"} <= set(parser["metadata"])
    modules = set(parser["options"]["py_modules"].split())
    targets = [
        entry.partition("=")[2] for group in parser["options.entry_points"].values() for entry in group.split("\n")
    ]
    assert {target.strip().partition(":")[0] for target in targets if target} <= modules
    assert modules <= {found[1].removesuffix(".py") for block in blocks(page) if (found := MODULE.match(block.text))}


def test_pages_install_nothing_that_no_index_has() -> None:
    """hal is not on a package index: a page installs it from a clone."""
    wanted = re.compile(r"^\$ .*pip install [^#\n]*\btorch-hal\b", re.MULTILINE)
    assert [page.name for page in PAGES if wanted.search(page.read_text(encoding="utf-8"))] == []


def test_pages_import_the_modules_that_they_name() -> None:
    """The server that runs the pages has imported them, so that a page runs without its import."""
    missing = []
    for page in PAGES:
        nodes = [
            node for block in blocks(page) if block.language == "python" for node in ast.walk(ast.parse(block.text))
        ]
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for name in {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)} - imported:
            if re.fullmatch(r"hal(\.\w+){2,}", name) and isinstance(_value(name), ModuleType):
                missing.append((page.name, name))
    assert not missing


def _value(name: str) -> Any:
    value: Any = hal
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return value


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # Code has no links.
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    relative = [target for target in targets if "://" not in target]
    missing = [target for target in relative if not (page.parent / target).exists()]
    assert not missing


def test_every_page_is_of_one_kind() -> None:
    kinds = {page.relative_to(DOCS).parts[0] for page in PAGES if page.is_relative_to(DOCS)}
    assert kinds == {"index.md", "tutorials", "how-to", "reference", "explanation"}


def test_api_pages_have_every_public_name() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference" / "api").glob("*.md"))
    assert [name for name in hal.__all__ if not re.search(rf"\bhal\.{name}\b", text)] == []


def test_errors_page_has_every_error_that_calls_raise() -> None:
    text = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    rows = set(re.findall(r"^\| \{py:exc\}`~hal\.errors\.(\w+)` \| ", text, re.MULTILINE))
    assert rows == defined - {"HalError"}, "every error but the base class"


def test_errors_page_has_every_logger() -> None:
    text = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(hal\.\w+)`", text[text.index("hal logs to") :].partition("Warnings")[0])
    sources = [file for folder in ("hal", "backends") for file in (ROOT / folder).rglob("*.py")]
    used = {name for file in sources for name in re.findall(r'getLogger\("(hal\.\w+)"\)', file.read_text("utf-8"))}
    assert sorted(listed) == sorted(used)


def test_configuration_page_leads_to_every_drivers_options() -> None:
    text = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    entries = importlib.metadata.entry_points(group="hal.drivers")
    ours = {entry.name for entry in entries if entry.module.startswith("hal.backends.")}
    assert set(re.findall(r"\[(\w+)\]\(\1\.md", text)) == ours


def test_configuration_page_has_every_environment_variable() -> None:
    text = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    table = text[text.index("| variable | meaning | read by |") :].partition("\n\n")[0]
    rows = [(re.findall(r"`(\w+)`", row[1]), row[3].strip(" `")) for row in map(_cells, table.splitlines()[2:])]
    listed = {name for names, _ in rows for name in names}
    read = re.compile(
        r'(?:environ(?:\.get\(|\[)|getenv\()"(\w+)"|^(?:CACHE_DIR|SWITCH|OPTIONS) = "(\w+)"', re.MULTILINE
    )
    sources = [
        file
        for folder in ("hal", "backends", "emulated-cann/emulated_cann")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cpp")
    ]
    found = {one or other for file in sources for one, other in read.findall(file.read_text(encoding="utf-8"))}
    assert {"CXX", "HAL_CACHE_DIR", "HAL_NPU_EMULATOR_OPTIONS"} <= found
    assert found - {"HAL_BACKEND"} <= listed, "HAL_BACKEND is a key of the configuration"
    for names, file in rows:
        assert not names or all(name in (ROOT / file).read_text(encoding="utf-8") for name in names), file


def test_rewrites_page_names_the_file_of_every_reason() -> None:
    text = (DOCS / "reference" / "rewrites.md").read_text(encoding="utf-8")
    table = text[text.index("## Why a match is skipped") :].partition("\n## ")[0]
    folders = ("hal/compile/rewrite", "hal/compile/fx", "hal/ops/declaration")
    rows = [row for row in map(_cells, table.splitlines()) if len(row) == 5 and "`" in row[1]]
    assert len(rows) > 8
    for _, reasons, _, files, _ in rows:
        places = [ROOT / folder / name for folder in folders for name in re.findall(r"`([\w.]+)`", files)]
        sources = "".join(path.read_text(encoding="utf-8") for path in places if path.exists())
        parts = [part.strip() for reason in re.findall(r"`([^`]+)`", reasons) for part in reason.split("...")]
        assert [part for part in parts if part not in sources] == [], reasons


def _cells(row: str) -> list[str]:
    return row.split("|")


def test_configuration_page_describes_every_table() -> None:
    text = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    tables = [name for name, value in vars(config).items() if isinstance(value, type) and attrs.has(value)]
    assert [name for name in tables if f"hal.config.{name}" not in text] == []


def test_models_page_has_every_family() -> None:
    text = (DOCS / "reference" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `models/(\w+)\.py` \|$", text, re.MULTILINE)
    entries = importlib.metadata.entry_points(group="hal.models")
    ours = {entry.name: entry.module for entry in entries if entry.module.startswith("hal.models.")}
    assert {name: f"hal.models.{file}" for name, file in rows} == ours


def test_models_page_has_every_rope_type_and_its_keys() -> None:
    text = (DOCS / "reference" / "models.md").read_text(encoding="utf-8")
    table = text[text.index("| `rope_type` |") :].partition("\n\n")[0]
    rows = [[re.findall(r"`(\w+)`", cell) for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    assert {rope_type: (set(needed), set(others)) for (rope_type,), needed, others in rows} == {
        rope_type: tuple(
            {field.name for field in attrs.fields(cls) if (field.default is attrs.NOTHING) == needed}
            for needed in (True, False)
        )
        for rope_type, cls in ROPE_TYPES.items()
    }


def test_page_of_families_is_made_from_its_facts() -> None:
    facts = json.loads((DOCS / "reference" / "families.json").read_text(encoding="utf-8"))
    text = (DOCS / "reference" / "families.md").read_text(encoding="utf-8")
    assert text == families_page.page(facts), "run tools/families/run.py --page"


def test_picture_stands_alone() -> None:
    from xml.etree import ElementTree

    picture = ElementTree.parse(DOCS / "parts.svg").getroot()
    assert not [element for element in picture.iter() if element.tag.endswith(("image", "script", "use"))]


@thorough(EXHAUSTIVE)
def test_builds_strictly(tmp_path: Path) -> None:
    """In CI `make docs` has just built them in the same way, and the test checks the result."""
    built = DOCS / "_build" / "html"
    if "CI" not in os.environ or not built.exists():
        built = build(tmp_path)
    operations = (built / "reference" / "operations.html").read_text(encoding="utf-8")
    missing = [name for name in hal.ops.catalogue() if f'id="hal.ops.{name}"' not in operations]
    assert not missing
    if clones.has_torch_npu() and shutil.which("g++") is not None:
        assert "kernel" in column(operations, "operation", "npu")
        conformance = (built / "how-to" / "run-the-conformance-suite.html").read_text(encoding="utf-8")
        assert "n/a" not in column(conformance, "area", "npu")


def column(page: str, first: str, name: str) -> list[str]:
    """Return the cells of a column of the table whose first column is headed ``first``."""
    rows = [
        [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    ]
    head = next(row for row in rows if row[:1] == [first] and name in row)
    place = head.index(name)
    return [row[place] for row in rows[rows.index(head) + 1 :] if len(row) == len(head)]


def build(tmp_path: Path) -> Path:
    pytest.importorskip("sphinx", reason="the docs extra is not installed")
    pytest.importorskip("myst_parser", reason="the docs extra is not installed")
    pytest.importorskip("furo", reason="the docs extra is not installed")
    pytest.importorskip("sphinx_copybutton", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-d", str(tmp_path / "doctrees")]
    result = subprocess.run(
        [*command, str(DOCS), str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return tmp_path / "html"
