"""Cases of models in every compile mode of the backend: every family; padding, buckets and block boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import torch

from hal.checkpoint.loading import load_model
from hal.drivers.compiler import EAGER
from hal.execution.runner import Runner
from hal.generation.generate import generate
from hal.generation.sampling_params import SamplingParams
from hal.ops.rounding import check_choice, check_logits
from hal.testing.case import Case, require
from hal.testing.random_checkpoint import FAMILIES, HEAD_DIM, checkpoint
from hal.testing.step_plans import Plan, reference_logits, run_plan
from hal.testing.target import Target, dtype_name

BUCKETS = (1, 2, 4)
"""Captured batch sizes of decode steps."""
PREFILL_TOKENS = 100
"""Maximum of a step; longer prompts are split."""
NEW_TOKENS = 12
DECODES = ((0, 1, 2, 3), (3, 1), (2, 0, 3), (1,), (0, 1, 2, 3, 4), (4, 2), (4, 3, 0))
"""Sequences of each decode step: batch sizes below, at and above the buckets, in changing order."""
SLOW = ("inductor",)
"""Compilers that take seconds per model; they are tested with one dtype."""
MakePlan = Callable[[int], Plan]
"""Creates a plan for a block size."""
QUERIES = (2, 4, 8)
"""Query lengths per sequence; compilers that take seconds per model are tested with the first."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``runners/...`` and ``models/<family>/<compiler>/<dtype>``."""
    yield from runner_cases(target)
    for family in FAMILIES:
        for mode in target.backend.compilers:
            dtypes = target.backend.limits.dtypes
            for dtype in dtypes[:1] if mode in SLOW else dtypes:
                yield Case(f"models/{family}/{mode}/{dtype_name(dtype)}", partial(_model, target, family, dtype, mode))


def _model(target: Target, family: str, dtype: torch.dtype, mode: str) -> None:
    run = ModelRun(target, family, dtype, mode)
    run.check_plan(run.plan)
    run.check_generate()
    if family != "qwen3" or dtype != target.backend.limits.dtypes[0]:
        run.close()  # the other runners are shared with runner_cases


def head_dim_of(target: Target) -> int:
    """Return the models' head dimension: the preferred one, or the nearest one that the backend supports."""
    known = target.backend.limits.head_dims
    return min(known, key=lambda each: abs(each - HEAD_DIM)) if known else HEAD_DIM


@attrs.frozen
class ModelRun:
    """A model family on the backend, in one dtype and compile mode.

    Attributes:
        queries: new tokens per sequence for which whole steps are captured.
    """

    target: Target
    family: str
    dtype: torch.dtype
    mode: str
    queries: tuple[int, ...] = (1,)

    @property
    def block_size(self) -> int:
        """Return the block size of the cache, the backend's preferred one."""
        return self.target.backend.block_size

    @property
    def any_shape(self) -> bool:
        """Return whether steps of any shape are captured, including mixed steps of prompts and running sequences."""
        return self.mode != EAGER and self.target.backend.compiler(self.mode).any_shape

    @property
    def plan(self) -> Plan:
        """Return the plan of the model cases, with prompts of varied lengths, one of them longer than a block."""
        size = self.block_size
        return Plan((5, 1, size - 1, size + 1, 17), DECODES, seed=1)

    def config(self) -> dict[str, Any]:
        """Return the configuration with which the backend is opened."""
        compilation: dict[str, Any] = {"compiler": self.mode, "capture_sizes": list(BUCKETS)}
        if self.any_shape:
            compilation["prefill"] = {"capture_sizes": [16, PREFILL_TOKENS]}
        if self.queries != (1,):
            compilation["queries"] = list(self.queries)
        return {
            "dtype": dtype_name(self.dtype),
            "max_prefill_tokens": PREFILL_TOKENS,
            "compilation": compilation,
            "cache": {"num_tokens": 16 * self.block_size, "block_size": self.block_size},
        }

    def shared_runner(self) -> Runner:
        """Return the cached runner, created at the first call, and activate its backend."""
        runner: Runner = self.target.cached(self._key, self.new_runner)
        runner.backend.activate()
        return runner

    @property
    def _key(self) -> tuple[str, ...]:
        return ("runner", self.family, dtype_name(self.dtype), self.mode, *map(str, self.queries))

    def new_runner(self) -> Runner:
        """Create a runner on a new, active backend."""
        backend = self.target.open(**self.config())
        return Runner(load_model(checkpoint(self.family, head_dim_of(self.target)), backend), backend)

    def close(self) -> None:
        """Drop the cached runner."""
        self.target.drop(self._key)

    def check_plan(self, plan: Plan) -> None:
        """Run a plan and compare all logits with the reference's.

        Raises:
            AssertionError: a difference exceeds rounding, or a step wrote a slot that holds none of its tokens.
        """
        runner = self.shared_runner()
        found = run_plan(runner, plan)
        check_logits(
            found,
            reference_logits(self.family, head_dim_of(self.target), self.dtype, plan.texts(runner.model.vocab_size)),
        )

    def check_generate(self) -> None:
        """Generate from prompts; each token must have the highest logit, up to ties."""
        runner = self.shared_runner()
        prompts = [list(text) for text in Plan((7, 1, 30, 4, 11), ()).texts(runner.model.vocab_size)]
        texts = [list(prompt) for prompt in prompts]
        for token in generate(runner, prompts, SamplingParams(max_new_tokens=NEW_TOKENS)):
            texts[token.prompt_index].append(token.token_id)
        known = reference_logits(self.family, head_dim_of(self.target), self.dtype, tuple(map(tuple, texts)))
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            count = len(text) - len(prompt)
            require(count == NEW_TOKENS, f"prompt {row}: generate() returned {count} tokens, not {NEW_TOKENS}")
            for at in range(len(prompt), len(text)):
                check_choice(f"generate, prompt {row}, token {at}", text[at], known, row, at - 1)


PLANS: dict[str, MakePlan] = {
    # Three sequences in a bucket of four, and one in a bucket of one.
    "padding": lambda size: Plan((3, 9, 4, 20, 6), ((0, 1, 2), (4,), (2, 1, 0), (3,), (1, 2, 4)), seed=2),
    # Every batch size from one to above the largest bucket, and back.
    "buckets": lambda size: Plan(
        (4, 2, 7, 1, 12, 5), tuple(tuple(range(count)) for count in (1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1)), seed=3
    ),
    # Prompts that end before, at and after the end of a block, and decode steps that cross it.
    "block-edges": lambda size: Plan((size - 2, size - 1, size, size + 1), ((0, 1, 2, 3),) * 4, seed=4),
    # Prompts that end at the end of a second block.
    "second-block": lambda size: Plan((2 * size - 1, 2 * size), ((0, 1), (1, 0), (0,)), seed=5),
    # Sequences change rows or are absent.
    "order": lambda size: Plan((2, 30, 8, 15), ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3), (2, 0, 1), (0, 3, 2, 1)), seed=6),
}


def _mixed() -> Plan:
    """Return steps with prompts before, among and after running sequences."""
    steps = ((0, 1), (2, 0, 1), (1, 3, 0), (2,), (4, 0, 3, 2, 5), (5, 0))
    return Plan((3, 9, 11, 20, 1, 6), steps, seed=7, first=(0, 1))


def _queries(count: int, size: int) -> Plan:
    """Return steps of several queries per sequence, as in speculative decoding, below, at and above the buckets."""
    steps = ((0, 1, 2), (3,), (2, 1, 0, 4), (4, 3), (0, 1, 2, 3, 4))
    return Plan((3, size - 1, 4, 20, 6), steps, seed=8, queries=count)


def _shared_queries(count: int, size: int) -> Plan:
    """Return such steps for sequences that share blocks and whose total length exceeds the cache."""
    lengths = (5 * size + 3, 5 * size + 1, 6 * size, 5 * size + 9)
    return Plan(lengths, ((0, 1, 2, 3), (2, 0, 1), (3,), (1, 3)), seed=9, queries=count, shared=5 * size)


def runner_cases(target: Target) -> Iterator[Case]:
    """Yield ``runners/<compiler>/<plan>``."""
    dtype = target.backend.limits.dtypes[0]
    for mode in target.backend.compilers:
        run = ModelRun(target, "qwen3", dtype, mode)
        for name, make_plan in PLANS.items():
            yield Case(f"runners/{mode}/{name}", partial(_check, run, make_plan))
        yield Case(f"runners/{mode}/mixed", partial(_check_mixed, run))
        counts = QUERIES[:1] if mode in SLOW else QUERIES
        several = attrs.evolve(run, queries=counts) if _captures_queries(run) else run
        for count in counts:
            for name, of_count in (("queries", _queries), ("shared-queries", _shared_queries)):
                yield Case(f"runners/{mode}/{name}-{count}", partial(_check, several, partial(of_count, count)))


def _captures_queries(run: ModelRun) -> bool:
    """Return whether the compiler captures steps of several queries per sequence."""
    return run.mode != EAGER and "queries" in run.target.backend.compiler(run.mode).reads


def _check(run: ModelRun, make_plan: MakePlan) -> None:
    run.check_plan(make_plan(run.block_size))


def _check_mixed(run: ModelRun) -> None:
    """Check mixed steps; if the compiler captures steps of any shape, no step may run the model's Python code."""
    calls: list[object] = []
    watched = run.shared_runner().model.register_forward_pre_hook(lambda module, given: calls.append(module))
    try:
        run.check_plan(_mixed())
    finally:
        watched.remove()
    require(not (run.any_shape and calls), f"{len(calls)} steps ran the model's Python code, not a captured graph")
