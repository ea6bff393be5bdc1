"""Tests for random numbers of the emulated CANN: distributions, seeds, and new numbers at each replay of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

N = 20_000

DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(N, device="npu"),
    "rand float16": lambda: torch.rand(N, device="npu", dtype=torch.float16),
    "uniform_": lambda: torch.empty(N, device="npu").uniform_(-2, 5),
    "randn": lambda: torch.randn(N, device="npu"),
    "normal_": lambda: torch.empty(N, device="npu").normal_(3, 2),
    "randint": lambda: torch.randint(-3, 9, (N,), device="npu"),
    "random_": lambda: torch.empty(N, device="npu", dtype=torch.int64).random_(),
    "bernoulli_": lambda: torch.empty(N, device="npu").bernoulli_(0.3),
    "exponential_": lambda: torch.empty(N, device="npu").exponential_(2),
    "randperm": lambda: torch.randperm(N, device="npu"),
    "multinomial": lambda: torch.multinomial(torch.arange(1.0, 5, device="npu"), N, replacement=True),
    "dropout": lambda: functional.dropout(torch.ones(N, device="npu"), 0.25),
}
CAPTURED = ("rand", "uniform_", "randn", "normal_", "randint", "exponential_", "multinomial", "dropout")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.npu.manual_seed(1234)
    yield
    torch.npu.synchronize()


@pytest.mark.parametrize("name", DRAWS)
def test_same_seed_same_numbers(name: str) -> None:
    first, second = DRAWS[name]().cpu(), DRAWS[name]().cpu()
    torch.npu.manual_seed(1234)
    assert torch.equal(DRAWS[name]().cpu(), first)
    state = torch.npu.get_rng_state()
    assert torch.equal(DRAWS[name]().cpu(), second)
    torch.npu.set_rng_state(state)
    assert torch.equal(DRAWS[name]().cpu(), second)
    torch.npu.manual_seed(1235)
    third = DRAWS[name]().cpu()
    assert not any(torch.equal(one, other) for one, other in ((first, second), (first, third), (second, third)))


def near(actual: Tensor, mean: float, std: float) -> None:
    """Check the mean within five standard errors, and the standard deviation.

    The fixed seed makes this deterministic.
    """
    values = actual.double().cpu()
    assert abs(values.mean().item() - mean) < 5 * std / N**0.5
    assert values.std().item() == pytest.approx(std, rel=0.05)


def test_uniform() -> None:
    near(DRAWS["rand"](), 0.5, 12**-0.5)
    near(DRAWS["uniform_"](), 1.5, 7 * 12**-0.5)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        values = torch.rand(N, device="npu", dtype=dtype).cpu()
        assert values.min() >= 0
        assert values.max() < 1


def test_normal() -> None:
    near(DRAWS["randn"](), 0, 1)
    near(DRAWS["normal_"](), 3, 2)
    mean = torch.linspace(-4, 4, N, device="npu")
    near(torch.normal(mean, torch.full_like(mean, 0.5)) - mean, 0, 0.5)


def test_integers() -> None:
    assert sorted(DRAWS["randint"]().unique().tolist()) == list(range(-3, 9))
    assert (DRAWS["random_"]().cpu() >= 0).all()
    assert torch.equal(DRAWS["randperm"]().cpu().sort()[0], torch.arange(N))


def test_bernoulli_and_exponential() -> None:
    near(DRAWS["bernoulli_"](), 0.3, (0.3 * 0.7) ** 0.5)
    near(DRAWS["exponential_"](), 0.5, 0.5)
    probability = torch.tensor([0.0, 1.0], device="npu")
    assert torch.bernoulli(probability).tolist() == [0, 1]


def test_multinomial() -> None:
    counts = torch.bincount(DRAWS["multinomial"]().cpu(), minlength=4) / N
    torch.testing.assert_close(counts, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.02, rtol=0)
    without = torch.multinomial(torch.tensor([[0.0, 1, 2, 3]] * 50, device="npu"), 3).cpu()
    assert torch.equal(without.sort(-1)[0], torch.tensor([[1, 2, 3]] * 50))


def test_dropout() -> None:
    kept = DRAWS["dropout"]().cpu()
    torch.testing.assert_close(kept.unique(), torch.tensor([0, 4 / 3]))
    near(kept, 1, (1 / 3) ** 0.5)


def test_strides_do_not_matter() -> None:
    flat = torch.rand(6, 4, device="npu").cpu()
    torch.npu.manual_seed(1234)
    strided = torch.empty(4, 6, device="npu").t().uniform_()
    assert torch.equal(strided.cpu(), flat)


@pytest.mark.parametrize("name", CAPTURED)
def test_each_replay_draws_anew(name: str) -> None:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        first, second = DRAWS[name](), DRAWS[name]()

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return first.cpu(), second.cpu()

    torch.npu.manual_seed(7)
    seen = [each for _ in range(3) for each in replay()]
    for i, one in enumerate(seen):
        assert not any(torch.equal(one, other) for other in seen[:i])
    torch.npu.manual_seed(7)
    again = [each for _ in range(3) for each in replay()]
    assert all(torch.equal(one, other) for one, other in zip(seen, again, strict=True))


def test_a_replay_goes_on_where_eager_stopped() -> None:
    """A captured rand gives what an eager one would give at the same position."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = torch.rand(N, device="npu")
    torch.npu.manual_seed(7)
    eager = [torch.rand(N, device="npu").cpu() for _ in range(3)]
    torch.npu.manual_seed(7)
    mixed = [torch.rand(N, device="npu").cpu()]
    graph.replay()
    mixed.append(captured.cpu().clone())
    mixed.append(torch.rand(N, device="npu").cpu())
    assert all(torch.equal(one, other) for one, other in zip(eager, mixed, strict=True))


def test_philox() -> None:
    """Test Philox 4x32-10 for key 0 and counter 0 against the known answer of the authors' Random123 library."""
    torch.npu.manual_seed(0)
    first = torch.rand(1, device="npu").item()
    assert first == (0x6627E8D5 >> 8) / 2**24
