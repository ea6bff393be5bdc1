"""Whole models: every family in every mode that the backend offers."""

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
from hal.generation.sampling import SamplingParams
from hal.ops.rounding import check_choice, check_logits
from hal.testing.case import Case, require
from hal.testing.models.plans import Plan, run_plan
from hal.testing.models.random_checkpoint import FAMILIES, HEAD_DIM, checkpoint
from hal.testing.models.same_tokens import truth
from hal.testing.target import Target, dtype_name

BUCKETS = (1, 2, 4)
"""Decode batch sizes that are captured."""
PREFILL_TOKENS = 100
"""Of a step: longer prompts go in several."""
NEW_TOKENS = 12
DECODES = ((0, 1, 2, 3), (3, 1), (2, 0, 3), (1,), (0, 1, 2, 3, 4), (4, 2), (4, 3, 0))
"""Below, at and above the buckets, in changing order."""
SLOW = ("inductor",)
"""Compilers that take seconds for each model: one dtype will do."""


def cases(target: Target) -> Iterator[Case]:
    """``models/<family>/<compiler>/<dtype>``"""
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
        run.close()  # the others serve the cases of runners, too


def head_dim_of(target: Target) -> int:
    """What models of the suite have: the usual one, or the nearest that attention takes."""
    known = target.backend.limits.head_dims
    return min(known, key=lambda each: abs(each - HEAD_DIM)) if known else HEAD_DIM


@attrs.frozen
class ModelRun:
    """A model of a family on the backend, in one dtype and mode.

    Attributes:
        queries: new tokens a sequence that whole steps are captured for.
    """

    target: Target
    family: str
    dtype: torch.dtype
    mode: str
    queries: tuple[int, ...] = (1,)

    @property
    def block_size(self) -> int:
        """Of its cache: what the backend prefers."""
        return self.target.backend.block_size

    @property
    def any_shape(self) -> bool:
        """Whether steps of any shape are captured, those that mix prompts and running sequences too."""
        return self.mode != EAGER and self.target.backend.compiler(self.mode).any_shape

    @property
    def plan(self) -> Plan:
        """Of the cases of models: prompts of all kinds, one of them over a block's end."""
        size = self.block_size
        return Plan((5, 1, size - 1, size + 1, 17), DECODES, seed=1)

    def config(self) -> dict[str, Any]:
        """That it is opened with."""
        compilation: dict[str, Any] = {"compiler": self.mode, "capture_sizes": list(BUCKETS)}
        if self.any_shape:
            compilation["prefill"] = {"capture_sizes": [16, PREFILL_TOKENS]}
        if self.queries != (1,):
            compilation["queries"] = list(self.queries)
        return {
            "dtype": dtype_name(self.dtype), "max_prefill_tokens": PREFILL_TOKENS, "compilation": compilation,
            "cache": {"num_tokens": 16 * self.block_size, "block_size": self.block_size},
        }  # fmt: skip

    def open(self) -> Runner:
        """The runner, made at the first call; its backend is active."""
        runner: Runner = self.target.keep(self._key, self.made)
        runner.backend.activate()
        return runner

    @property
    def _key(self) -> tuple[str, ...]:
        return ("runner", self.family, dtype_name(self.dtype), self.mode, *map(str, self.queries))

    def made(self) -> Runner:
        """A new runner, on a new backend, which is active."""
        backend = self.target.open(**self.config())
        return Runner(load_model(checkpoint(self.family, head_dim_of(self.target)), backend), backend)

    def close(self) -> None:
        """Drop the runner."""
        self.target.kept.pop(self._key, None)

    def check_plan(self, plan: Plan) -> None:
        """Run a plan, and hold every logit against the declarations'.

        Raises:
            AssertionError: they differ by more than rounding explains, or a step wrote where it must not.
        """
        runner = self.open()
        found = run_plan(runner, plan)
        check_logits(
            found, truth(self.family, head_dim_of(self.target), self.dtype, plan.texts(runner.model.vocab_size))
        )

    def check_generate(self) -> None:
        """Let it continue prompts by itself: each token is the likeliest, up to ties."""
        runner = self.open()
        prompts = [list(text) for text in Plan((7, 1, 30, 4, 11), ()).texts(runner.model.vocab_size)]
        texts = [list(prompt) for prompt in prompts]
        for token in generate(runner, prompts, SamplingParams(max_new_tokens=NEW_TOKENS)):
            texts[token.prompt].append(token.token_id)
        known = truth(self.family, head_dim_of(self.target), self.dtype, tuple(map(tuple, texts)))
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            require(len(text) == len(prompt) + NEW_TOKENS, f"prompt {row} was continued by {len(text) - len(prompt)}")
            for at in range(len(prompt), len(text)):
                check_choice(f"generate, prompt {row}, token {at}", text[at], known, row, at - 1)
