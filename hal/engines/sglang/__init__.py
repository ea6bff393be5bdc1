"""hal inside SGLang: a platform and a package of models, which run hal's steps under SGLang's scheduler."""

from __future__ import annotations

import os
import sys

from hal.engines.sglang.hooks import Hooks
from hal.errors import ConfigError

PLATFORM = "hal"
"""The name of the platform in SGLang's group of entry points, and of its attention backend."""


def register() -> str | None:
    """Return the platform's class for SGLang, if ``SGLANG_PLATFORM=hal`` selects it.

    Names hal's models to SGLang, and registers hal's hooks.

    Raises:
        ConfigError: SGLANG_EXTERNAL_MODEL_PACKAGE names other models.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    # SGLang's registry reads the variable when it is imported, which is later.
    package = os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", __name__)
    if package != __name__:
        raise ConfigError(
            f"SGLANG_EXTERNAL_MODEL_PACKAGE is {package!r}, and SGLANG_PLATFORM=hal runs the models of {__name__}",
            "unset SGLANG_EXTERNAL_MODEL_PACKAGE; hal finds models in the entry-point group hal.models",
        )
    sys.meta_path.insert(0, Hooks())
    return "hal.engines.sglang.platform:HalPlatform"
