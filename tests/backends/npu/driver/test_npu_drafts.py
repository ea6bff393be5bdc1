"""Speculative decoding on an asynchronous device, where drafts stay until the step that verifies them."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import emulated_cann
import pytest
from helpers.thorough import MODE, spread, thorough

import hal
from hal.errors import ConfigError
from hal.generation.drafting.draft_model import ModelDrafter

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINTS = Path("checkpoints")
DENSE, HYBRID = CHECKPOINTS / "tiny-python", CHECKPOINTS / "tiny-python-hybrid"
TEXTS = ["def read_lines(path):", "import os\nimport os\nimport", "x = [1, 2, 3, 1, 2, 3, 1, 2"]
NGRAM: dict[str, Any] = {"method": "ngram", "adapt": False}
SELF: dict[str, Any] = {"method": "model", "model": str(DENSE), "tokens": 3, "adapt": False}
EAGLE: dict[str, Any] = {"method": "eagle3", "model": str(CHECKPOINTS / "tiny-python-eagle3"), "adapt": False}
MTP: dict[str, Any] = {"method": "mtp", "tokens": 3, "adapt": False}
DRAFTS = {"none": None, "ngram": NGRAM, "model": SELF, "eagle3": EAGLE, "mtp": MTP}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5, "logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 1},
)


def opened(checkpoint: Path, draft: dict[str, Any] | None, compiler: str) -> hal.LLM:
    return hal.LLM(
        checkpoint,
        backend="npu",
        dtype="float16",
        compiler=compiler,
        max_sequences=4,
        max_length=128,
        draft=draft,
        config={"options": {"emulator": True}},
    )


@cache
def texts(checkpoint: Path, draft: str, compiler: str) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of all texts, and how many of them were drafted. ``draft`` is one of DRAFTS."""
    with opened(checkpoint, DRAFTS[draft], compiler) as llm:
        found = [one.token_ids for how in SAMPLING for one in llm.generate(TEXTS, max_new_tokens=30, **how)]
        return found, 0 if llm.acceptance is None else sum(llm.acceptance.accepted)


@thorough(MODE, "hybrid-ngram-graph|hybrid-mtp-(eager|graph)|dense-(model|eagle3)-eager|npugraph_ex|piecewise")
@spread
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise", "npugraph_ex"])
@pytest.mark.parametrize(
    ("checkpoint", "draft"),
    [(HYBRID, "ngram"), (DENSE, "ngram"), (DENSE, "eagle3"), (HYBRID, "mtp"), (DENSE, "model")],
    ids=["hybrid-ngram", "dense-ngram", "dense-eagle3", "hybrid-mtp", "dense-model"],
)
def test_texts_are_those_without_drafts(checkpoint: Path, draft: str, compiler: str) -> None:
    (expected, _), (found, accepted) = (texts(checkpoint, each, compiler) for each in ("none", draft))
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    # A step of one token has another kernel for recurrent layers, whose rounding decides where two tokens are close.
    assert equal >= (6 if checkpoint == HYBRID else len(found))
    assert accepted > 40


@thorough(MODE, "ngram|model")
@pytest.mark.parametrize("draft", [NGRAM, SELF, EAGLE], ids=["ngram", "model", "eagle3"])
def test_steps_that_draft_and_verify_are_replayed(draft: dict[str, Any]) -> None:
    """After the first text, whose prompt runs alone, each step is a graph's, and nothing is captured."""
    with opened(DENSE, draft, "graph") as llm:
        llm.generate(TEXTS[0], max_new_tokens=20, temperature=0)
        assert llm._speculation is not None
        steps, drafter = 0, llm._speculation.drafter
        runners = [llm._runner, *([drafter._runner] if isinstance(drafter, ModelDrafter) else [])]

        def counted(*args: Any, step: Any, **fields: Any) -> Any:
            nonlocal steps
            steps += 1
            return step(*args, **fields)

        for each in runners:
            each.step = partial(counted, step=each.step)  # type: ignore[method-assign]
        with emulated_cann.trace() as trace:
            llm.generate(TEXTS[0], max_new_tokens=40, temperature=0)
        # The model's prompt, and the drafter's, run outside of graphs.
        assert steps - len(trace.ran(kind="graph")) in range(1 + len(runners))
        assert not trace.ran(phase="capture")


def test_the_pass_that_confuses_states_is_refused() -> None:
    options = {"emulator": True, "npugraph_ex": {"inplace_pass": True}}
    with pytest.raises(ConfigError, match="sets 'inplace_pass', which gives wrong states of recurrent layers"):
        hal.LLM(HYBRID, backend="npu", compiler="npugraph_ex", max_length=64, draft=NGRAM, config={"options": options})
