"""What ranks do with a hal.LLM that they share; see :func:`helpers.rank_processes.run`."""

from __future__ import annotations

import random
from typing import Any

import pytest

import hal
from hal.errors import ConfigError, HalError
from helpers.random_requests import check_together
from helpers.reference import TEXTS


def opened(checkpoint: str, tensor: int, **parallel: Any) -> hal.LLM:
    config = {"parallel": {"tensor": tensor, **parallel}, "compilation": {"capture_sizes": [1, 2, 4, 8]}}
    return hal.LLM(checkpoint, backend="cpu", dtype="float32", compiler="graph", max_sequences=8, config=config)


def used(llm: hal.LLM) -> dict[str, Any]:
    """Return what the calls of an LLM give."""
    samples = llm.generate(TEXTS[:2], n=3, temperature=0.8, seed=5, max_new_tokens=9, regex="[a-z ]+", logprobs=2)
    return {
        "texts": [each.text for each in samples],
        "scores": [each.logprob for each in llm.score("def main", ["():", " x"])],
        "embeddings": llm.embed(TEXTS[:3]).tolist(),
    }


def shared(rank: int, checkpoint: str) -> Any:
    """Use an LLM from the first rank, with random requests of threads. Return the error of a call from another rank."""
    with opened(checkpoint, 2) as llm:
        try:
            if llm.first:
                check_together(llm, random.Random(7), 15, 4)
                with pytest.raises(ConfigError, match="mask is a function"):
                    llm.generate("x", mask=print)
            return used(llm)
        except HalError as error:
            return str(error)


def failing(rank: int, checkpoint: str, whose: int) -> list[str]:
    """Let a step of a rank fail. Return the errors of calls, and of the end."""
    found, llm = [], opened(checkpoint, 2, timeout=8)

    def step(*arguments: Any, **options: Any) -> Any:
        raise OverflowError("broken")

    if rank == whose:
        llm._runner.step = step  # type: ignore[method-assign]
    for call in (*([lambda: llm.generate("x", max_new_tokens=3)] * 2 if llm.first else ()), llm.close):
        try:
            call()
        except HalError as error:
            found.append(type(error).__name__)
    assert llm.ended
    return found
