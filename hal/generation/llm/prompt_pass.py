"""Passes over whole prompts that generate nothing: scores and embeddings."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.execution.step_output import StepOutput
from hal.generation.llm.engine import Engine
from hal.generation.llm.loop_pass import Pass
from hal.generation.logits_processing import Logprob, logprobs_of, read_logprobs
from hal.generation.request import adapters_of
from hal.ops.lora import NO_ADAPTER
from hal.step import NONE, Wanted, to_device
from hal.step.input_batch import InputBatch

MOST_LOGITS = 1 << 26
"""The most logits of a step."""


@attrs.frozen(eq=False)
class Chunk:
    """New tokens of a prompt in a step.

    Attributes:
        start: the position of the first new token.
        stop: that behind the last one.
    """

    index: int
    tokens: Sequence[int]
    start: int
    stop: int


class PromptPass(Pass):
    """Runs prompts through the model, some at a time, so that other requests can run in between.

    Args:
        prompts: the token ids of each prompt.
        adapter: the name of their adapter; None for none.
    """

    max_tokens: int

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], adapter: str | None = None) -> None:
        self._runner, self._adapter = engine.runner, adapter
        self._waiting = deque(enumerate(prompts))

    @property
    def finished(self) -> bool:
        """Whether all prompts have run."""
        return not self._waiting

    def step(self) -> bool:
        """Run the next prompts, as many as fit into a step, or a longer one in several. Return whether any had room."""
        runner = self._runner
        allocator = runner.prefixes or runner.blocks
        group: list[tuple[int, Sequence[int]]] = []
        with ExitStack() as stack:
            adapter = NO_ADAPTER
            if self._adapter is not None:
                loaded = adapters_of(runner).take(self._adapter)
                stack.callback(loaded.give_back)
                adapter = loaded.slot
            inputs: InputBatch | None = None
            while self._waiting:
                index, tokens = self._waiting[0]
                total = sum(len(each) for _, each in group) + len(tokens)
                if group and total > self.max_tokens:
                    break
                saves = runner.model.batch_type.saves
                if runner.slots.needed and runner.slots.num_free < saves:
                    break
                if (blocks := allocator.take(runner.spec.blocks_for(len(tokens)))) is None:
                    break
                stack.callback(allocator.give_back, blocks)
                slots = (runner.slots.take(saves) or []) if runner.slots.needed else []
                stack.callback(runner.slots.give_back, slots)
                slot, *spare = slots or (None,)
                if inputs is None:
                    inputs = runner.input_batch(min(len(self._waiting), self.max_tokens))
                inputs.add(tokens, blocks, slot=slot, spare_slots=spare, adapter=adapter)
                group.append((index, tokens))
                self._waiting.popleft()
            if inputs is None:
                return False
            # Several prompts fit into one step; a single one may need more.
            longest = max(len(tokens) for _, tokens in group)
            for start in range(0, longest, self.max_tokens if len(group) == 1 else longest):
                ends = [min(len(tokens), start + self.max_tokens) for _, tokens in group]
                chunks = [Chunk(*pair, start, end) for pair, end in zip(group, ends, strict=True)]
                self._run(inputs, chunks)
        return True

    def _run(self, inputs: InputBatch, chunks: Sequence[Chunk]) -> None:
        runner, counts = self._runner, [each.stop - each.start for each in chunks]
        with runner.running():
            rows = to_device(found, runner.backend.device.torch) if (found := self.rows(chunks)) else NONE
            output = runner.step(inputs.batch(counts, **self.fields(chunks)), rows=rows)
            inputs.advance(counts)
            self.collect(chunks, output, rows)

    def fields(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return fields of the step's batch beside its tokens."""
        return {}

    @abstractmethod
    def rows(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the tokens of the step that have logits."""

    @abstractmethod
    def collect(self, chunks: Sequence[Chunk], output: StepOutput, rows: Wanted) -> None:
        """Read what a step gave."""


class ScorePass(PromptPass):
    """Computes the log-probability of tokens, given those before them.

    Args:
        prompts: the token ids of each prompt.
        starts: the first token of each prompt that is scored, 1 or more.
        top: how many of the most likely tokens to return beside each.
        adapter: see :class:`PromptPass`.
        given: fields of batches with a row for each token of a prompt, the same ones for each; None for none.

    Attributes:
        scores: the log-probabilities of each prompt's tokens from its start on.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        top: int = 0,
        adapter: str | None = None,
        given: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(engine, prompts, adapter)
        self._given = given
        most = max(16, MOST_LOGITS // self._runner.model.vocab_size)
        self.max_tokens = min(self._runner.backend.config.max_prefill_tokens, most)
        self._starts, self._top = starts, top
        self.scores: list[list[Logprob]] = [[] for _ in prompts]

    def _places(self, chunk: Chunk) -> range:
        """Return the positions whose logits say how likely a scored token is."""
        return range(max(chunk.start, self._starts[chunk.index] - 1), min(chunk.stop, len(chunk.tokens) - 1))

    def fields(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return the given fields of the chunks' tokens."""
        if self._given is None:
            return {}
        parts = [(self._given[each.index], slice(each.start, each.stop)) for each in chunks]
        return {name: torch.cat([own[name][place] for own, place in parts]) for name in parts[0][0]}

    def rows(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the tokens before scored ones."""
        found, first = list[int](), 0
        for each in chunks:
            found += [first + place - each.start for place in self._places(each)]
            first += each.stop - each.start
        return found

    def collect(self, chunks: Sequence[Chunk], output: StepOutput, rows: Wanted) -> None:
        """Read the log-probabilities."""
        if rows is NONE:
            return
        wanted = [(each.index, each.tokens[place + 1]) for each in chunks for place in self._places(each)]
        device = output.logits.device
        likely = logprobs_of(
            output.logits, to_device([token for _, token in wanted], device), [self._top] * len(wanted)
        )
        found = read_logprobs([each.tolist() for each in likely], [self._top] * len(wanted))
        for (index, _), score in zip(wanted, found, strict=True):
            self.scores[index].append(score)


class PoolingPass(PromptPass):
    """Computes one vector for each prompt from its hidden states.

    Args:
        prompts: the token ids of each prompt.
        mode: how hidden states become a vector; see :class:`hal.generation.llm.embedder.Pooling`.

    Attributes:
        vectors: the vector of each prompt, after the pass: ``[width]``, float32, on the CPU.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], mode: str) -> None:
        super().__init__(engine, prompts)
        self.max_tokens, self._mode = self._runner.backend.config.max_prefill_tokens, mode
        self.vectors: list[Any] = [None] * len(prompts)

    def rows(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return none: hidden states suffice."""
        return []

    def collect(self, chunks: Sequence[Chunk], output: StepOutput, rows: Wanted) -> None:
        """Pool the hidden states."""
        parts = output.hidden_states.split([each.stop - each.start for each in chunks])
        for chunk, hidden in zip(chunks, parts, strict=True):
            before, index = self.vectors[chunk.index], chunk.index
            found = self._pooled(hidden, len(chunk.tokens)).float().cpu()
            if before is None or self._mode == "last":
                self.vectors[index] = found
            elif self._mode == "mean":
                self.vectors[index] = before + found
            elif self._mode == "max":
                self.vectors[index] = torch.maximum(before, found)

    def _pooled(self, hidden: Tensor, length: int) -> Tensor:
        if self._mode == "mean":
            return hidden.float().sum(0) / length
        if self._mode == "max":
            return hidden.amax(0)
        return hidden[0 if self._mode == "first" else -1]
