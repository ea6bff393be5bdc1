"""Tests that vLLM's requests with adapters (LoRA) get the tokens of hal.generate. `make test-vllm` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.adapters import ALL, ATTENTION, adapter_of
from helpers.distributions import installed
from helpers.vllm_programs import found_by, needs_vllm
from safetensors.torch import load_file

KINDS: list[dict[str, Any]] = [
    {"targets": ALL, "rank": 8},
    {"targets": ATTENTION, "rank": 4, "rooted": True},
    {"targets": ("down_proj",), "rank": 1, "alpha": 16.0},
]


def check_adapters(
    tmp_path: Path, checkpoint: Path, *, runner: int, compiler: str = "graph", backend: str = "cpu", **vllm: Any
) -> None:
    """Check random requests, each with one of three adapters or none."""
    on_cpu = backend == "cpu"
    weights, folders = load_file(checkpoint / "model.safetensors"), []
    for seed, kind in enumerate(KINDS):
        folders.append(tmp_path / f"adapter-{seed}")
        adapter_of(weights, folders[-1], seed=seed, **kind)
    found = found_by(
        "vllm_adapters.main",
        tmp_path,
        checkpoint,
        runner=runner,
        adapters=[str(each) for each in folders],
        hal={"backend": backend, "cache": {"block_size": 16 if on_cpu else 128}, "compilation": {"compiler": compiler}},
        vllm={"num_gpu_blocks_override": 32 if on_cpu else 10, **vllm},
        dtype="float32" if on_cpu else "float16",
        stem=80 if on_cpu else 384,
        requests=60,
        seed=1,
    )
    assert found["wrong"] == {"random": [], "pinned": [], "replaced": []}, "seed 1"
    assert found["ties"] <= (0 if on_cpu else 9)
    counts, room = found["counts"][0], vllm.get("max_cpu_loras", vllm["max_loras"])
    assert counts["ranks"] == vllm.get("tensor_parallel_size", 1)
    assert counts["together"] == 1 + vllm["max_loras"]
    assert (counts["loaded"] > 8) == (room < 3)
    assert [kind for kind in ("decode", "resumed", "prefix hits") if not counts[kind]] == []
    assert found["changed"] > 20
    managed = found["managed"]
    assert len(managed["loaded"]) == room
    assert managed["removed"] == [False]
    assert managed["added"] == [True, True, [1]]
    assert managed["pinned"]
    assert "no adapter with the number 99 is loaded" in managed["refused"]


@needs_vllm
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("compiler", ["eager", "graph"])
@pytest.mark.shows("adapters", "vLLM")
def test_requests_with_adapters_get_the_tokens_of_generate(
    trained: Path, tmp_path: Path, compiler: str, runner: int
) -> None:
    """There is room for all in a step, and each is loaded once."""
    check_adapters(tmp_path, trained, runner=runner, compiler=compiler, max_loras=3)


@needs_vllm
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "npu"])
def test_adapters_give_way_to_others(trained: Path, tmp_path: Path, backend: str, runner: int) -> None:
    """Graphs that were captured before compute with those that come into their slots."""
    if backend == "npu" and not installed("torch-npu"):
        pytest.skip("torch_npu is not installed")
    check_adapters(tmp_path, trained, runner=runner, backend=backend, max_loras=2)


@needs_vllm
def test_two_ranks_split_adapters(trained: Path, tmp_path: Path) -> None:
    check_adapters(tmp_path, trained, runner=1, max_loras=2, max_cpu_loras=3, tensor_parallel_size=2)
