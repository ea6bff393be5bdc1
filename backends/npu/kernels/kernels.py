"""Kernels for floating-point models with a canonical cache. Attention is in attention.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch_npu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hal.config.bounds import ADAPTERS
from hal.errors import ConfigError
from hal.ops.kernels import torch_kernels
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.logits import WORD, check_words
from hal.ops.lora import compose, slot_numbers
from hal.vendor import PartialKernel, StowedWeight

from ..soc import Generation
from . import heads, latent_attention, rotary
from .attention import OPTIONS, AtbAttention, ComposedAttention, FusedAttention

if TYPE_CHECKING:
    from hal.nn import WeightUse

ND, FRACTAL_NZ = 2, 29
IN_PLACE_HEAD_DIMS = (64, 128)
"""Head dimensions that npu_apply_rotary_pos_emb supports."""
UNIFIED_BUFFER = 192 * 1024
"""Bytes of on-chip memory that npu_apply_rotary_pos_emb has for all heads of one token."""


def kernels(device: torch.device, generation: Generation, *, attention: str) -> dict[str, Kernel]:
    """Return the kernels for a canonical cache, by operation."""
    fused = (AtbAttention if attention == "atb" else FusedAttention)(device)
    return {
        "add_lora": AddLora(device),
        "add_rms_norm": add_rms_norm,
        "clipped_silu_and_mul": clipped_silu_and_mul,
        "gelu": gelu,
        "gelu_and_mul": gelu_and_mul,
        "greedy_sample": greedy_sample,
        "head_linear": (heads if generation.transposed_products else torch_kernels).head_linear,
        "latent_attention": PartialKernel(
            "latent_attention",
            latent_attention.FusedLatentAttention(fused, prompts=generation.latent_prompts),
            supports=latent_attention.OPTIONS,
            otherwise=latent_attention.composed,
            composes=latent_attention.lacks,
        ),
        "layer_norm": torch_kernels.layer_norm,
        "mask_logits": MaskLogits(device),
        "paged_attention": PartialKernel(
            "paged_attention",
            fused,
            supports=OPTIONS,
            otherwise=ComposedAttention(),
        ),
        "penalize": torch_kernels.penalize,
        "pointwise": torch_kernels.KERNELS["pointwise"],
        "rms_norm": rms_norm,
        "rotary_embedding": rotary.kernel(device, partial=generation.mrope),
        "sample": Sample(device),
        "silu_and_mul": silu_and_mul,
        "split_qkv_rmsnorm_rope": split_qkv_rmsnorm_rope,
        "store_kv_cache": store_kv_cache,
        "store_latent_cache": store_latent_cache,
    }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`hal.ops.rms_norm`. CANN also takes a float32 weight with other x."""
    return torch_npu.npu_rms_norm(x, weight, eps)[0]  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.add_rms_norm`. One launch if the weight has x's dtype, which CANN requires, otherwise two."""
    if weight.dtype is not x.dtype:
        hidden = x + residual
        return rms_norm(hidden, weight, eps), hidden
    normed, _, hidden = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
    return normed, hidden


def silu_and_mul(x: Tensor) -> Tensor:
    """See :func:`hal.ops.silu_and_mul`."""
    return torch_npu.npu_swiglu(x, dim=-1)  # type: ignore[no-any-return]


def gelu(x: Tensor, approximate: str) -> Tensor:
    """See :func:`hal.ops.gelu`. torch's function always runs CANN's approximation by tanh."""
    return torch_npu.npu_gelu(x, approximate=approximate)  # type: ignore[no-any-return]


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """See :func:`hal.ops.gelu_and_mul`."""
    return torch_npu.npu_geglu(x, -1, int(approximate == "tanh"), True)[0]  # type: ignore[no-any-return]


def clipped_silu_and_mul(x: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """See :func:`hal.ops.clipped_silu_and_mul`."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return torch_npu.npu_clipped_swiglu(  # type: ignore[no-any-return]
        x, dim=-1, alpha=alpha, limit=limit, bias=1.0, interleaved=interleaved
    )


def split_qkv_rmsnorm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hal.ops.split_qkv_rmsnorm_rope`. The norms' results are temporaries, so they are rotated in place."""
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, q_weight.shape[0]))
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    query, key = rms_norm(query, q_weight, eps), rms_norm(key, k_weight, eps)
    if qkv.shape[0] and _rotates_in_place(num_heads + num_kv_heads, q_weight.shape[0], qkv.dtype):
        query, key = torch_npu.npu_apply_rotary_pos_emb(query, key, cos[:, None], sin[:, None], layout="TND")
    else:
        query, key = rotary.rotary_embedding(query, key, cos, sin)
    return query, key, value


def _rotates_in_place(heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether npu_apply_rotary_pos_emb supports the sizes, by its documentation.

    It computes bfloat16 in float32.
    """
    computed = 4 if dtype is torch.bfloat16 else dtype.itemsize
    needed = 5 * heads * head_dim * computed + 4 * head_dim * dtype.itemsize
    if computed != dtype.itemsize:
        needed += 8 * head_dim
    return head_dim in IN_PLACE_HEAD_DIMS and needed <= UNIFIED_BUFFER


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`hal.ops.store_kv_cache`.

    Values that are a slice of a merged projection cost a copy. The alternatives cost as much: ATB's
    _npu_reshape_and_cache makes the same copy itself, and npu_scatter_nd_update_ needs a launch for each cache.
    """
    torch_npu.npu_scatter_pa_kv_cache(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slot_mapping, cache_mode="Norm"
    )


def store_latent_cache(
    latent: Tensor, rope: Tensor, latent_cache: Tensor, rope_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See :func:`hal.ops.store_latent_cache`. The operator's keys and values may have heads of different sizes."""
    rows = latent.unsqueeze(1), rope.unsqueeze(1), latent_cache.unsqueeze(2), rope_cache.unsqueeze(2)
    store_kv_cache(*rows, slot_mapping)


def greedy_sample(logits: Tensor) -> Tensor:
    """See :func:`hal.ops.greedy_sample`.

    One launch. CANN's ArgMax returns the first of equal logits: it supports only select_last_index=0, an attribute of
    the ONNX operator. The reference's search for the first maximum would rely on the same.
    """
    return logits.argmax(-1)


class Sample:
    """``sample``, bit for bit as the reference computes it.

    The hash shifts by tensors on the device: torch_npu copies a Python number there at each shift, and synchronizes.
    """

    def __init__(self, device: torch.device) -> None:
        self._13, self._16, self._32 = (torch.tensor(bits, device=device) for bits in (13, 16, 32))

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        step: Tensor,
    ) -> Tensor:
        """See :func:`hal.ops.sample`."""
        vocabulary, greedy, wide = logits.shape[-1], temperature <= 0, logits.float()
        scaled = (wide - wide.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperature)[:, None]
        ranked, token = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(vocabulary, device=logits.device)
        limit = torch.where(greedy, 1, torch.where(top_k > 0, top_k.long(), vocabulary))
        probability = ranked.masked_fill_(rank >= limit[:, None], float("-inf")).softmax(-1)
        before = probability.cumsum(-1) - probability
        keep = (before < top_p[:, None]) | (top_p >= 1)[:, None]
        keep &= probability >= min_p[:, None] * probability[:, :1]
        probability.masked_fill_(~keep & (rank > 0), 0.0)
        chosen = (self._exponential(seed, step, token) / probability).argmin(-1, keepdim=True)
        return token.gather(-1, chosen).squeeze(-1)

    def _exponential(self, seed: Tensor, step: Tensor, token: Tensor) -> Tensor:
        state = self._mix(seed & 0xFFFFFFFF)
        state = self._mix(state ^ (seed >> self._32 & 0xFFFFFFFF))
        state = self._mix(state ^ (step & 0xFFFFFFFF))
        bits = self._mix(self._mix(state[:, None] ^ token) ^ 0x9E3779B9)
        return -torch.log1p(-(bits.float() + 0.5) / 2**32)

    def _mix(self, x: Tensor) -> Tensor:
        x = (x ^ (x >> self._16)) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ (x >> self._13)) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ (x >> self._16)


class AddLora:
    """``add_lora``, in four launches, or seven where projections are merged. The numbers of slots are constants.

    Rows that are grouped by slot would take five: npu_moe_init_routing_v2 has no number for the slot -1, which one
    launch replaces, then two of npu_grouped_matmul, one more for each merged projection, and npu_moe_finalize_routing.
    npu_batch_gather_matmul takes one for each projection, but float16 on an A2 alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = slot_numbers(ADAPTERS, device)

    def __call__(self, output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, slots: Tensor, parts: str) -> Tensor:
        """See :func:`hal.ops.add_lora`."""
        return compose(output, x, lora_a, lora_b, slots, parts, self._numbers[: lora_a.shape[0]])


class MaskLogits:
    """``mask_logits``. Its 32 bits are constants on the device, so that a call neither computes nor copies them."""

    def __init__(self, device: torch.device) -> None:
        self._bits = (1 << torch.arange(WORD)).to(torch.int32).to(device)

    def __call__(self, logits: Tensor, allowed: Tensor) -> Tensor:
        """See :func:`hal.ops.mask_logits`."""
        check_words(logits.shape[-1], allowed.shape[-1])
        banned = (allowed.unsqueeze(-1) & self._bits) == 0
        return logits.masked_fill(banned.flatten(1)[:, : logits.shape[-1]], float("-inf"))


def in_fractal_nz(weight: Tensor) -> Tensor:
    """Return a projection's weight in FRACTAL_NZ, the tiled format that matrix products read. The shape is unchanged.

    Raises:
        ConfigError: torch_npu silently kept the weight's format.
    """
    cast: Tensor = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
    if torch_npu.get_npu_format(cast) != FRACTAL_NZ:
        # torch_npu does not cast a tensor that covers only part of its storage, or has another shape than it.
        cast = torch_npu.npu_format_cast(weight.clone(), FRACTAL_NZ)
    if torch_npu.get_npu_format(cast) != FRACTAL_NZ:
        raise ConfigError(
            f"the option nz_weights is set, but torch_npu kept a weight of shape {list(weight.shape)} in the format "
            f"{torch_npu.get_npu_format(cast)}",
            "leave torch.npu.config.allow_internal_format as the driver sets it, or remove nz_weights",
        )
    return cast


def prepared(weights: Mapping[str, Tensor], use: WeightUse, *, nz: bool) -> Mapping[str, Tensor]:
    """Return the tensors of a floating-point projection, with its weight in FRACTAL_NZ if ``nz``."""
    converted = nz and min(weights.get("weight", torch.empty(0)).shape) > 1
    return {**weights, "weight": in_fractal_nz(weights["weight"])} if converted else weights


def in_transposed_nz(weight: Tensor) -> Tensor:
    """Return int8 weights ``[..., out_features, in_features]`` as a view of their transpose in FRACTAL_NZ.

    The products of int8 require the transpose in this format. CANN does not support it for dimensions of 1, with which
    a weight is returned unchanged.
    """
    return weight if min(weight.shape) == 1 else in_fractal_nz(weight.mT.contiguous()).mT


def is_fractal_nz(weight: Tensor) -> bool:
    """Return whether a weight is in FRACTAL_NZ. A fake tensor, without a format, stands for a prepared weight."""
    return isinstance(weight, FakeTensor) or torch_npu.get_npu_format(weight) == FRACTAL_NZ


class StowedFractal(StowedWeight):
    """A weight in FRACTAL_NZ, or a transposed view of one. torch_npu resizes no storage of this format."""

    def __init__(self, weight: Tensor, *, copy: bool) -> None:
        self._transposed = not weight.is_contiguous()
        self._shape, self._dtype, self._device = self._base(weight).shape, weight.dtype, weight.device
        self._inference = weight.is_inference()  # A trace of it requires that it stays so.
        values = torch_npu.npu_format_cast(self._base(weight), ND).cpu() if copy else None
        super().__init__(weight, values)

    def _base(self, weight: Tensor) -> Tensor:
        return weight.mT if self._transposed else weight

    def free(self) -> None:
        """Free the memory."""
        with torch.inference_mode(self._inference), torch.no_grad():
            self._weight.data = torch.empty(0, dtype=self._dtype, device=self._device)

    def restore(self) -> None:
        """Allocate the memory, in the same format."""
        with torch.inference_mode(self._inference), torch.no_grad():
            plain = torch.zeros(self._shape, dtype=self._dtype)
            plain = plain if self._values is None else plain.copy_(self._values)
            self._weight.data = self._base(in_fractal_nz(plain.to(self._device)))
        self._values = None


def in_nd(weight: Tensor) -> Tensor:
    """Return a weight of :func:`in_transposed_nz` in ordinary memory."""
    return torch_npu.npu_format_cast(weight.mT, ND).mT if is_fractal_nz(weight) else weight
