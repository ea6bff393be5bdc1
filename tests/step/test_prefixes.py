"""Tests that prompts with a common prefix share its blocks, and that texts do not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

import hal
from hal.errors import DeviceError, NumericsError
from hal.step.block_allocator import BlockAllocator, PrefixCache

SIZE = 16


def open_runner(trained: Path, *, reuse: bool, num_tokens: int = 1024) -> hal.Runner:
    cache = {"num_tokens": num_tokens, "block_size": SIZE, "reuse_prefixes": reuse}
    backend = hal.open({"backend": "cpu", "dtype": "float32", "cache": cache})
    return hal.Runner(hal.load_model(trained, backend), backend)


def texts(runner: hal.Runner, prompts: list[list[int]], new: int = 12) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in prompts]
    for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=new)):
        made[token.prompt_index].append(token.token_id)
    return made


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of tokens of each step with several tokens of a sequence."""
    counts: list[int] = []
    step = hal.Runner.step

    def counted(runner: hal.Runner, batch: hal.step.Batch) -> hal.StepOutput:
        if batch.num_tokens > batch.num_sequences:
            counts.append(batch.num_tokens)
        return step(runner, batch)

    monkeypatch.setattr(hal.Runner, "step", counted)
    return counts


def test_a_shared_beginning_runs_once(trained: Path, prefilled: list[int]) -> None:
    common = list(range(100, 140))  # two full blocks and half of one
    prompts = [[*common, 7, 8], [*common, 9], common, common[:32], common[:31]]
    plain, reusing = open_runner(trained, reuse=False), open_runner(trained, reuse=True)
    expected = []
    for prompt in prompts:
        plain.backend.activate()
        expected += texts(plain, [prompt])
    prefilled.clear()
    reusing.backend.activate()
    assert [texts(reusing, [prompt])[0] for prompt in prompts] == expected
    # Of [0:32] only the first block is reused, because its last token must run.
    assert prefilled == [42, 41 - 32, 40 - 32, 32 - 16, 31 - 16]
    prefilled.clear()
    assert texts(reusing, prompts) == expected
    assert prefilled == [10 + 9 + 8 + 16 + 15], "also all at once"


def test_an_answer_is_found_by_the_next_question(trained: Path, prefilled: list[int]) -> None:
    runner, plain = open_runner(trained, reuse=True), open_runner(trained, reuse=False)
    runner.backend.activate()
    first = list(range(50, 70))
    (answer,) = texts(runner, [first], new=30)
    second = [*first, *answer, 5, 6]
    prefilled.clear()
    found = texts(runner, [second])
    assert prefilled == [len(second) - (len(first) + len(answer) - 1) // SIZE * SIZE]
    plain.backend.activate()
    assert found == texts(plain, [second])


def test_room_is_made_for_new_prompts(trained: Path) -> None:
    """A cache of 8 blocks, and prompts that together need many times that."""
    runner, plain = open_runner(trained, reuse=True, num_tokens=128), open_runner(trained, reuse=False)
    prompts = [[100 + index % 3, *range(200 + index, 240 + index)] for index in range(12)]
    runner.backend.activate()
    found = texts(runner, prompts * 2)
    plain.backend.activate()
    assert found == texts(plain, prompts) * 2


def test_a_caller_that_stops_early_gives_its_blocks_back(trained: Path) -> None:
    runner = open_runner(trained, reuse=True, num_tokens=128)
    for _ in range(5):
        started = hal.generate(runner, [list(range(60))] * 1, hal.SamplingParams(max_new_tokens=60))
        next(started)
        started.close()
    assert runner.prefixes is not None
    assert len(runner.prefixes.take(8) or []) == 8


class Sharing(RuleBasedStateMachine):
    """Takes, registers and frees blocks in any order: a reused block has the requested content."""

    owned = Bundle("owned")
    blocks = 6

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(self.blocks + 1)
        self.cache = PrefixCache(self.allocator, 2)
        self.holds: dict[int, tuple[int, ...]] = {}
        self.owners: Counter[int] = Counter()

    @rule(target=owned, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), extra=st.integers(0, 2))
    def start(self, tokens: list[int], extra: int) -> list[int]:
        shared = self.cache.reuse(tokens[:-1])
        for index, block in enumerate(shared):
            assert self.holds[block] == tuple(tokens[: 2 * index + 2])
        self.owners.update(shared)
        taken = self.cache.take(-(-len(tokens) // 2) + extra - len(shared))
        if taken is None:
            assert self.blocks - len(+self.owners) < -(-len(tokens) // 2) + extra - len(shared), (
                "a free block must be available"
            )
            self.cache.give_back(shared)
            self.owners.subtract(shared)
            return []
        assert not any(self.owners[block] for block in taken), "a block in use was reallocated"
        self.owners.update(taken)
        blocks = shared + taken
        for index, block in enumerate(blocks):
            if block in taken:
                self.holds[block] = tuple(tokens[: 2 * index + 2])
        self.cache.remember(blocks, tokens)
        return blocks

    @rule(blocks=consumes(owned))
    def stop(self, blocks: list[int]) -> None:
        self.cache.give_back(blocks)
        self.owners.subtract(blocks)

    @invariant()
    def nobody_reads_a_free_block(self) -> None:
        assert not set(self.allocator._free) & set(+self.owners)

    @precondition(lambda self: not +self.owners)
    @rule()
    def everything_can_be_had_again(self) -> None:
        taken = self.cache.take(self.blocks)
        assert sorted(taken or []) == list(range(1, self.blocks + 1))
        self.cache.give_back(taken or [])


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("taken", range(6))
def test_a_beginning_outlives_its_end(taken: int) -> None:
    """A chain is evicted from its end, so its remaining beginning can still be found."""
    cache = PrefixCache(BlockAllocator(7), 2)
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4]):
        shared = cache.reuse(tokens)
        blocks = shared + (cache.take(len(tokens) // 2 - len(shared)) or [])
        cache.remember(blocks, tokens)
        cache.give_back(blocks)
    assert len(cache.take(taken) or []) == taken
    assert len(cache.reuse(list(range(1, 11)))) == min(5, 6 - taken)


def test_giving_back_twice_is_refused() -> None:
    cache = PrefixCache(BlockAllocator(4), 2)
    blocks = cache.take(2) or []
    cache.give_back(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        cache.give_back(blocks)


@pytest.mark.parametrize("blocks", [[1, 1], [0], [2], [99]], ids=str)
def test_what_is_not_ones_own_is_refused_whole(blocks: list[int]) -> None:
    cache = PrefixCache(BlockAllocator(4), 2)
    assert cache.take(1) == [1]
    with pytest.raises(ValueError, match="or never allocated"):
        cache.give_back(blocks)
    cache.give_back([1])
    assert sorted(cache.take(3) or []) == [1, 2, 3]


class Failing(hal.Backend):
    """A backend whose first step with tokens for the cache fails: with NaN, or with an error when the host waits."""

    def __init__(self, kernels: Mapping[str, Any], *, late: bool) -> None:
        self.late, self.failed, self.waits = late, False, False
        self.sound = dict(kernels)
        failing = {name: getattr(self, name) for name in ("store_kv_cache", "linear", "greedy_sample")}
        super().__init__("failing", hal.vendor.HostDevice(), kernels=self.sound | failing)

    def store_kv_cache(self, *arguments: Any) -> None:
        if self.failed or not self.late:
            self.sound["store_kv_cache"](*arguments)
        else:
            self.waits = True  # Nothing is written, and the step continues.

    def linear(self, *arguments: Any) -> Any:
        found = self.sound["linear"](*arguments)
        return found if self.failed or self.late else found * float("nan")

    def greedy_sample(self, logits: Any) -> Any:
        if self.waits:
            self.waits, self.failed = False, True
            raise RuntimeError("the device lost a launch")
        return self.sound["greedy_sample"](logits)

    def explain(self, error: BaseException) -> hal.HalError | None:
        return DeviceError(str(error), "run the step again") if "lost a launch" in str(error) else None


@pytest.mark.parametrize(("late", "error"), [(True, DeviceError), (False, NumericsError)])
def test_a_step_that_failed_leaves_nothing_to_share(trained: Path, late: bool, error: type[hal.HalError]) -> None:
    prompt = list(range(5, 60))
    expected = texts(open_runner(trained, reuse=False), [prompt])
    kernels = hal.open({"backend": "cpu", "options": {"pack_weights": False}}).kernels
    backend = Failing(kernels, late=late)
    cache = hal.CacheConfig(num_tokens=1024, block_size=SIZE, reuse_prefixes=True)
    backend.configure(hal.Config(backend="failing", dtype="float32", cache=cache))
    backend.activate()
    runner = hal.Runner(hal.load_model(trained, backend), backend)
    with pytest.raises(error):
        texts(runner, [prompt])
    backend.failed = True
    assert texts(runner, [prompt]) == expected
    hal.open("cpu")
