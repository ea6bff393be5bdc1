"""Tests for axes, dtypes, rows and state in declarations: syntax, refusals, and problems that the suite finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.rewriting import rewrite_of, trace
from torch import Tensor

import hal
from hal import ops
from hal.compile.pass_manager import PassManager
from hal.compile.rewrite.proof import check_rewrite, violations
from hal.compile.rewrite.rewrite import Rewrite
from hal.errors import CompileError, DriverIncompatible, OperationError
from hal.ops import FLOATING, Draw, Sample, fused_op, op
from hal.ops.declaration.axes import STEP_AXES, parse_shape
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.parse_constraints import constraints_of
from hal.testing.operation_calls import calls_of, first_rows, row_dims, rows_apart, special_calls_of, with_special
from hal.testing.operation_cases import check_declaration

OPERATIONS = list(ops.catalogue().values())
NUMBERS = itertools.count()


def declared(axes: dict[str, Any], dtypes: dict[str, Any] | None = None, **others: type) -> Constraints:
    arguments = [name for name in (*axes, *others) if name != "return"]
    dtypes = dict.fromkeys(axes, FLOATING) if dtypes is None else dtypes
    return constraints_of("it", arguments=arguments, tensors=(), others=others, results=None, axes=axes, dtypes=dtypes)


def shapes(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(each) for each in sizes]


class TestAxes:
    @pytest.mark.parametrize(
        ("axes", "sizes", "reason"),
        [
            ({"x": "tokens width"}, [(3, 4)], None),
            ({"x": "tokens width"}, [(3,)], "x is [3], but declared `tokens width`: its rank is 1"),
            ({"x": ""}, [()], None),
            ({"x": ""}, [(1,)], "x is [1], but declared ``: its rank is 1"),
            ({"x": "... width", "y": "width"}, [(2, 3, 4), (4,)], None),
            ({"x": "... width", "y": "width"}, [(4,), (4,)], "x is [4], but declared `... width`: its rank is 1"),
            ({"x": "[...] width", "y": "width"}, [(4,), (4,)], None),
            ({"x": "... width", "y": "width"}, [(2, 4), (5,)], "y is [5], but declared `width`, where width is 4 in x"),
            ({"x": "... width", "y": "..."}, [(2, 3, 4), (2, 3)], None),
            ({"x": "... width", "y": "..."}, [(2, 3, 4), (3, 2)], "declared `...`, where ... is [2, 3] in x"),
            ({"x": "width width"}, [(3, 4)], "x is [3, 4], but declared `width width`, where width is 3 in x"),
            ({"x": "tokens 1"}, [(3, 1)], None),
            ({"x": "tokens 1"}, [(3, 2)], "x is [3, 2], but declared `tokens 1`, where 1 is 1"),
            ({"x": "sequences", "y": "sequences+1"}, [(3,), (4,)], None),
            ({"y": "sequences+1", "x": "sequences"}, [(3,), (3,)], "declared `sequences+1`, where sequences+1 is 4"),
            ({"x": "merged", "y": "merged//2"}, [(8,), (4,)], None),
            ({"x": "merged", "y": "(merged-2)*2"}, [(8,), (11,)], "where (merged-2)*2 is 12"),
            ({"x": "width", "y": "1|width"}, [(8,), (1,)], None),
            ({"x": "width", "y": "1|width"}, [(8,), (2,)], "y is [2], but declared `1|width`, where 1|width is 1 or 8"),
            ({"x": "width", "y": "channels=1|width", "z": "channels"}, [(8,), (8,), (8,)], None),
            ({"x": "width", "y": "channels=1|width", "z": "channels"}, [(8,), (1,), (8,)], "where channels is 1 in y"),
        ],
    )
    def test_what_they_take(self, axes: dict[str, str], sizes: list[tuple[int, ...]], reason: str | None) -> None:
        found = declared(axes).unmet(shapes(*sizes))
        assert found is None if reason is None else found is not None and found.endswith(reason)

    def test_a_number_among_the_arguments_is_a_size(self) -> None:
        constraints = declared({"x": "tokens heads*width", "w": "width"}, heads=int)
        assert constraints.unmet([*shapes((2, 12), (4,)), 3]) is None
        assert "where heads*width is 8" in str(constraints.unmet([*shapes((2, 12), (4,)), 2]))
        assert constraints.sizes([*shapes((2, 12), (4,)), 3]) == {"tokens": 2, "width": 4}

    def test_what_is_left_out_says_nothing(self) -> None:
        constraints = declared({"x": "tokens width", "bias": "width", "scale": "2*width"})
        x, bias, scale = shapes((2, 3), (4,), (6,))
        assert constraints.unmet([x, None, scale]) is None
        assert constraints.unmet([x, None, None]) is None
        assert "bias is [4]" in str(constraints.unmet([x, bias, None]))

    def test_results(self) -> None:
        constraints = declared(
            {"x": "... merged", "return": ("... merged//2", "...")}, {"x": FLOATING, "return": ("x", "x")}
        )
        x, half, rows = shapes((2, 8), (2, 4), (2,))
        assert constraints.unmet_results([x], [half, rows]) is None
        assert constraints.unmet_results([x], [half]) == "the call has 1 results, but 2 are declared"
        assert "result 1 is [2, 4], but declared `...`" in str(constraints.unmet_results([x], [half, half]))
        wide = constraints.unmet_results([x], [half.double(), rows])
        assert wide == "x is float32 and result 0 is float64, but they are declared alike"
        with pytest.raises(OperationError, match="axes of 2 results but dtypes of 1"):
            declared({"x": "rows", "return": ("rows", "rows")}, {"x": FLOATING, "return": "x"})

    @pytest.mark.parametrize(
        "text",
        [
            "tokens, width",
            "tokens=",
            "1tokens",
            "tokens ...",
            "tokens/2",
            "f(x)",
            "tokens+1.5",
            "-tokens",
            "tokens|",
            3,
        ],
    )
    def test_what_is_none(self, text: Any) -> None:
        with pytest.raises(OperationError, match="it: x is declared with the axes") as caught:
            declared({"x": text})
        assert "in first place, ... or [...]" in caught.value.remedy

    def test_a_size_of_nothing(self) -> None:
        with pytest.raises(
            OperationError, match=r"'2\*widht', but no tensor has an axis 'widht'\n.*did you mean 'width'"
        ):
            declared({"x": "tokens width", "y": "2*widht"})

    def test_where_an_axis_is(self) -> None:
        shape = parse_shape("... tokens 3 width", "it")
        assert [shape.dim(name, 5) for name in ("...", "tokens", "width", "rows")] == [0, 2, 4, None]
        assert parse_shape("[...] width", "it").dim("...", 1) is None
        assert shape.names == ("...", "tokens", "width")

    def test_every_step_axis_is_some_operations(self) -> None:
        """A batch and the operations that read it use the same axis names."""
        names = {name for each in OPERATIONS for name in each.constraints.axes}
        assert names.issuperset(STEP_AXES)


class TestDtypes:
    @pytest.mark.parametrize(
        ("dtypes", "given", "reason"),
        [
            ({"x": FLOATING, "y": "x"}, "bfloat16 bfloat16", None),
            ({"x": FLOATING, "y": FLOATING}, "bfloat16 float32", "x is bfloat16 and y is float32, but they are {}"),
            ({"x": FLOATING, "y": "x"}, "float32 bfloat16", "x is float32 and y is bfloat16, but they are {}"),
            ({"x": FLOATING, "y": torch.int32}, "int32 int32", "x is int32, but declared floating"),
            ({"x": FLOATING, "y": torch.int32}, "float32 int64", "y is int64, but declared int32"),
            ({"x": FLOATING, "y": (torch.int32, torch.int64)}, "float32 int64", None),
            (
                {"x": FLOATING, "y": (torch.int32, torch.int64)},
                "float32 int8",
                "int8, but declared int32 or int64",
            ),
            ({"x": FLOATING, "y": (torch.float32, "x")}, "bfloat16 bfloat16", None),
            (
                {"x": FLOATING, "y": (torch.float32, "x")},
                "bfloat16 float16",
                ", but declared bfloat16 or float32",
            ),
        ],
    )
    def test_what_they_take(self, dtypes: dict[str, Any], given: str, reason: str | None) -> None:
        constraints = declared({"x": "rows", "y": "rows"}, dtypes)
        found = constraints.unmet([torch.zeros(2, dtype=getattr(torch, each)) for each in given.split()])
        assert found is None if reason is None else str(found).endswith(reason.format("declared alike"))

    def test_an_argument_that_is_a_dtype(self) -> None:
        constraints = declared({"x": "rows"}, {"x": "dtype"}, dtype=torch.dtype)
        assert constraints.unmet([torch.zeros(2), torch.float32]) is None
        assert "and x is float32" in str(constraints.unmet([torch.zeros(2), torch.bfloat16]))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("z", "dtype of 'z', which is not another argument"),
            ("x", "dtype of 'x', which is not another argument"),
            ("eps", "the dtype of 'eps'"),
            ((), "with no dtype"),
            (float, "the dtype <class 'float'>"),
            (None, "None"),
        ],
    )
    def test_what_is_none(self, given: Any, message: str) -> None:
        with pytest.raises(OperationError, match=message):
            declared({"x": "rows"}, {"x": given}, eps=float)


def no_samples(draw: Draw) -> Iterator[Sample]:
    for rows, width in ((1, 8), (5, 6)):
        yield draw.normal(rows, width), draw.normal(width)


GOOD: dict[str, Any] = {
    "axes": {"x": "tokens width", "weight": "width", "return": "tokens width"},
    "dtypes": {"x": FLOATING, "weight": "x", "return": "x"},
    "rowwise": "tokens",
}


def scaled(x: Tensor, weight: Tensor | None) -> Tensor:
    return x * (1 if weight is None else weight)


def change(**changes: Any) -> dict[str, Any]:
    return GOOD | changes


def without(kind: str, name: str) -> dict[str, Any]:
    return GOOD | {kind: {key: value for key, value in GOOD[kind].items() if key != name}}


@pytest.mark.usefixtures("forget_operations")
class TestOperations:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({}, "scaled declares no axes\n.*those of x, weight, return, by name: axes="),
            (change(axes=None), "scaled declares no axes"),
            (change(dtypes=None), "scaled declares no dtypes"),
            (change(axes="tokens width"), "scaled declares axes='tokens width'"),
            (without("axes", "x"), "scaled does not declare the axes of x\n.*add an entry"),
            (without("axes", "weight"), "scaled does not declare the axes of weight"),
            (without("axes", "return"), "scaled does not declare the axes of return"),
            (without("dtypes", "x"), "scaled does not declare the dtypes of x"),
            (without("dtypes", "return"), "scaled does not declare the dtypes of return"),
            (change(axes=GOOD["axes"] | {"wieght": "width"}), "axes of 'wieght', which is not an argument\n.*'weight'"),
            (change(axes=GOOD["axes"] | {"x": "tokens, width"}), "scaled: x is declared with the axes 'tokens, width'"),
            (change(axes=GOOD["axes"] | {"return": ("tokens",) * 2}), "axes of 2 results but returns 1"),
            (change(dtypes=GOOD["dtypes"] | {"x": "floating"}), "scaled: x is declared with the dtype of 'floating'"),
            (
                {key: GOOD[key] for key in ("axes", "dtypes")},
                "does not declare rowwise, .*\n.*tokens, width: rowwise='tokens'",
            ),
            (change(rowwise="token"), "rowwise='token', which is not an axis of an argument\n.*did you mean 'tokens'"),
            (change(axes=GOOD["axes"] | {"return": "rows width"}), "'tokens', which is not an axis of result 0"),
            (change(axes=GOOD["axes"] | {"weight": "tokens+1"}), r"but computes the size tokens\+1 from it"),
            (change(mutates=("x",)), "mutates its argument 'x', and declares it neither as state nor as a buffer"),
            (change(mutates=("x",), state=("x",), buffers=("x",)), "both as state and as a buffer"),
            (change(buffers=("x",)), "declares the buffer 'x', which it does not mutate"),
        ],
    )
    def test_what_is_refused(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(OperationError, match=message):
            op(samples=no_samples, namespace="haltest", **given)(scaled)
        assert "scaled" not in ops.catalogue()

    def test_what_is_no_tensor_has_no_axes(self) -> None:
        def raised(x: Tensor, eps: float) -> None:
            return None

        axes = {"x": "rows"}
        for more, message in (
            ({"eps": "rows"}, "'eps', but eps is not a tensor"),
            ({"return": "rows"}, "it returns nothing"),
        ):
            with pytest.raises(OperationError, match=message):
                op(samples=no_samples, namespace="haltest", axes=axes | more, dtypes=dict.fromkeys(axes, FLOATING))(
                    raised
                )

    def test_state_of_another_package(self, cpu: hal.Backend) -> None:
        """State of other packages is declared like hal's, and is independent of the layout of a KV cache."""

        @op(
            samples=no_samples,
            namespace="haltest",
            rowwise=None,
            state=("matrix", "window"),
            mutates=("matrix",),
            axes={
                "x": "sequences width",
                "matrix": "slots width width",
                "window": "slots 4 width",
                "slot": "sequences",
                "return": "sequences width",
            },
            dtypes={"x": FLOATING, "matrix": torch.float32, "window": "x", "slot": torch.int32, "return": "x"},
        )
        def recurrent(x: Tensor, matrix: Tensor, window: Tensor, slot: Tensor) -> Tensor:
            matrix[slot.long()] += x[:, :, None] * x[:, None]
            return x + window[slot.long()].sum(1)

        operation = ops.operation("recurrent")
        assert (operation.state, operation.buffers) == (("matrix", "window"), ())
        assert operation.touches_state
        kernels = {each: ops.operation(each).body for each in ("paged_attention", "store_kv_cache")}
        hal.Backend("tiled", cpu.device, kernels=kernels, state_layout="tiles")

    @pytest.mark.parametrize("how", ["hands it on", "names one", "names none", "writes by itself"])
    def test_a_fused_operation_hands_on_state(self, how: str) -> None:
        """A backend with another cache layout must be able to tell."""

        def samples(draw: Draw) -> Iterator[Sample]:
            for key, _, *rest in ops.operation("store_kv_cache").samples(draw):
                yield key, *rest

        def kept(key: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Tensor:
            if how == "writes by itself":
                key_cache.flatten(0, 1)[slots.long()] = key
                value_cache.flatten(0, 1)[slots.long()] = key
            else:
                ops.store_kv_cache(key, key, key_cache, value_cache, slots)
            return key + 1

        kept.__name__ = name = f"kept_{next(NUMBERS)}"
        rows, cache, both = (
            "tokens heads head_dim",
            "num_blocks block_size heads head_dim",
            ("key_cache", "value_cache"),
        )
        state, buffers = {"names one": (both[:1], both[1:]), "names none": ((), both)}.get(how, (both, ()))
        fused_op(
            samples=samples,
            namespace="haltest",
            rowwise="tokens",
            state=state,
            buffers=buffers,
            mutates=both,
            axes={"key": rows, "key_cache": cache, "value_cache": cache, "slots": "tokens", "return": rows},
            dtypes={"key": FLOATING, "key_cache": "key", "value_cache": "key", "slots": torch.int32, "return": "key"},
        )(kept)
        if how == "hands it on":
            check_declaration(ops.operation(name))
            return
        problem = {
            "names one": "it passes its argument value_cache to another operation as state",
            "names none": "it passes its argument key_cache to another operation as state",
            "writes by itself": "it reads or writes its state key_cache directly",
        }[how]
        with pytest.raises(AssertionError, match=problem):
            check_declaration(ops.operation(name))

    def test_a_buffer_is_written_and_no_state(self) -> None:
        def samples(draw: Draw) -> Iterator[Sample]:
            for rows, width in ((1, 8), (5, 6)):
                yield draw.normal(rows, width), draw.normal(rows, width)

        @op(
            samples=samples,
            namespace="haltest",
            rowwise="rows",
            mutates=("out",),
            buffers=("out",),
            axes={"x": "rows width", "out": "rows width"},
            dtypes={"x": FLOATING, "out": "x"},
        )
        def doubled_into(x: Tensor, out: Tensor) -> None:
            out.copy_(x * 2)

        operation = ops.operation("doubled_into")
        assert operation.state == ()
        assert not operation.touches_state
        check_declaration(operation)

    def test_rows_at_any_dimension(self) -> None:
        """For example, rotary positions in three rows: slicing and NaN follow the declaration."""

        def samples(draw: Draw) -> Iterator[Sample]:
            for tokens, width in ((1, 8), (5, 6)):
                yield draw.normal(3, tokens), draw.normal(tokens, width)

        @op(
            samples=samples,
            namespace="haltest",
            rowwise="tokens",
            axes={"positions": "3 tokens", "x": "tokens width", "return": "width tokens"},
            dtypes={"positions": FLOATING, "x": "positions", "return": "x"},
        )
        def turned(positions: Tensor, x: Tensor) -> Tensor:
            return (x * positions.sum(0)[:, None]).t().contiguous()

        operation = ops.operation("turned")
        check_declaration(operation)
        _, sample = operation.samples(Draw())
        assert row_dims(operation, sample) == {0: 1, 1: 0}
        assert [tuple(each.shape) for each in first_rows(operation, 2, sample)] == [(3, 2), (2, 6)]
        (positions, _) = with_special(operation, float("nan"), sample)
        assert positions.isnan().nonzero().tolist() == [[0, 0]]
        names = {
            each.variant for each in (*calls_of(operation, torch.float32), *special_calls_of(operation, torch.float32))
        }
        assert names == {"sample-0", "sample-1", "rows-apart", "rows-1", "rows-0", "large", "nan", "infinity"}
        from hal.testing import Conformance

        suite = Conformance(backend="cpu", only=("operations/turned/*",))
        for case in [each for each in suite.cases if each.area == "operations"]:
            case.run()

    def test_weights_and_state_are_not_taken_apart(self) -> None:
        def strides(name: str) -> list[bool]:
            operation = ops.operation(name)
            sample = next(iter(operation.samples(Draw())))
            return [
                each.is_contiguous()
                for each in rows_apart(operation, sample)
                if isinstance(each, Tensor) and each.dim() > 1
            ]

        assert strides("embedding") == [True]
        assert strides("paged_attention") == [False, True, True, True]


class TestConformance:
    """Declarations that contradict their samples or their reference are found."""

    @staticmethod
    def sample_sizes(*sizes: tuple[int, int]) -> Callable[[Draw], Iterator[Sample]]:
        def samples(draw: Draw) -> Iterator[Sample]:
            for rows, width in sizes:
                yield draw.normal(rows, width), draw.normal(width)

        return samples

    @pytest.mark.usefixtures("forget_operations")
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({}, None),
            ({"sizes": ((4, 4), (6, 6))}, "the axes tokens and width are equal in all samples"),
            ({"sizes": ((4, 8), (6, 8))}, "the axis width is 8 in all samples"),
            (
                {"axes": {"x": "... width", "weight": "width", "return": "... width"}, "rowwise": "..."},
                r"\.\.\. represents 1 axes in all samples",
            ),
            (
                {"axes": {"x": "tokens width", "weight": "tokens", "return": "tokens width"}},
                r"sample 0 of torch.float32: weight is \[8\], but declared `tokens`, where tokens is 4 in x",
            ),
            (
                {"axes": {"x": "tokens width", "weight": "width", "return": "tokens 1"}},
                "result 0 is .* declared `tokens 1`",
            ),
            (
                {"dtypes": {"x": FLOATING, "weight": "x", "return": torch.int8}},
                "result 0 is float32, but declared int8",
            ),
            ({"body": lambda x, weight: x - x.mean(0)}, "result 0 of one row along tokens differs from the first row"),
            ({"sizes": ((1, 8), (0, 6))}, "no sample has two rows along tokens"),
            ({"mutates": ("x",), "buffers": ("x",)}, "`mutates` names its argument x, but no sample writes it"),
            ({"body": lambda x, weight: x.mul_(weight) + 1}, "it writes its argument x; add 'x' to `mutates`"),
        ],
    )
    def test_what_is_found(self, given: dict[str, Any], message: str | None) -> None:
        given = dict(given)
        body = given.pop("body", torch.mul)

        def declared_so(x: Tensor, weight: Tensor) -> Tensor:
            result: Tensor = body(x, weight)
            return result

        declared_so.__name__ = name = f"declared_so_{next(NUMBERS)}"  # torch keeps every registered name
        samples = self.sample_sizes(*given.pop("sizes", ((4, 8), (6, 10))))
        op(samples=samples, namespace="haltest", **GOOD | given)(declared_so)
        if message is None:
            check_declaration(ops.operation(name))
            return
        with pytest.raises(AssertionError, match=message):
            check_declaration(ops.operation(name))


def plain(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = x + residual
    return torch.ops.hal.rms_norm.default(hidden, weight, eps), hidden


def unannotated(x, residual, weight, eps):  # type: ignore[no-untyped-def]
    return plain(x, residual, weight, eps)


def sums(draw: Draw) -> Iterator[Sample]:
    for rows, width in ((1, 64), (6, 128)):
        yield draw.normal(rows, width), draw.normal(rows, width), draw.normal(width), 1e-6


SUMS: dict[str, Any] = {
    "axes": {"x": "rows width", "residual": "rows width", "weight": "width"},
    "dtypes": {"x": FLOATING, "residual": "x", "weight": "x"},
}
NODE = torch.ops.hal.add_rms_norm.default


class TestRewrites:
    @pytest.mark.parametrize("kind", ["axes", "dtypes"])
    def test_what_is_left_out_is_an_error_where_it_is_made(self, kind: str) -> None:
        left = {key: value for key, value in SUMS.items() if key != kind}
        with pytest.raises(CompileError, match=f"the rewrite mine declares no {kind}\n.*{kind}=") as caught:
            Rewrite("mine", plain, NODE, sums, **left)
        assert "x, residual, weight" in caught.value.remedy
        for name in ("x", "residual", "weight"):
            fewer = {key: value for key, value in SUMS[kind].items() if key != name}
            with pytest.raises(CompileError, match=f"does not declare the {kind} of {name}"):
                Rewrite("mine", plain, NODE, sums, **SUMS | {kind: fewer})

    def test_a_pattern_that_names_nothing(self) -> None:
        with pytest.raises(CompileError, match="the pattern of the rewrite mine does not name its arguments"):
            Rewrite("mine", lambda *given: plain(*given), NODE, sums, **SUMS)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["x", "residual", "weight"])
    def test_a_pattern_without_annotations_is_known_by_its_samples(self, cpu: hal.Backend, name: str) -> None:
        given = {kind: {key: value for key, value in SUMS[kind].items() if key != name} for kind in SUMS}
        given["dtypes"] = dict.fromkeys(given["dtypes"], FLOATING)
        rewrite = Rewrite("mine", unannotated, NODE, sums, **given)
        problem = f"the rewrite mine does not declare the axes and dtype of {name}, a tensor in sample 0"
        traced = trace(lambda x: x + 1, torch.ones(2, 3))
        with pytest.raises(CompileError, match=problem):
            PassManager(traced.graph, traced.mode).add(rewrite)
        with pytest.raises(DriverIncompatible, match=f"the driver acme cannot be used: {problem}") as caught:
            hal.Backend("acme", cpu.device, kernels={}, rewrites=(rewrite,))
        assert f'axes={{"{name}": "tokens width"}}' in caught.value.remedy

    def test_samples_that_are_not_as_declared(self, cpu: hal.Backend) -> None:
        wrong = SUMS | {"axes": SUMS["axes"] | {"weight": "rows"}}
        with pytest.raises(DriverIncompatible, match=r"sample 0 of .* does not meet its declaration: weight is \[64\]"):
            hal.Backend("acme", cpu.device, kernels={}, rewrites=(Rewrite("mine", plain, NODE, sums, **wrong),))

    def test_what_is_declared_is_applied_and_nothing_else(self) -> None:
        """Also if all samples agree in more or in less than is declared."""

        def of_64(draw: Draw) -> Iterator[Sample]:
            yield draw.normal(3, 64), draw.normal(3, 64), draw.normal(64), 1e-6

        def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
            return plain(x, residual, weight, 1e-5)

        def applied(rewrite: Rewrite, *inputs: Tensor) -> int:
            traced = trace(function, *inputs)
            (report,) = traced.apply(rewrite).passes
            traced.check()
            return len(report.matches)

        wide, narrow = (shapes((4, size), (4, size), (size,)) for size in (64, 48))
        free = Rewrite("free", plain, NODE, of_64, **SUMS)
        assert (applied(free, *wide), applied(free, *narrow)) == (1, 1)
        sizes = {"x": "rows 64", "residual": "rows 64", "weight": "64"}
        fixed = Rewrite("fixed", plain, NODE, of_64, **SUMS | {"axes": sizes})
        assert (applied(fixed, *wide), applied(fixed, *narrow)) == (1, 0)

    def test_a_computed_size_of_an_open_one(self) -> None:
        """In a trace, ``sequences+1`` may be a symbol unrelated to that of ``sequences``."""

        def spread(x: Tensor, starts: Tensor) -> Tensor:
            return x.repeat_interleave(2, 0).sum(0) + starts.sum()

        def summed(x: Tensor, starts: Tensor) -> Tensor:
            return starts.sum() + x.sum(0) * 2

        def samples(draw: Draw) -> Iterator[Sample]:
            for rows, width in ((2, 4), (5, 3)):
                yield draw.normal(rows, width), draw.normal(rows + 1)

        rewrite = Rewrite(
            "summed",
            spread,
            summed,
            samples,
            axes={"x": "sequences width", "starts": "sequences+1"},
            dtypes={"x": FLOATING, "starts": "x"},
        )
        check_rewrite(rewrite)
        for size, opened, count in ((5, (0, 1), 1), (5, (), 1), (6, (), 0)):
            traced = trace(spread, torch.ones(4, 3), torch.ones(size), rows=opened)
            assert len(traced.apply(rewrite).passes[0].matches) == count

    @pytest.mark.parametrize("name", [each.name for each in OPERATIONS if each.fused])
    def test_violations_are_of_every_tensor(self, name: str) -> None:
        rewrite = rewrite_of(name)
        sample = max(rewrite.samples(Draw()), key=lambda each: sum(isinstance(value, Tensor) for value in each))
        found = list(violations(rewrite.constraints, sample))
        for broken, arguments in found:
            assert rewrite.constraints.unmet(arguments), broken
        for argument, value in zip(rewrite.constraints.arguments, sample, strict=True):
            kinds = {what.split()[1] for what, _ in found if what.split()[0] == argument}
            assert not isinstance(value, Tensor) or {"of"} <= kinds, (argument, kinds)

    def test_violations_are_what_a_rewrite_would_be_applied_to(self) -> None:
        """A rewrite without constraints applies to many violations; one with the kernel's constraints to none."""

        def again(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            hidden = residual + x
            return torch.ops.hal.rms_norm.default(hidden, weight, eps), hidden

        strict = Rewrite("strict", plain, again, sums, **SUMS)
        loose = {"x": "a b", "residual": "c d", "weight": "e"}
        careless = Rewrite("careless", plain, again, sums, **SUMS | {"axes": loose})
        applied = {}
        (_, sample) = sums(Draw())
        for broken, arguments in violations(strict.constraints, sample):
            tensors = [each for each in arguments if isinstance(each, Tensor)]
            for rewrite in (strict, careless):
                try:
                    traced = trace(lambda *given: plain(*given, 1e-6), *tensors)
                except RuntimeError:
                    continue
                applied[rewrite.name, broken] = len(traced.apply(rewrite).passes[0].matches)
        assert not any(count for (name, _), count in applied.items() if name == "strict")
        assert {broken for (name, broken), count in applied.items() if name == "careless" and count} >= {
            "x of size 1 at 0",
            "x of size 1 at 1",
            "residual of size 1 at 0",
            "residual of size 1 at 1",
            "weight of size 1 at 0",
        }

    def test_results_are_as_declared_where_they_are(self) -> None:
        returned = {"axes": ("rows width", "rows width"), "dtypes": ("x", "x")}
        check_rewrite(Rewrite("mine", plain, NODE, sums, **{k: SUMS[k] | {"return": returned[k]} for k in SUMS}))
        wrong = returned | {"dtypes": ("x", torch.int8)}
        with pytest.raises(CompileError, match="result 1 is float32, but declared int8"):
            check_rewrite(Rewrite("mine", plain, NODE, sums, **{k: SUMS[k] | {"return": wrong[k]} for k in SUMS}))
