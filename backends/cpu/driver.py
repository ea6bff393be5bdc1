"""The CPU driver."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from hal.config import read
from hal.device.device import CACHE_DTYPES, Limits
from hal.device.graph import Graph
from hal.device.host_device import HostDevice
from hal.device.host_memory import host_zeros
from hal.drivers.backend import Backend
from hal.drivers.driver import Driver, Probe
from hal.errors import ConfigError, DriverUnavailable
from hal.ops import operation
from hal.ops.forms import FLOAT
from hal.ops.kernels import composed_attention, composed_recurrence, torch_kernels
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import kernel_of
from hal.step.state import StateMemory, StateSpec, canonical_states

from . import kernels, low_bits
from .description import Describe
from .invariant import invariant_kernels
from .native.arguments import DTYPES, bound
from .native.processor import InstructionSet
from .packing import ROWS, Packing, packed
from .thread_count import SHARED

if TYPE_CHECKING:
    from hal.nn import WeightUse

    from .native.linear_kernels import LinearKernels


SHORTEST = 0.02
"""Minimum duration of products in seconds, to make the start of threads small."""


class CpuDevice(HostDevice):
    """The host, with C++ functions that reach the highest rates of reading and of products.

    Args:
        library: the C++ kernels; None if there are none.
    """

    def __init__(self, library: ctypes.CDLL | None) -> None:
        super().__init__()
        self._library = library

    def place(self, tensor: Tensor) -> tuple[int, int] | None:
        """See :meth:`HostDevice.place`. A weight that oneDNN packed keeps its address when it is written again."""
        if not tensor.is_mkldnn:
            return super().place(tensor)
        start = int(torch.ops.mkldnn.data_ptr(tensor))
        return start, start + int(torch.ops.mkldnn._nbytes(tensor))

    def reading(self, buffer: Tensor) -> Callable[[], object] | None:
        """Return a function that reads a tensor, in huge pages if the system provides them; None without kernels."""
        if self._library is None:
            return None
        bound(self._library, "collapse_pages", c_int, c_void_p, c_int64)(buffer.data_ptr(), buffer.nbytes)
        read = bound(self._library, "read_memory", c_uint64, c_void_p, c_int64)
        return lambda: read(buffer.data_ptr(), buffer.nbytes)

    def multiplying(self, dtype: torch.dtype) -> tuple[Callable[[], object], int] | None:
        """Return a function that multiplies in registers, and its operations; None without kernels.

        float16 is multiplied as float32, as the kernels do.
        """
        if self._library is None or dtype not in DTYPES:
            return None
        multiply = bound(self._library, "multiply_in_registers", c_int64, c_int, c_int64)
        steps, took = 1 << 16, 0.0
        while took < SHORTEST:
            steps *= 2
            start = time.perf_counter()
            operations = multiply(DTYPES[dtype], steps)
            took = time.perf_counter() - start
        return partial(multiply, DTYPES[dtype], steps), operations


KERNELS: dict[str, Kernel] = {
    **torch_kernels.KERNELS,
    **composed_recurrence.KERNELS,
    **low_bits.form_kernels(low_bits.KERNELS),
    "gelu_and_mul": kernels.gelu_and_mul,
    "greedy_sample": kernels.greedy_sample,
    "latent_attention": kernels.latent_attention,
    "packed_attention": composed_attention.packed,
    "paged_attention": kernels.paged_attention,
    "quantized_paged_attention": kernels.quantized_paged_attention,
    "rotary_embedding": kernels.rotary_embedding,
    "silu_and_mul": kernels.silu_and_mul,
    "store_quantized_kv_cache": operation("store_quantized_kv_cache").reference,
}

INDUCTOR = (
    "attend_chosen",
    "attend_compressed",
    "attend_selected",
    "causal_conv1d",
    "channel_delta_rule",
    "collapse_streams",
    "expand_streams",
    "expert_mlp",
    "gated_delta_rule",
    "grouped_linear",
    "hash_ngrams",
    "head_linear",
    "latent_attention",
    "linear",
    "multi_head_latent_attention",
    "packed_attention",
    "paged_attention",
    "pool_groups",
    "quantized_paged_attention",
    "select_blocks",
    "select_keys",
    "store_kv_cache",
    "store_latent_cache",
    "store_quantized_kv_cache",
)
"""Operations that Inductor calls as opaque kernels; it decomposes the others."""

COLLECTIVES = ("all_gather", "all_gather_rows", "all_reduce", "all_to_all", "reduce_scatter")
"""Operations between ranks, each of which a tape records as one call."""

log = logging.getLogger("hal.cpu")


@attrs.frozen
class CpuOptions:
    """Options of the CPU driver.

    Attributes:
        native: use the C++ kernels, which are compiled on first use; None uses them if they can be compiled.
        instructions: the highest instruction set of an x86 processor that the C++ kernels use; None uses all.
        pack_weights: pack the weights of projections for oneDNN where a measurement finds this faster.
    """

    native: bool | None = None
    instructions: InstructionSet | None = None
    pack_weights: bool = True


class CpuBackend(Backend):
    """The CPU backend. Its graphs are tapes, and it may pack the weights of projections."""

    def __init__(self, options: CpuOptions) -> None:
        library = _library(options)
        native, forms = _native_kernels(library)
        super().__init__(
            "cpu",
            CpuDevice(library),
            kernels={**KERNELS, **native, **_collectives(library)},
            graphs=True,
            limits=Limits(cache_dtypes=CACHE_DTYPES),
            inductor=INDUCTOR + COLLECTIVES,
            invariant=invariant_kernels(library, {**KERNELS, **native}),
            distributed="gloo",
        )
        self._whole = frozenset((*native, *low_bits.KERNELS, *COLLECTIVES))
        self._product = {**KERNELS, **native}["linear"].taking(FLOAT)  # type: ignore[attr-defined]
        self._described: dict[Kernel | None, Describe] = {
            kernel: describe for each in forms.values() for _, kernel, describe in each
        }
        self._few_rows: LinearKernels | None = self._product.__self__ if native else None
        self._packing = Packing(self.device.empty_cache, self._few_rows) if options.pack_weights else None
        self.threads = SHARED.open()

    def enter(self) -> Any:
        """Run operations on this backend, with as many threads as other processes leave cores."""
        self.threads.use()
        return super().enter()

    def leave(self, token: Any) -> None:
        """End the dispatch that :meth:`enter` started, and choose the number of threads of the next step."""
        super().leave(token)
        self.threads.after_step()

    def _release(self) -> None:
        SHARED.close()

    def graph(self) -> Graph:
        """Return a new, empty tape."""
        from .tape import Tape

        return Tape(whole=self._whole)

    def prepare_weights(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        """Return a projection's weight, packed for oneDNN if this is faster at the config's batch sizes."""
        unpacked = self._packing is None or self.config.numerics.invariant
        if unpacked or use.operation != "linear" or use.form != FLOAT:
            if self._few_rows is not None:
                for weight in weights.values():
                    self._few_rows.collapse_pages(weight)
            return weights
        if self.kernels["linear"].taking(FLOAT) is not self._product:  # type: ignore[attr-defined]
            return weights  # a package's kernel, which knows no packed layout
        self.threads.use()  # The faster layout depends on it.
        sizes = sorted(self.config.compilation.of("decode").capture_sizes or ROWS)
        assert self._packing is not None
        prepare = partial(self._packing.prepare, shared=use.shared, sizes=sizes)
        return {name: prepare(weight) for name, weight in weights.items()}

    def allocate(self, spec: StateSpec) -> StateMemory:
        """Allocate a model's states, in huge pages if the system provides them."""
        with self.uses:
            return canonical_states(spec, self.device.torch, host_zeros)

    def replace_weights(self, prepared: Mapping[str, Tensor], weights: Mapping[str, Tensor], use: WeightUse) -> None:
        """Write new values into weights, in the layout that they have: another measurement may choose another one."""
        for name, weight in weights.items():
            held = prepared[name]
            held.copy_(packed(weight) if held.is_mkldnn else weight)

    def describe_kernel(self, weight: Tensor, use: WeightUse) -> str:
        """Return which kernel computes an operation with a weight, for how many rows."""
        kernel = kernel_of(self.kernels.get(use.operation), use.form)
        describe = self._described.get(kernel, super().describe_kernel)
        return describe(weight, use)

    def plain_weight(self, weight: Tensor) -> Tensor:
        """Return a weight in its plain layout."""
        return weight.to_dense() if weight.is_mkldnn else weight


def _library(options: CpuOptions) -> ctypes.CDLL | None:
    """Return the C++ kernels, or None where they are not wanted or cannot be compiled."""
    if options.native is False:
        if options.instructions is not None:
            raise ConfigError(
                f"the cpu driver's option instructions is {options.instructions}, but native is false",
                "omit one of them: only the C++ kernels have instruction sets",
            )
        return None
    from .native.build import load

    try:
        return load(options.instructions)
    except DriverUnavailable as error:
        if options.native or options.instructions is not None:
            raise
        log.warning("the cpu driver runs without its C++ kernels, which is slower: %s", error)
        return None


def _native_kernels(library: ctypes.CDLL | None) -> tuple[dict[str, Kernel], low_bits.Forms]:
    """Return the C++ kernels, and the kernels by form with their descriptions."""
    if library is None:
        return {}, low_bits.KERNELS
    from .native.kernels import native_kernels

    kernels, forms = native_kernels(library)
    return kernels | low_bits.form_kernels(forms), forms


def _collectives(library: ctypes.CDLL | None) -> Mapping[str, Kernel]:
    from .native.shared_memory import SharedMemoryKernels

    # Without C++ kernels, too, because the ranks agree on what all of them can do.
    return SharedMemoryKernels(library).kernels


class CpuDriver(Driver):
    """The CPU driver. It is always available, and ``auto`` tries it last."""

    name = "cpu"
    api_version = (4, 0)
    priority = 0

    def probe(self) -> Probe:
        """Return that the driver is available."""
        return Probe(available=True, reason="every machine has a CPU")

    def open(self, options: Mapping[str, Any]) -> CpuBackend:
        """Open the CPU with :class:`CpuOptions`.

        Raises:
            ConfigError: an option is invalid.
            DriverUnavailable: the option ``native`` is true, or ``instructions`` is given, and the C++ kernels cannot
                be compiled.
        """
        return CpuBackend(read(CpuOptions, options, "options of the cpu driver"))
