"""What a step ran, and its tokens as vLLM's scheduler reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, islice, takewhile

import attrs
import torch
from torch import Tensor
from vllm import envs
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput, SamplerOutput

import hal
from hal.engines.vllm.request import Request
from hal.errors import NumericsError


def agreed(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many drafted tokens are those that the model chose, up to the first that is not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted, chosen, strict=False)))


@attrs.frozen(eq=False)
class Ran:
    """What a step ran of each request, in the order of its tokens.

    Attributes:
        requests: the requests.
        counts: the number of tokens of each, of which those behind its drafted ones are padding.
        places: how many of them get a token: 0 in the middle of a prompt, else 1 and those scheduled for drafts.
        drafts: the drafted tokens of each.
        output: what it computed, valid until the next step.
    """

    requests: list[Request]
    counts: list[int]
    places: list[int]
    drafts: list[list[int]]
    output: hal.StepOutput


class StepOutput(AsyncModelRunnerOutput):
    """The tokens of a step, on their way to the host.

    Threading: vLLM may call :meth:`get_output` in another thread than the worker's.

    Args:
        backend: the backend that ran the step.
        ran: what it ran. This takes the log-probabilities of prompts from the requests that got a token: vLLM accepts
            them only in a step that returns one.
        sampled: a token for each place; None if there are none.
        nans: ``[places]``, the number of NaN in the logits of each; None if they are not counted.

    Attributes:
        ending: the requests that got a token.
    """

    def __init__(
        self, backend: hal.Backend, ran: Ran, sampled: SamplerOutput | None, nans: Tensor | None = None
    ) -> None:
        self.ran = ran
        self.ending = [each for each, places in zip(ran.requests, ran.places, strict=True) if places]
        self._names = [each.name for each in ran.requests]
        self._prompts: dict[str, list[LogprobsTensors]] = {}
        self._scores: dict[str, list[Tensor]] = {}
        for each in self.ending:
            if each.prompt_logprobs:
                self._prompts[each.name], each.prompt_logprobs = each.prompt_logprobs, []
            if each.token_scores:
                self._scores[each.name], each.token_scores = each.token_scores, []
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
    def tokens(self) -> list[list[int]]:
        """The tokens of each of ``ending``: the right ones of its drafts, and one more. Waits for them."""
        sampled, found = self._copy.wait(), list[list[int]]()
        chosen = iter(sampled[0].flatten().tolist() if sampled else ())
        for drafts, places in zip(self.ran.drafts, self.ran.places, strict=True):
            if own := [*islice(chosen, places)]:
                found.append(own[: 1 + agreed(drafts, own)])
        return found

    def get_output(self) -> ModelRunnerOutput:
        """Return what the scheduler reads. Waits for it.

        Raises:
            NumericsError: logits have a NaN, and ``VLLM_RAISE_ON_LOGIT_NANS`` is set.
        """
        tokens = {request.name: own for request, own in zip(self.ending, self.tokens, strict=True)}
        found = [tokens.get(name, []) for name in self._names]
        ends = accumulate(each for each in self.ran.places if each)
        spans = [
            (end - places, end - places + len(own))
            for end, places, own in zip(ends, filter(None, self.ran.places), self.tokens, strict=True)
        ]
        logprobs = None
        if self._logprobs is not None:
            rows = [row for start, stop in spans for row in range(start, stop)]
            right = LogprobsTensors(*(each[rows] for each in self._logprobs[:3]))
            logprobs = right.tolists([0, *accumulate(map(len, found))])
        counted = self._copy.wait()[1:]
        nans = (
            {name: int(counted[0][slice(*span)].sum()) for name, span in zip(tokens, spans, strict=True)}
            if counted
            else None
        )
        if nans and any(nans.values()) and getattr(envs, "VLLM_RAISE_ON_LOGIT_NANS", False):
            raise NumericsError(
                f"the logits of {', '.join(name for name, count in nans.items() if count)!s:.200} have a NaN",
                "look for its origin with hal's debug mode, or unset VLLM_RAISE_ON_LOGIT_NANS",
            )
        scores = {name: torch.cat(parts) for name, parts in self._scores.items()}
        return ModelRunnerOutput(
            req_ids=self._names,
            req_id_to_index={name: index for index, name in enumerate(self._names)},
            sampled_token_ids=found,
            logprobs=logprobs,
            prompt_logprobs_dict={name: LogprobsTensors.cat(parts) for name, parts in self._prompts.items()},
            num_nans_in_logits=nans,
            **({"prompt_token_id_logprobs_dict": scores} if scores else {}),  # vLLM 0.30 has none.
        )

    def get_kv_connector_output(self) -> None:
        """Return None: a step moves all prefixes itself. vLLM asks for it from 0.33 on."""
