"""What to expect of a drafter, found on short texts when it is opened.

Texts do not show that a drafter is wrong, since the model corrects it. So its drafts are compared with those of its
model's references, its predictions with those of other wirings, and the acceptance is stated.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import attrs
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hal.execution.runner import Runner
from hal.generation.drafting.draft_length import Acceptance
from hal.generation.drafting.draft_passes import Feed, pass_of_drafting, pass_of_target
from hal.generation.drafting.drafter import Drafter, Drafts
from hal.generation.drafting.speculation import Speculation
from hal.generation.drafting.wirings import wirings_of
from hal.generation.request import Request, checked
from hal.generation.sampling_params import SamplingParams
from hal.generation.scheduler import Scheduler
from hal.nn import DraftLM
from hal.ops.rounding import DRIFT_TIE_RATIO, Disturbance, drift, rms
from hal.parallel.launch import agreed

TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of",
    'def mean(values):\n    """Return the mean of a list of numbers."""\n    return',
)
"""What the model continues."""
NEW_TOKENS = 32
"""The new tokens of each text."""
SAMPLE = '''People first made bread from grain that they ground between stones.

import os
import sys


class Reader:
    """Reads the lines of a file."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding

    def lines(self):
        with open(self.path, encoding=self.encoding) as file:
            for line in file:
                yield line.rstrip()
'''
"""The text on which wirings are compared."""
FEWEST_TOKENS, SAMPLE_TOKENS = 16, 64
"""The fewest tokens of it that say something, and the most that are read."""
ALIKE = 0.95
"""The overlap above which no other wiring is tried."""
GAIN, DEVIATIONS, LESS = 0.03, 4.0, 2.0
"""By how much the overlap of another wiring exceeds that of a wrong one, and in standard errors of the difference: the
latter fewer if the acceptance is low, too."""
FITS = 0.75
"""The least overlap of a drafter that fits, as a part of that of the same distribution for each token."""
PLACES, PLACES_OF_LAYERS = 8, 24
"""The texts behind which drafts are compared with those of the references; more if the drafter is a layer of a model.
"""
DIFFERING = 1
"""How many of these drafts may differ, beside ties."""
LOW = 0.1
"""An acceptance that no drafter has that fits its model."""
log = logging.getLogger("hal.generation")


@attrs.frozen
class Expectation:
    """What was found.

    Attributes:
        acceptance: the drafted tokens that the model agrees with in short texts that it continues greedily.
        faults: what is wrong with the drafter, and what to look at, each a sentence.
    """

    acceptance: Acceptance
    faults: tuple[str, ...]


def examine(runner: Runner, drafter: Drafter, tokenizer: Tokenizer, max_requests: int, max_length: int) -> Expectation:
    """Return what to expect of a drafter, and log it: faults as warnings.

    Args:
        runner: the model's, which runs no texts.
        tokenizer: the model's.
        max_requests: the most texts that run together.
        max_length: the most tokens of a text.
    """
    noting = _Noting(drafter)
    found = _acceptance(runner, noting, tokenizer, max_requests, max_length)
    faults: list[str] = []
    if (drafting := drafter.drafting) is not None:
        longest = min(SAMPLE_TOKENS, max_length, drafting.model.max_length)
        tokens = tokenizer.encode(SAMPLE).ids[:longest]
        deviations = DEVIATIONS if found.rate >= LOW else LESS
        faults = [*_wrong_wiring(runner, drafting, tokens, deviations), *_wrong_drafts(runner, drafting, noting.noted)]
    if found.rate < LOW and not faults:
        faults.append(
            f"on a short text, the model {found}; compare the drafter's outputs with those of its own implementation"
        )
    for each in faults:
        log.warning("the drafter does not fit the model: %s; or leave out draft", each)
    if not faults:
        log.info("drafts to expect, from a short text: %s", found)
    return Expectation(found, tuple(faults))


class _Noting(Drafter):
    """A drafter whose drafts are noted: the number of the text, its tokens, and the drafted ones."""

    def __init__(self, drafter: Drafter) -> None:
        self.tokens, self._drafter = drafter.tokens, drafter
        self.ran, self.remembered = drafter.ran, drafter.remembered  # type: ignore[method-assign]
        self.end, self.clear = drafter.end, drafter.clear  # type: ignore[method-assign]
        self.noted: list[tuple[int, list[int], list[int]]] = []

    def propose(self, requests: Sequence[Request], most: int) -> Drafts:
        found = self._drafter.propose(requests, most).on_host()
        for each, drafts in zip(requests, found.tokens, strict=True):
            if drafts:
                self.noted.append((each.prompt_index, list(each.tokens), list(drafts)))
        return found


def _acceptance(
    runner: Runner, drafter: Drafter, tokenizer: Tokenizer, max_requests: int, max_length: int
) -> Acceptance:
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
    return speculation.acceptance


def overlap(found: Tensor, expected: Tensor) -> Tensor:
    """Return how much of each distribution two have in common, ``[rows]``, from 0 to 1.

    It is the probability that a sampled token of one would be accepted for the other.

    Args:
        found: logits, ``[rows, vocab_size]``.
        expected: as ``found``.
    """
    return torch.minimum(found.softmax(-1), expected.softmax(-1)).sum(-1)


def _wrong_wiring(runner: Runner, drafting: Runner, tokens: list[int], deviations: float) -> Iterator[str]:
    """Yield the wiring with which a drafting model predicts better, or that it predicts nothing."""
    if len(tokens) < FEWEST_TOKENS:
        return
    text = pass_of_target(runner, tokens)
    expected = text.predicted(drafting.model)

    def fit(feed: Feed) -> Tensor:
        return overlap(pass_of_drafting(drafting, [feed])[1], expected)

    with drafting.running():
        own = fit(text.feed(drafting.model))
        if not agreed(float(own.mean()) < ALIKE, runner.backend.mesh):
            return
        best, better = "", own
        for each in wirings_of(drafting.model, runner.model, text):
            with ExitStack() as stack:
                each.change(stack)
                other = fit(each.feed or text.feed(drafting.model))
            gain = other - own
            least = max(GAIN, each.least * float(own.mean()))
            clear = float(gain.mean()) > max(least, deviations * float(gain.std()) / len(gain) ** 0.5)
            if clear and other.mean() > better.mean():
                best, better = each.name, other
        constant = overlap(expected.softmax(-1).mean(0).log()[None], expected)
    has = f"its predictions have {100 * float(own.mean()):.0f} % in common with the model's"
    most = float(constant.mean())
    if best and float(better.mean()) > most:
        yield f"{has}, and {100 * float(better.mean()):.0f} % with {best}; check this in its checkpoint and its model"
    elif float(own.mean()) < FITS * most:
        yield (
            f"{has}, fewer than the same distribution for each token has, {100 * most:.0f} %; check that its "
            "checkpoint was trained for this model, and the order of its layers"
        )


def _wrong_drafts(runner: Runner, drafting: Runner, noted: Sequence[tuple[int, list[int], list[int]]]) -> Iterator[str]:
    """Yield that many drafts are not those of the references."""
    if not noted:
        return
    longest = {number: tokens for number, tokens, _ in noted}
    hidden: dict[int, Tensor] = {}
    if isinstance(model := drafting.model, DraftLM):
        passes = {number: pass_of_target(runner, tokens) for number, tokens in longest.items()}
        with drafting.running():
            hidden = {number: each.read(model) for number, each in passes.items()}
    some = noted[:: -(-len(noted) // (PLACES_OF_LAYERS if hidden else PLACES))]
    texts = [(tokens, drafts, hidden[number] if hidden else None) for number, tokens, drafts in some]
    references = drafting.backend.mesh.size == 1
    with drafting.running():
        expected = _chains(drafting, texts, references)
        chosen = torch.tensor([token for _, drafts, _ in texts for token in drafts], device=expected.device)
        behind = expected.amax(-1) - expected.gather(1, chosen[:, None])[:, 0]
        wrong = int((behind > 0).sum())
        if references and wrong > DIFFERING:  # unless these are ties
            moved = _chains(drafting, texts, references, Disturbance(drafting.spec.dtype))
            known = expected.isfinite().all(0) & moved.isfinite().all(0)
            rounding = DRIFT_TIE_RATIO * drift(moved[:, known], expected[:, known])
            wrong = int((behind > rounding * rms(expected[:, known])).sum())
    if wrong > DIFFERING:
        yield (
            f"{wrong} of {len(chosen)} drafts in short texts are not those that its model computes for whole texts on "
            "the operations' references; `hal compare --draft` finds a wrong kernel; else check the positions, cached "
            "tokens and hidden states of the drafter's steps"
        )


def _chains(
    drafting: Runner,
    texts: Sequence[tuple[list[int], list[int], Tensor | None]],
    references: bool,
    disturbance: Disturbance | None = None,
) -> Tensor:
    """Return the logits of each drafted token behind some texts, ``[drafts of all texts, vocab_size]``."""
    places: dict[int, list[Tensor]] = defaultdict(list)
    states: list[list[Tensor]] = [[] if each is None else [each[: len(tokens) - 1]] for tokens, _, each in texts]
    most, reads = max(len(drafts) for _, drafts, _ in texts), isinstance(drafting.model, DraftLM)
    for place in range(most) if reads else (most - 1,):
        feeds = []
        for (tokens, drafts, _), own in zip(texts, states, strict=True):
            known = [*tokens, *(drafts + [0] * most)[:place]]
            feeds.append(Feed(known[1:], torch.cat(own)) if own else Feed(known))
        hidden, logits = pass_of_drafting(drafting, feeds, references=references, disturbance=disturbance)
        end = 0
        for index, ((tokens, drafts, _), feed) in enumerate(zip(texts, feeds, strict=True)):
            end += len(feed.tokens)
            if reads:
                states[index].append(hidden[end - 1 : end])
                places[index] += [logits[end - 1]] if place < len(drafts) else []
            else:
                first = end - len(feed.tokens) + len(tokens) - 1
                places[index] += logits[first : first + len(drafts)].unbind()
    return torch.stack([each for index in range(len(texts)) for each in places[index]])
