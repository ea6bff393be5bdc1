"""vLLM's sampling parameters of the rows of a step, as its sampler takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata

from hal.engines.vllm.request import Request

GREEDY = 1e-5
"""Temperatures below take the most likely token, as in vLLM's sampler."""


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
        self._requests: list[Request] = []
        self._metadata: SamplingMetadata | None = None

    def metadata(self, requests: list[Request]) -> SamplingMetadata:
        """Return the metadata for the rows of these requests."""
        update = None
        if self._metadata is None or requests != self._requests:
            update = BatchUpdate(
                batch_size=len(requests), removed=list(range(len(requests), len(self._requests))), moved=[],
                added=[(row, each.params, each.prompt, each.outputs) for row, each in enumerate(requests)],
            )  # fmt: skip
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
        asked = [each.logprobs for each in params if each.logprobs is not None]
        return SamplingMetadata(
            temperature=None if all(greedy) else self._column(params, lambda it: it.temperature),
            all_greedy=all(greedy),
            all_random=not any(greedy),
            top_p=self._column(params, lambda it: it.top_p) if any(each.top_p < 1 for each in params) else None,
            top_k=(
                self._column(params, lambda it: it.top_k if it.top_k > 0 else self._vocab_size, torch.int32)
                if any(each.top_k > 0 for each in params)
                else None
            ),
            generators={row: each.generator for row, each in enumerate(requests) if each.generator is not None},
            max_num_logprobs=(-1 if -1 in asked else max(asked)) if asked else None,
            no_penalties=not penalized,
            prompt_token_ids=self._prompts(requests) if penalized else None,
            frequency_penalties=self._column(params, lambda it: it.frequency_penalty),
            presence_penalties=self._column(params, lambda it: it.presence_penalty),
            repetition_penalties=self._column(params, lambda it: it.repetition_penalty),
            output_token_ids=[each.outputs for each in requests],  # They grow with the requests.
            allowed_token_ids_mask=self._refused(params) if any(each.allowed_token_ids for each in params) else None,
            bad_words_token_ids={
                row: each.bad_words_token_ids for row, each in enumerate(params) if each.bad_words_token_ids
            },
            logitsprocs=self._processors,
        )

    def _column(
        self, params: Sequence[Any], value: Callable[[Any], float], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return torch.tensor([value(each) for each in params], dtype=dtype, device=self._device)

    def _prompts(self, requests: Sequence[Request]) -> Tensor:
        width = max(len(each.prompt) for each in requests)
        rows = [each.prompt + [self._vocab_size] * (width - len(each.prompt)) for each in requests]
        return torch.tensor(rows, device=self._device)

    def _refused(self, params: Sequence[Any]) -> Tensor:
        mask = torch.zeros(len(params), self._vocab_size, dtype=torch.bool)
        for row, each in enumerate(params):
            if each.allowed_token_ids:
                mask[row] = True
                mask[row, each.allowed_token_ids] = False
        return mask.to(self._device)
