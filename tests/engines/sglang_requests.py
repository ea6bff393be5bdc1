"""Runs random requests through SGLang, and compares their tokens with hal.generate's, or with those of a request alone.

The argument is JSON with ``checkpoint``, ``hal`` (hal's configuration), ``arguments`` (further arguments of
sglang.Engine), ``seed``, ``requests``, and ``out``, the file for the result. test_sglang.py runs it in a
separate process, and SGLang's scheduler in another.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import sglang

import hal
from hal.step import ALL

LONGEST, CACHED, CHUNK = 704, 1024, 128


def scores(runner: hal.Runner, tokens: list[int]) -> list[float]:
    """Return the log-probability of each token of a prompt but the first."""
    blocks = list(range(1, 1 + runner.spec.blocks_for(len(tokens))))
    logits = runner.step(runner.batch([tokens], [blocks]), ALL).logits.float().cpu()
    rows = logits.log_softmax(-1)[:-1]
    return [float(row[token]) for row, token in zip(rows, tokens[1:], strict=True)]


def draw_request(draw: random.Random, prefixes: list[list[int]], vocabulary: int) -> Any:
    """Return the kind of a request, its prompt, and its sampling parameters."""
    length = draw.choice((draw.randint(1, 40), draw.randint(1, 600)))
    prompt = [draw.randrange(5, vocabulary) for _ in range(length)]
    if draw.random() < 0.4:
        prompt = (draw.choice(prefixes) + prompt)[:600]
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": draw.randint(1, 40), "ignore_eos": True}
    kind = draw.choice(("greedy",) * 5 + ("penalties", "logprobs", "prompt logprobs", "regex"))
    if kind == "penalties":
        given |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    elif kind == "regex":
        given |= {"regex": "[a-f]{3}[0-9]{2,4}", "ignore_eos": False}
    return kind, prompt, given


def main() -> None:
    """Run the requests, compare, and write what was found."""
    asked = json.loads(sys.argv[1])
    draw = random.Random(asked["seed"])
    vocabulary = json.loads((Path(asked["checkpoint"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prefixes = [[draw.randrange(5, vocabulary) for _ in range(300)] for _ in range(3)]
    drawn = [draw_request(draw, prefixes, vocabulary) for _ in range(asked["requests"])]
    kinds, prompts, params = (list(each) for each in zip(*drawn, strict=True))
    counts = Counter(kinds)
    arguments = {"dtype": "float32", **asked.get("arguments", {})}
    engine = sglang.Engine(
        model_path=asked["checkpoint"],
        context_length=LONGEST,
        max_total_tokens=CACHED,
        max_running_requests=8,
        chunked_prefill_size=CHUNK,
        log_level="warning",
        json_model_override_args=json.dumps({"hal": asked["hal"]}),
        **arguments,
    )

    def run(chosen: list[int]) -> list[Any]:
        scored = [kinds[index] == "prompt logprobs" for index in chosen]
        found: Any = engine.generate(
            input_ids=[prompts[index] for index in chosen],
            sampling_params=[params[index] for index in chosen],
            return_logprob=[kinds[index].endswith("logprobs") for index in chosen],
            logprob_start_len=[0 if each else -1 for each in scored],
            top_logprobs_num=[2] * len(chosen),
        )
        return list(found)

    found = run(list(range(len(drawn))))
    plain = [kind in ("greedy", "logprobs", "prompt logprobs") for kind in kinds]
    others = [index for index, each in enumerate(plain) if not each]
    expected: dict[int, list[int]] = {index: run([index])[0]["output_ids"] for index in others}
    engine.shutdown()
    backend = hal.open({**asked["hal"], "dtype": arguments["dtype"], "cache": {"num_tokens": 8192}})
    runner = hal.Runner(hal.load_model(asked["checkpoint"], backend), backend)
    chosen = [index for index, each in enumerate(plain) if each]
    expected |= {index: [] for index in chosen}
    wanted = [hal.SamplingParams(max_new_tokens=params[index]["max_new_tokens"]) for index in chosen]
    for token in hal.generate(runner, [prompts[index] for index in chosen], wanted):
        expected[chosen[token.prompt_index]].append(token.token_id)
    wrong, worst = list[str](), 0.0
    for index, each in enumerate(found):
        tokens, meta = each["output_ids"], each["meta_info"]
        counts["prefix hits"] += meta["cached_tokens"] > 0
        counts["chunks"] += len(prompts[index]) - meta["cached_tokens"] > CHUNK
        counts["retractions"] += meta["num_retractions"]
        if kinds[index] == "penalties" and meta["num_retractions"]:
            continue  # SGLang forgets the tokens that it penalized before a retraction.
        if tokens != expected[index]:
            pairs = enumerate(zip(tokens, expected[index], strict=False))
            at = next((k for k, (one, other) in pairs if one != other), -1)
            wrong.append(f"request {index} ({params[index]}) differs at token {at}: {tokens} and {expected[index]}")
        if kinds[index] == "prompt logprobs":
            given = [value for value, *_ in meta["input_token_logprobs"][1:]]
            reference = scores(runner, prompts[index])
            if len(given) != len(reference):
                wrong.append(f"request {index} has {len(given)} scores for {len(prompts[index])} tokens")
            worst = max([worst, *(abs(a - b) for a, b in zip(given, reference, strict=False))])
    result = {"counts": counts, "wrong": wrong, "requests": len(found), "worst score": worst}
    Path(asked["out"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
