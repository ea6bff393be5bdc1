"""Tests that families of models give the CPU's logits on the emulated NPU, in bfloat16."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from helpers import published_configs
from helpers.npu import compare
from helpers.thorough import FAMILY, thorough

pytestmark = pytest.mark.usefixtures("one_thread")

BUCKETS = (1, 3)
SPARSE = (
    "granite-3.1-1b-a400m-instruct",
    "gpt-oss-20b-BF16",
    "ERNIE-4.5-21B-A3B-PT",
    "GLM-4.6",
    "MiniMax-M2",
    "gemma-4-26B-A4B-it",
)
DENSE = (
    "Olmo-3-7B-Instruct",
    "granite-3.3-2b-instruct",
    "Phi-4-mini-instruct",
    "gemma-2-2b-it",
    "gemma-3-4b-it",
    "gemma-4-E2B-it",
    "ERNIE-4.5-0.3B-PT",
)


@thorough(FAMILY, r"\[(?!gpt-oss|Phi-4)")
@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_the_logits_of_a_family(name: str, tmp_path: Path) -> None:
    """A few sequences, in batches that graphs hold and in others, against the CPU in bfloat16 and in float32."""
    draw = random.Random(name)
    vocab_size = published_configs.VOCABULARY
    prompts = compare.draw_prompts(draw, 4, vocab_size)
    plan = compare.draw_plan(draw, prompts, compare.around(BUCKETS), vocab_size)
    case = compare.build_case(published_configs.write(tmp_path / name, name), "bfloat16", plan, BUCKETS)
    model, backend = compare.on_npu(case, "graph")
    found = compare.run(compare.new_runner(model, backend), plan, case.rounded.texts)
    (compare.compare_routed if name in SPARSE else compare.compare)(found, case)
