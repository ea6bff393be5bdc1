"""The pages of the documentation, their blocks of Python and their commands."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import attrs

from helpers import ROOT
from helpers.distributions import install

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts)]
READMES = [ROOT / folder / "README.md" for folder in ("emulated-cann", "emulated-cuda")]
"""Those of the other distributions."""
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"# (\w+\.py)\n")


@attrs.frozen
class Block:
    """A fenced block of a page, and the line at which its text begins."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1) for found in FENCE.finditer(text)]


def lay_out(page: Path, folder: Path) -> Path:
    """Write a page's script, modules and entry points into ``folder``; lines of the script keep the page's numbers."""
    script: list[str] = []
    for block in blocks(page):
        if block.language == "ini":
            parser = ConfigParser()
            parser.read_string(block.text)
            groups = parser["options.entry_points"].items()
            install(folder, page.stem, "".join(f"[{group}]\n{entries}\n" for group, entries in groups))
        elif block.language == "python" and (module := MODULE.match(block.text)):
            (folder / module[1]).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            script += [""] * (block.line - 1 - len(script)) + block.text.splitlines()
    path = folder / f"{page.stem.lower()}_page.py"
    path.write_text("\n".join(script) + "\n", encoding="utf-8")
    return path


def commands(page: Path) -> list[str]:
    """Return the commands of a page's ``console`` and ``sh`` blocks, in order, without prompts and output."""
    found: list[str] = []
    for block in blocks(page):
        if block.language == "sh":
            found += block.text.replace("\\\n", "").splitlines()
        elif block.language == "console":
            lines = block.text.replace("\\\n", "").splitlines()
            found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return found
