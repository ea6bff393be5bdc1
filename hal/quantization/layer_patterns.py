"""Regular expressions over names of layers, matched in time that is bounded, because a checkpoint brings them.

Python's own matcher tries one way after another, of which an expression made to that end has exponentially many. This
one follows all ways at once: for a name of n characters and an expression of m that takes at most m * n steps, and n
times as many behind a lookahead. (Thompson, "Regular expression search algorithm", 1968.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NoReturn

import attrs

from hal.errors import ConfigError

READ = (
    r"hal reads characters, ., classes as [0-9] and \d, groups, |, ^, $, the repeats *, +, ? and, of one character, "
    "{n}, and the lookaheads (?=...) and (?!...); write it with these, or name the layers"
)
MOST = 100
"""Of one character, by number: each takes memory."""
_TOKEN = re.compile(
    r"""
      (?P<open>\((?:\?[:=!])?)
    | (?P<close>\))
    | (?P<either>\|)
    | (?P<anchor>[\^$])
    | (?P<repeat>(?:[*+?]|\{\d+(?:,\d*)?\})\??)  # as few as will do, or as many: the names that match are the same
    | (?P<one>\\[dDsSwW]|\\[^a-zA-Z0-9]|\[\^?\]?(?:[^\]\\]|\\.)*\]|[^\\\[\](){}*+?|^$])
    """,
    re.VERBOSE | re.DOTALL,
)
_SIMPLE = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@attrs.define(eq=False)
class _State:
    """A place in an expression: the states that may follow it, once ``takes`` has a character, or ``when`` holds."""

    following: list[_State]
    takes: re.Pattern[str] | None = None
    when: Callable[[str, int], bool] | None = None


_Part = Callable[[_State], _State]
"""A part of an expression: from the state that follows it to the one that it begins with."""


class LayerPattern:
    """An expression that matches from the beginning of a name, as :func:`re.match` does.

    Args:
        text: the expression, without ``re:``.

    Raises:
        re.error: it is no regular expression of Python's.
        ConfigError: it is one that this does not read.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._end = _State([])
        try:
            re.compile(text)
            self._start = _Reader(text).whole()(self._end)
        except RecursionError:
            raise ConfigError(f"the regular expression {text!r:.80} is nested too deeply", READ) from None

    def __repr__(self) -> str:
        return f"LayerPattern({self.text!r})"

    def match(self, name: str) -> bool:
        """Whether a name begins with what the expression describes."""
        return _match(self._start, self._end, name, 0)


def _match(start: _State, end: _State, name: str, at: int) -> bool:
    states = _reached([start], name, at)
    while end not in states:
        if at == len(name) or not states:
            return False
        taken = [each for each in states if each.takes is not None and each.takes.fullmatch(name[at])]
        at += 1
        states = _reached([then for each in taken for then in each.following], name, at)
    return True


def _reached(states: Iterable[_State], name: str, at: int) -> set[_State]:
    """Those, and all that follow them without another character."""
    found: set[_State] = set()
    waiting = list(states)
    while waiting:
        state = waiting.pop()
        if state in found or (state.when is not None and not state.when(name, at)):
            continue
        found.add(state)
        if state.takes is None:
            waiting += state.following
    return found


class _Reader:
    """Reads an expression that Python could."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._ahead = text, 0, False

    def whole(self) -> _Part:
        part = self._choice()
        if self._at < len(self._text):
            self._refuse(self._text[self._at :])
        return part

    def _choice(self) -> _Part:
        branches = [self._sequence()]
        while self._next("either"):
            branches.append(self._sequence())
        return lambda after: _State([branch(after) for branch in branches])

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while True:
            if one := self._next("one"):
                part = _one(re.compile(one))
            elif anchor := self._next("anchor"):
                part = _where(_at_the_end if anchor == "$" else _at_the_beginning)
            elif opened := self._next("open"):
                part = self._group(opened)
            else:
                return lambda after: reduce(lambda then, each: each(then), reversed(parts), after)
            if repeat := self._next("repeat"):
                part = _repeated(part, *self._counts(repeat, single=bool(one)))
            parts.append(part)

    def _group(self, opened: str) -> _Part:
        if opened not in ("(?=", "(?!"):
            inside = self._choice()
        elif self._ahead:
            self._refuse(f"{opened} in another lookahead")
        else:
            self._ahead = True
            inside = _where(_ahead(self._choice(), opened == "(?="))
            self._ahead = False
        if not self._next("close"):
            self._refuse(self._text[self._at :])
        return inside

    def _counts(self, repeat: str, *, single: bool) -> tuple[int, int | None]:
        if repeat[0] in _SIMPLE:
            return _SIMPLE[repeat[0]]
        least, comma, most = repeat.rstrip("?")[1:-1].partition(",")
        found = int(least), (int(most) if most else None) if comma else int(least)
        if not single or max(each or 0 for each in found) > MOST:
            self._refuse(repeat)
        return found

    def _next(self, kind: str) -> str:
        """The next token, which is passed over, if it is of that kind; else nothing."""
        token = _TOKEN.match(self._text, self._at)
        if token is None or token.lastgroup != kind:
            return ""
        self._at = token.end()
        return token.group()

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"the regular expression {self._text!r:.80} has {what!r:.30}, which hal does not read", READ)


def _one(takes: re.Pattern[str]) -> _Part:
    return lambda after: _State([after], takes=takes)


def _where(when: Callable[[str, int], bool]) -> _Part:
    return lambda after: _State([after], when=when)


def _repeated(part: _Part, least: int, most: int | None) -> _Part:
    def build(after: _State) -> _State:
        if most is None:
            first = _State([after])
            first.following.append(part(first))
        else:
            first = after
            for _ in range(most - least):
                first = _State([after, part(first)])
        for _ in range(least):
            first = part(first)
        return first

    return build


def _ahead(part: _Part, wanted: bool) -> Callable[[str, int], bool]:
    end = _State([])
    start = part(end)
    return lambda name, at: _match(start, end, name, at) == wanted


def _at_the_beginning(name: str, at: int) -> bool:
    return at == 0


def _at_the_end(name: str, at: int) -> bool:
    return name[at:] in ("", "\n")
