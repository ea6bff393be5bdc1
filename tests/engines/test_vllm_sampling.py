"""Tests of what hal's worker gives vLLM's sampler and logits processors. `make test-vllm` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.vllm_programs import found_by, needs_vllm, run, vllm_version
from packaging.version import Version

UPDATES = """
import random
from types import SimpleNamespace
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from hal.engines.vllm.sampling import batch_update

def request(name):
    class Request(SimpleNamespace):
        __hash__ = object.__hash__
    return Request(params=SimpleNamespace(), prompt=[name], outputs=[])

class Known:
    # What a processor knows of the request that was added to a row.
    def __init__(self, prompt): self.name, self.steps = prompt[0], 0

for seed in range(300):
    draw = random.Random(seed)
    rows, names, steps, pool, before = {}, 0, {}, [], []
    for step in range(12):
        pool = [each for each in pool if draw.random() < 0.8]
        for _ in range(draw.randrange(3)):
            pool.append(request(names))
            names += 1
        after = [each for each in pool if draw.random() < 0.9]
        if draw.random() < 0.5:
            draw.shuffle(after)
        update = batch_update(before, after)
        assert update.batch_size == len(after)
        assert not {*update.removed} & {row for row, *_ in update.added}
        process_dict_updates(rows, update, lambda params, prompt, outputs: Known(prompt))
        assert {row: known.name for row, known in rows.items()} == dict(enumerate(each.prompt[0] for each in after))
        steps = {each.prompt[0]: steps.get(each.prompt[0], 0) if each in before else 0 for each in after}
        for known in rows.values():
            assert known.steps == steps[known.name], (seed, step)
            known.steps += 1
            steps[known.name] += 1
        before = after
print("updates are right")
"""


@needs_vllm
def test_a_logits_processor_keeps_what_it_knows_of_a_request_that_stays() -> None:
    """Seeds 0 to 299: requests come, go and change their rows."""
    result = run(UPDATES)
    assert "updates are right" in result.stdout, result.stdout + result.stderr


@needs_vllm
@pytest.mark.shows("log-probabilities", "vLLM")
def test_log_probabilities_of_chosen_tokens(trained: Path) -> None:
    """They are those that a request for all tokens has. Others of the same steps ask for none, or the likeliest."""
    program = (
        "from vllm import LLM, SamplingParams\n"
        f"engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32', max_logprobs=-1,\n"
        "             additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 1024}}})\n"
        "greedy = dict(temperature=0, max_tokens=4)\n"
        "likeliest = SamplingParams(**greedy, logprobs=3)\n"
        "alone, = engine.generate('for ', likeliest)\n"
        "asked = [SamplingParams(**greedy, logprob_token_ids=[7, 11]), SamplingParams(**greedy), likeliest]\n"
        "chosen, none, beside = engine.generate(['x = ', 'def ', 'for '], asked)\n"
        "for one, other in zip(alone.outputs[0].logprobs, beside.outputs[0].logprobs, strict=True):\n"
        "    assert list(one) == list(other) and len(other) >= 3, (one, other)\n"
        "    assert all(abs(one[token].logprob - other[token].logprob) < 1e-5 for token in one)\n"
        "    assert all(one[token].rank == other[token].rank for token in one)\n"
        "every, = engine.generate('x = ', SamplingParams(**greedy, logprobs=-1, prompt_logprobs=-1))\n"
        "assert none.outputs[0].logprobs is None\n"
        "size = engine.model_config.get_vocab_size()\n"
        "assert {len(each) for each in every.outputs[0].logprobs} == {size}\n"
        "assert {len(each) for each in every.prompt_logprobs[1:]} == {size}\n"
        "steps = list(zip(chosen.outputs[0].logprobs, every.outputs[0].logprobs, strict=True))\n"
        "assert len(steps) == 4\n"
        "for some, each in steps:\n"
        "    assert {7, 11} <= {*some} and len(some) <= 3, some\n"
        "    assert all(abs(found.logprob - each[token].logprob) < 1e-5 for token, found in some.items())\n"
        "print('equal')\n"
    )
    result = run(program)
    assert "equal" in result.stdout, result.stdout + result.stderr


@needs_vllm
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_log_probabilities_of_a_prompt_whose_last_token_comes_alone(trained: Path, mode: str) -> None:
    """All log-probabilities are known a step before the first token. They have the mode of those of tokens."""
    program = (
        "import math\n"
        "from vllm import LLM, SamplingParams\n"
        f"engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32', max_logprobs=-1, block_size=16,\n"
        f"             max_num_batched_tokens=16, max_num_seqs=2, logprobs_mode={mode!r},\n"
        "             additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 1024}}})\n"
        "params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=-1)\n"
        "output, = engine.generate({'prompt_token_ids': [*range(9, 26)]}, params)\n"
        "sums = [sum(math.exp(found.logprob) for found in each.values()) for each in output.prompt_logprobs[1:]]\n"
        "ones = [abs(each - 1) < 1e-3 for each in sums]\n"
        "print('sums:', len(sums), all(ones), any(ones))\n"
    )
    result = run(program)
    wanted = "sums: 16 True True" if mode == "raw_logprobs" else "sums: 16 False False"
    assert wanted in result.stdout, result.stdout + result.stderr


@needs_vllm
def test_a_budget_of_thinking_tokens_ends_the_thinking(trained: Path) -> None:
    """A request without a budget, in the same steps, goes on. One that ends meanwhile moves them to other rows."""
    program = (
        "from vllm import LLM, SamplingParams\n"
        "from vllm.config import ReasoningConfig\n"
        f"engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32',\n"
        "             reasoning_config=ReasoningConfig(reasoning_start_str='def', reasoning_end_str='return self.x'),\n"
        "             additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 1024}}})\n"
        "config = engine.llm_engine.vllm_config.reasoning_config\n"
        "end, start = config.reasoning_end_token_ids, config.reasoning_start_token_ids\n"
        "greedy = dict(temperature=0, max_tokens=20, ignore_eos=True)\n"
        "prompt = {'prompt_token_ids': [9, 10, *start]}\n"
        "for leaving in range(4, 10):\n"
        "    leaves = SamplingParams(temperature=0, max_tokens=leaving, ignore_eos=True)\n"
        "    asked = [leaves, SamplingParams(**greedy), SamplingParams(**greedy, thinking_token_budget=5)]\n"
        "    _, free, found = [[*each.outputs[0].token_ids] for each in engine.generate([prompt] * 3, asked)]\n"
        "    ends = found[5:5 + len(end)] == end, found[:5] == free[:5], free[5:5 + len(end)] != end, end not in\\\n"
        "        [found[at:at + len(end)] for at in range(5 + len(end), len(found))]\n"
        "    print('ends:', leaving, len(end) > 1, *ends, found)\n"
    )
    result = run(program)
    lines = [each.split()[1:7] for each in result.stdout.splitlines() if each.startswith("ends: ")]
    assert lines == [[str(leaving), *["True"] * 5] for leaving in range(4, 10)], result.stdout + result.stderr


@needs_vllm
def test_a_top_k_above_the_vocabulary_keeps_all_tokens(trained: Path) -> None:
    program = (
        "from vllm import LLM, SamplingParams\n"
        f"engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32', max_logprobs=-1,\n"
        "             logprobs_mode='processed_logprobs',\n"
        "             additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 1024}}})\n"
        "params = [SamplingParams(seed=1, max_tokens=4, logprobs=-1, top_k=k) for k in (0, 10**6, 3)]\n"
        "every, above, three = (each.outputs[0] for each in engine.generate(['x = '] * 3, params))\n"
        "possible = [{sum(each.logprob > -1e9 for each in step.values()) for step in output.logprobs}\n"
        "            for output in (every, above, three)]\n"
        "size = engine.model_config.get_vocab_size()\n"
        "print('found:', every.token_ids == above.token_ids, possible == [{size}, {size}, {3}])\n"
    )
    result = run(program)
    assert "found: True True" in result.stdout, result.stdout + result.stderr


@needs_vllm
@pytest.mark.shows("log-probabilities", "vLLM")
def test_log_probabilities_of_given_tokens_of_a_prompt(trained: Path) -> None:
    """They are those of a prompt for all tokens, in chunks and beside others. vLLM has them from 0.31 on."""
    if vllm_version() < Version("0.31"):
        pytest.skip("vLLM 0.30 has no prompt_logprob_token_ids")
    program = (
        "import numpy\n"
        "from vllm import LLM, SamplingParams\n"
        f"engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32', max_logprobs=-1, block_size=16,\n"
        "             max_num_batched_tokens=16, max_num_seqs=2,\n"
        "             additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 1024}}})\n"
        "greedy = dict(temperature=0, max_tokens=3)\n"
        "prompt = {'prompt_token_ids': [*range(9, 49)]}\n"
        "given = numpy.array([[3 * row, row + 10, 7 if PADDED and row % 2 else -PADDED] for row in range(39)])\n"
        "if not PADDED: given = numpy.broadcast_to(given[4], given.shape)\n"
        "def asked(start, **others):\n"
        "    ids = given[start:] if PADDED else given[0].tolist()\n"
        "    return SamplingParams(**greedy, prompt_logprob_token_ids=ids, prompt_logprob_start=start, **others)\n"
        "params = [SamplingParams(**greedy, prompt_logprobs=-1), asked(0), asked(21), asked(0, prompt_logprobs=2)]\n"
        "every, some, later, both = engine.generate([prompt] * 4, params)\n"
        "for start, found in ((0, some), (21, later), (0, both)):\n"
        "    scores = found.prompt_token_id_logprobs\n"
        "    assert scores.shape == (39 - start, 3), scores.shape\n"
        "    for row, own in enumerate(scores, start):\n"
        "        all_of_row = every.prompt_logprobs[row + 1]\n"
        "        for token, score in zip(given[row], own, strict=True):\n"
        "            right = all_of_row[token].logprob if token >= 0 else -numpy.inf\n"
        "            assert score == right or abs(score - right) < 1e-5, (row, token, score, right)\n"
        "assert [*map(len, both.prompt_logprobs[1:])] != [] and every.prompt_token_id_logprobs is None\n"
        "assert len({tuple(each.outputs[0].token_ids) for each in (every, some, later, both)}) == 1\n"
        "print('equal')\n"
    )
    result = run(f"PADDED = {int(vllm_version() >= Version('0.32'))}\n{program}", runner=2)
    assert "equal" in result.stdout, result.stdout + result.stderr


@needs_vllm
@pytest.mark.parametrize(
    ("runner", "drafts"),
    [
        (1, {}),
        (2, {}),
        (2, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}),
        (2, {"method": "draft_model"}),
    ],
)
def test_custom_logits_processors(trained: Path, tmp_path: Path, runner: int, drafts: dict[str, Any]) -> None:
    """Requests without repeated tokens, which are preempted, get the tokens of hal.generate with the same mask."""
    if vllm_version() < Version("0.31"):
        pytest.skip("vLLM 0.30 has no custom processors for its second model runner")
    vllm: dict[str, Any] = {"async_scheduling": drafts.get("method") != "ngram"}
    if drafts:
        vllm["speculative_config"] = {**drafts, "num_speculative_tokens": 3}
        vllm["speculative_config"] |= {"model": str(trained)} if drafts["method"] == "draft_model" else {}
    found = found_by(
        "vllm_processors.main",
        tmp_path,
        trained,
        runner=runner,
        hal={"backend": "cpu"},
        vllm=vllm,
        seed=1,
        requests=24,
    )
    assert found["wrong"] == []
    assert found["repeats"] > 0
    assert found["masked"] > 0
    assert found["counts"]["resumed"] > 0 or drafts
    assert sum(found["counts"].get("accepted", ())) > 0 or not drafts
