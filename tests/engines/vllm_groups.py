"""Runs random requests of models in several cache groups through vLLM, and compares their tokens with hal.generate's.

The argument is JSON with ``checkpoint``, ``hal`` (hal's configuration), ``vllm`` (further arguments of ``vllm.LLM``),
``dtype``, ``longest`` (tokens of a sequence), ``requests``, ``blocks`` (of vLLM's cache), ``seed``, and ``out``, the
file for the result. test_vllm_groups.py runs it in another process.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm_counts import resumed

import hal
from hal.engines.vllm.worker import HalWorker

FOUND: Counter[str] = Counter()


def logits_after(runner: hal.Runner, tokens: list[int]) -> torch.Tensor:
    """Return the logits after ``tokens`` in one step, on the CPU."""
    blocks = list(range(1, 1 + runner.spec.blocks_for(len(tokens))))
    slots = runner.slots.take(1) if runner.slots.needed else None
    batch = runner.batch([tokens], [blocks], **({} if slots is None else {"slots": slots}))
    logits = runner.step(batch).logits[0].float().clone().cpu()
    if slots is not None:
        runner.slots.give_back(slots)
    return logits


class GroupWorker(HalWorker):
    """Fills pages that no request has with NaN, and counts what the scheduler asks for."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Keep the groups, and fill all pages."""
        super().initialize_from_config(kv_cache_config)
        states = self.model_runner.runner.states
        FOUND["groups"], FOUND["blocks"] = len(kv_cache_config.kv_cache_groups), kv_cache_config.num_blocks
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in states.pages}
        FOUND["bytes"] = sum(storages.values())
        FOUND["counted bytes"] = max(each.size for each in kv_cache_config.kv_cache_tensors)
        with torch.inference_mode():
            for page in states.pages:
                page[1:] = -1 if page.dtype == torch.int32 else float("nan")  # -1 is a NaN in every dtype

    def execute_model(self, scheduler_output: Any) -> Any:
        """Count, and run the step."""
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        decoding = {name for name, done in zip(cached.req_ids, cached.num_output_tokens, strict=True) if done}
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            FOUND["mixed"] += bool(decoding) and len(decoding) < len(scheduled)
            FOUND["decode"] += len(decoding) == len(scheduled)
            FOUND["chunks"] += len(cached.req_ids) - len(decoding)
            FOUND["resumed"] += resumed(scheduler_output)
            FOUND["prefix hits"] += sum(each.num_computed_tokens > 0 for each in new)
            FOUND["zeroed"] += len(scheduler_output.new_block_ids_to_zero or ())
            FOUND["block copies"] += len(scheduler_output.kv_cache_block_copies or ())
            FOUND["together"] = max(FOUND["together"], len(scheduled))
        return super().execute_model(scheduler_output)

    def counted(self) -> dict[str, int]:
        """Return the counts of this rank, and with how many ranks it works."""
        return {**FOUND, "ranks": self.backend.mesh.size}


def main() -> None:
    """Compare, and write what was found."""
    asked = json.loads(sys.argv[1])
    draw = random.Random(asked["seed"])
    longest, new = asked["longest"], asked.get("new", 24)
    vocabulary = json.loads((Path(asked["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
    size = vocabulary.get("text_config", vocabulary)["vocab_size"]
    stems = [[draw.randrange(5, size) for _ in range(longest - new - 8)] for _ in range(4)]
    prompts = [
        draw.choice(stems)[: draw.randint(1, longest - new - 8)]
        + [draw.randrange(5, size) for _ in range(draw.randint(1, 7))]
        for _ in range(asked["requests"])
    ]
    lengths = [draw.randint(1, new) for _ in prompts]
    engine = LLM(
        model=asked["checkpoint"],
        max_model_len=longest,
        dtype=asked["dtype"],
        skip_tokenizer_init=True,
        worker_cls=f"{__name__}.{GroupWorker.__name__}",
        additional_config={"hal": asked["hal"]},
        **asked["vllm"],
    )
    params = [SamplingParams(temperature=0.0, max_tokens=each, ignore_eos=True, detokenize=False) for each in lengths]
    given: Any = [{"prompt_token_ids": each} for each in prompts]
    found = engine.generate(given, params, use_tqdm=False)
    counts = engine.collective_rpc("counted")
    backend = hal.open(
        {**asked["hal"], "dtype": asked["dtype"], "cache": {**asked["hal"].get("cache", {}), "num_tokens": 16384}}
    )
    runner = hal.Runner(hal.load_model(asked["checkpoint"], backend), backend)
    expected: list[list[int]] = [[] for _ in prompts]
    of_prompt = [hal.SamplingParams(max_new_tokens=each) for each in lengths]
    for token in hal.generate(runner, prompts, of_prompt):
        expected[token.prompt_index].append(token.token_id)
    exact = hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 1024}}, activate=False)
    precise = hal.Runner(hal.load_model(asked["checkpoint"], exact), exact)
    wrong, ties = [], []
    for index, (output, wanted) in enumerate(zip(found, expected, strict=True)):
        tokens = [*output.outputs[0].token_ids]
        if tokens == wanted:
            continue
        at = next(place for place, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1])
        logits = logits_after(precise, prompts[index] + wanted[:at])
        apart = abs(float(logits[tokens[at]] - logits[wanted[at]]))
        error = float((logits_after(runner, prompts[index] + wanted[:at]) - logits).abs().max())
        if asked["dtype"] != "float32" and apart <= 2 * error:  # Rounding may turn them.
            ties.append([round(apart, 5), round(error, 5), at])
        else:
            wrong.append(
                f"prompt {index} of {len(prompts[index])}: {tokens} and {wanted}, apart {apart} at {at}, {error}"
            )
    Path(asked["out"]).write_text(json.dumps({"wrong": wrong, "ties": ties, "counts": counts}), encoding="utf-8")


if __name__ == "__main__":
    main()
