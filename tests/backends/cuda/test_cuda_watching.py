"""Tests for what a CUDA graph records about calls during its capture. No GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hal.backends.cuda.attention import ByLength
from hal.backends.cuda.graph import CallWatch, CudaGraph
from torch import Tensor

import hal
from hal import ops
from hal.errors import CaptureError, HostValueError

ROWS = 3
HOST = {"query_start_loc_host", "kv_lens_host"}


class Kernel:
    """Attention that only counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, query: Tensor, *others: Any) -> Tensor:
        self.calls += 1
        return query + 1


@pytest.fixture
def kernels() -> Iterator[tuple[Kernel, Kernel]]:
    """Return the active backend's kernels for graphs and for long prefills."""
    backend = hal.open("cpu")
    short, long = Kernel(), Kernel()
    attention = ByLength(short, long)
    ops.activate(lambda each: attention if each.name == "paged_attention" else backend.resolve(each))
    yield short, long
    backend.activate()


@pytest.fixture
def graph() -> CudaGraph:
    """Return a graph without a capture stream."""
    return CudaGraph(0, None)  # type: ignore[arg-type]


def watched(graph: CudaGraph) -> AbstractContextManager[None]:
    """Watch calls as in a capture of the graph."""
    watch = CallWatch()
    watch.graph = graph
    return ops.intercepted(watch.wrap)


def call(queries: list[int], lengths: Tensor | None = None) -> Tensor:
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(queries, dtype=torch.int32) if lengths is None else lengths
    cache, table = torch.zeros(4, 8, 1, 8), torch.zeros(len(queries), 2, dtype=torch.int32)
    query = torch.zeros(int(starts[-1]), 2, 8)
    attended: Tensor = ops.paged_attention(
        query, cache, cache, table, starts, lengths, starts, lengths, None, ops.AttentionOptions(1.0)
    )
    return attended


def test_names_are_recorded(graph: CudaGraph, kernels: tuple[Kernel, Kernel]) -> None:
    call([1] * ROWS)
    assert graph.host_values.items() == []
    with watched(graph):
        assert call([1] * ROWS).shape == (ROWS, 2, 8)
    assert {name for name, _ in graph.host_values.items()} == HOST
    assert kernels[0].calls == 2


def test_graphs_take_the_kernel_with_lengths_on_the_device(graph: CudaGraph, kernels: tuple[Kernel, Kernel]) -> None:
    """Long prefills included."""
    short, long = kernels
    call([40])
    with watched(graph):
        call([40])
    assert (short.calls, long.calls) == (1, 1)


class Planner(Kernel):
    """Attention that plans on the host."""

    in_graphs = False

    def for_graph(self, arguments: Any) -> None:
        raise AssertionError("a plan was made")

    def captured(self, *args: Any) -> Tensor:
        return torch.full((1,), 5.0)


def test_a_kernel_that_plans_is_not_asked_for_a_plan_where_graphs_have_another(graph: CudaGraph) -> None:
    backend, attention = hal.open("cpu"), Planner()
    ops.activate(lambda each: attention if each.name == "paged_attention" else backend.resolve(each))
    try:
        with watched(graph):
            assert call([1] * ROWS).tolist() == [5.0]
        assert attention.calls == 0
        assert {name for name, _ in graph.host_values.items()} == HOST
    finally:
        backend.activate()


def test_the_queries_of_a_decode_are_fixed(graph: CudaGraph, kernels: tuple[Kernel, Kernel]) -> None:
    with watched(graph):
        call([1] * ROWS)
    values = {"kv_lens_host": torch.ones(ROWS), "query_start_loc_host": torch.tensor([0, 2, 2, 3])}
    with pytest.raises(HostValueError, match=r"captured with \[0, 1, 2, 3\], which no replay can"):
        graph._launch(values)


def test_those_of_a_prefill_are_not(graph: CudaGraph, kernels: tuple[Kernel, Kernel]) -> None:
    with watched(graph):
        call([2, 1])
    assert graph._decodes is None


def test_operations_without_queries_are_recorded(graph: CudaGraph) -> None:
    starts = torch.arange(ROWS + 1, dtype=torch.int32)
    window, slots = torch.zeros(ROWS, 3, 8), torch.arange(ROWS, dtype=torch.int32)
    with watched(graph):
        ops.causal_conv1d(torch.ones(ROWS, 8), torch.ones(4, 8), None, window, slots, None, starts, starts, True)
    assert [name for name, _ in graph.host_values.items()] == ["query_start_loc_host"]
    assert graph._decodes is not None


def test_one_name_for_two_tensors_is_refused(graph: CudaGraph, kernels: tuple[Kernel, Kernel]) -> None:
    with watched(graph):
        call([1])
        with pytest.raises(CaptureError, match="two launches in one capture read different tensors as"):
            call([1])


def test_calls_of_other_threads_are_left_alone(graph: CudaGraph, kernels: tuple[Kernel, Kernel]) -> None:
    with watched(graph):
        thread = threading.Thread(target=call, args=([40],))
        thread.start()
        thread.join()
    assert graph.host_values.items() == []
    assert kernels[1].calls == 1
