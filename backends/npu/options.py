"""The options of the NPU driver."""

from __future__ import annotations

import os
from typing import Any, Literal

import attrs

from .emulation import Switch


def _at_least_0(instance: Any, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"{attribute.name} must be at least 0, not {value}")


def number_of(variable: str, default: int) -> int:
    """Return the number in an environment variable of ranks.

    Raises:
        ValueError: it is no number; :func:`hal.config.read` turns it into a ConfigError.
    """
    text = os.environ.get(variable, str(default))
    if not text.isascii() or not text.isdecimal():
        raise ValueError(
            f"the environment variable {variable} is {text!r:.40}, which is no number; torchrun sets it for each rank"
        )
    return int(text)


@attrs.frozen
class NpuOptions:
    """Options of the NPU driver.

    Attributes:
        device: the NPU's index among the devices visible to the process. By default, the variable ``LOCAL_RANK``, which
            ``torchrun`` sets for each rank, or 0.
        emulator: ``on`` (or true, or 1) runs on an emulated NPU; ``force`` does so even where a real CANN is installed.
            By default, ``on`` in a process for which the emulated CANN is active, and else ``off``.
        emulator_options: the fields of :class:`emulated_cann.Options`.
        attention: the decode kernel. ``fused`` is npu_fused_infer_attention_score, ``atb`` is ATB's paged attention.
            Prefill and sliding windows always use ``fused``.
        nz_weights: store the weights of projections in FRACTAL_NZ, which matrix products read without reordering.
        nz_cache: store the KV cache in FRACTAL_NZ, with a kernel for ``split_qkv_rmsnorm_rope_cache`` that requires
            this format. Supports a head dimension of 128 on A2 and A3. Off by default: the kernel is untested on
            hardware, and CANN 8.5 lacks it.
        triton: run norms of recurrent layers, hyper-connections where CANN has no operators for them, and the norms,
            rotation and cache write of heads, in one launch each of the Triton kernels that CUDA has. Needs
            triton-ascend, and on an emulated NPU ``TRITON_INTERPRET=1``. Off by default: no NPU has run them yet.
        mc2_rows: the fewest rows, such as tokens of a step, for which a projection and the collective beside it are one
            launch. CANN's documents say to use such kernels in prefill and not in decode, without a number; 1000 is
            vllm-ascend's for sequence parallelism.
        max_streams: the limit on streams held by all graphs together; None is the device's
            limit without the streams that torch_npu needs.
        static_kernels: the compiler ``npugraph_ex`` has CANN compile kernels for the shapes of each graph, and keeps
            them in ``compilation.cache_dir``. This takes minutes and requires CANN's op_compiler.
        npugraph_ex: further torch_npu options for that compiler, such as ``{"pattern_fusion_pass": false}``.
    """

    device: int = attrs.field(factory=lambda: number_of("LOCAL_RANK", 0), validator=_at_least_0)
    emulator: Switch = "off"
    emulator_options: dict[str, Any] = attrs.field(factory=dict)
    attention: Literal["fused", "atb"] = "fused"
    nz_weights: bool = False
    nz_cache: bool = False
    triton: bool = False
    mc2_rows: int = attrs.field(default=1000, validator=_at_least_0)
    max_streams: int | None = attrs.field(default=None, validator=_at_least_0)
    static_kernels: bool = False
    npugraph_ex: dict[str, Any] = attrs.field(factory=dict)
