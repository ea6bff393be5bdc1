"""Float8 weights with scales of blocks, output channels or tensors; ``quant_method`` ``fp8`` has them as DeepSeek does.

Source: the documentation of transformers' FineGrainedFP8Config; ``weight_scale_inv`` multiplies, despite its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import ConfigError
from hal.nn import Assembly, Concatenated, Merged, Stacked, Weight, Whole
from hal.nn.linear import IN, OUT
from hal.ops.forms import Form
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.forms import in_blocks
from hal.quantization.layer_patterns import ExcludedLayers
from hal.quantization.stored_layer import FloatLayer, Reader, StoredAs, StoredLayer, Tensors, Writer
from hal.quantization.value_checks import FLOATS, NUMBERS, POSITIVE

BLOCKS = "row_blocks"


@attrs.frozen(slots=False)
class Fp8Scales(Reader, Writer):
    """``weight``, and its scales as blocks, output channels or a number; ``input_scale`` of static activations.

    Attributes:
        strategy: ``block``, ``channel`` or ``tensor``: what has one scale.
        name: the name of the tensor of scales.
        ones: whether those of blocks have a dimension of 1 after each: ``[rows, 1, columns, 1]``.
    """

    strategy: str
    name: str
    ones: bool = False
    of_inputs = ("input_scale",)

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        layer, form = stored.layer, stored.form
        fused = getattr(layer, "fused", None)
        if fused is not None and (self.strategy != "block" or form.inputs == "static_float8"):
            raise ConfigError(
                f"the checkpoint has {fused} of all experts as one tensor in float8 with a scale by {self.strategy}",
                "use a checkpoint with blocks (weight_block_size), or with a tensor for each expert",
            )
        scales: dict[str, Any] = {"dtype": torch.float32, "stored": (*FLOATS, torch.float8_e8m0fnu)}
        scales["checks"] = (POSITIVE,)
        weight = layer.declare("weight", fused=fused, dtype=torch.float8_e4m3fn)
        if self.strategy == "block":
            of_all = None if fused is None else f"{fused}_{self.name.removeprefix('weight_')}"
            blocks = {OUT: form.rows, IN: form.columns}
            axes: dict[str, Any] = (
                {"axes": f"{OUT} row {IN} column", "sizes": {"row": 1, "column": 1}} if self.ones else {}
            )
            scale = layer.declare(self.name, fused=of_all, group_sizes=blocks, every_rank=stored.cut, **axes, **scales)
            if stored.ragged:
                scale = of_all_blocks(scale, stored, fused)
        elif self.strategy == "channel":
            scale = layer.declare(self.name, OUT, column=True, **scales)
        else:
            scale = layer.declare(self.name, "", every_rank=True, column=True, **scales)
        if fused is not None:
            return {"values": weight, "scales": scale}
        required = form.inputs == "static_float8"
        given: dict[str, Any] = {"stored": NUMBERS, "optional": not required, "every_rank": True, "column": True}
        static = layer.declare("input_scale", "", dtype=torch.float32, checks=(POSITIVE,) if required else (), **given)
        return {"values": weight, "scales": scale, "input_scale": static}

    def decode(self, stored: StoredLayer) -> Tensors:
        weight, scale = stored["values"].view(torch.uint8), stored["scales"]
        if self.ones:
            scale = scale.squeeze(-1).squeeze(-2)
        if self.strategy == "tensor":
            scale = stored.rows_of(scale, weight)
        if self.strategy != "block":
            scale = scale.unsqueeze(-1)
        else:
            scale = stored.of_rank(of_rows(scale, stored) if stored.ragged else scale)
        found = {"weight": weight, "weight_scale": scale, "bias": stored.tensors.get("bias")}
        if stored.form.inputs != "static_float8":
            return found
        return found | {"input_scale": stored["input_scale"].max().reshape(1)}  # of parts and experts, the largest

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        """Quantize a layer with scales ``max|x| / 448``, which are float32 for output channels."""
        wide, (count, width) = layer.weight.float(), layer.weight.shape
        sides = {"block": (form.rows, form.columns), "channel": (1, width), "tensor": (count, width)}
        rows, columns = sides[self.strategy]
        padded = torch.nn.functional.pad(wide.abs(), (0, -width % columns, 0, -count % rows))
        largest = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
        scale = torch.where(largest == 0, 1.0, largest / torch.finfo(torch.float8_e4m3fn).max)
        scale = scale if self.strategy == "channel" else scale.to(layer.dtype)
        each = scale.float().repeat_interleave(rows, 0)[:count].repeat_interleave(columns, 1)[:, :width]
        shaped = scale.flatten() if self.strategy == "tensor" else scale[:, None, :, None] if self.ones else scale
        found = {"weight": (wide / each).to(torch.float8_e4m3fn), self.name: shaped}
        return found | layer.biases

    def numbers(self, tensors: Mapping[str, Tensor], form: Form, rows: slice) -> Tensor:
        return tensors["weight"][rows].view(torch.uint8)


def of_all_blocks(scale: Weight, stored: StoredLayer, fused: str | None) -> Weight:
    """Return the declaration of the scales of all blocks of rows, of which some parts do not fill the last."""
    layer, rows = stored.layer, stored.form.rows
    parts = tuple(layer.layers.values()) or (layer.out_features,)
    if fused is not None and any(each % rows for each in parts[:-1]):
        raise ConfigError(
            f"the checkpoint has {fused} of all experts as one tensor in float8 with scales of {rows} rows, of which "
            f"one covers rows of both parts of {parts[0]}",
            "use a checkpoint with blocks that divide the parts, or with a tensor for each expert",
        )
    assert scale.sizes is not None
    counts = tuple(-(-size // rows) for size in parts)
    each: Assembly = Concatenated(BLOCKS, counts) if layer.parts and not layer.merged else Whole()
    assemble = Merged(BLOCKS, counts) if fused is not None else Stacked(each) if layer.num_experts is not None else each
    return attrs.evolve(
        scale,
        axes=scale.axes.replace(OUT, BLOCKS),
        shard=None if scale.shard == OUT else scale.shard,
        assemble=assemble,
        sizes=tuple(sum(counts) if name == OUT else size for name, size in zip(scale.names, scale.sizes, strict=True)),
        group_sizes={IN: stored.form.columns},
    )


def of_rows(scale: Tensor, stored: StoredLayer) -> Tensor:
    """Return the scales of this rank's rows ``[..., rows, blocks of columns]`` from those of all blocks."""
    layer, rows, found, start = stored.layer, stored.form.rows, list[Tensor](), 0
    for size in layer.layers.values() or (layer.out_features,):
        count = -(-size // rows)
        whole = scale[..., start : start + count, :].repeat_interleave(rows, -2)[..., :size, :]
        first, last = (0, size)
        if layer.shard == OUT:
            first, last = layer.share.interval(size, stored.ranks.rank, stored.ranks.size)
        found.append(whole[..., first:last, :])
        start += count
    return torch.cat(found, -2)


class Fp8Blocks(CheckpointFormat):
    """The format of float8 weights."""

    name = "fp8"

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        if (kind := section.value("fmt", default="e4m3")) != "e4m3":
            raise ConfigError(f"{section.name} has fmt {kind!r:.60}, which hal does not support", "use e4m3")
        if (kind := section.value("expert_dtype", default="fp8")) != "fp8":
            raise ConfigError(
                f"{section.name} has expert_dtype {kind!r:.60}, which hal does not read beside float8",
                "use a checkpoint whose experts are in fp8, or unquantized",
            )
        block = section.value("weight_block_size")
        strategy, scales = ("tensor", "weight_scale") if block is None else ("block", "weight_scale_inv")
        form = in_blocks({"strategy": strategy, "block_structure": block})
        static = section.value("activation_scheme") == "static" and block is None
        form = attrs.evolve(form, inputs="static_float8") if static else form
        stored_as = StoredAs(form, Fp8Scales(strategy, scales))
        found = ExcludedLayers(stored_as, section.lists("modules_to_not_convert", "ignored_layers"))
        if (activations := section.value("activation_scheme")) is not None and not static:
            found.unapplied = (f"activation_scheme {activations!r:.60} of {section.name}",)
        return found
