"""vLLM's configuration of speculative decoding, as that of a drafter of hal's."""

from __future__ import annotations

import dataclasses
from typing import Any

from hal.errors import ConfigError
from hal.generation.drafting.drafter import MOST_TOKENS, DraftConfig

METHODS = {"ngram": "ngram", "draft_model": "model", "mtp": "mtp", "eagle3": "eagle3"}
"""hal's drafters, by vLLM's names."""
READ = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
"""The options that hal reads."""
SET_BY_VLLM = ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config")
"""Further fields, which vLLM fills."""


def draft_config(vllm_config: Any) -> DraftConfig | None:
    """Return how tokens are drafted; None if they are not.

    Raises:
        ConfigError: vLLM's configuration asks for what hal does not support.
    """
    asked = vllm_config.speculative_config
    if asked is None:
        return None
    if (method := asked.method) not in METHODS:
        raise ConfigError(
            f"hal does not support vLLM's method = {method!s:.70} in speculative_config",
            f"choose one of {', '.join(METHODS)}",
        )
    if (tokens := asked.num_speculative_tokens) > MOST_TOKENS:
        raise ConfigError(
            f"hal does not support vLLM's num_speculative_tokens = {tokens}", f"draft at most {MOST_TOKENS} tokens"
        )
    given = {"draft_tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size}  # which vLLM sets, too
    if method == "mtp":
        given["quantization"] = vllm_config.model_config.quantization
    for each in dataclasses.fields(asked):
        if not each.init or each.name in READ or each.name in SET_BY_VLLM:
            continue
        value = getattr(asked, each.name)
        if value is not None and value == given.get(each.name):
            continue
        if value != getattr(each.default, "default", each.default):
            raise ConfigError(
                f"hal does not support vLLM's {each.name} = {value!s:.70} in speculative_config", "leave it out"
            )
    if vllm_config.model_config.logits_processors and not vllm_config.use_v2_model_runner:
        raise ConfigError(
            "hal does not support vLLM's logits_processors with speculative decoding and vLLM's first model runner",
            "leave out logits_processors or speculative_config, or choose the second model runner",
        )
    options, model = {}, None if method == "mtp" else asked.model
    if method == "ngram":
        options, model = {"shortest": asked.prompt_lookup_min, "longest": asked.prompt_lookup_max}, None
    return DraftConfig(METHODS[method], model, tokens, adapt=False, examine=False, options=options)
