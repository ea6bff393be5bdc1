"""Tests for models on the NPU against the CPU, and that faults are detected."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from hal.backends.npu import emulator
from helpers import published_configs
from helpers.npu import compare
from helpers.npu.compare import DTYPES, FAMILIES, MODES, Case
from helpers.thorough import AGAIN, DRAW, DTYPE, EXHAUSTIVE, FAMILY, MODE, thorough

import hal
from hal.step.fields import DUMMY_BLOCK

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIGURATIONS = range(20)

Tamper = Callable[[hal.step.Batch, int], hal.step.Batch]


@pytest.fixture(scope="module", params=DTYPES)
def trained_case(request: pytest.FixtureRequest, trained: Path) -> Case:
    return compare.trained_case(trained, request.param, (2, 4, 8), 10)


@thorough(AGAIN)
@pytest.mark.parametrize("mode", MODES)
def test_trained_checkpoint(trained_case: Case, mode: str) -> None:
    model, backend = compare.on_npu(trained_case, mode)
    runner = compare.new_runner(model, backend)
    found = compare.run(runner, trained_case.plan, trained_case.rounded.texts)
    tokens = sum(len(prompt) + compare.NEW_TOKENS for prompt in trained_case.plan.prompts)
    assert compare.compare(found, trained_case).tokens == tokens
    compare.same_text(runner, trained_case)


@pytest.fixture(
    scope="module",
    params=[  # alternates between the dtypes
        (family, seed, DTYPES[(seed + turn) % 2]) for turn, family in enumerate(FAMILIES) for seed in CONFIGURATIONS
    ],
    ids=lambda drawn: "{}-seed={}-{}".format(*drawn),
)
def drawn_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return compare.random_case(*request.param, tmp_path_factory.mktemp("drawn"))


@thorough(DRAW, r"\[\w+-seed=(6|11)-|\[\w+-seed=1-")
@thorough(FAMILY, r"\[llama")
@thorough(EXHAUSTIVE, r"\[(llama-seed=(0|6)|qwen3-seed=(1|11))-\w+-eager|seed=(?!(0|1|6|11)-)")
@pytest.mark.parametrize("mode", MODES)
def test_random_configurations(drawn_case: Case, mode: str) -> None:
    """Compared with the CPU; with two schedule seeds, compared with the run without one, from the captures on."""
    model, backend = compare.on_npu(drawn_case, mode)
    free = compare.run(compare.new_runner(model, backend), drawn_case.plan, drawn_case.rounded.texts)
    compare.compare(free, drawn_case)
    for seed in (3, 17):
        with emulator.schedule(seed):
            runner = compare.new_runner(model, backend)
            part = compare.run(runner, drawn_case.plan.first(30), drawn_case.rounded.texts)
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


@pytest.fixture(scope="module", params=DTYPES)
def faulty_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return compare.random_case("llama", 0, request.param, tmp_path_factory.mktemp("faulty"))


def run_with(fault: Tamper, case: Case, mode: str, fill: float) -> compare.Run:
    """Run the plan with a fault in the second row of one decode step of three rows."""
    calls = case.plan.calls
    at = [number for number, call in enumerate(calls) if len(call.rows) == 3 and call.phase == "decode"][10]

    def tamper(number: int, batch: hal.step.Batch) -> hal.step.Batch:
        return fault(batch, 1) if number == at else batch

    model, backend = compare.on_npu(case, mode)
    return compare.run(compare.new_runner(model, backend, fill), case.plan, case.rounded.texts, tamper)


@thorough(DTYPE, r"\[bfloat16")
@thorough(MODE, r"\[.*-eager")
@thorough(EXHAUSTIVE, r"\[(float16-\w+-eager|bfloat16-\w+-graph)")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "fault",
    [stale_lengths, short_length, permuted_lengths, other_slot, others_blocks, other_position],
    ids=lambda fault: fault.__name__,
)
def test_one_fault_in_one_step_would_be_noticed(faulty_case: Case, mode: str, fault: Tamper) -> None:
    """The cache has zeros instead of NaN, so only the bounds detect the fault."""
    ours = run_with(fault, faulty_case, mode, 0.0)
    with pytest.raises(AssertionError, match="logits are"):
        compare.compare(ours, faulty_case)


@thorough(DTYPE, r"\[bfloat16")
@thorough(EXHAUSTIVE, r"\[(float16-\w+-eager|bfloat16-\w+-graph)")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", [long_length, other_slot], ids=lambda fault: fault.__name__)
def test_a_slot_that_was_not_written_would_be_noticed(faulty_case: Case, mode: str, fault: Tamper) -> None:
    ours = run_with(fault, faulty_case, mode, math.nan)
    with pytest.raises(AssertionError, match="not all logits are finite"):
        compare.compare(ours, faulty_case)


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
