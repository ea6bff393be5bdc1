"""Triton kernels that CUDA has too, for the option ``triton``. No NPU has run them yet."""

from __future__ import annotations

from importlib.util import find_spec

from hal.errors import ConfigError
from hal.ops.kernels.kernel_table import Kernel

from ..emulation import emulated_cann, is_active

OPERATIONS = (
    *("collapse_streams", "expand_streams", "gated_rms_norm", "l2_norm"),
    *("split_qkv_rmsnorm_rope", "split_qkv_rmsnorm_rope_cache"),
)
"""Those that take several launches of CANN's operators on A2 and A3 with a canonical cache."""


def kernels() -> dict[str, Kernel]:
    """Return the kernels by operation: compiled by triton-ascend, and on the emulated NPU interpreted, one launch each.

    Raises:
        ConfigError: Triton is not installed, or does not interpret although the NPU is emulated.
    """
    if find_spec("triton") is None:
        raise ConfigError(
            "the option triton is set, but Triton is not installed",
            "pip install triton-ascend (on an emulated NPU: triton), or remove triton",
        )
    from ...triton import KERNELS
    from ...triton.interpreter import INTERPRETED
    from ...triton.launching import INTERPRETED_ON

    if is_active():
        if not INTERPRETED.value:
            raise ConfigError(
                "the option triton is set, and an emulated NPU runs Triton's kernels only in Triton's interpreter",
                "set TRITON_INTERPRET=1 before Triton is imported, or remove triton",
            )
        INTERPRETED_ON["npu"] = emulated_cann().launch
    return {name: KERNELS[name] for name in OPERATIONS}
