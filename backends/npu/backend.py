"""The backend of an opened NPU. Importing this module imports torch_npu, so only the driver's ``open`` does."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch_npu
from torch import Tensor

from hal.config import Config
from hal.device.graph import Graph
from hal.drivers.backend import Backend
from hal.drivers.compiler import Compiler
from hal.errors import ConfigError, HalError
from hal.ops.kernels.kernel_table import Kernel
from hal.vendor import FormKernels, StowedWeight

from .device import NpuDevice
from .emulation import emulated_cann, is_active
from .graph import NpuGraph
from .kernels import (
    experts,
    fractal,
    hyper_connections,
    packed_attention,
    quantized,
    quantized_cache,
    quantized_experts,
    recurrence,
    selection,
    triton_kernels,
)
from .kernels.attention import FusedAttention
from .kernels.collectives import FusedCollectives
from .kernels.dispatch import ExpertExchange
from .kernels.forms import Prepare, form_kernels
from .kernels.kernels import StowedFractal, is_fractal_nz, kernels
from .options import NpuOptions
from .soc import Generation

if TYPE_CHECKING:
    from hal.nn import WeightUse
    from hal.step.state import StateMemory, StateSpec

NATIVE_NAMES = {
    "atb._npu_paged_attention": "paged_attention",
    "atb._npu_reshape_and_cache": "store_kv_cache",
    "npu.npu_add_rms_norm": "add_rms_norm",
    "npu.npu_fused_infer_attention_score": "paged_attention",
    "npu.npu_fused_infer_attention_score_v2": "paged_attention",
    "npu.npu_rms_norm": "rms_norm",
    "npu.npu_scatter_pa_kv_cache": "store_kv_cache",
    "npu.npu_swiglu": "silu_and_mul",
}
"""torch_npu's operations and the equivalent operations of hal, for ``compilation.splitting_ops``."""


INVARIANT = ("mask_logits", "store_kv_cache", "store_latent_cache")
"""Operations whose kernels copy. CANN does not document which other results depend on their row alone."""
CONNECT_TIMEOUT = 120, 7200
"""The least and the most seconds that HCCL accepts for ranks to connect. Source: HCCL's HCCL_CONNECT_TIMEOUT.md."""


def communication_variables(timeout: int) -> dict[str, str]:
    """Return the environment variables with which a rank that fails or is late becomes an exception of the others.

    By default, HCCL waits half an hour, and torch_npu's watchdog ends the process without an exception. Sources:
    HCCL's HCCL_EXEC_TIMEOUT.md, torch_npu's TORCH_HCCL_ASYNC_ERROR_HANDLING.md.

    Args:
        timeout: the seconds after which a collective fails that a rank has not joined.
    """
    least, most = CONNECT_TIMEOUT
    return {
        "HCCL_CONNECT_TIMEOUT": str(min(max(timeout, least), most)),
        "HCCL_EXEC_TIMEOUT": str(timeout),
        "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
    }


class NpuBackend(Backend):
    """An opened NPU, created by :class:`~hal.backends.npu.driver.NpuDriver`.

    Raises:
        ConfigError: the options request a kernel that the SoC lacks, or contradict each other.
    """

    def __init__(self, options: NpuOptions, soc: str, generation: Generation, compilers: Sequence[Compiler]) -> None:
        if options.attention == "atb" and not generation.atb:
            raise ConfigError(f'the option attention is "atb", and {soc} has no ATB', 'set attention to "fused"')
        if options.attention == "atb" and options.nz_cache:
            raise ConfigError("the options attention=atb and nz_cache exclude each other", "remove one of them")
        if options.nz_cache and not generation.nz_cache:
            raise ConfigError(
                f"the option nz_cache is set, and {soc} has no kernel that writes a cache in FRACTAL_NZ",
                "remove nz_cache",
            )
        kind = f"{generation.name}, emulated" if is_active() else generation.name
        device = NpuDevice(torch.device("npu", options.device), f"{soc} ({kind})")
        table = kernels(device.torch, generation, attention=options.attention) | quantized.kernels(device.torch)
        sparse = selection.SparseAttention(device.torch, generation)
        table |= {**recurrence.kernels(device.torch, generation), **sparse.kernels}
        self._prepare: dict[Kernel, Prepare] = {table["causal_conv1d"]: recurrence.prepared}
        for name, forms in form_kernels(device.torch, generation, nz=options.nz_weights).items():
            table[name] = FormKernels(name, [(each.takes, each.kernel) for each in forms])
            self._prepare |= {each.kernel: each.prepare for each in forms}
        if generation.experts:
            fuses = options.nz_weights and generation.swiglu_quant_nz
            mlps = quantized_experts.QuantizedExperts(device.torch, fuses=fuses)
            table |= experts.kernels() | mlps.kernels()
        fused = FusedCollectives(device.torch, generation, options.mc2_rows, options.nz_weights)
        table |= {**fused.kernels, **packed_attention.kernels(device.torch)}
        self._exchange = ExpertExchange(device.torch) if generation.distributes_experts else None
        if self._exchange is not None:
            table |= self._exchange.kernels()
        limits = generation.limits(options.max_streams)
        table |= quantized_cache.kernels(device.torch, FusedAttention(device.torch))
        if options.triton:
            table |= triton_kernels.kernels()
        table |= hyper_connections.kernels(generation)
        if options.nz_cache:
            table |= fractal.kernels(device.torch)
            limits = attrs.evolve(limits, head_dims=(fractal.HEAD_DIM,))
        super().__init__(
            "npu",
            device,
            kernels=table,
            graphs=generation.graphs,
            compilers=compilers,
            aliases={"npugraph": "graph"},
            limits=limits,
            native_names=NATIVE_NAMES,
            state_layout="fractal_nz" if options.nz_cache else "canonical",
            sources=fused.sources,
            conditions={**fused.conditions, **sparse.conditions},
            invariant={name: table[name] for name in INVARIANT},
            distributed="hccl",
        )
        self.options = options
        self.npu = device

    def allocate(self, spec: StateSpec) -> StateMemory:
        """Allocate a model's states; see :meth:`hal.Backend.allocate`."""
        return quantized_cache.allocate(spec, super().allocate)

    def activate(self) -> None:
        """Activate the backend, and make its device the thread's current one, on which kernels allocate results."""
        super().activate()
        torch_npu.npu.set_device(self.device.torch)

    def configure(self, config: Config) -> None:
        """Apply a configuration; see :meth:`hal.Backend.configure`. The ranks make a communicator for dispatch."""
        super().configure(config)
        if self._exchange is not None and self.config.parallel.experts == "dispatch" and self.mesh.expert.size > 1:
            with self.translating_errors():
                self._exchange.join(self.mesh.expert)

    def enter(self) -> Any:
        """Enter the backend, and make its device the thread's current one, on which kernels launch."""
        before = torch.accelerator.current_device_index()
        if before != self.device.torch.index:
            torch_npu.npu.set_device(self.device.torch)
        return super().enter(), before

    def leave(self, token: Any) -> None:
        """Leave the backend, and restore the thread's current device."""
        table, before = token
        super().leave(table)
        if before != self.device.torch.index:
            torch_npu.npu.set_device(before)

    def graph(self) -> Graph:
        """Return a new, empty graph."""
        return NpuGraph(self.npu)

    def prepare_weights(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        """Return weights in the format of their kernel; see :meth:`hal.Backend.prepare_weights`."""
        kernel: Any = self.kernels.get(use.operation)
        if isinstance(kernel, FormKernels):
            kernel = kernel.taking(use.form)
        prepare = self._prepare.get(kernel)
        return weights if prepare is None else prepare(weights, use)

    def stow_weight(self, weight: Tensor, *, copy: bool) -> StowedWeight:
        """Return what frees the memory of a weight for some time, also in FRACTAL_NZ."""
        return StowedFractal(weight, copy=copy) if is_fractal_nz(weight) else super().stow_weight(weight, copy=copy)

    def _join(self, config: Config) -> None:
        """Join the ranks. HCCL connects them here, so that a rank that ends later is noticed at once."""
        alone = self.mesh.size == 1
        if config.parallel.size > 1:
            for name, value in communication_variables(config.parallel.timeout).items():
                os.environ.setdefault(name, value)
        super()._join(config)
        if alone and self.mesh.size > 1:
            shared = () if config.parallel.experts == "split" else (self.mesh.data, self.mesh.expert)
            with self.translating_errors():
                for group in dict.fromkeys((self.mesh.tensor, *shared)):
                    if group.size > 1:
                        self.kernels["all_reduce"](torch.zeros(1, device=self.device.torch), group.name)
                self.device.synchronize()

    def explain(self, error: BaseException) -> HalError | None:
        """Return the HalError for an exception of torch_npu's; None if the device did not cause it."""
        return self.npu.explain(error)

    @contextmanager
    def counting_launches(self) -> Iterator[Counter[str]]:
        """Count launches with the emulated CANN's trace.

        Raises:
            ConfigError: the device is a real NPU, which does not count launches.
        """
        if not is_active():
            raise ConfigError(
                "only the emulated CANN counts launches", "set the driver option emulator", key="launches"
            )
        found: Counter[str] = Counter()
        self.device.synchronize()  # excludes earlier launches from the count
        with emulated_cann().trace() as tracing:
            yield found
        for record in tracing.records:
            if record.phase != "capture" and record.kind != "update":
                found[record.name if record.kind == "kernel" else record.kind] += 1
