"""The libraries of kernels, and detection of those that can be used with this machine's GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hal import ops
from hal.ops.kernels.kernel_table import Kernel

from .attention import ByLength, TorchAttention
from .choice import Chosen, Library, choose
from .torch_functions import KERNELS

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
    return Library("torch", {**KERNELS, "paged_attention": TorchAttention(flash=has_flash(capability))})


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
        from .triton import KERNELS as TRITON
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
