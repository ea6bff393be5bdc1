"""Layers that a checkpoint excludes from quantization, or quantizes otherwise: lists of names, and regular expressions.

`regex <https://pypi.org/project/regex>`_ matches them, because it supports a timeout for matching. It has none for
compiling: it compiles a group with ``+`` twice and one with ``{n}`` n times, so sixty nested groups would exhaust the
memory. The size of an expression is therefore checked before it is compiled.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import attrs
import regex

from hal.errors import CheckpointError, ConfigError
from hal.quantization.checkpoint_format import Quantization
from hal.quantization.integer_arithmetic import AGAIN
from hal.quantization.stored_layer import StoredAs

READ = (
    "hal supports Python's regular expressions except named and atomic groups, conditions, comments and inline flags; "
    r"escape a literal brace or bracket, as \{ and [\[]; or list the layers by name"
)
SIMPLER = "list the layers by name, or use fewer nested or adjacent repeats"
SECONDS = 1.0
"""Limit of the total CPU time of an expression's slow matches, over all names."""
SLOW = 1e-3
"""CPU seconds from which a match counts as slow. A usual one takes microseconds."""
MAX_PARTS = 100_000
"""Maximum number of characters of an expression after expansion of its repeats; each takes about 300 bytes."""
_TOKEN = re.compile(
    r"""
      (?P<open>\((?:\?(?::|<?[=!]))?(?!\?))
    | (?P<close>\))
    | (?P<repeat>[*+?]|\{(?:\d+(?:,\d*)?|,\d+)\})
    | (?P<one>\\.|\[\^?\]?(?:\\.|[^\]\\\[])*\]|[^\\\[({])
    """,
    re.VERBOSE | re.DOTALL,
)


_TEXT = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_TOWERS = ("model.", "")
"""Beginnings of the names of text layers, and of those of towers, in versions of transformers, the longest first."""


def other_names(layer: str) -> Iterator[str]:
    """Yield the names that a description may have for a layer, if another version of transformers wrote it."""
    core = layer.removeprefix(next(each for each in _TEXT if layer.startswith(each)))
    for start in _TEXT if core.startswith(("layers.", "lm_head")) else _TOWERS:
        if start + core != layer:
            yield start + core


class LayerPattern:
    """An expression that matches from the start of a name, as :func:`re.match` does.

    Args:
        text: the expression, without ``re:``.
        where: the key that contains it, for errors.

    Raises:
        CheckpointError: it is not a valid regular expression in Python.
        ConfigError: hal does not support it, or it is too large.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self._named = f"the regular expression {text!r:.80} in {where}"
        self._left = SECONDS
        try:
            re.compile(text)  # regex accepts more syntax than Python, with another meaning
            self._check_size()
            self._compiled = regex.compile(text)
        except (re.error, OverflowError, ValueError) as error:  # the latter two for repeat counts
            raise CheckpointError(f"{self._named} is not valid: {error}", AGAIN) from None
        except RecursionError:
            raise ConfigError(f"{self._named} is nested too deeply", SIMPLER) from None

    def __repr__(self) -> str:
        return f"LayerPattern({self.text!r})"

    def match(self, name: str) -> bool:
        """Return whether the expression matches from the start of ``name``.

        Raises:
            ConfigError: the matches of this expression take too long in total.
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
        """Raise ConfigError if the expression is too large after expansion of its repeats, as in compiling."""
        around: list[int] = []
        size = last = at = 0  # the size of the current group, the size of its last item, and the position in the text
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
            if size > MAX_PARTS:
                raise ConfigError(f"{self._named} has more than {MAX_PARTS} parts after expansion of repeats", SIMPLER)

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"{self._named} has {what!r:.30}, which hal does not support", READ)


def _copies(repeat: str) -> int:
    """Return the maximum number of times that a repeated item is compiled."""
    if repeat[0] == "{":
        return 1 + max(int(each or 0) for each in repeat[1:-1].split(","))
    return 2 if repeat == "+" else 1


@attrs.frozen
class LayerRule:
    """A rule for the layers that a regular expression matches.

    Attributes:
        pattern: the expression.
        where: what errors call the rule.
        stored_as: returns how the layers are stored; None if they are not quantized.
    """

    pattern: LayerPattern
    where: str
    stored_as: Callable[[], StoredAs] | None


class ExcludedLayers(Quantization):
    """One way to store all layers but those of lists and rules. The first rule that matches a layer applies.

    Args:
        stored_as: how the layers are stored.
        lists: by what errors call them, lists of names of layers, or of consecutive parts of names, such as ``lm_head``
            or ``layers.0.mlp.``. A part ``*`` stands for any one. A list may be None.
        rules: the rules.

    Raises:
        CheckpointError: one is not a list of names.
    """

    def __init__(
        self, stored_as: StoredAs | None, lists: Mapping[str, object], rules: Sequence[LayerRule] = ()
    ) -> None:
        self._stored_as, self._rules = stored_as, tuple(rules)
        self._excluded: list[tuple[list[str], str]] = []
        for where, names in lists.items():
            entries = [] if names is None else names
            if not isinstance(entries, list) or not all(isinstance(each, str) and each.strip(".") for each in entries):
                raise CheckpointError(f"{where} is {names!r:.60}, not a list of names", AGAIN)
            self._excluded += [(each.strip(".").split("."), f"{each!r:.80} in {where}") for each in entries]

    def stored_as(self, layer: str) -> StoredAs | None:
        if self.excludes(layer) is not None:
            return None
        rule = self._rule(layer)
        return self._stored_as if rule is None else rule.stored_as and rule.stored_as()

    def exclusion(self, layer: str) -> str:
        rule = self._rule(layer)
        return self.excludes(layer) or (super().exclusion(layer) if rule is None else rule.where)

    def excludes(self, layer: str) -> str | None:
        """Return the entry that names a layer, and its list, or None."""
        parts = layer.split(".")
        for each, entry in self._excluded:
            for start in range(len(parts) - len(each) + 1):
                if all(mine in ("*", theirs) for mine, theirs in zip(each, parts[start:], strict=False)):
                    return entry
        return None

    def _rule(self, layer: str) -> LayerRule | None:
        """Return the rule for a layer. One that excludes layers must match the name that the checkpoint has."""
        for name in (layer, *other_names(layer)) if self._rules else ():
            for rule in self._rules:
                if (rule.stored_as is not None or name == layer) and rule.pattern.match(name):
                    return rule
        return None
