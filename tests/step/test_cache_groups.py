"""Tests of models whose layers are in several cache groups that share memory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toys
from helpers.published_configs import CONFIGS
from helpers.thorough import MODE, thorough

import hal
from hal.errors import BatchError, ModelError
from hal.step import (
    SEQUENCE,
    TOKEN,
    CacheGroups,
    PageLayout,
    SlotBatch,
    State,
    StateSpec,
    grouped_batch,
)

CONFIG: dict[str, Any] = {
    **CONFIGS["Qwen3-Next-80B-A3B-Instruct"],
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "torch_dtype": "float32",
}
GROUPS = ((2,), (0,), (1,), (5,), (3,), (4,))
"""Each layer is alone in its group, so that all share memory."""
PER_TOKEN = (True, False, False, True, False, False)
PAGES, BLOCK = 60, 16


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.write(tmp_path_factory.mktemp("groups") / "model", CONFIG)


def opened(folder: Path, compiler: str, *, grouped: bool) -> tuple[hal.Runner, CacheGroups]:
    compilation: dict[str, Any] = {"compiler": compiler}
    if compiler != "eager":
        compilation["capture_sizes"] = [2]
    cache = {"num_tokens": 512, "block_size": BLOCK, "num_sequences": 3}
    backend = hal.open({"backend": "cpu", "dtype": "float32", "cache": cache, "compilation": compilation})
    model = hal.load_model(folder, backend)
    layout = PageLayout.of(StateSpec(tuple(model.states), torch.float32, num_blocks=1, block_size=BLOCK))
    groups = CacheGroups(GROUPS, PER_TOKEN, layout, PAGES)
    if grouped:
        model.batch_type = grouped_batch(SlotBatch, groups, len(model.states))
    return hal.Runner(model, backend, max_sequences=4, max_length=96), groups


class Engine:
    """Gives each sequence pages of its own in each group, those that others had."""

    def __init__(self, runner: hal.Runner, groups: CacheGroups) -> None:
        self.runner, self.layout = runner, groups.layout
        self.inputs = runner.input_batch(4)
        self.free = list(range(1, PAGES))
        random.Random(3).shuffle(self.free)
        self.pages: dict[int, list[int]] = {}
        self.rows: list[int] = []
        self.poison(self.free)

    def poison(self, pages: Sequence[int]) -> None:
        with torch.inference_mode():
            for tensor in self.runner.states.pages:
                tensor[list(pages)] = -1 if tensor.dtype == torch.int32 else math.nan  # -1 is a NaN

    def begin(self, name: int, tokens: Sequence[int]) -> None:
        needed = -(-len(tokens) // (BLOCK * self.layout.blocks))
        taken = [[self.free.pop() for _ in range(needed if per_token else 1)] for per_token in PER_TOKEN]
        self.pages[name] = [page for each in taken for page in each]
        self.runner.states.zero_pages(self.pages[name])
        tables = [[block for page in pages for block in self.layout.block_ids(page)] for pages in taken]
        first, second = (each for each, per_token in zip(tables, PER_TOKEN, strict=True) if per_token)
        row = self.inputs.add(tokens, first, slot=1)
        self.inputs.extend(row, (), second, group=1)
        states = [pages[0] for pages, per_token in zip(taken, PER_TOKEN, strict=True) if not per_token]
        self.inputs.set_slots(row, [self.layout.slot(page) for page in states])
        self.rows.append(name)

    def end(self, name: int) -> None:
        row = self.rows.index(name)
        self.inputs.remove(row)
        self.rows[row] = self.rows[-1]
        self.rows.pop()
        self.poison(self.pages[name])
        self.free = [*self.pages.pop(name), *self.free]

    def step(self, counts: Sequence[tuple[int, int]]) -> torch.Tensor:
        rows, new = [self.rows.index(name) for name, _ in counts], [count for _, count in counts]
        logits = self.runner.step(self.inputs.batch(new, rows=rows)).logits
        self.inputs.advance(new, rows=rows)
        return logits


@thorough(MODE, r"\[piecewise")
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
def test_layers_that_share_memory_compute_as_those_that_do_not(hybrid: Path, compiler: str) -> None:
    schedule = toys.Schedule.drawn(11, CONFIG["vocab_size"], count=8)
    expected = toys.alone(opened(hybrid, "eager", grouped=False)[0], schedule, "")
    runner, groups = opened(hybrid, compiler, grouped=True)
    engine = Engine(runner, groups)
    assert len({each.data_ptr() for layer in runner.states.layers for each in layer.values()}) == 3
    done = dict.fromkeys(range(len(schedule.texts)), 0)
    for counts in schedule.steps:
        for name, _ in counts:
            if not done[name]:
                engine.begin(name, schedule.texts[name])
        for (name, count), logits in zip(counts, engine.step(counts), strict=True):
            done[name] += count
            wanted = expected[name][done[name] - 1]
            assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max(), (compiler, name)
            if done[name] == len(schedule.texts[name]):
                engine.end(name)
    assert len(engine.free) == PAGES - 1


def test_copied_pages_continue_a_sequence(hybrid: Path) -> None:
    runner, groups = opened(hybrid, "eager", grouped=True)
    engine = Engine(runner, groups)
    tokens = list(range(1, 30))
    engine.begin(0, tokens)
    engine.begin(1, tokens)
    engine.step([(0, 28)])
    runner.states.copy_pages(engine.pages[0], engine.pages[1])
    engine.inputs.set_cached(1, 28)
    first, second = engine.step([(0, 1), (1, 1)])
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)  # Experts round by their place in a step.


KEY_VALUE = {"key": State(TOKEN, (2, 16)), "value": State(TOKEN, (2, 16))}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"row": State(TOKEN, (8,))}], "cannot share memory with other layers"),
        ([{"key": State(TOKEN, (2, 16)), "value": State(TOKEN, (2, 8))}], "cannot share memory"),
        ([{name: State(TOKEN, (2, 16), group=4) for name in ("key", "value")}], "cannot share memory"),
        ([{"key": State(TOKEN, (2, 16)), "matrix": State(SEQUENCE, (2, 16))}], "cannot share memory"),
        ([{"matrix": State(SEQUENCE, (2,))}, {"matrix": State(SEQUENCE, (3,))}], "must keep equal ones"),
        ([KEY_VALUE, {name: State(TOKEN, (4, 16)) for name in KEY_VALUE}], "must keep equal ones"),
    ],
)
def test_what_cannot_share_memory_is_refused(layers: list[dict[str, State]], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        PageLayout.of(StateSpec(tuple(layers), torch.float32, num_blocks=1, block_size=BLOCK))


def test_a_page_holds_states_of_any_size() -> None:
    block = 2 * 16 * 16 * 4
    for entries in (16, 100, 2 * block // 4, 3 * block // 4):
        states = {"matrix": State(SEQUENCE, (entries,)), "window": State(SEQUENCE, (6,))}
        layout = PageLayout.of(StateSpec((KEY_VALUE, states), torch.float32, num_blocks=1, block_size=BLOCK))
        shared = math.lcm(2 * block, entries * 4)
        assert layout == PageLayout(shared // (2 * block), shared // (entries * 4), shared + shared // entries * 6)
        assert [*layout.block_ids(2)] == [*range(4 * layout.blocks, 5 * layout.blocks)]


def test_slots_of_other_groups_are_refused(hybrid: Path) -> None:
    runner, _groups = opened(hybrid, "eager", grouped=True)
    inputs = runner.input_batch(1)
    inputs.add([1], [1], slot=1)
    with pytest.raises(BatchError, match="row 0 gets 1 slots, not 4"):
        inputs.set_slots(0, [1])
