"""Tests of ``on_capture_error: eager`` with ranks that step together: they leave the same sizes to eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hal.backends.cpu.driver import CpuBackend, CpuOptions
from hal.backends.cpu.tape import Tape
from helpers.rank_processes import run, succeeded
from helpers.thorough import EXHAUSTIVE, MODE, PROCESSES, thorough
from torch import distributed

import hal
from hal.errors import CaptureError

PROMPTS = ([5, 6, 7], [8, 9], [40, 41, 42, 43], [11], [12, 13])
"""Rank 0 of two data ranks runs three of them, for which the size 4 would do."""


class _FailingTape(Tape):
    """A capture that fails at its end, when no other rank waits in a collective of it."""

    def capture(self, fn: Any, **options: Any) -> Any:
        super().capture(fn, **options)
        raise CaptureError("no memory is left", "free some")


class _Short(CpuBackend):
    """A CPU that lacks memory for its second graph, or streams for any."""

    def __init__(self, lacks: str) -> None:
        super().__init__(CpuOptions(pack_weights=False))
        self.made, self.lacks = 0, lacks
        if lacks == "streams":
            self.limits = attrs.evolve(self.limits, max_streams=1)

    def graph(self) -> hal.vendor.Graph:
        self.made += 1
        return _FailingTape(self._whole) if self.lacks == "memory" and self.made == 2 else super().graph()


def _generate(rank: int, checkpoint: str, lacks: str, parallel: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each prompt, and the captured sizes."""
    torch.set_num_threads(1)
    with _Short(lacks if rank == 1 else "") as backend:
        # The model's Python code is captured, which takes less time than tracing it.
        compilation = {
            "compiler": "graph",
            "capture_sizes": [2, 4, 8],
            "on_capture_error": "eager",
            "torch_compile_max_bs": 1,
        }
        config = {"backend": "cpu", "dtype": "float32", "compilation": compilation, "parallel": parallel}
        backend.configure(hal.config.load(config))
        backend.activate()
        assert not parallel or distributed.get_rank() == rank
        with hal.Runner(hal.load_model(checkpoint, backend), backend) as runner:
            form: Any = runner.forms["decode"]
            texts: list[list[int]] = [[] for _ in PROMPTS]
            for token in hal.generate(runner, PROMPTS, hal.SamplingParams(max_new_tokens=6)):
                texts[token.prompt_index].append(token.token_id)
            return texts, [shape.tokens for shape in form.shapes]


@thorough(EXHAUSTIVE, r"\[(streams-parallel1|memory-parallel2)")
@thorough(MODE, r"\[(?!memory-parallel0)")
@pytest.mark.parametrize(
    ("lacks", "parallel", "sizes"),
    [
        ("memory", {"data": 2, "experts": "all_gather"}, [2, 8]),
        ("streams", {"data": 2, "experts": "all_to_all"}, []),
        ("memory", {"tensor": 2}, [2, 8]),
        ("streams", {"tensor": 2}, []),
    ],
)
def test_all_ranks_leave_out_what_one_cannot_capture(
    trained_experts: Path, lacks: str, parallel: dict[str, Any], sizes: list[int]
) -> None:
    alone, captured = _generate(0, str(trained_experts), "", {})
    assert captured == [2, 4, 8]
    found = succeeded(run(_generate, 2, str(trained_experts), lacks, parallel))
    assert found == [(alone, sizes)] * 2


@thorough(PROCESSES)
def test_copies_that_step_alone_need_not_agree(trained: Path) -> None:
    alone, _ = _generate(0, str(trained), "", {})
    found = succeeded(run(_generate, 2, str(trained), "memory", {"data": 2}))
    assert found == [(alone, [2, 4, 8]), (alone, [2, 8])]
