"""Tests for models on the NPU against the CPU, and that faults are detected."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import emulated_cann
import pytest
import torch
from helpers import published_configs
from helpers.npu import compare
from helpers.npu.compare import DTYPES, Case
from helpers.thorough import DRAW, EXHAUSTIVE, FAMILY, thorough

import hal
from hal.step.fields import DUMMY_BLOCK

pytestmark = pytest.mark.usefixtures("one_thread")

Tamper = Callable[[hal.step.Batch, int], hal.step.Batch]
RUN = ("qwen3-0-float16-graph", "qwen3-1-bfloat16-graph", "qwen3-11-bfloat16-eager", "llama-1-float16-graph")
RUN += ("llama-6-bfloat16-graph", "llama-11-float16-eager")
"""They have three kinds of rope, both with and without a window, biases, tied tables and groups of heads."""
DRAWN = [
    (family, seed, DTYPES[(seed + turn) % 2]) for turn, family in enumerate(("qwen3", "llama")) for seed in range(20)
]


@thorough(DRAW, r"\[(?!qwen3-0-)")
@thorough(EXHAUSTIVE, rf"\[(?!({'|'.join(RUN)})\])")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(("family", "seed", "dtype"), DRAWN)
def test_random_configurations(family: str, seed: int, dtype: str, mode: str, tmp_path: Path) -> None:
    """Compared with the CPU; with two schedule seeds, compared with the run without one, from the captures on."""
    case = compare.random_case(family, seed, dtype, tmp_path)
    model, backend = compare.on_npu(case, mode)
    free = compare.run(compare.new_runner(model, backend), case.plan, case.rounded.texts)
    compare.compare(free, case)
    for schedule in (3, 17):
        with emulated_cann.schedule(schedule):
            runner = compare.new_runner(model, backend)
            part = compare.run(runner, case.plan.first(30), case.rounded.texts)
        compare.same_bits(part, free)


def with_lengths(batch: hal.step.Batch, lengths: torch.Tensor) -> hal.step.Batch:
    return attrs.evolve(batch, kv_lens_host=lengths, kv_lens=lengths.to(batch.kv_lens.device))


def stale_lengths(batch: hal.step.Batch, row: int) -> hal.step.Batch:
    """Return a batch with the lengths of the step before."""
    return with_lengths(batch, batch.kv_lens_host - 1)


def short_length(batch: hal.step.Batch, row: int) -> hal.step.Batch:
    lengths = batch.kv_lens_host.clone()
    lengths[row] -= 1
    return with_lengths(batch, lengths)


def long_length(batch: hal.step.Batch, row: int) -> hal.step.Batch:
    lengths = batch.kv_lens_host.clone()
    lengths[row] += 1
    return with_lengths(batch, lengths)


def permuted_lengths(batch: hal.step.Batch, row: int) -> hal.step.Batch:
    return with_lengths(batch, batch.kv_lens_host.roll(1))


def other_slot(batch: hal.step.Batch, row: int) -> hal.step.Batch:
    """Return a batch with the slot of a padding row, so that attention reads the cache's old content."""
    slots = batch.slot_mapping.clone()
    slots[row] = DUMMY_BLOCK
    return attrs.evolve(batch, slot_mapping=slots)


def others_blocks(batch: hal.step.Batch, row: int) -> hal.step.Batch:
    table = batch.block_table.clone()
    table[row] = table[row - 1]
    return attrs.evolve(batch, block_table=table)


def other_position(batch: hal.step.Batch, row: int) -> hal.step.Batch:
    positions = batch.positions.clone()
    positions[row] -= 1
    return attrs.evolve(batch, positions=positions)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Case, hal.Runner]]:
    case = compare.random_case("llama", 0, "float16", tmp_path_factory.mktemp("faulty"))
    with compare.new_runner(*compare.on_npu(case, "graph")) as runner:
        yield case, runner


BOUNDS, FINITE = "logits are", "not all logits are finite"


@pytest.mark.parametrize(
    ("fault", "fill", "noticed"),
    [
        *((each, 0.0, BOUNDS) for each in (stale_lengths, short_length, permuted_lengths)),
        *((each, 0.0, BOUNDS) for each in (other_slot, others_blocks, other_position)),
        *((each, math.nan, FINITE) for each in (long_length, other_slot)),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_fault_in_one_step_would_be_noticed(
    faulty: tuple[Case, hal.Runner], fault: Tamper, fill: float, noticed: str
) -> None:
    """In the second row of a decode step of three rows; where the cache has zeros, only by the bounds."""
    case, runner = faulty
    at = [number for number, call in enumerate(case.plan.calls) if len(call.rows) == 3 and call.phase == "decode"]

    def tamper(number: int, batch: hal.step.Batch) -> hal.step.Batch:
        return fault(batch, 1) if number == at[len(at) // 2] else batch

    runner.backend.activate()
    compare.fill_caches(runner, fill)
    ours = compare.run(runner, case.plan, case.rounded.texts, tamper)
    with pytest.raises(AssertionError, match=noticed):
        compare.compare(ours, case)


FEW = (1, 3)
SPARSE = (
    "granite-3.1-1b-a400m-instruct",
    "gpt-oss-20b-BF16",
    "ERNIE-4.5-21B-A3B-PT",
    "GLM-4.6",
    "MiniMax-M2",
    "gemma-4-26B-A4B-it",
)
DENSE = (
    "Olmo-3-7B-Instruct",
    "granite-3.3-2b-instruct",
    "Phi-4-mini-instruct",
    "gemma-2-2b-it",
    "gemma-3-4b-it",
    "gemma-4-E2B-it",
    "ERNIE-4.5-0.3B-PT",
)


# On the NPU, these have no operator that none of the others has.
@thorough(EXHAUSTIVE, r"\[(granite|gemma-3|ERNIE)")
@thorough(FAMILY, r"\[(?!gpt-oss|Phi-4)")
@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_the_logits_of_a_family(name: str, tmp_path: Path) -> None:
    """A few sequences, in batches that graphs hold and in others, against the CPU in bfloat16 and in float32."""
    draw = random.Random(name)
    vocab_size = published_configs.VOCABULARY
    prompts = compare.draw_prompts(draw, 4, vocab_size)
    plan = compare.draw_plan(draw, prompts, compare.around(FEW), vocab_size)
    case = compare.build_case(published_configs.write(tmp_path / name, name), "bfloat16", plan, FEW)
    model, backend = compare.on_npu(case, "graph")
    found = compare.run(compare.new_runner(model, backend), plan, case.rounded.texts)
    (compare.compare_routed if name in SPARSE else compare.compare)(found, case)
