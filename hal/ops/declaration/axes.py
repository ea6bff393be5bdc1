"""The axes of an operation's tensors: the syntax of shapes, and the shared axis names.

A shape is a string of axes, separated by spaces, such as ``"tokens num_heads head_dim"``. An axis is one of:

- a name, which has the same size everywhere in one declaration; the name of an integer argument has its value;
- a number, as a fixed size;
- a size computed from others by ``+``, ``-``, ``*`` and ``//``, without spaces: ``sequences+1``;
- a choice of sizes, optionally named: ``1|width``, ``channels=1|width``;
- in first place, ``...``: one or more leading axes, the same wherever it occurs; ``[...]`` also permits none.

The empty string is the shape of a scalar.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs
import torch

from hal.errors import OperationError

TOKENS: Final = "tokens"
"""New tokens of a step, of all sequences."""
SEQUENCES: Final = "sequences"
"""Sequences of a step."""
ROWS: Final = "rows"
"""Rows of logits of a step."""
BLOCKS: Final = "blocks"
"""Columns of a block table: the largest number of blocks of any sequence."""
STEP_AXES: Final = (TOKENS, SEQUENCES, ROWS, BLOCKS)
"""The axes whose sizes vary between steps, under the names that every operation uses."""

LEADING: Final = "..."
"""One or more leading axes."""
_OR_NONE: Final = f"[{LEADING}]"
_REMEDY = (
    "separate axes by spaces; each is a name, a number, a size such as sequences+1, a choice such as 1|width or "
    "channels=1|width, or, in first place, ... or [...]"
)
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@attrs.frozen
class Size:
    """A size: a number, a name, or an expression of these.

    Attributes:
        text: the source text.
        names: the names in it.
    """

    text: str
    names: tuple[str, ...]
    _tree: Any = attrs.field(eq=False, repr=False)

    @property
    def computed(self) -> bool:
        """Whether it is an expression, rather than a number or a name."""
        return isinstance(self._tree, ast.BinOp)

    def value(self, sizes: Mapping[str, Any]) -> Any:
        """Return the value, an integer or a symbolic one, given the sizes of its names."""
        return _value(self._tree, sizes)


@attrs.frozen
class Axis:
    """One axis of a shape.

    Attributes:
        text: the source text.
        name: the axis's name, or None.
        sizes: the permitted sizes; empty if any.
    """

    text: str
    name: str | None
    sizes: tuple[Size, ...]


@attrs.frozen
class Shape:
    """The axes of a tensor.

    Attributes:
        text: the source text.
        leading: the minimum number of axes that ``...`` represents; None without ``...``.
        axes: all other axes, in order.
    """

    text: str
    leading: int | None
    axes: tuple[Axis, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its axes, including ``...``."""
        return ((LEADING,) if self.leading is not None else ()) + tuple(each.name for each in self.axes if each.name)

    def has_rank(self, rank: int) -> bool:
        """Return whether a tensor of ``rank`` dimensions can have this shape."""
        extra = rank - len(self.axes)
        return extra == 0 if self.leading is None else extra >= self.leading

    def dim(self, name: str, rank: int) -> int | None:
        """Return the dimension of an axis in a tensor of ``rank`` dimensions, the first one for ``...``, or None."""
        first = rank - len(self.axes)
        if name == LEADING:
            return 0 if self.leading is not None and first > 0 else None
        places = [place for place, axis in enumerate(self.axes, first) if axis.name == name]
        return places[0] if places else None


def parse_shape(text: object, what: str) -> Shape:
    """Parse a declared shape.

    Args:
        text: the declaration.
        what: the name of the declared tensor, for errors.

    Raises:
        OperationError: the syntax is not that of this module.
    """
    if not isinstance(text, str):
        raise OperationError(f"{what} is declared with the axes {text!r}, not a string", _REMEDY)
    parts = text.split()
    leading = {LEADING: 1, _OR_NONE: 0}.get(parts[0]) if parts else None
    axes = tuple(_parse_axis(part, text, what) for part in parts[0 if leading is None else 1 :])
    return Shape(" ".join(parts), leading, axes)


def _parse_axis(part: str, text: str, what: str) -> Axis:
    name, equals, rest = part.partition("=")
    sizes = tuple(_parse_size(each, text, what) for each in (rest if equals else part).split("|"))
    if equals and not name.isidentifier():
        raise _malformed(part, text, what)
    if not equals and part.isidentifier():
        return Axis(part, part, ())
    return Axis(part, name if equals else None, sizes)


def _parse_size(part: str, text: str, what: str) -> Size:
    try:
        tree = ast.parse(part, mode="eval").body
    except SyntaxError:
        raise _malformed(part, text, what) from None
    if not _is_size(tree):
        raise _malformed(part, text, what)
    names = [each.id for each in ast.walk(tree) if isinstance(each, ast.Name)]
    return Size(part, tuple(dict.fromkeys(names)), tree)


def _is_size(tree: ast.expr) -> bool:
    if isinstance(tree, ast.BinOp):
        return type(tree.op) in _OPERATORS and _is_size(tree.left) and _is_size(tree.right)
    return isinstance(tree, ast.Name) or (isinstance(tree, ast.Constant) and type(tree.value) is int)


def _value(tree: ast.expr, sizes: Mapping[str, Any]) -> Any:
    if isinstance(tree, ast.BinOp):
        return _OPERATORS[type(tree.op)](_value(tree.left, sizes), _value(tree.right, sizes))
    return sizes[tree.id] if isinstance(tree, ast.Name) else ast.literal_eval(tree)


def _malformed(part: str, text: str, what: str) -> OperationError:
    return OperationError(f"{what} is declared with the axes {text!r}, and {part!r} is not a valid axis", _REMEDY)


def same_size(one: Any, other: Any) -> bool:
    """Return whether two sizes, perhaps symbolic ones of one trace, are written identically. Adds no guard."""
    if type(one) is int and type(other) is int:
        return one == other
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return str(one) == str(other)


def same_sizes(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return whether two shapes have the same sizes."""
    first, second = list(one), list(other)
    return len(first) == len(second) and all(map(same_size, first, second))


def may_be_size(one: Any, other: Any) -> bool:
    """Return whether two sizes can be equal. A trace may use separate symbols for a size and one computed from it."""
    if same_size(one, other):
        return True
    exprs = [each.node.expr if isinstance(each, torch.SymInt) else each for each in (one, other)]
    symbols = [set(getattr(each, "free_symbols", ())) for each in exprs]
    return symbols[0] != symbols[1]
