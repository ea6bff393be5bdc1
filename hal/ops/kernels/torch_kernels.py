"""Kernels that call torch functions, for drivers of devices that PyTorch supports.

A driver selects those that suit its device, and adds or overrides kernels:
``kernels={**torch_kernels.KERNELS, "paged_attention": ...}``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.operation import operation
from hal.ops.forms import FLOAT, Form, dequantize
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.logits import WORD, check_words
from hal.ops.lora import compose, slot_numbers
from hal.ops.projection import project


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call torch's ``rms_norm``, which also computes in float32 and rounds once."""
    if weight.dtype is not x.dtype:
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalize. This is one call, but not faster than its parts."""
    hidden = x + residual
    return rms_norm(hidden, weight, eps), hidden


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Call torch's ``layer_norm``, which also computes in float32 and rounds once."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """Call torch's ``gelu``, which also computes in float32 and rounds once."""
    return functional.gelu(x, approximate=approximate)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Call torch's ``bmm``, with one matrix of each head."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


def greedy_sample(logits: Tensor) -> Tensor:
    """Return the argmax, which torch documents to be the first of equal values."""
    return logits.argmax(-1)


def penalize(
    logits: Tensor,
    counts: Tensor,
    prompted: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
) -> Tensor:
    """Compute as the reference does, but subtract in place."""
    wide, generated, repetition = logits.float(), counts > 0, repetition_penalty.unsqueeze(-1)
    repeated = torch.where(wide > 0, wide / repetition, wide * repetition)
    penalized = torch.where(generated | prompted, repeated, wide)
    penalized -= frequency_penalty.unsqueeze(-1) * counts
    penalized -= presence_penalty.unsqueeze(-1) * generated
    return penalized


def add_lora(output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, slots: Tensor, parts: str) -> Tensor:
    """Compute as the reference does, in the dtype of ``output``."""
    return compose(output, x, lora_a, lora_b, slots, parts, slot_numbers(lora_a.shape[0], slots.device))


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """Compare each word with 32 bits, without a shift of each token's word."""
    check_words(logits.shape[-1], allowed.shape[-1])
    bits = torch.arange(WORD, dtype=torch.int32, device=allowed.device)
    banned = (allowed.unsqueeze(-1) & (1 << bits)) == 0
    return logits.masked_fill(banned.flatten(1)[:, : logits.shape[-1]], float("-inf"))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    form: Form = FLOAT,
) -> Tensor:
    """Call torch's ``linear``, after widening a weight of another form to x's dtype."""
    if weight_scale is None:
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if not x.is_floating_point() or x_scale is not None:
        return project(x, weight, bias, weight_scale, weight_zero_point, x_scale, dtype, form)
    wide = dequantize(form, weight, weight_scale, weight_zero_point).to(x.dtype)
    return functional.linear(x, wide, None if bias is None else bias.to(x.dtype))


def embedding(
    token_ids: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    dtype: torch.dtype | None = None,
    form: Form = FLOAT,
) -> Tensor:
    """Call torch's ``embedding``, or compute the rows of another form as the reference does."""
    if weight_scale is None:
        return functional.embedding(token_ids, weight)
    return _EMBEDDING.reference(token_ids, weight, weight_scale, weight_zero_point, dtype, form)  # type: ignore[no-any-return]


_EMBEDDING = operation("embedding")


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write whole rows with ``index_copy_``, where ``index_put_`` would write elements."""
    slots = slot_mapping.long()
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(cache.shape[0] * cache.shape[1], *cache.shape[2:]).index_copy_(0, slots, rows)


def store_latent_cache(
    latent: Tensor, rope: Tensor, latent_cache: Tensor, rope_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write whole rows, as :func:`store_kv_cache`."""
    store_kv_cache(latent, rope, latent_cache, rope_cache, slot_mapping)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Call torch's attention. For one query, the query heads that share a key head become its rows.

    torch's attention has neither softcaps nor sinks, with which the reference runs.
    """
    if softcap is not None or sinks is not None:
        return operation("scaled_dot_product_attention").reference(  # type: ignore[no-any-return]
            query, key, value, mask, scale, causal, softcap, sinks
        )
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    if causal and (mask is not None or (queries > 1 and queries != keys)):
        # torch aligns the first query with the first key, and takes either a mask or its own.
        own = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        mask, causal = own if mask is None else own & mask, False
    groups = heads // key.shape[1]
    grouped = queries == 1 and groups > 1
    attended = functional.scaled_dot_product_attention(
        query.reshape(query.shape[0], key.shape[1], groups, query.shape[3]) if grouped else query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and queries > 1,
        scale=scale,
        enable_gqa=groups > 1 and not grouped,
    )
    return attended.reshape(query.shape) if grouped else attended


KERNELS: dict[str, Kernel] = {
    "add_lora": add_lora,
    "add_rms_norm": add_rms_norm,
    "embedding": embedding,
    "gelu": gelu,
    "greedy_sample": greedy_sample,
    "head_linear": head_linear,
    "layer_norm": layer_norm,
    "linear": linear,
    "mask_logits": mask_logits,
    "penalize": penalize,
    "pointwise": operation("pointwise").reference,
    "rms_norm": rms_norm,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "store_kv_cache": store_kv_cache,
    "store_latent_cache": store_latent_cache,
}
"""Kernels by operation; ``store_kv_cache`` supports the canonical layout only."""


def integer_linear(product: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    """Return a kernel of ``linear`` for the forms that are exact, with a product of int8 matrices.

    Args:
        product: returns ``x @ weight.T`` exactly, in int32, as a new tensor ``[..., out_features]``, from
            ``[..., in_features]`` and ``[out_features, in_features]``, both int8.
    """

    def linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        x_scale: Tensor | None,
        dtype: torch.dtype | None,
        form: Form,
    ) -> Tensor:
        sums = product(x, weight)
        if bias is not None and bias.dtype is torch.int32:
            sums += bias
            bias = None
        values = sums * weight_scale.view(-1)
        if x_scale is not None:
            values.mul_(x_scale.unsqueeze(-1))
        if bias is not None:
            values += bias
        return values.to(dtype)

    return linear
