"""What a step gives vLLM's scheduler: it is copied to the host while the next step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput, SamplerOutput

import hal


class StepOutput(AsyncModelRunnerOutput):
    """The tokens of a step, on their way to the host.

    Threading: vLLM may call :meth:`get_output` in another thread than the worker's.

    Args:
        backend: the backend that ran the step.
        names: the requests of the step.
        ends: the rows of ``names`` that got a token.
        sampled: their tokens; None if there are none.
        prompts: the log-probabilities of prompts, in parts, which are on their way already.
    """

    def __init__(
        self, backend: hal.Backend, names: list[str], ends: Sequence[int], sampled: SamplerOutput | None,
        prompts: Mapping[str, Sequence[LogprobsTensors]],
    ) -> None:  # fmt: skip
        self.names, self.ends, self._backend, self._prompts = names, ends, backend, prompts
        self._sampled = None if sampled is None else sampled.sampled_token_ids.to("cpu", non_blocking=True)
        logprobs = None if sampled is None else sampled.logprobs_tensors
        self._logprobs = None if logprobs is None else logprobs.to_cpu_nonblocking()
        self._copied = backend.device.event()
        self._copied.record()

    @property
    def arrived(self) -> bool:
        """Whether the tokens are on the host."""
        return self._copied.query()

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The tokens of each request of the step. Waits for them."""
        with self._backend.explaining():
            self._copied.synchronize()
        found: list[list[int]] = [[] for _ in self.names]
        if self._sampled is not None:
            for row, token in zip(self.ends, self._sampled.tolist(), strict=True):
                found[row] = token
        return found

    def get_output(self) -> ModelRunnerOutput:
        """Return what the scheduler reads. Waits for it."""
        tokens = self.tokens
        counts = [0]
        for each in tokens:
            counts.append(counts[-1] + len(each))
        return ModelRunnerOutput(
            req_ids=self.names,
            req_id_to_index={name: index for index, name in enumerate(self.names)},
            sampled_token_ids=tokens,
            logprobs=None if self._logprobs is None else self._logprobs.tolists(counts),
            prompt_logprobs_dict={name: LogprobsTensors.cat(parts) for name, parts in self._prompts.items()},
        )

    def get_kv_connector_output(self) -> None:
        """Return None: hal has no KV connector. vLLM asks for it from 0.33 on."""
