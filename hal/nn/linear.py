"""Linear projections, whole or split between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.lora import Lora
from hal.nn.weights.assembly import Assembly, Concatenated, Cut, Merged, Stacked, Whole
from hal.nn.weights.weight import EQUALLY, Consumer, Share, Weight
from hal.ops.forms import FLOAT, SECOND, Form

OUT, IN = "out_features", "in_features"
EXPERTS, PARTS = "num_experts", "parts"


class Projection(nn.Module):
    """The base of projections: the declarations of their tensors, and how ranks split one and join its results.

    Ranks that split ``in_features`` take a part of the input each, and add their results. Ranks that split
    ``out_features`` compute a part of the output each, which stays split unless ``gather``.

    Attributes:
        in_features: features of the whole input.
        out_features: features of the whole output.
        parts: the out_features of each part of a :class:`MergedLinear` or of an expert, by name; empty for another
            layer.
        shard: the axis along which ranks may split the weight, ``out_features`` or ``in_features``, or None; or
            ``num_experts``.
        share: how ranks share each part along that axis.
        gather: whether ranks that split ``out_features`` exchange their parts, so that each has the whole output.
        num_experts: the number of experts, each of which has such a projection; None for a single projection.
        sizes: the out_features of each part on this rank; of the whole layer if it has no parts.
        rows: where the checkpoint has the rows of the weight, in order, if its layers are not the parts; see
            :class:`MergedLinear`.
        merged: whether the checkpoint has the parts as one layer already, of this layer's name.
        group: the name of the group that joins the results; None if they need not be joined.
        operation: the operation that multiplies by the weight.
        form: the form of its weight; see :meth:`keep`.
        by_inputs: whether ranks that divide it divide its inputs; also of experts that ranks hold whole.
        weight: the weight, or its numbers as :func:`hal.ops.linear` takes them, in the layout that the driver prepared.
        bias: ``[out_features]``, or as the driver prepared it; or None.
        weight_scale: the scales, of another form than floating-point numbers.
        weight_zero_point: the zero points, or None.
        input_scale: of a static input in int8 ``[in_features]``, float32: one value, repeated for kernels that fuse a
            norm; in float8 ``[1]``.
        input_offset: ``[in_features]``, int32, one value, repeated; None for 0.
        input_order: ``[in_features]``, int64: the input of each column of an ordered weight; None for the same order.
    """

    operation: ClassVar[str]
    group: str | None = None
    merged: bool = False
    form: Form = FLOAT
    weight: Tensor
    bias: Tensor | None
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    input_scale: Tensor
    input_offset: Tensor | None
    input_order: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parts: Mapping[str, int],
        shard: str | None,
        share: Share = EQUALLY,
        gather: bool = False,
        num_experts: int | None = None,
        rows: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self.in_features, self.out_features, self.parts = in_features, out_features, dict(parts)
        self.shard, self.share, self.gather, self.num_experts = shard, share, gather, num_experts
        self.sizes = tuple(self.parts.values()) or (out_features,)
        self.by_inputs = shard == IN

    @property
    def quantized(self) -> bool:
        """Whether its weight is not of floating-point numbers."""
        return self.form.numbers != "float"

    @property
    def biased(self) -> bool:
        """Whether it has a bias."""
        return self.bias is not None

    def keep(self, form: Form) -> None:
        """Hold the weight in a form from now on, as buffers, so that all parameters have the compute dtype.

        Called before the loader fills the tensors, which :attr:`kept` declares.
        """
        biased = self.biased
        for name in ("weight", "bias"):
            delattr(self, name)
        self.form = form
        self.register_buffer("weight_zero_point", None)
        for name, weight in self.kept.items():
            assert weight.sizes is not None
            absent = name == "bias" and not biased
            self.register_buffer(name, None if absent else torch.empty(weight.shape(weight.sizes), dtype=weight.dtype))

    @property
    def kept(self) -> Mapping[str, Weight]:
        """The declarations of the tensors of its form. The loader computes all but a bias of floating-point numbers."""
        form, kind = self.form, self.form.kind

        def computed(name: str, axes: str = f"{OUT} {IN}", **options: Any) -> Weight:
            return self.declare(None, axes, consumer=Consumer(self.operation, name), **options)

        groups = {OUT: form.rows or self.out_features, IN: form.group(self.in_features)}
        scales = torch.float32 if form.scales == "float" else torch.uint8
        found = {
            "weight": computed("weight", packing={IN: (kind.count, kind.elements)}, dtype=kind.dtype),
            "weight_scale": computed(
                "weight_scale", group_sizes=groups, dtype=scales, trailing={IN: SECOND} if form.second else {}
            ),
        }
        if form.zero_points:
            found["weight_zero_point"] = computed("weight_zero_point", group_sizes=groups, dtype=torch.int8)
        if form.inputs == "static_int8":
            found["bias"] = computed("bias", OUT, dtype=torch.int32)
            found["input_scale"] = self.declare(None, IN, dtype=torch.float32)
            found["input_offset"] = self.declare(None, IN, dtype=torch.int32)
        else:
            found["bias"] = self.stored_bias
        if form.inputs == "static_float8":
            found["input_scale"] = self.declare(None, "one", sizes={"one": 1}, dtype=torch.float32)
        if form.ordered:
            experts = {} if self.num_experts is None else {EXPERTS: self.num_experts}
            found["input_order"] = self.declare(None, " ".join((*experts, IN)), sizes=experts, dtype=torch.int64)
        return found

    @property
    def stored_bias(self) -> Weight:
        """The declaration of the bias of a quantized layer that is no integer."""
        consumer = Consumer(self.operation, "bias")
        return self.declare("bias", OUT, dtype=torch.float32, column=True, added=True, consumer=consumer)

    def nbytes(self, form: Form, dtype: torch.dtype) -> int:
        """Return the bytes of the weight in a form, of all ranks, with scales and zero points."""
        return form.nbytes(self.out_features, self.in_features, dtype) * (self.num_experts or 1)

    def declare_stored(self, name: str) -> Weight:
        """Return the declaration of a checkpoint's tensor of floating-point numbers, as they are read."""
        return self.declare(name, fused=getattr(self, "fused", None))

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor | None, torch.dtype | None]:
        """Return x, in order, as the form takes it, the scale of each token or None, and the dtype of the result."""
        form = self.form
        if form.inputs == "float":
            return x, None, None
        if form.inputs == "static_int8":
            return ops.quantize(x, self.input_scale, self.input_offset), None, x.dtype
        if form.inputs == "static_float8":
            return *ops.float8_quantize(x, self.input_scale), x.dtype
        return *(ops.dynamic_quantize if form.inputs == "int8" else ops.float8_quantize)(x), x.dtype

    def gathered(self, x: Tensor) -> Tensor:
        """Return the inputs of all ranks, among which an order chooses those of this rank's columns."""
        return ops.all_gather(x, self.group) if self.shard == IN and self.group is not None else x

    def declare(
        self,
        name: str | None,
        axes: str = f"{OUT} {IN}",
        *,
        fused: str | None = None,
        added: bool = False,
        every_rank: bool = False,
        sizes: Mapping[str, int] = MappingProxyType({}),
        **options: Any,
    ) -> Weight:
        """Return the declaration of one of the layer's tensors, merged from those of its parts and of its experts.

        A tensor without the axis ``out_features``, such as the scale of the input, is stacked along a first axis
        ``parts``. Those of experts are stacked along ``num_experts``.

        Args:
            name: the tensor's name in each checkpoint layer; None for a tensor that the quantization scheme computes,
                which has an element for each part only where ``axes`` has ``out_features``.
            axes: the dimensions that a part's tensor has in the checkpoint.
            fused: the name of one checkpoint tensor beside this layer that has all parts of all experts.
            added: whether it is added to the output, such as a bias. Of ranks that add results, the first has it.
            every_rank: whether each rank has the whole tensor.
            sizes: the sizes of axes other than ``out_features`` and ``in_features``.
            options: further attributes of :class:`Weight`.
        """
        names, known = axes.split(), {OUT: self.out_features, IN: self.in_features, **sizes}
        by_row = OUT in names
        merged: Assembly = Whole()
        layers = self.layers
        prefixes = [""] if self.merged else [f".{layer}." for layer in layers] or [""]
        if by_row and self.parts:
            cuts = tuple(self.parts.values())
            merged = Merged(OUT, cuts) if self.merged else Concatenated(OUT, cuts)
            if self.rows and not self.merged:
                merged = Cut(OUT, cuts, tuple((first, size, layers[layer]) for layer, first, size in self.rows))
                prefixes = [f".{layer}." for layer, _, _ in self.rows]
        elif not by_row and name is not None:
            merged, names, known[PARTS] = Stacked(), [PARTS, *names], len(prefixes)
        if self.num_experts is not None and (by_row or name is not None):
            merged, names, known[EXPERTS] = Stacked(merged), [EXPERTS, *names], self.num_experts
            prefixes = [f".{expert}{each}" for expert in range(self.num_experts) for each in prefixes]
        sources = tuple(f"{each}{name}" for each in prefixes) if name is not None else ()
        if fused is not None:
            sources, merged = (f".{fused}",), Merged(OUT, tuple(self.parts.values()))
        return Weight(
            sources,
            " ".join(names),
            self.shard if self.shard in names and not every_rank else None,
            merged,
            share=self.share,
            first_rank_only=added and self.shard == IN,
            group="expert" if self.shard == EXPERTS else "tensor",
            sizes=tuple(known[each] for each in names),
            **options,
        )

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """The out_features on this rank of each layer in the checkpoint that it is merged from."""
        if self.merged or not self.rows:
            return (sum(self.sizes),) if self.merged else self.sizes
        return tuple(size * sum(self.sizes) // self.out_features for size in self.layers.values())

    @property
    def layers(self) -> Mapping[str, int]:
        """The out_features of the checkpoint's layers that it is merged from, by name; those of all ranks."""
        if not self.rows:
            return self.parts
        return {name: sum(size for each, _, size in self.rows if each == name) for name, _, _ in self.rows}

    def split(self, tensor: Group) -> None:
        """Compute this rank's part from now on. The loader fills the tensors accordingly.

        Raises:
            ConfigError: the ranks cannot share the weight.
        """
        if self.shard == OUT:
            self.sizes = tuple(self.share.size(size, tensor.size) for size in self.sizes)
        if self.shard == IN or (self.shard == OUT and self.gather):
            self.group = tensor.name

    def join(self, output: Tensor) -> Tensor:
        """Return the layer's output from this rank's: their sum, or their concatenation without padding."""
        if self.group is None:
            return output
        if self.shard == IN:
            return ops.all_reduce(output, self.group)
        gathered = ops.all_gather(output, self.group)
        return gathered if gathered.shape[-1] == self.out_features else gathered[..., : self.out_features]


class Linear(Projection):
    """:func:`hal.ops.linear` with a weight ``[out_features, in_features]`` and an optional bias.

    Args:
        in_features: features of the input.
        out_features: features of the output.
        bias: whether it has a bias.
        shard: the axis along which ranks may split the weight, ``out_features`` or ``in_features``, or None.
        share: how ranks share that axis.
        gather: whether each rank gets the whole output if ranks split ``out_features``.
        parts: see :class:`MergedLinear`.
        rows: see :class:`MergedLinear`.

    Attributes:
        takes_adapters: whether adapters may change its output.
        lora: the adapters that change its output; None for none.
    """

    operation = "linear"
    takes_adapters: ClassVar[bool] = True
    lora: Lora | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        shard: str | None = None,
        share: Share = EQUALLY,
        gather: bool = False,
        parts: Mapping[str, int] = MappingProxyType({}),
        rows: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        super().__init__(in_features, out_features, parts=parts, shard=shard, share=share, gather=gather, rows=rows)
        self.lora = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        if self.quantized:
            return self.kept
        return {
            "weight": self.declare("weight", consumer=Consumer("linear", "weight")),
            "bias": self.declare("bias", OUT, added=True),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of this rank if the layer is split."""
        output = self.product(x)
        return self.join(output if self.lora is None else self.lora(output, x))

    def product(self, x: Tensor) -> Tensor:
        """Return this rank's product with the weight, which :meth:`forward` joins with those of other ranks."""
        if not self.quantized:
            return ops.linear(x, self.weight, self.bias)
        if self.form.ordered and self.input_order is not None:
            x = self.gathered(x).index_select(-1, self.input_order)
        x, x_scale, dtype = self.rounded(x)
        given = self.weight, self.bias, self.weight_scale, self.weight_zero_point
        return ops.linear(x, *given, x_scale, dtype, self.form)

    if TYPE_CHECKING:
        __call__ = forward


class MergedLinear(Linear):
    """Several projections of one input as one projection. Their outputs are concatenated in the last dimension.

    Args:
        in_features: features of the input.
        parts: the out_features of each part, in order, by the name of the checkpoint layer beside this one. A
            checkpoint may also have them merged, in a layer of this one's name.
        bias: whether the parts have biases.
        shard: the axis along which ranks may split each part.
        share: how ranks share that axis.
        rows: where the checkpoint has the rows, if its layers are not the parts: for each run of rows, in order, the
            name of a layer beside this one, and the run's first row and its number of rows there. A layer's runs cover
            all its rows.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        shard: str | None = OUT,
        share: Share = EQUALLY,
        rows: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, shard=shard, share=share, parts=parts, rows=rows)
