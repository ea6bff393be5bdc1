"""vLLM's sampling parameters of the rows of a step, as its sampler takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    LogitsProcessors,
    MinTokensLogitsProcessor,
    build_logitsprocs,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder

import hal
from hal.engines.vllm.logits_processors import CustomProcessors
from hal.engines.vllm.request import Chosen
from hal.step import to_device

COLUMNS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""The parameters of which the sampler takes a column, in float32."""
GREEDY = 1e-5
"""Temperatures below take the most likely token, as in vLLM's sampler."""


@dataclass
class Rows(SamplingMetadata):
    """The sampler's metadata, and what hal's draw needs."""

    requests: Sequence[Chosen] = ()
    custom: CustomProcessors | None = None
    drawing: tuple[Tensor, ...] = ()
    """The arguments of :func:`hal.ops.sample` between the logits and the step. vLLM divides by the temperature."""


class HalSampler(Sampler):
    """vLLM's sampler, in which hal draws: a token depends only on the request's seed and its number of output tokens.

    Args:
        logprobs_mode: which log-probabilities vLLM returns.
        backend: runs the operations.
    """

    def __init__(self, logprobs_mode: str, backend: hal.Backend) -> None:
        super().__init__(logprobs_mode)
        self._greedy, self._draw = backend.ops.greedy_sample, backend.ops.sample

    def apply_penalties(self, logits: Tensor, sampling_metadata: Rows, output_token_ids: list[list[int]]) -> Tensor:
        """Apply penalties, and the custom processors of the second model runner, which come next."""
        logits = super().apply_penalties(logits, sampling_metadata, output_token_ids)
        custom = sampling_metadata.custom
        return logits if custom is None else custom.apply(logits, sampling_metadata.requests)

    def sample(
        self, logits: Tensor, sampling_metadata: Rows, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a token for each row, and the processed logits or log-probabilities if the mode asks for them."""
        rows, mode = sampling_metadata, logprobs_mode_override or self.logprobs_mode
        if rows.all_greedy:
            tokens = self._greedy(logits)
        else:
            logits = self.apply_temperature(logits, rows.temperature, rows.all_random)
            for processor in rows.logitsprocs.argmax_invariant:
                logits = processor.apply(logits)
            steps = to_device([each.drawn + len(each.outputs) for each in rows.requests], logits.device)
            tokens = self._draw(logits, *rows.drawing, steps)
        if not mode.startswith("processed") or (rows.max_num_logprobs is None and not rows.logprob_token_ids):
            return tokens, None
        if not rows.all_greedy:
            logits = apply_top_k_top_p_pytorch(logits, rows.top_k, rows.top_p)
        return tokens, logits if mode == "processed_logits" else self.compute_logprobs(logits)

    def gather_specific_token_logprobs(
        self, logprobs: Tensor, logprob_token_ids: dict[int, list[int] | int], sampled: Tensor
    ) -> LogprobsTensors:
        """Return log-probabilities of chosen tokens of each row, or of a number of its likeliest.

        vLLM's sampler would return those of tokens that nobody asked for to the rows without chosen tokens.
        """
        numbers = [asked for asked in logprob_token_ids.values() if isinstance(asked, int)]
        likeliest = logprobs.topk(max(numbers, default=0)).indices.tolist()
        chosen = {
            row: likeliest[row][:asked] if isinstance(asked, int) else asked for row, asked in logprob_token_ids.items()
        }
        return super().gather_specific_token_logprobs(logprobs, chosen, sampled)


class Sampling:
    """Makes the sampler's metadata. A step of the same requests as the last takes the last's.

    Args:
        vocab_size: the number of logits.
        rows: the most requests that have begun.
        places: the most tokens that a step chooses for a request.

    Attributes:
        custom: custom processors of the second model runner; None for none. Those of the first are with vLLM's own.
    """

    def __init__(self, vllm_config: Any, device: torch.device, vocab_size: int, rows: int, places: int = 1) -> None:
        self._device, self._vocab_size = device, vocab_size
        self.custom = CustomProcessors.of(vllm_config, device, vocab_size, rows)
        if vllm_config.use_v2_model_runner:
            # vLLM refuses requests for the others beside drafts.
            own = BUILTIN_LOGITS_PROCESSORS if places == 1 else [MinTokensLogitsProcessor]
            self._processors = LogitsProcessors(each(vllm_config, device, False) for each in own)
        else:
            self._processors = build_logitsprocs(
                vllm_config, device, False, False, vllm_config.model_config.logits_processors or ()
            )
        self._budgets = maybe_create_thinking_budget_state_holder(
            vllm_config.reasoning_config, places * vllm_config.scheduler_config.max_num_seqs, 0, device, False
        )
        self._none = torch.empty(len(COLUMNS), 0)  # Greedy requests without penalties need no columns.
        self._requests: list[Chosen] = []
        self._metadata: Rows | None = None

    def metadata(self, requests: list[Chosen]) -> Rows:
        """Return the metadata for the rows of these requests."""
        update = None
        if self._metadata is None or requests != self._requests:
            update = batch_update(self._requests, requests)
        if self._budgets is not None and update is not None:
            self._budgets.sync_batch(update)
        for each in self._processors.all:
            each.update_state(update)
        if self.custom is not None:
            self.custom.take(requests)
        if self._metadata is None or update is not None:
            self._requests, self._metadata = requests, self._make(requests)
        return self._metadata

    def _make(self, requests: list[Chosen]) -> Rows:
        params, size = [each.params for each in requests], self._vocab_size
        random = [each.temperature >= GREEDY for each in params]
        penalized = any(
            each.presence_penalty or each.frequency_penalty or each.repetition_penalty != 1.0 for each in params
        )
        asked = [num_logprobs(each.logprobs, size) for each in params if each.logprobs is not None]
        chosen = [each.logprob_token_ids for each in params]
        values, drawing = self._none, tuple[Tensor, ...]()
        if penalized or any(random):  # One copy to the device for all.
            values = to_device([[float(getattr(each, name)) for each in params] for name in COLUMNS], self._device)
        temperature, top_p, frequency, presence, repetition = values
        if any(random):
            top_k = [each.top_k if 0 < each.top_k < size else size for each in params]
            numbers = to_device([top_k, random, [each.seed for each in requests]], self._device)
            drawing = (numbers[1].float(), numbers[0].int(), top_p, torch.zeros_like(top_p), numbers[2])
        return Rows(
            temperature=temperature,
            top_p=top_p,
            top_k=drawing[1] if drawing else None,
            generators={},
            all_greedy=not any(random),
            all_random=all(random),
            max_num_logprobs=max(asked, default=None),
            no_penalties=not penalized,
            prompt_token_ids=self._prompts(requests) if penalized else None,
            frequency_penalties=frequency,
            presence_penalties=presence,
            repetition_penalties=repetition,
            output_token_ids=[each.outputs for each in requests],  # They grow with the requests.
            allowed_token_ids_mask=self._refused(params) if any(each.allowed_token_ids for each in params) else None,
            bad_words_token_ids={
                row: each.bad_words_token_ids for row, each in enumerate(params) if each.bad_words_token_ids
            },
            logitsprocs=self._processors,
            logprob_token_ids=None
            if chosen == [None] * len(chosen)
            else {
                row: num_logprobs(each.logprobs or 0, size) if ids is None else ids
                for row, (each, ids) in enumerate(zip(params, chosen, strict=True))
            },
            thinking_budget_state_holder=self._budgets,
            requests=requests,
            custom=self.custom,
            drawing=drawing,
        )

    def _prompts(self, requests: Sequence[Chosen]) -> Tensor:
        width = max(len(each.prompt) for each in requests)
        rows = [each.prompt + [self._vocab_size] * (width - len(each.prompt)) for each in requests]
        return to_device(rows, self._device)

    def _refused(self, params: Sequence[Any]) -> Tensor:
        mask = torch.zeros(len(params), self._vocab_size, dtype=torch.bool)
        for row, each in enumerate(params):
            if each.allowed_token_ids:
                mask[row] = True
                mask[row, each.allowed_token_ids] = False
        return to_device(mask, self._device)


def batch_update(before: Sequence[Chosen], after: Sequence[Chosen]) -> BatchUpdate:
    """Return how the rows of ``before`` become those of ``after``, for vLLM's logits processors.

    A processor forgets what it knows of a request that is removed or added, so one that stays is only moved.
    """
    known, staying = set(before), set(after)
    rows = [each if each in staying else None for each in before] + [None] * (len(after) - len(before))
    free = [row for row, each in enumerate(rows) if each is None]
    added, moved = [], []
    for each in after:
        if each not in known:
            row = free.pop(0)
            rows[row] = each
            added.append((row, each.params, each.prompt, each.outputs))
    for row, each in enumerate(after):
        if rows[row] is not each:
            place = rows.index(each)
            way = MoveDirectionality.UNIDIRECTIONAL if rows[row] is None else MoveDirectionality.SWAP
            moved.append((place, row, way))
            rows[place], rows[row] = rows[row], each
    removed = [row for row in free if row < len(before)]
    return BatchUpdate(batch_size=len(after), removed=removed, added=added, moved=moved)


def num_logprobs(asked: int, vocab_size: int) -> int:
    """Return of how many of the likeliest tokens a request gets log-probabilities: -1 asks for all."""
    return vocab_size if asked == -1 else asked


def scores_of(given: Any, start: int | None, first: int, logprobs: Tensor) -> Tensor:
    """Return the log-probabilities of given tokens, ``[tokens of the prompt, given tokens of each]``, -inf for padding.

    Args:
        given: those of each of the prompt's tokens from ``start`` on, with -1 as padding, or the same for all.
        first: the number of the prompt's token that ``logprobs`` begin with.
        logprobs: ``[tokens of the prompt, vocabulary]``.
    """
    start = start or 0
    logprobs, first = logprobs[max(0, start - first) :], max(first, start)
    ids = torch.tensor(given)
    if ids.dim() > 1:  # from vLLM 0.32 on
        ids = ids[first - start : first - start + len(logprobs)]
    ids = to_device(ids.long(), logprobs.device).expand(len(logprobs), -1)
    return logprobs.gather(-1, ids.clamp_min(0)).masked_fill_(ids < 0, -torch.inf)
