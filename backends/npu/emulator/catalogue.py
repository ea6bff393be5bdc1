"""The list of emulated operations, read from the sources, for the documentation. A test compares it with the build.

A source defines an operation with ``ACLNN(Name)``, or with a local macro that expands to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .build import SOURCES

LITERAL = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'")
DEFINE = re.compile(r"^[ \t]*#define (\w+)\(([^)]*)\)(.*)$", re.MULTILINE)


def families(sources: Path = SOURCES / "ops") -> dict[str, list[str]]:
    """Return the names of aclnn functions by the title of their source; see :func:`title_of`."""
    found: dict[str, list[str]] = {}
    for path in sorted(sources.glob("*.cpp")):
        text = path.read_text(encoding="utf-8")
        names = sorted({f"aclnn{name}" for name in operations(text)})
        if names:
            found.setdefault(title_of(text), []).extend(names)
    return found


def operations(text: str) -> Iterator[str]:
    """Yield the operations that a source defines, after expanding its macros."""
    text = text.replace("\\\n", " ")
    macros = {name: (re.split(r"\s*,\s*", parameters), body) for name, parameters, body in DEFINE.findall(text)}
    text = DEFINE.sub("", text)
    while macros and (call := re.search(rf"\b({'|'.join(macros)})\(", text)):
        parameters, body = macros[call[1]]
        arguments, end = arguments_of(text, call.end())
        for parameter, argument in zip(parameters, arguments, strict=False):
            body = re.sub(rf"\b{re.escape(parameter)}\b", argument.replace("\\", r"\\"), body)
        text = f"{text[: call.start()]} {re.sub(r'[ ]*##[ ]*', '', body)} {text[end:]}"
    yield from re.findall(r"\bACLNN\(\s*(\w+)", text)


def arguments_of(text: str, at: int) -> tuple[list[str], int]:
    """Return the arguments of a call whose parenthesis opens before ``at``, and the end of the call."""
    arguments, depth = [""], 1
    while depth:
        if literal := LITERAL.match(text, at):
            arguments[-1] += literal[0]
            at = literal.end()
            continue
        character = text[at]
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 1:
            arguments.append("")
        elif depth:
            arguments[-1] += character
        at += 1
    return [each.strip() for each in arguments], at


def title_of(text: str) -> str:
    """Return the first sentence of a source's first comment."""
    comment = re.match(r"(?:// .*\n)+", text)
    words = " ".join(line.removeprefix("// ") for line in comment[0].splitlines()) if comment else "Others"
    return re.split(r"(?<=[a-z0-9])[.:;] ", words)[0].rstrip(".")
