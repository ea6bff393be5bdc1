"""The models that SGLang's registry finds: one class for each architecture that hal knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import InputLogprobProcessor
from sglang.srt.runtime_context import get_context, get_model, get_schedule
from torch import Tensor, nn

import hal
from hal.engines.sglang.requests import UNREAD
from hal.engines.sglang.server_args import check_model, configuration
from hal.errors import BatchError, ConfigError
from hal.step import last_rows


class HalSteps:
    """hal's backend, model and runner of a model of SGLang's.

    Args:
        dtype: the dtype that SGLang decided.
    """

    def __init__(self, server_args: Any, dtype: torch.dtype) -> None:
        config = configuration(server_args)
        name = str(dtype).removeprefix("torch.")
        if config.dtype not in ("auto", name):
            raise ConfigError(f"SGLang's dtype is {name}, and hal's {config.dtype}", f"pass --dtype {config.dtype}")
        decided: dict[str, Any] = {
            "dtype": name,
            "cache": attrs.evolve(config.cache, block_size=get_schedule().page_size),
        }
        self.backend = hal.open(attrs.evolve(config, **decided))
        self._model = hal.load_model(get_model().model_path, self.backend)
        check_model(self._model)
        self._scores = InputLogprobProcessor(self._model.vocab_size)
        self._bounded = get_schedule().max_total_tokens is not None

    def start(self, model_runner: Any) -> None:
        """Make the runner, with as many blocks as SGLang's pool has pages. Block 0 is the page that SGLang leaves free.

        Raises:
            ConfigError: the cache does not fit, or SGLang has measured the memory of another device.
        """
        if self.backend.device.torch.type != "cpu" and not self._bounded:
            raise ConfigError(
                "SGLang sizes the cache by the host's memory, and hal keeps it on a device", "pass --max-total-tokens"
            )
        pages = -(-model_runner.token_to_kv_pool.size // self.backend.block_size)
        self._runner = hal.Runner(
            self._model,
            self.backend,
            max_sequences=model_runner.max_running_requests,
            max_length=model_runner.model_config.context_len,
            num_blocks=1 + pages,
        )
        self._req_to_token = model_runner.req_to_token_pool.req_to_token

    def replace(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write new weights, as :func:`hal.replace_weights`. SGLang runs no step meanwhile, and flushes its cache."""
        hal.replace_weights(self._runner, weights)

    def run(self, forward_batch: Any) -> LogitsProcessorOutput:
        """Run a step of SGLang's.

        Raises:
            BatchError: the batch has what hal does not read, or as :meth:`hal.step.Batch.from_tensors`.
        """
        for name, what in UNREAD.items():
            if getattr(forward_batch, name, None) is not None:
                raise _unread(what)
        asked = num_logits(forward_batch)
        batch = batch_of(forward_batch, self._req_to_token, self._runner)
        counts = batch.query_start_loc_host.diff().tolist()
        logits = self._runner.step(batch, last_rows(counts, asked)).logits
        with self.backend.translating_errors():
            # float32 on the host is copied, too: SGLang's sampler writes into it, which torch forbids for the runner's,
            # an inference tensor.
            host = logits.to("cpu", torch.float32, copy=True)
        return output_of(forward_batch, host, asked, self._scores)


class HalForCausalLM(nn.Module):
    """A model that hal loads and runs. It has no parameters that SGLang sees.

    Args:
        config: the checkpoint's configuration, as transformers reads it. hal reads the checkpoint's own file.
        quant_config: SGLang's reading of a quantized checkpoint, which hal does not use.
    """

    steps: HalSteps

    def __init__(self, config: Any, quant_config: Any = None) -> None:
        super().__init__()
        self.config = config
        self._dtype = torch.get_default_dtype()  # SGLang creates models under theirs.

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the checkpoint with hal, or write new weights into the running model.

        Args:
            weights: tensors by their names in the checkpoint. They are not read if no model is loaded: hal reads the
                checkpoint's files.

        Raises:
            ConfigError: hal's configuration is invalid.
            CheckpointError: as :func:`hal.load_model`, or as :func:`hal.replace_weights`.
            ModelError: a layer keeps anything but a key and a value per token.
        """
        if "steps" in vars(self):
            self.steps.replace(weights)
        else:
            self.steps = HalSteps(get_context().server_args, self._dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor | None = None
    ) -> LogitsProcessorOutput:
        """Run a step. ``forward_batch`` has all arguments."""
        return self.steps.run(forward_batch)

    def get_input_embeddings(self) -> nn.Module:
        """Refuse to embed tokens, some of which SGLang would replace then.

        Raises:
            BatchError: always.
        """
        raise _unread(UNREAD["replace_embeds"])


def _unread(what: str) -> BatchError:
    return BatchError(f"a request to SGLang has {what}, which hal does not support", "send token ids only")


EntryClass = [type(name, (HalForCausalLM,), {}) for name in hal.architectures()]


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
