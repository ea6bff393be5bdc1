"""The sandbox in which chat templates run: Jinja without Python's attributes, and for a limited time."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0
"""The longest time that a template may take, of a processor."""
MOST = 1 << 24
"""The most characters or elements that one multiplication may make."""


class Refused(Exception):
    """The template refuses the conversation."""


class TooLong(Exception):
    """The template takes too long."""


FAILURES = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
"""What a template raises that fails, beside RecursionError and MemoryError."""


class _Generation(Extension):
    """The tag ``generation``, which marks the assistant's text for training. It changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what the tag holds."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses what takes much memory in one call."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product, a power or a formatted text."""
        if operator == "%":
            _check_format(left)
        elif operator == "**":
            if abs(left) > 1 << 32 or abs(right) > 64:
                raise SecurityError(f"{left} ** {right} is too large")
        else:
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * count > MOST:
                    raise SecurityError(f"a sequence of {len(sequence) * count} elements is too long")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, such as ``ljust``."""
        _check_sizes(args, kwargs)
        _check_format(getattr(getattr(function, "__wrapped__", function), "__self__", None))  # Jinja wraps str.format.
        return super().call(context, function, *args, **kwargs)


def _check_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for each in (*args, *kwargs.values()):
        if isinstance(each, int) and abs(each) > MOST:
            raise SecurityError(f"{each} is too large")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and ("{" in text or "%" in text) and re.search(r"\d{7,}", text):
        raise SecurityError(f"{text[:40]!r} formats too wide a text")


def _bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter_)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_sizes(args, kwargs)
        _check_format(value)
        return filter_(value, *args, **kwargs)

    return bounded


def _refuse(message: str) -> None:
    raise Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Unlike Jinja's filter, it leaves <, > and & as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> tuple[Template, frozenset[str]]:
    """Return a template, and the names that it reads."""
    environment = _environment()
    names = meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), frozenset(names)


def _environment() -> Environment:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda text: datetime.now().astimezone().strftime(text)
    made.filters |= {name: _bounded(made.filters[name]) for name in ("center", "format", "indent")}
    del made.globals["lipsum"]
    return made


def in_time(render: Callable[[], str]) -> str:
    """Run a template's code, and interrupt it after :data:`SECONDS`."""
    end = time.thread_time() + SECONDS
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise TooLong(f"takes longer than {SECONDS:g} seconds")
        return trace

    sys.settrace(trace)
    try:
        return render()
    finally:
        sys.settrace(before)
