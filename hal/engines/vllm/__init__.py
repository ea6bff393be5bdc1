"""hal inside vLLM: a platform whose worker runs hal's models, states and graphs under vLLM's scheduler."""

from __future__ import annotations

import os

PLUGIN = "hal"
"""The name of the plugin in vLLM's group of entry points."""


def register() -> str | None:
    """Return the platform's class for vLLM, if hal was asked for by ``HAL_VLLM=1`` or ``VLLM_PLUGINS=hal``."""
    named = PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(",")
    return "hal.engines.vllm.platform.HalPlatform" if named or os.environ.get("HAL_VLLM") == "1" else None
