"""What a step gives vLLM's scheduler: it is copied to the host while the next step runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from torch import Tensor
from vllm import envs
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput, SamplerOutput

import hal
from hal.engines.vllm.request import Request
from hal.errors import NumericsError


class StepOutput(AsyncModelRunnerOutput):
    """The tokens of a step, on their way to the host.

    Threading: vLLM may call :meth:`get_output` in another thread than the worker's.

    Args:
        backend: the backend that ran the step.
        requests: those of the step.
        ending: those of them that got a token. It takes the log-probabilities of their prompts from them: vLLM
            accepts these only in a step that returns a token.
        sampled: their tokens; None if there are none.
        nans: ``[len(ending)]``, the number of NaN in the logits of each; None if they are not counted.
    """

    def __init__(
        self,
        backend: hal.Backend,
        requests: Sequence[Request],
        ending: Sequence[Request],
        sampled: SamplerOutput | None,
        nans: Tensor | None = None,
    ) -> None:
        self.ending = ending
        self._names = [each.name for each in requests]
        self._prompts: dict[str, list[LogprobsTensors]] = {}
        for each in ending:
            if each.prompt_logprobs:
                self._prompts[each.name], each.prompt_logprobs = each.prompt_logprobs, []
        logprobs = None if sampled is None else sampled.logprobs_tensors
        self._logprobs = None if logprobs is None else logprobs.to_cpu_nonblocking()
        tokens = None if sampled is None else sampled.sampled_token_ids
        copied = [each for each in (tokens, nans) if each is not None]
        self._copy = hal.HostCopy(backend, *copied)  # behind the log-probabilities

    @property
    def arrived(self) -> bool:
        """Whether the tokens are on the host."""
        return self._copy.arrived

    @cached_property
    def tokens(self) -> list[int]:
        """The tokens of ``ending``. Waits for them."""
        sampled = self._copy.wait()
        return sampled[0].flatten().tolist() if sampled else []

    def get_output(self) -> ModelRunnerOutput:
        """Return what the scheduler reads. Waits for it.

        Raises:
            NumericsError: logits have a NaN, and ``VLLM_RAISE_ON_LOGIT_NANS`` is set.
        """
        tokens = {request.name: [token] for request, token in zip(self.ending, self.tokens, strict=True)}
        found = [tokens.get(name, []) for name in self._names]
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.tolists([0, *accumulate(map(len, found))])
        counted = self._copy.wait()[1:]
        nans = dict(zip(tokens, counted[0].tolist(), strict=True)) if counted else None
        if nans and any(nans.values()) and getattr(envs, "VLLM_RAISE_ON_LOGIT_NANS", False):
            raise NumericsError(
                f"the logits of {', '.join(name for name, count in nans.items() if count)!s:.200} have a NaN",
                "look for its origin with hal's debug mode, or unset VLLM_RAISE_ON_LOGIT_NANS",
            )
        return ModelRunnerOutput(
            req_ids=self._names,
            req_id_to_index={name: index for index, name in enumerate(self._names)},
            sampled_token_ids=found,
            logprobs=logprobs,
            prompt_logprobs_dict={name: LogprobsTensors.cat(parts) for name, parts in self._prompts.items()},
            num_nans_in_logits=nans,
        )

    def get_kv_connector_output(self) -> None:
        """Return None: hal has no KV connector. vLLM asks for it from 0.33 on."""
