"""What the emulated CANN refuses and why, read from its sources. The documentation lists it.

A source says where its refusals come from: ``DOCUMENTED("ops-nn: norm/rms_norm/docs/aclnnRmsNorm.md");`` holds for what
is refused after it, up to the end of its block or the next such line. ``src/runtime/source.h`` has all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from .build import SOURCES
from .catalogue import arguments_of, title_of

KINDS = {"DOCUMENTED": "documented", "UNDEFINED": "undefined", "OURS": "ours"}
"""By the word that declares it: CANN or torch_npu demands it; hardware would do anything; it is the emulated CANN's."""

RAISES = {
    "Refused": 0, "NotEmulated": 0, "runtime_error": 0, "require": 1, "fail": 1, "DeviceError": 1, "invalidate": 2,
}  # fmt: skip
"""What refuses, and how many arguments come before the reason."""

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
ORGANISATIONS = {"pytorch": "Ascend", "op-plugin": "Ascend"}
"""Of the repositories at gitcode.com that are not CANN's own."""


@attrs.frozen
class Refusal:
    """One refusal: the file under ``src``, what that is about, the reason, and where it comes from."""

    file: str
    title: str
    reason: str
    kind: str
    source: str


@attrs.frozen
class Reference:
    """A document or a source that demands a refusal."""

    repository: str
    path: str
    revision: str | None = None
    remark: str | None = None

    @property
    def url(self) -> str:
        """Where it can be read."""
        organisation = ORGANISATIONS.get(self.repository, "cann")
        kind = "blob" if "." in self.path.rpartition("/")[2] else "tree"
        return f"https://gitcode.com/{organisation}/{self.repository}/{kind}/{self.revision or 'master'}/{self.path}"


def refusals(sources: Path = SOURCES) -> list[Refusal]:
    """Every refusal in the sources, in their order.

    Raises:
        ValueError: One has no source, or a source is not of the form that :func:`references` reads.
    """
    found: list[Refusal] = []
    for path in sorted([*sources.rglob("*.cpp"), *sources.rglob("*.h")]):
        text, header = path.read_text(encoding="utf-8"), path.with_suffix(".h")
        about = text if text.startswith("//") or not header.exists() else header.read_text(encoding="utf-8")
        found += read(text, path.relative_to(sources).as_posix(), title_of(about))
    return found


def read(text: str, file: str, title: str = "") -> Iterator[Refusal]:
    """The refusals of one file."""
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
                    raise ValueError(f'{what} and has no source: put DOCUMENTED("...") before it')
                yield Refusal(file, title, reason, *scope)


def references(source: str) -> Iterator[Reference]:
    """The documents of a source, which semicolons separate.

    Raises:
        ValueError: One is not written as ``repository: path (remark)``, or ``repository@revision: path (remark)``.
    """
    for each in source.split("; "):
        match = REFERENCE.fullmatch(each)
        if not match:
            raise ValueError(f"{each!r} is not 'repository: path (remark)' or 'repository@revision: path (remark)'")
        yield Reference(match["repository"], match["path"], match["revision"], match["remark"])


def _text(code: str) -> str:
    return "".join(LITERAL.findall(code)).replace('\\"', '"')


def _reason(arguments: list[str]) -> str:
    """The text of a reason, with dots for what it only knows as it runs; empty if there is none."""
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
    """What can be told of a term: the text of a format or a string, the first text of a choice."""
    if inner := re.match(r"(?:std::string|format)\(", piece):
        piece = arguments_of(piece, inner.end())[0][0]
    elif "?" not in piece:
        return "…"
    first = LITERAL.search(piece)
    return PRINTED.sub("…", _text(first[0])) if first else "…"


def _split(text: str) -> Iterator[str]:
    """The terms of a sum."""
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
