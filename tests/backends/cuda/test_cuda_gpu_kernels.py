"""Tests for every kernel of every library against the references, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.attending import with_blind_queries
from helpers.kernel_checks import check_kernel, draw_on

import hal
from hal import ops
from hal.errors import ConfigError
from hal.ops import AttentionOptions, Draw, Operation, Sample
from hal.ops.form_samples import INT8_DYNAMIC

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERATIONS = list(ops.catalogue().values())
ATTENTION = ops.operation("paged_attention")
LIBRARIES = (None, "flashinfer", "triton", "torch")
"""None stands for the driver's choice."""

Opened = Callable[..., hal.Backend]


def opened(gpu: Opened, operation: Operation, library: str | None, dtype: torch.dtype) -> hal.Backend:
    """Open the backend with the operation's kernel from one library."""
    try:
        backend = gpu(options={} if library is None else {"kernels": {operation.name: library}})
    except ConfigError as error:
        pytest.skip(f"{operation.name} by {library}: {error.problem}")
    if dtype not in backend.limits.dtypes:
        pytest.skip(f"the GPU does not compute in {dtype}")
    return backend


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("library", LIBRARIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_it_meets_the_reference(
    gpu: Opened, seed: int, dtype: torch.dtype, library: str | None, operation: Operation
) -> None:
    backend = opened(gpu, operation, library, dtype)
    for number, sample in enumerate(draw_on("cuda", operation, dtype, seed)):
        check_kernel(operation, dtype, getattr(backend.ops, operation.name), sample, f"sample {number}, seed {seed}")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
def test_nothing_waits_for_the_gpu(gpu: Opened, operation: Operation) -> None:
    """torch raises where one of its functions would synchronize; kernels must not do so at any call."""
    backend = opened(gpu, operation, None, torch.float16)
    kernel = getattr(backend.ops, operation.name)
    for sample in list(draw_on("cuda", operation, torch.float16, 0)):
        with torch.inference_mode():
            kernel(*sample)  # compilation and allocation at a first call
            torch.cuda.set_sync_debug_mode("error")
            try:
                kernel(*sample)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def attention_sample(draw: Draw, queries: list[int], lengths: list[int], **shape: Any) -> Sample:
    """Return a sample with the shapes of real models, on the GPU."""
    heads, kv_heads, head_dim = shape.get("heads", 32), shape.get("kv_heads", 8), shape.get("head_dim", 128)
    block_size, window = shape.get("block_size", 64), shape.get("window")
    columns = -(-max(lengths) // block_size) + 1
    blocks = columns * len(lengths) + 1
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    caches = (draw.normal(blocks, block_size, kv_heads, head_dim) for _ in range(2))
    table = draw.permutation(blocks)[: columns * len(lengths)].view(len(lengths), columns)
    return (
        draw.normal(sum(queries), heads, head_dim),
        *caches,
        table,
        starts.to(draw.device),
        kv_lens.to(draw.device),
        starts,
        kv_lens,
        shape.get("sinks"),
        AttentionOptions(head_dim**-0.5, window=window, softcap=shape.get("softcap")),
    )


SHAPES = {
    "decode": ([1] * 5, [1, 63, 64, 65, 3000], {}),
    "long decode": ([1, 1], [16000, 1], {"kv_heads": 2, "heads": 16}),
    "window": ([1] * 4, [5, 700, 64, 128], {"window": 128}),
    "prefill": ([300, 1, 65], [300, 1, 65], {}),
    "prefill after a prefix": ([40, 7, 128], [500, 64, 1000], {}),
    "prefill in a window": ([200, 90], [400, 90], {"window": 100}),
    "large blocks": ([1, 1, 200], [300, 256, 400], {"block_size": 256}),
    "decode in large blocks": ([1] * 3, [300, 256, 1], {"block_size": 256}),
    "wide heads": ([1, 1, 30], [90, 500, 30], {"head_dim": 256, "heads": 8, "kv_heads": 4}),
    "narrow heads": ([1, 50], [90, 50], {"head_dim": 64, "heads": 8, "kv_heads": 8}),
    "odd heads": ([1, 50], [90, 50], {"head_dim": 80, "heads": 4, "kv_heads": 4}),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("library", LIBRARIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_the_shapes_of_models(gpu: Opened, dtype: torch.dtype, library: str | None, name: str) -> None:
    backend = opened(gpu, ATTENTION, library, dtype)
    queries, lengths, shape = SHAPES[name]
    for seed in range(2):
        sample = attention_sample(Draw(dtype, "cuda", seed), queries, lengths, **shape)
        check_kernel(ATTENTION, dtype, backend.ops.paged_attention, sample, f"{name}, seed {seed}")


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_a_step_after_another_on_the_same_tensors(gpu: Opened, library: str | None) -> None:
    """Blocks and lengths change in place between steps, so nothing computed from them may be reused."""
    backend = opened(gpu, ATTENTION, library, torch.float16)
    first = attention_sample(Draw(torch.float16, "cuda", 0), [1] * 4, [100, 200, 65, 128])
    for lengths in ([100, 200, 65, 128], [7, 64, 199, 1]):
        kv_lens = torch.tensor(lengths, dtype=torch.int32)
        first[5].copy_(kv_lens)
        first[7].copy_(kv_lens)
        for _ in range(2):  # the same lengths, with other blocks
            first[3].copy_(first[3].flip(0))
            check_kernel(ATTENTION, torch.float16, backend.ops.paged_attention, first, f"lengths {lengths}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_queries_that_attend_to_no_key(gpu: Opened, seed: int, dtype: torch.dtype) -> None:
    """They return 0. cuDNN, which torch uses on Hopper, computes other rows for them."""
    operation, backend = ops.operation("scaled_dot_product_attention"), gpu()
    for number, sample in enumerate(with_blind_queries(Draw(dtype, "cuda", seed))):
        sample = (*sample, None, None)  # neither softcap nor sinks
        check_kernel(operation, dtype, backend.ops.scaled_dot_product_attention, sample, f"{number}, seed {seed}")


def test_int8_of_the_shapes_of_models(gpu: Opened) -> None:
    operation = ops.operation("linear")
    backend, draw = gpu(), Draw(torch.float16, "cuda", 3)
    for rows, width, out in ((1, 4096, 6144), (8, 4096, 4096), (17, 12288, 4096), (300, 4096, 1024)):
        x, weight = (draw.integers(-128, 128, each, width, dtype=torch.int8) for each in (rows, out))
        x_scale, scale = draw.normal(rows).abs().float() * 1e-2, draw.normal(out).abs().float() * 1e-2
        arguments = (x, weight, None, scale.unsqueeze(-1), None, x_scale, torch.float16, INT8_DYNAMIC)
        check_kernel(operation, torch.float16, backend.ops.linear, arguments, f"{rows} x {width} x {out}")


def test_where_kernels_are_from_is_known(gpu: Opened) -> None:
    backend: Any = gpu(options={"kernels": {"paged_attention": "torch", "silu_and_mul": "reference"}})
    assert set(backend.sources) == set(backend.kernels)
    assert backend.sources["paged_attention"] == "torch"
    if backend.kernels["paged_attention"].pages:
        assert backend.limits.block_sizes[0] == 256
    assert "silu_and_mul" not in backend.kernels


def test_launches_are_counted(gpu: Opened) -> None:
    backend = gpu()
    x = torch.ones(1000, device=backend.device.torch)
    with backend.counting_launches() as launches:
        for _ in range(5):
            x = x + 1
    assert launches.total() == 5
    assert "elementwise" in next(iter(launches))
