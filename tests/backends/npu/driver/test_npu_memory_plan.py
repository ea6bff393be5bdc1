"""Tests of memory plans on an NPU, whose allocator measures steps, and whose memory can be filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.thorough import MODE

import hal
from hal.errors import ConfigError

Opened = Callable[..., hal.Backend]
LONGEST, TOGETHER = 512, 8


@pytest.mark.parametrize("compiler", [pytest.param("eager", marks=pytest.mark.thorough(MODE)), "graph"])
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
