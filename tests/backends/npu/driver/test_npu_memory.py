"""Tests for memory of the NPU: closing releases all of it at once, no mode copies a cache, and plans fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import emulated_cann
import pytest
import torch
from helpers.thorough import EXHAUSTIVE, MODE, thorough

import hal
from hal.errors import ClosedError, ConfigError, DeviceError

Opened = Callable[..., hal.Backend]
COMPILERS = ("eager", "graph", "piecewise", "piecewise_eager", "npugraph_ex")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable garbage collection except for that by `close`."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def opened_for(npu: Opened, compiler: str) -> hal.Backend:
    return npu(
        dtype="bfloat16", cache={"num_tokens": 2048}, compilation={"compiler": compiler, "capture_sizes": [1, 2]}
    )


def allocated() -> int:
    torch.npu.synchronize()
    return torch.npu.memory_allocated()


@thorough(MODE, r"\[(graph|piecewise\w*)\]")
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_runner_gives_all_back_at_once(npu: Opened, trained: Path, compiler: str) -> None:
    backend = opened_for(npu, compiler)
    empty = allocated()
    model = hal.load_model(trained, backend)
    with hal.Runner(model, backend) as warm:  # one-time allocations of a process, such as masks and workspaces
        list(hal.generate(warm, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=3)))
    loaded, graphs, reserved = allocated(), emulated_cann.live_handles()["graph"], torch.npu.memory_reserved()
    runner = hal.Runner(model, backend)
    list(hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=3)))
    assert allocated() >= loaded + runner.spec.nbytes
    assert (backend.streams_in_graphs > 0) == (compiler != "eager")
    runner.close()
    assert backend.streams_in_graphs == 0
    assert emulated_cann.live_handles()["graph"] == graphs
    assert allocated() == loaded
    assert torch.npu.memory_reserved() <= reserved
    del model, warm
    backend.close()
    assert allocated() <= empty


@pytest.mark.usefixtures("uncollected")
def test_a_backend_closes_its_runners_and_graphs(npu: Opened, trained: Path) -> None:
    graphs = emulated_cann.live_handles()["graph"]
    with opened_for(npu, "graph") as backend:
        runner = hal.Runner(hal.load_model(trained, backend), backend)
        x, graph = torch.ones(1 << 20, device="npu"), backend.graph()
        graph.capture(lambda: x * 2)
        assert emulated_cann.live_handles()["graph"] == graphs + 3
    assert emulated_cann.live_handles()["graph"] == graphs
    assert (backend.streams_in_graphs, runner.closed) == (0, True)
    with pytest.raises(ClosedError, match="replay was called on a closed graph"):
        graph.replay()


def test_work_that_failed_is_said_and_all_is_freed(npu: Opened, trained: Path) -> None:
    backend = opened_for(npu, "graph")
    runner, graphs = hal.Runner(hal.load_model(trained, backend), backend), emulated_cann.live_handles()["graph"]
    batch = runner.batch([[5]], [[1]])
    runner.step(batch)
    backend.device.synchronize()
    with emulated_cann.faults.execution("FusedInferAttentionScoreV3"):
        runner.step(batch)
        with pytest.raises(DeviceError, match="507015"):
            backend.close()
    assert runner.closed
    assert emulated_cann.live_handles()["graph"] == graphs - 2
    backend.close()


WRITES_OR_READS_A_CACHE = {"FusedInferAttentionScoreV3", "ScatterPaKvCache", "QkvRmsNormRopeCache"}
TOKENS = 1 << 16
"""The trained checkpoint has 2 layers of 2 heads of 128, so its caches take 128 MiB in all, 32 MiB each."""


@thorough(MODE, r"\[fractal_nz-piecewise")
@thorough(EXHAUSTIVE, r"\[(canonical-(graph|piecewise)|fractal_nz-npugraph_ex)")
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
    with emulated_cann.trace() as trace:
        runner = hal.Runner(hal.load_model(trained, backend), backend)
    caches = [cache for _, cache in runner.states.tensors()]
    assert sum(cache.nbytes for cache in caches) >= 128 << 20
    one = min(cache.nbytes for cache in caches)
    places = [cache.data_ptr() for cache in caches]
    # Creating the runner zeroes its caches, once each, and compiles.
    made = [record for record in trace.records if record.phase != "capture"]
    largest = [each for each in made if each.bytes >= one and each.name not in WRITES_OR_READS_A_CACHE]
    assert len(largest) == len(caches), [(each.kind, each.name, each.bytes) for each in largest]

    with emulated_cann.trace() as trace:
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


LONGEST, TOGETHER = 512, 8


@thorough(MODE, r"\[eager")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_what_was_planned_fits_and_no_more(npu: Opened, trained: Path, compiler: str) -> None:
    compilation = {"compiler": compiler} | ({} if compiler == "eager" else {"capture_sizes": [1, 4, 8]})
    backend = npu(dtype="float16", compilation=compilation, max_prefill_tokens=256)
    model = hal.load_model(trained, backend)
    plan = hal.plan_memory(model, backend, max_sequences=TOGETHER, max_length=LONGEST, share=1.0)
    print(plan)  # noqa: T201
    assert plan.step is not None
    assert plan.captures is not None
    assert plan.step > 256 * 512 * 2  # the MLP's activations
    assert (plan.captures > 0) == (compiler == "graph")
    blocks = 1 + TOGETHER * plan.spec.blocks_for(LONGEST)
    slack = plan.step + plan.captures + (100 << 20)
    taken = torch.empty(
        backend.device.memory_stats().free - blocks * plan.block_bytes - slack, dtype=torch.uint8, device="npu"
    )
    tight = hal.plan_memory(model, backend, max_sequences=TOGETHER, max_length=LONGEST, share=1.0)
    assert blocks <= tight.num_blocks < blocks + (120 << 20) // plan.block_bytes
    segments = (40 << 20) // plan.block_bytes  # torch's allocator rounds up, to 2 MiB for large tensors
    fitting = tight.num_blocks - segments
    with hal.Runner(model, backend, max_sequences=TOGETHER, max_length=LONGEST, num_blocks=fitting) as runner:
        prompts = [[5 + row] * 32 for row in range(TOGETHER)]
        found = list(hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=4)))
        assert len(found) == 4 * TOGETHER
    with pytest.raises(ConfigError, match=r"lower cache\.num_tokens, or the runner's num_blocks"):
        hal.Runner(model, backend, num_blocks=tight.num_blocks + (200 << 20) // plan.block_bytes)
    del taken
    backend.device.empty_cache()  # Other tests of this process need the memory.
