"""Layers as checkpoint formats store them, and the readers and writers of their tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from hal.device.group import SOLO, Group
from hal.errors import CheckpointError, ConfigError
from hal.nn import GroupedLinear, Linear, Weight
from hal.nn.linear import IN, OUT
from hal.nn.weights.weight import TENSOR
from hal.ops.forms import Form, dequantize
from hal.quantization.integer_arithmetic import AGAIN, Activation

Tensors = Mapping[str, Tensor | None]
"""Tensors by name. One that the checkpoint lacks is None."""


@attrs.frozen(eq=False)
class StoredLayer:
    """A layer of a model, the form that the checkpoint stores its weight in, and the tensors that have been read.

    Attributes:
        layer: the model's layer.
        form: the form of the stored weight.
        converted: whether the weight is converted to another form when it is loaded.
        ranks: those that divide the layer.
        names: the names of the layer's parts in the checkpoint, expert by expert.
        tensors: this rank's tensors.
        first_expert: the first of the experts that this rank holds.
    """

    layer: Linear | GroupedLinear
    form: Form
    converted: bool = False
    ranks: Group = SOLO
    names: Sequence[str] = ()
    tensors: Tensors = MappingProxyType({})
    first_expert: int = 0

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor that the checkpoint must have."""
        found = self.tensors[name]
        assert found is not None, name
        return found

    @property
    def group_size(self) -> int:
        """The inputs that share a scale."""
        return self.form.group(self.layer.in_features)

    @property
    def groups(self) -> Mapping[str, int]:
        """The sizes of groups by axis, for the declarations of scales."""
        return {IN: self.group_size}

    @property
    def any_groups(self) -> bool:
        """Whether each input may be in any group, because the weight is dequantized, input by input."""
        return self.form.ordered and self.converted

    @property
    def inputs(self) -> tuple[int, int]:
        """The first of this rank's inputs, and the last one's successor."""
        width = self.layer.in_features
        return self.layer.share.interval(width, self.ranks.rank, self.ranks.size) if self._divided else (0, width)

    @property
    def cut(self) -> bool:
        """Whether ranks cut the inputs inside a group, of which neither has a whole one."""
        start, end = self.inputs
        local, size = max(end - start, 1), self.group_size
        return self._divided and local % size > 0 and size % local > 0

    @property
    def ragged(self) -> bool:
        """Whether parts of the layer, or of ranks, end inside a block of rows, so that each row has its own scales."""
        rows = self.form.rows
        parts = tuple(self.layer.layers.values()) or (self.layer.out_features,)
        if rows <= 1 or self.layer.rows:
            return False
        if self.layer.shard == OUT and self.ranks.size > 1:
            cuts = [self.layer.share.size(each, self.ranks.size) for each in parts]
            return any(each % rows for each in cuts)
        return any(each % rows for each in parts[:-1])

    @property
    def gathers(self) -> bool:
        """Whether a rank multiplies by columns of other ranks' inputs, because the columns stand in another order."""
        return self.form.ordered and self._divided and not self.converted

    @property
    def local_form(self) -> Form:
        """The form of this rank's weight: if ranks cut inside a group, smaller groups share its scale.

        Raises:
            ConfigError: the groups would be smaller than what an element of packed numbers holds.
        """
        form = attrs.evolve(self.form, rows=1) if self.ragged else self.form
        if not self.cut:
            return form
        start, end = self.inputs
        size = math.gcd(self.group_size, end - start)
        if size % self.form.kind.count:
            raise ConfigError(
                f"{self.names[0]}: {self.ranks.size} ranks cut {self.layer.in_features} inputs into groups of {size}, "
                f"and numbers of {self.form.numbers} are packed by {self.form.kind.count}",
                f"set --tensor-parallel, or {TENSOR}, to a number that cuts between groups of {self.group_size}",
                key=TENSOR,
            )
        return attrs.evolve(form, columns=size)

    @property
    def scales(self) -> Mapping[str, Any]:
        """The options of the declaration of scales and zero points of groups; see :meth:`of_rank`."""
        whole = self._divided and (self.any_groups or self.gathers or self.cut)
        return {"group_sizes": self.groups, "every_rank": whole}

    def of_rank(self, factors: Tensor) -> Tensor:
        """Return this rank's scales or zero points ``[..., groups]`` from those that it read."""
        start, end = self.inputs
        if not (self.cut or self.gathers) or self.any_groups:
            return factors
        size = self.local_form.group(end - start)
        spread = factors.repeat_interleave(self.group_size // size, -1) if self.cut else factors
        return spread[..., start // size : -(-end // size)].contiguous()

    @property
    def _divided(self) -> bool:
        return self.layer.shard == IN and self.ranks.size > 1

    def by_expert(self, compute: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        """Return what a function computes of a layer's tensor; of experts, one after the other, to use less memory.

        The results take the memory of the tensor, which is contiguous, if they have as many elements of its dtype.
        """
        if self.layer.num_experts is None:
            return compute(tensor)
        found: Tensor | None = None
        for expert, given in enumerate(tensor):
            each = compute(given)
            if found is None:
                alike = each.dtype == tensor.dtype and each.numel() == given.numel()
                shape = (len(tensor), *each.shape)
                found = tensor.view(shape) if alike else each.new_empty(shape)
            found[expert] = each
        assert found is not None
        return found

    def rows_of(self, parts: Tensor, weight: Tensor) -> Tensor:
        """Return a number for each row of this rank's weight, from one for each part of all experts."""
        if self.layer.num_experts is not None:
            parts = parts[self.first_expert : self.first_expert + weight.shape[0]]
        return parts.repeat_interleave(torch.tensor(self.layer.stored_sizes), dim=-1)

    def part_of_row(self, row: int) -> str:
        """Return the name of the part that has a row of this rank, counted over all experts."""
        sizes, part = self.layer.stored_sizes, 0
        if len(self.names) == 1:  # of all experts
            return self.names[0]
        expert, row = divmod(row, sum(sizes))
        while row >= sizes[part]:
            row, part = row - sizes[part], part + 1
        return self.names[(self.first_expert + expert) * len(sizes) + part]

    def check_rows(self, valid: Tensor, problem: str) -> None:
        """Raise CheckpointError unless a condition holds for all rows.

        Args:
            valid: a bool per row, in any shape.
            problem: has ``{}`` in place of the name of the part.

        Raises:
            CheckpointError: see above.
        """
        if not bool(valid.all()):
            raise CheckpointError(problem.format(self.part_of_row(int(valid.flatten().int().argmin()))), AGAIN)

    def checked_zero_points(self, zero: Tensor | None) -> Tensor | None:
        """Return zero points of integers; None if all are 0.

        Raises:
            CheckpointError: some are not, and the description says that weights are symmetric.
        """
        if zero is None or not bool(zero.any()):
            return None
        if not self.form.zero_points:
            middle = 1 << self.form.kind.bits - 1
            self.check_rows(
                ~zero.any(-1), f"{{}} has zero points other than {middle}, but weights are described as symmetric"
            )
        return zero


class Reader(ABC):
    """Reads how a checkpoint format stores the tensors of layers: from their names and packing to a form.

    Attributes:
        of_inputs: the tensors of the scale and the offset of inputs, which stay as weights are replaced.
    """

    of_inputs: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Return whether it reads alike: two of one class, with the same settings."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """Return the same for equal readers."""
        return hash(type(self))

    @abstractmethod
    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        """Return the tensors to read, by names that :meth:`decode` finds them under.

        Declare them with ``stored.layer.declare``, with a dtype, or with ``stored``. A floating-point bias is declared
        already. Nothing has been read yet.
        """

    @abstractmethod
    def decode(self, stored: StoredLayer) -> Tensors:
        """Return the layer's tensors in the stored form, by the names of :attr:`hal.nn.Projection.kept`.

        Raises:
            CheckpointError: a number is invalid.
        """


@attrs.frozen(eq=False)
class FloatLayer:
    """A layer of a checkpoint to quantize.

    Attributes:
        name: the weight's name.
        weight: ``[rows, columns]``, floating.
        bias: ``[rows]``, floating, or None.
        dtype: the checkpoint's dtype.
        activation: the quantization of the input; None without calibration.

    Raises:
        CheckpointError: a value of the weight is not finite.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    activation: Activation | None = None

    def __attrs_post_init__(self) -> None:
        if self.weight.numel() and not bool(torch.stack(self.weight.aminmax()).isfinite().all()):
            raise CheckpointError(f"{self.name} has values that are not finite", "use a checkpoint with finite weights")

    @property
    def biases(self) -> dict[str, Tensor]:
        """The bias as it is, if there is one."""
        return {} if self.bias is None else {"bias": self.bias}


class Writer(ABC):
    """Writes layers in a form, in a checkpoint format.

    Attributes:
        needs_bias: whether it writes the weight and the bias as one.
    """

    needs_bias: ClassVar[bool] = False

    @abstractmethod
    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        """Quantize a layer, and return its tensors by the last part of their name."""

    def numbers(self, tensors: Mapping[str, Tensor], form: Form, rows: slice) -> Tensor:
        """Return rows of the numbers that :meth:`write` wrote, as :func:`hal.ops.forms.dequantize` takes them."""
        return tensors["weight"][rows]

    def written(self, tensors: Mapping[str, Tensor], form: Form, rows: slice) -> Tensor:
        """Return rows of the weight that the tensors of :meth:`write` mean, float32 ``[rows, columns]``."""
        scale = tensors["weight_scale"].reshape(len(tensors["weight_scale"]), -1)
        return dequantize(form, self.numbers(tensors, form, rows), scale[rows])


class CalibratedWriter(Writer):
    """A writer whose :meth:`write` needs the quantization of the input."""

    @abstractmethod
    def activation(self, low: float, high: float, dtype: torch.dtype) -> Activation:
        """Return the quantization of inputs from ``low`` to ``high``, for a checkpoint of ``dtype``."""


@attrs.frozen
class StoredAs:
    """How a checkpoint stores a layer: the form of its weight, and what reads it."""

    form: Form
    reader: Reader
