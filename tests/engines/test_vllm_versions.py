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
        missing.append([module, name, str(error)])
print("missing: " + json.dumps(missing))
"""


def imported() -> dict[tuple[str, str], str]:
    """Return the modules and names that the adapter imports of vLLM, each with a file that imports it."""
    found = {}
    for path in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {(str(node.module), each.name): path.name for each in node.names}
    return dict(sorted(found.items()))


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
    result = run(PROGRAM, json.dumps(list(names)))
    found = re.search(r"^missing: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    print(*(f"{file}: {module}.{name}" for (module, name), file in names.items()), sep="\n")  # noqa: T201
    missing = [f"{names[module, name]} imports {name}: {error}" for module, name, error in json.loads(found[1])]
    assert missing == [], f"vLLM {importlib.metadata.version('vllm')} lacks some of the names"
