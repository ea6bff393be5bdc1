"""Tests for KV caches in 8 bits on the NPU: logits against the CPU's, and how a decode reads an int8 cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated_cann
import pytest
import torch
from helpers.checkpoints import random_checkpoint
from helpers.quantized import error
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.checkpoint.cache_dtype import DTYPES
from hal.errors import ConfigError
from hal.ops.tolerance import assert_agree
from hal.step import StateSpec
from hal.step.state import key_value_states
from hal.vendor import PreparingKernel

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [1, 7, 30, 4, 200, 19, 19, 3]


def opened(backend: str, compiler: str, dtype: str, cache: str, **options: Any) -> hal.Backend:
    compilation = {"compiler": compiler, **({} if compiler == "eager" else {"capture_sizes": [2]})}
    return hal.open(
        {
            "backend": backend,
            "dtype": dtype,
            "compilation": compilation,
            "cache": {"dtype": cache, "num_tokens": 512, "block_size": 128},
            "options": options,
        }
    )


def steps(folder: Path, on: hal.Backend) -> Tensor:
    """Return the logits of a prefill of two sequences and of three decode steps."""
    with on, hal.Runner(hal.load_model(folder, on), on) as runner:
        rows = [[1], [2]]
        found = [runner.step(runner.batch([PROMPT, PROMPT[:3]], rows), hal.step.ALL).logits.cpu().clone()]
        for place in range(3):
            cached = [len(PROMPT) + place, 3 + place]
            found.append(runner.step(runner.batch([[5 + place], [9]], rows, cached=cached)).logits.cpu().clone())
    return torch.cat(found)


@thorough(EXHAUSTIVE, r"-float16|(piecewise|npugraph_ex)-fp8")
@thorough(MODE, r"\[((piecewise|npugraph_ex)-int8-b|(eager|graph)-fp8-b)")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cache", ["int8", "fp8"])
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise", "npugraph_ex"])
def test_logits_are_as_close_as_the_cpus(compiler: str, cache: str, dtype: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path)
    exact = steps(folder, opened("cpu", "eager", "float32", "model"))
    rounded = steps(folder, opened("cpu", "eager", dtype, cache))
    found = steps(folder, opened("npu", compiler, dtype, cache))
    assert error(found.float(), exact) < 1.5 * error(rounded.float(), exact) + 0.003


def test_a_decode_reads_an_int8_cache_as_it_is(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path)
    found = {}
    for cache in ("model", "int8"):
        on = opened("npu", "graph", "bfloat16", cache)
        with on, hal.Runner(hal.load_model(folder, on), on) as runner:
            runner.step(runner.batch([PROMPT, PROMPT[:3]], [[1], [2]]))
            torch.npu.synchronize()
            with emulated_cann.trace() as trace:
                runner.step(runner.batch([[5], [9]], [[1], [2]], cached=[len(PROMPT), 3]))
                torch.npu.synchronize()
            found[cache] = trace.counts()
            layers = len(runner.spec.layers)
    more = {name: count - found["model"].get(name, 0) for name, count in found["int8"].items()}
    assert found["int8"]["FusedInferAttentionScoreV3"] == layers
    assert more.pop("DynamicQuantV2") == layers
    assert found["int8"]["ScatterPaKvCache"] == found["model"]["ScatterPaKvCache"] == layers
    assert 0 < sum(more.values()) <= 10, more  # which prepare the slots of all layers


@pytest.mark.parametrize(("cache", "most"), [("int8", 3), ("fp8", 9)])
def test_one_launch_writes_numbers_and_scales(cache: str, most: int, npu: Callable[..., hal.Backend]) -> None:
    """The slots of all layers of a step are prepared in a few more, which a compiled step launches once."""
    backend, layer = npu(), key_value_states(2, 64, quantized=DTYPES[cache])
    states = backend.allocate(StateSpec((layer,), torch.bfloat16, num_blocks=3, block_size=32)).layers[0]
    names = "key", "value", "key_scale", "value_scale"
    caches, draw = [states[name] for name in names], ops.Draw(torch.bfloat16, "npu", 1)
    given = [draw.normal(5, 2, 64) for _ in range(2)]
    slots = torch.tensor([33, 95, 40, 64, 90], dtype=torch.int32)
    kernel = backend.kernels["store_quantized_kv_cache"]
    assert isinstance(kernel, PreparingKernel)
    prepared = kernel.prepare["slot_mapping"](slots.npu(), caches[0])
    torch.npu.synchronize()
    with emulated_cann.trace() as trace:
        kernel.kernel(*given, None, None, *caches, prepared)
        torch.npu.synchronize()
    assert trace.counts()["ScatterPaKvCache"] == 1
    assert sum(trace.counts().values()) == most, trace.counts()
    declared = ops.operation("store_quantized_kv_cache")
    expected = [torch.zeros(each.shape, dtype=each.dtype) for each in caches]
    declared.reference(*(each.cpu() for each in given), None, None, *expected, slots)
    assert_agree(declared, torch.bfloat16, [each.cpu() for each in caches], expected, cache)


def test_a_cache_in_fractal_nz_is_refused(tmp_path: Path) -> None:
    on = opened("npu", "eager", "bfloat16", "int8", nz_cache=True)
    with on, pytest.raises(ConfigError, match=r"fractal_nz.* one in int8 has the canonical layout|head_dim"):
        hal.load_model(random_checkpoint(tmp_path), on)
