"""The NPU driver: what it needs is probed without torch_npu, and torch_npu is imported when it is opened."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import attrs

from hal.config import read
from hal.drivers.backend import Backend
from hal.drivers.compiler import Compiler, Form
from hal.drivers.driver import Driver, Probe
from hal.errors import ConfigError, DriverUnavailable, HalError

from .emulator.activation import Switch, switch_of
from .probe import probe, probe_emulated
from .soc import Generation, generation_of

if TYPE_CHECKING:
    from collections import Counter

    from torch import Tensor

    from hal.device.graph import Graph
    from hal.execution.context import FormContext
    from hal.nn import WeightUse

log = logging.getLogger("hal.npu")


def _at_least_0(instance: Any, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"{attribute.name} must be at least 0, not {value}")


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


@attrs.frozen
class NpuOptions:
    """Options of the NPU driver.

    Attributes:
        device: the NPU's index, among those that the process sees.
        emulator: ``on`` (or true, or 1) runs on an emulated NPU; ``force`` does so even where a real CANN is installed.
        emulator_options: of the emulated machine: the fields of :class:`hal.backends.npu.emulator.Options`.
        attention: what decodes: ``fused`` is npu_fused_infer_attention_score, ``atb`` is ATB's paged attention. Prefill
            and sliding windows take the former always.
        nz_weights: hold the weights of projections in FRACTAL_NZ, which matrix products read without reordering.
        nz_cache: hold the KV cache in FRACTAL_NZ, with a kernel for ``split_qkv_rmsnorm_rope_cache``, which writes only
            such, for models with a head dimension of 128, on A2 and A3. Off, because nobody has run it on hardware yet,
            and CANN 8.5 does not have it.
        max_streams: streams that graphs may take together; None takes what the generation has.
        static_kernels: the compiler ``npugraph_ex`` has CANN compile the kernels anew for the shapes of each graph, and
            keeps them in ``compilation.cache_dir``. That takes minutes, and CANN's op_compiler.
        npugraph_ex: further options of torch_npu's for that compiler, such as ``{"pattern_fusion_pass": false}``.
    """

    device: int = attrs.field(default=0, validator=_at_least_0)
    emulator: Switch = "off"
    emulator_options: dict[str, Any] = attrs.field(factory=dict)
    attention: Literal["fused", "atb"] = "fused"
    nz_weights: bool = False
    nz_cache: bool = False
    max_streams: int | None = attrs.field(default=None, validator=_at_least_0)
    static_kernels: bool = False
    npugraph_ex: dict[str, Any] = attrs.field(factory=dict)


class NpuBackend(Backend):
    """An opened NPU. Made by :class:`NpuDriver`, when torch_npu has been imported."""

    def __init__(self, options: NpuOptions, soc: str, generation: Generation) -> None:
        import torch

        from .device import NpuDevice
        from .emulator import is_active
        from .kernels import fractal, quantized
        from .kernels.kernels import kernels

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
            compilers=_compilers(generation),
            aliases={"npugraph": "graph"},
            limits=limits,
            native_names=NATIVE_NAMES,
            state_layout="fractal_nz" if options.nz_cache else "canonical",
        )
        self.options = options
        self.npu = device

    def activate(self) -> None:
        """As any backend; and make its device the current one of this thread, where the kernels' results are made."""
        import torch_npu

        super().activate()
        torch_npu.npu.set_device(self.device.torch)

    def enter(self) -> Any:
        """As any backend; and make its device the current one of this thread, where kernels are launched."""
        import torch_npu

        before = torch_npu.npu.current_device()
        if before != self.device.torch.index:
            torch_npu.npu.set_device(self.device.torch)
        return super().enter(), before

    def leave(self, token: Any) -> None:
        """Make the device current that was."""
        import torch_npu

        table, before = token
        super().leave(table)
        if before != self.device.torch.index:
            torch_npu.npu.set_device(before)

    def graph(self) -> Graph:
        """A new, empty NPUGraph."""
        from .graph import NpuGraph

        return NpuGraph(self)

    def prepare_weight(self, weight: Tensor, use: WeightUse) -> Tensor:
        """Projections' in FRACTAL_NZ, if the option ``nz_weights`` says so; scales as npu_quant_matmul wants them."""
        from .kernels.kernels import in_fractal_nz
        from .kernels.quantized import prepared_deq_scale, prepared_int8_weight

        match use.operation, use.argument:
            case "linear", "weight":
                return in_fractal_nz(weight) if self.options.nz_weights else weight
            case "quant_linear_static" | "quant_linear_dynamic", "weight":
                return prepared_int8_weight(weight, self.options.nz_weights)
            case "quant_linear_static", "deq_scale":
                return prepared_deq_scale(weight, use.dtype)
        return weight

    def explain(self, error: BaseException) -> HalError | None:
        """What CANN's error code, or torch's exception, means."""
        return self.npu.explain(error)

    @contextmanager
    def counting_launches(self) -> Iterator[Counter[str]]:
        """By the emulated CANN's trace; on hardware nothing counts them."""
        from collections import Counter

        from .emulator import is_active, trace

        if not is_active():
            raise ConfigError("launches are counted by the emulated CANN only", "run with the option emulator")
        found: Counter[str] = Counter()
        self.device.synchronize()  # what was launched before is not to be counted
        with trace() as tracing:
            yield found
        for record in tracing.records:
            if record.phase != "capture" and record.kind != "update":
                found[record.name if record.kind == "kernel" else record.kind] += 1


class NpuDriver(Driver):
    """The Ascend NPU; first in ``auto``'s order where it is available."""

    name = "npu"
    api_version = (2, 0)
    priority = 20
    requires = ("torch==2.13.*", "torch-npu==2.13.0")
    variables = ("ASCEND", "TORCH_NPU", "TASK_QUEUE_ENABLE")

    def probe(self) -> Probe:
        """Look for torch_npu, CANN, an NPU and the permission to use it, importing none of them."""
        return probe()

    def probe_for(self, options: Mapping[str, Any]) -> Probe:
        """As :meth:`probe`; where the option ``emulator`` is set, whether that can be."""
        return self.probe() if self._read(options).emulator == "off" else probe_emulated()

    def open(self, options: Mapping[str, Any]) -> NpuBackend:
        """Import torch_npu, on an emulated CANN if the options say so, and take the device.

        Raises:
            ConfigError: an option is wrong, or asks for a device or ability that is not there.
            DriverUnavailable: torch_npu cannot be imported, or does not find its CANN or an NPU.
        """
        chosen = self._read(options)
        if chosen.emulator != "off":
            from . import emulator

            if chosen.emulator_options or not emulator.is_active():  # else one that was activated before will do
                emulator.activate(force=chosen.emulator == "force", **chosen.emulator_options)
        elif chosen.emulator_options:
            raise ConfigError(
                f"emulator_options are {chosen.emulator_options}, but the option emulator is not set",
                "set it, or leave them out",
            )
        torch = _import_torch_npu()
        count = torch.npu.device_count()
        if chosen.device >= count:
            raise ConfigError(
                f"the device {chosen.device} was asked for, and there are {count} NPUs",
                f"give one of 0 to {count - 1}" if count else "look whether ASCEND_RT_VISIBLE_DEVICES hides them",
            )
        torch.npu.set_device(chosen.device)
        soc = torch.npu.get_device_name(chosen.device)
        generation = generation_of(soc)
        if chosen.nz_weights:
            torch.npu.config.allow_internal_format = True  # torch_npu would silently leave weights as they are
        log.info("opened %s, generation %s, on torch_npu %s", soc, generation.name, version("torch_npu"))
        return NpuBackend(chosen, soc, generation)

    def devices(self, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Each NPU that the process sees, unless the option ``device`` names one."""
        if "device" in options:
            return (options,)
        return tuple({**options, "device": index} for index in range(_import_torch_npu().npu.device_count()))

    def _read(self, options: Mapping[str, Any]) -> NpuOptions:
        given = {**options}
        if "emulator" in given:  # HAL_NPU_EMULATOR=1, and {"emulator": true} in a config
            given["emulator"] = switch_of(given["emulator"])
        return read(NpuOptions, given, "options of the npu driver")


class NpugraphEx(Compiler):
    """torch_npu's compiler ``npugraph_ex``: whole steps, one compiled and captured graph for each size."""

    name = "npugraph_ex"
    reads = frozenset({"passes", "cache_dir", "queries"})

    def make(self, context: FormContext) -> Form:
        """Compile and capture the steps."""
        from .npugraph_ex.compiler import make_form

        return make_form(context)


def _compilers(generation: Generation) -> tuple[Compiler, ...]:
    """npugraph_ex, where the SoC captures graphs and torch_npu has it."""
    import torch_npu

    has = hasattr(getattr(torch_npu.npu, "npugraph_ex", None), "compile_fx")
    return (NpugraphEx(),) if generation.graphs and has else ()


def _import_torch_npu() -> Any:
    import torch

    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise DriverUnavailable(
            f"torch_npu cannot be imported: {error}",
            "source CANN's set_env.sh before Python starts, and look that torch, torch_npu and CANN fit each other; or "
            "set the option emulator",
        ) from error
    return torch
