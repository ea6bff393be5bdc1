"""Tests for graphs on the NPU: host values are up to date, capture errors are explained, and memory is shared."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import emulated_cann
import pytest
import torch
from helpers import TESTS
from helpers.attending import HEADS, KV_HEADS, LENGTHS, ROWS, SCALE
from helpers.npu.attending import BLOCK, Attend
from helpers.thorough import AGAIN, EXHAUSTIVE, thorough
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal import ops
from hal.errors import CaptureError, DeviceError, GraphError, HostValueError

Opened = Callable[..., hal.Backend]


@pytest.fixture(params=["fused", "atb"])
def attend(request: pytest.FixtureRequest, npu: Opened) -> Attend:
    return Attend(npu(options={"attention": request.param}))


class TestHostValues:
    def check(
        self, attend: Attend, graph: hal.vendor.Graph, output: Tensor, lengths: Sequence[list[int]] = LENGTHS
    ) -> None:
        for lens in lengths:
            attend.device_lens.copy_(torch.tensor(lens))
            expected = attend.twice(torch.tensor(lens, dtype=torch.int32)).cpu()
            graph.replay(**attend.host_values(lens))
            torch.testing.assert_close(output.cpu(), expected, rtol=0, atol=0)

    def test_every_replay_reads_its_own_lengths(self, attend: Attend) -> None:
        graph = attend.backend.graph()
        self.check(attend, graph, graph.capture(attend.twice))

    @thorough(EXHAUSTIVE, r"\[([4-9]|1\d)\]")
    @pytest.mark.parametrize("seed", range(20))
    def test_under_any_schedule(self, npu: Opened, seed: int) -> None:
        attend = Attend(npu())
        graph = attend.backend.graph()
        with emulated_cann.schedule(seed):
            self.check(attend, graph, graph.capture(attend.twice))

    @thorough(EXHAUSTIVE, r"\[([4-9]|1\d)\]")
    @pytest.mark.parametrize("seed", range(20))
    def test_without_a_wait_between_replays(self, npu: Opened, seed: int) -> None:
        """A replay whose lengths are set while the previous one runs must not change the previous one's lengths."""
        attend = Attend(npu())
        graph, results = attend.backend.graph(), []
        output = graph.capture(attend.twice)
        with emulated_cann.schedule(seed):
            for lens in LENGTHS:
                graph.replay(**attend.host_values(lens))
                results.append(output.clone())
            found = [each.cpu() for each in results]
        for lens, each in zip(LENGTHS, found, strict=True):
            expected = attend.twice(torch.tensor(lens, dtype=torch.int32)).cpu()
            torch.testing.assert_close(each, expected, rtol=0, atol=0)

    def test_the_caller_may_change_them_at_once(self, attend: Attend) -> None:
        graph = attend.backend.graph()
        output = graph.capture(attend.twice)
        values = attend.host_values(LENGTHS[1])
        expected = attend.twice(values["kv_lens_host"].clone()).cpu()
        with emulated_cann.faults.delay("", 0.02, count=None):
            graph.replay(**values)
            values["kv_lens_host"].fill_(3)
        torch.testing.assert_close(output.cpu(), expected, rtol=0, atol=0)

    @pytest.mark.parametrize(
        "given",
        [
            {"window": 70},  # a mask of slots made on the device
            {"window": 70, "head_dim": 128},  # an attention that also takes query lengths
            *({"window": window, "with_sinks": True} for window in (None, 70)),  # sinks after the softmax
            # In the softmax: the second version of the fused attention has other names for the lengths.
            *({"window": window, "with_sinks": True, "head_dim": 64, "dtype": torch.bfloat16} for window in (None, 70)),
            # Composed: such a decode reads lengths on the device, in a graph as in an eager call.
            *({"softcap": 2.0, "window": 70, "with_sinks": with_sinks} for with_sinks in (False, True)),
        ],
        ids=str,
    )
    def test_windows_sinks_and_softcaps(self, npu: Opened, given: dict[str, Any]) -> None:
        attend, packed = Attend(npu(), **given), "dtype" in given
        graph = attend.backend.graph()
        lengths = [lens for lens in LENGTHS if any(lens)] if packed else LENGTHS
        self.check(attend, graph, graph.capture(attend.twice), lengths)
        if packed:
            blocks = attend.caches[0].shape[0]
            with pytest.raises(HostValueError, match=f"captured over {blocks} blocks"):
                graph.replay(**attend.host_values([(blocks + 1) * BLOCK, 1, 1, 1, 1]))
        if "softcap" in given:
            values = attend.host_values(LENGTHS[0])
            with pytest.raises(HostValueError, match=r"query_start_loc_host .* no replay can"):
                graph.replay(**values | {"query_start_loc_host": torch.tensor([0, 2, 2, 3, 4, 5], dtype=torch.int32)})

    def test_the_number_of_queries_is_part_of_a_decode_capture(self, attend: Attend) -> None:
        graph = attend.backend.graph()
        graph.capture(attend.twice)
        values = attend.host_values(LENGTHS[0])
        with (
            emulated_cann.trace() as trace,
            pytest.raises(HostValueError, match=r"query_start_loc_host .* no replay can"),
        ):
            graph.replay(**values | {"query_start_loc_host": torch.tensor([0, 2, 2, 3, 4, 5], dtype=torch.int32)})
        assert not trace.records


class TestCounts:
    def test_attention_behind_the_dispatcher_is_refused(self, attend: Attend) -> None:
        graph = attend.backend.graph()
        with pytest.raises(CaptureError, match=r"did not record 2 of 2 calls with host values \(paged_attention\)"):
            graph.capture(lambda: attend.twice(attention=ops.operation("paged_attention").node))

        def half() -> Tensor:
            first = attend.call(attend.query, attend.lens)
            return attend.call(first, attend.lens, ops.operation("paged_attention").node)

        with pytest.raises(CaptureError, match="1 of 2 calls"):
            graph.capture(half)
        with pytest.raises(GraphError, match="without a capture"):
            graph.replay(**attend.host_values(LENGTHS[0]))
        TestHostValues().check(attend, graph, graph.capture(attend.twice))

    def test_attention_beside_hal_is_refused(self, npu: Opened) -> None:
        import torch_npu

        attend = Attend(npu())

        def function() -> Tensor:
            attended: Tensor = torch_npu.npu_fused_infer_attention_score(
                attend.query.view(ROWS, 1, -1),
                attend.caches[0].flatten(2),
                attend.caches[1].flatten(2),
                actual_seq_lengths_kv=[1] * ROWS,
                block_table=attend.table,
                num_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                scale=SCALE,
                input_layout="BSH",
                block_size=BLOCK,
            )[0]
            return attended

        with pytest.raises(CaptureError, match="recorded 1 launches to update, but hal's operations made only 0"):
            attend.backend.graph().capture(function)


class TestCapture:
    @pytest.mark.parametrize(
        ("breaks", "message"),
        [
            (lambda x: x.sum().item(), "synchroniz|a read back"),
            (lambda x: x.cpu(), "synchroniz|a read back"),
            (lambda x: torch.ones(8).to(x.device), "a read back to the host or a copy from unpinned memory"),
            (lambda x: torch.npu.synchronize(), "synchroniz|does not allow"),
            (lambda x: torch.npu.Stream().wait_stream(torch.npu.current_stream()), None),
            (lambda x: hal.active_backend().device.synchronize(), "synchroniz|does not allow"),
        ],
        ids=["item", "cpu", "unpinned", "synchronize", "unjoined", "device-error"],
    )
    def test_what_cannot_be_captured_is_said_and_the_process_goes_on(
        self, npu: Opened, breaks: Callable[[Tensor], Any], message: str | None
    ) -> None:
        backend = npu()
        x = torch.ones(8, device="npu", dtype=torch.float16)
        graph, stream, handles = backend.graph(), torch.npu.current_stream(), emulated_cann.live_handles()["graph"]

        def function() -> Tensor:
            y = x + 1
            breaks(y)
            return y * 2

        if message is not None:
            with pytest.raises(CaptureError, match=message) as caught:
                graph.capture(function)
            assert caught.value.remedy
            assert caught.value.__cause__ is not None
        assert torch.npu.current_stream() == stream
        assert not torch.npu.is_current_stream_capturing()
        output = graph.capture(lambda: x + 2)
        graph.replay()
        assert output.cpu().tolist() == [3.0] * 8
        del output
        graph.reset()
        assert emulated_cann.live_handles()["graph"] == handles

    @pytest.mark.parametrize("make", [KeyError, RuntimeError, KeyboardInterrupt])
    def test_what_the_function_raises_wins_over_the_captures_end(self, npu: Opened, make: type[BaseException]) -> None:
        """The function raises after a refused call, or between a fork and its join, which fails the end too."""
        backend = npu()
        x, graph = torch.ones(8, device="npu", dtype=torch.float16), backend.graph()

        def forked() -> None:
            side = torch.npu.Stream()
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                x.add(1)
            raise error

        def refused() -> None:
            with suppress(RuntimeError):
                x.cpu()
            raise error

        for function in (refused, forked):
            error = make("mine")
            with pytest.raises(make) as caught:
                graph.capture(function)
            assert caught.value is error
            assert caught.value.__cause__ is None
            assert not torch.npu.is_current_stream_capturing()
        assert any("the capture's end" in note for note in error.__notes__)
        output = graph.capture(lambda: x + 2)
        graph.replay()
        assert output.cpu().tolist() == [3.0] * 8

    def test_pools_are_shared_and_checked(self, npu: Opened) -> None:
        backend = npu()
        x = torch.ones(1 << 20, device="npu", dtype=torch.float16)
        first, second = backend.graph(), backend.graph()
        first.capture(lambda: (x + 1) * 2)
        gc.collect()  # Otherwise graphs of other tests could be collected during the test.
        torch.npu.empty_cache()
        before = torch.npu.memory_reserved()
        second.capture(lambda: (x + 3) * 2, pool=first.pool)
        assert torch.npu.memory_reserved() == before
        second.replay()
        assert second.outputs[0].item() == 8.0
        first.replay()
        assert first.outputs[0].item() == 4.0
        with pytest.raises(GraphError, match="is not the pool of an NPUGraph"):
            backend.graph().capture(lambda: x + 1, pool="elsewhere")


class TestBeginAndEnd:
    """Several graphs from one run, with eager operations between them on the same stream."""

    def test_attention_in_graphs_of_one_pool(self, npu: Opened) -> None:
        """Replay three graphs five times, each time with other lengths."""
        attend = Attend(npu())
        graphs = [attend.backend.graph() for _ in range(3)]
        scale = torch.ones(1, device="npu", dtype=torch.float16)
        made: list[Tensor] = []
        with attend.backend.capturing() as captures:
            for number, graph in enumerate(graphs):
                captures.begin(graph, pool=graphs[0].pool if number else None)
                made.append(captures.end(attend.twice() * scale))
                assert not torch.npu.is_current_stream_capturing()
                scale.add_(1)  # runs eagerly
        assert len({graph.pool for graph in graphs}) == 1
        attend.backend.device.synchronize()
        assert scale.item() == 4
        for lens in LENGTHS[:5]:
            attend.device_lens.copy_(torch.tensor(lens))
            expected = attend.twice(torch.tensor(lens, dtype=torch.int32))
            for number, graph in enumerate(graphs):
                scale.fill_(number + 2)
                graph.replay(**attend.host_values(lens))
                torch.testing.assert_close(made[number], expected * (number + 2), rtol=0, atol=0)

    def test_modes_of_the_code(self, npu: Opened) -> None:
        """A mode inside a capture sees attention before torch_npu does; one around the end of a capture is refused."""
        attend, seen = Attend(npu()), Noting()
        graph = attend.backend.graph()

        def noted() -> Tensor:
            with seen:
                return attend.twice()

        TestHostValues().check(attend, graph, graph.capture(noted))
        assert any("fused_infer_attention" in name for name in seen.names)
        graph.reset()

        def ends_in_it() -> None:
            with attend.backend.capturing() as captures:
                captures.begin(graph)
                made = attend.twice()
                with seen:
                    captures.end(made)

        with pytest.raises(CaptureError, match=r"the innermost torch mode is Noting .* and must be CaptureWatch"):
            ends_in_it()
        TestHostValues().check(attend, graph, graph.capture(attend.twice))


class Noting(TorchDispatchMode):
    """Records the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_that_fails_is_an_error_and_the_next_replay_is_right(npu: Opened) -> None:
    attend = Attend(npu())
    graph = attend.backend.graph()
    output = graph.capture(attend.twice)
    graph.replay(**attend.host_values(LENGTHS[1]))
    with pytest.raises(GraphError, match="host values of a replay could not be set"):
        graph.replay(**attend.host_values([1, 1, 100_000, 1, 1]))  # more than its blocks hold
    TestHostValues().check(attend, graph, output)


def test_a_replay_that_failed_half_way_leaves_nothing_behind(npu: Opened) -> None:
    attend = Attend(npu())
    graph = attend.backend.graph()
    output = graph.capture(attend.twice)

    def step() -> None:
        graph.replay(**attend.host_values(LENGTHS[1]))
        with attend.backend.translating_errors():
            output.cpu()

    with emulated_cann.faults.execution("Add"), pytest.raises(DeviceError, match="507015"):
        step()
    TestHostValues().check(attend, graph, output)


def test_update_and_replay_overlap(npu: Opened) -> None:
    """The replay runs up to its first attention before lengths are set; each attention waits for its lengths."""
    attend = Attend(npu())

    def function() -> Tensor:
        return attend.twice() + torch.tanh(attend.query)

    graph = attend.backend.graph()
    graph.capture(lambda: torch.tanh(attend.query * 2) + function())
    orders = set()
    for seed in range(20):
        with emulated_cann.schedule(seed), emulated_cann.trace() as trace:
            graph.replay(**attend.host_values(LENGTHS[1]))
            torch.npu.synchronize()
        kinds = [(record.kind, record.name) for record in trace.records]
        updates = [index for index, (kind, _) in enumerate(kinds) if kind == "update"]
        attentions = [index for index, (_, name) in enumerate(kinds) if name == "FusedInferAttentionScoreV3"]
        assert len(updates) == len(attentions) == 2
        assert all(update < attention for update, attention in zip(updates, attentions, strict=True)), kinds
        before = sum(kind == "kernel" for kind, _ in kinds[: updates[0]])
        orders.add((before > 0, updates[1] > attentions[0]))
    assert {(True, True), (False, False)} <= orders


QUEUED = """
import sys
sys.path[:0] = {folders!r}
import emulated_cann
emulated_cann.activate(devices=2)
import hal, test_npu_graph
for options in ({{}}, {{"attention": "atb"}}):
    attend = test_npu_graph.Attend(hal.open({{"backend": "npu", "options": options}}))
    graph = attend.backend.graph()
    test_npu_graph.TestHostValues().check(attend, graph, graph.capture(attend.twice))
    graph.reset()
    test_npu_graph.TestHostValues().test_the_caller_may_change_them_at_once(attend)
print("right")
"""


@thorough(AGAIN)
def test_with_the_task_queue() -> None:
    program = QUEUED.format(folders=[str(Path(__file__).parent), str(TESTS)])
    environ = {**os.environ, "TASK_QUEUE_ENABLE": "1"}
    result = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=200)
    assert result.stdout == "right\n", result.stderr
