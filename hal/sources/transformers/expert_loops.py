"""hal's experts in the place of a class of transformers that computes them in a loop over those that occur.

Such a loop depends on the values of tensors, so it can be neither probed nor captured. The class is recognized by what
it computes on random values, in a copy with small sizes.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hal import ops
from hal.nn import Consumer, Weight
from hal.nn.weights.assembly import Region
from hal.sources.transformers.conversions import Conversions
from hal.sources.transformers.experts import Gate, gates, routing_weights

ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
HIDDEN, WIDTH = 8, 6
"""The sizes of the copy that is compared."""


@attrs.frozen
class Stored:
    """The parameters of a class, and what they are.

    Attributes:
        gate_up: one tensor ``[experts or more, 2 * width, hidden]``, or those of the gate and of the other part,
            ``[experts * width, hidden]`` each.
        down: ``[experts, hidden, width]``, or ``[experts * width, hidden]``.
        experts: the number of experts with weights.
        same: the number of experts behind them, which return their input.
        hidden: features of the input and the output.
        width: features between the projections.
    """

    gate_up: tuple[str, ...]
    down: str
    experts: int
    same: int
    hidden: int
    width: int

    def tensors(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return gate and up ``[experts, 2 * width, hidden]`` and down ``[experts, hidden, width]`` of small copies."""
        down = given[self.down]
        if len(self.gate_up) == 1:
            return given[self.gate_up[0]][: self.experts], down
        parts = [given[name].unflatten(0, (self.experts, -1)) for name in self.gate_up]
        return torch.cat(parts, 1), down.unflatten(0, (self.experts, -1)).transpose(1, 2)

    def weights(self) -> dict[str, Weight]:
        """Return the declarations of both tensors."""
        count, hidden, width = self.experts, self.hidden, self.width
        first: tuple[str, ...] = self.gate_up
        second: tuple[str, ...] = (self.down,)
        shape: tuple[int, ...]
        if len(self.gate_up) == 1:
            shape = (count + self.same, 2 * width, hidden)
            gate_up = [_region((0, count), (0, 2 * width), (0, hidden), (0, 1, 2), shape, 0)]
            down = [_region((0, count), (0, hidden), (0, width), (0, 1, 2), (count, hidden, width), 0)]
        else:
            shape, turns = (count * width, hidden), range(count)
            first = tuple(name for name in self.gate_up for _ in turns)
            gate_up = [
                _region((each, each + 1), (part * width, (part + 1) * width), (0, hidden), (1, 2), shape, each * width)
                for part in (0, 1)
                for each in turns
            ]
            down = [_region((each, each + 1), (0, hidden), (0, width), (2, 1), shape, each * width) for each in turns]
            second = (self.down,) * count
        parts = {"gate_up_proj": zip(first, gate_up, strict=True), "down_proj": zip(second, down, strict=True)}
        stored = Conversions({}, {name: list(each) for name, each in parts.items()})
        return {name: _weight(stored, name) for name in parts}


class LoopedExperts(nn.Module):
    """Experts with the arguments of transformers' class.

    Args:
        gate: hal's activation.

    Attributes:
        gate_up_proj: ``[experts, 2 * width, hidden]``.
        down_proj: ``[experts, hidden, width]``.
    """

    def __init__(self, stored: Stored, gate: Gate) -> None:
        super().__init__()
        self.weights, self._gate = stored.weights(), gate
        self._experts, self._same = stored.experts, stored.same
        shapes = (
            (stored.experts, 2 * stored.width, stored.hidden),
            (stored.experts, stored.hidden, stored.width),
        )
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False) for shape in shapes
        )

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same shape."""
        if hidden.is_meta:  # The model is probed.
            return torch.empty_like(hidden)
        x, experts, weights = hidden.reshape(-1, hidden.shape[-1]), top_k_index, top_k_weights
        if self._same:
            computed = experts < self._experts
            kept = weights.masked_fill(computed, 0).sum(-1, keepdim=True)
            experts, weights = experts * computed, weights * computed
        rows, counts, positions = ops.expert_permute(x, experts.int(), self._experts)
        inner = self._gate(ops.grouped_linear(rows, self.gate_up_proj, counts))
        output = ops.grouped_linear(inner, self.down_proj, counts)
        output = ops.expert_unpermute(output, positions, routing_weights(weights, output))
        return (output + (x * kept).to(x.dtype) if self._same else output).view(hidden.shape)


def replace_loops(model: nn.Module, conversions: Conversions) -> set[str]:
    """Put hal's experts into a model in the place of those that it computes in loops, if they compute the same.

    Returns:
        The tensors of a checkpoint that they do not need.
    """
    left: set[str] = set()
    for path, layer in list(model.named_modules()):
        if (made := _experts_of(layer)) is not None and (unread := _find(made, path, layer, conversions)) is not None:
            model.set_submodule(path, made)
            left |= unread
    return left


def _find(experts: LoopedExperts, path: str, layer: nn.Module, conversions: Conversions) -> set[str] | None:
    """Declare where the checkpoint has tensors that transformers converts. Return those that are not needed.

    None if a tensor is converted in another way.
    """
    unread: set[str] = set()
    assembled = [name for name, _ in layer.named_parameters() if f"{path}.{name}" in conversions.assembled]
    shapes = {name: each.shape for name, each in experts.named_parameters()}
    if any(name not in shapes for name in assembled):
        return None
    for name in assembled:
        full = f"{path}.{name}"
        parts = conversions.assembled[full]
        kept = [each for each in parts if each[1].target["axis0"][1] <= shapes[name][0]]
        unread |= {source for source, _ in parts} - {source for source, _ in kept}
        experts.weights[name] = _weight(Conversions({}, {full: kept}), full)
    return unread


def _experts_of(module: Any) -> LoopedExperts | None:
    """Return hal's experts that compute what a class does, or None."""
    if hasattr(module, "has_gate") or list(inspect.signature(module.forward).parameters) != ARGUMENTS:
        return None
    for stored in _forms(module):
        small = attrs.evolve(stored, hidden=HIDDEN, width=WIDTH)
        with torch.device("cpu"), torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            given = {
                name: torch.randn(_shrunk(each.shape, stored), generator=generator)
                for name, each in module.named_parameters()
            }
            x = torch.randn(5, HIDDEN, generator=generator)
            experts = torch.rand(5, stored.experts + stored.same, generator=generator).topk(2).indices
            experts[0, 0] = stored.experts + stored.same - 1
            weights = torch.rand(5, 2, generator=generator)
            try:
                wanted = functional_call(_copy(module, stored), given, (x, experts, weights)).reshape(5, HIDDEN)
            except Exception:  # A class of another form may raise anything.
                continue
            gate_up, down = small.tensors(given)
            for name, options in gates(module):
                gate = partial(ops.operation(name).body, **options)
                if torch.allclose(_computed(x, experts, weights, gate_up, down, gate), wanted, 1e-4, 1e-5):
                    return LoopedExperts(stored, partial(getattr(ops, name), **options))
    return None


def _forms(module: nn.Module) -> Iterator[Stored]:
    """Yield what the parameters of a class may be, by their shapes."""
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    if len(shapes) == 2 and all(len(each) == 3 for each in shapes.values()):
        for first, second in itertools.permutations(shapes):
            (every, double, hidden), (count, rows, width) = shapes[first], shapes[second]
            if every >= count and (double, hidden) == (2 * width, rows):
                yield Stored((first,), second, count, every - count, hidden, width)
    experts = getattr(module, "num_experts", None)
    alike = len(shapes) == 3 and len(set(shapes.values())) == 1
    if alike and isinstance(experts, int) and all(len(each) == 2 and not each[0] % experts for each in shapes.values()):
        for gate, up, down in itertools.permutations(shapes):
            rows, hidden = shapes[down]
            yield Stored((gate, up), down, experts, 0, hidden, rows // experts)


def _copy(module: nn.Module, stored: Stored) -> nn.Module:
    """Return a copy of a class whose numbers are those of the small sizes."""
    sizes = {stored.hidden: HIDDEN, stored.width: WIDTH}
    made = copy.deepcopy(module)
    for each in made.modules():
        for name, value in list(vars(each).items()):
            if type(value) is int and value in sizes:
                setattr(each, name, sizes[value])
    return made


def _shrunk(shape: Sequence[int], stored: Stored) -> list[int]:
    sizes = {stored.hidden: HIDDEN, stored.width: WIDTH, 2 * stored.width: 2 * WIDTH}
    if len(shape) == 2:
        return [stored.experts * WIDTH, HIDDEN]
    return [shape[0], *(sizes[each] for each in shape[1:])]


def _computed(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate: Gate) -> Tensor:
    """Return the experts' output by the definition."""
    each = torch.einsum("tei,ehi->teh", gate(torch.einsum("th,eoh->teo", x, gate_up)), down)
    same = x[:, None].expand(-1, int(experts.max()) + 1 - each.shape[1], -1)
    chosen = torch.cat((each, same), 1).gather(1, experts[..., None].expand(-1, -1, x.shape[-1]))
    return (chosen * weights[..., None]).sum(1)


def _region(
    experts: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    start: int,
) -> Region:
    target = {f"axis{dim}": each for dim, each in enumerate((experts, rows, columns))}
    return Region(target, tuple(f"axis{dim}" for dim in axes), shape, (start, *[0] * (len(shape) - 1)))


def _weight(conversions: Conversions, name: str) -> Weight:
    found = conversions.weight(name, consumer=Consumer("grouped_linear", "weight"))
    assert found is not None
    return found
