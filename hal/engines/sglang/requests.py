"""The checks of a single request. SGLang answers one that fails with status 400, and serves the others."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from hal.errors import BatchError

UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "input_embeds": "embeddings in place of tokens",
        "positional_embed_overrides": "embeddings in place of tokens",
        "replace_embeds": "embeddings in place of tokens",
        "token_indices_to_pool": "positions to score at",
    }
)
"""Fields that hal does not support, of a request to SGLang or a batch of its scheduler, and what they hold."""

LARGEST: Mapping[str, float] = MappingProxyType({"top_k": 2**31 - 1, "min_new_tokens": 2**31 - 1, "temperature": 3e38})
"""The largest values that the tensors of SGLang's sampler hold: int32 and float32."""

LEAST_PENALTY, LARGEST_BIAS = 1e-6, 1e20
"""Limits of repetition_penalty and logit_bias. Logits that are divided by such a penalty and by the least temperature
stay finite in float32: SGLang's sampler ends the scheduler if one is not."""

_UNTYPED = frozenset({"input_ids", "mm_inputs", "time_stats", "kv_hints", "sampling_params", "custom_params"})


class RequestError(BatchError, ValueError):
    """A request that would end SGLang's scheduler. SGLang answers a ValueError with status 400."""


def check_request(request: Any, manager: Any, *_: Any, **__: Any) -> None:
    """Check a request before SGLang's scheduler gets it: what fails there ends the server for all requests.

    A hook after ``TokenizerManager._create_tokenized_object``, whose other arguments are not read.

    Args:
        request: SGLang's TokenizedGenerateReqInput.
        manager: SGLang's TokenizerManager.

    Raises:
        RequestError: the request has what hal does not read, a value of another type than SGLang declares, no token, a
            token ID outside of the vocabulary, or a number that SGLang's sampler cannot compute with.
    """
    for name, what in UNREAD.items():
        if getattr(request, name, None) is not None:
            raise RequestError(f"a request to SGLang has {what}, which hal does not support", "send token ids only")
    params, size = request.sampling_params, manager.model_config.vocab_size
    for struct in filter(None, (request, params, request.session_params)):
        _check_types(struct)
    if not request.input_ids and request.session_params is None:
        raise RequestError("the prompt has no tokens", "send a prompt of one token or more")
    if (session := request.session_params) is not None and session.replace and session.rid is None:
        raise RequestError("session_params has replace without rid, at which SGLang fails", "name the rid to replace")
    _check_ids("the prompt", request.input_ids, size)
    _check_ids("stop_token_ids", params.stop_token_ids, size)
    _check_ids("token_ids_logprob", request.token_ids_logprob, size)
    _check_range("top_logprobs_num", request.top_logprobs_num or 0, 0, size)
    for name, largest in LARGEST.items():
        _check_range(name, getattr(params, name), 0, largest)
    _check_range("repetition_penalty", params.repetition_penalty, LEAST_PENALTY, 2)
    for bias in (params.logit_bias or {}).values():
        _check_range("logit_bias", bias, -LARGEST_BIAS, LARGEST_BIAS)


@functools.cache
def _types(kind: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.type) for each in msgspec.structs.fields(kind) if each.name not in _UNTYPED]


def _check_types(struct: Any) -> None:
    kind: Any = type(struct)
    for name, declared in _types(kind):
        try:
            msgspec.convert(getattr(struct, name), declared)
        except msgspec.ValidationError as error:
            raise RequestError(f"{name} has the wrong type: {error}", "see SGLang's documentation") from None


def _check_ids(name: str, ids: Collection[int] | None, size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= size):
        wrong = next(each for each in ids if not 0 <= each < size)
        raise RequestError(
            f"{name} has the token id {wrong}, and the vocabulary has {size} tokens", f"send ids from 0 to {size - 1}"
        )


def _check_range(name: str, value: float, least: float, largest: float) -> None:
    if not least <= value <= largest:  # NaN is in no range.
        raise RequestError(f"{name} is {value}", f"send a value from {least:g} to {largest:g}")
