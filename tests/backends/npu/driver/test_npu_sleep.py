"""Tests of runners on an NPU that sleep: graphs are captured again, and weights are those kept or replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.replacing import generated, logits, tensors, two_checkpoints
from helpers.thorough import MODE, thorough

import hal
from hal.errors import AsleepError

Opened = Callable[..., hal.Backend]
SIZES = {
    "head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@thorough(MODE, "eager|npugraph|w8a8")
@pytest.mark.parametrize(
    ("kind", "compiler", "nz"),
    [
        ("tied", "graph", True),
        ("tied", "eager", False),
        ("tied", "npugraph_ex", True),
        ("compressed-tensors/w8a8_dynamic", "graph", True),
    ],
)
def test_results_after_sleep(npu: Opened, tmp_path: Path, kind: str, compiler: str, nz: bool) -> None:
    first, second = two_checkpoints(tmp_path, kind, **SIZES)

    def runner_of(folder: Path) -> hal.Runner:
        compilation = {} if compiler == "eager" else {"capture_sizes": [1, 2, 4], "debug": True}
        backend = npu(
            dtype="float16",
            compilation={"compiler": compiler, **compilation},
            options={"nz_weights": nz},
            cache={"num_tokens": 2048, "reuse_prefixes": True},
        )
        return hal.Runner(hal.load_model(folder, backend), backend)

    with runner_of(second) as fresh:
        other = logits(fresh)
    with runner_of(first) as runner:
        wanted, texts = logits(runner), generated(runner)
        device, held = runner.backend.device, []
        for weights in ("host", "files", "device", "host", "none"):
            device.synchronize()
            before = device.memory_stats().allocated
            slept = hal.sleep(runner, weights=weights)  # type: ignore[arg-type]
            assert not slept.addresses_kept
            assert (slept.weights > 0) == (weights != "device")
            given = before - device.memory_stats().allocated
            assert given >= 0.9 * (slept.weights + slept.caches) > 0
            with pytest.raises(AsleepError, match=r"sleeps: its .*caches.*\n.*hal\.wake"):
                runner.step(runner.batch([[5]], [[1]]))
            hal.wake(runner, "weights")
            if weights == "none":
                hal.replace_weights(runner, tensors(second))
            hal.wake(runner, "caches")
            assert torch.equal(logits(runner), other if weights == "none" else wanted)
            assert weights == "none" or generated(runner) == texts
            device.synchronize()
            held.append(device.memory_stats().allocated)
        assert max(held) - min(held) < 1 << 20
        hal.replace_weights(runner, tensors(first))
        assert torch.equal(logits(runner), wanted)
        hal.sleep(runner)
        backend, model = runner.backend, runner.model
    with hal.Runner(model, backend) as runner:  # The other was closed asleep.
        assert torch.equal(logits(runner), wanted)
