"""Tests for the CPU's C++ kernel that draws tokens: it gives the reference's tokens, except where rounding decides."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.thorough import DTYPE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.ops import Draw
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.sampling import _exponential

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAMPLE = ops.operation("sample")
ROUNDING = 2.0**-18
"""How much two results in float32 may differ: torch's softmax alone rounds by more than 10 units in the last place."""
INFINITE = (119_215, 1863)
"""A seed and a token whose hash, at step 0, is 2**32 - 1: the exponential is infinite."""


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return hal.open({"backend": "cpu", "options": {"native": True}}).kernels["sample"]


@attrs.frozen
class Rows:
    """Arguments of the operation: rows of logits and their parameters."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    step: Tensor

    @classmethod
    def of(
        cls,
        logits: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> Rows:
        count = logits.shape[0]
        columns = [torch.full((count,), value) for value in (temperature, top_p, min_p)]
        limit = torch.full((count,), top_k, dtype=torch.int32)
        return cls(logits, columns[0], limit, *columns[1:], torch.full((count,), seed), torch.arange(count))

    @classmethod
    def drawn(cls, draw: Draw, count: int, vocab_size: int) -> Rows:
        """Return rows of every mixture of parameters, flat and peaked, with ties in 16 bits and masked tokens."""

        def among(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype)[draw.integers(0, len(values), count)]

        logits = draw.normal(count, vocab_size).float() * among(0.02, 1.0, 2.5, 6.0)[:, None]
        masked = (draw.integers(0, 4, count, vocab_size) == 0) & (draw.integers(0, 3, count) == 0)[:, None]
        masked[:, vocab_size // 2] = False
        return cls(
            logits.masked_fill(masked, -torch.inf).to(draw.dtype),
            among(0.0, 0.01, 0.6, 1.0, 1.0, 1.7),
            among(0, 0, 1, 3, 40, vocab_size - 1, vocab_size, 2**31 - 1, dtype=torch.int32),
            among(1.0, 1.0, 1e-6, 0.3, 0.9, 0.99, 0.9999),
            among(0.0, 0.0, 0.0, 0.01, 0.3, 1.0),
            draw.integers(0, 2**62, count),
            draw.integers(0, 4096, count),
        )

    def __getitem__(self, rows: slice | Tensor) -> Rows:
        return Rows(*(value[rows] for value in self.arguments))

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return attrs.astuple(self, recurse=False)

    def explain(self, row: int, token: int) -> str | None:
        """Return why a token is wrong in float64, or None if it is the token, or may be because of rounding.

        It may be if its exponential / weight is the lowest of the tokens that are surely kept, up to ROUNDING, and the
        filters keep it if their limits change by as much.
        """
        logits, temperature = self.logits[row].float(), self.temperature[row]
        greedy = temperature <= 0
        scaled = (logits - logits.max()) / torch.where(greedy, 1.0, temperature)  # as the operation defines, in float32
        order = scaled.sort(descending=True, stable=True).indices
        limit = 1 if greedy else int(self.top_k[row]) or len(order)
        weight = scaled[order].double().exp()
        weight[limit:] = 0
        probability = weight / weight.sum()
        before, top_p = probability.cumsum(0) - probability, float(self.top_p[row])
        surely, maybe = weight > 0, weight > 0
        if top_p < 1:
            surely, maybe = surely & (before < top_p - ROUNDING), maybe & (before < top_p + ROUNDING)
        min_p = float(self.min_p[row])
        surely, maybe = surely & (weight >= min_p * (1 + ROUNDING)), maybe & (weight >= min_p * (1 - ROUNDING))
        surely[0] = maybe[0] = True
        noise = _exponential(self.seed[row : row + 1], self.step[row : row + 1], order[None])[0].double()
        ratio = noise / weight
        at = int((order == token).nonzero())
        if not maybe[at]:
            return f"the filters leave out token {token}, of rank {at}"
        lowest = float(ratio[surely].min())
        if not ratio[at] <= lowest * (1 + ROUNDING):
            return f"token {token}, of rank {at}, has {float(ratio[at])}, and another has {lowest}"
        return None


def check(rows: Rows, found: Tensor) -> int:
    """Fail unless each token is the reference's, or rounding decides between both. Return how many differ."""
    expected = SAMPLE.reference(*rows.arguments)
    assert found.dtype is torch.int64
    assert found.shape == expected.shape
    different = (found != expected).nonzero().flatten().tolist()
    for row in different:
        for name, tokens in (("kernel", found), ("reference", expected)):
            problem = rows.explain(row, int(tokens[row]))
            assert problem is None, f"{name}, row {row}, {[value[row] for value in rows.arguments[1:]]}: {problem}"
    return len(different)


@thorough(DTYPE, r"\.float16\]")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "vocab_size"), [(3000, 257), (500, 5000), (12, 151_936)])
@pytest.mark.parametrize("seed", [11], ids="seed={}".format)
def test_the_references_tokens(seed: int, count: int, vocab_size: int, dtype: torch.dtype, kernel: Kernel) -> None:
    """Where a token differs, float64 must say that rounding decides; this is so in fewer than one of 500 rows."""
    rows = Rows.drawn(Draw(dtype, seed=seed), count, vocab_size)
    found = kernel(*rows.arguments)
    assert check(rows, found) <= count / 500
    # The same alone, in another order, and with a stride between the rows.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(kernel(*rows[order].arguments), found[order])
    wider = torch.cat([rows.logits, rows.logits[:, :3]], dim=-1)[:, :vocab_size]
    assert torch.equal(kernel(wider, *rows.arguments[1:]), found)
    some = range(0, count, max(1, count // 50))
    assert [int(kernel(*rows[slice(row, row + 1)].arguments)) for row in some] == found[list(some)].tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 63, 1023, 1024, 1025, 2049])
def test_vocabularies_of_every_remainder(vocab_size: int, kernel: Kernel) -> None:
    rows = Rows.drawn(Draw(seed=vocab_size), 400, vocab_size)
    assert check(rows, kernel(*rows.arguments)) <= 1


@pytest.mark.parametrize("given", [{"top_k": 100}, {"top_p": 0.4}, {"top_k": 300, "top_p": 0.7}, {"min_p": 1.0}])
def test_equal_logits_are_ranked_by_token(given: dict[str, float], kernel: Kernel) -> None:
    """The limits of top_k and top_p are within hundreds of equal logits. The draws come near both ends."""
    logits = torch.zeros(2000, 1000)
    logits[:, 500:] = -1e-6
    rows = Rows.of(logits, seed=5, **given)
    found = kernel(*rows.arguments)
    assert check(rows, found) <= 4
    kept = {"top_k": 100, "top_p": 400, "min_p": 500}.get(next(iter(given)), 0) if len(given) == 1 else 210
    assert kept - 10 < int(found.max()) <= kept  # one more, because 0.4 and 0.7 are rounded
    assert int(found.min()) < 10


@pytest.mark.parametrize("given", [{}, {"top_k": 30}, {"top_k": 2}, {"top_p": 0.99}, {"top_p": 0.9999999}])
def test_a_masked_token_is_never_drawn(given: dict[str, float], kernel: Kernel) -> None:
    logits = Draw(seed=4).normal(3000, 300)
    masked = torch.arange(300) % 17 != 3
    masked[150] = False
    logits[:, masked] = -torch.inf
    rows = Rows.of(logits, seed=9, temperature=4.0, **given)
    found = kernel(*rows.arguments)
    assert not masked[found].any()
    assert check(rows, found) <= 6
    only = logits.masked_fill(torch.arange(300) != 150, -torch.inf)
    assert kernel(*Rows.of(only, **given).arguments).tolist() == [150] * 3000


@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}])
@pytest.mark.parametrize(
    ("places", "value", "token"),
    [([7, 20], torch.inf, 7), (range(40), -torch.inf, 0), ([21], torch.nan, 0), (range(40), torch.nan, 0)],
)
def test_no_finite_maximum(
    places: list[int], value: float, token: int, given: dict[str, float], kernel: Kernel
) -> None:
    """They give the reference's token, and the rows beside them stay as they are."""
    rows = Rows.of(Draw(seed=1).normal(5, 40), **given)
    rows.logits[2, list(places)] = value
    found = kernel(*rows.arguments)
    assert found[2] == token
    assert torch.equal(found, SAMPLE.reference(*rows.arguments))


@pytest.mark.parametrize("temperature", [1e-45, 1e-42, 1e-38, 1e-20, 1e30])
@pytest.mark.parametrize("given", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_extreme_temperatures(temperature: float, given: dict[str, float], kernel: Kernel) -> None:
    rows = Rows.of(Draw(seed=3).normal(200, 70, scale=5.0), temperature=temperature, **given)
    assert check(rows, kernel(*rows.arguments)) <= 1


@pytest.mark.parametrize("top_p", [0.0, 1e-45, float("nan")])
def test_top_p_keeps_the_likeliest_at_least(top_p: float, kernel: Kernel) -> None:
    for logits in (Draw(seed=3).normal(50, 70), torch.zeros(50, 70)):
        for top_k in (0, 6):
            found = kernel(*Rows.of(logits, top_p=top_p, top_k=top_k).arguments)
            assert torch.equal(found, logits.argmax(-1))


@pytest.mark.parametrize("others", [-torch.inf, -80.0, -2.0])
def test_the_most_likely_token_with_an_infinite_exponential(others: float, kernel: Kernel) -> None:
    """The hash of this seed and token rounds to 1. Any token of some probability is drawn instead."""
    seed, step, token = torch.tensor([INFINITE[0]]), torch.tensor([0]), INFINITE[1]
    assert _exponential(seed, step, torch.tensor([[token]])).isinf()
    rows = Rows.of(torch.full((1, token + 40), others), seed=INFINITE[0])
    rows.logits[0, token] = 0
    found = kernel(*rows.arguments)
    assert torch.equal(found, SAMPLE.reference(*rows.arguments))
    assert (found == token) == (others == -torch.inf)
