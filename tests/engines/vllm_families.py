"""Generates with checkpoints of several families through vLLM and by hal.generate, and compares the tokens.

The argument is JSON with ``checkpoints``, by name; ``before``, a checkpoint whose weights those of the first replace;
``hal``, hal's configuration; and ``out``, the file for what differs. test_vllm_families.py runs it in another process.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ModuleNotFoundError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

import hal
from hal.engines.vllm.worker import HalWorker
from hal.errors import ModelError
from hal.step import SEQUENCE, TOKEN, State

LONGEST, CACHED, NEW = 128, 512, 20


def differing(
    checkpoint: str,
    config: dict[str, Any],
    seed: int,
    before: str | None = None,
    load_format: str = "auto",
    alone: Mapping[str, Any] = MappingProxyType({}),
    vocabulary: int = 90,
    **vllm: Any,
) -> list[str]:
    """Return what differs between the tokens of the two. vLLM may start with other weights, or random ones.

    Args:
        checkpoint: the checkpoint.
        config: hal's configuration.
        seed: of the prompts.
        before: the checkpoint whose weights are replaced.
        load_format: vLLM's.
        alone: further keys of the configuration of hal without vLLM.
        vocabulary: the tokens of the prompts are below.
        vllm: further arguments of vLLM.
    """
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, vocabulary) for _ in range(draw.randint(1, 100))] for _ in range(12)]
    engine = LLM(
        model=before or checkpoint,
        max_model_len=LONGEST,
        block_size=16,
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=CACHED // 16,
        additional_config={"hal": config},
        load_format=load_format,
        disable_log_stats=False,
        **{"dtype": "float32", **vllm},
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": each} for each in prompts]
    found = engine.generate(given, params, use_tqdm=False)
    if before is not None or load_format == "dummy":
        former = [[*each.outputs[0].token_ids] for each in found]
        engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
        engine.reset_prefix_cache()
        found = engine.generate(given, params, use_tqdm=False)
        if former == [[*each.outputs[0].token_ids] for each in found]:
            return ["the new weights give the tokens of the former"]
    cache = {"num_tokens": 2048, **alone.get("cache", {})}
    backend = hal.open({**config, "dtype": vllm.get("dtype", "float32"), "cache": cache})
    runner = hal.Runner(hal.load_model(checkpoint, backend), backend)
    expected: list[list[int]] = [[] for _ in prompts]
    for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=NEW)):
        expected[token.prompt_index].append(token.token_id)
    counted = {each.name: each.value for each in engine.get_metrics() if each.name.endswith("_draft_tokens")}
    if "speculative_config" in vllm and not any(counted.values()):
        return [f"nothing was drafted: {counted}"]
    return [
        f"prompt {index}: {[*output.outputs[0].token_ids]} and {wanted}"
        for index, (output, wanted) in enumerate(zip(found, expected, strict=True))
        if [*output.outputs[0].token_ids] != wanted
    ]


def specifications() -> list[str]:
    """Return what is wrong with the specifications of layers that no family has."""
    wrong = []
    latent = {"compressed": State(TOKEN, (48,)), "rotary": State(TOKEN, (16,), torch.float32)}
    narrow = {"compressed": State(TOKEN, (24,)), "rotary": State(TOKEN, (16,), torch.float32)}
    worker = HalWorker.__new__(HalWorker)
    worker.backend = SimpleNamespace(block_size=16)
    worker.model = SimpleNamespace(
        states=[latent, {}, narrow],
        parameters=lambda: iter([torch.empty(1, dtype=torch.bfloat16)]),
        layers_have_groups=False,
    )
    worker.cache_config = SimpleNamespace(mamba_cache_mode="none")
    worker.model_config = SimpleNamespace(max_model_len=64)
    specs = worker.get_kv_cache_spec()
    sizes = {name: spec.page_size_bytes for name, spec in specs.items()}
    if sizes != {"layers.0": 16 * (48 * 2 + 64), "layers.2": 16 * (24 * 2 + 64)}:
        wrong.append(f"latent layers take {sizes}")
    asked: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        kv_transfer_config=None,
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
    )
    if (groups := len(get_kv_cache_groups(asked, dict(specs)))) != 1:
        wrong.append(f"latent layers are in {groups} groups")
    windows = [{name: State(TOKEN, (2, 16), window=size) for name in ("key", "value")} for size in (20, 50, None)]
    worker.model.states = windows
    if [type(each) for each in worker.get_kv_cache_spec().values()] != [FullAttentionSpec] * 3:
        wrong.append("layers that read one block table have windows beside one that has none")
    worker.model.layers_have_groups = True
    found = [getattr(each, "sliding_window", None) for each in worker.get_kv_cache_spec().values()]
    if found != [20, 50, None]:
        wrong.append(f"layers with windows of 20 and 50, and one without, are declared with {found}")
    worker.model.states = windows[:2]
    if [each.sliding_window for each in worker.get_kv_cache_spec().values()] != [50, 50]:
        wrong.append(f"layers with windows of 20 and 50 are declared as {worker.get_kv_cache_spec()}")
    state = {"matrix": State(SEQUENCE, (4, 24, 32), torch.float32), "window": State(SEQUENCE, (3, 64))}
    worker.model.states = [state, windows[2], state]
    sizes = {spec.page_size_bytes for spec in worker.get_kv_cache_spec().values()}
    if sizes != {4 * 24 * 32 * 4 + 3 * 64 * 2}:  # A matrix takes the bytes of 6 blocks.
        wrong.append(f"recurrent layers take pages of {sizes}")
    for states, layers_have_groups, problem in (
        ([state], False, "its layers read one block table"),
        ([state, latent], True, "cannot share memory with other layers"),
        ([state, {"matrix": State(SEQUENCE, (4, 8, 8))}], True, "layers that share memory must keep equal ones"),
    ):
        worker.model.states, worker.model.layers_have_groups = states, layers_have_groups
        try:
            wrong.append(f"{problem}: {worker.get_kv_cache_spec()}")
        except ModelError as error:
            if problem not in error.problem:
                wrong.append(str(error))
    return wrong


def quantized() -> None:
    """Compare quantized checkpoints, each with arguments of vLLM and keys of hal alone, and write what differs."""
    asked = json.loads(sys.argv[1])
    found = {
        name: differing(folder, asked["hal"], 3, alone=alone, **vllm)
        for name, (folder, vllm, alone) in asked["cases"].items()
    }
    refused = {}
    for name, vllm in asked["refused"].items():
        try:
            LLM(model=asked["checkpoint"], max_model_len=LONGEST, skip_tokenizer_init=True, **vllm)
        except Exception as error:
            refused[name] = str(error)
    Path(asked["out"]).write_text(json.dumps({"found": found, "refused": refused}), encoding="utf-8")


def main() -> None:
    """Compare all, and write what differs."""
    asked = json.loads(sys.argv[1])
    found = {name: differing(folder, asked["hal"], 3) for name, folder in asked["checkpoints"].items()}
    first = next(iter(asked["checkpoints"].values()))
    found["reloaded"] = differing(first, asked["hal"], 4, asked["before"])
    found["reloaded over random weights"] = differing(first, asked["hal"], 4, load_format="dummy")
    found["specifications"] = specifications()
    Path(asked["out"]).write_text(json.dumps(found), encoding="utf-8")
