"""Programs of several processes, which test_vllm.py runs: copies of a model, and a rank that is killed.

The argument is JSON with ``checkpoint``, ``hal`` (hal's configuration), ``vllm`` (further arguments of vLLM), and
``out``, the file for the result.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_requests import agree

import hal

PROMPTS = 24
TOKENS = 40, 4
"""The tokens of prompts in turn, so that the second of two replicas soon has none left."""


def _read() -> tuple[dict[str, Any], list[list[int]]]:
    asked = json.loads(sys.argv[1])
    vocabulary = json.loads((Path(asked["checkpoint"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    draw = random.Random(asked.get("seed", 1))
    return asked, [[draw.randrange(5, vocabulary) for _ in range(draw.randint(1, 90))] for _ in range(PROMPTS)]


def _arguments(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": asked["checkpoint"],
        "max_model_len": 256,
        "dtype": asked.get("dtype", "float32"),
        "worker_cls": "vllm_requests.CountingWorker",
        "num_gpu_blocks_override": 128,
        "additional_config": {"hal": asked["hal"]},
        **asked["vllm"],
    }


def _write(asked: dict[str, Any], **found: Any) -> None:
    Path(asked["out"]).write_text(json.dumps(found), encoding="utf-8")


async def _answers(
    asked: dict[str, Any], prompts: list[list[int]], replicas: int
) -> tuple[list[list[int]], list[list[int]], dict[str, int]]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**_arguments(asked)))

    async def answer(name: str, prompt: list[int], rank: int, temperature: float, count: int) -> list[int]:
        params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name, data_parallel_rank=rank):
            last = output
        return list(last.outputs[0].token_ids)

    try:
        answers = await asyncio.gather(
            *(
                answer(str(index), prompt, index % replicas, 0.0, TOKENS[index % 2])
                for index, prompt in enumerate(prompts)
            )
        )
        # Each replica has had as many requests before, so that equal seeds would show.
        drawn = await asyncio.gather(*(answer(f"drawn {rank}", [9, 10], rank, 1.0, 20) for rank in range(replicas)))
        (counts,) = await engine.collective_rpc("counted")
        return answers, drawn, counts
    finally:
        engine.shutdown()


def replicas() -> None:
    """Send each replica its share of the prompts, and compare the tokens with those of hal.generate.

    Write what each draws for one prompt without a seed, too.
    """
    asked, prompts = _read()
    found, drawn, counts = asyncio.run(_answers(asked, prompts, asked["vllm"]["data_parallel_size"]))
    alone = {name: each for name, each in asked["hal"].items() if name != "parallel"}
    backend = hal.open({**alone, "dtype": asked.get("dtype", "float32"), "cache": {"num_tokens": 8192}})
    runner = hal.Runner(hal.load_model(asked["checkpoint"], backend), backend)
    expected: list[list[int]] = [[] for _ in prompts]
    params = [hal.SamplingParams(max_new_tokens=TOKENS[index % 2]) for index in range(len(prompts))]
    for token in hal.generate(runner, prompts, params):
        expected[token.prompt_index].append(token.token_id)
    differ = [index for index, tokens in enumerate(found) if tokens != expected[index]]
    ties = [index for index in differ if agree(asked["checkpoint"], prompts[index], found[index], expected[index])]
    _write(asked, wrong=[index for index in differ if index not in ties], ties=ties, drawn=drawn, counts=counts)


def killed() -> None:
    """Kill a rank while it works. Write the error, the seconds until it came, and the processes that are left."""
    asked, prompts = _read()
    engine = LLM(**_arguments(asked))
    (_, victim) = sorted(multiprocessing.active_children(), key=lambda each: each.name)
    times: list[float] = []

    def kill() -> None:
        times.append(time.monotonic())
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)

    threading.Timer(1.0, kill).start()
    error = ""
    try:
        while not times or time.monotonic() < times[0] + 60:
            params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
            engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    except Exception as raised:  # whatever vLLM makes of it
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - times[0]
    until = time.monotonic() + 60
    while (left := multiprocessing.active_children()) and time.monotonic() < until:
        time.sleep(0.1)
    _write(asked, error=error, seconds=seconds, left=[each.name for each in left])
