"""The class of transformers that runs a checkpoint, and its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from hal.errors import ConfigError
from hal.sources.transformers.phase import REMEDY


def check_architecture(architecture: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless transformers' class for a config is that of an architecture.

    Args:
        architecture: its architecture in config.json.
        config: the content of config.json.
    """
    found, _ = class_of(config)
    kind = str(config["model_type"]).replace("_", "").replace("-", "")
    # Of a type that transformers runs as another, the published name is the type's: ExaoneForCausalLM runs as Llama.
    typed = architecture.lower().startswith(kind) and architecture.endswith("ForCausalLM")
    if architecture != found.__name__ and not typed:
        raise ConfigError(
            f"for model_type {config['model_type']!r}, transformers has the causal language model {found.__name__}, "
            f"not {architecture:.70}",
            "correct model_type or architectures in config.json, if they do not belong together, or " + REMEDY,
        )


def class_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return transformers' class of a causal language model, and its config.

    Args:
        config: the content of config.json.

    Raises:
        ConfigError: transformers has none.
    """
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"transformers has no model_type {kind!r:.70}", "install the version that config.json names, or " + REMEDY
        )
    try:
        read = CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # transformers validates configs in its own way.
        raise ConfigError(
            f"transformers refuses config.json: {error!s:.300}", "give the key a value that it takes"
        ) from error
    # The text part of another model's config has a type of its own, and the class is listed for the whole one's.
    whole = CONFIG_MAPPING[above] if (above := str(kind).removesuffix("_text_model")) in CONFIG_MAPPING else None
    known = [each for each in (type(read), whole) if each in MODEL_FOR_CAUSAL_LM_MAPPING]
    found = MODEL_FOR_CAUSAL_LM_MAPPING[known[0]] if known else None
    found = found[0] if isinstance(found, tuple) else found
    if found is None or type(read) not in (known[0], found.config_class):
        raise ConfigError(f"transformers has no causal language model for model_type {kind!r}", REMEDY)
    if found.config_class is not type(read) and found.config_class is read.sub_configs.get("text_config"):
        read = read.get_text_config()
    return found, read
