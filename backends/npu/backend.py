"""An opened NPU. torch_npu is imported with this module, so that only the driver's ``open`` imports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch_npu
from torch import Tensor

from hal.device.graph import Graph
from hal.drivers.backend import Backend
from hal.drivers.compiler import Compiler
from hal.errors import ConfigError, HalError

from .device import NpuDevice
from .emulator import is_active, trace
from .graph import NpuGraph
from .kernels import fractal, quantized
from .kernels.kernels import in_fractal_nz, kernels
from .options import NpuOptions
from .soc import Generation

if TYPE_CHECKING:
    from hal.nn import WeightUse

NATIVE_NAMES = {
    "atb._npu_paged_attention": "paged_attention",
    "atb._npu_reshape_and_cache": "store_kv_cache",
    "npu.npu_add_rms_norm": "add_rms_norm",
    "npu.npu_fused_infer_attention_score": "paged_attention",
    "npu.npu_rms_norm": "rms_norm",
    "npu.npu_scatter_pa_kv_cache": "store_kv_cache",
    "npu.npu_swiglu": "silu_and_mul",
}
"""torch_npu's operations, and those of hal that stand for them, for ``compilation.splitting_ops``."""


class NpuBackend(Backend):
    """An opened NPU. Made by :class:`~hal.backends.npu.driver.NpuDriver`.

    Args:
        options: of the driver.
        soc: the name of the device.
        generation: that it is of.
        compilers: of the driver's own.
    """

    def __init__(self, options: NpuOptions, soc: str, generation: Generation, compilers: Sequence[Compiler]) -> None:
        if options.attention == "atb" and not generation.atb:
            raise ConfigError(f"{soc} has no ATB, which the option attention asks for", 'leave it at "fused"')
        if options.attention == "atb" and options.nz_cache:
            raise ConfigError("the options attention=atb and nz_cache do not go together", "leave one of them out")
        if options.nz_cache and not generation.nz_cache:
            raise ConfigError(f"{soc} has no kernel that writes a cache in FRACTAL_NZ", "leave the option nz_cache out")
        kind = f"{generation.name}, emulated" if is_active() else generation.name
        device = NpuDevice(torch.device("npu", options.device), f"{soc} ({kind})")
        table = kernels(device.torch, attention=options.attention) | quantized.kernels(device.torch)
        limits = generation.limits(options.max_streams)
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
        )
        self.options = options
        self.npu = device

    def activate(self) -> None:
        """As any backend; and make its device the current one of this thread, where the kernels' results are made."""
        super().activate()
        torch_npu.npu.set_device(self.device.torch)

    def enter(self) -> Any:
        """As any backend; and make its device the current one of this thread, where kernels are launched."""
        before = torch_npu.npu.current_device()
        if before != self.device.torch.index:
            torch_npu.npu.set_device(self.device.torch)
        return super().enter(), before

    def leave(self, token: Any) -> None:
        """Make the device current that was."""
        table, before = token
        super().leave(table)
        if before != self.device.torch.index:
            torch_npu.npu.set_device(before)

    def graph(self) -> Graph:
        """A new, empty NPUGraph."""
        return NpuGraph(self.npu)

    def prepare_weight(self, weight: Tensor, use: WeightUse) -> Tensor:
        """Projections' in FRACTAL_NZ, if the option ``nz_weights`` says so; scales as npu_quant_matmul wants them."""
        match use.operation, use.argument:
            case "linear", "weight":
                return in_fractal_nz(weight) if self.options.nz_weights else weight
            case "quant_linear_static" | "quant_linear_dynamic", "weight":
                return quantized.prepared_int8_weight(weight, self.options.nz_weights)
            case "quant_linear_static", "deq_scale":
                return quantized.prepared_deq_scale(weight, use.dtype)
        return weight

    def explain(self, error: BaseException) -> HalError | None:
        """What CANN's error code, or torch's exception, means."""
        return self.npu.explain(error)

    @contextmanager
    def counting_launches(self) -> Iterator[Counter[str]]:
        """By the emulated CANN's trace; on hardware nothing counts them."""
        if not is_active():
            raise ConfigError("launches are counted by the emulated CANN only", "run with the option emulator")
        found: Counter[str] = Counter()
        self.device.synchronize()  # what was launched before is not to be counted
        with trace() as tracing:
            yield found
        for record in tracing.records:
            if record.phase != "capture" and record.kind != "update":
                found[record.name if record.kind == "kernel" else record.kind] += 1
