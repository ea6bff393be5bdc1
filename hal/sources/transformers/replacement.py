"""The replacement of a model's layers by hal's, and the declarations of the tensors that the others keep."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hal import ops
from hal.nn import Linear, MergedLinear, Weight
from hal.sources.transformers.conversions import Conversions
from hal.sources.transformers.expert_loops import LoopedExperts
from hal.sources.transformers.experts import RoutedExperts, StackedExperts, experts_of
from hal.sources.transformers.layers import (
    TiedHead,
    TokenEmbedding,
    TransposedLinear,
    embedding_of,
    linear_of,
    norm_of,
)
from hal.sources.transformers.phase import PHASE
from hal.sources.transformers.routers import Router, router_of
from hal.sources.transformers.tensor_parallel import (
    PARTED,
    WHOLE,
    PartedLinear,
    plan_of,
    refusal,
    sharding,
    split_parameters,
)

SMALLEST = 16
"""Projections with fewer outputs, such as gates of a shared expert, stay apart."""


def declare_weights(model: Any, conversions: Conversions) -> None:
    """Declare the tensors that the checkpoint has otherwise, buffers that it has, and those that stay float32."""
    wide = [re.compile(each.replace(".", r"\.").replace("*", r"[^.]+")) for each in model._keep_in_fp32_modules_strict]
    buffers = dict(model.named_buffers())
    for name, tensor in model.state_dict().items():
        path, _, last = name.rpartition(".")
        if name in model.all_tied_weights_keys or isinstance(model.get_submodule(path), LoopedExperts):
            continue
        dtype = torch.float32 if any(each.search(name) for each in wide) else None
        found = conversions.weight(name, dtype=dtype)
        if found is None and (name in buffers or dtype is not None):
            found = Weight((last,), " ".join(f"{last}_{dim}" for dim in range(tensor.dim())), dtype=dtype)
        if found is not None:
            module = model.get_submodule(path)
            module.weights = {**vars(module).get("weights", {}), last: found}


def replace_layers(model: Any, conversions: Conversions, head_dim: int, widths: Mapping[str, int]) -> Counter[str]:
    """Put hal's layers into a model. Return how many, by the name of hal's layer.

    Args:
        model: transformers' model on the meta device; changed in place.
        conversions: how its checkpoint has its tensors.
        head_dim: elements of a key head.
        widths: how wide the inputs of layers without tensors are, by path.
    """
    plan = plan_of(model)
    head = model.get_output_embeddings()
    counts: Counter[str] = Counter()
    routers: tuple[str, ...] = ()
    for path, layer in list(model.named_modules()):
        made: nn.Module | None = None
        if path.startswith(routers):
            continue  # A part of what was replaced.
        if isinstance(layer, nn.Linear | nn.Embedding | Conv1D) and vars(layer).get("weights"):
            continue  # Its tensors are no whole tensors of the checkpoint, or stay float32.
        if hasattr(layer, "has_gate") and isinstance(getattr(layer, "down_proj", None), nn.Parameter):
            made = experts_of(layer, path, conversions)
        elif type(layer) is nn.Linear:
            kind = PartedLinear if plan.get(path) == PARTED and layer is not head else Linear
            made = linear_of(layer, kind, **sharding(plan.get(path), path, layer, head_dim, head=layer is head))
        elif type(layer) is Conv1D:
            with torch.device("meta"):
                made = TransposedLinear(layer.nx, layer.nf, bias=True)
        elif isinstance(layer, nn.Embedding):
            made = embedding_of(layer)
        elif (made := router_of(layer)) is None and not vars(layer).get("weights"):
            made = norm_of(layer, widths.get(path))
        if made is not None:
            counts[type(made).__name__] += 1
            model.set_submodule(path, made)
            routers += (f"{path}.",) if isinstance(made, Router) else ()
    split_parameters(model, plan)
    experts = tuple(f"{path}." for path, each in model.named_modules() if isinstance(each, RoutedExperts))
    model.refused_split = refusal({path: style for path, style in plan.items() if not path.startswith(experts)})
    uncut = [
        path
        for path, each in model.named_modules()
        if type(each) is nn.Linear and plan.get(path, WHOLE[0]) not in WHOLE
    ]
    if any(isinstance(each, StackedExperts | LoopedExperts) for each in model.modules()):
        uncut.insert(0, "its experts")
    if uncut and model.refused_split is None:
        model.refused_split = f"the checkpoint has the tensors of {uncut[0]} in a form that hal's ranks do not cut"
    return counts


def tie(model: Any) -> dict[str, str]:
    """Remove the tied tensors, so that each is loaded once. Return those to share later, by name, with their source."""
    shared = {}
    head = dict(model.named_modules()).get(model.output_projection)
    biased = getattr(head, "bias", None) is not None
    for target, source in model.all_tied_weights_keys.items():
        path, _, last = target.rpartition(".")
        layer, owner = model.get_submodule(path), model.get_submodule(source.rpartition(".")[0])
        if path == model.output_projection and type(owner) is TokenEmbedding and not biased:
            model.set_submodule(path, TiedHead(owner))
        else:
            layer.register_parameter(last, None)
            shared[target] = source
    return shared


def refusal_to_split(model: Any) -> str | None:
    """Return why ranks cannot split a model whose layers were replaced, or None."""
    problem: str | None = model.refused_split
    return problem


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
