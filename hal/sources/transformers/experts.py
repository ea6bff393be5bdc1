"""hal's experts and routers in the place of transformers', where they compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hal import ops
from hal.errors import ConfigError
from hal.nn import Consumer, Experts, Weight
from hal.sources.transformers.conversions import Conversions, spelling, whole_weight
from hal.sources.transformers.phase import REMEDY

Gate = Callable[[Tensor], Tensor]
"""Of gate and up, ``[..., 2 * width]``, to ``[..., width]``."""


class RoutedExperts(Experts):
    """:class:`hal.nn.Experts` with the arguments of transformers' experts."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        return super().forward(hidden, routing_weights(top_k_weights, hidden), top_k_index.int())


class StackedExperts(nn.Module):
    """Experts whose projections are one tensor each in the checkpoint, with or without biases.

    Args:
        module: transformers' experts, on the meta device.
        conversions: how the checkpoint has their tensors.

    Attributes:
        gate_up_proj: ``[num_experts, 2 * width, hidden]``, or ``up_proj`` without a gate.
        down_proj: ``[num_experts, hidden, width]``.
    """

    def __init__(self, module: Any, path: str, conversions: Conversions) -> None:
        super().__init__()
        self.num_experts = int(module.num_experts)
        self._gate: Gate | None = gate_of(module) if module.has_gate else None
        self._module = (module,)  # What it computes between the projections; it keeps no parameter.
        self._first = "gate_up_proj" if module.has_gate else "up_proj"
        self.weights: Mapping[str, Weight] = {}
        declared = {}
        for name in (self._first, "down_proj"):
            tensor = getattr(module, name)
            shape, axes = list(tensor.shape), [f"{name}_{dim}" for dim in range(3)]
            known = conversions.weight(f"{path}.{name}")
            if module.is_transposed:
                shape, axes = [shape[0], shape[2], shape[1]], [axes[0], axes[2], axes[1]]
            order = " ".join(axes)
            known = known or whole_weight(name, tensor.shape)
            declared[name] = Weight(
                known.sources, order, assemble=known.assemble, consumer=Consumer("grouped_linear", "weight")
            )
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
            if module.has_bias:
                bias = getattr(module, f"{name}_bias")
                if (known := conversions.weight(f"{path}.{name}_bias")) is not None:
                    declared[f"{name}_bias"] = known
                self.register_parameter(
                    f"{name}_bias", nn.Parameter(torch.empty(bias.shape, device="meta"), requires_grad=False)
                )
        for name, _ in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, None)
        self.weights = declared

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map ``[tokens, hidden]`` to the same shape."""
        experts = top_k_index.int()
        rows, counts, positions = ops.expert_permute(hidden, experts, self.num_experts)
        inner = self._activated(self._project(rows, counts, self._first))
        output = self._project(inner, counts, "down_proj")
        return ops.expert_unpermute(output, positions, routing_weights(top_k_weights, output))

    def _project(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        return ops.grouped_linear(rows, getattr(self, name), counts, getattr(self, f"{name}_bias", None))

    def _activated(self, x: Tensor) -> Tensor:
        if self._gate is not None:
            return self._gate(x)
        module = self._module[0]
        found: Tensor = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        return found


def experts_of(module: Any, path: str, conversions: Conversions) -> nn.Module:
    """Return hal's experts in the place of transformers'.

    Raises:
        ConfigError: they compute what hal's do not.
    """
    if module.has_post_expert_norm:
        raise ConfigError(
            f"{type(module).__name__} of transformers has a norm behind each expert, which hal's experts do not have",
            REMEDY,
        )
    gate = gate_of(module) if module.has_gate else None
    if gate is None:
        return StackedExperts(module, path, conversions)
    count, (first, second) = int(module.num_experts), module.down_proj.shape[1:]
    width, hidden = (first, second) if module.is_transposed else (second, first)
    names = _expert_names(module, path, conversions)
    with torch.device("meta"):
        if names is not None and getattr(gate, "func", None) is not ops.clipped_silu_and_mul:
            return RoutedExperts(count, hidden, width, names=names, activation=gate)
        if any(f"{path}.{name}" in conversions.assembled for name, _ in module.named_parameters()):
            return StackedExperts(module, path, conversions)
        return RoutedExperts(
            count,
            hidden,
            width,
            activation=gate,
            bias=module.has_bias,
            interleaved=getattr(gate, "keywords", {}).get("interleaved", False),
            transposed=module.is_transposed,
        )


def _expert_names(module: Any, path: str, conversions: Conversions) -> tuple[str, str, str] | None:
    """Return the checkpoint's names of the gate, up and down projections of each expert, or None if it has none."""
    if module.is_transposed or module.has_bias or not module.has_gate:
        return None
    first, second = (conversions.assembled.get(f"{path}.{name}", ()) for name in ("gate_up_proj", "down_proj"))
    count = int(module.num_experts)
    if len(first) != 2 * count or len(second) != count:
        return None
    below = re.compile(r"^(?P<above>.*)\.(?P<expert>\d+)\.(?P<name>\w+)\.weight$")
    found: dict[str, set[tuple[int, int]]] = {}
    for source, region in (*first, *second):
        match = below.match(source)
        turned = region.axes != ("axis1", "axis2")
        if match is None or turned or region.target["axis0"][0] != int(match["expert"]):
            return None
        found.setdefault(match["name"], set()).add(region.target["axis1"])
    ordered = sorted({below.match(source)["name"] for source, _ in first}, key=lambda each: min(found[each]))  # type: ignore[index]
    (down,) = {below.match(source)["name"] for source, _ in second}  # type: ignore[index]
    if len(ordered) != 2 or any(len(each) != 1 for each in found.values()):
        return None
    above = below.match(first[0][0])["above"]  # type: ignore[index]
    conversions.names.update(spelling(f"{above}.weight", f"{path}.weight"))
    return ordered[0], ordered[1], down


def gate_of(module: Any) -> Gate | None:
    """Return hal's activation that computes what experts do between their projections, or None.

    Args:
        module: the experts of a transformers model; its method ``_apply_gate`` is compared on random values.
    """
    with torch.device("cpu"), torch.no_grad():
        x = 5 * torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        try:
            found = module._apply_gate(x)
        except Exception:  # A gate of another form may raise anything.
            return None
        for name, options in gates(module):
            if found.shape == (3, 16) and torch.allclose(found, ops.operation(name).body(x, **options), 1e-4, 1e-5):
                return partial(getattr(ops, name), **options) if options else ops.silu_and_mul
    return None


def routing_weights(weights: Tensor, x: Tensor) -> Tensor:
    """Return the weights of a token's experts as :func:`hal.ops.expert_unpermute` takes them: in float32 or x's dtype.

    Args:
        weights: ``[tokens, top_k]``, of any floating dtype.
    """
    return weights if weights.dtype is torch.float32 else weights.to(x.dtype)


def gates(module: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield hal's gated activations, by the names of their operations, and the options that may fit a module."""
    yield "silu_and_mul", {}
    for approximate in ("none", "tanh"):
        yield "gelu_and_mul", {"approximate": approximate}
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        for interleaved in (True, False):
            yield "clipped_silu_and_mul", {"alpha": alpha, "limit": limit, "interleaved": interleaved}
