"""Tests for graphs on the CPU: what a tape records, how it replays, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hal.backends.cpu.tape import Tape
from torch import Tensor

import hal
from hal import ops
from hal.device.graph import Captures
from hal.errors import CaptureError, GraphError, HostValueError
from hal.ops import Draw, Operation
from hal.step import StaticBatch, StepShape

ATTENTION = ops.operation("paged_attention")


class Attention:
    """One captured attention on fixed memory, for tests of host values."""

    def __init__(self, backend: hal.Backend, sample: int = 3) -> None:
        arguments = list(ATTENTION.samples(Draw()))[sample]
        self.arguments = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
        self.graph = backend.graph()
        self.starts, self.lens = arguments[6], arguments[7]
        self.output = self.graph.capture(lambda: ops.paged_attention(*self.arguments))


def test_every_operation_replays_what_it_computes(cpu: hal.Backend) -> None:
    """A replay reads inputs that changed in place and keeps the addresses of outputs.

    Plain torch operations around the call are replayed too. The conformance suite replays every operation once.
    """
    for operation in ops.catalogue().values():
        for index, sample in enumerate(operation.samples(Draw())):
            if operation.name == "sample":
                continue  # Draws its noise from `steps`, and its inputs depend on each other.
            if operation.name in ("channel_delta_rule", "gated_delta_rule"):
                continue  # Its state overflows if decays are any numbers.
            check_replay(cpu, operation, list(sample), f"{operation.name}, sample {index}")


def check_replay(cpu: hal.Backend, operation: Operation, arguments: list[Any], what: str) -> None:
    arguments = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
    floating = [value for value in arguments if isinstance(value, Tensor) and value.is_floating_point()]
    first = next(iter(floating), object())

    def function() -> list[Tensor]:
        results = operation.function(*[value * 1 if value is first else value for value in arguments])
        results = results if isinstance(results, tuple) else () if results is None else (results,)
        return [result + 1 for result in results]

    names = dict(zip(operation.signature.parameters, arguments, strict=True))
    hosts = {name: names[name].clone() for name in operation.host}
    graph = cpu.graph()
    outputs = graph.capture(function)
    addresses = [output.data_ptr() for output in outputs]
    for tensor in floating:
        tensor.copy_(torch.randn_like(tensor))
    # A replay writes states of integers, too.
    changed = floating + [names[each] for each in operation.mutates if not names[each].is_floating_point()]
    before = [tensor.clone() for tensor in changed]
    graph.replay(**hosts)
    found, written = [output.clone() for output in outputs], [tensor.clone() for tensor in changed]
    for tensor, value in zip(changed, before, strict=True):
        tensor.copy_(value)
    torch.testing.assert_close(found, function(), rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")
    torch.testing.assert_close(written, changed, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")
    assert [output.data_ptr() for output in graph.outputs] == addresses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_glue_of_every_kind(cpu: hal.Backend, dtype: torch.dtype) -> None:
    """Views, writes through views, casts, multiple results, constants, indexing, and an output that is an input."""
    x, table = torch.randn(6, 8).to(dtype), torch.randn(10, 8).to(dtype)
    index = torch.tensor([3, 1, 2, 0, 5, 4])

    def function() -> dict[str, Any]:
        hidden = x.t().contiguous().t() * 2
        hidden[:, :2] += 1
        hidden.view(3, 2, 8)[1].zero_()
        values, places = hidden.float().topk(3, dim=-1)
        first, second = hidden.split([3, 5], dim=-1)
        total = torch.cat([second, first], dim=-1) + torch.tensor([1.0, -1.0] * 4)
        looked_up = table[index] + torch.nn.functional.embedding(index, table)
        buffer = torch.empty_like(hidden).copy_(looked_up)
        return {"values": values, "places": places, "total": total, "buffer": buffer, "view": hidden[2:4], "input": x}

    graph = cpu.graph()
    outputs = graph.capture(function)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(6, 8))
        index.copy_(torch.randperm(6))
        graph.replay()
        torch.testing.assert_close(outputs, function(), rtol=0, atol=0)
    assert outputs["input"] is x


def test_results_that_die_share_memory(cpu: hal.Backend) -> None:
    x = torch.zeros(1000)

    def chain(length: int) -> Tensor:
        hidden = x
        for _ in range(length):
            hidden = hidden + 1
        return hidden

    short, long = cpu.graph(), cpu.graph()
    short.capture(lambda: chain(3))
    long.capture(lambda: chain(100))
    assert long.pool.nbytes == short.pool.nbytes
    long.replay()
    assert (long.outputs == 100).all()


def test_a_pool_that_grows_leaves_earlier_graphs_alone(cpu: hal.Backend) -> None:
    small, large = torch.ones(4), torch.ones(4000)
    first, second = cpu.graph(), cpu.graph()
    first.capture(lambda: small + 1)
    second.capture(lambda: large + 2, pool=first.pool)
    small.fill_(5)
    first.replay()
    second.replay()
    assert (first.outputs == 6).all()
    assert (second.outputs == 3).all()


class TestHostValues:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda values: {**values, "kv_lens": values["kv_lens_host"]}, "did you mean 'kv_lens_host'"),
            (lambda values: {"kv_lens_host": values["kv_lens_host"]}, "lacks the host values query_start_loc_host"),
            (lambda values: {**values, "kv_lens_host": values["kv_lens_host"].long()}, r"int64\[4\]"),
            (lambda values: {**values, "kv_lens_host": [1, 2]}, r"int32\[2\]"),
        ],
        ids=["unknown", "missing", "dtype", "short list"],
    )
    def test_wrong_ones_raise_before_anything_runs(
        self, cpu: hal.Backend, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
    ) -> None:
        attention = Attention(cpu)
        before = attention.output.clone()
        attention.arguments[0].normal_()  # a replay would change it
        values = {"query_start_loc_host": attention.starts, "kv_lens_host": attention.lens}
        with pytest.raises(HostValueError, match=message):
            attention.graph.replay(**change(values))
        assert torch.equal(attention.output, before)

    def test_one_name_for_two_tensors_is_refused(self, cpu: hal.Backend) -> None:
        first, second = (list(ATTENTION.samples(Draw()))[3] for _ in range(2))
        with pytest.raises(CaptureError, match="different tensors as query_start_loc_host"):
            cpu.graph().capture(lambda: ops.paged_attention(*first) + ops.paged_attention(*second))

    @pytest.mark.parametrize("way", ["node", "backend"])
    def test_calls_by_a_node_or_a_backend_are_recorded_too(self, cpu: hal.Backend, way: str) -> None:
        """Traced code calls operations through the dispatcher. The CPU records such calls."""
        call = ATTENTION.node if way == "node" else cpu.ops.paged_attention
        arguments = list(ATTENTION.samples(Draw()))[3]
        graph = cpu.graph()
        output = graph.capture(lambda: call(*arguments))
        lens = torch.tensor([5, 6, 1, 2], dtype=torch.int32)
        graph.replay(query_start_loc_host=arguments[6], kv_lens_host=lens)
        expected = ATTENTION.reference(*arguments[:5], lens, arguments[6], lens, *arguments[8:])
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "if": lambda x: x if x.sum() > 0 else -x,
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "numpy": lambda x: x.numpy(),
    "int": lambda x: x[int(x[0])],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "index": lambda x: [0, 1][x.long()[0]],
    "tensor": lambda x: torch.tensor([x[0], x[1]]),
    "is_nonzero": lambda x: x if torch.is_nonzero(x[0]) else -x,
    "where": lambda x: torch.where(x > 0),
    "nonzero tuple": lambda x: x.nonzero(as_tuple=True),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "dlpack": lambda x: torch.from_dlpack(x),
}


class TestRefusals:
    @pytest.mark.parametrize("name", READS)
    def test_what_reads_values_is_refused_by_name_and_place(self, cpu: hal.Backend, name: str) -> None:
        x = torch.zeros(4)
        graph = cpu.graph()
        with pytest.raises(CaptureError, match=r"test_graph\.py:\d+"):
            graph.capture(lambda: READS[name](x))
        output = graph.capture(lambda: x + 1)  # The graph and other captures still work.
        graph.replay()
        assert (output == 1).all()


def test_other_threads_are_not_captured(cpu: hal.Backend) -> None:
    sample = list(ATTENTION.samples(Draw()))[3]

    def function() -> Tensor:
        thread = threading.Thread(target=lambda: ops.paged_attention(*sample))
        thread.start()
        thread.join()
        return torch.ones(2) + 1

    graph = cpu.graph()
    graph.capture(function)
    graph.replay()  # Would require host values if the other thread's attention were on the tape.


def test_a_capture_waits_for_another_threads(cpu: hal.Backend) -> None:
    graphs, order = [cpu.graph(), cpu.graph()], []

    def second() -> Tensor:
        order.append("second")
        return torch.ones(2) * 2

    thread = threading.Thread(target=lambda: graphs[1].capture(second))

    def first() -> Tensor:
        thread.start()
        thread.join(0.1)
        order.append("first")
        return torch.ones(2) + 1

    graphs[0].capture(first)
    thread.join()
    assert order == ["first", "second"]
    for graph in graphs:
        with torch.inference_mode():
            graph.outputs.zero_()
        graph.replay()
        assert graph.outputs.tolist() == [2, 2]


def test_padding_rows_write_to_the_dummy_block_only() -> None:
    padded = StaticBatch(hal.step.Batch, StepShape.uniform(8), max_blocks=4, block_size=4, device=torch.device("cpu"))
    first = padded.first(StepShape.uniform(3))
    assert padded.batch.kv_lens.tolist() == first.batch.kv_lens_host.tolist() + [0] * 5 == [1] + [0] * 7
    build = hal.step.Batch.build([[7]] * 5, [[i + 1] for i in range(5)], block_size=4, cached=[1, 2, 3, 0, 1])
    padded.fill(build)
    padded.fill(hal.step.Batch.build([[9], [9]], [[1], [2]], block_size=4, cached=[3, 0]))
    batch = padded.batch
    assert batch.slot_mapping.tolist() == [7, 8, 2, 3, 0, 1, 2, 3]
    assert batch.kv_lens.tolist() == [4, 1, 0, 0, 0, 0, 0, 0]
    assert batch.token_ids.tolist() == [9, 9, 0, 0, 0, 0, 0, 0]
    assert padded.host_values(build)["kv_lens_host"].tolist() == [2, 3, 4, 1, 2, 0, 0, 0]


def test_a_capture_runs_the_function_once(cpu: hal.Backend) -> None:
    counter = torch.zeros(1)
    graph = cpu.graph()
    output = graph.capture(lambda: counter.add_(1) * 10)
    assert (counter.item(), output.item()) == (1, 10)
    graph.replay()
    assert (counter.item(), output.item()) == (2, 20)


class TestNumbers:
    """Regressions: cases in which a replay once gave other numbers than the function."""

    def same(self, cpu: hal.Backend, function: Callable[[Tensor], Any], *shape: int, dtype: torch.dtype) -> None:
        x = torch.randn(shape).to(dtype)
        graph = cpu.graph()
        outputs = graph.capture(lambda: function(x))
        for seed in range(2):
            x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            expected = function(x)
            torch.testing.assert_close(outputs, expected, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize(
        "write",
        [lambda t, x: t.add_(x), lambda t, x: t.mul_(2).sub_(x), lambda t, x: t.index_fill_(0, torch.tensor(1), 5)],
    )
    def test_a_constant_that_is_written_to_begins_anew(self, cpu: hal.Backend, write: Callable[..., Tensor]) -> None:
        for make in (torch.tensor, torch.as_tensor, lambda values: torch.ones(1).new_tensor(values)):
            self.same(cpu, lambda x, make=make: write(make([1.0, 2.0, 3.0]), x), 3, dtype=torch.float32)

    @pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64)], ids=str)
    @pytest.mark.parametrize("bias", [False, True])
    def test_linear_of_any_rank_rounds_once(self, cpu: hal.Backend, shape: tuple[int, ...], bias: bool) -> None:
        weight, added = torch.randn(96, 64).bfloat16(), torch.randn(96).bfloat16() if bias else None
        self.same(cpu, lambda x: ops.linear(x, weight, added), *shape, dtype=torch.bfloat16)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: torch.nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid().flip(0)),
            lambda x: torch.linalg.qr(x),
            lambda x: torch.var_mean(x, dim=0),
            lambda x: (x.sort(0, descending=True), x.topk(2), x.cumsum(1), x.softmax(-1), x.argmax(-1)),
            lambda x: torch.split(x * 2, [1, 3]) + tuple(x.unbind(0)),
            lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
            lambda x: torch.nn.functional.pad(x, (1, 2)).masked_fill(torch.tensor(False), 1.0),
            lambda x: torch.where(x > 0, x, -x) @ x.T,
            lambda x: x.clone().scatter_(0, torch.zeros(1, 4, dtype=torch.int64), 7.0),
            lambda x: (x[:0] + 1, x.t().reshape(2, 8) * 1, torch.full_like(x, 3.0)),
        ],
    )
    def test_other_operations(self, cpu: hal.Backend, function: Callable[[Tensor], Any]) -> None:
        self.same(cpu, function, 4, 4, dtype=torch.float32)

    def test_complex_numbers_are_refused(self, cpu: hal.Backend) -> None:
        with pytest.raises(CaptureError, match="complex"):
            cpu.graph().capture(lambda: torch.fft.fft(torch.ones(4)).abs())


class TestContract:
    def test_a_host_value_made_inside_is_refused(self, cpu: hal.Backend) -> None:
        """At a replay its launch would overwrite the new lengths with the captured ones."""
        sample = list(ATTENTION.samples(Draw()))[3]

        def function() -> Tensor:
            return ops.paged_attention(*sample[:6], sample[6] * 1, sample[7] * 1, *sample[8:])

        with pytest.raises(CaptureError, match="query_start_loc_host is computed inside"):
            cpu.graph().capture(function)

    def test_outputs_must_be_what_a_replay_can_fill(self, cpu: hal.Backend) -> None:
        class Result:
            value = torch.ones(1)

        with pytest.raises(CaptureError, match="returned a Result"):
            cpu.graph().capture(Result)

    def test_a_capture_inside_another_is_refused(self, cpu: hal.Backend) -> None:
        with pytest.raises(GraphError, match="inside another"):
            cpu.graph().capture(lambda: cpu.graph().capture(lambda: torch.ones(1) + 1))
        cpu.graph().capture(lambda: torch.ones(1) + 1)

    def test_a_pool_of_another_kind_is_refused(self, cpu: hal.Backend) -> None:
        with pytest.raises(GraphError, match="not the pool of a tape"):
            cpu.graph().capture(lambda: torch.ones(1) + 1, pool="pool")

    @pytest.mark.parametrize("values", [["a"] * 4, [1.9] * 4, None, [2**40] * 4, "1234"])
    def test_host_values_that_are_no_numbers(self, cpu: hal.Backend, values: Any) -> None:
        attention = Attention(cpu)
        with pytest.raises(HostValueError):
            attention.graph.replay(query_start_loc_host=attention.starts, kv_lens_host=values)

    def test_a_reset_forgets_the_host_values(self, cpu: hal.Backend) -> None:
        attention = Attention(cpu)
        assert "kv_lens_host" in attention.graph.host_values
        attention.graph.reset()
        assert "kv_lens_host" not in attention.graph.host_values

    def test_nodes_that_are_not_of_the_catalogue_are_plain_operations(self, cpu: hal.Backend) -> None:
        library = torch.library.Library("halgraphtest", "FRAGMENT")
        library.define("rms_norm(Tensor x) -> Tensor")
        library.impl("rms_norm", lambda x: -x, "CompositeExplicitAutograd")
        x = torch.ones(2)
        graph = cpu.graph()
        output = graph.capture(lambda: torch.ops.halgraphtest.rms_norm(x))
        x.fill_(3)
        graph.replay()
        assert output.tolist() == [-3, -3]


class TestBeginAndEnd:
    """Several graphs from one run, with eager operations between them."""

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (lambda captures, graph: captures.end(torch.ones(1)), "no capture is in progress"),
            (lambda captures, graph: (captures.begin(graph), captures.begin(graph)), "began inside another"),
            (lambda captures, graph: captures.begin(graph), "begun but not ended"),
            (lambda captures, graph: (captures.begin(graph), graph.capture(lambda: None)), "began inside another"),
            (lambda captures, graph: captures.begin(OtherGraph()), "cannot capture a OtherGraph in a block of"),
        ],
        ids=["end", "begin", "no end", "capture", "kind"],
    )
    def test_out_of_order(
        self, cpu: hal.Backend, use: Callable[[Captures, hal.vendor.Graph], Any], message: str
    ) -> None:
        graph = cpu.graph()
        with pytest.raises(GraphError, match=message), cpu.capturing() as captures:
            use(captures, graph)
        assert graph.capture(lambda: torch.ones(1) + 1).item() == 2

    def test_a_failure_that_the_code_caught(self, cpu: hal.Backend) -> None:
        graph = cpu.graph()

        def goes_on() -> None:
            with cpu.capturing() as captures:
                with pytest.raises(GraphError, match="not the pool of a tape"):
                    captures.begin(graph, pool="pool")
                captures.begin(graph)

        with pytest.raises(GraphError, match="caught the exception"):
            goes_on()
        assert graph.capture(lambda: torch.ones(1) + 1).item() == 2


class OtherGraph(Tape):
    """A graph of another driver."""
