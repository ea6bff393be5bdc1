"""What one rank of a split model does in a step: counted from its config and a trace, without weights or devices.

Bytes of weights, experts and states, and operations, are those of the floor of ``hal bench``. Launches, activations and
collectives are read off the rewritten graph of the model's first layers, so that no assumption about them is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from hal import ops
from hal.bench.contenders.random_weights import meta_model
from hal.bench.figures.floor import Work, decode_bytes, prefill_operations
from hal.bench.figures.launches import config_of_layers
from hal.bench.figures.routing import Routing, expert_weights
from hal.checkpoint.loading import shrink
from hal.compile.collective_calls import CollectiveCall, collective_calls, whole_without_fusion
from hal.compile.fx.alias_analysis import may_alias_input
from hal.compile.fx.clean import CLEANUPS
from hal.compile.fx.symbolic_sizes import value
from hal.compile.pass_manager import PassManager
from hal.compile.rewrite.rewrite import derived
from hal.compile.trace import StepSizes, TracedStep, trace_step
from hal.errors import ConfigError
from hal.nn import CausalLM
from hal.parallel import Mesh
from hal.step.state import StateSpec, canonical_states


@attrs.frozen
class StepKind:
    """A step of one copy of the model.

    Attributes:
        sequences: the number of sequences.
        queries: new tokens of each: 1 for decode, those of a prompt for prefill.
        context: tokens of each in the cache before the step.
    """

    sequences: int
    queries: int = 1
    context: int = 0

    @property
    def tokens(self) -> int:
        """The number of new tokens."""
        return self.sequences * self.queries


@attrs.frozen
class Exchange:
    """A collective: the bytes of its whole tensor, and how often they pass between ranks."""

    nbytes: int
    rounds: int


@attrs.frozen
class StepWork:
    """The work of one rank in a step.

    Attributes:
        memory: bytes that it reads and writes, by purpose.
        compute: operations, by purpose.
        launches: kernels that it launches, collectives excluded.
        exchanges: its collectives.
        held: bytes of weights and states that it holds.
    """

    memory: Work
    compute: Work
    launches: int
    exchanges: tuple[Exchange, ...]
    held: int


class SplitModel:
    """A model of which each of ``ranks`` holds a part, known from its config alone.

    Args:
        config: the keys of config.json.
        ranks: the number of ranks that split each layer.
        dtype: of weights, states and activations.
        fused: the fused operations that the device has kernels for.

    Raises:
        ConfigError: the model does not support the config, or the ranks cannot share it.
        CheckpointError: no model is registered for the config.
    """

    def __init__(self, config: Mapping[str, Any], ranks: int, dtype: torch.dtype, fused: Sequence[str]) -> None:
        heads = int(config["num_attention_heads"])
        if heads % ranks:
            raise ConfigError(f"{ranks} ranks cannot share {heads} heads", f"use a divisor of {heads}")
        self._heads, self._config, self._dtype = heads // ranks, config, dtype
        mesh = Mesh.planned(ranks)
        try:
            self._model = _split(config, mesh, dtype)
            one, two = (_traced(_split(_first_layers(config, layers), mesh, dtype), fused) for layers in (1, 2))
        finally:
            mesh.close()
        self._one, self._layer = one, two.minus(one)

    def work(self, kind: StepKind) -> StepWork:
        """Return a rank's work in a step.

        Of a mixture of experts, every token chooses its experts independently and with equal probability.
        """
        model, routings = self._model, self._routings(kind)
        read = decode_bytes(model, self._dtype, kind.sequences, kind.context + kind.queries, routings)
        layers = len(model.states)
        found = [(self._one, 1), (self._layer, layers - 1)]
        moved = sum(times * each.activations(kind) for each, times in found)
        exchanges = [each for part, times in found for each in part.exchanges(kind) * times]
        spec = StateSpec(tuple(model.states), self._dtype, 2, 1)
        return StepWork(
            Work({**read.parts, "activations": moved}, "bytes"),
            prefill_operations(
                model, self._heads, kind.sequences, kind.queries, routings, cached=kind.context
            ),
            sum(times * each.launches for each, times in found),
            tuple(exchanges),
            sum(each.numel() for each in model.parameters()) * self._dtype.itemsize
            + spec.token_bytes * kind.sequences * (kind.context + kind.queries),
        )  # fmt: skip

    def _routings(self, kind: StepKind) -> list[Routing]:
        weights = expert_weights(self._model)
        if not weights:
            return []
        number, chosen = weights[0].shape[0], int(self._config["num_experts_per_tok"])
        distinct = number * (1 - (1 - chosen / number) ** kind.tokens)
        return [Routing(math.ceil(distinct), chosen * kind.tokens)]


def split_model_of(config: Mapping[str, Any], ranks: int, dtype: torch.dtype, fused: Sequence[str]) -> SplitModel:
    """Return a :class:`SplitModel` for these arguments; a trace takes seconds, so that some are kept."""
    return _kept(json.dumps(dict(config), sort_keys=True), ranks, dtype, tuple(fused))


@lru_cache(maxsize=64)
def _kept(config: str, ranks: int, dtype: torch.dtype, fused: tuple[str, ...]) -> SplitModel:
    return SplitModel(json.loads(config), ranks, dtype, fused)


def _first_layers(config: Mapping[str, Any], layers: int) -> Mapping[str, Any]:
    """Return a config to trace: with few layers, and with no more experts than a token chooses.

    Launches and collectives do not depend on the number of experts, and of the activations only the router's scores.
    """
    cut = config_of_layers(config, layers)
    return {**cut, "num_experts": cut["num_experts_per_tok"]} if "num_experts" in cut else cut


def _split(config: Mapping[str, Any], mesh: Mesh, dtype: torch.dtype) -> CausalLM:
    model = meta_model(config).to(dtype)
    if mesh.size > 1:
        shrink(model, mesh.tensor)
    return model


@attrs.frozen
class _Counts:
    """What a traced step launches and moves, as expressions of the sizes of a step."""

    launches: int
    moved: Any
    calls: tuple[CollectiveCall, ...]
    symbols: Mapping[str, Any]

    def minus(self, other: _Counts) -> _Counts:
        """Return what this step does beyond ``other``, a step with fewer layers."""
        known = [each.of for each in other.calls]
        more = tuple(each for each in self.calls if each.of not in known)
        names = {other.symbols[name]: symbol for name, symbol in self.symbols.items()}
        return _Counts(self.launches - other.launches, self.moved - other.moved.subs(names), more, self.symbols)

    def activations(self, kind: StepKind) -> int:
        """Return the bytes of activations that a step reads and writes."""
        return int(self._at(self.moved, kind))

    def exchanges(self, kind: StepKind) -> list[Exchange]:
        """Return the collectives of a step."""
        return [Exchange(int(self._at(each.elements, kind)) * each.itemsize, each.rounds) for each in self.calls]

    def _at(self, expression: Any, kind: StepKind) -> Any:
        sizes = {"tokens": kind.tokens, "sequences": kind.sequences, "rows": kind.sequences}
        known = {self.symbols[name]: size for name, size in sizes.items()}
        return expression if isinstance(expression, int) else expression.subs(known)


def _traced(model: CausalLM, fused: Sequence[str]) -> _Counts:
    """Trace a step of any size, and rewrite it with the fused operations."""
    spec = StateSpec(tuple(model.states), next(model.parameters()).dtype, 2, 16, num_slots=2)
    states = canonical_states(spec, torch.device("meta"))
    # A model calls no fused operation, so that each collective is by itself before the rewrites.
    whole = whole_without_fusion() | set(fused)
    step = trace_step(model, states, StepSizes(None), whole=whole, decompose=False)
    calls = tuple(collective_calls(step, model))
    manager = PassManager(step.graph, step.mode)
    for rewrite in derived([ops.operation(name) for name in fused]):
        manager.add(rewrite)
    for clean in CLEANUPS:
        manager.add(clean)
    manager.apply()
    launched = [_moved(node, step) for node in _launched(step.graph.graph)]
    symbols = {name: size.node._expr for name, size in step.sizes.items() if not isinstance(size, int)}
    return _Counts(len(launched), sum(launched), calls, symbols)


def _launched(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the calls that compute: those that return no view, and are no collective."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operation = ops.operation_of_node(node.target)
        if operation is not None and operation.over_shards is not None:
            continue
        if operation is not None or not may_alias_input(node):
            yield node


def _moved(node: fx.Node, step: TracedStep) -> Any:
    """Return the bytes of the activations that a call reads and writes; weights and states are counted elsewhere."""
    inputs = [each for each in step.graph.graph.nodes if each.op == "placeholder"]
    fixed = set(inputs[len(step.fields) :])
    given = [value(each) for each in node.all_input_nodes if each not in fixed]
    results = value(node)
    returned = results if isinstance(results, tuple | list) else [results]
    return sum(_nbytes(each) for each in [*given, *returned] if isinstance(each, Tensor))


def _nbytes(tensor: Tensor) -> Any:
    if not tensor.is_floating_point():
        return 0
    count: Any = tensor.numel()
    return (count if isinstance(count, int) else count.node.expr) * tensor.dtype.itemsize
