"""Kernels of a KV cache in 8 bits: npu_fused_infer_attention_score reads int8 caches of decode steps as they are.

It takes a scale of each token and head in the shape ``[num_blocks, num_kv_heads, block_size]``, float32, with int8
numbers in ``[num_blocks, num_kv_heads, block_size, head_dim]``, one query for each sequence, and blocks of a multiple
of 32 tokens. Other steps widen the blocks of their sequences first; so do all steps with float8, for which the operator
has no such scales.

:func:`allocate` gives int8 caches that order. Keys and values of a layer are halves of one tensor, and so are their
scales, so that one launch of npu_scatter_pa_kv_cache writes all four: numbers as its keys, and the bytes of scales as
its values.

Sources: the documentation of ``torch_npu.npu_fused_infer_attention_score``, ``key_antiquant_mode`` 5, and of
``aclnnScatterPaKvCache``, whose keys and values may have heads of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
import torch_npu
from torch import Tensor

from hal.ops import AttentionOptions
from hal.ops.cache import FLOAT8, INTEGERS, LARGEST, widened_heads
from hal.ops.forms import float8_bits, float8_values
from hal.ops.kernels.composed_attention import widening
from hal.ops.kernels.kernel_table import Kernel
from hal.step.shape import one_query_each
from hal.step.state import LayerStates, StateMemory, StateSpec
from hal.vendor import PartialKernel, PreparingKernel

from .attention import OPTIONS, ComposedAttention, FusedAttention, reads_on_device

BY_TOKEN_AND_HEAD = 5
"""The antiquant mode with a scale for each token and head, in blocks as the cache."""
BLOCK_MULTIPLE = 32
"""What the block size of an int8 cache is a multiple of."""
SMALLEST = torch.finfo(torch.float32).tiny
"""The least scale of a head in float8, such as that of zeros."""
SCALES = ("key_scale", "value_scale")
"""The states that have scales."""


def kernels(device: torch.device, attention: FusedAttention) -> dict[str, Kernel]:
    """Return the kernels, by operation.

    Args:
        device: the device.
        attention: the kernel of a cache that is not quantized.
    """
    float8 = Float8Numbers(device)

    def widen(
        keys: Tensor, values: Tensor, key_scales: Tensor, value_scales: Tensor, blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        widened = widened_heads if keys.dtype is INTEGERS else float8.widened
        numbers, scales = _joined(keys, values), _joined(key_scales, value_scales)
        if numbers is not None and scales is not None:
            key, value = widened(*(_gathered(each.unflatten(0, (2, -1)), blocks, 1) for each in (numbers, scales)))
            return key, value
        pairs = (keys, key_scales), (values, value_scales)
        key, value = (widened(*(_gathered(each, blocks) for each in pair)) for pair in pairs)
        return key, value

    return {
        "quantized_paged_attention": PartialKernel(
            "quantized_paged_attention",
            QuantizedAttention(attention, widening(attention, widen)),
            supports=OPTIONS,
            otherwise=reads_on_device(widening(ComposedAttention(), widen)),
        ),
        "store_quantized_kv_cache": PreparingKernel(StoreQuantized(float8).store, {"slot_mapping": slots_of_halves}),
    }


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
        by_head = not keys.is_contiguous()
        if not (tokens and takes and one_query_each(tokens, starts)):
            cache = keys, values, key_scales, value_scales, block_table
            lengths = query_start_loc, kv_lens, query_start_loc_host, kv_lens_host
            return self._otherwise(query, *cache, *lengths, sinks, options)  # type: ignore[no-any-return]
        return self._attention.decode(
            query.contiguous(),
            keys.transpose(1, 2) if by_head else keys.flatten(2),
            values.transpose(1, 2) if by_head else values.flatten(2),
            block_table.contiguous(),
            kv_lens,
            kv_lens_host.tolist(),
            sinks,
            options,
            num_key_value_heads=keys.shape[2],
            block_size=block_size,
            key_antiquant_scale=key_scales.transpose(1, 2).contiguous(),
            value_antiquant_scale=value_scales.transpose(1, 2).contiguous(),
            key_antiquant_mode=BY_TOKEN_AND_HEAD,
            value_antiquant_mode=BY_TOKEN_AND_HEAD,
        )


def slots_of_halves(slot_mapping: Tensor, keys: Tensor) -> Tensor:
    """Return what :class:`StoreQuantized` takes in place of slots: these, and the rows of the joined halves.

    Rows of an int8 cache are those of single heads. They are the same for all layers, so that a compiled step computes
    them once.
    """
    blocks, size, heads, _ = keys.shape
    if keys.dtype is not INTEGERS:
        return torch.cat((slot_mapping, slot_mapping, slot_mapping + blocks * size))
    first = slot_mapping + slot_mapping // size * ((heads - 1) * size)
    halves = torch.stack((first, first + blocks * heads * size))
    rows = halves.unsqueeze(-1) + size * torch.arange(heads, dtype=slot_mapping.dtype, device=slot_mapping.device)
    return torch.cat((slot_mapping, rows.view(-1)))


class StoreQuantized:
    """``store_quantized_kv_cache``, in one write where :func:`allocate` made the cache.

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
        """See :func:`hal.ops.store_quantized_kv_cache`; ``slot_mapping`` is what :func:`slots_of_halves` returns."""
        tokens = key.shape[0]
        if not tokens:
            return
        if key_scale is None and value_scale is None:
            # Together: the copy makes values contiguous, which quantization alone needs, too.
            numbers, scales = self._quantized(torch.stack((key, value)), None, keys.dtype)
        else:
            pairs = (self._quantized(*each, keys.dtype) for each in ((key, key_scale), (value, value_scale)))
            numbers, scales = (torch.stack(each) for each in zip(*pairs, strict=True))
        scales, single, both = scales.unsqueeze(-1), slot_mapping[:tokens], slot_mapping[tokens:]
        caches = keys, values, key_scales.unsqueeze(-1), value_scales.unsqueeze(-1)
        if not keys.is_contiguous():  # a row for each head
            numbers, scales = (each.flatten(1, 2).unsqueeze(2) for each in (numbers, scales))
            keys, values, key_scales, value_scales = (
                each.transpose(1, 2).flatten(0, 1).unsqueeze(2) for each in caches
            )
            single = both[: numbers.shape[1]]
        else:
            keys, values, key_scales, value_scales = caches
        cache, scale_cache = _joined(keys, values), _joined(key_scales, value_scales)
        if cache is None or scale_cache is None or both.shape[0] != 2 * single.shape[0]:
            _write(numbers[0], numbers[1], keys, values, single)
            _write(scales[0], scales[1], key_scales, value_scales, single)
        else:
            _write(numbers.flatten(0, 1), scales.flatten(0, 1), cache, scale_cache, both)

    def _quantized(self, x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype is not INTEGERS:
            return self._float8.quantized(x, scale)
        if scale is None:
            return torch_npu.npu_dynamic_quant(x.contiguous())  # type: ignore[no-any-return]
        numbers = torch_npu.npu_quantize(x.contiguous(), scale, None, torch.qint8, 1)
        return numbers, scale.expand(x.shape[:-1])


def _write(rows: Tensor, others: Tensor, cache: Tensor, other: Tensor, slots: Tensor) -> None:
    """Write the bytes of rows ``[rows, heads, size]`` to their slots of two caches, whose sizes may differ."""
    given = (each.view(INTEGERS) for each in (rows, others, cache, other))
    torch_npu.npu_scatter_pa_kv_cache(*given, slots, cache_mode="Norm")


class Float8Numbers:
    """Float8 numbers on devices without the dtype: they are looked up, and so are the bits of numbers in float16."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = float8_values(torch.arange(256, dtype=torch.uint8)).to(device)
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
        self._bits = float8_bits(halves.float()).to(device)
        self._smallest = torch.full((1,), SMALLEST).to(device)

    def widened(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """Return keys or values in float32; see :func:`hal.ops.cache.widened_heads`."""
        return self._numbers[numbers.int()] * scales.unsqueeze(-1)

    def quantized(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return numbers and scales; see :func:`hal.ops.cache.quantized_heads`.

        A quotient is rounded to float16 first, which changes the result only next to the middle of two numbers.
        """
        if scale is None:
            # CANN's quantization to int8 finds the largest number of a head in one launch.
            _, scales = torch_npu.npu_dynamic_quant(x)
            scales = torch.add(self._smallest, scales, alpha=LARGEST[INTEGERS] / LARGEST[FLOAT8])
        else:
            scales = scale.expand(x.shape[:-1])
        half = (x / scales.unsqueeze(-1)).half()
        return self._bits[half.view(torch.int16).int() & 0xFFFF], scales


def allocate(spec: StateSpec, canonical: Callable[[StateSpec], StateMemory]) -> StateMemory:
    """Return zeroed states. The keys and values of a cache in 8 bits are halves of one tensor, and so are their scales.

    All have the canonical shape. Those of an int8 cache have the memory order ``[blocks, heads, block_size]``.

    Args:
        spec: the states.
        canonical: allocates states in the canonical layout.
    """
    quantized = [SCALES[0] in layer for layer in spec.layers]
    pairs = zip(quantized, spec.layers, strict=True)
    memory = canonical(attrs.evolve(spec, layers=[_both(layer) if each else layer for each, layer in pairs]))
    made = zip(quantized, memory.layers, strict=True)
    return attrs.evolve(memory, spec=spec, layers=tuple(_halves(layer) if each else layer for each, layer in made))


def _both(layer: LayerStates) -> LayerStates:
    """Return the states of numbers and of scales, both of keys and values."""
    return {name: attrs.evolve(layer[name], shape=(2, *layer[name].shape)) for name in ("key", "key_scale")}


def _halves(layer: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the states of a layer from the memory of :func:`_both`, ``[num_blocks, block_size, 2, heads, ...]``."""
    found, by_head = dict(layer), layer["key"].dtype is INTEGERS
    for key, value in (("key", "value"), SCALES):
        blocks, size, _, heads, *rest = layer[key].shape
        order = (heads, size) if by_head else (size, heads)
        both = layer[key].view(2, blocks, *order, *rest)
        found[key], found[value] = both.transpose(2, 3) if by_head else both
    return found


def _gathered(cache: Tensor, blocks: Tensor, dimension: int = 0) -> Tensor:
    """Return blocks of a cache in either memory order, without a copy of the others."""
    if cache.is_contiguous():
        return cache.index_select(dimension, blocks)
    heads = dimension + 1, dimension + 2
    return cache.transpose(*heads).index_select(dimension, blocks).transpose(*heads)


def _joined(keys: Tensor, values: Tensor) -> Tensor | None:
    """Return the tensor ``[2 * num_blocks, ...]`` whose halves are keys and values, or their scales; else None.

    Fake tensors, with which npugraph_ex traces, share no memory.
    """
    if keys.untyped_storage() is not values.untyped_storage() or keys.stride() != values.stride():
        return None
    if values.storage_offset() != keys.storage_offset() + keys.numel():
        return None
    return keys.as_strided((2 * keys.shape[0], *keys.shape[1:]), keys.stride())
