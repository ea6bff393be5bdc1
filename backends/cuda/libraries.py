"""The libraries of kernels, and those that this machine's GPU can use, and its limits."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.device.device import Limits
from hal.ops.kernels import composed_attention, composed_recurrence, torch_kernels
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import FormKernels, plain
from hal.ops.projection import int8_matmul

from .attention import ByLength, TorchAttention, capturing, dense
from .choice import Chosen, Library, choose

OLDEST = (7, 5)
"""The compute capability of the Turing generation, the oldest that torch's builds for CUDA 13 support."""
CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
BLOCK_SIZES_OF_PAGES = (256, 512, 128, 64, 32, 16)
"""Block sizes for torch's attention, which reads blocks of 256 tokens in place and gathers others."""


def limits(capability: tuple[int, int], *, pages: bool) -> Limits:
    """Return the limits of a GPU.

    Args:
        capability: the compute capability, major and minor.
        pages: whether attention prefers blocks that flash attention reads in place.
    """
    halves = (torch.bfloat16, torch.float16) if capability >= (8, 0) else (torch.float16,)
    return Limits(
        dtypes=(*halves, torch.float32), block_sizes=BLOCK_SIZES_OF_PAGES if pages else (), capture_sizes=CAPTURE_SIZES
    )


MIN_ROWS, MULTIPLE = 17, 8
"""torch._int_mm's limits: the minimum rows of the left matrix, and the divisor of its other dimensions."""


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in int32, from cuBLAS if it supports the weight, otherwise from the reference."""
    out_features, width = weight.shape
    if out_features % MULTIPLE or width % MULTIPLE or not weight.numel():
        return int8_matmul(x, weight)
    rows = x.reshape(-1, width)
    count = rows.shape[0]
    if not count:
        return x.new_empty(*x.shape[:-1], out_features, dtype=torch.int32)
    if count < MIN_ROWS:
        # Padded to a multiple of 8, which some releases of cuBLAS require.
        rows = functional.pad(rows, (0, 0, 0, MIN_ROWS + MULTIPLE - 1 - count))
    return torch._int_mm(rows.contiguous(), weight.t())[:count].view(*x.shape[:-1], out_features)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """See :func:`hal.ops.packed_attention`. A capture runs the reference, because the calls depend on the lengths."""
    arguments = query, key, value, query_start_loc, query_start_loc_host, scale, causal
    if capturing(query):
        found: Tensor = ops.operation("packed_attention").reference(*arguments)
        return found
    return composed_attention.packed(*arguments)


LINEAR = FormKernels(
    "linear",
    [(plain, torch_kernels.linear), (lambda form: form.exact, torch_kernels.integer_linear(int8_product))],
    otherwise=torch_kernels.linear,
)
"""cuBLAS multiplies by floating-point and int8 weights themselves, and by others once they are widened."""
KERNELS: dict[str, Kernel] = {
    **torch_kernels.KERNELS,
    **composed_recurrence.KERNELS,
    # torch's sort and elementwise functions, without a wait for the GPU. A library with its own random generator cannot
    # implement it: the operation's draw depends only on seed, step and token.
    "sample": ops.operation("sample").reference,
    "float8_quantize": ops.operation("float8_quantize").reference,
    "linear": LINEAR,
    "packed_attention": packed_attention,
    "scaled_dot_product_attention": dense,
}
"""Kernels by operation. Attention over the paged cache is in attention.py."""


Capability = tuple[int, int]
Which = Callable[[str], str | None]
FindSpec = Callable[[str], Any]

COMPILERS = ("gcc", "clang", "cc")
MIXED = "triton, long prefills torch"
"""The library name of attention that both compute."""
UNPLANNED = "flashinfer, graphs triton"
"""The library name of FlashInfer's attention if graphs do not capture it."""


def has_flash(capability: Capability) -> bool:
    """Return whether torch has flash attention for a GPU."""
    return capability >= (8, 0) and torch.backends.cuda.is_flash_attention_available()


def torch_library(capability: Capability) -> Library:
    """Return the kernels on torch's functions, which are always available."""
    attention = TorchAttention(flash=has_flash(capability))
    joined = composed_attention.joining(attention)
    return Library("torch", {**KERNELS, "paged_attention": attention, "latent_attention": joined})


def triton_library(
    capability: Capability,
    find_spec: FindSpec = importlib.util.find_spec,
    which: Which = shutil.which,
    environ: Mapping[str, str] = os.environ,
) -> Library:
    """Return hal's Triton kernels, or why they cannot be used."""
    if find_spec("triton") is None:
        return Library("triton", problem="triton is not installed", remedy="pip install triton")
    if capability < (8, 0):
        return Library(
            "triton",
            problem=f"Triton requires compute capability 8.0, and the GPU has {capability[0]}.{capability[1]}",
            remedy="use a GPU of the Ampere generation or later",
        )
    if not environ.get("CC") and not any(map(which, COMPILERS)):
        return Library(
            "triton",
            problem="Triton requires a C compiler, and none is on the PATH",
            remedy="install gcc, or set the variable CC to another compiler",
        )
    try:
        from ..triton import KERNELS as TRITON
    except (ImportError, OSError) as error:
        return Library("triton", problem=f"triton cannot be imported: {error}", remedy="reinstall torch and triton")
    return Library("triton", TRITON)


def flashinfer_library(
    device: torch.device,
    otherwise: Mapping[str, Kernel],
    find_spec: FindSpec = importlib.util.find_spec,
    which: Which = shutil.which,
    environ: Mapping[str, str] = os.environ,
    *,
    in_graphs: bool = True,
) -> Library:
    """Return FlashInfer's kernels, or why they cannot be used.

    Args:
        device: the GPU.
        otherwise: kernels for arguments that FlashInfer does not support, by operation.
        in_graphs: whether graphs capture its attention; otherwise they capture that of ``otherwise``.
        find_spec: finds an importable package.
        which: finds a command.
        environ: the process's environment variables.
    """
    if find_spec("flashinfer") is None:
        return Library("flashinfer", problem="flashinfer is not installed", remedy="pip install flashinfer-python")
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    compiles = which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()
    if not compiles and find_spec("flashinfer_jit_cache") is None:
        return Library(
            "flashinfer",
            problem="flashinfer is installed, but neither its compiled kernels nor nvcc to compile them",
            remedy="install the package flashinfer-jit-cache for your CUDA, or the CUDA toolkit",
        )
    from .flashinfer.kernels import kernels

    try:
        return Library("flashinfer", kernels(device, otherwise, in_graphs=in_graphs))
    except (ImportError, OSError, AttributeError) as error:
        return Library(
            "flashinfer", problem=f"flashinfer cannot be used: {error}", remedy="install a release that matches torch"
        )


def kernels_for(device: torch.device, capability: Capability, forced: Mapping[str, str]) -> dict[str, Chosen]:
    """Return the kernel of each operation on a GPU, with its library.

    Args:
        device: the GPU.
        capability: its compute capability.
        forced: the option ``kernels``.

    Raises:
        ConfigError: ``forced`` names an unknown operation, or a library that cannot be used.
    """
    own, triton = torch_library(capability), triton_library(capability)
    both = {**own.kernels, **triton.kernels}
    if "paged_attention" in triton.kernels and has_flash(capability):
        # Flash attention is faster for long prefills. hal's Triton kernel runs decodes, reading the cache in place.
        both["paged_attention"] = ByLength(triton.kernels["paged_attention"], own.kernels["paged_attention"])
    otherwise = {name: both.get(name, operation.reference) for name, operation in ops.catalogue().items()}
    # FlashInfer plans on the host before each replay, which may take longer than the rest of the step. So graphs use
    # its attention only if the option requests it, or if Triton's cannot be used.
    planned = "paged_attention" in forced or "paged_attention" not in triton.kernels
    chosen = choose([flashinfer_library(device, otherwise, in_graphs=planned), triton, own], forced)
    attention = chosen.get("paged_attention")
    if attention and "paged_attention" not in forced:
        if attention.library == "triton" and has_flash(capability):
            chosen["paged_attention"] = Chosen(MIXED, both["paged_attention"])
        elif attention.library == "flashinfer" and not planned:
            chosen["paged_attention"] = Chosen(UNPLANNED, attention.kernel)
    return chosen
