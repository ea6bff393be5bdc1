"""Directives that list what the emulated CANN has and refuses, from its sources.

``emulated-operations`` lists its operations by family; ``emulated-refusals`` lists its refusals of one kind, with the
documents that demand them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from docutils import nodes
from emulated_cann.build import SOURCES
from emulated_cann.read_refusals import ORGANIZATIONS, Refusal, families, references, refusals
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


class EmulatedRefusals(SphinxDirective):
    """Tables of refusals, one for each source file: the reason, and where it comes from.

    The argument is ``cann`` or ``torch_npu`` for what their documents demand, ``undefined``, or ``ours``.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Read the sources, and render the refusals of the kind."""
        for path in SOURCES.rglob("*.*"):
            self.env.note_dependency(str(path))
        wanted = [each for each in refusals() if origin(each) == self.arguments[0]]
        lines = []
        for (file, title), group in groupby(wanted, key=lambda each: (each.file, each.title)):
            lines += [
                "",
                f".. rubric:: {_literal(title)}",
                "",
                f"``emulated-cann/emulated_cann/src/{file}``",
                "",
                *_table(group),
            ]
        return self.parse_text_to_nodes("\n".join(lines))


def origin(refusal: Refusal) -> str:
    """Whom a refusal is from: ``cann``, ``torch_npu``, ``undefined`` or ``ours``."""
    if refusal.kind != "documented":
        return refusal.kind
    return "torch_npu" if next(references(refusal.source)).repository in ORGANIZATIONS else "cann"


def _table(group: Iterator[Refusal]) -> Iterator[str]:
    yield from (".. list-table::", "   :widths: 55 45", "   :header-rows: 1", "")
    yield from ("   * - error", "     - source or reason")
    for each in dict.fromkeys(group):
        yield f"   * - {_literal(each.reason)}"
        yield f"     - {_because(each)}"
    yield ""


def _because(refusal: Refusal) -> str:
    if refusal.kind != "documented":
        return _literal(refusal.source)
    links = []
    for each in references(refusal.source):
        name = f"{each.repository}: {each.path.rpartition('/')[2]}" + (f" of {each.revision}" if each.revision else "")
        links.append(f"`{name} <{each.url}>`__" + (f" ({each.remark})" if each.remark else ""))
    return ", ".join(links)


def _literal(text: str) -> str:
    """The text, with what reStructuredText would read as markup escaped."""
    return "".join(f"\\{character}" if character in "\\*`_|" else character for character in text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("emulated-operations", EmulatedOperations)
    app.add_directive("emulated-refusals", EmulatedRefusals)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
