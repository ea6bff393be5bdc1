"""Regular expressions over layer names, from a checkpoint, which may be hostile.

`regex <https://pypi.org/project/regex>`_ matches them, since it stops a match that takes too long. It has no limit for
compiling: a group with ``+`` is compiled twice and one with ``{n}`` n times, so sixty nested groups would fill the
memory. The size of an expression is therefore computed before that.
"""

from __future__ import annotations

import re
import time
from typing import NoReturn

import regex

from hal.errors import CheckpointError, ConfigError
from hal.quantization.int8_arithmetic import AGAIN

READ = (
    "hal reads Python's regular expressions but for named and atomic groups, conditions, comments and flags inside; "
    r"escape a literal brace or bracket, as \{ and [\[]; or list the layers by name"
)
SIMPLER = "list the layers by name, or use fewer nested or adjacent repeats"
SECONDS = 1.0
"""CPU time that the slow matches of an expression may take, all names together."""
SLOW = 1e-3
"""CPU seconds from which a match is slow. An ordinary one takes microseconds, whatever the number of layers."""
MOST = 100_000
"""Characters that an expression may have once its repeats are written out; each takes about 300 bytes."""
_TOKEN = re.compile(
    r"""
      (?P<open>\((?:\?(?::|<?[=!]))?(?!\?))
    | (?P<close>\))
    | (?P<repeat>[*+?]|\{(?:\d+(?:,\d*)?|,\d+)\})
    | (?P<one>\\.|\[\^?\]?(?:\\.|[^\]\\\[])*\]|[^\\\[({])
    """,
    re.VERBOSE | re.DOTALL,
)


class LayerPattern:
    """An expression that matches from the beginning of a name, as :func:`re.match` does.

    Args:
        text: the expression, without ``re:``.
        where: the key that holds it, for errors.

    Raises:
        CheckpointError: it is not a regular expression of Python's.
        ConfigError: it is one that hal does not read, or too large.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self._named = f"the regular expression {text!r:.80} in {where}"
        self._left = SECONDS
        try:
            re.compile(text)  # regex reads more than Python does, and would give it another meaning
            self._check_size()
            self._compiled = regex.compile(text)
        except (re.error, OverflowError, ValueError) as error:  # the latter two for numbers of repeats
            raise CheckpointError(f"{self._named} is not valid: {error}", AGAIN) from None
        except RecursionError:
            raise ConfigError(f"{self._named} is nested too deeply", SIMPLER) from None

    def __repr__(self) -> str:
        return f"LayerPattern({self.text!r})"

    def match(self, name: str) -> bool:
        """Return whether a name begins with what the expression describes.

        Raises:
            ConfigError: the expression takes too long on the names that it was given.
        """
        began = time.thread_time()
        try:
            found = self._compiled.match(name, timeout=self._left) is not None
        except TimeoutError:
            problem = f"{self._named} takes more than {SECONDS:g} s; the last name was {name!r:.80}"
            raise ConfigError(problem, SIMPLER) from None
        took = time.thread_time() - began
        if took > SLOW:
            self._left = max(0.0, self._left - took)
        return found

    def _check_size(self) -> None:
        """Refuse an expression that is too large once its repeats are written out, as compiling does."""
        around: list[int] = []
        size = last = at = 0  # of the group so far, of the item that a repeat belongs to, and the place in the text
        while at < len(self.text):
            token = _TOKEN.match(self.text, at)
            if token is None:
                self._refuse(self.text[at:])
            at = token.end()
            match token.lastgroup:
                case "open":
                    around.append(size)
                    size = 0
                case "close":
                    last = size + 1
                    size = around.pop() + last
                case "repeat":
                    size, last = size - last, last * _copies(token.group())
                    size += last
                case _:
                    last = len(token.group())
                    size += last
            if size > MOST:
                raise ConfigError(f"{self._named} has more than {MOST} parts once repeats are written out", SIMPLER)

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"{self._named} has {what!r:.30}, which hal does not read", READ)


def _copies(repeat: str) -> int:
    """Return how often a repeated item is compiled, at most."""
    if repeat[0] == "{":
        return 1 + max(int(each or 0) for each in repeat[1:-1].split(","))
    return 2 if repeat == "+" else 1
