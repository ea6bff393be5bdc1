"""From the output of vLLM's scheduler to hal's batches, and from logits to vLLM's output of a step."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor
from vllm import envs
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds
from vllm.v1.structured_output.utils import apply_grammar_bitmask

import hal
from hal.engines.vllm.adapters import LoadedAdapters
from hal.engines.vllm.cache_groups import VllmGroups, move_pages
from hal.engines.vllm.drafting import Drafting
from hal.engines.vllm.kv_connector import PrefixMover
from hal.engines.vllm.request import Request, Requests
from hal.engines.vllm.sampling import HalSampler, Sampling, num_logprobs, scores_of
from hal.engines.vllm.step_output import Ran, StepOutput
from hal.generation.drafting.drafter import Drafter
from hal.generation.prompt_inputs import PromptInputs, step_fields
from hal.step import NONE, last_rows


@attrs.frozen(eq=False)
class _Step:
    """A step that ran, and whose tokens are not chosen yet.

    ``logits`` are those of the places that get a token; None if none does.
    """

    scheduled: Any
    ran: Ran
    logits: Tensor | None


class HalModelRunner:
    """Runs vLLM's steps.

    Args:
        groups: vLLM's cache groups; None if there is one.
        drafter: drafts tokens; None without speculative decoding.

    Raises:
        ConfigError, ModelError: ``kv_transfer_config`` is set, and the prefixes do not travel.

    Attributes:
        drafting: the drafts of the requests; None without a drafter.
        adapters: the loaded adapters; None without ``enable_lora``.
        mover: moves prefixes; None without ``kv_transfer_config``.
    """

    def __init__(
        self,
        vllm_config: Any,
        runner: hal.Runner,
        groups: VllmGroups | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.runner, self._device = runner, runner.backend.device.torch
        model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        self.drafting: Drafting | None = None
        rows, most = 2 * scheduler.max_num_seqs, 0  # Preempted requests keep their rows while there is room.
        if drafter is not None:
            asynchronous, longest = scheduler.async_scheduling, model_config.max_model_len
            self.drafting = Drafting(runner, drafter, longest=longest, asynchronous=asynchronous)
            rows, most = scheduler.max_num_seqs, drafter.tokens  # A drafter has no more.
        replica = vllm_config.parallel_config.data_parallel_index
        self.sampler = HalSampler(model_config.logprobs_mode, runner.backend)
        self._sampling = Sampling(vllm_config, self._device, runner.model.vocab_size, rows, 1 + most)
        self.adapters = None if vllm_config.lora_config is None else LoadedAdapters(runner)
        self.requests = Requests(
            runner.input_batch(rows, spare=most),
            f"{model_config.seed}, replica {replica}",
            groups,
            partial(PromptInputs.of, runner),
            [each.end for each in (self.drafting, self._sampling.custom) if each is not None],
            self.adapters,
        )
        self._groups = groups
        connected = vllm_config.kv_transfer_config
        self.mover = None if connected is None else PrefixMover(runner, connected)
        self._counts_nans = envs.VLLM_COMPUTE_NANS_IN_LOGITS  # vLLM reads the environment each time.
        self._step: _Step | None = None
        self._failure: Exception | None = None
        self._running: StepOutput | None = None  # whose tokens the requests do not have yet
        self._latest: list[Request] = []  # that got tokens in the last step

    def execute_model(self, scheduled: Any) -> Any:
        """Run the step that vLLM's scheduler asks for. Its tokens are chosen by :meth:`sample_tokens`."""
        if self._failure is not None:  # vLLM starts this step before it reads the last one's failure.
            raise self._failure
        read = self.drafting is not None or (self._running is not None and self._running.arrived)
        if read or self.requests.restarts(scheduled):
            self._settle()
        self.requests.update(scheduled)
        if self._groups is not None:
            with self.runner.backend.translating_errors():
                names = scheduled.num_scheduled_tokens
                move_pages(self._groups, self.runner.states, scheduled, self.requests.running(names))
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        requests = self.requests.running(scheduled.num_scheduled_tokens)
        if self.mover is not None:
            with self.runner.backend.translating_errors():
                self.mover.load(scheduled.kv_connector_metadata, requests)
        counts = [scheduled.num_scheduled_tokens[each.name] for each in requests]
        places, drafts = self._places(scheduled, requests, counts)
        scores = [each.to_score(count) for each, count in zip(requests, counts, strict=True)]
        asked = [count if score else own for count, score, own in zip(counts, scores, places, strict=True)]
        inputs, cached = self.requests.inputs, [each.computed for each in requests]
        batch = inputs.batch(
            None if set(counts) == {1} else counts,
            rows=None if len(requests) == len(inputs) else [each.row for each in requests],
            cached=cached,
            **step_fields(self.runner, [each.inputs for each in requests], cached, counts),
        )
        wanted = last_rows(counts, asked)
        found = self.runner.step(batch, wanted)
        if self.mover is not None:
            with self.runner.backend.translating_errors():
                self.mover.save(scheduled.kv_connector_metadata, requests)
        logits = None if wanted is NONE else found.logits
        if logits is not None and any(scores):
            logits = self._score(requests, scores, asked, places, logits)
        self._step = _Step(scheduled, Ran(requests, counts, places, drafts, found), logits)
        return None

    def _places(self, scheduled: Any, requests: list[Request], counts: list[int]) -> tuple[list[int], list[list[int]]]:
        """Return how many tokens each request gets at most, and its drafted ones, which are in its row then."""
        named = [scheduled.scheduled_spec_decode_tokens.get(each.name, ()) for each in requests]
        places = [
            1 + len(own) if each.computed + count - len(own) == len(each.prompt) + len(each.outputs) else 0
            for each, count, own in zip(requests, counts, named, strict=True)
        ]  # none in the middle of a prompt
        if self.drafting is None:
            return places, [[]] * len(requests)
        drafts = self.drafting.scheduled(named, requests)
        for request, own, given in zip(requests, drafts, named, strict=True):
            if given:  # All steps of as many tokens are alike, so that graphs hold them.
                self.requests.inputs.extend(request.row, [*own, *[0] * (len(given) - len(own))])
        return places, drafts

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafted tokens that follow the last step, as vLLM asks for."""
        if self.drafting is None:
            return None
        self._settle()
        return self.drafting.take(self._latest)

    def _score(
        self, requests: list[Request], scores: list[int], asked: list[int], places: list[int], logits: Tensor
    ) -> Tensor:
        """Keep the log-probabilities of prompts, and return the logits of the places that get a token."""
        kept, start = list[int](), 0
        with self.runner.backend.translating_errors(), torch.inference_mode():
            for request, score, rows, own in zip(requests, scores, asked, places, strict=True):
                if score:
                    first = max(request.scored - request.computed, 0)
                    begin = request.computed + first + 1
                    at = start + first
                    logprobs = logits[at : at + score].float()
                    if self.sampler.logprobs_mode.endswith("logprobs"):
                        logprobs = self.sampler.compute_logprobs(logprobs)
                    if (most := request.params.prompt_logprobs) is not None:
                        targets = torch.tensor(request.prompt[begin : begin + score], device=self._device)
                        found = self.sampler.gather_logprobs(logprobs, num_logprobs(most, logprobs.shape[-1]), targets)
                        request.prompt_logprobs.append(found.to_cpu_nonblocking())
                    if request.given_tokens is not None:
                        given = scores_of(
                            request.given_tokens, request.params.prompt_logprob_start, begin - 1, logprobs
                        )
                        request.token_scores.append(given.to("cpu", non_blocking=True))
                    request.scored = begin - 1 + score
                start += rows
                kept += range(start - own, start)
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
        given = zip(step.ran.requests, step.ran.drafts, step.ran.places, strict=True)
        ending = [(request, drafts, places) for request, drafts, places in given if places]
        with self.runner.backend.translating_errors(), torch.inference_mode():
            sampled = nans = None
            if step.logits is not None and ending:
                if self._counts_nans:
                    nans = step.logits.isnan().sum(-1)
                if grammar is not None:
                    rows = SimpleNamespace(req_ids=[request.name for request, *_ in ending])
                    apply_grammar_bitmask(step.scheduled, grammar, rows, step.logits)
                chosen = [place for request, drafts, places in ending for place in request.places(drafts, places)]
                sampled = self.sampler(step.logits, self._sampling.metadata(chosen))
            output = self._running = StepOutput(self.runner.backend, step.ran, sampled, nans)
            if output.arrived:
                self._settle()
            elif sampled is not None and self.drafting is None:
                self.requests.defer(output.ending, sampled.sampled_token_ids.view(-1))
        return output

    def _settle(self) -> None:
        """Take in the tokens of the last step, once they are on the host."""
        output, self._running = self._running, None
        if output is None:
            return
        if self.drafting is None:
            self.requests.settle(output.ending, [own[0] for own in output.tokens])
            return
        self._latest = output.ending
        self.drafting.ran(output.ran, output.tokens)
        for request, tokens in zip(output.ending, output.tokens, strict=True):
            self.requests.accept(request, tokens)
