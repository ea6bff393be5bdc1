"""How a layer's tensors are made of a checkpoint's: declarations, which hold no values.

A layer declares them in its attribute ``weights``, a mapping from the names of its parameters and buffers to
:class:`Weight`. A parameter without a declaration is one tensor of the checkpoint, of the parameter's own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import attrs
import torch

from hal.errors import ModelError
from hal.nn.weight_assembly import Assembly, Concatenated, Whole


@attrs.frozen
class Consumer:
    """The unfused operation that takes a weight, and as which argument.

    Attributes:
        operation: its name, such as ``linear``.
        argument: the argument's name, which the operation declares among its ``weights``.
    """

    operation: str
    argument: str


@attrs.frozen
class WeightUse:
    """What a driver is told of a tensor that it may bring into a form of its own.

    Attributes:
        operation: the name of the unfused operation that takes it. A kernel of a fused one takes the same form.
        argument: as which argument.
        dtype: what the model computes in, and so of the operation's floating results.
        shared: whether the tensor also stays as it is for another use, such as an embedding's table that is projected
            with. What the driver makes of it then takes memory beside it.
    """

    operation: str
    argument: str
    dtype: torch.dtype
    shared: bool = False


@attrs.frozen
class TiedUse:
    """A second use of a tensor, in a model that ties it.

    Attributes:
        attribute: the layer's buffer that gets the form which the driver prepared; None if that is the tensor itself.
        consumer: of this use.
    """

    attribute: str
    consumer: Consumer


@attrs.frozen
class Weight:
    """How one parameter or buffer of a layer is made of a checkpoint's tensors.

    A source's name is relative to the layer, as in Python's relative imports: ``weight`` is the layer's own,
    ``experts.3.up_proj.weight`` lies below it, and with a leading dot ``.q_proj.weight`` lies beside it.

    Attributes:
        sources: names of tensors, in the order in which ``assemble`` takes them. Without any, the loader leaves the
            tensor to the quantisation scheme that put the layer into the model.
        axes: names of the dimensions, separated by spaces: ``"out_features in_features"``. A name has one size in all
            tensors of a layer.
        shard: the axis along which ranks may cut the tensor, or None. Ranks cut each concatenated part.
        assemble: how the sources make the tensor.
        consumer: the operation that takes it, for the driver that brings it into a form of its own; None for a tensor
            that stays as it is.
        tied_use: what else takes it in a model whose ``tied`` names it.
        dtype: what it is held in; None for a floating tensor is what the model computes in, and for another the
            layer's own.

    Raises:
        ModelError: the axes are no names or repeat one, or ``shard`` is none of them.
    """

    sources: tuple[str, ...]
    axes: str
    shard: str | None = None
    assemble: Assembly = attrs.field(factory=Whole)
    consumer: Consumer | None = None
    tied_use: TiedUse | None = None
    dtype: torch.dtype | None = None

    def __attrs_post_init__(self) -> None:
        names = self.axes.split()
        if len(set(names)) != len(names) or not all(each.isidentifier() for each in names):
            raise ModelError(
                f"a weight is declared with the axes {self.axes!r}",
                'give each dimension a name of its own, separated by spaces: "out_features in_features"',
            )
        if self.shard is not None and self.shard not in names:
            raise ModelError(
                f"a weight is declared with shard={self.shard!r}, which is none of its axes {self.axes!r}",
                "name one of the axes, or None",
            )

    @classmethod
    def merged(
        cls,
        parts: Mapping[str, int],
        name: str,
        axes: str,
        *,
        shard: str | None = None,
        consumer: Consumer | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return a weight that several layers of the checkpoint share, concatenated along its first axis.

        Args:
            parts: the names of layers that lie beside this one in the checkpoint, and the sizes of their parts. Without
                any, the tensor is the layer's own.
            name: of the tensor in each of them.
            axes: see :class:`Weight`, as the rest.
            shard: likewise.
            consumer: likewise.
            dtype: likewise.
        """
        if not parts:
            return cls((name,), axes, shard, consumer=consumer, dtype=dtype)
        sources = tuple(f".{part}.{name}" for part in parts)
        assemble = Concatenated(axes.split()[0], tuple(parts.values()))
        return cls(sources, axes, shard, assemble, consumer, dtype=dtype)


def source_name(path: str, source: str) -> str:
    """Return the checkpoint's name of a source, of a layer at ``path`` in the model.

    Raises:
        ModelError: it leads out of the model.
    """
    name = source.lstrip(".")
    parents = len(source) - len(name)
    steps = path.split(".") if path else []
    if parents > len(steps):
        raise ModelError(
            f"the source {source!r} of a layer at {path!r} leads out of the model",
            "a leading dot goes up by one module: leave one out",
        )
    return ".".join([*steps[: len(steps) - parents], name])


def default_weight(name: str, shape: Sequence[int]) -> Weight:
    """Return the declaration of a parameter that has none: one tensor of its own name."""
    return Weight((name,), " ".join(f"{name}_{dim}" for dim in range(len(shape))))
