"""Tests of which versions of vLLM hal runs in, and of what it imports of them."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import re

from helpers import ROOT
from helpers.vllm_programs import needs_vllm, run
from packaging.requirements import Requirement

ADAPTER = ROOT / "hal" / "engines" / "vllm"
PROGRAM = """
import importlib, json, sys
missing = []
for module, name in json.loads(sys.argv[1]):
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing.append(f"{module}.{name}: {error}")
print("missing: " + json.dumps(missing))
"""


def imported() -> list[tuple[str, str]]:
    """Return the modules and names that the adapter imports of vLLM."""
    found = set()
    for path in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {(str(node.module), each.name) for each in node.names}
    return sorted(found)


def test_the_page_names_the_versions_that_are_installed() -> None:
    page = (ROOT / "docs" / "how-to" / "serve-with-vllm.md").read_text(encoding="utf-8")
    tested = re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    (extra,) = config["options.extras_require"]["vllm"].split()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert tested
    assert list(Requirement(extra).specifier.filter(tested)) == tested
    assert set(re.findall(r"^VLLM \?= (\S+)$", makefile, re.MULTILINE)) <= set(tested)


@needs_vllm
def test_vllm_has_what_the_adapter_imports() -> None:
    names = imported()
    result = run(PROGRAM, json.dumps(names))
    (found,) = re.findall(r"^missing: (.*)$", result.stdout, re.MULTILINE) or [result.stdout + result.stderr]
    print(*(f"{module}.{name}" for module, name in names), sep="\n")  # noqa: T201
    assert json.loads(found) == [], f"vLLM {importlib.metadata.version('vllm')} lacks some of the names"
