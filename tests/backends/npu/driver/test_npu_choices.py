"""Tests that an NPU's steps return and take what a model's layers choose: experts, and positions to attend to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_configs
from helpers.thorough import MODE, thorough

import hal
from hal.nn import keep_choices

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
}
KEPT = ("experts", "positions")
PROMPTS = [list(range(3, 45)), [7, 8, 9]]


@thorough(MODE, r"\[(eager|piecewise)")
@pytest.mark.parametrize("compiler", ["graph", "eager", "piecewise"])
def test_own_choices_replayed_give_the_same_bits(compiler: str, tmp_path: Path) -> None:
    folder = published_configs.write(tmp_path / "checkpoint", "DeepSeek-V3.2", **SIZES)
    config: dict[str, Any] = {"cache": {"num_tokens": 1024}, "max_prefill_tokens": 24}
    if compiler != "eager":
        config["compilation"] = {"capture_sizes": [1, 2]}
    options: dict[str, Any] = {"backend": "npu", "dtype": "float16", "compiler": compiler, "max_sequences": 2}
    with hal.LLM(folder, config=config, record=KEPT, replay=KEPT, **options) as llm:
        texts = llm.generate(PROMPTS, max_new_tokens=6, temperature=0.0, ignore_eos=True)
        pairs = [list(each.prompt_token_ids) for each in texts], [list(each.token_ids) for each in texts]
        choices, plain = [each.choices for each in texts], llm.log_probabilities(*pairs)
        assert [len(each["experts"]) for each in choices] == [47, 8]
        assert all(map(torch.equal, llm.log_probabilities(*pairs, choices=choices), plain))
        for name in KEPT:
            others = [{name: each[name].clone()} for each in choices]
            for each in others:
                each[name][1:] = each[name][:-1].clone()  # those of the token before
            found = llm.log_probabilities(*pairs, choices=others)
            assert max((one - two).abs().max() for one, two in zip(found, plain, strict=True)) > 1e-3
    hal.open("cpu")


def test_recording_takes_a_launch_and_a_copy_for_each_kind(tmp_path: Path) -> None:
    folder = published_configs.write(tmp_path / "checkpoint", "DeepSeek-V3.2", **SIZES)
    with hal.open({"backend": "npu", "dtype": "float16", "cache": {"num_tokens": 1024}}) as backend:
        found = []
        for record in ((), KEPT):
            model = hal.load_model(folder, backend)
            if record:
                keep_choices(model, record=record)
            with hal.Runner(model, backend) as runner:
                batch = runner.batch([PROMPTS[0]], [[1]])
                runner.step(batch)
                with backend.counting_launches() as launched:
                    output = runner.step(batch)
                assert set(output.extra) == set(record)
                found.append(launched)
    assert found[1] - found[0] == {"Stack": len(KEPT), "copy": len(KEPT) + 1}  # slots, too
    assert not found[0] - found[1]
