"""Declarations of how a layer's tensors are assembled from a checkpoint's.

A layer declares them in its attribute ``weights``, a mapping from the names of parameters and buffers to
:class:`Weight`. A parameter without a declaration is the checkpoint tensor of the same name.
:class:`Share` says how ranks share an axis, such as the heads of a projection or the rows of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from hal.errors import ConfigError, ModelError
from hal.nn.weights.assembly import Assembly, Whole
from hal.ops.forms import FLOAT, Form

MOST_RANKS = 64
"""The largest number of ranks that an error suggests."""

TENSOR = "parallel.tensor"
"""The key of errors about the number of ranks that split each layer."""


def unshared(problem: str, what: str, counts: Iterable[int]) -> ConfigError:
    """Return the error for a number of ranks, whose remedy lists ``counts``: ``what`` says which they are."""
    numbers = ", ".join(map(str, counts))
    return ConfigError(problem, f"set --tensor-parallel, or {TENSOR}, to {what}: {numbers}", key=TENSOR)


@attrs.frozen
class Share:
    """How ranks share an axis. By default they get equal parts.

    Attributes:
        unit: the number of consecutive elements that stay together, such as those of a head.
        repeat: whether several ranks may hold the same unit, where there are more ranks than units.
        pad: whether the parts are rounded up; the last ranks then have fewer elements, followed by zeros.
    """

    unit: int = 1
    repeat: bool = False
    pad: bool = False

    def size(self, total: int, ranks: int) -> int:
        """Return the number of elements of each rank, padding included.

        Args:
            total: the number of elements of all ranks, a multiple of ``unit``.
            ranks: the number of ranks.

        Raises:
            ConfigError: the ranks cannot share the axis.
        """
        units = total // self.unit
        if units % ranks == 0:
            return total // ranks
        if self.repeat and ranks % units == 0:
            return self.unit
        if self.pad:
            return -(-units // ranks) * self.unit
        what = f"{total} elements" if self.unit == 1 else f"{units} heads of {self.unit} elements"
        raise unshared(
            f"{ranks} ranks cannot share {what} equally",
            f"a divisor of {units}",
            (each for each in range(1, min(units, MOST_RANKS) + 1) if units % each == 0),
        )

    def interval(self, total: int, rank: int, ranks: int) -> tuple[int, int]:
        """Return the first element of a rank, and the end of its elements, without padding.

        Raises:
            ConfigError: the ranks cannot share the axis.
        """
        size, units = self.size(total, ranks), total // self.unit
        repeated = units < ranks and self.repeat
        start = rank * units // ranks * self.unit if repeated else min(rank * size, total)
        return start, min(start + size, total)


EQUALLY = Share()
PADDED = Share(pad=True)


@attrs.frozen
class Consumer:
    """The unfused operation that uses a weight, and the argument it is passed as.

    Attributes:
        operation: the operation's name, such as ``linear``.
        argument: the argument's name, one of the operation's ``weights``.
    """

    operation: str
    argument: str


@attrs.frozen
class WeightUse:
    """The use of tensors, which a driver prepares them for.

    Attributes:
        operation: the name of the unfused operation that uses them. Kernels of fused operations take the same form.
        dtype: the model's compute dtype, which is the dtype of the operation's floating-point results.
        form: the form of the weight, of operations that take one.
        shared: whether the original tensors also stay, for another use, such as an embedding that is tied to the output
            projection. The prepared tensors then take additional memory.
    """

    operation: str
    dtype: torch.dtype
    form: Form = FLOAT
    shared: bool = False


@attrs.frozen
class TiedUse:
    """A second use of a tensor that the model ties.

    Attributes:
        attribute: the layer's buffer for the prepared tensor, which is None if that is the original tensor.
        consumer: the operation of this use.
    """

    attribute: str
    consumer: Consumer


@attrs.frozen(eq=False)
class ValueCheck:
    """A rule for the values of a tensor, which the loader checks before it reads any weight.

    The loader reads a tensor with rules twice, so only small ones, such as scales, should have any.

    Attributes:
        holds: returns whether the rule holds for a checkpoint's tensor, or for the part of it that a rank reads.
        problem: what an error says after the tensor's name.
        remedy: what an error says to do.
    """

    holds: Callable[[Tensor], bool]
    problem: str
    remedy: str


@attrs.frozen
class Weight:
    """How one parameter or buffer of a layer is assembled from a checkpoint's tensors.

    A source's name is relative to the layer, as in Python's relative imports: ``weight`` is the layer's tensor,
    ``experts.3.up_proj.weight`` is below the layer, and ``.q_proj.weight``, with a leading dot, is beside it.

    Attributes:
        sources: names of checkpoint tensors, in the order in which ``assemble`` takes them. If empty, the tensor has
            ``values``, or the quantization scheme that inserted the layer computes it.
        axes: names of the dimensions, separated by spaces: ``"out_features in_features"``. A name has the same size in
            all tensors of a layer.
        shard: the axis along which ranks may split the tensor, or None. Ranks split each concatenated part.
        assemble: how the sources form the tensor.
        consumer: the operation that uses it, for drivers that prepare weights; None for a tensor to leave unchanged.
        tied_use: the second use in a model whose ``tied`` refers to the tensor.
        dtype: the dtype; None means the model's compute dtype for a floating-point tensor, else the layer's dtype.
        function: applied to the checkpoint's values in that dtype, element by element.
        offset: added to the checkpoint's values in that dtype, after the function.
        share: how ranks share each part along ``shard``.
        first_rank_only: whether it is added to a sum over ranks: the first rank has the tensor, and the others have
            zeros.
        group: the group of the mesh whose ranks share it.
        sizes: the size of each axis; None for those of the layer's own tensor. Needed where the next two are set.
        group_sizes: by axis, how many of its elements share one element of the tensor, such as
            ``{"in_features": 128}`` for a scale of 128 inputs. The last group may have fewer.
        packing: by axis, how many of its elements one number holds, such as ``{"in_features": 8}`` for eight 4-bit
            numbers in an int32. ``assemble``, ``share`` and ``sizes`` count the elements of the axis.
            ``(8, 3)`` for eight in three numbers.
        trailing: by axis, how many numbers follow those of its elements.
        stored: the dtypes that the checkpoint may have. By default, any floating-point one for a floating-point tensor
            that is not 8-bit, else the tensor's own. Where ``dtype`` is None, the tensor keeps the checkpoint's.
        optional: whether the checkpoint may lack it. Without any source, the layer has None; a missing one is zero.
        column: whether the checkpoint may have a last dimension of size 1 more.
        values: of a constant tensor with one axis, which no checkpoint has.
        checks: rules for the values of the checkpoint's tensors.

    Raises:
        ModelError: the axes are not distinct identifiers, or another attribute does not fit them.
    """

    sources: tuple[str, ...]
    axes: str
    shard: str | None = None
    assemble: Assembly = attrs.field(factory=Whole)
    consumer: Consumer | None = None
    tied_use: TiedUse | None = None
    dtype: torch.dtype | None = None
    function: Callable[[Tensor], Tensor] | None = None
    offset: float = 0.0
    share: Share = EQUALLY
    first_rank_only: bool = False
    group: Literal["tensor", "expert"] = "tensor"
    sizes: tuple[int, ...] | None = None
    group_sizes: Mapping[str, int] = attrs.field(factory=dict)
    packing: Mapping[str, int | tuple[int, int]] = attrs.field(factory=dict)
    trailing: Mapping[str, int] = attrs.field(factory=dict)
    stored: tuple[torch.dtype, ...] = ()
    optional: bool = False
    column: bool = False
    values: tuple[float, ...] = ()
    checks: tuple[ValueCheck, ...] = ()

    def __attrs_post_init__(self) -> None:
        names = self.names
        if len(set(names)) != len(names) or not all(each.isidentifier() for each in names):
            raise ModelError(
                f"a weight is declared with axes={self.axes!r}, which are not distinct names",
                'name each dimension once, separated by spaces: "out_features in_features"',
            )
        if self.shard is not None and self.shard not in names:
            raise ModelError(
                f"a weight is declared with shard={self.shard!r}, which is not one of its axes {self.axes!r}",
                "set shard to one of the axes, or to None",
            )
        grouped = {*self.group_sizes, *self.packing}
        if grouped - {*names} or self.group_sizes.keys() & self.packing.keys() or (grouped and self.sizes is None):
            raise ModelError(
                f"a weight with axes={self.axes!r} is declared with group_sizes={dict(self.group_sizes)}, "
                f"packing={dict(self.packing)} and sizes={self.sizes}",
                "name an axis in one of group_sizes and packing, and give the sizes of all axes",
            )
        if self.sizes is not None and len(self.sizes) != len(names):
            raise ModelError(
                f"a weight with axes={self.axes!r} is declared with sizes={self.sizes}", "give one size for each axis"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(self.axes.split())

    def unit(self, axis: str) -> int:
        """Return how many elements of an axis belong to one element of the tensor."""
        return self.group_sizes.get(axis) or self.numbers(axis)[0]

    def numbers(self, axis: str) -> tuple[int, int]:
        """Return how many elements of an axis how many numbers hold."""
        packing = self.packing.get(axis) or 1
        return packing if isinstance(packing, tuple) else (packing, 1)

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor with these sizes of the axes."""
        return tuple(
            -(-size // self.unit(axis)) * self.numbers(axis)[1] + self.trailing.get(axis, 0)
            for axis, size in zip(self.names, sizes, strict=True)
        )


def source_name(path: str, source: str) -> str:
    """Return the checkpoint name of a source of the layer at ``path`` in the model.

    Raises:
        ModelError: the source has too many leading dots.
    """
    name = source.lstrip(".")
    parents = len(source) - len(name)
    steps = path.split(".") if path else []
    if parents > len(steps):
        raise ModelError(
            f"the source {source!r} of the layer at {path!r} is outside the model",
            "remove a leading dot; each one goes up by one module",
        )
    return ".".join([*steps[: len(steps) - parents], name])


def default_weight(name: str, shape: Sequence[int]) -> Weight:
    """Return the declaration of a parameter without one: the checkpoint tensor of the same name."""
    return Weight((name,), " ".join(f"{name}_{dim}" for dim in range(len(shape))))
