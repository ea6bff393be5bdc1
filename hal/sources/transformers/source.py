"""The source of models ``transformers``, in the entry-point group ``hal.model_sources``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

from hal.checkpoint.model_registry import ModelSource
from hal.config.optional_libraries import check_version
from hal.errors import ConfigError
from hal.nn import CausalLM


class TransformersSource(ModelSource):
    """The causal language models of the installed transformers, by ``model_type`` of config.json."""

    name: ClassVar[str] = "transformers"

    def find(self, architecture: str, config: Mapping[str, Any]) -> type[CausalLM]:
        """Return the class that runs transformers' code for a config.

        Raises:
            ConfigError: transformers is not installed, cannot be imported or has another version than the extra names,
                or has no causal language model of that name for the config.
        """
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(
                "transformers is not installed, which would have the model's code",
                "pip install 'torch-hal[transformers]'",
            )
        check_version("transformers", "the source of models transformers")
        try:
            from hal.sources.transformers.architecture import check_architecture
            from hal.sources.transformers.model import TransformersLM
        except ImportError as error:
            raise ConfigError(
                f"transformers, which would have the model's code, cannot be imported: {error!s:.300}",
                "transformers imports every device's package that is installed: mend or remove the one that fails, or "
                "set up what it needs (`hal doctor`)",
            ) from error

        check_architecture(architecture, config)
        return TransformersLM
