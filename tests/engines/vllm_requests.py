"""Runs random requests through vLLM, and compares their tokens with hal.generate's.

The argument is JSON with ``checkpoint``, ``hal`` (hal's configuration), ``vllm`` (further arguments of ``vllm.LLM``),
``dtype``, ``block`` (tokens per block), ``seed``, ``requests``, and ``out``, the file for the result. test_vllm.py runs
it in a separate process.
"""

from __future__ import annotations

import json
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm_counts import resumed
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, allocate_token_bitmask

import hal
from hal.engines.vllm.step_output import StepOutput
from hal.engines.vllm.worker import HalWorker

LONGEST, CACHED = 704, 1024
TIE = 0.02
"""The difference of two logits, of up to 12, that rounding to float16 in the layers may turn."""
CLOSE = 0.02
"""The difference of two log-probabilities that rounding to float16 in the layers may make."""
STEPS: Counter[str] = Counter()
"""Steps of this worker with prompts and running sequences, chunks of prompts, resumed requests, prompts with a cached
prefix, steps before which several requests ended, and steps that started before the tokens of the step before were on
the host."""


class CountingWorker(HalWorker):
    """Counts what the scheduler asks for."""

    output: StepOutput | None = None

    def execute_model(self, scheduler_output: Any) -> Any:
        """Count, and run the step."""
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        decoding = {name for name, done in zip(cached.req_ids, cached.num_output_tokens, strict=True) if done}
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            STEPS["mixed"] += bool(decoding) and len(decoding) < len(scheduled)
            STEPS["decode"] += len(decoding) == len(scheduled)
            STEPS["chunks"] += len(cached.req_ids) - len(decoding)
            STEPS["resumed"] += resumed(scheduler_output)
            STEPS["ended together"] += len(scheduler_output.finished_req_ids) > 1
            STEPS["prefix hits"] += sum(each.num_computed_tokens > 0 for each in new)
            STEPS["ahead"] += self.output is not None and not self.output.arrived
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep the output, and on a host, where it is there at once, a checksum of the tokens."""
        output = super().sample_tokens(grammar_output)
        self.output = output if isinstance(output, StepOutput) else None
        if self.output is not None and self.device.type == "cpu":
            STEPS["checksum"] = zlib.crc32(json.dumps(self.output.tokens).encode(), STEPS["checksum"])
        return output

    def counted(self) -> dict[str, int]:
        """Return the counts of this rank, with how many ranks it works, and what was drafted."""
        drafting = self.model_runner.drafting
        drafts = {} if drafting is None else attrs.asdict(drafting.acceptance)
        return {**STEPS, "ranks": self.backend.mesh.size, **drafts}


def drafted(engine: LLM) -> dict[str, Any]:
    """Return what vLLM counted of drafts: their number, that of accepted ones, and the latter by place."""
    found = {each.name.removeprefix("vllm:spec_decode_"): each for each in engine.get_metrics()}
    places = found.get("num_accepted_tokens_per_pos")
    return {
        "drafted": found["num_draft_tokens"].value,
        "accepted": found["num_accepted_tokens"].value,
        "by place": [] if places is None else places.values,
    }


def agree(checkpoint: str, prompt: list[int], one: list[int], other: list[int], adapter: str | None = None) -> bool:
    """Return whether tokens are the same up to a tie of the logits, which are computed in float32 on the CPU."""
    at = next((k for k, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return len(one) == len(other)
    tokens, fields = prompt + one[:at], dict[str, Tensor]()
    config = {"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 1024}}
    if adapter is not None:
        config["adapters"] = {"slots": 1}
    with hal.open(config, activate=False) as backend:
        model = hal.load_model(checkpoint, backend)
        if adapter is not None:
            model.adapters.load("own", adapter)
            fields["adapter_slots"] = torch.zeros(len(tokens), dtype=torch.int32)
        runner = hal.Runner(model, backend)
        blocks = list(range(1, 1 + runner.spec.blocks_for(len(tokens))))
        logits = runner.step(runner.batch([tokens], [blocks], **fields)).logits[0]
        return abs(float(logits[one[at]] - logits[other[at]])) < TIE


def by_hal(params: SamplingParams, grammars: GrammarCompiler, eos: int) -> hal.SamplingParams:
    """Return hal's sampling parameters for vLLM's."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    same = {name: getattr(params, name) for name in names}
    if (structure := params.structured_outputs) is not None:
        same["mask"] = Follows(grammars.compile_regex(structure.regex))
    if params.logprobs is not None:
        same["logprobs"] = params.logprobs
    if not params.ignore_eos:
        same["stop_token_ids"] = {eos}
    return hal.SamplingParams(max_new_tokens=params.max_tokens, seed=params.seed or 0, **same)


class Follows:
    """The mask of a grammar for :class:`hal.SamplingParams`."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.matcher, self.seen, self.vocab_size = GrammarMatcher(grammar), 0, grammar.tokenizer_info.vocab_size

    def __call__(self, generated: Sequence[int]) -> Tensor:
        """Take in the new tokens, and return those that may follow."""
        for token in generated[self.seen :]:
            assert self.matcher.accept_token(token)
        self.seen = len(generated)
        mask = allocate_token_bitmask(1, self.vocab_size)
        self.matcher.fill_next_token_bitmask(mask)
        return mask[0]


def main() -> None:
    """Run the requests, compare, and write what was found."""
    asked = json.loads(sys.argv[1])
    draw = random.Random(asked["seed"])
    vocabulary = json.loads((Path(asked["checkpoint"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prefixes = [[draw.randrange(5, vocabulary) for _ in range(200)] for _ in range(3)]
    prompts, params, kinds = [], [], []
    counts: Counter[str] = Counter()
    for index in range(asked["requests"]):
        length = draw.choice((draw.randint(1, 40), draw.randint(1, 600)))
        prompt = [draw.randrange(5, vocabulary) for _ in range(length)]
        if draw.random() < 0.4:
            prefix = draw.choice(prefixes)
            prompt = (prefix + prompt)[:600]
        prompts.append(prompt)
        new = draw.choice((1, 10, 20, 30, 40))  # few lengths, so that requests end together
        given: dict[str, Any] = {"temperature": 0.0, "max_tokens": new, "ignore_eos": True}
        # In 16 bits, a draw may fall between two tokens whose probabilities rounding moves.
        seed = "seed" if asked["dtype"] == "float32" else "greedy"
        kind = draw.choice(("greedy",) * 5 + (seed, "random", "penalties", "logprobs", "prompt logprobs", "regex"))
        if kind == "seed":
            given |= {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": index}
        elif kind == "random":
            given |= {"temperature": 0.9}
        elif kind == "penalties":
            given |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
        elif kind == "logprobs":
            given |= {"logprobs": 3}
        elif kind == "prompt logprobs":
            given |= {"prompt_logprobs": 1}
        elif kind == "regex":
            given |= {"structured_outputs": StructuredOutputsParams(regex=r"[a-f]{3}[0-9]{2,4}")}
            given["ignore_eos"] = False
        params.append(SamplingParams(**given))
        kinds.append(kind)
        counts[kind] += 1
    same = {
        "model": asked["checkpoint"],
        "max_model_len": LONGEST,
        "block_size": asked["block"],
        "dtype": asked["dtype"],
        "worker_cls": f"{__name__}.CountingWorker",
    }
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    engine = LLM(
        **same,
        additional_config={"hal": asked["hal"]},
        max_num_seqs=8,
        max_num_batched_tokens=96,
        num_gpu_blocks_override=CACHED // asked["block"],
        enable_prefix_caching=True,
        disable_log_stats=False,
        **asked.get("vllm", {}),
    )
    start = time.perf_counter()
    found = engine.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    wrong, ties = list[str](), list[int]()
    first, *others = engine.collective_rpc("counted")
    if any(each["checksum"] != first["checksum"] for each in others if "checksum" in first):
        wrong.append("the ranks drew different tokens")
    # Those without a seed get another one in each engine.
    alone = {name: each for name, each in asked["hal"].items() if name != "parallel"}
    backend = hal.open({**alone, "dtype": asked["dtype"], "cache": {"num_tokens": 8192}})
    runner = hal.Runner(hal.load_model(asked["checkpoint"], backend), backend)
    tokenizer = engine.get_tokenizer()
    grammars = GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer, vocab_size=runner.model.vocab_size))
    chosen = [index for index, each in enumerate(kinds) if each != "random"]
    expected: dict[int, list[int]] = {index: [] for index in chosen}
    likely: dict[int, list[float]] = {index: [] for index in chosen}
    wanted = [by_hal(params[index], grammars, tokenizer.eos_token_id) for index in chosen]
    for token in hal.generate(runner, [prompts[index] for index in chosen], wanted):
        expected[chosen[token.prompt_index]].append(token.token_id)
        likely[chosen[token.prompt_index]].append(token.logprob)
    for index, output in enumerate(found):
        tokens = list(output.outputs[0].token_ids)
        if tokens != expected.get(index, tokens):
            if agree(asked["checkpoint"], prompts[index], tokens, expected[index]):
                ties.append(index)
                continue
            wrong.append(f"request {index} ({params[index]}): {tokens}, not {expected[index]}")
        if params[index].logprobs is not None:
            pairs = zip(tokens, output.outputs[0].logprobs, strict=True)
            own = [each[token].logprob for token, each in pairs]
            if max(abs(one - other) for one, other in zip(own, likely[index], strict=True)) > CLOSE:
                wrong.append(f"request {index} has the log-probabilities {own}, and not {likely[index]}")
        if params[index].prompt_logprobs is not None:
            count = len(output.prompt_logprobs)
            if count != len(prompts[index]):
                wrong.append(f"request {index} has {count} log-probabilities for {len(prompts[index])} tokens")
    result = {"counts": {**counts, **first}, "wrong": wrong, "ties": ties, "requests": len(found), "seconds": seconds}
    if "speculative_config" in asked.get("vllm", {}):
        result["vllm"] = drafted(engine)
    Path(asked["out"]).write_text(json.dumps(result), encoding="utf-8")
