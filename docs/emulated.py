"""The directive ``emulated-operations``: what the emulated CANN has, by family."""

from __future__ import annotations

from docutils import nodes
from hal.backends.npu.emulator.build import SOURCES
from hal.backends.npu.emulator.catalogue import families
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class EmulatedOperations(SphinxDirective):
    """A definition list: each family, and its functions."""

    def run(self) -> list[nodes.Node]:
        """Read the sources, and render what they declare."""
        for path in (SOURCES / "ops").glob("*.cpp"):
            self.env.note_dependency(str(path))
        lines = []
        for title, names in families().items():
            lines += [title, "   " + ", ".join(f"``{name}``" for name in names), ""]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("emulated-operations", EmulatedOperations)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
