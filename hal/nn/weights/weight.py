"""Declarations of how a layer's tensors are assembled from a checkpoint's.

A layer declares them in its attribute ``weights``, a mapping from the names of parameters and buffers to
:class:`Weight`. A parameter without a declaration is the checkpoint tensor of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

import attrs
import torch

from hal.errors import ModelError
from hal.nn.weights.assembly import Assembly, Concatenated, Whole
from hal.nn.weights.share import EQUALLY, Share


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
    """The use of a tensor, which a driver prepares the tensor for.

    Attributes:
        operation: the name of the unfused operation that uses it. Kernels of fused operations take the same form.
        argument: the argument's name.
        dtype: the model's compute dtype, which is the dtype of the operation's floating-point results.
        shared: whether the original tensor also stays, for another use, such as an embedding that is tied to the output
            projection. The prepared tensor then takes additional memory.
    """

    operation: str
    argument: str
    dtype: torch.dtype
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


@attrs.frozen
class Weight:
    """How one parameter or buffer of a layer is assembled from a checkpoint's tensors.

    A source's name is relative to the layer, as in Python's relative imports: ``weight`` is the layer's tensor,
    ``experts.3.up_proj.weight`` is below the layer, and ``.q_proj.weight``, with a leading dot, is beside it.

    Attributes:
        sources: names of checkpoint tensors, in the order in which ``assemble`` takes them. If empty, the quantization
            scheme that inserted the layer fills the tensor.
        axes: names of the dimensions, separated by spaces: ``"out_features in_features"``. A name has the same size in
            all tensors of a layer.
        shard: the axis along which ranks may split the tensor, or None. Ranks split each concatenated part.
        assemble: how the sources form the tensor.
        consumer: the operation that uses it, for drivers that prepare weights; None for a tensor to leave unchanged.
        tied_use: the second use in a model whose ``tied`` refers to the tensor.
        dtype: the dtype; None means the model's compute dtype for a floating-point tensor, else the layer's dtype.
        offset: added to the checkpoint's values in that dtype.
        share: how ranks share each part along ``shard``.
        first_rank_only: whether it is added to a sum over ranks: the first rank has the tensor, and the others have
            zeros.
        group: the group of the mesh whose ranks share it.

    Raises:
        ModelError: the axes are not distinct identifiers, or ``shard`` is not one of them.
    """

    sources: tuple[str, ...]
    axes: str
    shard: str | None = None
    assemble: Assembly = attrs.field(factory=Whole)
    consumer: Consumer | None = None
    tied_use: TiedUse | None = None
    dtype: torch.dtype | None = None
    offset: float = 0.0
    share: Share = EQUALLY
    first_rank_only: bool = False
    group: Literal["tensor", "expert"] = "tensor"

    def __attrs_post_init__(self) -> None:
        names = self.axes.split()
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
        share: Share = EQUALLY,
        first_rank_only: bool = False,
    ) -> Self:
        """Return the declaration of a weight concatenated from several checkpoint layers along its first axis.

        Args:
            parts: the sizes of the parts, by the name of the checkpoint layer beside this one. If empty, the tensor is
                the layer's own.
            name: the tensor's name in each layer.
            axes: see :class:`Weight`.
            shard: see :class:`Weight`.
            consumer: see :class:`Weight`.
            dtype: see :class:`Weight`.
            share: see :class:`Weight`.
            first_rank_only: see :class:`Weight`.
        """
        if not parts:
            return cls(
                (name,), axes, shard, consumer=consumer, dtype=dtype, share=share, first_rank_only=first_rank_only
            )
        sources = tuple(f".{part}.{name}" for part in parts)
        assemble = Concatenated(axes.split()[0], tuple(parts.values()))
        return cls(sources, axes, shard, assemble, consumer, dtype=dtype, share=share, first_rank_only=first_rank_only)


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
