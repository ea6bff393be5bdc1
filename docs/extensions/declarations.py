"""Directives that render what hal declares in code, so that no page can say something else.

``operations`` lists every operation of ``hal.ops``; ``config-keys`` lists the keys of an attrs configuration class;
``driver-api`` lists what each version of the driver API added. All write reStructuredText, so a Markdown page uses them
inside ``{eval-rst}``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import attrs
import torch
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

from hal import ops
from hal.drivers import registry
from hal.drivers.driver import ADDED
from hal.errors import HalError
from hal.ops import Operation
from hal.version import API_VERSION

INDENT = "   "


class Operations(SphinxDirective):
    """Every declared operation by family, both in alphabetical order, and the drivers that have a kernel for it."""

    def run(self) -> list[nodes.Node]:
        """Render the catalogue."""
        known = (each for each in ops.catalogue().values() if each.namespace == "hal")
        catalogue = sorted(known, key=lambda each: (_family(each), each.name))
        coverage = _coverage()
        lines = [".. py:currentmodule:: hal.ops", "", *_coverage_table(catalogue, coverage)]
        for family, operations in groupby(catalogue, key=_family):
            lines += ["", f".. rubric:: {family}", ""]
            for operation in operations:
                lines += self._describe(operation, coverage)
        return self.parse_text_to_nodes("\n".join(lines))

    def _describe(self, operation: Operation, coverage: dict[str, frozenset[str] | None]) -> Iterator[str]:
        yield f".. py:function:: {operation.name}{_signature(operation)}"
        yield f"{INDENT}:module: hal.ops"
        yield ""
        docstring = inspect.cleandoc(operation.body.__doc__ or "")
        yield from _indented(str(GoogleDocstring(docstring, self.config, what="function")).splitlines())
        yield ""
        facts = {
            "schema": f"``{operation.schema}``",
            "axes": _declared(operation.axes),
            "dtypes": _declared(operation.dtypes),
            "rowwise": _code([operation.rowwise] if operation.rowwise else []),
            "state": _code(operation.state),
            "mutates": _code(operation.mutates),
            "host": _code(operation.host),
            "weights": _code(operation.weights),
            "prepared as": "" if operation.prepared_as == operation.name else f":func:`{operation.prepared_as}`",
            "fuses": ", ".join(f":func:`{name}`" for name in _parts(operation)) if operation.fused else "",
            "tolerance": "; ".join(
                f"{str(dtype).removeprefix('torch.')}: relative {relative:g}, absolute {absolute:g}"
                for dtype, (relative, absolute) in operation.tolerance.items()
            ),
            "int8 off by one": "; ".join(
                f"{str(dtype).removeprefix('torch.')}: {share:.0%}" for dtype, share in operation.off_by_one.items()
            ),
            "kernels": _code([name for name, kernels in coverage.items() if kernels and operation.name in kernels])
            or "none",
        }
        yield from _indented(_table([[key, value] for key, value in facts.items() if value], widths=(22, 78)))
        yield ""


class ConfigKeys(SphinxDirective):
    """The keys of an attrs class, given by its full name: type, default, meaning, environment variable.

    ``table`` is the table that holds the keys. ``variables`` is the prefix of their environment variables, where this
    is not ``HAL_`` and the table's name.
    """

    required_arguments = 1
    option_spec: ClassVar = {"table": directives.unchanged, "variables": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Render the class."""
        module, _, name = self.arguments[0].rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        meanings, types = _attributes(cls), get_type_hints(cls)
        path = self.options["table"].split(".") if "table" in self.options else []
        prefix = self.options.get("variables", "HAL_" + "".join(f"{each.upper()}__" for each in path))
        lines = [".. py:currentmodule:: hal", ""]
        for field in attrs.fields(cls):
            lines += [
                f".. confval:: {'.'.join([*path, field.name])}",
                f"{INDENT}:type: {_kind(types[field.name])}",
                f"{INDENT}:default: {_default(field)}",
                "",
                f"{INDENT}{_sentence(meanings[field.name])}",
                "",
                f"{INDENT}Environment variable: ``{prefix}{field.name.upper()}``",
                "",
            ]
        return self.parse_text_to_nodes("\n".join(lines))


class DriverApi(SphinxDirective):
    """What each minor version of the driver API added."""

    def run(self) -> list[nodes.Node]:
        """Render :data:`hal.drivers.driver.ADDED`."""
        rows = [["driver API", "added, with defaults"], [f"{API_VERSION[0]}.0", "nothing, as the first version"]]
        rows += [[f"{major}.{minor}", _code(names)] for (major, minor), names in sorted(ADDED.items())]
        return self.parse_text_to_nodes("\n".join(_table(rows, widths=(15, 85), header=True)))


KERNELS = "import json, sys, hal; print(json.dumps(sorted(hal.open(json.loads(sys.argv[1])).kernels)))"
EMULATED = {"emulator": True}
"""The option that drivers have an emulated device by, if they have one."""


def _coverage() -> dict[str, frozenset[str] | None]:
    """By driver, the operations it has kernels for; None for one that cannot run where the page is built.

    A driver that can on an emulated device only is opened on that, in a process of its own.
    """
    return {each.name: _kernels_of(each) for each in registry.candidates()}


@cache
def _kernels_of(candidate: registry.Candidate) -> frozenset[str] | None:
    driver = candidate.driver
    if driver is None:
        return None
    try:
        if candidate.probe.available:
            return frozenset(driver.open({}).kernels)
        if not driver.probe_for(EMULATED).available:
            return None
    except HalError:  # an option that it does not have, for one
        return None
    settings = json.dumps({"backend": candidate.name, "options": EMULATED})
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", KERNELS, settings]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=600)
    return frozenset(json.loads(result.stdout.splitlines()[-1]))


def _coverage_table(catalogue: list[Operation], coverage: dict[str, frozenset[str] | None]) -> list[str]:
    def cell(kernels: frozenset[str] | None, operation: Operation) -> str:
        if kernels is None:
            return "unknown"
        return "kernel" if operation.name in kernels else "composed" if operation.fused else "reference"

    rows = [["operation", *coverage]]
    for operation in sorted(catalogue, key=lambda each: each.name):
        rows.append([f":func:`{operation.name}`", *(cell(kernels, operation) for kernels in coverage.values())])
    return _table(rows, header=True)


def _family(operation: Operation) -> str:
    """The first line of its module's docstring."""
    return _first_line(sys.modules[operation.body.__module__].__doc__).rstrip(".")


def _signature(operation: Operation) -> str:
    """The signature as written, which keeps ``Tensor`` short."""

    def written(annotation: Any) -> str:
        return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    parameters = [
        f"{p.name}: {written(p.annotation)}" + ("" if p.default is p.empty else f" = {p.default!r}")
        for p in operation.signature.parameters.values()
    ]
    return f"({', '.join(parameters)}) -> {written(operation.signature.return_annotation)}"


def _parts(operation: Operation) -> list[str]:
    """The smaller operations that a fused operation's body names, in order."""
    names: list[str] = []

    def note(part: Operation) -> Any:
        names.append(part.name)
        return part.function

    operation.rebound(note)
    return list(dict.fromkeys(names))


def _attributes(cls: type) -> dict[str, str]:
    """The ``Attributes:`` section of a docstring, by name."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _sentence(text: str) -> str:
    """The text with a capital first letter, unless it begins with a literal or a role."""
    return text[:1].upper() + text[1:]


def _kind(annotation: Any) -> str:
    """A type as someone who writes JSON or TOML sees it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"``{json.dumps(each)}``" for each in arguments)
    if origin in (Union, UnionType):
        return " or ".join("null" if each is type(None) else _kind(each) for each in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}s"
    if attrs.has(annotation) or origin is dict:
        return "table"
    return {str: "string", int: "integer", float: "number", bool: "boolean"}[annotation]


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return "``{}``"
    return f"``{json.dumps(field.default)}``"


def _table(rows: list[list[str]], *, widths: tuple[int, ...] | None = None, header: bool = False) -> list[str]:
    lines = [".. list-table::", f"{INDENT}:header-rows: {int(header)}"]
    if widths:
        lines.append(f"{INDENT}:widths: {' '.join(map(str, widths))}")
    lines.append("")
    for row in rows:
        lines += [
            f"{INDENT}{'-' if column else '* -'} {cell}".replace(f"{INDENT}- ", f"{INDENT}  - ", 1)
            for column, cell in enumerate(row)
        ]
    return lines


def _indented(lines: list[str]) -> Iterator[str]:
    return (f"{INDENT}{line}" if line else "" for line in lines)


def _declared(entries: Mapping[str, Any]) -> str:
    """Axes or dtypes, by argument."""

    def written(entry: Any) -> str:
        if isinstance(entry, tuple):
            return ", ".join(map(written, entry))
        return str(entry).removeprefix("torch.") if isinstance(entry, (str, torch.dtype)) else repr(entry)

    return "; ".join(f"{name}: ``{written(entry)}``" for name, entry in entries.items())


def _code(names: Any) -> str:
    return ", ".join(f"``{name}``" for name in names)


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0]


def _keep_colon(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in a property's first line for its type; it looks no further than that.

    A first line that is an empty comment satisfies it.
    """
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def _name_factories(app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str) -> Any:
    """attrs shows a default that a factory makes as ``NOTHING``."""
    return (signature.replace("= NOTHING", "= ..."), returns) if signature else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.connect("autodoc-process-docstring", _keep_colon, priority=400)  # before napoleon, which is at 500
    app.connect("autodoc-process-signature", _name_factories)
    app.add_directive("operations", Operations)
    app.add_directive("config-keys", ConfigKeys)
    app.add_directive("driver-api", DriverApi)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
