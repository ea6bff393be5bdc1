"""Tests of fused collectives: what they compute, where graphs are rewritten to them, and how many a split model has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stepping import states_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import hal
from hal import ops
from hal.cli import explanation
from hal.compile.optimize import kept_whole, optimize_model
from hal.compile.pass_manager import PassManager, Report
from hal.compile.rewrite.pattern import trace_function
from hal.compile.rewrite.rewrite import fusions
from hal.compile.trace import StepSizes, trace_step
from hal.errors import DriverIncompatible, OperationError
from hal.nn import CausalLM
from hal.ops import Draw
from hal.ops.tolerance import assert_agree
from hal.parallel import SOLO, Group, Mesh
from hal.step import ALL

COLLECTIVES = [each for each in ops.catalogue().values() if each.collective]


@pytest.mark.parametrize("operation", COLLECTIVES, ids=lambda each: each.name)
def test_over_one_rank_it_equals_the_reference(operation: ops.Operation) -> None:
    assert operation.over_shards is not None
    for sample in operation.samples(Draw()):
        (found,) = operation.over_shards([sample])
        assert_agree(operation, torch.float32, found, operation.reference(*sample))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ranks_compute_the_whole_layer(ranks: int) -> None:
    draw, width, out, tokens = Draw(), 24, 36, 12
    x, weight, bias = draw.normal(tokens, width), draw.normal(out, width, scale=0.2), draw.normal(out)
    whole = torch.nn.functional.linear(x, weight, bias)
    biases = [bias, *[torch.zeros(out)] * (ranks - 1)]
    by_input = [
        (*parts, added, "group")
        for *parts, added in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), biases, strict=True)
    ]
    for found in over_shards("linear_all_reduce", by_input):
        torch.testing.assert_close(found, whole)
    torch.testing.assert_close(torch.cat(over_shards("linear_reduce_scatter", by_input)), whole)
    by_rows = [(*parts, "group") for parts in zip(x.chunk(ranks), weight.chunk(ranks), bias.chunk(ranks), strict=True)]
    torch.testing.assert_close(torch.cat(over_shards("all_gather_linear", by_rows), -1), whole)
    residual, gamma = draw.normal(tokens, width), draw.normal(width)
    terms = [draw.normal(tokens, width) for _ in range(ranks)]
    expected = ops.operation("add_rms_norm").reference(sum(terms), residual, gamma, 1e-6)
    for found in over_shards("all_reduce_add_rms_norm", [(term, residual, gamma, 1e-6, "group") for term in terms]):
        torch.testing.assert_close(found, expected)


def over_shards(name: str, shards: list[Any]) -> list[Any]:
    found = ops.operation(name).over_shards
    assert found is not None
    return list(found(shards))


def test_a_collective_without_a_group_is_refused(forget_operations: None) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(OperationError, match="doubled declares over_shards, but has no argument `group`"):
        ops.op(
            samples=lambda draw: [(draw.normal(2, 3),)],
            axes={"x": "rows width", "return": "rows width"},
            dtypes={"x": ops.FLOATING, "return": "x"},
            rowwise="rows",
            over_shards=lambda shards: [],
        )(doubled)


def layer(x: Tensor, residual: Tensor, weight: Tensor, gamma: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Compute what follows the attention in a split layer."""
    hidden = residual + ops.all_reduce(ops.linear(x, weight), group)
    return ops.rms_norm(hidden, gamma, 1e-5), hidden


def rewritten(backend: hal.Backend, function: Callable[..., Any], *given: Any) -> tuple[Counter[str], Report]:
    """Return how often the graph of a function calls each operation after the backend's fusions, and their report."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in given]
    with ops.intercepted(lambda operation, _: operation.node):
        graph = trace_function(function, fakes, mode)
    manager = PassManager(graph, mode)
    for each in fusions(backend):
        manager.add(each)
    return called(graph), manager.apply()


def called(graph: torch.fx.GraphModule) -> Counter[str]:
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    overloads = [each for each in targets if isinstance(each, torch._ops.OpOverload)]
    return Counter(each._schema.name.partition("::")[2] for each in overloads)


def kernels(*names: str) -> dict[str, Any]:
    return {name: ops.operation(name).body for name in names}


def arguments(group: str) -> tuple[Any, ...]:
    return torch.randn(5, 8), torch.randn(5, 16), torch.randn(16, 8), torch.randn(16), group


def test_graphs_call_the_fused_operations_that_have_kernels(cpu: hal.Backend, pair: Group) -> None:
    for names in (("linear_all_reduce",), ("all_reduce_add_rms_norm",), ("linear_all_reduce", "add_rms_norm")):
        backend = hal.Backend("own", cpu.device, kernels=kernels(*names))
        _, report = rewritten(backend, layer, *arguments(pair.name))
        assert {each.name: len(each.matches) for each in report.passes} == dict.fromkeys(names, 1)

    def gathering(x: Tensor, weight: Tensor, group: str) -> Tensor:
        return ops.reduce_scatter(ops.linear(ops.all_gather_rows(x, group), weight), group)

    backend = hal.Backend("own", cpu.device, kernels=kernels("all_gather_linear", "linear_reduce_scatter"))
    _, report = rewritten(backend, gathering, torch.randn(6, 8), torch.randn(16, 8), pair.name)
    assert sum(len(each.matches) for each in report.passes) == 1, "the product belongs to one of them"


def test_a_condition_decides_where_a_kernel_is_used(cpu: hal.Backend, pair: Group) -> None:
    def few(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> str | None:
        return f"{x.shape[0]} rows over {group}" if x.shape[0] < 8 else None

    backend = hal.Backend(
        "own", cpu.device, kernels=kernels("linear_all_reduce"), conditions={"linear_all_reduce": few}
    )
    _, report = rewritten(backend, layer, *arguments(pair.name))
    assert report["linear_all_reduce"].reasons == {"5 rows over pair": 1}
    assert report.missed() == [], "the driver's choice needs no warning"
    assert report.missed({"linear_all_reduce"}) == [
        "the rewrite linear_all_reduce was applied nowhere: 5 rows over pair (1 times)"
    ]
    more = torch.randn(9, 8), torch.randn(9, 16), *arguments(pair.name)[2:]
    assert len(rewritten(backend, layer, *more)[1]["linear_all_reduce"].matches) == 1


@pytest.mark.parametrize(
    ("name", "problem"), [("add_rms_norm", "but has no kernel for it"), ("linear", "but it is not a fused operation")]
)
def test_conditions_without_a_rewrite_are_refused(cpu: hal.Backend, name: str, problem: str) -> None:
    with pytest.raises(DriverIncompatible, match=f"the driver own has a condition for {name}, {problem}"):
        hal.Backend("own", cpu.device, kernels=kernels("linear"), conditions={name: lambda *given: None})


COPIES = {"clone", "contiguous", "_to_copy", "copy_"}


def traced(backend: hal.Backend, model: CausalLM) -> Counter[str]:
    step = trace_step(model, states_of(model), StepSizes(3), whole=kept_whole(backend), decompose=False, rows=ALL)
    return called(step.graph)


def test_a_split_decoder_has_two_collectives_in_a_layer_and_two_in_a_step(trained: Path, pair: Group) -> None:
    """A Qwen3: the ranks add the results of o_proj and down_proj, and those of the embedding, and join the logits."""
    counts = []
    for mesh in (Mesh(), Mesh(tensor=pair)):
        with hal.open({"backend": "cpu", "dtype": "float32", "options": {"pack_weights": False}}, mesh=mesh) as backend:
            model = hal.load_model(str(trained), backend)
            counts.append(traced(backend, model))
            layers = len(model.states)
    alone, split = counts
    collectives = Counter({each.name: split[each.name] for each in COLLECTIVES if split[each.name]})
    assert collectives == {"all_reduce": 2 * layers + 1, "all_gather": 1}
    assert not [each.name for each in COLLECTIVES if alone[each.name]]
    assert {name: split[name] for name in COPIES} == {name: alone[name] for name in COPIES}
    assert split["linear"] == alone["linear"]


def test_every_split_projection_of_a_model_is_fused(trained: Path, pair: Group, cpu: hal.Backend) -> None:
    """A driver with a kernel gets every model fused, and `hal explain` says what the kernel is."""
    settings = {"backend": "cpu", "dtype": "float32", "options": {"pack_weights": False}}
    with hal.open(settings, mesh=Mesh(tensor=pair)) as backend:
        model = hal.load_model(str(trained), backend)
        own = hal.Backend(
            "own", cpu.device, kernels=kernels("linear_all_reduce"), sources={"linear_all_reduce": "one launch"}
        )
        own.activate()
        step = optimize_model(model, states_of(model), StepSizes(3), own, {"linear_all_reduce": True}, ALL)
        cpu.activate()
    counts = called(step.traced.graph)
    layers = len(model.states)
    assert (counts["linear_all_reduce"], counts["all_reduce"], counts["all_gather"]) == (2 * layers, 1, 1)
    rows = {name: (applied, skipped, why) for name, applied, skipped, _, why in explanation._rewrites(step, own)}
    assert rows["linear_all_reduce"] == (str(2 * layers), "0", "runs one launch")


class TestOfOneRank:
    """Collectives over a group of one rank vanish, and no memory is shared that was not shared before."""

    @staticmethod
    def run(function: Callable[..., Any], *given: Tensor) -> Counter[str]:
        """Check the rewritten graph's results, also in memory, and return what it calls."""
        from hal.compile.fx.clean import CLEANUPS
        from hal.compile.optimize import PREPARATIONS

        mode = FakeTensorMode()
        by_nodes = partial(ops.intercepted, lambda operation, _: operation.node)
        with by_nodes():
            graph = trace_function(function, [mode.from_tensor(each) for each in given], mode)
        manager = PassManager(graph, mode)
        for each in (*PREPARATIONS, *CLEANUPS):
            manager.add(each)
        manager.apply()
        ours, theirs = ([each.clone() for each in given] for _ in range(2))
        with by_nodes(), torch.no_grad():
            found, expected = graph(*ours), function(*theirs)
        torch.testing.assert_close((found, ours), (expected, theirs))
        places = [each.untyped_storage().data_ptr() for each in (*ours, *found)]
        assert len(set(places)) == len(places), "results share memory"
        counts = called(graph)
        assert not [each.name for each in COLLECTIVES if counts[each.name]]
        return counts

    @pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_gather_rows", "reduce_scatter"])
    def test_between_others_nothing_is_left(self, name: str) -> None:
        collective = getattr(ops, name)
        counts = self.run(lambda x: (collective(x.sin(), SOLO.name).cos(),), torch.randn(4, 6))
        assert counts == {"sin": 1, "cos": 1}

    def test_fused_ones_become_the_smaller_operations(self) -> None:
        x, weight, gamma = torch.randn(4, 6), torch.randn(6, 6), torch.randn(6)

        def function(x: Tensor, weight: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
            product = ops.linear_all_reduce(x, weight, None, SOLO.name)
            product = ops.all_gather_linear(product, weight, gamma, SOLO.name)
            product = ops.linear_reduce_scatter(product, weight, None, SOLO.name)
            return ops.all_reduce_add_rms_norm(product, x, gamma, 1e-6, SOLO.name)

        counts = self.run(function, x, weight, gamma)
        assert counts == {"linear": 3, "add": 1, "rms_norm": 1}

    def test_where_copies_are_needed(self) -> None:
        def returned(x: Tensor) -> tuple[Tensor, ...]:
            return ops.all_reduce(x, SOLO.name), ops.all_reduce(x, SOLO.name)[1:].clone()

        def source_is_written(x: Tensor) -> tuple[Tensor, ...]:
            old = ops.all_reduce(x, SOLO.name)
            x.add_(1)
            return (old * 2,)

        def result_is_written(x: Tensor) -> tuple[Tensor, ...]:
            result = ops.all_gather(x, SOLO.name)
            result.view(-1)[:3] = 0
            return (result.sin(),)

        def other_strides(x: Tensor) -> tuple[Tensor, ...]:
            return (ops.all_reduce(x.t(), SOLO.name).view(-1) * 2,)

        for function in (returned, source_is_written, result_is_written, other_strides):
            self.run(function, torch.randn(4, 6))

    def test_in_compiled_steps(self, cpu: hal.Backend) -> None:
        compiled = torch.compile(lambda x: ops.all_reduce(x * 2, SOLO.name) + 1, backend="hal", fullgraph=True)
        x = torch.randn(3, 4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), x * 2 + 1)
