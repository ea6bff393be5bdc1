"""The lists of emulated operations and of refusals, read from the C++ code, for the documentation.

A source defines an operation with ``ACLNN(Name)``, or with a local macro that expands to it. A statement such as
``DOCUMENTED("ops-nn: norm/rms_norm/docs/aclnnRmsNorm.md");`` names the source of the refusals after it, up to the
end of its block or the next such statement. ``src/runtime/source.h`` defines the statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from .build import SOURCES

QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'")
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
        if literal := QUOTED.match(text, at):
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


KINDS = {"DOCUMENTED": "documented", "UNDEFINED": "undefined", "OURS": "ours"}
"""Kinds by macro: CANN or torch_npu documents it; hardware's behavior is undefined; the emulated CANN requires it."""

RAISES = {
    "Refused": 0,
    "TilingRefused": 0,
    "NotEmulated": 0,
    "runtime_error": 0,
    "require": 1,
    "require_tiling": 1,
    "fail": 1,
    "DeviceError": 1,
    "HcclError": 1,
    "invalidate": 2,
}
"""Functions that refuse, and the number of arguments before the reason."""

TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[{}]"
    rf"|\b(?P<word>{'|'.join((*KINDS, *RAISES))})\((?!\))",
    re.DOTALL,
)
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
PRINTED = re.compile(r"%(?:-?\d*\.?\d*)(?:l|ll|z|j)?[a-zA-Z]")
REFERENCE = re.compile(
    r"(?P<repository>[a-z-]+)(?:@(?P<revision>[\w.-]+))?: (?P<path>[^\s()]+)(?: \((?P<remark>.+)\))?"
)
ORGANIZATIONS = {"pytorch": "Ascend", "op-plugin": "Ascend"}
"""Organizations at gitcode.com of the repositories outside ``cann``."""


@attrs.frozen
class Refusal:
    """A refusal.

    Attributes:
        file: the path of its file, relative to ``src``.
        title: the title of the file.
        reason: the text of the refusal.
        kind: one of :data:`KINDS`.
        source: the argument of the statement that names the source.
    """

    file: str
    title: str
    reason: str
    kind: str
    source: str


@attrs.frozen
class Reference:
    """A document or source file that justifies a refusal."""

    repository: str
    path: str
    revision: str | None = None
    remark: str | None = None

    @property
    def url(self) -> str:
        """The address of the file: at gitcode.com, or of a page of the documentation at hiascend.com."""
        if self.repository == "hiascend":
            return f"https://www.hiascend.com/document/detail/{self.path}"
        organization = ORGANIZATIONS.get(self.repository, "cann")
        kind = "blob" if "." in self.path.rpartition("/")[2] else "tree"
        return f"https://gitcode.com/{organization}/{self.repository}/{kind}/{self.revision or 'master'}/{self.path}"


def refusals(sources: Path = SOURCES) -> list[Refusal]:
    """Return all refusals, in the order of the sources.

    Raises:
        ValueError: a refusal has no source, or :func:`references` cannot parse a source.
    """
    found: list[Refusal] = []
    for path in sorted([*sources.rglob("*.cpp"), *sources.rglob("*.h")]):
        text, header = path.read_text(encoding="utf-8"), path.with_suffix(".h")
        about = text if text.startswith("//") or not header.exists() else header.read_text(encoding="utf-8")
        found += read(text, path.relative_to(sources).as_posix(), title_of(about))
    return found


def read(text: str, file: str, title: str = "") -> Iterator[Refusal]:
    """Yield the refusals of a file."""
    text = text.replace("\\\n", "  ")
    scopes: list[tuple[str, str] | None] = [None]
    at = 0
    while token := TOKEN.search(text, at):
        at = token.end()
        if token[0] == "{":
            scopes.append(scopes[-1])
        elif token[0] == "}":
            scopes.pop()
        elif word := token["word"]:
            arguments, end = arguments_of(text, at)
            if word in KINDS:
                source = _text(arguments[0])
                if text.startswith(f"#define {word}", token.start() - len("#define ")):
                    continue
                if word == "DOCUMENTED":
                    list(references(source))
                scopes[-1] = (KINDS[word], source)
                at = end
            elif reason := _reason(arguments[RAISES[word] :]):
                scope = ("ours", "not emulated") if word == "NotEmulated" else scopes[-1]
                if scope is None:
                    line = text.count("\n", 0, token.start()) + 1
                    what = f'{file}:{line} refuses "{reason}"'
                    raise ValueError(f'{what} without a source: put DOCUMENTED("...") before it')
                yield Refusal(file, title, reason, *scope)


def references(source: str) -> Iterator[Reference]:
    """Yield the documents of a source, which are separated by semicolons.

    Raises:
        ValueError: a document does not have the form ``repository: path (remark)``, with an optional ``@revision``
            after the repository.
    """
    for each in source.split("; "):
        match = REFERENCE.fullmatch(each)
        if not match:
            raise ValueError(f"{each!r} is not 'repository: path (remark)' or 'repository@revision: path (remark)'")
        yield Reference(match["repository"], match["path"], match["revision"], match["remark"])


def _text(code: str) -> str:
    return "".join(LITERAL.findall(code)).replace('\\"', '"')


def _reason(arguments: list[str]) -> str:
    """Return the text of a reason, with an ellipsis for each value known only at run time; empty if there is none."""
    text = ", ".join(arguments)
    if not re.search(r'"[^"]*[A-Za-z]{2}[^"]*"', text):
        return ""
    if formatted := re.match(r"format\(", text):
        text = arguments_of(text, formatted.end())[0][0]
        return PRINTED.sub("…", _text(text)).strip()
    pieces = [piece.strip() for piece in _split(text)]
    words = [_text(piece) if LITERAL.match(piece) else _printed(piece) for piece in pieces]
    return re.sub(r"(?:… ?)+", lambda dots: "… " if dots[0].endswith(" ") else "…", "".join(words)).strip()


def _printed(piece: str) -> str:
    """Return the text of a term: of a format or string, or the first text of a conditional; otherwise an ellipsis."""
    if inner := re.match(r"(?:std::string|format)\(", piece):
        piece = arguments_of(piece, inner.end())[0][0]
    elif "?" not in piece:
        return "…"
    first = LITERAL.search(piece)
    return PRINTED.sub("…", _text(first[0])) if first else "…"


def _split(text: str) -> Iterator[str]:
    """Yield the terms of a sum."""
    depth, start, at = 0, 0, 0
    while at < len(text):
        if literal := LITERAL.match(text, at):
            at = literal.end()
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if text[at] == "+" and depth == 0:
            yield text[start:at]
            start = at + 1
        at += 1
    yield text[start:]
