"""Tests that editors and type checkers see every operation, layer and public name with its signature and docstring.

jedi completes names in editors and shells. Like mypy, it reads the sources and runs none of them.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import jedi
import pytest
import torch
from helpers.thorough import AGAIN, LONG, thorough

import hal
from hal import nn, ops

OPERATIONS = {name: each for name, each in ops.catalogue().items() if getattr(ops, name, None) is each.function}
LAYERS = [
    name
    for name, each in vars(nn).items()
    if isinstance(each, type) and issubclass(each, torch.nn.Module) and each.forward is not torch.nn.Module.forward
]
Script = Callable[[str], jedi.Script]


@pytest.fixture(scope="module")
def script(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """Return jedi's analysis of a source in the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jedi.settings, "cache_directory", str(tmp_path_factory.mktemp("jedi")))
        # A subprocess, as in editors: pytest's import hook in this process would hide the sources.
        project, environment = jedi.Project(repository), jedi.create_environment(sys.executable, safe=False)
        yield lambda source: jedi.Script(source, project=project, environment=environment)


@pytest.mark.parametrize("source", ["import hal\nhal.ops.", "from hal import ops\nops."])
def test_editors_complete_operations(script: Script, source: str) -> None:
    assert set(OPERATIONS) <= {each.name for each in script(source).complete()}


def test_editors_complete_the_public_names(script: Script) -> None:
    assert set(hal.__all__) - {"__version__"} <= {each.name for each in script("import hal\nhal.").complete()}


@thorough(LONG)
def test_editors_have_each_operations_signature_and_docstring(script: Script) -> None:
    for name, operation in OPERATIONS.items():
        (found,) = script(f"import hal\nhal.ops.{name}(").get_signatures()
        expected = inspect.signature(operation.body)
        assert [each.name for each in found.params] == list(expected.parameters), name
        for shown, parameter in zip(found.params, expected.parameters.values(), strict=True):
            assert shown.to_string().startswith(f"{shown.name}: {parameter.annotation}"), name
        assert found.to_string().endswith(f" -> {expected.return_annotation}"), name
        assert found.docstring(raw=True) == inspect.getdoc(operation.body), name


def test_editors_have_the_docstrings_of_the_public_names(script: Script) -> None:
    for name in hal.__all__:
        value = getattr(hal, name)
        if isinstance(value, type) or inspect.isfunction(value):
            (found,) = script(f"import hal\nhal.{name}").help()
            assert found.docstring(raw=True) == inspect.getdoc(value), name


@thorough(LONG)
def test_editors_know_what_a_layer_and_open_give(script: Script) -> None:
    (found,) = script("import hal, torch\nhal.nn.Linear(4, 4)(torch.ones(4))").infer()
    assert found.full_name == "torch._tensor.Tensor"
    assert {"ops", "limits", "close"} <= {each.name for each in script("import hal\nhal.open('cpu').").complete()}


@thorough(AGAIN)
def test_type_checkers_know_operations_layers_and_public_names(repository: Path, tmp_path: Path) -> None:
    public = [name for name in hal.__all__ if not inspect.ismodule(getattr(hal, name))]
    probes = [
        *(f"hal.ops.{name}" for name in OPERATIONS),
        *(f"a_{name}.__call__" for name in LAYERS),
        *(f"hal.{name}" for name in public),
    ]
    layers = [f"a_{name}: hal.nn.{name}" for name in LAYERS]
    lines = ["import hal, hal.nn, hal.ops", *layers, *(f"reveal_type({probe})" for probe in probes)]
    result = mypy(repository, tmp_path, lines)
    revealed = dict(re.findall(r'probe\.py:(\d+): note: Revealed type is "(.*)"', result.stdout))
    types = {probe: revealed[str(line)] for line, probe in enumerate(probes, 2 + len(layers))}
    assert result.returncode == 0, result.stdout
    assert [probe for probe, kind in types.items() if kind == "Any" or kind.endswith("-> Any")] == []
    for name, operation in OPERATIONS.items():
        header = types[f"hal.ops.{name}"].removeprefix("def (").partition(") -> ")[0]
        assert re.findall(r"(\w+): ", header) == list(operation.signature.parameters), name


@thorough(LONG)
def test_type_checkers_find_a_wrong_call(repository: Path, tmp_path: Path) -> None:
    lines = [
        "import torch",
        "from hal import nn, ops",
        "class Block(torch.nn.Module):",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        "        self.norm, self.up = nn.RMSNorm(4, 1e-6), nn.Linear(4, 4)",
        "    def forward(self, x: torch.Tensor) -> torch.Tensor:",
        "        return self.up(self.norm(x))",  # without a cast and without "returning Any"
        'ops.rms_norm(torch.ones(4), torch.ones(4), "small")',
        "ops.rms_norm(torch.ones(4), weight=torch.ones(4))",
        "nn.Linear(4, 4)(4)",
    ]
    result = mypy(repository, tmp_path, lines)
    assert re.findall(r"probe\.py:(\d+): error", result.stdout) == ["9", "10", "11"], result.stdout


def mypy(repository: Path, folder: Path, lines: list[str]) -> subprocess.CompletedProcess[str]:
    """Check a program with the project's settings."""
    probe = folder / "probe.py"
    probe.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(probe)]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


def test_annotations_resolve_at_run_time() -> None:
    hints = typing.get_type_hints(ops.linear)
    assert hints["x"] is torch.Tensor
    assert hints["bias"] == torch.Tensor | None
    assert inspect.signature(ops.rms_norm).return_annotation is torch.Tensor


def test_prompts_complete_a_backends_operations(cpu: hal.Backend) -> None:
    assert set(ops.catalogue()) <= set(dir(cpu.ops))
    assert inspect.getdoc(cpu.ops.rms_norm) == inspect.getdoc(ops.rms_norm)
