"""From the output of vLLM's scheduler to hal's batches, and from logits to vLLM's output of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor
from vllm import envs
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from vllm.v1.structured_output.utils import apply_grammar_bitmask

import hal
from hal.engines.vllm.cache_groups import VllmGroups, move_pages
from hal.engines.vllm.request import Request, Requests
from hal.engines.vllm.sampling import HalSampler, Sampling, num_logprobs
from hal.errors import NumericsError
from hal.generation.prompt_inputs import PromptInputs, step_fields
from hal.step import NONE, last_rows


@attrs.frozen(eq=False)
class _Step:
    """A step that ran, and whose tokens are not chosen yet.

    ``logits`` are those of the requests that get a token; None if none does.
    """

    scheduled: Any
    requests: list[Request]
    finishes: list[bool]
    logits: Tensor | None


class HalModelRunner:
    """Runs vLLM's steps.

    Args:
        groups: vLLM's cache groups; None if there is one.
    """

    def __init__(self, vllm_config: Any, runner: hal.Runner, groups: VllmGroups | None = None) -> None:
        self.runner, self._device = runner, runner.backend.device.torch
        rows = 2 * vllm_config.scheduler_config.max_num_seqs  # Preempted requests keep their rows while there is room.
        model_config = vllm_config.model_config
        replica = vllm_config.parallel_config.data_parallel_index
        self.requests = Requests(
            runner.input_batch(rows),
            f"{model_config.seed}, replica {replica}",
            groups,
            partial(PromptInputs.of, runner),
        )
        self._groups = groups
        self.sampler = HalSampler(model_config.logprobs_mode, runner.backend)
        self._sampling = Sampling(vllm_config, self._device, runner.model.vocab_size)
        self._counts_nans = envs.VLLM_COMPUTE_NANS_IN_LOGITS  # vLLM reads the environment each time.
        self._step: _Step | None = None
        self._failure: Exception | None = None
        self._running: StepOutput | None = None  # whose tokens the requests do not have yet

    def execute_model(self, scheduled: Any) -> Any:
        """Run the step that vLLM's scheduler asks for. Its tokens are chosen by :meth:`sample_tokens`."""
        if self._failure is not None:  # vLLM starts this step before it reads the last one's failure.
            raise self._failure
        if self._running is not None and (self._running.arrived or self.requests.restarts(scheduled)):
            self._settle()
        self.requests.update(scheduled)
        if self._groups is not None:
            with self.runner.backend.translating_errors():
                names = scheduled.num_scheduled_tokens
                move_pages(self._groups, self.runner.states, scheduled, self.requests.running(names))
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        requests = self.requests.running(scheduled.num_scheduled_tokens)
        counts = [scheduled.num_scheduled_tokens[each.name] for each in requests]
        finishes = [
            each.computed + count == len(each.prompt) + len(each.outputs)
            for each, count in zip(requests, counts, strict=True)
        ]  # the others are in the middle of their prompts
        scores = [each.to_score(count) for each, count in zip(requests, counts, strict=True)]
        asked = [count if score else int(last) for count, score, last in zip(counts, scores, finishes, strict=True)]
        inputs, cached = self.requests.inputs, [each.computed for each in requests]
        batch = inputs.batch(
            None if set(counts) == {1} else counts,
            rows=None if len(requests) == len(inputs) else [each.row for each in requests],
            cached=cached,
            **step_fields(self.runner, [each.inputs for each in requests], cached, counts),
        )
        wanted = last_rows(counts, asked)
        found = self.runner.step(batch, wanted)
        logits = None if wanted is NONE else found.logits
        if logits is not None and any(scores):
            logits = self._score(requests, scores, asked, finishes, logits)
        self._step = _Step(scheduled, requests, finishes, logits)
        return None

    def _score(
        self, requests: list[Request], scores: list[int], asked: list[int], finishes: list[bool], logits: Tensor
    ) -> Tensor:
        """Keep the log-probabilities of prompts, and return the logits of the rows that get a token."""
        kept, start = [], 0
        with self.runner.backend.translating_errors(), torch.inference_mode():
            for request, score, rows, last in zip(requests, scores, asked, finishes, strict=True):
                if score:
                    first = max(request.scored - request.computed, 0)
                    begin = request.computed + first + 1
                    targets = torch.tensor(request.prompt[begin : begin + score], device=self._device)
                    at = start + first
                    logprobs = logits[at : at + score].float()
                    if self.sampler.logprobs_mode.endswith("logprobs"):
                        logprobs = self.sampler.compute_logprobs(logprobs)
                    asked_of_each = num_logprobs(request.params.prompt_logprobs, logprobs.shape[-1])
                    found = self.sampler.gather_logprobs(logprobs, asked_of_each, targets)
                    request.prompt_logprobs.append(found.to_cpu_nonblocking())
                    request.scored = begin - 1 + score
                start += rows
                if last:
                    kept.append(start - 1)
            return logits[kept]

    def sample_tokens(self, grammar: Any) -> Any:
        """Choose the tokens of the last step. They stay on the device, where the next step reads them.

        Returns:
            None if the step has failed, as vLLM asks for.
        """
        if self._step is None:
            return None
        try:
            step, self._step = self._step, None
            return self._sample(step, grammar)
        except Exception as error:
            self._failure = error
            raise

    def _sample(self, step: _Step, grammar: Any) -> StepOutput:
        self._settle()  # Penalties read the tokens of the step before. The device runs this one meanwhile.
        ending = [each for each, last in zip(step.requests, step.finishes, strict=True) if last]
        with self.runner.backend.translating_errors(), torch.inference_mode():
            sampled = nans = None
            if step.logits is not None and ending:
                if self._counts_nans:
                    nans = step.logits.isnan().sum(-1)
                if grammar is not None:
                    rows = SimpleNamespace(req_ids=[each.name for each in ending])
                    apply_grammar_bitmask(step.scheduled, grammar, rows, step.logits)
                sampled = self.sampler(step.logits, self._sampling.metadata(ending))
            output = self._running = StepOutput(self.runner.backend, step.requests, ending, sampled, nans)
            if output.arrived:
                self._settle()
            elif sampled is not None:
                self.requests.defer(ending, sampled.sampled_token_ids.view(-1))
        return output

    def _settle(self) -> None:
        """Take in the tokens of the last step, once they are on the host."""
        output, self._running = self._running, None
        if output is not None:
            self.requests.settle(output.ending, output.tokens)


class StepOutput(AsyncModelRunnerOutput):
    """The tokens of a step, on their way to the host.

    Threading: vLLM may call :meth:`get_output` in another thread than the worker's.

    Args:
        backend: the backend that ran the step.
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
