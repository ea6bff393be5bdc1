"""vLLM's sampling parameters of the rows of a step, as its sampler takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder

import hal
from hal.engines.vllm.request import Request
from hal.step import to_device

COLUMNS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""The parameters of which the sampler takes a column, in float32."""
GREEDY = 1e-5
"""Temperatures below take the most likely token, as in vLLM's sampler."""


class Draw(nn.Module):
    """Draws tokens as :func:`hal.generate` does: a request's seed and the number of its tokens decide, nothing else.

    It takes the place of the last part of vLLM's sampler, which has a random generator for each request with a seed.

    Args:
        sampler: vLLM's sampler.
        backend: runs the operation.
    """

    def __init__(self, sampler: Sampler, backend: hal.Backend) -> None:
        super().__init__()
        self._mode, self._logprobs, self._sample = sampler.logprobs_mode, sampler.compute_logprobs, backend.ops.sample
        self.requests: Sequence[Request] = ()

    def forward(
        self, logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a token for each row of ``requests``, and the processed logits if the sampler's mode asks for them."""
        device, rows = logits.device, len(self.requests)
        random = [
            float(each.params.temperature >= GREEDY) for each in self.requests
        ]  # vLLM takes others from greedy rows
        numbers = [[each.seed for each in self.requests], [len(each.outputs) for each in self.requests]]
        tokens = self._sample(
            logits, to_device(torch.tensor(random), device),
            torch.zeros(rows, dtype=torch.int32, device=device) if k is None else k,
            torch.ones(rows, device=device) if p is None else p, torch.zeros(rows, device=device),
            *to_device(torch.tensor(numbers), device),
        )  # fmt: skip
        if not self._mode.startswith("processed"):
            return tokens, None
        logits = apply_top_k_top_p_pytorch(logits, k, p)
        return tokens, logits if self._mode == "processed_logits" else self._logprobs(logits)


class Sampling:
    """Makes the sampler's metadata. A step of the same requests as the last takes the last's.

    Args:
        vllm_config: vLLM's configuration.
        device: the device of the logits.
        vocab_size: the number of logits.
    """

    def __init__(self, vllm_config: Any, device: torch.device, vocab_size: int) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._processors = build_logitsprocs(
            vllm_config, device, False, False, vllm_config.model_config.logits_processors or ()
        )
        self._budgets = maybe_create_thinking_budget_state_holder(
            vllm_config.reasoning_config, vllm_config.scheduler_config.max_num_seqs, 0, device, False
        )
        self._none = dict.fromkeys(COLUMNS, torch.empty(0))  # Greedy requests without penalties need no columns.
        self._requests: list[Request] = []
        self._metadata: SamplingMetadata | None = None

    def metadata(self, requests: list[Request]) -> SamplingMetadata:
        """Return the metadata for the rows of these requests."""
        update, before = None, self._requests
        if self._metadata is None or requests != before:
            update = BatchUpdate(
                batch_size=len(requests), removed=list(range(len(requests), len(before))), moved=[],
                added=[
                    (row, each.params, each.prompt, each.outputs)
                    for row, each in enumerate(requests)
                    if row >= len(before) or before[row] is not each
                ],
            )  # fmt: skip
        if self._budgets is not None and update is not None:
            self._budgets.sync_batch(update)
        for each in self._processors.all:
            each.update_state(update)
        if self._metadata is None or update is not None:
            self._requests, self._metadata = requests, self._make(requests)
        return self._metadata

    def _make(self, requests: list[Request]) -> SamplingMetadata:
        params = [each.params for each in requests]
        greedy = [each.temperature < GREEDY for each in params]
        penalized = any(
            each.presence_penalty or each.frequency_penalty or each.repetition_penalty != 1.0 for each in params
        )
        asked = [num_logprobs(each.logprobs, self._vocab_size) for each in params if each.logprobs is not None]
        columns = self._none
        if penalized or not all(greedy):  # One copy to the device for all.
            values = torch.tensor([[getattr(each, name) for each in params] for name in COLUMNS], dtype=torch.float32)
            columns = dict(zip(COLUMNS, to_device(values, self._device), strict=True))
        top_k = [each.top_k if each.top_k > 0 else self._vocab_size for each in params]
        return SamplingMetadata(
            temperature=None if all(greedy) else columns["temperature"],
            all_greedy=all(greedy),
            all_random=not any(greedy),
            top_p=columns["top_p"] if any(each.top_p < 1 for each in params) else None,
            top_k=to_device(torch.tensor(top_k, dtype=torch.int32), self._device)
            if any(each.top_k > 0 for each in params)
            else None,
            generators={},
            max_num_logprobs=max(asked, default=None),
            no_penalties=not penalized,
            prompt_token_ids=self._prompts(requests) if penalized else None,
            frequency_penalties=columns["frequency_penalty"],
            presence_penalties=columns["presence_penalty"],
            repetition_penalties=columns["repetition_penalty"],
            output_token_ids=[each.outputs for each in requests],  # They grow with the requests.
            allowed_token_ids_mask=self._refused(params) if any(each.allowed_token_ids for each in params) else None,
            bad_words_token_ids={
                row: each.bad_words_token_ids for row, each in enumerate(params) if each.bad_words_token_ids
            },
            logitsprocs=self._processors,
            logprob_token_ids={
                row: each.logprob_token_ids for row, each in enumerate(params) if each.logprob_token_ids is not None
            },
            thinking_budget_state_holder=self._budgets,
        )

    def _prompts(self, requests: Sequence[Request]) -> Tensor:
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


def num_logprobs(asked: int, vocab_size: int) -> int:
    """Return of how many of the likeliest tokens a request gets log-probabilities: -1 asks for all."""
    return vocab_size if asked == -1 else asked
