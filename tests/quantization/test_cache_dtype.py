"""Tests for KV caches in 8 bits: their states, their logits on the CPU, and a checkpoint's scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rank_programs
from helpers.checkpoints import random_checkpoint
from helpers.ranks import in_ranks
from helpers.thorough import MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.checkpoint.cache_dtype import DTYPES, check_cache_dtype
from hal.errors import CheckpointError, ConfigError
from hal.nn import Attention
from hal.step import ALL
from hal.testing.target import reference_backend

PROMPT = [1, 7, 30, 4, 200, 19, 19, 3, 77, 12, 90, 41]
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint without scales; the sharded layers have 4 query and 2 key heads."""
    return random_checkpoint(tmp_path_factory.mktemp("plain"))


def scaled(plain: Path, folder: Path, **changes: Any) -> Path:
    """Write the checkpoint with a ``kv_cache_scheme``, and scales that differ by layer."""
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {**SCHEME, **changes},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: each for file in plain.glob("*.safetensors") for name, each in load_file(file).items()}
    if not changes.get("dynamic"):
        for layer in range(config["num_hidden_layers"]):
            for place, name in enumerate(("k_scale", "v_scale")):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([0.04 * (layer + 1) + 0.01 * place])
    save_file(tensors, folder / "model.safetensors")
    return folder


def runner(path: Path, compiler: str = "eager", source: str = "auto", **cache: Any) -> hal.Runner:
    config = {
        "backend": "cpu",
        "dtype": "float32",
        "model_source": source,
        "cache": {"num_tokens": 128, "block_size": 16, **cache},
        "compilation": {"compiler": compiler, **({} if compiler == "eager" else {"capture_sizes": [1, 2]})},
    }
    backend = hal.open(config)
    return hal.Runner(hal.load_model(path, backend), backend)


def logits(on: hal.Runner) -> Tensor:
    """Return the logits of a prefill and of eight decode steps with given tokens."""
    blocks = on.blocks.take(2)
    assert blocks is not None
    found = [on.step(on.batch([PROMPT], [blocks]), ALL).logits.clone()]
    for place in range(8):
        batch = on.batch([[PROMPT[place]]], [blocks], cached=[len(PROMPT) + place])
        found.append(on.step(batch).logits.clone())
    on.blocks.give_back(blocks)
    return torch.cat(found)


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.02), ("fp8", 0.08)])
def test_a_cache_in_8_bits_changes_logits_little_and_alike_in_every_compiler(
    plain: Path, dtype: str, bound: float
) -> None:
    expected, found = logits(runner(plain)), logits(runner(plain, dtype=dtype))
    difference = float((found - expected).norm() / expected.norm())
    assert 1e-5 < difference < bound
    for compiler in ("graph", "piecewise"):
        torch.testing.assert_close(logits(runner(plain, compiler, dtype=dtype)), found, rtol=1e-5, atol=1e-5)


def test_transformers_own_code_gives_the_same_logits(plain: Path) -> None:
    """But for numbers that lie between two of 8 bits, and are rounded either way: a tenth of what 8 bits change."""
    theirs, ours = (logits(runner(plain, source=source, dtype="int8")) for source in ("transformers", "auto"))
    assert (theirs - ours).norm() < 7e-4 * ours.norm()


def test_the_states_take_half_the_bytes_on_any_number_of_ranks(plain: Path) -> None:
    for ranks in (1, 2):
        specs = [
            hal.state_spec(plain, block_size=16, dtype=torch.bfloat16, ranks=ranks, cache_dtype=each)
            for each in ("model", "int8", "fp8")
        ]
        model, int8, fp8 = (each.token_bytes for each in specs)
        heads = specs[0].layers[0]["key"].shape[0]
        assert int8 == fp8 == model // 2 + len(specs[0].layers) * 2 * heads * 4
        assert {name: each.shape for name, each in specs[1].layers[0].items()} == {
            "key": (heads, specs[0].layers[0]["key"].shape[1]),
            "value": (heads, specs[0].layers[0]["key"].shape[1]),
            "key_scale": (heads,),
            "value_scale": (heads,),
        }


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_memory_plan_counts_the_bytes_of_8_bits(plain: Path, dtype: str) -> None:
    found = {}
    for cache in ("model", dtype):
        config = {"backend": "cpu", "dtype": "bfloat16", "cache": {"dtype": cache, "block_size": 16}}
        with hal.open(config) as on:
            found[cache] = hal.plan_memory(hal.load_model(plain, on), on, max_sequences=2, max_length=32).spec
    assert found[dtype] == hal.state_spec(
        plain, block_size=16, num_blocks=found[dtype].num_blocks, dtype=torch.bfloat16, cache_dtype=dtype
    )
    assert found["model"].token_bytes / 2 < found[dtype].token_bytes < found["model"].token_bytes


@thorough(MODE, "fp8")
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_ranks_keep_the_numbers_of_their_heads(plain: Path, dtype: str) -> None:
    alone = rank_programs.logits(str(plain), "float32", {}, dtype)["logits"]
    assert not torch.equal(alone, rank_programs.logits(str(plain), "float32", {})["logits"])
    for rank in in_ranks("logits", 2, checkpoint=str(plain), dtype="float32", parallel={"tensor": 2}, cache=dtype):
        torch.testing.assert_close(rank["logits"], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_reused_prefix_keeps_its_numbers_and_scales(plain: Path, dtype: str) -> None:
    prompts = [[*range(3, 40), 7, 8], [*range(3, 40), 90, 12, 5]]

    def texts(*, reuse: bool) -> tuple[list[list[int]], int]:
        on = runner(plain, dtype=dtype, reuse_prefixes=reuse)
        on.backend.activate()
        made = [
            [each.token_id for each in hal.generate(on, [prompt], hal.SamplingParams(max_new_tokens=6))]
            for prompt in prompts
        ]
        return made, 0 if on.prefixes is None else len(on.prefixes.reuse(prompts[1]))

    (expected, none), (found, shared) = texts(reuse=False), texts(reuse=True)
    assert found == expected
    assert (none, shared) == (0, 2)


@pytest.mark.parametrize(("kind", "dtype"), [("float", "fp8"), ("int", "int8")])
def test_a_checkpoints_scales_are_used_unless_another_dtype_is_asked_for(
    plain: Path, tmp_path: Path, kind: str, dtype: str
) -> None:
    path = scaled(plain, tmp_path / "scaled", type=kind)
    on = runner(path)
    found = logits(on)
    for index, states in enumerate(on.states.layers):
        assert states["key"].dtype == DTYPES[dtype]
        used = states["key_scale"][1, :10], states["value_scale"][1, :10]
        for scales, expected in zip(used, (0.04 * (index + 1), 0.04 * (index + 1) + 0.01), strict=True):
            torch.testing.assert_close(scales, torch.full_like(scales, expected))
    expected = logits(runner(plain))
    assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.15
    assert torch.equal(logits(runner(path, dtype="model")), expected)
    other = "int8" if dtype == "fp8" else "fp8"
    assert torch.equal(logits(runner(path, dtype=other)), logits(runner(plain, dtype=other)))


def test_a_dynamic_scheme_of_a_checkpoint_needs_no_scales(plain: Path, tmp_path: Path) -> None:
    path = scaled(plain, tmp_path / "dynamic", type="int", dynamic=True)
    assert torch.equal(logits(runner(path)), logits(runner(plain, dtype="int8")))


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.pop(name) and None


KEY = "model.layers.1.self_attn.k_scale"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without(KEY), KEY),
        (lambda tensors: tensors.update({KEY: torch.tensor([0.0])}), f"{KEY} is 0.0, not positive"),
        (lambda tensors: tensors.update({KEY: torch.tensor([float("inf")])}), f"{KEY} is inf, not positive"),
        (lambda tensors: tensors.update({KEY: torch.ones(3)}), KEY),
        (lambda tensors: tensors.update({KEY: torch.ones(1, dtype=torch.int32)}), KEY),
    ],
    ids=["missing", "zero", "infinite", "shape", "dtype"],
)
def test_bad_scales_are_refused_by_name(
    plain: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], reason: str
) -> None:
    path = scaled(plain, tmp_path / "bad")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        runner(path)
    assert reason in raised.value.problem


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_bits": 4}, "num_bits of the kv_cache_scheme"),
        ({"strategy": "channel"}, "strategy of the kv_cache_scheme"),
        ({"symmetric": False}, "symmetric of the kv_cache_scheme"),
        ({"type": "nf"}, "has the type 'nf'"),
    ],
    ids=["bits", "strategy", "symmetric", "type"],
)
def test_other_schemes_are_refused(plain: Path, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = scaled(plain, tmp_path / "other", **changes)
    with pytest.raises(ConfigError) as raised:
        runner(path)
    assert reason in raised.value.problem


def test_a_backend_without_kernels_and_a_model_without_attention_are_refused(plain: Path) -> None:
    model = runner(plain, dtype="fp8").model
    with pytest.raises(ConfigError, match="reference has no kernels for a cache in fp8"):
        check_cache_dtype(model, reference_backend(torch.float32, 64, 16))
    assert any(isinstance(each, Attention) for each in model.modules())
    with pytest.raises(ConfigError, match=r"cache\.dtype"):
        hal.open({"backend": "cpu", "cache": {"dtype": "int4"}})
