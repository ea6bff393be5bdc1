"""The entry point ``emulated_cann`` of the group ``torch.backends``, which ``import torch`` calls.

It lets ``EMULATED_CANN=1`` run an unmodified script. Every import of torch runs it where the emulated CANN is
installed, so it must be cheap when the variable is not set.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Activate the emulated CANN if EMULATED_CANN is set. It must run before torch_npu's own entry point."""
    if os.environ.get("EMULATED_CANN", "0") not in ("", "0"):  # the activation parses other values
        from .activation import activate_from_environment

        activate_from_environment()
