"""Tests for lowering and clean-up: results do not change, and unsafe clean-ups are skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import hal
from hal import ops
from hal.compile.fx.clean import CLEANUPS, common_subexpressions, constants, needless_copies, reciprocals
from hal.compile.fx.normalize import normalize
from hal.compile.lower import hoist_preparations, lower, source_of
from hal.vendor import PreparingKernel


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Return a normalized trace of a function that returns a tuple; first dimensions of size 5 are symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = []
    for each in inputs:
        dims = [DimDynamic.DUCK if size == 5 and dim == 0 else DimDynamic.STATIC for dim, size in enumerate(each.shape)]
        fakes.append(mode.from_tensor(each, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims)))
    with torch.no_grad(), ops.intercepted(lambda operation, _: operation.node), mode:
        graph = make_fx(function, _allow_non_fake_inputs=True)(*fakes)
    normalize(graph.graph)
    return graph


def inputs(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def together(function: Callable[..., Any], given: list[Tensor]) -> set[tuple[int, int]]:
    """Return index pairs of tensors that share memory, among a function's inputs and the outputs of two calls."""
    tensors = [*given, *function(*given), *function(*given)]
    places = [each.untyped_storage().data_ptr() for each in tensors]
    return {(one, other) for other, place in enumerate(places) for one in range(other) if places[one] == place}


def check(function: Callable[..., Any], *tensors: Tensor, fixed: int = 0) -> str:
    """Check the lowered function against ``function``, also for other sizes; return its code.

    Its outputs must not share memory where those of ``function`` do not.
    """
    graph = traced(function, *tensors)
    for each in CLEANUPS:
        each(graph)
    graph.graph.lint()
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    count = len(tensors) - fixed
    run = lower(graph.graph, dict(zip(placeholders[count:], tensors[count:], strict=True)))
    for rows in (5, 2, 9):
        given = [torch.randn(rows, *each.shape[1:]) if each.shape[0] == 5 else each for each in tensors]
        expected = function(*(each.clone() for each in given))
        torch.testing.assert_close(run(*(each.clone() for each in given[:count])), expected)
        assert together(lambda *x: run(*x[:count]), given) <= together(function, given)
    return source_of(graph.graph)


@pytest.fixture(autouse=True)
def _active(cpu: hal.Backend) -> None:
    """Activate a backend with the CPU's kernels."""


class TestLower:
    def test_operations_and_methods(self) -> None:
        def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            hidden = ops.rms_norm(x, weight, 1e-6)
            spread = hidden.unsqueeze(1).expand(-1, 2, -1).transpose(1, 2).permute(1, 0, 2).clone()
            several = hidden.to(torch.bfloat16).float().repeat(1, 2), hidden.argmax(-1), hidden.mean(-1, keepdim=True)
            projected = ops.linear(hidden.cos().neg(), torch.ones(3, 8), None) * 2
            return (*several, projected, spread.sum(0), hidden.pow(2).rsqrt() + x.abs())

        code = check(function, *inputs((5, 8), (8,)), fixed=1)
        assert "torch.ops" not in code, code

    def test_weights_are_no_arguments(self) -> None:
        x, weight = inputs((5, 8), (8,))
        graph = traced(lambda x, weight: (ops.rms_norm(x, weight, 1e-6),), x, weight)
        run = lower(graph.graph, {[*graph.graph.nodes][1]: weight})
        before = run(x)[0].clone()
        weight.mul_(2)  # in place: shares memory
        torch.testing.assert_close(run(x)[0], before * 2)

    def test_a_copy_of_the_same_dtype_is_one(self) -> None:
        def written(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            table = weight.to(torch.float32, copy=True)
            table[:4] = 0
            return (x * table, x * weight)

        check(written, *inputs((5, 8), (8,)))
        check(lambda x, weight: (x + 1, x.to(torch.float32, copy=True), weight.to(x, copy=True)), *inputs((5, 8), (8,)))

    def test_slices_that_make_up_a_tensor_are_one_split(self) -> None:
        def function(x: Tensor) -> tuple[Tensor, ...]:
            first, second, third = x.split([3, 4, 1], -1)
            return first.cos(), second.view(-1, 2, 2) + 1, third.sin()

        code = check(function, *inputs((5, 8)))
        assert code.count(".split_with_sizes(") == 1
        assert "narrow" not in code

    @pytest.mark.parametrize("ends", [(0, 3, 6), (1, 4, 8), (0, 5, 8, 4)])
    def test_other_slices_are_narrow(self, ends: tuple[int, ...]) -> None:
        def function(x: Tensor) -> tuple[Tensor, ...]:
            parts = [x[:, ends[0] : ends[1]].cos(), x[:, ends[1] : ends[2]].cos()]
            return (*parts, x[:, ends[3] : 8].sin()) if len(ends) > 3 else (*parts,)

        assert ".split_with_sizes(" not in check(function, *inputs((5, 8)))

    def test_slices_of_an_open_dimension(self) -> None:
        """Their lengths are known only at run time."""

        def ends(x: Tensor) -> tuple[Tensor, ...]:
            return x[1:] - x[:-1], x[-1:].cos(), x[:4].sin(), x[1:].sin(), x[-1] + 1, x[-1:, :3].t() * 2

        assert "narrow" in check(lambda x: (x[:, 1:3] + x[..., :2],), *inputs((5, 8)))
        assert "narrow(0, " not in check(ends, *inputs((5, 8)))

    def test_views_of_what_a_kernel_gave_in_other_strides(self, cpu: hal.Backend) -> None:
        """Splitting a dimension works for any strides; joining may need a copy."""
        kernels = dict(cpu.kernels)
        kernels["linear"] = lambda x, weight, *others: (weight @ x.t()).t()
        backend = hal.Backend("turned", cpu.device, kernels=kernels)
        backend.activate()

        def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            product = ops.linear(x, weight, None)
            heads = product.view(-1, 2, 3)
            return (
                heads.cos(),
                ops.linear(heads.transpose(0, 1).reshape(-1, 6), weight[:, :6], None),
                product.reshape(-1),
            )

        code = check(function, *inputs((5, 8), (6, 8)))
        assert ".view(" in code
        assert ".reshape(" in code

    def test_constants_of_the_trace(self) -> None:
        check(lambda x: (x + torch.tensor([1.0, 2.0]).repeat(4),), *inputs((5, 8)))


class TestConstants:
    def test_frequencies_are_computed_once(self) -> None:
        def function(x: Tensor) -> tuple[Tensor]:
            exponent = torch.arange(0, 8, 2, dtype=torch.int64).float() / 8
            return ((x[:, :1] * (1.0 / 10000.0**exponent)).repeat(1, 2),)

        code = check(function, *inputs((5, 8)))
        assert "arange" not in code
        assert "pow" not in code
        graph = traced(function, *inputs((5, 8)))
        assert constants(graph) == 5
        assert constants(graph) == 0
        assert [name for name, _ in graph.named_buffers()] == ["constant_0"]

    def test_what_is_written_random_large_or_returned_stays(self) -> None:
        def written(x: Tensor) -> tuple[Tensor]:
            table = torch.zeros(8)
            table.view(2, 4)[0].add_(x[0, :4])
            return (x + table,)

        def large(x: Tensor) -> tuple[Tensor]:
            return (x + torch.zeros(1 << 19).sin().sum(),)

        for function in (written, large):
            check(function, *inputs((5, 8)))
        graph = traced(large, *inputs((5, 8)))
        assert constants(graph) == 0
        graph = traced(lambda x: (x + torch.rand(8), torch.ones(3)), *inputs((5, 8)))
        assert constants(graph) == 0

    def test_what_is_returned_is_made_at_every_call(self) -> None:
        def viewed(x: Tensor) -> tuple[Tensor, ...]:
            table = torch.arange(8).view(2, 4)
            return x + torch.arange(8).cos(), table[1]

        check(viewed, *inputs((5, 8)))
        assert constants(traced(viewed, *inputs((5, 8)))) == 2

    def test_what_depends_on_a_size_stays(self) -> None:
        check(lambda x: (x + torch.arange(x.shape[0])[:, None] * torch.arange(8).sin(),), *inputs((5, 8)))


class TestCleanUp:
    def count(self, clean: Callable[[fx.GraphModule], int], function: Callable[..., Any], *tensors: Tensor) -> int:
        check(function, *tensors)
        return clean(traced(function, *tensors))

    def test_common_subexpressions(self) -> None:
        assert self.count(common_subexpressions, lambda x: (x.cos() + x.cos() * 2,), *inputs((5, 8))) == 1
        # 1 and 1.0 give different results.
        assert self.count(common_subexpressions, lambda x: (x.int() + 1, x.int() + 1.0), *inputs((5, 8))) == 1

    def test_fills_are_told_apart_by_their_shapes_alone(self) -> None:
        def equal(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return (torch.ones_like(x).sum() + torch.ones_like(y).sum(),)

        def others(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            filled = (torch.ones_like(x, dtype=torch.float16), torch.full_like(y, 2), torch.full_like(y, 3))
            return (torch.ones_like(x.t()).cumsum(0), torch.ones_like(x).cumsum(0), *(each.sum() for each in filled))

        assert self.count(common_subexpressions, equal, *inputs((5, 8), (5, 8))) == 2
        assert self.count(common_subexpressions, equal, *inputs((5, 8), (8, 5))) == 0
        assert self.count(common_subexpressions, others, *inputs((5, 8), (5, 8))) == 0

    def test_outputs_stay_apart(self) -> None:
        def viewed(x: Tensor) -> tuple[Tensor, ...]:
            return x.cos().view(-1), x.cos()[1:], torch.zeros(4), torch.zeros(4)

        def one_is_not_returned(x: Tensor) -> tuple[Tensor, ...]:
            return x.cos() * 2, x.cos(), x.cos().sin()

        def parts(x: Tensor) -> tuple[Tensor, ...]:
            return x.topk(2)[0], x.topk(2)[0].t()

        def views(x: Tensor) -> tuple[Tensor, ...]:
            return x[:, :4].unsqueeze(0).sin(), x[:, :4].unsqueeze(0), x[:, :4].unsqueeze(0)

        for function, merged in ((viewed, 0), (one_is_not_returned, 2), (parts, 0), (views, 4)):
            assert self.count(common_subexpressions, function, *inputs((5, 8))) == merged, function

    def test_not_across_a_write(self) -> None:
        def directly(x: Tensor) -> tuple[Tensor, ...]:
            first = x.cos()
            x.add_(1)
            return first, x.cos()

        def through_a_view(x: Tensor) -> tuple[Tensor, ...]:
            first = x.cos()
            x.view(-1)[3:7].zero_()
            return first, x.cos()

        def of_a_view(x: Tensor) -> tuple[Tensor, ...]:
            part = x[:, :4]
            first = part.cos()
            x.mul_(2)
            return first, part.cos()

        def both_are_written(x: Tensor) -> tuple[Tensor, ...]:
            one, other = x.cos(), x.cos()
            one[:, :2] = 7
            return one, other

        def of_a_part(x: Tensor) -> tuple[Tensor, ...]:
            one, other = x.topk(2)[0], x.topk(2)[0]
            one[:, :1] = 7
            return one + 1, other + 1

        for function in (directly, through_a_view, of_a_view, both_are_written, of_a_part):
            assert self.count(common_subexpressions, function, *inputs((5, 8))) == 0, function

    def test_not_of_random_numbers(self) -> None:
        graph = traced(lambda x: (torch.rand_like(x) - torch.rand_like(x),), *inputs((5, 8)))
        assert common_subexpressions(graph) == 0

    def test_not_across_a_cache_that_is_written(self) -> None:
        def function(x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
            before = keys[1].cos()
            heads = x.view(-1, 2, 4)
            ops.store_kv_cache(heads, heads, keys, values, torch.zeros(x.shape[0]).int() + 4)
            return before, keys[1].cos()

        assert common_subexpressions(traced(function, *inputs((5, 8), (3, 4, 2, 4), (3, 4, 2, 4)))) == 0

    def test_not_across_a_kernel_that_writes(self, cpu: hal.Backend) -> None:
        """A kernel whose arguments are prepared mutates what its operation mutates."""

        def function(x: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
            before = keys.cos()
            for _ in range(2):
                ops.store_kv_cache(x, x, keys, values, slots)
            return before * 2, keys.cos() * 2

        prepared = PreparingKernel(cpu.kernels["store_kv_cache"], {"slot_mapping": lambda slots: slots.long().int()})
        backend = hal.Backend("own", cpu.device, kernels={**cpu.kernels, "store_kv_cache": prepared})
        given = [*inputs((5, 2, 4), (3, 4, 2, 4), (3, 4, 2, 4)), torch.tensor([4, 5, 7, 8, 9], dtype=torch.int32)]
        graph = traced(function, *given)
        mode = next(iter(graph.graph.nodes)).meta["val"].fake_mode
        assert hoist_preparations(graph.graph, backend, mode) == 2
        assert common_subexpressions(graph) == 2  # of four casts
        found = lower(graph.graph)(*(each.clone() for each in given))
        torch.testing.assert_close(found, function(*(each.clone() for each in given)))

    def test_a_preparation_reads_the_shape_of_another_argument(self, cpu: hal.Backend) -> None:
        """Once for two kernels."""

        def function(x: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
            for _ in range(2):
                ops.store_kv_cache(x, x, keys, values, slots)
            return (keys * 2,)

        def later(slots: Tensor, key_cache: Tensor) -> Tensor:
            return slots + key_cache.shape[1]

        kernel = PreparingKernel(cpu.kernels["store_kv_cache"], {"slot_mapping": later})
        backend = hal.Backend("own", cpu.device, kernels={**cpu.kernels, "store_kv_cache": kernel})
        given = [*inputs((3, 2, 4), (4, 4, 2, 4), (4, 4, 2, 4)), torch.tensor([4, 5, 7], dtype=torch.int32)]
        graph = traced(function, *given)
        mode = next(iter(graph.graph.nodes)).meta["val"].fake_mode
        assert hoist_preparations(graph.graph, backend, mode) == 2
        assert common_subexpressions(graph) == 1
        found = lower(graph.graph)(*(each.clone() for each in given))
        expected = function(*(each.clone() for each in given[:3]), given[3] + 4)
        torch.testing.assert_close(found, expected)
        direct = [each.clone() for each in (given[0], given[0], *given[1:])]
        kernel(*direct)
        torch.testing.assert_close(direct[2] * 2, expected[0])

    def test_reciprocals(self) -> None:
        twice = inputs((5, 8))[0].abs() + 1
        assert self.count(reciprocals, lambda x: (x.reciprocal().reciprocal() * 2,), twice) == 1
        assert self.count(reciprocals, lambda x: (x.reciprocal(), x.reciprocal().reciprocal() + 1), twice) == 1
        assert reciprocals(traced(lambda x: (x.int().reciprocal().reciprocal() + 1,), twice)) == 0

        def written_between(x: Tensor) -> tuple[Tensor, ...]:
            inverse = x.reciprocal()
            x.add_(1)
            return (inverse.reciprocal() + x,)

        assert self.count(reciprocals, written_between, twice) == 0
        assert self.count(reciprocals, lambda x: (x.reciprocal().reciprocal().t(),), twice) == 0

    def test_needless_copies(self) -> None:
        assert needless_copies(traced(lambda x: (x.cos().clone().sin(),), *inputs((5, 8)))) <= 1
        check(lambda x: (x.cos().clone().sin(),), *inputs((5, 8)))

        def source_is_written(x: Tensor) -> tuple[Tensor, ...]:
            old = x.clone()
            x.add_(1)
            return old + x, x.sin()

        def copy_is_written(x: Tensor) -> tuple[Tensor, ...]:
            copy = x.clone()
            copy.view(-1)[:3] = 0
            return copy.sin(), x.cos()

        def is_returned(x: Tensor) -> tuple[Tensor, ...]:
            return x.clone(), x.clone().view(-1, 2), x.cos().clone()[1:], x + 1

        def has_other_strides(x: Tensor) -> tuple[Tensor, ...]:
            return (x.t().clone(memory_format=torch.contiguous_format).view(-1) * 2,)

        for function in (source_is_written, copy_is_written, is_returned, has_other_strides):
            assert self.count(needless_copies, function, *inputs((5, 8))) == 0, function

    def test_products_with_one(self) -> None:
        x = inputs((5, 8))
        assert self.count(needless_copies, lambda x: ((x.sin() * 1.0).cos() + x / 1,), *x) == 2

        def source_is_written(x: Tensor) -> tuple[Tensor, ...]:
            old = x * 1.0
            x.add_(1)
            return old + x, x.sin()

        for function in (
            source_is_written,
            lambda x: (x * 1.0, x + 1),
            lambda x: ((x * 1.5).sin(), (x * -1.0).sin()),
            lambda x: ((x.int() * 1.0).sin(), (x.int() / 1).sin()),
        ):
            assert self.count(needless_copies, function, *x) == 0, function
