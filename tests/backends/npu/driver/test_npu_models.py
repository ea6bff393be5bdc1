"""Tests for models on the NPU against the CPU, and that faults are detected."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import attrs
import pytest
import torch
from hal.backends.npu import emulator
from hal.backends.npu.soc import CAPTURE_SIZES
from helpers.npu import compare, processes
from helpers.npu.compare import BUCKETS, DTYPES, FAMILIES, MODES, Case
from helpers.thorough import DRAW, DTYPE, EXHAUSTIVE, FAMILY, MODE, thorough

import hal
from hal.step.dummies import DUMMY_BLOCK

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIGURATIONS = range(20)

Tamper = Callable[[hal.step.Batch, int], hal.step.Batch]


@pytest.fixture(scope="module", params=DTYPES)
def trained_case(request: pytest.FixtureRequest, trained: Path) -> Case:
    return compare.trained_case(trained, request.param, (2, 4, 8), 10)


@thorough(DTYPE, r"\[float16")
@thorough(FAMILY, r"\[bfloat16-eager")
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


@thorough(EXHAUSTIVE)
def test_with_the_task_queue() -> None:
    """Runs in a subprocess, because torch_npu reads the variable when it is imported."""
    cases = [f"{__file__}::test_random_configurations[qwen3-seed=0-float16-{mode}]" for mode in MODES]
    result = processes.python("-m", "pytest", "-q", "-p", "no:cacheprovider", *cases, TASK_QUEUE_ENABLE="1")
    assert result.stdout.splitlines()[-1].startswith("2 passed"), result.stdout


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


def test_the_configurations_cover_what_they_should() -> None:
    drawn = {family: [compare.draw_config(family, seed) for seed in range(20)] for family in FAMILIES}
    for family, configs in drawn.items():
        ratios = {(each["num_attention_heads"] // each["num_key_value_heads"]) for each in configs}
        assert ratios == set(range(1, 9))
        assert {each["num_key_value_heads"] for each in configs} == {1, 2}
        assert {each["num_hidden_layers"] for each in configs} == {1, 2, 3}
        assert {each["head_dim"] for each in configs} == {16, 32, 48, 64, 128}
        assert {each["tie_word_embeddings"] for each in configs} == {False, True}
        windows = {each.get("sliding_window") for each in configs}
        assert None in windows
        assert len(windows) >= 4
        windowed = {
            each["num_attention_heads"] // each["num_key_value_heads"] % 2
            for each in configs
            if each.get("sliding_window")
        }
        assert windowed == {0, 1}
        assert {each["attention_bias"] for each in configs} == {False, True}, family
    assert {True, False} == {len(set(each["layer_types"])) > 1 for each in drawn["qwen3"] if "layer_types" in each}
    assert {each["model_type"] for each in drawn["llama"]} == {"llama", "mistral"}
    assert {each["mlp_bias"] for each in drawn["llama"] if "mlp_bias" in each} == {False, True}
    for model_type in ("llama", "mistral"):
        ropes = {each["rope_parameters"]["rope_type"] for each in drawn["llama"] if each["model_type"] == model_type}
        assert ropes == {"default", "linear", "llama3", "yarn"}


@pytest.mark.parametrize("buckets", [*BUCKETS, CAPTURE_SIZES], ids=str)
def test_a_plan_covers_what_it_should(buckets: tuple[int, ...]) -> None:
    draw = random.Random(7)
    prompts = compare.draw_prompts(draw, max(12, buckets[-1] + 6), 100)
    plan = compare.draw_plan(draw, prompts, compare.around(buckets), 100)
    decoding = [call for call in plan.calls if call.phase == "decode"]
    for size in buckets:
        assert {size - 1, size, size + 1} - {0} <= plan.batch_sizes()
    assert max(plan.batch_sizes()) > buckets[-1]
    for call in plan.calls:
        owned = [block for blocks in call.blocks for block in blocks]
        assert len(set(owned)) == len(owned), "no block has two owners"
        assert DUMMY_BLOCK not in owned
    assert sum(map(len, (call.rows for call in decoding))) == len(prompts) * compare.NEW_TOKENS
    crossing = [stop for call in decoding for stop in call.stops if stop % compare.BLOCK == 1 and stop > 1]
    assert len(crossing) > len(prompts) // 3, "sequences cross into another block while they decode"
    assert any(start for call in plan.calls if call.phase == "prefill" for start in call.starts), "in two parts"
    changes = [(set(before.rows), set(after.rows), before.rows, after.rows) for before, after in pairwise(decoding)]
    assert any(a < b for a, b, _, _ in changes), "joining"
    assert any(a > b for a, b, _, _ in changes), "leaving"
    assert any(a == b and c != d for a, b, c, d in changes) or len(buckets) > 4, "permuted"
    first = {row: blocks for call in reversed(plan.calls) for row, blocks in zip(call.rows, call.blocks, strict=True)}
    starts = [blocks[0] for blocks in first.values()]
    assert len(set(starts)) < len(starts), "blocks have a second owner"
