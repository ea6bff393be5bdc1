"""Scales of blocks of rows where parts of a layer, or of ranks, end inside a block."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from hal.errors import ConfigError
from hal.nn import Assembly, Concatenated, Merged, Stacked, Weight, Whole
from hal.nn.linear import IN, OUT
from hal.quantization.stored_layer import StoredLayer

BLOCKS = "row_blocks"


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
