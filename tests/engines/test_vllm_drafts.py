"""Tests of vLLM's speculative decoding with hal's drafters. `make test-vllm` runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import write_json
from helpers.vllm_programs import found_by, needs_vllm, run, vllm_version
from packaging.version import Version
from safetensors.torch import save_file

import hal
from hal.checkpoint.model_registry import find_model
from hal.checkpoint.weight_bindings import bindings_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def check_drafted(tmp_path: Path, checkpoint: Path, drafts: dict[str, Any], requests: int, **asked: Any) -> None:
    """Check that random requests get the tokens of hal.generate, and that vLLM counts the drafts that hal counts."""
    found = found_by(
        "vllm_requests.main",
        tmp_path,
        checkpoint,
        dtype="float32",
        block=16,
        seed=1,
        requests=requests,
        **{**asked, "vllm": {"speculative_config": drafts, **asked["vllm"]}},
    )
    assert found["wrong"] == []
    counts, seen = found["counts"], found["vllm"]
    assert counts["mixed"]
    assert counts["decode"]
    accepted, drafted = counts["accepted"], sum(counts["drafted"])
    assert sum(accepted) > 0
    assert seen["accepted"] == sum(seen["by place"])
    if asked["vllm"].get("async_scheduling"):  # vLLM drops what a step gives requests that have ended meanwhile.
        assert all(some <= each for some, each in zip(seen["by place"], accepted, strict=True))
        assert seen["accepted"] > 0.9 * sum(accepted)
    else:
        assert seen["by place"] == accepted
        assert drafted <= seen["drafted"]  # vLLM counts its padding, too.


@needs_vllm
@pytest.mark.parametrize(
    ("method", "compiler", "asynchronous", "requests"),
    [
        ("ngram", "eager", False, 200),
        ("ngram", "graph", False, 60),
        ("ngram", "graph", True, 60),
        ("draft_model", "eager", False, 40),
        ("draft_model", "graph", True, 200),
        ("eagle3", "graph", False, 200),
        ("eagle3", "eager", True, 40),
    ],
)
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.shows("texts", "vLLM")
def test_requests_with_drafts_get_the_tokens_of_generate(
    repository: Path, tmp_path: Path, method: str, compiler: str, asynchronous: bool, requests: int, runner: int
) -> None:
    """Greedy, and with seeds, penalties, log-probabilities and grammars; in chunks, resumed, and with prefixes."""
    if method == "ngram" and asynchronous and (runner == 1 or vllm_version() < Version("0.33")):
        pytest.skip("vLLM schedules these drafts synchronously")
    model = repository / "checkpoints" / "tiny-python"
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        drafts |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        drafts["model"] = str(model if method == "draft_model" else model.with_name("tiny-python-eagle3"))
    configuration = {"backend": "cpu", "compilation": {"compiler": compiler}}
    vllm = {"async_scheduling": asynchronous}
    check_drafted(tmp_path, model, drafts, requests, runner=runner, hal=configuration, vllm=vllm)


PREDICTED: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "dtype": "float32",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
}


NUMBERED = {
    "mtp.fc.": "model.layers.2.eh_proj.",
    "mtp.pre_fc_norm_embedding.": "model.layers.2.enorm.",
    "mtp.pre_fc_norm_hidden.": "model.layers.2.hnorm.",
    "mtp.norm.": "model.layers.2.shared_head.norm.",
    "mtp.layers.0.": "model.layers.2.",
    "mtp.": "model.layers.2.",
}
"""The names of tensors in checkpoints of GLM-4.5, by those of the layer in hal."""


def predicted(folder: Path, *architectures: str) -> Path:
    """Write random tensors of GLM-4.5's architectures: of the model, and of the layer that predicts its tokens."""
    folder.mkdir()
    write_json(folder / "config.json", PREDICTED)
    draw, tensors = torch.Generator().manual_seed(1), {}
    for architecture in architectures:
        with torch.device("meta"):
            model = find_model(architecture).from_config(PREDICTED)
        for name, shape in {
            piece.source: piece.source_shape for binding in bindings_of(model) for piece in binding.pieces()
        }.items():
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            for ours, theirs in NUMBERED.items():
                name = name.replace(ours, theirs)
            tensors[name] = torch.randn(shape, generator=draw) * scale + ("norm" in name)
    save_file(tensors, folder / "model.safetensors")
    return folder


@needs_vllm
def test_the_layer_that_predicts_further_tokens_drafts(tmp_path: Path) -> None:
    folder = predicted(tmp_path / "glm", "Glm4MoeForCausalLM", "Glm4MoeMTP")
    result = run(
        "import vllm_families\n"
        "for compiler, asynchronous in (('eager', False), ('graph', True)):\n"
        "    wrong = vllm_families.differing(\n"
        f"        {str(folder)!r}, {{'backend': 'cpu', 'compilation': {{'compiler': compiler}}}}, 3, vocabulary=61,\n"
        "        async_scheduling=asynchronous, speculative_config={'method': 'mtp', 'num_speculative_tokens': 2})\n"
        "    print('differs:', wrong)\n"
    )
    assert result.stdout.count("differs: []\n") == 2, result.stdout + result.stderr


def damaged(folder: Path, source: Path) -> Path:
    """Copy a checkpoint with tensors of another shape, so that it cannot be loaded."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    save_file({name: torch.ones(1) for name in hal.Checkpoint.open(source).tensors}, folder / "model.safetensors")
    return folder


@needs_vllm
def test_drafters_that_do_not_fit_are_refused_before_the_model_is_loaded(repository: Path, tmp_path: Path) -> None:
    """The tensors of some models do not fit, which is not what is reported."""
    source = repository / "checkpoints" / "tiny-python"
    model = damaged(tmp_path / "model", source)
    other = shutil.copytree(source, tmp_path / "other")
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [name for name, number in vocabulary.items() if number in (100, 101)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    write_json(other / "tokenizer.json", tokenizer)
    windowed = damaged(tmp_path / "windowed", source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    windows = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}
    write_json(windowed / "config.json", {**config, **windows})
    hybrid = damaged(tmp_path / "hybrid", source.with_name("tiny-python-hybrid"))
    glm = damaged(tmp_path / "glm", predicted(tmp_path / "whole", "Glm4MoeForCausalLM"))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (source, {"method": "draft_model", "model": str(other)}, "the drafter has another vocabulary: the token 10"),
        (glm, {"method": "mtp"}, "has no tensors of a layer that predicts further tokens"),
        (hybrid, {"method": "ngram"}, "keeps states per sequence, from which hal drops no rejected drafts in vLLM"),
        (
            windowed,
            {"method": "draft_model", "model": str(source)},
            "vLLM frees the blocks before the windows",
        ),
        (model, {"method": "ngram", "prompt_lookup_max": 17}, "must be at most 16, not 17"),
        (source, {"method": "eagle3", "model": str(source)}, "which is no head of EAGLE-3"),
    ]
    result = run(
        "import json, sys\n"
        "from vllm import LLM\n"
        "for model, drafts in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        LLM(model=model, max_model_len=64, dtype='float32', skip_tokenizer_init=True,\n"
        "            speculative_config={'num_speculative_tokens': 2, **drafts},\n"
        "            additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 256}}})\n"
        "    except Exception as error:\n"
        "        print('refused:', str(error).replace('\\n', ' '))\n",
        json.dumps([(str(folder), drafts) for folder, drafts, _ in cases]),
    )
    found = [each for each in result.stdout.splitlines() if each.startswith("refused: ")]
    assert len(found) == len(cases), result.stdout + result.stderr
    assert [error for error, (*_, problem) in zip(found, cases, strict=True) if problem not in error] == []


@needs_vllm
def test_stop_texts_and_budgets_end_texts_with_drafts_alike(repository: Path) -> None:
    """Several tokens of a step may follow a stop text, a budget of thinking tokens, or the fewest tokens."""
    model = str(repository / "checkpoints" / "tiny-python")
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 4}
    result = run(
        "from vllm import LLM, SamplingParams\n"
        "from vllm.config import ReasoningConfig\n"
        "found = []\n"
        f"for drafts in ({{}}, {{'speculative_config': {drafts}}}):\n"
        f"    engine = LLM(model={model!r}, max_model_len=128, dtype='float32', **drafts,\n"
        "        reasoning_config=ReasoningConfig(reasoning_start_str='def', reasoning_end_str='return self.x'),\n"
        "        additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 2048}}})\n"
        "    start = engine.llm_engine.vllm_config.reasoning_config.reasoning_start_token_ids\n"
        "    options = [{'stop': ['\\n    ']}, {'stop': ['import']}, {'min_tokens': 7, 'stop': ['self']},\n"
        "        {'thinking_token_budget': 5}, {'bad_words': ['range']}]\n"
        "    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **each) for each in options]\n"
        "    prompts = ['def f(x):', 'import os', 'class A:', {'prompt_token_ids': [9, 10, *start]}, 'for i in ']\n"
        "    outputs = [each.outputs[0] for each in engine.generate(prompts, params)]\n"
        "    found.append([(each.text, [*each.token_ids], each.stop_reason) for each in outputs])\n"
        "print('equal:', found[0] == found[1], found[1][0][2] is not None)\n"
    )
    assert "equal: True True\n" in result.stdout, result.stdout + result.stderr
