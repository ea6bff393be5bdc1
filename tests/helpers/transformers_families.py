"""Small random models of every causal language model of transformers.

A family's default config is made small by rules that keep its structure: the kinds of its layers, whether key heads are
shared, its windows and experts.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_GIVEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SIZE_OF: dict[str, int] = _GIVEN["sizes"]
"""The small size of each key of a config."""
WHOLE: dict[str, dict[str, Any]] = _GIVEN["whole"]
"""Whole configs of families that the rules do not fit, by model_type."""
BESIDE: dict[str, dict[str, Any]] = _GIVEN["beside"]
"""What a family needs beside the rules, by model_type."""
KEY_HEADS = (
    "num_key_value_heads",
    "multi_query_group_num",
    "num_kv_heads",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
    "n_kv_heads",
)
LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}


def kinds() -> dict[str, str]:
    """Return the class of each model_type in transformers' mapping of causal language models."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return {kind: name if isinstance(name, str) else name[0] for kind, name in NAMES.items() if kind in CONFIG_MAPPING}


def config_of(kind: str, **more: Any) -> Any:
    """Return a small config of a model_type.

    Args:
        kind: the model_type.
        more: keys that the rules do not decide.
    """
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    if kind in WHOLE:
        return made(**{**copy.deepcopy(WHOLE[kind]), **more})
    base = made()
    text = base.get_text_config(decoder=True)
    beside = {**copy.deepcopy(BESIDE.get(kind, {})), **more}
    others = {
        name: _small_part(part) for name in ("vision_config", "audio_config") if (part := getattr(base, name, None))
    }
    if text is base:
        return made(**{**_small(text), **others, **beside})
    place = next((name for name, value in vars(base).items() if value is text), None)
    if place is None:  # an encoder and a decoder in one config
        return made(**{"is_decoder": True, **_small(base), **beside})
    inner = {name: beside.pop(name) for name in [*beside] if hasattr(text, name) and not hasattr(base, name)}
    parts: dict[str, Any] = {place: type(text)(**{**_small(text), **inner}).to_dict()}
    return made(**{**parts, **others, **beside})


def layer_keys(kind: str, layers: int) -> dict[str, Any]:
    """Return the keys of a small config of a model_type that give it so many equal layers.

    Args:
        kind: the model_type.
        layers: the number of layers.
    """
    config = config_of(kind).get_text_config(decoder=True)
    if hasattr(config, "attention_types"):  # of GPT-Neo, whose layers it counts
        return {"num_layers": layers, "attention_types": [[["global"], layers]]}
    # For an encoder and a decoder, num_hidden_layers is another name of the encoder's number, and sizes the cache.
    halves = [name for name in ("encoder_layers", "decoder_layers") if hasattr(config, name)]
    whole = "num_layers" if "num_layers" in vars(config) else "num_hidden_layers"  # LongCat-Flash has two in a layer.
    keys: dict[str, Any] = dict.fromkeys(halves or [whole], layers)
    for name in ("layer_types", "mlp_layer_types", "indexer_types", "intermediate_size", "activation_sparsity_pattern"):
        if isinstance(each := getattr(config, name, None), list):
            keys[name] = each[-1:] * layers
    if keys.get("mlp_layer_types", [])[-1:] == ["sparse"] and hasattr(config, "first_k_dense_replace"):
        keys["first_k_dense_replace"] = 0
    if getattr(config, "num_kv_shared_layers", None):
        keys["num_kv_shared_layers"] = 0  # Equal layers have keys of their own.
    return keys


def model_of(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Return a small random model in evaluation mode, whose logits depend on every weight.

    Args:
        kind: the model_type.
        seed: of the weights.
        dtype: of the weights.
        more: keys of the config.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    torch.manual_seed(seed)
    config = config_of(kind, **more)
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    made = found[0] if isinstance(found, tuple) else found
    if made.config_class is not type(config) and made.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    model = made(config).eval()
    _randomize(model, seed)
    return model.to(dtype)


def _randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.copy_(parameter.nan_to_num(0.0) + 0.2 * noise)
            elif "emb" in name:
                parameter.copy_(noise)
            else:
                owner = model.get_submodule(name.rpartition(".")[0])
                inner = parameter.shape[-2 if type(owner).__name__ == "Conv1D" else -1]
                parameter.copy_(noise * inner**-0.5)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0  # as some families have it after each load


def _small(config: Any) -> dict[str, Any]:
    """Return the keys of a config that the rules make small."""
    known = {*vars(config), *getattr(config, "attribute_map", {})}
    given = {name: SIZE_OF[name] for name in known if name in SIZE_OF and is_size(config, name)}
    heads = next(
        (value for name in ("num_attention_heads", "n_head") if isinstance(value := _get(config, name), int)), None
    )
    for name in KEY_HEADS:
        if isinstance(value := _get(config, name), int):
            given[name] = 4 if value == heads else 1 if value == 1 else 2
    if isinstance(_get(config, "first_k_dense_replace"), int):
        given["first_k_dense_replace"] = 1
    lists = {name: value for name in LAYER_KINDS if isinstance(value := _get(config, name), list | tuple) and value}
    layers = max([2, *(len(set(each)) for each in lists.values())])
    for name in given:
        if "layer" in name and SIZE_OF.get(name) == 2:
            given[name] = layers
    given |= {name: _cut(each, layers) for name, each in lists.items() if _settable(config, name)}
    given |= {name: value for name, value in TOKENS.items() if hasattr(config, name)}
    for alias, real in getattr(config, "attribute_map", {}).items():
        if alias in given and real in given:
            del given[alias]
    if _get(config, "qk_rope_head_dim") and "head_dim" in given:
        given["head_dim"] = 8
    return given


def _small_part(config: Any) -> dict[str, Any]:
    """Return another part of a config, such as of images, made small."""
    values: dict[str, Any] = config.to_dict()
    return {
        name: SIZE_OF[name] if name in SIZE_OF and name != "vocab_size" and type(value) is int else value
        for name, value in values.items()
    }


def is_size(config: Any, name: str) -> bool:
    """Return whether a key of a config is a number that can be set."""
    return _settable(config, name) and type(_get(config, name)) in (int, float)


def _settable(config: Any, name: str) -> bool:
    found = getattr(type(config), name, None)
    return not isinstance(found, property) or found.fset is not None


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # Properties of a config may raise anything.
        return None


def _cut(values: Sequence[Any], count: int) -> list[Any]:
    """Return so many kinds of layers with every kind of the longer list."""
    distinct = list(dict.fromkeys(values))
    return (distinct + list(values) * count)[:count]
