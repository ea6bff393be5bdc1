"""Directives that say what works where: ``features-by-way`` from marks of tests, ``features-by-backend`` from drivers.

A test that shows a feature has the mark ``shows(FEATURE, WAY, ...)``: ``hal.LLM``, ``the command``, ``vLLM`` and so on.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

TESTS = Path(__file__).parents[2] / "tests"
WAYS = ("hal.LLM", "the command", "hal serve", "vLLM", "SGLang", "transformers")
MARK = "shows"
BACKENDS: dict[str, dict[str, Any]] = {"cpu": {}, "npu": {"options": {"emulator": True}}, "cuda": {}}

# In a process of its own each, because an emulated device is for the whole of one.
PROGRAM = """
import json, sys
import hal
from hal.errors import HalError
from hal.ops import Form, catalogue

try:
    backend = hal.open({"backend": sys.argv[1], **json.loads(sys.argv[2])})
except HalError:
    print("{}")
else:
    kernels = backend.kernels.get("linear")
    fused = [name for name in catalogue() if name in backend.kernels]
    print(json.dumps({
        "dtypes": ", ".join(str(each).removeprefix("torch.") for each in backend.limits.dtypes),
        "compilers": ", ".join(backend.compilers),
        "operations with kernels": f"{len(fused)} of {len(catalogue())}",
        "head dimensions": ", ".join(map(str, backend.limits.head_dims)) or "any",
        "block sizes of the cache": ", ".join(map(str, backend.limits.block_sizes)) or "any",
        "several devices": backend.distributed or "no",
        **{
            part: "kernels" if all(name in backend.kernels for name in names) else "composed"
            for part, names in json.loads(sys.argv[3]).items()
        },
        **{
            part: "kernels" if kernels is not None and kernels.taking(Form(**form)) else "composed"
            for part, form in json.loads(sys.argv[4]).items()
        },
    }))
"""
PARTS = {
    "attention with a paged cache": ["paged_attention", "store_kv_cache"],
    "latent attention": ["latent_attention", "store_latent_cache"],
    "a cache in 8 bits": ["quantized_paged_attention", "store_quantized_kv_cache"],
    "attention among the patches of images": ["packed_attention"],
    "mixtures of experts": ["topk_route", "expert_mlp"],
    "recurrent layers": ["causal_conv1d", "gated_delta_rule"],
    "sparse attention": ["attend_selected", "select_keys"],
}
"""By the part of a model, the operations that it consists of."""
FORMS: dict[str, dict[str, Any]] = {
    "int8 weights": {"numbers": "int8"},
    "int8 weights and activations": {"numbers": "int8", "inputs": "int8"},
    "int4 weights in groups": {"numbers": "int4", "columns": 32},
    "int4 weights in groups and int8 activations": {"numbers": "int4", "columns": 32, "inputs": "int8"},
    "float8 weights in blocks": {"numbers": "float8", "rows": 128, "columns": 128},
    "float8 weights and activations": {"numbers": "float8", "inputs": "float8"},
    "float4 weights in groups (MXFP4)": {"numbers": "float4", "columns": 32, "scales": "e8m0"},
    "float4 weights with second scales (NVFP4)": {"numbers": "float4", "columns": 16, "scales": "e4m3", "second": True},
}
"""Forms of weights, by what the table calls them."""


def shown(tests: Path = TESTS) -> dict[str, dict[str, list[str]]]:
    """Return the tests that show each feature, by feature and way in."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(tests.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for feature, *ways in _marks(node):
                    for way in ways:
                        if way not in WAYS:
                            raise ValueError(f"{file}, {node.name}: {way!r} is none of {', '.join(WAYS)}")
                        name = f"{file.relative_to(tests.parent)}::{node.name}"
                        found.setdefault(feature, {}).setdefault(way, []).append(name)
    return found


def _marks(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[list[str]]:
    for each in function.decorator_list:
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == MARK:
            yield [str(ast.literal_eval(argument)) for argument in each.args]


def opened(name: str, config: dict[str, Any]) -> dict[str, str]:
    """Return what a backend declares; nothing where its driver cannot be opened."""
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", PROGRAM, name, json.dumps(config), json.dumps(PARTS), json.dumps(FORMS)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=600)
    declared: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return declared


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        lines += [f"   {'*' if column == 0 else ' '} - {cell}" for column, cell in enumerate(row)]
    return "\n".join(lines)


class FeaturesByWay(SphinxDirective):
    """A row for each feature, a column for each way in: how many tests show it there."""

    def run(self) -> list[nodes.Node]:
        """Read the marks of the tests."""
        for file in TESTS.rglob("test_*.py"):
            self.env.note_dependency(str(file))
        rows: list[list[str]] = [["feature", *WAYS]]
        for feature, ways in sorted(shown().items()):
            rows.append([feature, *("yes" if way in ways else "-" for way in WAYS)])
        return self.parse_text_to_nodes(_table(rows))


class FeaturesByBackend(SphinxDirective):
    """A row for each property, a column for each driver; "n/a" where the driver cannot run on this machine."""

    def run(self) -> list[nodes.Node]:
        """Open the backends."""
        with ThreadPoolExecutor() as pool:
            declared = dict(zip(BACKENDS, pool.map(opened, BACKENDS, BACKENDS.values()), strict=True))
        properties = list(dict.fromkeys(name for each in declared.values() for name in each))
        rows = [["property", *declared]]
        rows += [[name, *(each.get(name, "n/a") for each in declared.values())] for name in properties]
        return self.parse_text_to_nodes(_table(rows))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("features-by-way", FeaturesByWay)
    app.add_directive("features-by-backend", FeaturesByBackend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
