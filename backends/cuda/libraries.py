"""The libraries that kernels come from, and what of each can be used on this machine's GPU."""

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
from .kernels import KERNELS

Capability = tuple[int, int]
Which = Callable[[str], str | None]
FindSpec = Callable[[str], Any]

COMPILERS = ("gcc", "clang", "cc")
MIXED = "triton, long prefills torch"
"""What is said of attention that both compute."""
UNPLANNED = "flashinfer, graphs triton"
"""What is said of attention by FlashInfer that graphs do not capture."""


def has_flash(capability: Capability) -> bool:
    """Whether torch has flash attention for a GPU."""
    return capability >= (8, 0) and torch.backends.cuda.is_flash_attention_available()


def torch_library(capability: Capability) -> Library:
    """torch's own functions, which are always there."""
    return Library("torch", {**KERNELS, "paged_attention": TorchAttention(flash=has_flash(capability))})


def triton_library(
    capability: Capability,
    find_spec: FindSpec = importlib.util.find_spec,
    which: Which = shutil.which,
    environ: Mapping[str, str] = os.environ,
) -> Library:
    """Our kernels in Triton."""
    if find_spec("triton") is None:
        return Library("triton", problem="triton is not installed", remedy="pip install triton")
    if capability < (8, 0):
        return Library(
            "triton",
            problem=f"Triton needs compute capability 8.0, and the GPU has {capability[0]}.{capability[1]}",
            remedy="use a GPU of the Ampere generation or later",
        )
    if not environ.get("CC") and not any(map(which, COMPILERS)):
        return Library(
            "triton",
            problem="there is no C compiler, which Triton compiles its launchers with",
            remedy="install gcc, or name another compiler in the variable CC",
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
    """FlashInfer.

    Args:
        device: the GPU.
        otherwise: by operation, kernels for what FlashInfer does not take.
        in_graphs: whether graphs capture its attention too; if not, they capture that of ``otherwise``.
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
            problem="flashinfer is installed, but neither its compiled kernels nor nvcc, which would compile them",
            remedy="install the package flashinfer-jit-cache for your CUDA, or the CUDA toolkit",
        )
    from .flashinfer.kernels import kernels

    try:
        return Library("flashinfer", kernels(device, otherwise, in_graphs=in_graphs))
    except (ImportError, OSError, AttributeError) as error:
        return Library(
            "flashinfer", problem=f"flashinfer cannot be used: {error}", remedy="install a release that fits torch"
        )


def kernels_for(device: torch.device, capability: Capability, forced: Mapping[str, str]) -> dict[str, Chosen]:
    """The kernel of each operation on a GPU, and where it is from.

    Args:
        device: the GPU.
        capability: its compute capability.
        forced: what the option ``kernels`` says.

    Raises:
        ConfigError: ``forced`` asks for what is not there.
    """
    own, triton = torch_library(capability), triton_library(capability)
    both = {**own.kernels, **triton.kernels}
    if "paged_attention" in triton.kernels and has_flash(capability):
        # Flash attention multiplies faster than ours in Triton, which decodes and reads the cache in place.
        both["paged_attention"] = ByLength(triton.kernels["paged_attention"], own.kernels["paged_attention"])
    otherwise = {name: both.get(name, operation.reference) for name, operation in ops.catalogue().items()}
    # FlashInfer plans on the host before each replay, which takes longer than a whole step of a graph may. So graphs
    # have its attention only where it is asked for, or where Triton's cannot be had.
    planned = "paged_attention" in forced or "paged_attention" not in triton.kernels
    chosen = choose([flashinfer_library(device, otherwise, in_graphs=planned), triton, own], forced)
    attention = chosen.get("paged_attention")
    if attention and "paged_attention" not in forced:
        if attention.library == "triton" and has_flash(capability):
            chosen["paged_attention"] = Chosen(MIXED, both["paged_attention"])
        elif attention.library == "flashinfer" and not planned:
            chosen["paged_attention"] = Chosen(UNPLANNED, attention.kernel)
    return chosen
