"""From the output of vLLM's scheduler to hal's batches, and from logits to what the scheduler reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask

import hal
from hal.engines.vllm.request import Request, Requests
from hal.engines.vllm.sampling import Sampling
from hal.engines.vllm.step_output import StepOutput


@attrs.frozen(eq=False)
class _Step:
    """A step that ran, and whose tokens are not chosen yet. ``ends`` are the rows that get a token."""

    scheduled: Any
    names: list[str]
    ends: list[int]
    logits: Tensor


class HalModelRunner:
    """Runs vLLM's steps.

    Args:
        vllm_config: vLLM's configuration.
        runner: hal's runner.
    """

    def __init__(self, vllm_config: Any, runner: hal.Runner) -> None:
        self.runner, self._device = runner, runner.backend.device.torch
        rows = 2 * vllm_config.scheduler_config.max_num_seqs  # Preempted requests keep their rows while there is room.
        self.requests = Requests(runner.input_batch(rows), self._device)
        self._sampler = Sampler(logprobs_mode=vllm_config.model_config.logprobs_mode)
        self._sampling = Sampling(vllm_config, self._device, runner.model.vocab_size)
        self._step: _Step | None = None
        self._running: StepOutput | None = None  # whose tokens the requests do not have yet

    def execute_model(self, scheduled: Any) -> Any:
        """Run the step that vLLM's scheduler asks for. Its tokens are chosen by :meth:`sample_tokens`."""
        if self._running is not None and (self._running.arrived or self.requests.restarts(scheduled)):
            self._settle()
        self.requests.update(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        names, counts = list(scheduled.num_scheduled_tokens), list(scheduled.num_scheduled_tokens.values())
        requests = [self.requests[name] for name in names]
        stops = [each.computed + count for each, count in zip(requests, counts, strict=True)]
        finishes = [
            stop == len(each.prompt) + len(each.outputs) for each, stop in zip(requests, stops, strict=True)
        ]  # the others are in the middle of their prompts
        scores = [each.to_score(stop) for each, stop in zip(requests, stops, strict=True)]
        asked = [count if score else int(last) for count, score, last in zip(counts, scores, finishes, strict=True)]
        batch = self.requests.inputs.batch(
            None if set(counts) == {1} else counts,
            rows=self.requests.rows(names),
            num_logits=None if set(asked) == {1} else asked,
        )
        logits = self.runner.step(batch).logits
        if any(scores):
            logits = self._score(requests, scores, asked, finishes, logits)
        self.requests.advance(names, counts)
        self._step = _Step(scheduled, names, [row for row, last in enumerate(finishes) if last], logits)
        return None

    def _score(
        self, requests: list[Request], scores: list[int], asked: list[int], finishes: list[bool], logits: Tensor
    ) -> Tensor:
        """Keep the log-probabilities of prompts, and return the logits of the rows that get a token."""
        kept, start = [], 0
        with self.runner.backend.explaining(), torch.inference_mode():
            for request, score, rows, last in zip(requests, scores, asked, finishes, strict=True):
                if score:
                    first = max(request.scored - request.computed, 0)
                    begin = request.computed + first + 1
                    targets = torch.tensor(request.prompt[begin : begin + score], device=self._device)
                    at = start + first
                    logprobs = self._sampler.compute_logprobs(logits[at : at + score])
                    found = self._sampler.gather_logprobs(logprobs, request.params.prompt_logprobs, targets)
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
        self._settle()  # Penalties read the tokens of the step before. The device runs this one meanwhile.
        step, self._step = self._step, None
        names = [step.names[row] for row in step.ends]
        with self.runner.backend.explaining(), torch.inference_mode():
            sampled = None
            if names:
                if grammar is not None:
                    apply_grammar_bitmask(step.scheduled, grammar, SimpleNamespace(req_ids=names), step.logits)
                sampled = self._sampler(step.logits, self._sampling.metadata([self.requests[each] for each in names]))
            prompts = self.requests.scored_prompts(step.names)
            output = self._running = StepOutput(self.runner.backend, step.names, step.ends, sampled, prompts)
            if output.arrived:
                self._settle()
            elif sampled is not None:
                self.requests.defer(names, sampled.sampled_token_ids.view(-1))
        return output

    def _settle(self) -> None:
        """Take in the tokens of the last step, once they are on the host."""
        output, self._running = self._running, None
        if output is not None:
            for row in output.ends:
                self.requests.settle(output.names[row], output.tokens[row])
