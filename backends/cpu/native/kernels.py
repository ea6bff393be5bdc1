"""Python bindings of the C++ kernels.

Each takes its operation's arguments and ``out``: contiguous tensors of the right shapes to write instead of new ones.
Shapes, dtypes and devices are checked here, because C++ would read out of bounds. An argument with strides that C++
does not support is copied first.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import plain

from .. import low_bits
from ..low_bits import Forms, by_expert
from .arguments import DTYPES, Bindings, addresses, empty, integers, packed, require, rows
from .attention_kernels import ATTENTION_KERNELS, AttentionKernels
from .expert_kernels import EXPERT_KERNELS, ExpertKernels
from .latent_kernels import LATENT_KERNELS, LatentKernels
from .linear_kernels import INT8_KERNELS, Int8Kernels, LinearKernels
from .logits_kernels import LOGITS_KERNELS, SAMPLING_KERNELS, LogitsKernels, SamplingKernels
from .lora_kernels import LORA_KERNELS, LoraKernels
from .recurrent_kernels import RECURRENT_KERNELS, RecurrentKernels
from .selection_kernels import SELECTION_KERNELS, SelectionKernels
from .stream_kernels import STREAM_KERNELS, StreamKernels
from .weight_only_kernels import WeightOnlyKernels, in_groups

BASIC = (
    "add_rms_norm",
    "gelu_and_mul",
    "greedy_sample",
    "packed_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "store_kv_cache",
)
NATIVE = (
    *BASIC,
    *ATTENTION_KERNELS,
    *EXPERT_KERNELS,
    *INT8_KERNELS,
    *LATENT_KERNELS,
    *LOGITS_KERNELS,
    *LORA_KERNELS,
    *RECURRENT_KERNELS,
    *SAMPLING_KERNELS,
    *SELECTION_KERNELS,
    *STREAM_KERNELS,
    *low_bits.KERNELS,
)


def native_kernels(library: ctypes.CDLL) -> tuple[dict[str, Kernel], Forms]:
    """Return the C++ kernels by operation, and those by form, with torch's for the forms that they do not take."""
    experts, int8, weight_only = ExpertKernels(library), Int8Kernels(library), WeightOnlyKernels(library)
    floats = LinearKernels(library)
    made = (
        (_Library(library), BASIC),
        (AttentionKernels(library), ATTENTION_KERNELS),
        (LatentKernels(library), LATENT_KERNELS),
        (experts, EXPERT_KERNELS),
        (int8, INT8_KERNELS),
        (LogitsKernels(library), LOGITS_KERNELS),
        (LoraKernels(library), LORA_KERNELS),
        (RecurrentKernels(library), RECURRENT_KERNELS),
        (SamplingKernels(library), SAMPLING_KERNELS),
        (SelectionKernels(library), SELECTION_KERNELS),
        (StreamKernels(library), STREAM_KERNELS),
    )
    forms: Forms = {
        "embedding": [(in_groups, weight_only.embedding, experts.describe)],
        "grouped_linear": [
            (plain, experts.grouped_linear, experts.describe),
            (low_bits.exact, by_expert(int8.linear), int8.describe),
            (in_groups, weight_only.grouped_linear, weight_only.describe),
        ],
        "linear": [
            (plain, floats.linear, floats.describe),
            (low_bits.exact, int8.linear, int8.describe),
            (in_groups, weight_only.linear, weight_only.describe),
        ],
    }
    kernels = {name: getattr(bindings, name) for bindings, names in made for name in names}
    return kernels, {name: [*each, *low_bits.KERNELS[name]] for name, each in forms.items()}


class _Library(Bindings):
    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        function = self.function
        pointers = [c_void_p] * 8
        self._rms_norm = function("rms_norm", None, *pointers[:3], c_int, c_int, *[c_int64] * 5, c_float)
        self._add_rms_norm = function("add_rms_norm", None, *pointers[:5], c_int, c_int, *[c_int64] * 2, c_float)
        self._rotary = function("rotary_embedding", None, *pointers[:6], *[c_int] * 3, *[c_int64] * 9)
        self._silu = function("silu_and_mul", None, *pointers[:2], c_int, *[c_int64] * 2)
        self._gelu = function("gelu_and_mul", None, *pointers[:2], c_int, c_int, *[c_int64] * 2)
        self._greedy = function("greedy_sample", None, *pointers[:2], c_int, *[c_int64] * 3)
        self._store = function("store_kv_cache", c_int64, *pointers[:5], *[c_int64] * 5)
        self._packed_attention = function(
            "packed_attention", c_int64, *pointers[:5], c_int, *[c_int64] * 11, c_float, c_int
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.rms_norm`. It reads strided rows of x in place, such as heads in a merged projection."""
        width = x.shape[-1]
        require(weight.shape == (width,) and weight.dtype in (x.dtype, torch.float32), "rms_norm", x, weight)
        x, (heads, outer, inner) = rows(x)
        weight = weight.contiguous()
        y = empty(x.shape, x) if out is None else out
        sizes = x.numel() // width, heads, width, outer, inner
        self._rms_norm(*addresses(x, weight, y), DTYPES[x.dtype], weight.dtype is torch.float32, *sizes, eps)
        return y

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.add_rms_norm`. It computes the sum and its norm in one pass."""
        width = x.shape[-1]
        alike = x.shape == residual.shape and x.dtype is residual.dtype and weight.dtype in (x.dtype, torch.float32)
        require(alike and weight.shape == (width,), "add_rms_norm", x, residual, weight)
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        y, hidden = (empty(x.shape, x), empty(x.shape, x)) if out is None else out
        self._add_rms_norm(
            *addresses(x, residual, weight, y, hidden),
            DTYPES[x.dtype],
            weight.dtype is torch.float32,
            x.numel() // width,
            width,
            eps,
        )
        return y, hidden

    def rotary_embedding(
        self,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.rotary_embedding`. It rotates query and key in one call."""
        tokens, heads, head_dim = query.shape
        fits = key.shape[0] == tokens and key.shape[2] == head_dim and cos.shape == sin.shape
        fits = fits and cos.shape[0] == tokens and cos.shape[1] <= head_dim
        fits = fits and query.dtype is key.dtype and cos.dtype is sin.dtype
        fits = fits and cos.dtype in (query.dtype, torch.float32)
        require(fits, "rotary_embedding", query, key, cos, sin)
        query, (_, *query_strides) = rows(query)
        key, (kv_heads, *key_strides) = rows(key)
        cos, sin = cos.contiguous(), sin.contiguous()
        new = (empty(query.shape, query), empty(key.shape, key)) if out is None else out
        sizes = tokens, heads, kv_heads, head_dim, cos.shape[1], *query_strides, *key_strides
        self._rotary(
            *addresses(query, key, cos, sin, new[0], new[1]),
            DTYPES[query.dtype],
            cos.dtype is torch.float32,
            interleaved,
            *sizes,
        )
        return new

    def silu_and_mul(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.silu_and_mul`. It computes in float32 and rounds once."""
        require(x.shape[-1] % 2 == 0, "silu_and_mul", x)
        x = x.contiguous()
        width = x.shape[-1] // 2
        y = empty((*x.shape[:-1], width), x) if out is None else out
        self._silu(x.data_ptr(), y.data_ptr(), DTYPES[x.dtype], y.numel() // max(width, 1), width)
        return y

    def gelu_and_mul(self, x: Tensor, approximate: str, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.gelu_and_mul`. It computes in float32 and rounds once."""
        require(x.shape[-1] % 2 == 0 and approximate in ("none", "tanh"), "gelu_and_mul", x)
        x = x.contiguous()
        width = x.shape[-1] // 2
        y = empty((*x.shape[:-1], width), x) if out is None else out
        tanh, count = approximate == "tanh", y.numel() // max(width, 1)
        self._gelu(x.data_ptr(), y.data_ptr(), DTYPES[x.dtype], tanh, count, width)
        return y

    def greedy_sample(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.greedy_sample`. It reads each row once; torch's argmax takes many times as long."""
        require(logits.dim() == 2 and logits.shape[1] > 0, "greedy_sample", logits)
        logits, (_, stride, _) = rows(logits)
        tokens = torch.empty(logits.shape[0], dtype=torch.int64) if out is None else out
        self._greedy(
            logits.data_ptr(), tokens.data_ptr(), DTYPES[logits.dtype], logits.shape[0], logits.shape[1], stride
        )
        return tokens

    def store_kv_cache(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """See :func:`hal.ops.store_kv_cache`. It copies rows as bytes.

        Raises:
            OperationError: a slot is outside the cache, or shapes or dtypes differ.
        """
        row = key.shape[1] * key.shape[2]
        alike = key.shape == value.shape and key.dtype is value.dtype is key_cache.dtype is value_cache.dtype
        canonical = key_cache.shape[2:] == key.shape[1:] and key_cache.is_contiguous() and value_cache.is_contiguous()
        canonical = canonical and value_cache.shape == key_cache.shape
        slots = integers(slot_mapping, "slot_mapping")
        require(alike and canonical, "store_kv_cache", key, value, key_cache, value_cache)
        require(slots.shape == key.shape[:1], "store_kv_cache", key, indices=(slots,))
        key, value, size = packed(key), packed(value), key.element_size()
        wrong = self._store(
            *addresses(key, value, key_cache, value_cache, slots),
            key.shape[0],
            key_cache.shape[0] * key_cache.shape[1],
            row * size,
            key.stride(0) * size,
            value.stride(0) * size,
        )
        if wrong:
            raise OperationError(
                f"store_kv_cache: token {wrong - 1} has slot {int(slots[wrong - 1])}, outside the cache of "
                f"{key_cache.shape[0] * key_cache.shape[1]} slots",
                "check the batch's slot_mapping",
            )

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start_loc: Tensor,
        query_start_loc_host: Tensor,
        scale: float,
        causal: bool,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.packed_attention`. It is the kernel of prompts, and reads strided heads in place.

        Raises:
            OperationError: a sequence is outside the tokens, or shapes or dtypes differ.
        """
        tokens, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        fits = key.shape == value.shape == (tokens, kv_heads, head_dim) and kv_heads > 0 and heads % kv_heads == 0
        fits = fits and query.dtype is key.dtype is value.dtype
        require(fits, "packed_attention", query, key, value)
        starts = integers(query_start_loc_host, "query_start_loc_host")
        require(starts.dim() == 1 and len(starts) > 0, "packed_attention", query, indices=(starts,))
        given = [rows(each) for each in (query, key, value)]
        y = empty(query.shape, query) if out is None else out
        wrong = self._packed_attention(
            *(each.data_ptr() for each, _ in given),
            *addresses(starts, y),
            DTYPES[query.dtype],
            len(starts) - 1,
            tokens,
            heads,
            kv_heads,
            head_dim,
            *(stride for _, (_, *strides) in given for stride in strides),
            scale,
            causal,
        )
        if wrong:
            raise OperationError(
                f"packed_attention: query_start_loc is {starts.tolist()!s:.200} of {tokens} tokens",
                "check the batch's query_start_loc",
            )
        return y
