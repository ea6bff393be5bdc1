"""The entry point ``hal_npu_emulator`` of the group ``torch.backends``, which ``import torch`` calls.

It lets ``HAL_NPU_EMULATOR=1`` run an unmodified script on the emulated CANN. Every import of torch where hal is
installed runs it, so it must be cheap when the variable is not set.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Activate the emulated CANN if HAL_NPU_EMULATOR is set. It must run before torch_npu's own entry point."""
    if os.environ.get("HAL_NPU_EMULATOR", "0") not in ("", "0"):  # the activation parses other values
        from .emulation import activate_from_environment

        activate_from_environment()
