"""Kernels of a KV cache in 8 bits: npu_fused_infer_attention_score reads int8 caches of decode steps as they are.

It takes a scale of each token and head in the shape ``[num_blocks, num_kv_heads, block_size]``, float32, with int8
numbers, one query for each sequence, and blocks of a multiple of 32 tokens. Other steps widen the blocks of their
sequences first; so do all steps with float8, for which the operator has no such scales.

Source: the documentation of ``torch_npu.npu_fused_infer_attention_score``, ``key_antiquant_mode`` 5.
"""

from __future__ import annotations

import attrs
import torch
import torch_npu
from torch import Tensor

from hal.ops import AttentionOptions
from hal.ops.kernels.composed_attention import widening
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.quantized_cache import FLOAT8, INTEGERS, LARGEST, quantized_heads, widened_heads
from hal.step.shape import one_query_each
from hal.step.state import StateMemory
from hal.vendor import PartialKernel, PreparingKernel

from .attention import OPTIONS, ComposedAttention, FusedAttention

BY_TOKEN_AND_HEAD = 5
"""The antiquant mode with a scale for each token and head, in blocks as the cache."""
BLOCK_MULTIPLE = 32
"""What the block size of an int8 cache is a multiple of."""
SMALLEST = torch.finfo(torch.float32).tiny
"""What a head is divided by if its scale is less, such as that of zeros."""
SCALES = ("key_scale", "value_scale")
"""The states that have scales."""


def kernels(device: torch.device, attention: FusedAttention) -> dict[str, Kernel]:
    """Return the kernels, by operation.

    Args:
        device: the device.
        attention: the kernel of a cache that is not quantized.
    """
    float8 = Float8Numbers(device)

    def widen(numbers: Tensor, scales: Tensor) -> Tensor:
        return widened_heads(numbers, scales) if numbers.dtype is INTEGERS else float8.widened(numbers, scales)

    return {
        "quantized_paged_attention": PartialKernel(
            "quantized_paged_attention",
            QuantizedAttention(attention, widening(attention, widen)),
            supports=OPTIONS,
            otherwise=_composed(widening(ComposedAttention(), widen)),
        ),
        "store_quantized_kv_cache": PreparingKernel(StoreQuantized(float8).store, {"slot_mapping": places}),
    }


def _composed(kernel: Kernel) -> Kernel:
    """Return a kernel that reads lengths on the device, as :class:`ComposedAttention` does."""
    kernel.updates = False  # type: ignore[attr-defined]
    return kernel


class QuantizedAttention:
    """``quantized_paged_attention`` with npu_fused_infer_attention_score where it takes the cache as it is.

    Args:
        attention: makes the arguments of masks.
        otherwise: the kernel of other calls.
    """

    def __init__(self, attention: FusedAttention, otherwise: Kernel) -> None:
        self._attention, self._otherwise = attention, otherwise

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        sinks: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """See :func:`hal.ops.quantized_paged_attention`."""
        tokens, block_size, starts = query.shape[0], keys.shape[1], query_start_loc_host.tolist()
        takes = keys.dtype is INTEGERS and block_size % BLOCK_MULTIPLE == 0
        if not (tokens and takes and one_query_each(tokens, starts)):
            return self._otherwise(  # type: ignore[no-any-return]
                query,
                keys,
                values,
                key_scales,
                value_scales,
                block_table,
                query_start_loc,
                kv_lens,
                query_start_loc_host,
                kv_lens_host,
                sinks,
                options,
            )
        return self._attention.decode(
            query.contiguous(),
            keys.flatten(2),
            values.flatten(2),
            block_table.contiguous(),
            kv_lens,
            kv_lens_host.tolist(),
            sinks,
            options,
            num_key_value_heads=keys.shape[2],
            block_size=block_size,
            key_antiquant_scale=_by_head(key_scales),
            value_antiquant_scale=_by_head(value_scales),
            key_antiquant_mode=BY_TOKEN_AND_HEAD,
            value_antiquant_mode=BY_TOKEN_AND_HEAD,
        )


def places(slot_mapping: Tensor, keys: Tensor) -> Tensor:
    """Return what :class:`StoreQuantized` takes in place of slots: int64 ``[5, tokens]``.

    The rows are slots, their blocks, those blocks in a second half of twice as many, and twice the places in blocks.
    They are the same for all layers, so that a compiled step computes them once.
    """
    blocks, size = keys.shape[:2]
    block, place = slot_mapping // size, slot_mapping % size
    return torch.stack((slot_mapping, block, block + blocks, place, place)).long()


class StoreQuantized:
    """``store_quantized_kv_cache``. Scales are in the memory order that attention reads; see :func:`by_head`.

    Args:
        float8: encodes float8.
    """

    def __init__(self, float8: Float8Numbers) -> None:
        self._float8 = float8

    def store(
        self,
        key: Tensor,
        value: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """See :func:`hal.ops.store_quantized_kv_cache`; ``slot_mapping`` is what :func:`places` returns."""
        if not key.shape[0]:
            return
        slots, block, _, place, _ = slot_mapping
        if key_scale is None and value_scale is None:
            # Together: the copy makes values contiguous, which quantization alone needs, too.
            (key, value), both = self._quantized(torch.stack((key, value)), None, keys.dtype)
            key_scale, value_scale = both
        else:
            given = (key, key_scale), (value, value_scale)
            (key, key_scale), (value, value_scale) = (self._quantized(*each, keys.dtype) for each in given)
            both = None
        as_bytes = (each.view(INTEGERS) for each in (key, value, keys, values))
        torch_npu.npu_scatter_pa_kv_cache(*as_bytes, slots, cache_mode="Norm")
        if both is not None and (scales := _together(key_scales, value_scales)) is not None:
            scales[slot_mapping[1:3].reshape(-1), slot_mapping[3:].reshape(-1)] = both.flatten(0, 1)
        else:
            key_scales[block, place] = key_scale
            value_scales[block, place] = value_scale

    def _quantized(self, x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype is not INTEGERS:
            return self._float8.quantized(x, scale)
        if scale is not None:
            return quantized_heads(x, dtype, scale)
        return torch_npu.npu_dynamic_quant(x.contiguous())  # type: ignore[no-any-return]


class Float8Numbers:
    """Float8 numbers on devices without the dtype: they are looked up, and encoded by their bits in float32.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        bits = torch.arange(256, dtype=torch.uint8)
        self._numbers = bits.view(torch.float8_e4m3fn).float().to(device)
        ascending = bits[:127].view(torch.float8_e4m3fn).float()
        middles = (ascending[1:] + ascending[:-1]) / 2
        # A number in the middle of two rounds to the even one, which is the larger one of every second pair.
        middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(()))
        self._middles = middles.to(device)

    def widened(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """Return keys or values in float32; see :func:`hal.ops.quantized_cache.widened_heads`."""
        return self._numbers[numbers.int()] * scales.unsqueeze(-1)

    def quantized(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return numbers and scales; see :func:`hal.ops.quantized_cache.quantized_heads`."""
        wide = x.float()
        scales = wide.abs().amax(-1) / LARGEST[FLOAT8] if scale is None else scale.expand(x.shape[:2])
        divided = wide / scales.clamp_min(SMALLEST).unsqueeze(-1)
        code = torch.searchsorted(self._middles, divided.abs())
        code = torch.where(divided.isnan(), 127, code) + (divided.view(torch.int32) < 0) * 128
        return code.to(torch.uint8), scales


def by_head(memory: StateMemory) -> StateMemory:
    """Return a cache whose scales have the memory order that attention reads, ``[blocks, heads, block_size]``.

    The tensors keep their shape. Those of a layer's keys and values are halves of one tensor, which one launch writes.
    """
    layers = []
    with torch.inference_mode():
        for layer in memory.layers:
            scales = [layer[name].transpose(1, 2) for name in SCALES if name in layer]
            halves = torch.cat(scales).transpose(1, 2).chunk(len(scales)) if scales else ()
            layers.append({**layer, **dict(zip((name for name in SCALES if name in layer), halves, strict=True))})
    return attrs.evolve(memory, layers=tuple(layers))


def _together(key_scales: Tensor, value_scales: Tensor) -> Tensor | None:
    """Return the tensor ``[2 * num_blocks, ...]`` whose halves are the scales; None if they are not."""
    after = key_scales.storage_offset() + key_scales.numel()
    same = key_scales.untyped_storage().data_ptr() == value_scales.untyped_storage().data_ptr()
    if not same or value_scales.storage_offset() != after or key_scales.stride() != value_scales.stride():
        return None
    shape = 2 * key_scales.shape[0], *key_scales.shape[1:]
    return key_scales.as_strided(shape, key_scales.stride())


def _by_head(scales: Tensor) -> Tensor:
    """Return scales as attention takes them, without a copy if they are in its order."""
    return scales.transpose(1, 2).contiguous()
