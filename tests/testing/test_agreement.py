"""Tests for the comparison of logits with a reference: what it accepts and what it rejects."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hal
from hal import ops
from hal.ops import tolerance
from hal.ops.rounding import MANY_TOKENS, SUITE, Agreement, Bounds, ReferenceLogits, check_choice, check_logits
from hal.ops.tolerance import assert_agree, error

SEED, TEXTS, TOKENS, VOCAB = 5, 3, 20, 50
ERROR = 1e-3
"""Root mean square error of the reference's logits."""


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(TEXTS)]


EXACT = drawn(SEED)
KNOWN = ReferenceLogits.of([a + ERROR * b for a, b in zip(EXACT, drawn(SEED + 1), strict=True)], EXACT, torch.float32)


def off_by(size: float, seed: int = SEED + 2) -> dict[tuple[int, int], Tensor]:
    """Return logits at a distance from the exact ones, in units of the reference's distance."""
    return {
        (row, at): exact[at] + size * ERROR * noise[at]
        for row, (exact, noise) in enumerate(zip(EXACT, drawn(seed), strict=True))
        for at in range(TOKENS)
    }


def check(found: dict[tuple[int, int], Tensor], bounds: Bounds = SUITE) -> Agreement:
    return check_logits(found, KNOWN, bounds)


def test_what_is_as_far_as_the_reference_passes() -> None:
    found = check(off_by(1.0))
    assert found.tokens == TEXTS * TOKENS
    assert found.mean == pytest.approx(1.0, rel=0.1)
    assert found.worst == pytest.approx(0.5, rel=0.5)  # in units of the reference's distance, twice


def test_the_mean_is_that_of_the_tokens_compared() -> None:
    first = {place: logits for place, logits in off_by(1.0).items() if place[1] == 0}
    assert check(first).tokens == TEXTS
    assert check(first).mean == pytest.approx(1.0, rel=0.3)


def test_a_token_that_is_too_far_is_named() -> None:
    found = off_by(1.0) | {(1, 7): off_by(20.0)[1, 7]}
    with pytest.raises(AssertionError, match=r"sequence 1, token 7: logits are 0\.0\d+"):
        check(found)
    with pytest.raises(AssertionError, match="sequence 0, token 0: logits are"):
        check(off_by(1.0), Bounds(0.1))


def test_the_mean_of_many_tokens_is_held_closer() -> None:
    assert check(off_by(1.0), MANY_TOKENS).mean < MANY_TOKENS.mean
    with pytest.raises(AssertionError, match=r"all logits are 1\.2\d* times as far from the exact"):
        check(off_by(1.25), MANY_TOKENS)
    assert check(off_by(1.25)).mean > MANY_TOKENS.mean


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(value: float) -> None:
    found = off_by(1.0)
    found[2, 3][9] = value
    with pytest.raises(AssertionError, match="sequence 2, token 3: not all logits are finite"):
        check(found)
    with pytest.raises(AssertionError, match="the reference has logits that are not finite"):
        ReferenceLogits.of([torch.tensor([[1.0, value]])], [torch.tensor([[1.0, 1.0]])], torch.float32)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)])
def test_rounding_the_logits_themselves_is_the_least_error(dtype: torch.dtype, error: float) -> None:
    """If the reference is exact by chance, others need not be."""
    known = ReferenceLogits.of([torch.ones(4, 8)], [torch.ones(4, 8)], dtype)
    assert known.mean == pytest.approx(error / 12**0.5)


def test_another_choice_must_be_a_tie() -> None:
    rounded, exact = torch.tensor([[1.0, 2.05, 2.0]]), torch.tensor([[1.0, 2.0, 2.04]])
    known = ReferenceLogits.of([rounded], [exact], torch.float32)  # an error of 0.04
    assert not check_choice("here", 1, known, 0, 0)
    assert check_choice("here", 2, known, 0, 0)
    with pytest.raises(
        AssertionError,
        match=r"here: chose token 0 instead of 1; their logits differ by 1\.05, with a rounding error of",
    ):
        check_choice("here", 0, known, 0, 0)
    sure = ReferenceLogits.of([rounded], [rounded], torch.float32)  # the same gap, with almost no error
    with pytest.raises(AssertionError, match=r"here: chose token 2 instead of 1; their logits differ by 0\.05"):
        check_choice("here", 2, sure, 0, 0)


class TestOneCall:
    """Deviations that a declared tolerance accepts."""

    NORM, WANT = ops.operation("rms_norm"), torch.tensor([[1.0, 100.0]])

    def test_an_element_at_its_edge(self) -> None:
        relative, absolute = self.NORM.tolerance[torch.float32]
        edge = self.WANT.double() * (1 + relative) + absolute
        for share, passes in ((0.9, True), (1.1, False)):
            got = (self.WANT + share * (edge - self.WANT)).float()
            worst = error(self.NORM, torch.float32, got, self.WANT)
            assert (worst.ratio <= 1) == passes
            assert worst.ratio == pytest.approx(share, abs=0.05)
        with pytest.raises(AssertionError, match=r"rms_norm here, torch.float32: .*, 1\.\d+ times the allowed"):
            assert_agree(self.NORM, torch.float32, (None, got), (None, self.WANT), "here")

    def test_size_and_times_widen_it(self) -> None:
        got = self.WANT + torch.tensor([[1e-4, 0.0]])
        ratio = error(self.NORM, torch.float32, got, self.WANT).ratio
        assert error(self.NORM, torch.float32, got, self.WANT, times=4).ratio == pytest.approx(ratio / 4)
        assert 2 < ratio / error(self.NORM, torch.float32, got, self.WANT, size=10).ratio < 10

    def test_the_default_tolerance_is_for_what_no_operation_declares(self) -> None:
        assert_agree(None, torch.float32, self.WANT + 5e-6, self.WANT)
        with pytest.raises(AssertionError, match=r"results, torch\.float32: "):
            assert_agree(None, torch.float32, self.WANT + 5e-3, self.WANT)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
    def test_integers_are_equal(self, dtype: torch.dtype) -> None:
        want = torch.tensor([1, 1000]).to(dtype)
        assert_agree(self.NORM, torch.bfloat16, want, want.clone())
        with pytest.raises(AssertionError, match=r"at \[\d\]"):
            assert_agree(self.NORM, torch.bfloat16, torch.tensor([0, 1001]).to(dtype), want)

    def test_large_integers_are_not_rounded(self) -> None:
        want = torch.tensor([2**53])
        assert error(self.NORM, torch.float32, want + 1, want).ratio == float("inf")

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite(self, value: float) -> None:
        want = torch.tensor([1.0, value])
        assert error(self.NORM, torch.float32, want, torch.ones(2)).ratio == float("inf")
        assert error(self.NORM, torch.float32, torch.ones(2), want).ratio == float("inf")
        assert error(self.NORM, torch.float32, want, want, equal_nan=True).ratio == 0
        assert (error(self.NORM, torch.float32, want, want).ratio == 0) == (value == float("inf"))

    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            (torch.ones(2), torch.ones(1, 2)),
            (torch.ones(2).half(), torch.ones(2)),
            (None, torch.ones(2)),
            (torch.ones(2), None),
            (3, 4),
        ],
    )
    def test_shapes_dtypes_and_other_values(self, found: object, expected: object) -> None:
        with pytest.raises(AssertionError, match=r"it is .* and not "):
            assert_agree(self.NORM, torch.float32, [found], [expected])


def test_steps_are_counted_under_python_o_too() -> None:
    """python -O removes assert statements, so checks must not use them."""
    namespace: dict[str, object] = {"__name__": tolerance.__name__}
    source = Path(tolerance.__file__).read_text(encoding="utf-8")
    exec(compile(source, tolerance.__file__, "exec", optimize=2), namespace)
    optimized = namespace["assert_agree"]
    assert callable(optimized)
    operation = ops.operation("dynamic_quantize")
    dtype = next(iter(operation.off_by_one))
    expected = operation.reference(*next(iter(operation.samples(ops.Draw(dtype)))))
    optimized(operation, dtype, expected, expected)
    for wrong in (expected[0] ^ 64, expected[0].unsqueeze(0), expected[0].int()):
        with pytest.raises(AssertionError):
            optimized(operation, dtype, (wrong, expected[1]), expected)


def test_no_check_is_an_assert_statement() -> None:
    """The remaining assert statements narrow a type."""
    package = Path(hal.__file__).parent
    files = [each for room in ("testing", "compare", "doctor") for each in (package / room).rglob("*.py")]
    found = [
        f"{file.relative_to(package)}:{node.lineno}: {ast.unparse(node)}"
        for file in (*files, package / "ops/tolerance.py", package / "ops/rounding.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and not ast.unparse(node.test).endswith(" is not None")
    ]
    assert files
    assert found == []
