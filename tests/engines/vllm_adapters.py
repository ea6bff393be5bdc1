"""Runs random requests with adapters and without through vLLM, and compares their tokens with hal.generate's.

The argument is JSON with ``checkpoint``, ``adapters`` (their folders), ``hal`` (hal's configuration), ``vllm`` (further
arguments of ``vllm.LLM``), ``dtype``, ``stem`` (the longest common beginning), ``seed``, ``requests``, and ``out``, the
file for the result. test_vllm_adapters.py runs it in another process.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm_counts import resumed
from vllm_requests import agree

import hal
from hal.engines.vllm.worker import HalWorker
from hal.errors import ConfigError

FOUND: Counter[str] = Counter()
RANK = 8


class AdapterWorker(HalWorker):
    """Counts the steps with several adapters, and what is loaded."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Log each adapter that is written."""
        super().initialize_from_config(kv_cache_config)
        adapters = self.model.adapters
        load = adapters.load

        def counted(name: str, folder: str) -> None:
            FOUND["loaded"] += 1
            load(name, folder)

        adapters.load = counted

    def execute_model(self, scheduler_output: Any) -> Any:
        """Count, and run the step."""
        found = super().execute_model(scheduler_output)
        names = scheduler_output.num_scheduled_tokens
        if names:
            step = [each.adapter for each in self.model_runner.requests.running(names)]
            used = {None if each is None else each.lora_int_id for each in step}
            FOUND["together"] = max(FOUND["together"], len(used))
            FOUND["decode"] += len(used) > 1 and len(names) == scheduler_output.total_num_scheduled_tokens
            FOUND["resumed"] += resumed(scheduler_output)
            FOUND["prefix hits"] += sum(each.num_computed_tokens > 0 for each in scheduler_output.scheduled_new_reqs)
        return found

    def counted(self) -> dict[str, int]:
        """Return the counts of this rank, and with how many ranks it works."""
        return {**FOUND, "ranks": self.backend.mesh.size}


def main() -> None:
    """Compare, and write what was found."""
    asked = json.loads(sys.argv[1])
    draw = random.Random(asked["seed"])
    folders: list[str] = asked["adapters"]
    config = json.loads((Path(asked["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
    stems = [[draw.randrange(5, config["vocab_size"]) for _ in range(asked["stem"])] for _ in range(3)]
    prompts, chosen, lengths = [], [], []
    for _ in range(asked["requests"]):
        stem = draw.choice(stems)[: draw.randint(0, asked["stem"])]
        prompts.append([*stem, *(draw.randrange(5, config["vocab_size"]) for _ in range(draw.randint(1, 40)))])
        chosen.append(draw.choice((None, *range(len(folders)))))
        lengths.append(draw.choice((1, 8, 24)))
    engine = LLM(
        model=asked["checkpoint"],
        max_model_len=512,
        dtype=asked["dtype"],
        skip_tokenizer_init=True,
        worker_cls=f"{__name__}.{AdapterWorker.__name__}",
        additional_config={"hal": asked["hal"]},
        max_num_seqs=8,
        max_num_batched_tokens=96,
        enable_prefix_caching=True,
        enable_lora=True,
        max_lora_rank=RANK,
        **asked["vllm"],
    )
    known = [LoRARequest(f"adapter-{index}", 1 + index, folder) for index, folder in enumerate(folders)]

    def tokens(which: list[int | None], requests: list[LoRARequest]) -> list[list[int]]:
        """Return what vLLM generates from the prompts."""
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        given: Any = [{"prompt_token_ids": each} for each in prompts]
        named = [None if each is None else requests[each] for each in which]
        found = engine.generate(given, params, lora_request=named, use_tqdm=False)
        return [[*each.outputs[0].token_ids] for each in found]

    pinned = [None if each is None else 0 if each == 0 else 1 for each in chosen]
    found = {"random": tokens(chosen, known)}
    core, managed = engine.llm_engine, dict[str, Any]()
    managed["loaded"] = sorted(core.list_loras())
    for number in managed["loaded"]:
        core.remove_lora(number)
    managed["removed"] = [*sorted(core.list_loras()), core.remove_lora(1)]
    managed["added"] = [core.add_lora(known[0]), core.pin_lora(1), sorted(core.list_loras())]
    found["pinned"] = tokens(pinned, known)
    managed["pinned"] = 1 in core.list_loras()
    again = LoRARequest("adapter-0", 1, folders[1], load_inplace=True)  # another adapter in the place of the first
    core.add_lora(again)
    engine.reset_prefix_cache()
    found["replaced"] = tokens([0] * len(chosen), known)
    counts = engine.collective_rpc("counted")
    try:
        core.pin_lora(99)
    except (ConfigError, RuntimeError) as error:  # the latter of a worker in another process
        managed["refused"] = str(error)
    alone = {name: each for name, each in asked["hal"].items() if name != "parallel"}
    room = {"slots": len(folders), "rank": RANK}
    backend = hal.open({**alone, "dtype": asked["dtype"], "adapters": room, "cache": {"num_tokens": 8192}})
    model = hal.load_model(asked["checkpoint"], backend)
    for index, folder in enumerate(folders):
        model.adapters.load(str(index), folder)
    runner = hal.Runner(model, backend)

    def expected(which: list[int | None]) -> list[list[int]]:
        wanted = [hal.SamplingParams(max_new_tokens=each) for each in lengths]
        own: list[list[int]] = [[] for _ in prompts]
        names = [None if each is None else str(each) for each in which]
        for token in hal.generate(runner, prompts, wanted, adapters=names):
            own[token.prompt_index].append(token.token_id)
        return own

    named = {"random": chosen, "pinned": pinned, "replaced": [1] * len(chosen)}
    wanted = {kind: expected(which) for kind, which in named.items()}
    plain = expected([None] * len(chosen))
    wrong, ties = {kind: list[str]() for kind in found}, 0
    for kind, which in named.items():
        for index, (own, other, number) in enumerate(zip(found[kind], wanted[kind], which, strict=True)):
            if own == other:
                continue
            if agree(asked["checkpoint"], prompts[index], own, other, None if number is None else folders[number]):
                ties += 1
            else:
                wrong[kind].append(f"{index}: {own}, not {other}")
    changed = sum(own != other for own, other in zip(wanted["random"], plain, strict=True))
    result = {"wrong": wrong, "changed": changed, "ties": ties, "counts": counts, "managed": managed}
    Path(asked["out"]).write_text(json.dumps(result), encoding="utf-8")
