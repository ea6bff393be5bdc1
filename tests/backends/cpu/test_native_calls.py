"""Tests for captured steps whose C++ kernels run without Python between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hal.backends.cpu import driver, packing
from hal.backends.cpu.native_calls import NativeCalls
from hal.backends.cpu.packing import FewRows, Layout, Measured
from hal.backends.cpu.tape import Tape
from torch import Tensor

import hal
from hal import ops
from hal.device.graph import Graph
from hal.errors import OperationError
from hal.ops import Draw
from hal.ops.form_samples import INT8_DYNAMIC, INT8_STATIC, drawn_input, drawn_weight
from hal.ops.forms import FLOAT, Form, dequantize
from hal.ops.kernels.partial_kernel import FormKernels, plain


def pieces(graph: Graph) -> list[int]:
    """Return the number of kernels of each call of a replay; 0 for a call of Python."""
    assert isinstance(graph, Tape)
    return [len(call) if isinstance(call, NativeCalls) else 0 for call in graph._calls]


class Step:
    """Operations on fixed memory, of which one is torch's."""

    def __init__(self, tokens: int = 3) -> None:
        self.hidden, self.weight = torch.randn(tokens, 64).bfloat16(), torch.randn(64).bfloat16()
        self.caches = [torch.zeros(4, 16, 2, 16).bfloat16() for _ in range(2)]
        self.slots = torch.arange(tokens, dtype=torch.int32)

    def __call__(self) -> tuple[Tensor, ...]:
        normed, hidden = ops.add_rms_norm(self.hidden, self.hidden, self.weight, 1e-6)
        key, value = (part.unflatten(-1, (2, 16)) for part in normed.split(32, dim=-1))
        ops.store_kv_cache(key, value, *self.caches, self.slots)
        gate = ops.silu_and_mul(hidden)
        cubed = gate**3
        return ops.rms_norm(cubed, self.weight[:32], 1e-5), gate

    def draw(self) -> None:
        self.hidden.normal_()
        self.slots.copy_(torch.randperm(64)[: len(self.slots)])


def test_neighbours_run_as_one_and_torch_divides_them(native: hal.Backend) -> None:
    step = Step()
    graph = native.graph()
    outputs = graph.capture(step)
    assert pieces(graph) == [3, 0, 1]
    for _ in range(3):
        step.draw()
        graph.replay()
        found = [output.clone() for output in outputs], [cache.clone() for cache in step.caches]
        torch.testing.assert_close(found, (list(step()), step.caches), rtol=0, atol=0)


def test_an_error_of_a_kernel_is_the_same_and_ends_the_replay(native: hal.Backend) -> None:
    keys, first, second = (torch.randn(3, 2, 16).bfloat16() for _ in range(3))
    caches = [torch.zeros(2, 16, 2, 16).bfloat16() for _ in range(3)]
    slots = [torch.arange(3, dtype=torch.int32) for _ in range(3)]

    def function() -> None:
        for cache, own in zip(caches, slots, strict=True):
            ops.store_kv_cache(keys, keys, cache, cache, own)

    graph = native.graph()
    graph.capture(function)
    assert pieces(graph) == [3]
    keys.copy_(first)
    slots[1][2] = 32
    with pytest.raises(OperationError, match="token 2 has slot 32, outside the cache of 32 slots"):
        graph.replay()
    assert torch.equal(caches[0].view(32, 2, 16)[:3], first)
    assert not torch.equal(caches[2].view(32, 2, 16)[:3], first)
    slots[1][2] = 2
    keys.copy_(second)
    graph.replay()
    for cache in caches:
        assert torch.equal(cache.view(32, 2, 16)[:3], second)


def test_arguments_that_a_kernel_must_copy_stay_in_python(native: hal.Backend) -> None:
    """The copy depends on values that change."""
    x, weight = torch.randn(8, 4).bfloat16(), torch.randn(8).bfloat16()
    slots = torch.arange(4)

    def function() -> Tensor:
        ops.store_kv_cache(keys, keys, *caches, slots)  # slots of int64
        return ops.rms_norm(x.t(), weight, 1e-6)

    keys, caches = torch.randn(4, 2, 8).bfloat16(), [torch.zeros(2, 4, 2, 8).bfloat16() for _ in range(2)]
    graph = native.graph()
    output = graph.capture(function)
    assert pieces(graph) == [0, 0]
    x.normal_()
    slots.copy_(torch.tensor([7, 3, 5, 1]))
    graph.replay()
    found = output.clone(), [cache.clone() for cache in caches]
    torch.testing.assert_close(found, (function(), caches), rtol=0, atol=0)


def test_the_layers_of_a_model_run_as_one(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step calls Python for what is computed once."""
    monkeypatch.setattr(packing, "measure", lambda weight, sizes, kernel: Measured([2.0], few_packed=64, few_plain=64))
    monkeypatch.setattr(packing, "_measured", {})
    compilation = {"compiler": "graph", "capture_sizes": [2]}
    config = {"backend": "cpu", "dtype": "bfloat16", "options": {"native": True}, "compilation": compilation}
    backend = hal.open(config)
    model = hal.load_model(trained, backend)
    runner = hal.Runner(model, backend)
    params = hal.SamplingParams(max_new_tokens=3)
    assert len(list(hal.generate(runner, [[5, 6], [7, 8]], params))) == 6
    (graph,) = backend.captured_graphs
    found = pieces(graph)
    assert max(found) > 10 * len(model.states)


@pytest.mark.parametrize("form", [FLOAT, Form("int8"), Form("int4", columns=32), INT8_DYNAMIC, INT8_STATIC], ids=str)
def test_a_replay_calls_the_kernel_of_a_form(form: Form, native: hal.Backend) -> None:
    """The choice by the weight's form is made once."""
    draw = Draw(torch.bfloat16)
    weight, scale, _ = (draw.normal(40, 64), None, None) if form == FLOAT else drawn_weight(draw, form, 40, 64)
    (x, x_scale), ids = drawn_input(draw, form, 3, 64), torch.tensor([5, 39])
    dtype = None if x.is_floating_point() else torch.bfloat16
    kernel = native.kernels["linear"].taking(FLOAT).__self__  # type: ignore[attr-defined]
    kernel.few[Layout.of(weight)] = FewRows(64)
    native.activate()
    stacked, of_experts, counts = weight[None], None if scale is None else scale[None], torch.tensor([3])

    def step() -> list[Tensor]:
        found = [ops.linear(x, weight, None, scale, None, x_scale, dtype, form)]
        if not form.exact:  # Those of experts are torch's.
            found.append(ops.grouped_linear(x, stacked, counts, None, of_experts, None, x_scale, dtype, form))
            if form != FLOAT:
                found.append(ops.embedding(ids, weight, scale, None, torch.bfloat16, form))
        return found

    graph = native.graph()
    outputs = graph.capture(step)
    assert pieces(graph) == [len(outputs)]
    ids.sub_(5)
    x.copy_(drawn_input(draw, form, 3, 64)[0])
    graph.replay()
    for output, expected in zip(outputs, step(), strict=True):
        assert torch.equal(output, expected)


@pytest.mark.parametrize(("rows", "form"), [(70, Form("int8", columns=32)), (3, INT8_STATIC)])
def test_a_kernel_that_reads_values_runs_in_python(rows: int, form: Form, native: hal.Backend) -> None:
    """So many rows of an expert are torch's. When the call is noted, later calls have overwritten its counts."""
    draw = Draw()
    weight, scale, _ = drawn_weight(draw, form, 1, 8, 32)
    x, number = drawn_input(draw, form, rows, 32)[0], torch.tensor([rows])

    def step() -> Tensor:
        counts = number + 0
        result = ops.grouped_linear(x, weight, counts, None, scale, None, None, torch.float32, form)
        counts.fill_(2**40)
        return result

    graph = native.graph()
    output = graph.capture(step)
    assert 0 in pieces(graph)
    x.copy_(drawn_input(draw, form, rows, 32)[0])
    graph.replay()
    torch.testing.assert_close(output, x.float() @ dequantize(form, weight[0], scale[0]).T)


def test_what_torch_computes_is_right_before_a_replay(native: hal.Backend) -> None:
    """Calls that are noted do not run, so torch must not write what it computes of their results."""
    torch.manual_seed(0)
    x, weight, scale = torch.randn(70, 64), torch.randint(-9, 9, (40, 64), dtype=torch.int8), torch.rand(40, 2)
    torch.full((1 << 20,), float("nan"))  # leaves NaN in freed memory
    form = Form("int8", columns=32)
    output = native.graph().capture(lambda: ops.linear(x, weight, None, scale, form=form))
    expected = x @ (weight * scale.repeat_interleave(32, 1)).T
    torch.testing.assert_close(output, expected)


def test_kernels_without_out_are_replayed_by_their_calls_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay gives ``out`` to kernels that take it; that of a lookup, and some of packages, do not."""
    kernel = FormKernels("linear", [(plain, lambda x, weight, *_: (x @ weight.t()).relu())])
    monkeypatch.setitem(driver.KERNELS, "linear", kernel)
    backend = hal.open({"backend": "cpu", "options": {"native": False}})
    ids, table, weight = torch.tensor([3, 1, 4]), torch.randn(8, 16), torch.randn(5, 16)
    graph = backend.graph()
    output = graph.capture(lambda: ops.linear(ops.embedding(ids, table), weight))
    ids.copy_(torch.tensor([1, 5, 0]))
    graph.replay()
    torch.testing.assert_close(output, (table[ids] @ weight.t()).relu())
