"""Tests for penalties and masks of logits against loops: of the reference and of both sets of CPU kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hal
from hal import ops
from hal.errors import OperationError
from hal.ops import Draw

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = ("reference", "torch", "c++")


def kernel(name: str, source: str) -> Callable[..., Tensor]:
    if source == "reference":
        return ops.operation(name).reference
    options = {"native": source == "c++"}
    found: Callable[..., Tensor] = hal.open({"backend": "cpu", "options": options}).kernels[name]
    return found


def each_kernel() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("source", KERNELS)


def penalized(logit: float, count: int, prompted: bool, repetition: float, frequency: float, presence: float) -> float:
    if prompted or count:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - (presence if count else 0)


@each_kernel()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 5), vocab_size=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_penalties_are_those_of_a_loop(source: str, dtype: torch.dtype, rows: int, vocab_size: int, seed: int) -> None:
    draw = Draw(dtype, seed=seed)
    logits = draw.normal(rows, vocab_size, scale=4.0)
    counts = (draw.integers(-3, 6, rows, vocab_size)).clamp(min=0).int()
    prompted = draw.integers(0, 2, rows, vocab_size).bool()
    wide = Draw(seed=seed)
    repetition, frequency, presence = wide.normal(rows).exp(), wide.normal(rows), wide.normal(rows)
    penalties = repetition, frequency, presence
    found = kernel("penalize", source)(logits, counts, prompted, *penalties)
    assert found.dtype is torch.float32
    expected = [
        [
            penalized(*each, *(float(penalty[row]) for penalty in penalties))
            for each in zip(logits[row].tolist(), counts[row].tolist(), prompted[row].tolist(), strict=True)
        ]
        for row in range(rows)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@each_kernel()
def test_the_sign_decides_what_a_repetition_penalty_does(source: str) -> None:
    logits = torch.tensor([[3.0, -3.0, 0.0, -0.0, math.inf, -math.inf]])
    none, zero = torch.zeros(1, 6, dtype=torch.int32), torch.zeros(1)
    found = kernel("penalize", source)(logits, none, torch.ones(1, 6).bool(), torch.tensor([1.5]), zero, zero)
    assert found.tolist() == [[2.0, -4.5, 0.0, 0.0, math.inf, -math.inf]]


@each_kernel()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_independent_and_neutral_penalties_keep_them(source: str, dtype: torch.dtype) -> None:
    """Bit for bit: a prompt without penalties has the same tokens in a step with others."""
    draw, run = Draw(dtype, seed=7), kernel("penalize", source)
    logits, counts = draw.normal(6, 333, scale=5.0)[:, 1:-1], draw.integers(0, 4, 6, 331, dtype=torch.int32)
    prompted = draw.integers(0, 2, 6, 331).bool()
    penalties = [draw.integers(1, 40, 6).float() / 13 for _ in range(3)]
    for penalty, neutral in zip(penalties, (1.0, 0.0, 0.0), strict=True):
        penalty[2] = neutral
    arguments = (logits, counts, prompted, *penalties)
    together = run(*arguments)
    for row in range(6):
        assert torch.equal(run(*(each[row : row + 1] for each in arguments))[0], together[row])
    assert torch.equal(together[2], logits[2].float())
    assert not torch.equal(together[1], logits[1].float())


@each_kernel()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 4), vocab_size=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_a_mask_is_that_of_a_loop(source: str, dtype: torch.dtype, rows: int, vocab_size: int, seed: int) -> None:
    draw = Draw(dtype, seed=seed)
    logits, words = draw.normal(rows, vocab_size), -(-vocab_size // 32)
    allowed = draw.integers(-(2**31), 2**31, rows, words, dtype=torch.int32)
    allowed[draw.integers(0, 4, rows, words) == 0] = -1
    allowed[draw.integers(0, 4, rows, words) == 0] = 0
    found = kernel("mask_logits", source)(logits, allowed)
    expected = [
        [
            logit if (int(allowed[row, token // 32]) % 2**32) >> token % 32 & 1 else -math.inf
            for token, logit in enumerate(logits[row].tolist())
        ]
        for row in range(rows)
    ]
    assert torch.equal(found, torch.tensor(expected, dtype=dtype))


@each_kernel()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allowed_logits_keep_their_bits(source: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[-0.0, math.nan, -math.inf, 1e-7, 2.0]], dtype=dtype)
    found = kernel("mask_logits", source)(logits, torch.tensor([[-1]], dtype=torch.int32))
    as_integers = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(found.view(as_integers), logits.view(as_integers))
    assert found.data_ptr() != logits.data_ptr()


@each_kernel()
@pytest.mark.parametrize(("vocab_size", "words"), [(32, 0), (32, 2), (33, 1), (100, 3), (1, 2)])
def test_a_mask_of_another_vocabulary_is_refused(source: str, vocab_size: int, words: int) -> None:
    allowed = torch.full((2, words), -1, dtype=torch.int32)
    message = rf"{words} words for a vocabulary of {vocab_size} tokens\n.*give {-(-vocab_size // 32)} words"
    with pytest.raises(OperationError, match=message):
        kernel("mask_logits", source)(torch.zeros(2, vocab_size), allowed)


def test_strict_backends_penalize_and_mask() -> None:
    """On the CPU also without a C++ compiler."""
    for native in (True, False):
        backend = hal.open({"backend": "cpu", "strict": True, "options": {"native": native}})
        for name in ("penalize", "mask_logits"):
            for sample in ops.operation(name).samples(Draw()):
                getattr(backend.ops, name)(*sample)
    hal.open("cpu")
