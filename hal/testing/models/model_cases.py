"""Cases of models: every family in every compile mode of the backend."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import torch

from hal.checkpoint.loading import load_model
from hal.drivers.compiler_registry import EAGER
from hal.execution.runner import Runner
from hal.generation.generate import generate
from hal.generation.sampling_params import SamplingParams
from hal.ops.rounding import check_choice, check_logits
from hal.testing.case import Case, require
from hal.testing.models.logit_agreement import reference_logits
from hal.testing.models.plans import Plan, run_plan
from hal.testing.models.random_checkpoint import FAMILIES, HEAD_DIM, checkpoint
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


def cases(target: Target) -> Iterator[Case]:
    """Yield ``models/<family>/<compiler>/<dtype>``."""
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
