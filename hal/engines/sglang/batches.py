"""From SGLang's batches to hal's, and from logits to what SGLang's sampler reads."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import InputLogprobProcessor
from torch import Tensor

import hal


def num_logits(forward_batch: Any) -> list[int]:
    """Return of how many of its last new tokens each sequence needs logits: 1, or more to score its prompt."""
    if not (forward_batch.forward_mode.is_extend() and forward_batch.return_logprob):
        return [1] * forward_batch.batch_size
    pairs = zip(forward_batch.extend_seq_lens_cpu, forward_batch.extend_logprob_start_lens_cpu, strict=True)
    return [max(length - start, 1) for length, start in pairs]


def batch_of(forward_batch: Any, req_to_token: Tensor, runner: hal.Runner) -> hal.step.Batch:
    """Return the batch of a step.

    Args:
        forward_batch: SGLang's batch, on the host: prompts, chunks of prompts and running sequences.
        req_to_token: ``[requests, max_length]``: the slot of each token of each request.
        runner: runs the batch. Its blocks are SGLang's pages, and its dummy block is the page that SGLang leaves free.

    Raises:
        BatchError: as :meth:`hal.step.Batch.from_tensors`.
    """
    size = runner.spec.block_size
    lengths = forward_batch.seq_lens.to(torch.int32)
    counts = forward_batch.extend_seq_lens if forward_batch.forward_mode.is_extend() else torch.ones_like(lengths)
    ends = counts.cumsum(0)
    columns = -(-int(lengths.max()) // size)
    pages = req_to_token[:, : columns * size : size][forward_batch.req_pool_indices] // size
    used = torch.arange(columns) * size < lengths.unsqueeze(1)  # The rest is left from earlier requests.
    return hal.step.Batch.from_tensors(
        block_size=size,
        bounds=runner.bounds,
        token_ids=forward_batch.input_ids.long(),
        positions=forward_batch.positions.long(),
        slot_mapping=forward_batch.out_cache_loc.to(torch.int32),
        block_table=(pages * used).to(torch.int32),
        kv_lens=lengths,
        query_start_loc=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
    ).to(runner.backend.device.torch)


def output_of(
    forward_batch: Any, logits: Tensor, asked: list[int], processor: InputLogprobProcessor
) -> LogitsProcessorOutput:
    """Return what SGLang's sampler reads.

    Args:
        forward_batch: SGLang's batch.
        logits: ``[rows, vocab_size]``, on the host.
        asked: the rows of each sequence; the last is that of the next token.
        processor: computes the log-probabilities of prompts.
    """
    metadata = LogitsMetadata.from_forward_batch(forward_batch)
    if not metadata.extend_return_logprob:
        return LogitsProcessorOutput(next_token_logits=logits)
    ends = torch.tensor(asked).cumsum(0)
    scored: list[int] = []
    for length, count, begin in zip(
        metadata.extend_logprob_pruned_lens_cpu, asked, (ends - torch.tensor(asked)).tolist(), strict=True
    ):
        scored += range(begin, begin + min(length, count))
    metadata.sample_indices_cpu, metadata.input_logprob_indices_cpu = (ends - 1).tolist(), scored
    found, sampled = processor.forward(
        pruned_states=logits,
        sample_indices=ends - 1,
        input_logprob_indices=torch.tensor(scored),
        token_to_seq_idx=[row for row, count in enumerate(asked) for _ in range(count)],
        lm_head=None,
        get_logits_fn=lambda rows, *_, **__: rows,
        logits_metadata=metadata,
    )
    output = LogitsProcessorOutput(next_token_logits=sampled)
    found.write_input_to(output)
    return output
