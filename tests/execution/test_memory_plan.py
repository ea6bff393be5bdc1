"""Tests of memory plans, of runners with a given number of blocks, and of states known without a backend."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers import rank_processes
from helpers.thorough import MODE, thorough
from torch import Tensor

import hal
from hal.errors import ConfigError
from hal.nn import CausalLM, Embedding
from hal.nn.model import LayerState
from hal.step.state import key_value_states

MIB = 1 << 20


class Wasteful(CausalLM):
    """A model without attention, whose step takes 1 MiB per token, and then 8 MiB per row of logits."""

    vocab_size, max_length, states = 11, 64, (key_value_states(1, 8),)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(self.vocab_size, 8)
        torch.nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(0))
        self.seen: list[tuple[int, list[int]]] = []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Wasteful:
        return cls()

    def forward(self, batch: hal.step.Batch, states: Sequence[LayerState]) -> Tensor:
        self.seen.append((batch.num_tokens, batch.kv_lens.tolist()))
        taken = torch.ones(batch.num_tokens * MIB, dtype=torch.uint8)
        return self.embedding(batch.token_ids) + 0 * taken[:1]

    def logits(self, hidden: Tensor) -> Tensor:
        taken = torch.ones(hidden.shape[0] * 8 * MIB, dtype=torch.uint8)
        return self.embedding.as_linear(hidden) + 0 * taken[:1]


def opened(compiler: str = "eager", **config: Any) -> hal.Backend:
    compilation: dict[str, Any] = {"compiler": compiler}
    if compiler != "eager":
        compilation["capture_sizes"] = [2, 4]
    return hal.open({"backend": "cpu", "max_prefill_tokens": 40, "compilation": compilation, **config})


class Collecting(Wasteful):
    """A model whose second step frees garbage, as Python does at any time. The first step is not measured."""

    def forward(self, batch: hal.step.Batch, states: Sequence[LayerState]) -> Tensor:
        if self.seen:
            gc.collect()
        return super().forward(batch, states)


def check_plan(rank: int, kind: type[Wasteful], compiler: str, captures: float, garbage: int) -> bool:
    """Check a plan. Return False if the operating system cannot reset a process's peak.

    Args:
        rank: ignored.
        kind: the class of the model.
        compiler: the compiler.
        captures: the expected MiB of captures.
        garbage: MiB in a reference cycle.
    """
    model, backend = kind(), opened(compiler)
    if not backend.device.reset_peak():
        return False
    gc.disable()  # Python would find young garbage at once.
    before = backend.device.memory_stats().allocated
    cycle: list[Any] = [torch.ones(garbage * MIB, dtype=torch.uint8)]
    cycle.append(cycle)
    del cycle
    plan = hal.plan_memory(model, backend, max_sequences=6, share=0.5)
    assert plan.step is not None
    assert plan.captures is not None
    assert plan.held < before + 50 * MIB, str(plan)
    assert 47.5 <= plan.step / MIB <= 48 + 4, str(plan)
    assert captures - 0.5 <= plan.captures / MIB <= captures + 4, str(plan)
    assert model.seen[1] == (40, [64, 7, 7, 7, 6, 6])
    assert plan.weights == 11 * 8 * 4
    assert plan.block_bytes == backend.block_size * 2 * 8 * 4
    assert 0 <= plan.available - plan.num_blocks * plan.block_bytes < plan.block_bytes
    assert plan.available <= plan.total * 0.5 - plan.held - plan.step - plan.captures
    assert f"{plan.num_blocks:,} blocks of" in str(plan)
    return True


@thorough(MODE, r"\[Wasteful-eager")
@pytest.mark.parametrize(
    ("kind", "compiler", "captures", "garbage"),
    [(Wasteful, "eager", 0, 0), (Wasteful, "graph", (32 + 4) * 1.15, 0), (Collecting, "eager", 0, 100)],
)
def test_the_largest_step_is_measured(kind: type[Wasteful], compiler: str, captures: float, garbage: int) -> None:
    # In a new process: the C library may use memory for a step that earlier tests have freed and it has kept.
    results = rank_processes.run(check_plan, 1, kind, compiler, captures, garbage)
    if rank_processes.succeeded(results) == [False]:
        pytest.skip("the operating system cannot reset a process's peak")


def test_more_sequences_than_tokens_of_a_step() -> None:
    model = Wasteful()
    hal.plan_memory(model, opened(), max_sequences=50)
    assert model.seen[-1] == (50, [64] + [1] * 49)


def test_a_plan_that_cannot_measure_says_so(cpu: hal.Backend) -> None:
    plan = hal.plan_memory(Wasteful(), cpu, max_sequences=2, max_length=16)
    unmeasured = attrs.evolve(plan, step=None, captures=None)
    assert "largest step" in str(unmeasured)
    assert str(unmeasured).count("not measured") == 2
    assert unmeasured.available >= plan.available


def test_the_blocks_of_a_plan_are_those_of_the_runner(trained: Path) -> None:
    backend = opened("graph", dtype="float32")
    model = hal.load_model(trained, backend)
    plan = hal.plan_memory(model, backend, max_sequences=4, max_length=128)
    left = (plan.step or 0) + (plan.captures or 0) + 5 * plan.block_bytes + 17
    small = attrs.evolve(plan, share=0.5, total=1 << 50, free=2 * left)
    assert small.num_blocks == 5
    with hal.Runner(model, backend, max_sequences=4, num_blocks=small.num_blocks) as runner:
        assert runner.spec.num_blocks == 5
        assert runner.blocks.num_free == 4
        assert sum(tensor.nbytes for _, tensor in runner.states.tensors()) == 5 * plan.block_bytes
        assert len(list(hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=3)))) == 3
    assert backend.config.cache.num_tokens == hal.CacheConfig().num_tokens


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"max_sequences": 0}, "max_sequences must be at least 1"),
        ({"max_sequences": 2, "share": 0.0}, r"share is 0\.0"),
        ({"max_sequences": 2, "share": 90}, "share is 90"),
        ({"max_sequences": 2, "max_length": 65}, "sequences of 65 tokens were asked for, and Wasteful takes 1 to 64"),
    ],
)
def test_what_a_plan_refuses(cpu: hal.Backend, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        hal.plan_memory(Wasteful(), cpu, **arguments)


@pytest.mark.parametrize("wrong", [1, 0, -3, 2.5, True])
def test_numbers_of_blocks_that_a_runner_refuses(cpu: hal.Backend, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks is .*\n.*2 or more"):
        hal.Runner(Wasteful(), cpu, num_blocks=wrong)


def test_the_states_of_a_checkpoint_are_known_without_a_backend(trained: Path) -> None:
    backend = opened(dtype="float32", cache={"num_tokens": 64, "block_size": 16})
    runner = hal.Runner(hal.load_model(trained, backend), backend)
    assert hal.state_spec(trained, block_size=16, num_blocks=5, dtype=torch.float32) == runner.spec
    whole, half = (hal.state_spec(trained, block_size=16, ranks=ranks) for ranks in (1, 2))
    assert whole.dtype == torch.bfloat16
    assert half.token_bytes == whole.token_bytes // 2 > 0
    assert hal.state_spec(trained, block_size=16, num_sequences=9).num_slots == 0  # it keeps nothing per sequence
