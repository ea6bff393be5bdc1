"""What ``import torch`` calls, as the entry point ``hal_npu_emulator`` of the group ``torch.backends``.

It lets ``HAL_NPU_EMULATOR=1`` alone put the emulated CANN under an unmodified script. It must stay cheap when the
variable is not set, because every import of torch in an environment that has hal runs it.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Activate the emulated CANN if the environment asks for it. torch_npu's own entry point must come after."""
    if os.environ.get("HAL_NPU_EMULATOR", "0") not in ("", "0"):  # what else means no, the option's reader knows
        from .emulator import activate_from_environment

        activate_from_environment()
