"""Projections of one input as one, as hal's own models have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hal import ops
from hal.engines.transformers.models.phase import PHASE
from hal.nn import Linear, MergedLinear

SMALLEST = 16
"""Projections with fewer outputs, such as gates of a shared expert, stay apart."""


class GatheredLinear(MergedLinear):
    """Merged projections of which each rank has the whole output."""

    def join(self, output: Tensor) -> Tensor:
        """Return the whole parts from this rank's, one after another."""
        if self.group is None:
            return output
        parts = ops.all_gather(output, self.group).unflatten(-1, (-1, output.shape[-1])).split(self.sizes, -1)
        return torch.cat([each.flatten(-2) for each in parts], -1)


class Part(nn.Module):
    """One of several projections of the same input: a slice of what the merged one computes.

    Args:
        parent: the module that has this part and the merged projection.
        name: the name of the merged projection there. A scheme or a driver may replace the layer of that name.
        index: the place of the part in it.
    """

    def __init__(self, parent: nn.Module, name: str, index: int) -> None:
        super().__init__()
        self._parent, self._name, self._index = (parent,), name, index

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``. In a step, the first part computes all."""
        merged, products = getattr(self._parent[0], self._name), getattr(PHASE.get(), "products", None)
        known = None if products is None else products.get(id(merged))
        if known is None or known[0] is not x:
            known = (x, merged(x))
            if products is not None:
                products[id(merged)] = known
        sizes = tuple(merged.parts.values()) if merged.gather else merged.sizes
        part: Tensor = known[1].split(sizes, dim=-1)[self._index]
        return part


class Inputs:
    """Records, in a call of a model, which input each projection gets. The inputs are kept, so that ids are distinct.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[str, list[Tensor]] = {}
        self._hooks = [
            layer.register_forward_pre_hook(self._hook(path))
            for path, layer in model.named_modules()
            if type(layer) is nn.Linear
        ]

    def _hook(self, path: str) -> Any:
        return lambda _, args: self._seen.setdefault(path, []).append(args[0]) if args else None

    def groups(self) -> list[tuple[str, list[str]]]:
        """Return the projections of one input beside each other: the path above them and their names, as called."""
        for hook in self._hooks:
            hook.remove()
        found: dict[Any, list[str]] = {}
        for path, inputs in self._seen.items():
            parent, _, name = path.rpartition(".")
            found.setdefault((parent, tuple(map(id, inputs))), []).append(name)
        return [(parent, names) for (parent, _), names in found.items() if len(names) > 1]


def merge_projections(model: nn.Module, groups: Sequence[tuple[str, list[str]]]) -> int:
    """Merge hal's projections in place, a gate first. Return the number of merged ones."""
    count, modules = 0, dict(model.named_modules())
    for path, names in groups:
        parent = modules.get(path, model)
        found = {name: getattr(parent, name, None) for name in sorted(names, key=lambda each: "gate" not in each)}
        layers: Mapping[str, Linear] = {
            name: each for name, each in found.items() if type(each) is Linear and each.out_features >= SMALLEST
        }
        alike = {(each.bias is None, each.shard, each.share, each.gather) for each in layers.values()}
        if len(layers) < 2 or len(alike) > 1:
            continue
        first = next(iter(layers.values()))
        sizes = {name: each.out_features for name, each in layers.items()}
        kind = GatheredLinear if first.gather else MergedLinear
        with torch.device("meta"):
            merged = kind(first.in_features, sizes, bias=first.bias is not None, shard=first.shard, share=first.share)
        whole = "merged_" + "_".join(layers)
        merged.gather = first.gather
        parent.add_module(whole, merged)
        for index, name in enumerate(layers):
            setattr(parent, name, Part(parent, whole, index))
        count += 1
    return count
