"""Tests for the layers of the design, with import-linter and with the syntax tree. Violations test both checks.

Import cycles are found with grimp, import-linter's library.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from helpers import console_script
from helpers.thorough import AGAIN, MODE, thorough

import hal

VENDORS = frozenset({"torch_npu", "torchair", "flashinfer", "triton", "vllm", "sglang", "transformers"})
VENDOR_NAMES = frozenset({"torch.npu", "torch.cuda", "torch.xpu", "torch.mps"})
# In names, and in strings that are names. Sentences may mention a vendor as an example.
VENDOR_WORD = re.compile(
    r"(?<![a-z])(npu|cuda|ascend|cann|atb|mkldnn|onednn|xpu|mps|rocm|hip|nvidia|huawei)", re.IGNORECASE
)
CIRCLE = """
from graphlib import CycleError, TopologicalSorter
import grimp
graph = grimp.build_graph("hal", "backends", "models", cache_dir=None)
try:
    TopologicalSorter({each: graph.find_modules_directly_imported_by(each) for each in graph.modules}).prepare()
except CycleError as error:
    print(*reversed(error.args[1]), sep=" -> ")
"""
MODELS_MAY_IMPORT = ("hal.ops", "hal.nn", "hal.step", "hal.config", "torch", "attrs", "__future__")


def violations(root: Path) -> Iterator[str]:
    """Return the vendors named in the core or in a model, and other forbidden imports of models."""
    for folder in ("hal", "models"):
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root)
            # An adapter imports its engine, and a source its library.
            own = path.parts[2] if path.parts[0] == "hal" and path.parts[1] in ("engines", "sources") else ""
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                where = f"{path}:{getattr(node, 'lineno', 0)}"
                for module in imported(node):
                    if module.partition(".")[0] in VENDORS - {own}:
                        yield f"{where} imports the vendor package {module}"
                    if folder == "models" and not allowed_in_models(module):
                        yield f"{where} imports {module}, which models may not"
                if isinstance(node, ast.Attribute) and ast.unparse(node) in VENDOR_NAMES:
                    yield f"{where} names {ast.unparse(node)}"
                if not own and (name := named(node)) and VENDOR_WORD.search(name):
                    yield f"{where} knows a vendor's {name}"


def named(node: ast.AST) -> str:
    """Yield names that a node uses or defines, and strings of one word."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Constant(value=str(text)) if not re.search(r"\s", text):
            return text
    return ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        if node.module in ("hal", "torch"):  # from hal import generation: the name is the module
            return [f"{node.module}.{alias.name}" for alias in node.names]
        return [node.module]
    return []


def allowed_in_models(module: str) -> bool:
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or any(
        module == allowed or module.startswith(f"{allowed}.") for allowed in MODELS_MAY_IMPORT
    )


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(console_script("lint-imports")), "--no-cache"], cwd=root, capture_output=True, text=True, check=False
    )


def circle(root: Path) -> str:
    """Return modules of an import cycle, including imports for types and inside functions; empty if there is none."""
    command = [sys.executable, "-c", CIRCLE]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """Return a copy of the sources, in which tests insert violations."""
    for folder in ("hal", "backends", "models"):
        shutil.copytree(repository / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "setup.cfg", tmp_path)
    return tmp_path


def test_the_sources_are_layered(repository: Path) -> None:
    assert list(violations(repository)) == []
    result = lint_imports(repository)
    assert result.returncode == 0, result.stdout


@thorough(AGAIN, r"qwen3.py-import numpy")
@thorough(MODE, r"\[(?!models/qwen3\.py-import (torch_npu|numpy))")
@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("models/qwen3.py", "import torch_npu", "imports the vendor package torch_npu"),
        ("models/qwen3.py", "from flashinfer import rope", "imports the vendor package flashinfer"),
        ("models/qwen3.py", "from hal import generation", "imports hal.generation, which models may not"),
        ("models/qwen3.py", "import numpy", "imports numpy, which models may not"),
        ("models/qwen3.py", "import torch; torch.npu.synchronize()", "names torch.npu"),
        ("hal/nn/linear.py", "torch.cuda.is_available()", "names torch.cuda"),
        ("hal/nn/linear.py", "weight.is_mkldnn", "knows a vendor's is_mkldnn"),
        ("hal/config/settings.py", "ALIASES = {'npugraph': 'graph'}", "knows a vendor's npugraph"),
        (
            "hal/drivers/compiler.py",
            "NAMES = ['atb._npu_paged_attention']",
            "knows a vendor's atb._npu_paged_attention",
        ),
        ("hal/execution/runner.py", "def f():\n    import torch_npu", "imports the vendor package torch_npu"),
        ("hal/engines/vllm/worker.py", "import torch_npu", "imports the vendor package torch_npu"),
        ("hal/execution/runner.py", "import vllm", "imports the vendor package vllm"),
    ],
)
def test_the_syntax_tree_shows_violations(copy: Path, file: str, line: str, message: str) -> None:
    with (copy / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    assert any(message in violation for violation in violations(copy))


@thorough(MODE, r"\[(?!models/qwen3\.py-import torch_npu)")
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("models/qwen3.py", "import torch_npu", "Models import hal.ops, hal.nn, hal.step and hal.config only"),
        (
            "models/qwen3.py",
            "import hal.drivers.backend",
            "Models import hal.ops, hal.nn, hal.step and hal.config only",
        ),
        ("models/qwen3.py", "import hal.compile.trace", "Models import hal.ops, hal.nn, hal.step and hal.config only"),
        ("hal/drivers/registry.py", "import backends.cpu", "The core imports no backend, no model and no vendor"),
        ("hal/nn/linear.py", "import models.qwen3", "The core imports no backend, no model and no vendor"),
        ("hal/ops/norm.py", "import hal.drivers.backend", "The core is layered"),
        ("hal/device/graph.py", "from hal import ops", "The core is layered"),
        ("backends/cpu/driver.py", "import models", "A backend imports no other backend, and no model"),
    ],
)
def test_import_linter_shows_violations(copy: Path, file: str, line: str, contract: str) -> None:
    with (copy / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout
    assert f"{contract} BROKEN" in result.stdout


def test_no_modules_import_each_other(repository: Path) -> None:
    assert circle(repository) == ""


@pytest.mark.parametrize(
    ("file", "lines", "found"),
    [
        (
            "hal/device/capture_checks.py",
            "from hal.device.graph import Graph",
            {"hal.device.capture_checks", "hal.device.graph"},
        ),
        (
            "hal/ops/declaration/torch_library.py",
            "if TYPE_CHECKING:\n    from hal.ops.declaration.operation import Operation",
            {"hal.ops.declaration.torch_library", "hal.ops.declaration.operation"},
        ),
        (
            "backends/cpu/launch.py",
            "def late():\n    from .tape import Tape",
            {"backends.cpu.launch", "backends.cpu.tape"},
        ),
    ],
)
def test_a_circle_is_found(copy: Path, file: str, lines: str, found: set[str]) -> None:
    with (copy / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{lines}\n")
    names = circle(copy).split(" -> ")
    assert names[0] == names[-1]
    assert found <= set(names)


def test_models_may_import_nothing_new(repository: Path) -> None:
    """import-linter has a list of forbidden modules, which must contain new modules of hal."""
    parser = ConfigParser()
    parser.read(repository / "setup.cfg", encoding="utf-8")
    listed = parser["importlinter:contract:models"]["forbidden_modules"].split()
    files = [each for each in (repository / "hal").iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()]
    there = {f"hal.{each.stem}" for each in files} - {"hal.__init__"}
    assert {each for each in listed if each.startswith("hal.")} == there - set(MODELS_MAY_IMPORT)


def test_the_public_names_are_all_there() -> None:
    assert set(hal.__all__) == {*hal._HOME, *hal._MODULES, "__version__", "API_VERSION"}
    for name in hal.__all__:
        assert getattr(hal, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hal.nothing


def test_import_hal_loads_no_runtime_and_an_eager_step_no_compiler(repository: Path) -> None:
    compilers = ("hal.compile", "torch._dynamo", "torch._inductor", "sympy", "triton", "transformers")
    late = (*compilers, "hal.checkpoint", "hal.generation", "hal.execution", "hal.ops", "tokenizers")
    program = f"""
        import sys, hal
        print([name for name in {late} if name in sys.modules])
        with hal.LLM("checkpoints/tiny-python", backend="cpu") as model:
            model.generate("import os", max_new_tokens=1)
        print([name for name in {compilers} if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert result.stdout.split("\n") == ["[]", "[]", ""]
