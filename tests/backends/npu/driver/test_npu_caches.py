"""Tests that no mode copies a KV cache, in a kernel or otherwise, and that caches keep their addresses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hal.backends.npu import emulator
from helpers.thorough import MODE, thorough

import hal

WRITES_OR_READS_A_CACHE = {"FusedInferAttentionScoreV3", "ScatterPaKvCache", "QkvRmsNormRopeCache"}
TOKENS = 1 << 16
"""The trained checkpoint has 4 layers of 2 heads of 128, so its caches take 256 MiB in all, 32 MiB each."""


@thorough(MODE, r"\[(canonical-(graph|piecewise)|fractal_nz-(piecewise|npugraph_ex))")
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise", "npugraph_ex"])
@pytest.mark.parametrize("nz_cache", [False, True], ids=["canonical", "fractal_nz"])
def test_a_cache_is_never_copied(trained: Path, compiler: str, nz_cache: bool) -> None:
    compilation = {} if compiler == "eager" else {"capture_sizes": [1, 2]}
    backend = hal.open(
        {
            "backend": "npu",
            "dtype": "float16",
            "options": {"nz_cache": nz_cache},
            "cache": {"num_tokens": TOKENS},
            "compilation": {"compiler": compiler, **compilation},
        }
    )
    with emulator.trace() as trace:
        runner = hal.Runner(hal.load_model(trained, backend), backend)
    caches = [cache for _, cache in runner.states.tensors()]
    assert sum(cache.nbytes for cache in caches) >= 256 << 20
    one = min(cache.nbytes for cache in caches)
    places = [cache.data_ptr() for cache in caches]
    # Creating the runner zeroes its caches, once each, and compiles.
    made = [record for record in trace.records if record.phase != "capture"]
    largest = [each for each in made if each.bytes >= one and each.name not in WRITES_OR_READS_A_CACHE]
    assert len(largest) == len(caches), [(each.kind, each.name, each.bytes) for each in largest]

    with emulator.trace() as trace:
        blocks = [[row + 1] for row in range(2)]
        runner.step(runner.batch([[5] * 20] * 2, blocks))
        for step in range(3):
            runner.step(runner.batch([[7]] * 2, blocks, cached=[20 + step] * 2))
        torch.npu.synchronize()
    ran = trace.ran()
    assert {each.name for each in ran} & WRITES_OR_READS_A_CACHE
    moved = [
        (each.kind, each.name, each.bytes)
        for each in trace.records
        if each.phase != "capture"
        and each.kind in ("kernel", "copy", "fill")
        and each.name not in WRITES_OR_READS_A_CACHE
    ]
    # The largest other reads are of the embedding table; a cache is ten times as large.
    assert max(size for _, _, size in moved) < one / 4, sorted(moved, key=lambda each: -each[2])[:3]
    assert [cache.data_ptr() for _, cache in runner.states.tensors()] == places
