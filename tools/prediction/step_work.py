"""What one rank of a split model does in a step: counted from its config and a trace, without weights or devices.

Bytes of weights, experts and states, and operations, are those of the floor of ``hal bench``. Launches, activations and
collectives are read off the rewritten graph of the model's first layers, so that no assumption about them is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from hal import ops
from hal.bench.floor import Work, decode_bytes, prefill_operations
from hal.bench.hal_side import config_of_layers
from hal.bench.routing import Routing, expert_projections
from hal.checkpoint.loading import distribute_experts, shrink
from hal.checkpoint.random_weights import meta_model
from hal.compile.collective_calls import CollectiveCall, collective_calls, whole_without_fusion
from hal.compile.fx.alias_analysis import may_alias_input
from hal.compile.fx.clean import CLEANUPS
from hal.compile.fx.symbolic_sizes import value
from hal.compile.pass_manager import PassManager
from hal.compile.rewrite.rewrite import derived
from hal.compile.trace import StepSizes, TracedStep, trace_step
from hal.config import ParallelConfig
from hal.errors import ConfigError
from hal.nn import CausalLM, Experts
from hal.parallel import Mesh
from hal.step import LAST, NONE
from hal.step.state import StateSpec, canonical_states


@attrs.frozen
class StepKind:
    """The size of a step, such as that of one copy of the model.

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
    """A collective of a step.

    Attributes:
        nbytes: bytes of its whole tensor; of a personal one, those that a rank has for all ranks.
        rounds: how often they pass between ranks.
        ranks: the number of ranks.
        stride: the distance of consecutive ranks of its group, in the order in which ranks fill nodes.
        personal: whether a rank sends something else to each other rank.
        operation: its name.
    """

    nbytes: int
    rounds: int
    ranks: int
    stride: int = 1
    personal: bool = False
    operation: str = ""

    @property
    def sent(self) -> int:
        """Bytes that each rank sends."""
        return self.rounds * self.nbytes * (self.ranks - 1) // self.ranks


@attrs.frozen
class StepWork:
    """The work of one rank in a step. Of a mixture of experts, the work of the busiest rank.

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
    """A model that ranks share, known from its config alone.

    Args:
        config: the keys of config.json.
        parallel: how the ranks share the model.
        dtype: of weights, states and activations.
        fused: the fused operations that the device has kernels for.

    Raises:
        ConfigError: the model does not support the config, or the ranks cannot share it.
        CheckpointError: no model is registered for the config.
    """

    def __init__(
        self, config: Mapping[str, Any], parallel: ParallelConfig, dtype: torch.dtype, fused: Sequence[str]
    ) -> None:
        heads, tensor = int(config["num_attention_heads"]), parallel.tensor
        if heads % tensor:
            raise ConfigError(f"{tensor} ranks cannot share {heads} heads", f"use a divisor of {heads}")
        self._heads, self._config, self._dtype, self._parallel = heads // tensor, config, dtype, parallel
        self._fused = tuple(fused)
        with self._planned() as mesh:
            self._model = self._rank_model(config, mesh)

    @property
    def sparse(self) -> bool:
        """Whether the model has experts."""
        return bool(expert_projections(self._model))

    def held(self, kind: StepKind) -> int:
        """Return the bytes of weights and states that a rank holds."""
        spec = StateSpec(tuple(self._model.states), self._dtype, 2, 1)
        states = spec.token_bytes * kind.sequences * (kind.context + kind.queries)
        return sum(each.numel() for each in self._model.parameters()) * self._dtype.itemsize + states

    def work(self, kind: StepKind, imbalance: float = 1.0) -> StepWork:
        """Return a rank's work in a step.

        Of a mixture of experts, every token chooses its experts independently and with equal probability, apart from
        ``imbalance``. Ranks that share whole experts all have as many tokens as this one.

        Args:
            kind: the step.
            imbalance: how often tokens choose the experts of the busiest rank, relative to the mean over the ranks. It
                has no effect if each rank holds a part of every expert.
        """
        imbalance = imbalance if self._whole else 1.0
        model, routings = self._model, self._routings(kind, imbalance)
        read = decode_bytes(model, self._dtype, kind.sequences, kind.context + kind.queries, routings)
        first, layer, _ = self._traced
        found = [(first, 1), (layer, len(model.states) - 1)]
        moved = sum(times * each.at(each.moved, kind.tokens, kind.sequences) for each, times in found)
        return StepWork(
            Work({**read.parts, "activations": moved}, "bytes"),
            prefill_operations(model, self._heads, kind.sequences, kind.queries, routings, cached=kind.context),
            sum(times * each.launches for each, times in found),
            tuple(each for part, times in found for each in self._exchanges(part, kind, imbalance) * times),
            self.held(kind),
        )

    def layer_exchanges(self, kind: StepKind, imbalance: float = 1.0) -> list[Exchange]:
        """Return the collectives of a layer; see :meth:`work`."""
        return self._exchanges(self._traced[1], kind, imbalance if self._whole else 1.0)

    def _exchanges(self, part: TracedCounts, kind: StepKind, imbalance: float) -> list[Exchange]:
        found = []
        for each in part.calls:
            nbytes = part.at(each.elements, kind.tokens, kind.sequences) * each.itemsize
            if each.routed:
                nbytes = round(nbytes * imbalance)
            stride = self._parallel.tensor if each.group == self._traced[2] else 1
            found.append(Exchange(nbytes, each.rounds, each.ranks, stride, each.personal, each.operation))
        return found

    def _routings(self, kind: StepKind, imbalance: float) -> list[Routing]:
        if not self.sparse:
            return []
        held = len(next(iter(expert_projections(self._model).values()))[0].tensor)
        number, tokens = held, kind.tokens
        if self._whole:
            number, tokens = held * self._parallel.size, tokens * self._parallel.data
        share = min(1.0, imbalance * int(self._config["num_experts_per_tok"]) / number)
        return [Routing(math.ceil(held * (1 - (1 - share) ** tokens)), round(held * share * tokens))]

    @property
    def _whole(self) -> bool:
        return self._parallel.experts != "split"

    def _first_layers(self, layers: int) -> Mapping[str, Any]:
        """Return a config to trace: with few layers, and with no more experts than a token chooses, if they are split.

        Launches and collectives do not depend on the number of split experts, and of the activations only the router's
        scores.
        """
        cut = config_of_layers(self._config, layers)
        if self._whole or "num_experts" not in cut:
            return cut
        return {**cut, "num_experts": cut["num_experts_per_tok"]}

    @cached_property
    def _traced(self) -> tuple[TracedCounts, TracedCounts, str]:
        """The counts of the first layer with all that is outside the layers, those of a further layer, and the name of
        the group of copies. A trace takes seconds.
        """
        with self._planned() as mesh:
            models = (self._rank_model(self._first_layers(each), mesh) for each in (1, 2))
            one, two = (traced_counts(each, self._fused) for each in models)
        return one, two.minus(one), mesh.data.name

    @contextmanager
    def _planned(self) -> Iterator[Mesh]:
        mesh = Mesh.planned(self._parallel.tensor, self._parallel.data, experts=self._whole)
        try:
            yield mesh
        finally:
            mesh.close()

    def _rank_model(self, config: Mapping[str, Any], mesh: Mesh) -> CausalLM:
        model = meta_model(config).to(self._dtype)
        # The first layers of a model with experts may have none.
        if self._whole and (config is self._config or any(isinstance(each, Experts) for each in model.modules())):
            distribute_experts(model, self._parallel.experts, mesh)
        if mesh.size > 1:
            shrink(model, mesh)
        return model


def split_model_of(
    config: Mapping[str, Any], parallel: ParallelConfig, dtype: torch.dtype, fused: Sequence[str]
) -> SplitModel:
    """Return a :class:`SplitModel` for these arguments; a trace takes seconds, so that some are kept."""
    if parallel.experts == "split":  # Then copies have nothing to do with each other.
        parallel = attrs.evolve(parallel, data=1)
    return _kept(json.dumps(dict(config), sort_keys=True), parallel, dtype, tuple(fused))


@lru_cache(maxsize=128)
def _kept(config: str, parallel: ParallelConfig, dtype: torch.dtype, fused: tuple[str, ...]) -> SplitModel:
    return SplitModel(json.loads(config), parallel, dtype, fused)


@attrs.frozen
class TracedCounts:
    """The counts of a traced step.

    Attributes:
        launches: kernels, collectives excluded.
        moved: bytes of activations that they read and write.
        calls: the collectives.
        symbols: the symbol of each axis.
    """

    launches: int
    moved: Any
    calls: tuple[CollectiveCall, ...]
    symbols: Mapping[str, Any]

    def minus(self, other: TracedCounts) -> TracedCounts:
        """Return what this step does beyond ``other``, a step with fewer layers."""
        known = [each.of for each in other.calls]
        more = tuple(each for each in self.calls if each.of not in known)
        names = {other.symbols[name]: symbol for name, symbol in self.symbols.items()}
        return TracedCounts(self.launches - other.launches, self.moved - other.moved.subs(names), more, self.symbols)

    def at(self, expression: Any, tokens: int, sequences: int) -> int:
        """Return the value of an expression for a step of these sizes."""
        sizes = {"tokens": tokens, "sequences": sequences}
        known = {self.symbols[name]: size for name, size in sizes.items()}
        return expression if isinstance(expression, int) else int(expression.subs(known))


def traced_counts(model: CausalLM, fused: Sequence[str]) -> TracedCounts:
    """Trace a step of any size, and rewrite it with the fused operations."""
    spec = StateSpec(tuple(model.states), next(model.parameters()).dtype, 2, 16, num_slots=2)
    states = canonical_states(spec, torch.device("meta"))
    # A model calls no fused operation, so that each collective is by itself before the rewrites.
    whole = whole_without_fusion() | set(fused)
    rows = LAST if model.has_logits else NONE
    step = trace_step(model, states, StepSizes(None), whole=whole, decompose=False, rows=rows)
    calls = tuple(collective_calls(step, model))
    manager = PassManager(step.graph, step.mode)
    for rewrite in derived([ops.operation(name) for name in fused]):
        manager.add(rewrite)
    for clean in CLEANUPS:
        manager.add(clean)
    manager.apply()
    launched = [_moved(node, step) for node in _launched(step.graph.graph)]
    symbols = {name: size.node._expr for name, size in step.sizes.items() if not isinstance(size, int)}
    return TracedCounts(len(launched), sum(launched), calls, symbols)


def _launched(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the calls that compute: those that return no view, and are no collective."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operation = ops.operation_of_node(node.target)
        if operation is not None and operation.collective:
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
