"""hal inside vLLM: a platform whose worker runs hal's models, states and graphs under vLLM's scheduler."""

from __future__ import annotations

import logging
import os

from packaging.version import Version

log = logging.getLogger("vllm.hal")

PLUGIN = "hal"
"""The name of the plugins in vLLM's groups of entry points."""


def _asked() -> bool:
    return PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(",") or os.environ.get("HAL_VLLM") == "1"


def register() -> str | None:
    """Return the platform's class for vLLM, if hal was asked for by ``HAL_VLLM=1`` or ``VLLM_PLUGINS=hal``."""
    if not _asked():
        return None
    return "hal.engines.vllm.platform.HalPlatform"


def register_models() -> None:
    """Register what hal does beside its platform, if hal was asked for. vLLM calls it in each process."""
    if not _asked():
        return
    from vllm import __version__

    from hal.engines.vllm import kv_connector, quantization

    quantization.register()
    kv_connector.register()

    if Version(__version__) < Version("0.32"):  # in which processors have another interface
        return
    try:
        from hal.engines.vllm import images
    except ImportError as error:
        log.warning("hal prepares no images with vLLM %s: %s", __version__, error)
    else:
        images.register()
