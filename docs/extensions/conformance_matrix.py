"""The directive ``conformance-matrix``: how many cases the conformance suite has for each driver, by area."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

BACKENDS: dict[str, dict[str, Any]] = {"cpu": {}, "npu": {"options": {"emulator": True}}, "cuda": {}}
"""The drivers that come with hal, and how each is opened on a machine without its hardware."""

# In a process of its own each, because an emulated device is for the whole of one.
PROGRAM = """
import json, sys
from collections import Counter
from hal.testing import Conformance

cases = Conformance(backend=sys.argv[1], config=json.loads(sys.argv[2])).cases
print(json.dumps(Counter(case.area for case in cases) if len(cases) > 1 else {}))
"""


class ConformanceMatrix(SphinxDirective):
    """A table: a row for each area, a column for each driver; "n/a" where the driver cannot run on this machine."""

    def run(self) -> list[nodes.Node]:
        """Make the cases, and count them."""
        with ThreadPoolExecutor() as pool:
            counts = dict(zip(BACKENDS, pool.map(counted, BACKENDS, BACKENDS.values()), strict=True))
        areas = sorted({area for each in counts.values() for area in each})
        lines = [".. list-table::", "   :header-rows: 1", ""]
        rows = [["area", *counts]]
        rows += [[area, *(str(each.get(area, 0)) if each else "n/a" for each in counts.values())] for area in areas]
        rows += [["all", *(str(sum(each.values())) if each else "n/a" for each in counts.values())]]
        for row in rows:
            lines += [f"   {'*' if column == 0 else ' '} - {cell}" for column, cell in enumerate(row)]
        return self.parse_text_to_nodes("\n".join(lines))


def counted(name: str, config: dict[str, Any]) -> dict[str, int]:
    """Cases by area; nothing where the driver cannot be opened."""
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", PROGRAM, name, json.dumps(config)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=600)
    counts: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return counts


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("conformance-matrix", ConformanceMatrix)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
