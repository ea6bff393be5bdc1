"""Steps that verify drafted tokens: what is drafted for each text, and which drafts the model agrees with.

A text gets the token that the model chooses at each place, from the logits and from the text's own random sequence, as
without drafts. A drafted token is accepted if it is that token. So the texts do not depend on the drafter, greedy or
sampled. A drafter that draws with the same random numbers agrees more often.

Source: Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2023; Daliri et al., *Coupling
without Communication and Drafter-Invariant Speculative Decoding*, 2024.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor

from hal.drivers.backend import Backend
from hal.drivers.compiler import EAGER
from hal.errors import ConfigError
from hal.execution.runner import Runner
from hal.execution.state_spec import states_per_sequence
from hal.generation.choosing import reads_text
from hal.generation.drafting.draft_length import Acceptance, DraftLength
from hal.generation.drafting.drafter import Drafter, Drafts
from hal.generation.request import Place, Request
from hal.nn import CausalLM
from hal.step import SEQUENCE, rollback_batch

WATCHED = 200
"""The drafted tokens after which acceptance is compared with what is expected."""
log = logging.getLogger("hal.generation")


def keep_states(model: CausalLM, saves: int) -> None:
    """Let steps of a model keep its states per sequence after each of the last ``saves`` tokens, if it has any.

    The model's runner must not be made yet.

    Raises:
        ConfigError: a state cannot be kept after each token.
    """
    if not states_per_sequence(model):
        return
    states = [pair for layer in model.states for pair in layer.items()]
    if wrong := [name for name, state in states if state.per is SEQUENCE and not state.saved]:
        raise ConfigError(
            f"{type(model).__name__} keeps {wrong[0]} per sequence, from which rejected drafts cannot be dropped",
            "leave out draft",
        )
    base: Any = model.batch_type
    model.batch_type = rollback_batch(base, saves)


def capture_drafts(backend: Backend, queries: int) -> None:
    """Let whole graphs hold steps with as many tokens of each sequence, if the compiler captures any."""
    config = backend.config
    name = config.compilation.of("decode").compiler
    if name != EAGER and not backend.compiler(name).any_shape:
        asked = tuple(sorted({*config.compilation.queries, queries}))
        backend.configure(attrs.evolve(config, compilation=attrs.evolve(config.compilation, queries=asked)))


class Speculation:
    """Drafts the tokens of a scheduler's steps. Threading: one thread at a time, but for :attr:`acceptance`.

    Args:
        runner: the model's.
        drafter: drafts tokens.
        adapt: whether to draft fewer tokens where that is faster.
        expected: the acceptance to expect, as a fraction of drafted tokens; None if that is not known.

    Attributes:
        drafter: as given.
        spare: the tokens behind a text's last one that a step may write to the cache.
    """

    def __init__(self, runner: Runner, drafter: Drafter, *, adapt: bool = True, expected: float | None = None) -> None:
        self.drafter, self._runner = drafter, runner
        captured = [each - 1 for each in runner.captured_queries if 1 < each <= drafter.tokens + 1]
        # A step of another number of tokens would run without its graph.
        lengths = captured or list(range(1, drafter.tokens + 1))
        self._padded, self._lengths = bool(captured), lengths
        self._length = DraftLength(lengths, adapt and runner.backend.mesh.size == 1)
        self.spare = lengths[-1]
        self._expected, self._warned = expected, False
        self._began = 0.0

    @property
    def acceptance(self) -> Acceptance:
        """What the model agreed with so far. Any thread may read it."""
        return self._length.acceptance

    def propose(self, requests: Sequence[Request]) -> tuple[Drafts, list[int]]:
        """Return drafted tokens of requests, up to what each may still get, and how many of each the step runs.

        The step runs further tokens where its graph has as many for each request.
        """
        self._began = time.perf_counter()
        most = self._length.choose(len(requests))
        left = [0 if each.params.mask is not None else each.limit - each.drawn - 1 for each in requests]
        room = min(self._runner.model.max_length - len(each.tokens) for each in requests)
        if self._padded and room < most:
            most = 0
        if not most or not any(each > 0 for each in left):
            return Drafts([0] * len(requests), [[]] * len(requests)), [0] * len(requests)
        drafts = self.drafter.propose(requests, most)
        if (isinstance(drafts.tokens, Tensor) and drafts.tokens.is_cpu) or any(map(reads_text, requests)):
            drafts = drafts.on_host()
        counts = [max(0, min(own, few)) for own, few in zip(drafts.counts, left, strict=True)]
        longest = max(counts)
        if not self._padded or not longest:
            tokens = drafts.tokens
            if not isinstance(tokens, Tensor):
                tokens = [own[:count] for own, count in zip(tokens, counts, strict=True)]
            return Drafts(counts, tokens), counts
        whole = min(each for each in self._lengths if each >= longest)
        tokens = drafts.tokens
        if not isinstance(tokens, Tensor):
            tokens = [own[:count] + [0] * (whole - count) for own, count in zip(tokens, counts, strict=True)]
        return Drafts(counts, tokens), [whole] * len(counts)

    @staticmethod
    def places(requests: Sequence[Request], drafts: Drafts, counts: Sequence[int]) -> list[Place]:
        """Return the places of a step's logits: each request's next token, and one behind each drafted token.

        Args:
            counts: how many drafted tokens of each request the step runs.
        """
        found = []
        for index, (each, count) in enumerate(zip(requests, counts, strict=True)):
            own = [0] * count if isinstance(drafts.tokens, Tensor) else drafts.tokens[index]  # No request reads zeros.
            found += [Place(each, tuple(own[:size])) for size in range(count + 1)]
        return found

    def accepted(self, drafted: Sequence[int], chosen: Sequence[int]) -> int:
        """Return how many drafted tokens of a text are those that the model chose, up to the first that is not."""
        count = 0
        while count < len(drafted) and drafted[count] == chosen[count]:
            count += 1
        self._length.counted(len(drafted), count)
        return count

    def measured(self, drafts: Drafts) -> None:
        """Note the time since :meth:`propose`, at a step's end. Warn if acceptance is far below what is expected."""
        self._length.measured(len(drafts.counts), max(drafts.counts), time.perf_counter() - self._began)
        found = self._length.acceptance
        if self._expected and not self._warned and sum(found.drafted) >= WATCHED and found.rate < self._expected / 2:
            self._warned = True
            log.warning(
                "the model accepts %.0f %% of drafted tokens, and %.0f %% were to be expected: the drafter does not "
                "fit the model, or not these texts",
                100 * found.rate,
                100 * self._expected,
            )
