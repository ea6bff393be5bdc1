"""Tests that hal's adapters of engines use public names only: those that the pages of the API document.

What an adapter needs, every engine's integrator needs.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import hal
from hal import errors

ADAPTERS = ("hal/engines", "hal/sources")
DIRECTIVE = re.compile(
    r"^\.\. (?:auto(?:class|function|data|exception)|py:data):: (hal\.[\w.]+)(?:\(\))?$", re.MULTILINE
)
MODULE = re.compile(r"^\.\. automodule:: (hal\.[\w.]+)\n   :members: ([\w, ]+)$", re.MULTILINE)


def documented(root: Path) -> frozenset[str]:
    """Return the full names that the pages of the API document, and those of the errors."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((root / "docs/reference/api").glob("*.md")))
    listed = {f"{module}.{name}" for module, names in MODULE.findall(pages) for name in names.split(", ")}
    raised = {f"hal.errors.{name}" for name, each in vars(errors).items() if isinstance(each, type)}
    return frozenset({*DIRECTIVE.findall(pages), *listed, *raised, *(f"hal.{name}" for name in hal.__all__)})


def violations(root: Path) -> Iterator[str]:
    """Return the names of hal, of all that the adapters use, that are not public."""
    public = documented(root)
    for file in sorted(file for room in ADAPTERS for file in (root / room).rglob("*.py")):
        own = ".".join(file.relative_to(root).parts[:3])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in used(node):
                if name not in public and not f"{name}.".startswith(f"{own}."):
                    yield f"{file.relative_to(root)}:{getattr(node, 'lineno', 0)} uses {name}"


def used(node: ast.AST) -> list[str]:
    """Return the full names of hal that a node imports, or reads as attributes of ``hal``."""
    match node:
        case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "hal":
            return [f"{module}.{each.name}" for each in names]
        case ast.Import(names=names):
            return [each.name for each in names if each.name.startswith("hal.")]
        case ast.Attribute(value=ast.Name(id="hal"), attr=name) if name not in ("config", "step"):
            return [f"hal.{name}"]
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="hal"), attr=module), attr=name):
            # An operation has its page, generated from its declaration; a class's attributes belong to it.
            return [f"hal.{module}.{name}"] if module not in hal.__all__ or module in ("nn", "step") else []
    return []


BOTH = {"hal.vendor": {"API_VERSION", "Backend"}}
"""The names of a module that are also those of ``hal``: what a driver returns is what :func:`hal.open` does."""


def test_a_public_name_has_one_home() -> None:
    homes: dict[str, list[str]] = {}
    for module in ("hal", "hal.nn", "hal.ops", "hal.step", "hal.vendor"):
        names = getattr(importlib.import_module(module), "__all__", ())
        for name in set(names) - BOTH.get(module, set()):
            homes.setdefault(name, []).append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_engines_use_public_names_only(repository: Path) -> None:
    assert list(violations(repository)) == []


def test_other_names_are_found(repository: Path, tmp_path: Path) -> None:
    for folder in (*ADAPTERS, "docs/reference/api"):
        shutil.copytree(repository / folder, tmp_path / folder)
    planted = {
        "from hal.drivers.compiler import EAGER": "hal.drivers.compiler.EAGER",
        "from hal.step import fields_of": "hal.step.fields_of",
        "from hal import generation": "hal.generation",
        "import hal.checkpoint.loading": "hal.checkpoint.loading",
        "hal.step.fields_of(hal.step.Batch)": "hal.step.fields_of",
        "hal.checkpoint.model_registry.MODELS": "hal.checkpoint",
        "hal.nn.decoder": "hal.nn.decoder",
        "def late(): from hal.engines.sglang import PLATFORM": "hal.engines.sglang.PLATFORM",
    }
    worker = tmp_path / "hal/engines/vllm/worker.py"
    lines = worker.read_text(encoding="utf-8").splitlines()
    worker.write_text("\n".join([*lines, *planted]), encoding="utf-8")
    found = set(violations(tmp_path))
    for line, (text, name) in enumerate(planted.items(), len(lines) + 1):
        assert f"hal/engines/vllm/worker.py:{line} uses {name}" in found, text
