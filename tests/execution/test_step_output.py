"""Tests of what a step returns: hidden states, a model's further tensors, and logits of the rows that are asked for."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal.errors import BatchError, ModelError
from hal.execution.capture.captured_form import CapturedForm
from hal.nn import Attention, CausalLM, Embedding, Linear, RMSNorm
from hal.nn.model import LayerState
from hal.step import ALL, LAST, NONE, Rows, Wanted, last_rows

COMPILERS: Mapping[str, dict[str, Any]] = {
    "eager": {},
    "graph": {"capture_sizes": [1, 4], "queries": [1, 2]},
    "piecewise": {"capture_sizes": [4], "prefill": {"capture_sizes": [16]}},
    "piecewise_eager": {"capture_sizes": [4], "prefill": {"capture_sizes": [16]}},
    "inductor": {"capture_sizes": [1, 4]},
}


class Encoder(CausalLM):
    """A model of one layer without logits, which returns the inputs of its layer, too."""

    vocab_size, max_length, extra = 13, 256, ("layer_input", "sums")

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = Embedding(13, 32), Linear(32, 6 * 8)
        self.attention, self.out, self.norm = Attention(2, 8), Linear(16, 32), RMSNorm(32, 1e-6)
        self.states = [self.attention.states]
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Encoder:
        return cls()

    def forward(self, batch: Any, states: Sequence[LayerState]) -> Any:
        embedded = self.embedding(batch.token_ids)
        query, key, value = self.qkv(embedded).view(-1, 6, 8).split([2, 2, 2], dim=1)
        hidden = embedded + self.out(self.attention(query, key, value, batch, states[0]))
        return self.norm(hidden), embedded, hidden.sum(-1)


class Scorer(Encoder):
    """The same model, with logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.as_linear(hidden)


def opened(compiler: str, **compilation: Any) -> hal.Backend:
    return hal.open(
        {
            "backend": "cpu",
            "max_prefill_tokens": 24,
            "compilation": {"compiler": compiler, **COMPILERS[compiler], **compilation},
        }
    )


STEPS: tuple[tuple[list[list[int]], list[int]], ...] = (
    ([[1, 2, 3], [4]], [0, 0]),
    ([[5], [6]], [3, 1]),
    ([[7, 8], [9, 1]], [4, 2]),
    ([[3], [2], [5]], [6, 4, 0]),
    ([[2]], [7]),
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1] * 30], [8, 5]),
)
"""New and cached tokens of each sequence."""


def wanted(tokens: int) -> list[tuple[Wanted, list[int] | None]]:
    """Rows of a step, and the tokens that they are; None for the last ones."""
    some = [tokens - 1, 0, 0]
    return [(LAST, None), (ALL, list(range(tokens))), (torch.tensor(some), some), (NONE, [])]


@thorough(MODE, r"\[Encoder-inductor")
@thorough(EXHAUSTIVE, r"\[Scorer-(graph|inductor)|\[Encoder-piecewise")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("model_type", [Encoder, Scorer])
def test_all_tensors_of_all_compilers(compiler: str, model_type: type[Encoder]) -> None:
    model = model_type()
    backend, plain = opened(compiler), opened("eager")
    with hal.Runner(model, backend) as runner, hal.Runner(model, plain) as reference:
        for new, cached in STEPS:
            blocks = [[row * 4 + 1 + index for index in range(4)] for row in range(len(new))]
            count = sum(map(len, new))
            for rows, tokens in wanted(count) if model_type is Scorer else [(NONE, [])]:
                found = runner.step(runner.batch(new, blocks, cached=cached), rows)
                expected = reference.step(reference.batch(new, blocks, cached=cached), NONE)
                hidden = expected.hidden_states
                assert hidden.shape == (count, 32)
                assert list(found.extra) == ["layer_input", "sums"]
                torch.testing.assert_close(found.hidden_states, hidden)
                for name, tensor in expected.extra.items():
                    torch.testing.assert_close(found.extra[name], tensor)
                if rows is NONE:
                    with pytest.raises(BatchError, match="the step computed no logits: rows is NONE"):
                        _ = found.logits
                    continue
                ends = [end - 1 for end in torch.tensor([len(each) for each in new]).cumsum(0).tolist()]
                at = hidden[ends if tokens is None else tokens]
                torch.testing.assert_close(found.logits, at @ model.embedding.weight.t())


def counting(rows: list[int]) -> Callable[..., Tensor]:
    """Return a kernel of ``linear`` that lists the rows of the head. The CPU's graph gives it memory to write."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *form: Any, out: Tensor | None = None) -> Tensor:
        if weight.shape[0] == Scorer.vocab_size:
            rows.append(x.shape[0])
        found = torch.nn.functional.linear(x, weight, bias)
        return found if out is None else out.copy_(found)

    return linear


@thorough(MODE, r"\[inductor")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_head_runs_for_no_rows(compiler: str) -> None:
    backend, rows = opened(compiler), list[int]()
    backend.kernels = {**backend.kernels, "linear": counting(rows)}
    backend.activate()
    with hal.Runner(Scorer(), backend) as runner:
        for new, cached in (([[1, 2, 3], [4]], [0, 0]), ([[5], [6]], [3, 1])):
            runner.step(runner.batch(new, [[1], [2]], cached=cached))
            kept = runner.step(runner.batch(new, [[1], [2]], cached=cached)).logits
            with torch.inference_mode():
                kept.fill_(7)  # A replay calls no Python, and would write here.
            rows.clear()
            runner.step(runner.batch(new, [[1], [2]], cached=cached), NONE)
            assert rows == []
            assert (kept == 7).all()


def test_a_prefill_computes_the_asked_rows_only() -> None:
    for compiler in [*COMPILERS][:-1]:  # Inductor compiles decode steps.
        backend, rows = opened(compiler), list[int]()
        backend.kernels = {**backend.kernels, "linear": counting(rows)}
        backend.activate()
        with hal.Runner(Scorer(), backend) as runner:
            batch = runner.batch([[1] * 9, [2] * 7], [[1], [2]])
            runner.step(batch)
            rows.clear()
            runner.step(batch)
            runner.step(batch, torch.tensor([3]))
            assert rows == [2, 1], compiler


@pytest.mark.parametrize("rows", [LAST, ALL, torch.tensor([0])], ids=str)
def test_a_model_without_logits_refuses_rows(rows: Wanted, cpu: hal.Backend) -> None:
    with hal.Runner(Encoder(), cpu) as runner:
        batch = runner.batch([[1]], [[1]])
        with pytest.raises(ModelError, match=r"Encoder computes no logits(.*\n)*.*rows=hal.step.NONE"):
            runner.step(batch, rows)


@thorough(MODE, r"\[inductor")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_outputs_are_valid_until_the_next_step(compiler: str) -> None:
    with hal.Runner(Scorer(), opened(compiler, debug=True)) as runner:
        batch = runner.batch([[1, 2, 3], [4]], [[1], [2]])
        for _ in range(2):
            first = runner.step(batch)
            kept = [first.hidden_states.clone(), first.logits.clone(), first.extra["sums"].clone()]
            assert not any(each.isnan().any() for each in kept)
            runner.step(runner.batch([[1] * 20], [[3, 4]]))
            stale = [first.hidden_states, first.logits, first.extra["sums"]]
            assert not any(torch.equal(old, new) for old, new in zip(kept, stale, strict=True))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (torch.tensor([[0]]), r"rows is torch.int64 of \[1, 1\]"),
        (torch.tensor([0.0]), r"rows is torch.float32 of \[1\]"),
        (torch.tensor([True]), r"rows is torch.bool of \[1\]"),
        ("last", "rows is 'last'"),
        ([0], r"rows is \[0\]"),
        (None, "rows is None"),
        (torch.tensor([0, 2]), "rows has 2, out of the range 0 to 1"),
        (torch.tensor([-1]), "rows has -1, out of the range 0 to 1"),
    ],
    ids=str,
)
def test_rows_that_are_none(rows: Any, problem: str, cpu: hal.Backend) -> None:
    with hal.Runner(Scorer(), cpu) as runner, pytest.raises(BatchError, match=problem):
        runner.step(runner.batch([[1, 2]], [[1]]), rows)


class TestRowsOfEngines:
    @pytest.mark.parametrize(
        ("tokens", "logits", "expected"),
        [
            ([1, 1], [1, 1], LAST),
            ([5, 1], [1, 1], LAST),
            ([5, 2], [0, 0], NONE),
            ([5, 2], [5, 2], ALL),
            ([5, 2, 3], [0, 2, 1], [5, 6, 9]),
            ([2, 2], [1, 2], [1, 2, 3]),
        ],
    )
    def test_the_last_of_each_sequence(self, tokens: list[int], logits: list[int], expected: Rows | list[int]) -> None:
        found = last_rows(tokens, logits)
        assert (found.tolist() if isinstance(found, Tensor) else found) == expected

    @pytest.mark.parametrize(
        ("tokens", "logits", "problem"),
        [
            ([1, 2], [1], "num_tokens has 2 numbers, and num_logits 1"),
            ([1, 2], [1, 3], "3 logits are asked of the 2 new tokens of sequence 1"),
            ([1, 2], [-1, 1], "-1 logits are asked of the 1 new tokens of sequence 0"),
            ([1, 2], [1, 0.5], "num_logits is .*, not a list of integers"),
            ([1, None], [1, 1], "num_tokens is .*, not a list of integers"),
            ([1, 2], [1, True], "num_logits is .*, not a list of integers"),
        ],
    )
    def test_what_is_refused(self, tokens: Any, logits: Any, problem: str) -> None:
        with pytest.raises(BatchError, match=problem):
            last_rows(tokens, logits)


def test_passes_of_prefill_apply_to_its_uncaptured_steps(caplog: pytest.LogCaptureFixture, trained: Path) -> None:
    caplog.set_level(logging.INFO, "hal.compile")
    backend = opened("graph", prefill={"passes": {"add_rms_norm": False}})
    hal.Runner(hal.load_model(trained, backend), backend)
    reports = [each.getMessage() for each in caplog.records if each.getMessage().startswith("optimized a step")]
    applied = ["add_rms_norm: applied" in each for each in reports]
    assert applied[-1] is False  # The trace of prefill is the last one.
    assert all(applied[:-1])
    assert len(applied) > 1


@pytest.mark.parametrize("compiler", ["graph", "piecewise", "piecewise_eager"])
def test_graphs_compute_logits_of_captured_rows_only(compiler: str, tmp_path: Path) -> None:
    """No graph of pieces has a tensor as wide as the vocabulary. A whole decode step has one, for its sequences."""
    backend = opened(compiler)
    model = Scorer()
    model.vocab_size = 4099  # no other size of the model
    model.embedding = Embedding(4099, 32)
    torch.nn.init.normal_(model.embedding.weight, generator=torch.Generator().manual_seed(1))
    runner = hal.Runner(model, backend)
    dumped = {}
    for phase, form in runner.forms.items():
        assert isinstance(form, CapturedForm)
        for shape in form.shapes:
            bucket = form.bucket_for(shape)
            assert bucket is not None
            for index, graph in enumerate(bucket.graphs):
                graph.dump(tmp_path / "launches")
                dumped[phase, shape, index] = (tmp_path / "launches").read_text(encoding="utf-8")
    assert dumped
    found = {shape.tokens for (_, shape, _), lines in dumped.items() if re.search(r"\[\d+, 4099\]", lines)}
    whole = {shape.tokens for phase, shape, _ in dumped if phase == "decode"} if compiler == "graph" else set()
    assert found == whole
    output = runner.step(runner.batch([list(range(20))], [[1, 2]]))
    assert output.logits.shape == (1, 4099)
