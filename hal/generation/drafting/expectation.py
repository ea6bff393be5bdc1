"""What acceptance to expect of a drafter, measured on a short text when it is opened.

Texts do not show that a drafter is wrong, since the model corrects it: only its acceptance does.
"""

from __future__ import annotations

import logging

from tokenizers import Tokenizer

from hal.execution.runner import Runner
from hal.generation.drafting.draft_length import Acceptance
from hal.generation.drafting.drafter import Drafter
from hal.generation.drafting.speculation import Speculation
from hal.generation.request import checked
from hal.generation.sampling_params import SamplingParams
from hal.generation.scheduler import Scheduler

TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of",
    'def mean(values):\n    """Return the mean of a list of numbers."""\n    return',
)
"""What the model continues."""
NEW_TOKENS = 32
"""The new tokens of each text."""
LOW = 0.1
"""An acceptance that no drafter has that fits its model."""
log = logging.getLogger("hal.generation")


def expected_acceptance(
    runner: Runner, drafter: Drafter, tokenizer: Tokenizer, max_requests: int, max_length: int
) -> Acceptance:
    """Return how many drafted tokens the model agrees with in a short text that it generates greedily.

    Warns if they are so few that the drafter cannot fit the model.

    Args:
        runner: the model's.
        tokenizer: the model's.
        max_requests: the most texts that run together.
        max_length: the most tokens of a text.
    """
    speculation = Speculation(runner, drafter, adapt=False)
    scheduler = Scheduler(runner, max_requests=max_requests, max_length=max_length, speculation=speculation)
    for index, text in enumerate(TEXTS):
        tokens = tokenizer.encode(text).ids[: max(1, max_length - NEW_TOKENS)]
        params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        scheduler.add(checked(runner, index, tokens, params, max_length=max_length))
    try:
        while not scheduler.idle:
            scheduler.step()
    finally:
        scheduler.close()
    found = speculation.acceptance
    if found.rate < LOW:
        log.warning(
            "the drafter does not fit the model: on a short text, the model %s; compare the drafter's outputs with "
            "those of its own implementation, or leave out draft",
            found,
        )
    else:
        log.info("drafts to expect, from a short text: %s", found)
    return found
