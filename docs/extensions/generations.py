"""The directive ``npu-generations``: the NPUs that the driver knows, and what each takes."""

from __future__ import annotations

from collections.abc import Iterator

from docutils import nodes
from hal.backends.npu.soc import GENERATIONS
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class NpuGenerations(SphinxDirective):
    """A table, a row for each generation."""

    def run(self) -> list[nodes.Node]:
        """Render what soc.py declares."""
        header = ("generation", "SoCs", "dtypes", "compilers", "ATB", "streams for graphs")
        lines = [".. list-table::", "   :header-rows: 1", ""]
        for row in (header, *_rows()):
            lines += [f"   {'*' if column == 0 else ' '} - {cell}" for column, cell in enumerate(row)]
        return self.parse_text_to_nodes("\n".join(lines))


def _rows() -> Iterator[tuple[str, ...]]:
    for each in GENERATIONS:
        yield (
            each.name,
            f"``{each.prefix}*``",
            ", ".join(str(dtype).removeprefix("torch.") for dtype in each.dtypes),
            "eager, graph" if each.graphs else "eager",
            "yes" if each.atb else "no",
            str(each.limits().max_streams) if each.graphs else "-",
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("npu-generations", NpuGenerations)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
