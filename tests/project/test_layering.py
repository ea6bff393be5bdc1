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
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from helpers import console_script
from helpers.thorough import AGAIN, thorough

import hal

VENDORS = frozenset(
    {"torch_npu", "torchair", "emulated_cann", "flashinfer", "triton", "vllm", "sglang", "transformers"}
)
VENDOR_NAMES = frozenset({"torch.npu", "torch.cuda", "torch.xpu", "torch.mps"})
# In names, and in strings that are names. Sentences may mention a vendor as an example.
VENDOR_WORD = re.compile(
    r"(?<![a-z])(npu|cuda|ascend|cann|atb|mkldnn|onednn|xpu|mps|rocm|hip|nvidia|huawei)", re.IGNORECASE
)
CIRCLES = """
from graphlib import CycleError, TopologicalSorter
import grimp
graph = grimp.build_graph("hal", "backends", "models", cache_dir=None)
imports = {each: set(graph.find_modules_directly_imported_by(each)) for each in graph.modules}
while True:
    try:
        TopologicalSorter(imports).prepare()
        break
    except CycleError as error:
        cycle = error.args[1]
        print(*reversed(cycle), sep=" -> ")
        imports[cycle[1]].remove(cycle[0])
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


def circles(root: Path) -> list[str]:
    """Return the modules of each import cycle, including imports for types and inside functions."""
    command = [sys.executable, "-c", CIRCLES]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


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


def append(root: Path, violations: Iterable[tuple[str, str]]) -> None:
    for file, lines in violations:
        with (root / file).open("a", encoding="utf-8") as source:
            source.write(f"\n{lines}\n")


def test_the_syntax_tree_shows_violations(copy: Path) -> None:
    planted = {
        ("models/qwen3.py", "import torch_npu"): "imports the vendor package torch_npu",
        ("models/qwen3.py", "from flashinfer import rope"): "imports the vendor package flashinfer",
        ("models/qwen3.py", "from hal import generation"): "imports hal.generation, which models may not",
        ("models/qwen3.py", "import numpy"): "imports numpy, which models may not",
        ("models/qwen3.py", "import torch; torch.npu.synchronize()"): "names torch.npu",
        ("hal/nn/linear.py", "torch.cuda.is_available()"): "names torch.cuda",
        ("hal/nn/linear.py", "weight.is_mkldnn"): "knows a vendor's is_mkldnn",
        ("hal/config/settings.py", "ALIASES = {'npugraph': 'graph'}"): "knows a vendor's npugraph",
        ("hal/drivers/compiler.py", "NAMES = ['atb._paged_attention']"): "knows a vendor's atb._paged_attention",
        ("hal/execution/runner.py", "def f():\n    import torch_npu"): "imports the vendor package torch_npu",
        ("hal/engines/vllm/worker.py", "import torch_npu"): "imports the vendor package torch_npu",
        ("hal/execution/runner.py", "import vllm"): "imports the vendor package vllm",
    }
    append(copy, planted)
    found = [re.sub(r":\d+ ", " ", each) for each in violations(copy)]
    assert [each for each in planted.items() if f"{each[0][0]} {each[1]}" not in found] == []


@thorough(AGAIN)
def test_import_linter_shows_violations(copy: Path) -> None:
    planted = {
        ("models/qwen3.py", "import torch_npu"): "models.qwen3 -> torch_npu",
        ("models/qwen3.py", "import hal.drivers.backend"): "models.qwen3 -> hal.drivers.backend",
        ("models/qwen3.py", "import hal.compile.trace"): "models.qwen3 -> hal.compile.trace",
        ("hal/drivers/registry.py", "import backends.cpu"): "hal.drivers.registry -> backends.cpu",
        ("hal/nn/linear.py", "import models.qwen3"): "hal.nn.linear -> models.qwen3",
        ("hal/ops/norm.py", "import hal.drivers.backend"): "hal.ops.norm -> hal.drivers.backend",
        ("hal/device/graph.py", "from hal import ops"): "hal.device.graph -> hal.ops",
        ("backends/cpu/driver.py", "import models"): "backends.cpu.driver -> models",
    }
    append(copy, planted)
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout
    assert [each for each in planted.values() if each not in result.stdout] == []
    for contract in (
        "Models import hal.ops, hal.nn, hal.step and hal.config only",
        "The core imports no backend, no model and no vendor",
        "The core is layered",
        "A backend imports no other backend, and no model",
    ):
        assert f"{contract} BROKEN" in result.stdout


def test_no_modules_import_each_other(repository: Path) -> None:
    assert circles(repository) == []


def test_circles_are_found(copy: Path) -> None:
    typed = "if TYPE_CHECKING:\n    from hal.ops.declaration.operation import Operation"
    planted = {
        ("hal/device/capture_checks.py", "from hal.device.graph import Graph"): "hal.device.graph",
        ("hal/ops/declaration/torch_library.py", typed): "hal.ops.declaration.operation",
        ("backends/cpu/launch.py", "def late():\n    from .tape import Tape"): "backends.cpu.tape",
    }
    append(copy, planted)
    found = [each.split(" -> ") for each in circles(copy)]
    assert all(each[0] == each[-1] for each in found)
    for (file, _), other in planted.items():
        module = file.removesuffix(".py").replace("/", ".")
        assert any({module, other} <= set(each) for each in found), (module, found)


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
