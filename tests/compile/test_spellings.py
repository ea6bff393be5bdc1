"""Tests that spellings of the same arithmetic match one pattern, and that others are reported."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.rewriting import trace
from helpers.thorough import LONG, thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hal.compile.fx.arithmetic import POWER_DTYPES, RESPELLED, Reading, readings
from hal.compile.fx.clean import common_subexpressions
from hal.compile.rewrite.rewrite import Rewrite
from hal.compile.rewrite_report import PassReport
from hal.ops.declaration.constraints import Draw

aten = torch.ops.aten
Step = Callable[[Tensor, Tensor], Tensor]
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def declared(pattern: Callable[..., Any], *inputs: Tensor) -> dict[str, dict[str, Any]]:
    """Return the axes and dtypes of a pattern's tensors: those of the inputs, with a name for each axis."""
    named = list(zip(inspect.signature(pattern).parameters, inputs, strict=False))
    return {
        "axes": {name: " ".join(f"{name}_{dim}" for dim in range(each.dim())) for name, each in named},
        "dtypes": {name: each.dtype for name, each in named},
    }


def look_for(
    pattern: Callable[..., Any],
    function: Callable[..., Any],
    *inputs: Tensor,
    numbers: Sequence[Any] = (),
    replacement: Callable[..., Any] | None = None,
) -> PassReport:
    """Match and replace a pattern in a function's trace; check that the results are unchanged bit for bit."""

    def samples(draw: Draw) -> Iterator[tuple[Any, ...]]:
        for rows in (2, 5):
            yield *(torch.ones(rows, *each.shape[1:], dtype=each.dtype) for each in inputs), *numbers

    traced = trace(function, *inputs)
    (report,) = traced.apply(
        Rewrite("pattern", pattern, replacement or pattern, samples, **declared(pattern, *inputs))
    ).passes
    traced.check()
    return report


def fires(pattern: Callable[..., Any], function: Callable[..., Any], *inputs: Tensor, **options: Any) -> None:
    report = look_for(pattern, function, *inputs, **options)
    assert len(report.matches) == 1, report.near_misses


def keeps_off(pattern: Callable[..., Any], function: Callable[..., Any], *inputs: Tensor, **options: Any) -> str:
    report = look_for(pattern, function, *inputs, **options)
    assert not report.matches
    return " | ".join(report.near_misses)


def values(dtype: torch.dtype = torch.float32, rows: int = 3) -> Tensor:
    return Draw(seed=6).normal(rows, 4).to(dtype)


def rounded(number: float) -> float:
    return ctypes.c_float(number).value


INVERSES: list[Callable[[Tensor], Tensor]] = [
    lambda s: 1 / s,
    lambda s: 1.0 / s,
    lambda s: s.reciprocal(),
    lambda s: s**-1,
    lambda s: s.pow(-1.0),
    lambda s: s.reciprocal() * 1,
    lambda s: torch.reciprocal(s) * 1.0,
]


@pytest.mark.parametrize("spelled", INVERSES)
def test_an_inverse_is_an_inverse(spelled: Callable[[Tensor], Tensor]) -> None:
    """All match the first one, and it matches them, so that each matches each."""
    for pattern, function in ((spelled, INVERSES[0]), (INVERSES[0], spelled)):
        fires(pattern, function, values())
        fires(lambda x, of=pattern: of(x.exp()) + x, lambda x, of=function: of(x.exp()) + x, values())


def test_a_reciprocal_that_others_read_keeps_its_factor() -> None:
    def function(x: Tensor) -> Any:
        inverse = x.reciprocal()
        return inverse, inverse * 1

    traced = trace(function, values())
    traced.apply()
    assert traced.calls() == {"reciprocal": 1, "mul.Tensor": 1}
    first, second = traced.graph(values())
    assert first.data_ptr() != second.data_ptr()


def steps(dtype: torch.dtype) -> st.SearchStrategy[list[list[Step]]]:
    """Return a strategy for steps of arithmetic: lists of spellings that compute the same in ``dtype``."""
    number = st.one_of(
        st.sampled_from([-1.0, 0.5, 2.0, -4.0, 0.0, -0.0, 3.0, 0.1, 1e-6]), st.floats(-8, 8, allow_subnormal=False)
    )
    made = st.one_of(
        number.map(lambda c: _products(c, dtype)),
        number.map(lambda c: _sums(c, dtype)),
        number.map(_limits),
        number.map(_choices),
        st.just(_squares()),
        st.just(_differences()),
        *([st.just(each) for each in _powers()] if dtype in POWER_DTYPES else []),
    )
    return st.lists(made, min_size=1, max_size=4)


def _alternatives(c: float, dtype: torch.dtype) -> list[float]:
    """Return the ways to write a number."""
    exact: list[float] = [c] if dtype == torch.float64 else [c, rounded(c)]
    return [*exact, int(c)] if c == int(c) and str(c) != "-0.0" else exact


def _products(c: float, dtype: torch.dtype) -> list[Step]:
    found: list[Step] = []
    for each in _alternatives(c, dtype):
        found += [lambda x, y, n=each: x * n, lambda x, y, n=each: n * x]
        found += [lambda x, y, n=each: x.mul(n), lambda x, y, n=each: aten.mul.Scalar(x, n)]
    if c in (0.5, 2.0, -4.0, -1.0):
        found += [lambda x, y: x / (1 / c), lambda x, y: x.div(1 / c)]
    if c == -1:
        found += [lambda x, y: -x, lambda x, y: x.neg(), lambda x, y: x / -1]
    return found


def _sums(c: float, dtype: torch.dtype) -> list[Step]:
    found: list[Step] = []
    for each in _alternatives(c, dtype):
        found += [lambda x, y, n=each: x + n, lambda x, y, n=each: n + x, lambda x, y, n=each: aten.add.Scalar(x, n)]
        found += [lambda x, y, n=each: x - -float(n), lambda x, y, n=each: torch.sub(x, n, alpha=-1)]
        found += [lambda x, y, n=each: torch.add(x, -float(n), alpha=-1.0)]
    return found


def _limits(c: float) -> list[Step]:
    whole = round(c)
    return [
        lambda x, y: x.clamp(whole - 1, whole + 1),
        lambda x, y: x.clamp(whole - 1.0, whole + 1.0),
        lambda x, y: torch.clamp(x, min=whole - 1.0, max=whole + 1),
    ]


def _choices(c: float) -> list[Step]:
    whole = round(c)
    return [
        lambda x, y: x.masked_fill(x > whole, whole),
        lambda x, y: x.masked_fill(x > float(whole), float(whole)),
        lambda x, y: torch.masked_fill(x, torch.gt(x, float(whole)), whole),
    ]


def _squares() -> list[Step]:
    return [lambda x, y: x * x, lambda x, y: x**2, lambda x, y: x.square(), lambda x, y: x.pow(2.0)]


def _differences() -> list[Step]:
    return [
        lambda x, y: x - y,
        lambda x, y: torch.rsub(y, x),
        lambda x, y: torch.add(x, y, alpha=-1),
        lambda x, y: torch.sub(x, y, alpha=1.0),
    ]


def _powers() -> list[list[Step]]:
    return [
        [lambda x, y: x.rsqrt(), lambda x, y: x**-0.5],
        [lambda x, y: x.sqrt(), lambda x, y: torch.pow(x, 0.5)],
        [lambda x, y, each=each: each(x) for each in INVERSES],
    ]


@thorough(LONG)
@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(FLOATING))
def test_any_spelling_of_any_arithmetic(data: st.DataObject, dtype: torch.dtype) -> None:
    drawn = data.draw(steps(dtype))
    chosen = [[data.draw(st.sampled_from(each), label="spelling") for each in drawn] for _ in range(2)]

    def of(calls: list[Step]) -> Callable[[Tensor, Tensor], Tensor]:
        def function(x: Tensor, y: Tensor) -> Tensor:
            x = x.sin() + y
            for each in calls:
                x = each(x, y)
            return x.cos()

        return function

    special = torch.tensor([[0.0, -0.0, float("inf"), float("nan")]])
    fires(*map(of, chosen), torch.cat([values(), special]).to(dtype), values(dtype, 4))


KINDS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda x, c: x * c,
    "add": lambda x, c: x + c,
    "sub": lambda x, c: x - c,
    "div": lambda x, c: x / c,
    "rsub": lambda x, c: c - x,
    "pow": lambda x, c: x**c,
    "clamp": lambda x, c: x.clamp(c, 99.0),
}


@thorough(LONG)
@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(FLOATING), st.data())
def test_other_numbers_are_reported_with_both(kind: str, dtype: torch.dtype, data: st.DataObject) -> None:
    number = st.one_of(st.integers(-9, 9), st.floats(-9, 9, allow_subnormal=False), st.sampled_from([0.0, -0.0]))
    one, other = data.draw(number), data.draw(number)
    computed = [
        str(float(each) if dtype == torch.float64 or kind in ("pow", "clamp") else rounded(each))
        for each in (one, other)
    ]
    inside = KINDS[kind]
    report = look_for(lambda x: inside(x.sin(), one).cos(), lambda x: inside(x.sin(), other).cos(), values(dtype))
    assert len(report.matches) == (computed[0] == computed[1])
    if computed[0] != computed[1]:
        assert report.near_misses
        assert f"{kind} has {other}, where the pattern has {one}" in report.near_misses[0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_numbers_of_integer_tensors_keep_their_type(dtype: torch.dtype) -> None:
    n = torch.arange(12, dtype=dtype).view(3, 4)
    fires(lambda n: (n * 2).abs(), lambda n: (n * 2).abs(), n)
    fires(lambda n: (n / 2).abs(), lambda n: (n / 2.0).abs(), n)  # operands are converted to float before the division
    fires(lambda n: (n + 0.1).abs(), lambda n: (n + rounded(0.1)).abs(), n)
    name = str(dtype).removeprefix("torch.")
    reason = keeps_off(lambda n: (n * 2).abs(), lambda n: (n * 2.0).abs(), n)
    assert (
        f"mul has 2.0, where the pattern has 2, and returns float32 [3, 4], where the pattern returns {name}" in reason
    )
    reason = keeps_off(lambda n: (n * 2.0).abs(), lambda n: (n * 2).abs(), n)
    assert (
        f"mul has 2, where the pattern has 2.0, and returns {name} [3, 4], where the pattern returns float32" in reason
    )
    reason = keeps_off(lambda n: (n * 2).abs(), lambda n: (n * 3).abs(), n)
    assert "mul has 3, where the pattern has 2" in reason


def test_large_integers_are_no_floats() -> None:
    """float64 does not represent 2**53 + 1. Conversion to float32 rounds once, and twice by way of float64."""
    large = 2**60 + 2**36 + 1
    assert torch.tensor([1.0]).mul(large) != torch.tensor([1.0]).mul(float(large))
    reason = keeps_off(lambda x: (x * large).cos(), lambda x: (x * float(large)).cos(), values())
    assert f"mul has {float(large)}, where the pattern has {large}" in reason


@pytest.mark.parametrize(
    ("pattern", "function"),
    [
        (lambda x, y: x.rsqrt() + y, lambda x, y: 1 / x.sqrt() + y),
        (lambda x, y: x / 3 + y, lambda x, y: x * (1 / 3) + y),
        (lambda x, y: x / y, lambda x, y: x * y.reciprocal()),
        (lambda x, y: x / 3e-5 * y, lambda x, y: x * (1 / 3e-5) * y),
        (lambda x, y: x.sqrt() * y, lambda x, y: x ** (0.5 + 1e-12) * y),
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: torch.add(x, y, alpha=2), lambda x, y: torch.add(y, x, alpha=2)),
        (lambda x, y: torch.sub(x, y, alpha=2), lambda x, y: torch.add(x, y, alpha=2)),
    ],
)
def test_what_rounds_differently_is_no_spelling(pattern: Step, function: Step) -> None:
    x, y = torch.rand(2, 61, 67, generator=torch.Generator().manual_seed(4)) + 0.1

    def inside(step: Step) -> Step:
        return lambda x, y: step(x.sin(), y.exp()).cos()

    assert not torch.equal(pattern(x, y), function(x, y))
    keeps_off(inside(pattern), inside(function), x, y)


def test_a_difference_is_no_near_miss_of_a_sum() -> None:
    assert not keeps_off(lambda x, y: (x + y).cos(), lambda x, y: (x - y).cos(), values(), values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_powers_of_two_bytes_round_differently(dtype: torch.dtype) -> None:
    keeps_off(lambda x: x.sin().rsqrt().cos(), lambda x: (x.sin() ** -0.5).cos(), values(dtype))


@pytest.mark.parametrize(
    ("pattern", "given", "function", "expected"),
    [
        (lambda x, n: x * n, 3.0, lambda x: x * 2, 2.0),
        (lambda x, n: x * n, 3, lambda x: x * 2.0, 2),
        (lambda x, n: x * n, 3.0, lambda x: -x, -1.0),
        (lambda x, n: x * n, 3.0, lambda x: x / 4, 0.25),
        (lambda x, n: x * n, 3.0, lambda x: x * 0.1, 0.1),
        (lambda x, n: x / n, 3.0, lambda x: x * 0.5, 2.0),
        (lambda x, n: x / n, 8.0, lambda x: x / 5, 5.0),
        (lambda x, n: x**n, 3.0, lambda x: x * x, 2.0),
        (lambda x, n: x**n, 3, lambda x: x.reciprocal(), -1),
        (lambda x, n: x - n, 3.0, lambda x: x + 1, -1.0),
        (lambda x, n: x + n, 1.0, lambda x: x - 0, -0.0),
        (lambda x, n: n / x, 3.0, lambda x: 1 / x, 1.0),
        (lambda x, n: n / x, 127.0, lambda x: x.reciprocal(), 1.0),
        (lambda x, n: n / x, 1.0, lambda x: 127 / x, 127.0),
        (lambda x, n: n / x, 1, lambda x: 1.0 / x, 1),
        (lambda x, n: n / x, 3.0, lambda x: 2 / x, 2.0),
    ],
)
def test_numbers_have_the_type_of_the_samples(pattern: Any, given: Any, function: Any, expected: Any) -> None:
    found = []

    def replacement(x: Tensor, n: Any) -> Tensor:
        found.append(n)
        return pattern(x.exp(), n).cos()  # type: ignore[no-any-return]

    fires(
        lambda x, n: pattern(x.exp(), n).cos(),
        lambda x: function(x.exp()).cos(),
        values(),
        numbers=[given],
        replacement=replacement,
    )
    assert repr(found[-1]) == repr(expected)


def test_an_integer_argument_is_no_fraction() -> None:
    reason = keeps_off(lambda x, n: (x * n).cos(), lambda x: (x * 2.5).cos(), values(), numbers=[2])
    assert "mul has 2.5, where the pattern has 2" in reason


def test_an_integer_of_the_samples_that_is_an_open_size() -> None:
    """The sample has 2 rows and the pattern's number is 2. With symbolic rows that is a coincidence."""

    def samples(draw: Draw) -> Iterator[tuple[Any, ...]]:
        yield torch.ones(2, 4), 2

    def pattern(x: Tensor, n: int) -> Tensor:
        return (x.sin() * n).cos()

    traced = trace(lambda x: (x.sin() * 3).cos(), values(), rows=(0,))
    (report,) = traced.apply(Rewrite("pattern", pattern, pattern, samples, **declared(pattern, values()))).passes
    assert len(report.matches) == 1, report.near_misses
    traced.check()


def test_zeros_of_two_signs_are_two_subexpressions() -> None:
    traced = trace(lambda x: ((x * 0.0).cos(), 1 / (x * -0.0)), values())
    assert common_subexpressions(traced.graph) == 0
    traced.check()


@thorough(LONG)
def test_every_reading_gives_the_same_bits() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (4_000,), generator=torch.Generator().manual_seed(5))
    floats = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor([0.0, -0.0, 1e-40, 3e38])])
    numbers = (-1.0, 0.25, 2.0, -8.0, 2.0**14, 0.1, 0.0, -0.0, -0.5, 0.5, 3)
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, y: -x,
        lambda x, y: x.reciprocal(),
        lambda x, y: x.sqrt(),
        lambda x, y: x.rsqrt(),
        lambda x, y: x * x,
        lambda x, y: x - y,
        lambda x, y: torch.rsub(x, y, alpha=0.3),
        lambda x, y: torch.add(x, y, alpha=0.3),
        lambda x, y: torch.sub(x, y, alpha=-2),
        lambda x, y: torch.add(x, 0.3, alpha=0.7),
        *(lambda x, y, kind=kind, c=c: KINDS[kind](x, c) for c in numbers for kind in KINDS if kind != "clamp"),
    ]
    seen: set[Any] = set()
    for dtype in FLOATING:
        x = floats.to(dtype)
        y = x.flip(0)
        for call in calls:
            graph = trace(call, x, y).graph.graph
            inputs = dict(zip([each for each in graph.nodes if each.op == "placeholder"], (x, y), strict=True))
            for node in [each for each in graph.nodes if each.target in RESPELLED and len(graph.nodes) == 4]:
                for reading in readings(node):
                    seen.add((node.target, reading.target))
                    assert_same_bits(reading, [inputs.get(each, each) for each in reading.operands], call(x, y))
    both_ways = {(one, other) for one, other in seen if one is not other}
    assert both_ways == {(other, one) for one, other in both_ways}
    assert len(both_ways) == 20


def assert_same_bits(reading: Reading, operands: list[Any], expected: Tensor) -> None:
    arguments = zip(reading.target._schema.arguments, operands, strict=True)
    named = {each.name: given for each, given in arguments if each.kwarg_only}
    found = reading.target(*operands[: len(operands) - len(named)], **named)
    same = (found == expected) & (found.signbit() == expected.signbit()) | found.isnan() & expected.isnan()
    assert same.all(), (reading, found[~same], expected[~same])
