"""hal inside vLLM: a platform whose worker runs hal's models, states and graphs under vLLM's scheduler."""

from __future__ import annotations

import os

PLUGIN = "hal"
"""The name of the plugin in vLLM's group of entry points."""


def register() -> str | None:
    """Return the platform's class for vLLM, if hal was asked for by ``HAL_VLLM=1`` or ``VLLM_PLUGINS=hal``."""
    named = PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(",")
    if not named and os.environ.get("HAL_VLLM") != "1":
        return None
    # hal's worker takes steps for vLLM's first model runner. Where Triton works, vLLM would make them for its second.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return "hal.engines.vllm.platform.HalPlatform"
