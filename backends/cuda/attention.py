"""Attention with torch's functions, and the choice between kernels of attention over the paged cache for a step.

The choice depends only on values on the host, so nothing waits for the GPU. A capture uses only kernels that read
lengths on the device, so one graph serves all lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal.errors import CaptureError
from hal.ops import AttentionOptions
from hal.ops.kernels import torch_kernels
from hal.ops.kernels.composed_attention import decode, one_by_one
from hal.ops.kernels.kernel_table import Kernel
from hal.step.shape import one_query_each

PAGE = 256
"""torch's flash attention 2 reads a cache in place if the block size is a multiple of this number of tokens."""
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8
LONG_PREFILL = 32
"""Minimum number of new tokens in a sequence for the kernel of long prefills."""
HALVES = (torch.bfloat16, torch.float16)


def capturing(tensor: Tensor) -> bool:
    """Return whether the current stream is capturing a graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def only_masks(options: AttentionOptions) -> bool:
    """Return whether attention has no other options than torch's flash attention."""
    return options.softcap is None and options.chunk is None and options.alibi is None


class ByLength:
    """``paged_attention`` with one kernel for long prefills and another for everything else.

    Args:
        short: the kernel for decodes and short prefills; it reads lengths on the device.
        long: the kernel for long prefills.

    Attributes:
        captured: the kernel that graphs capture.
    """

    def __init__(self, short: Kernel, long: Kernel) -> None:
        self.captured, self._long = short, long

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        sinks: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        tokens, sequences = query.shape[0], kv_lens.shape[0]
        # Comparing shapes recognizes a decode without reading lengths. torch's attention has none of the other options.
        long = tokens > sequences and sinks is None and only_masks(options)
        long = long and int(query_start_loc_host.diff().max()) >= LONG_PREFILL
        attend = self._long if long else self.captured
        cache = key_cache, value_cache, block_table
        lengths = query_start_loc, kv_lens, query_start_loc_host, kv_lens_host
        attended: Tensor = attend(query, *cache, *lengths, sinks, options)
        return attended


class TorchAttention:
    """``paged_attention`` with torch's variable-length flash attention, or with its scaled dot product attention.

    Flash attention reads the cache in place if the block size is a multiple of :data:`PAGE` and this release of torch
    supports block tables. Otherwise keys and values are gathered first. Softcaps, sinks, chunks and position biases are
    composed of smaller operations.

    Args:
        flash: whether torch has flash attention for this device.

    Attributes:
        pages: whether flash attention supports block tables.
    """

    def __init__(self, *, flash: bool) -> None:
        self._flash = flash
        # torch.nn.attention.varlen wraps the same operator, but its arguments have changed in each release since 2.10.
        names = {each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments}
        self.pages = flash and {"block_table", "seqused_k"} <= names

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        sinks: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        tokens, _, head_dim = query.shape
        starts = query_start_loc_host.tolist()
        captured, decodes = capturing(query), one_query_each(tokens, starts)
        queried = tokens if captured else starts[-1]
        if not queried:
            return torch.zeros_like(query, memory_format=torch.contiguous_format)
        flash = self._flash and sinks is None and only_masks(options) and query.dtype in HALVES
        flash = flash and head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_MULTIPLE == 0
        block_size = key_cache.shape[1]
        if flash and self.pages and block_size % PAGE == 0:
            longest = tokens if captured else int(query_start_loc_host.diff().max())
            attended = _flash(
                query[:queried],
                key_cache,
                value_cache,
                query_start_loc,
                query_start_loc,
                1 if decodes else longest,
                block_table.shape[1] * block_size,
                options,
                seqused_k=kv_lens.contiguous(),
                block_table=block_table.contiguous(),
            )
            if captured and not decodes:  # flash attention does not write padding rows
                past = torch.arange(tokens, device=query.device) >= query_start_loc[-1]
                return attended.masked_fill(past[:, None, None], 0.0)
        elif decodes and (captured or not flash):
            return decode(query, key_cache, value_cache, block_table, kv_lens, sinks, options)
        elif captured:
            raise _gathers()
        elif flash:
            ends = functional.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
            keys, values = gathered(key_cache, value_cache, block_table, kv_lens, kv_lens_host)
            attended = _flash(
                query[:queried],
                keys,
                values,
                query_start_loc,
                ends,
                int(query_start_loc_host.diff().max()),
                int(kv_lens_host.max()),
                options,
            )
        else:
            lengths = kv_lens_host.tolist()
            return one_by_one(query, key_cache, value_cache, block_table, starts, lengths, sinks, options)
        return attended if queried == tokens else functional.pad(attended, (0, 0, 0, 0, 0, tokens - queried))


def composed(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc_host: Tensor,
    kv_lens: Tensor,
    kv_lens_host: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Attend with torch's smaller operations, which support all options; see :func:`hal.ops.paged_attention`.

    Raises:
        CaptureError: a graph captures a prefill.
    """
    starts = query_start_loc_host.tolist()
    if one_query_each(query.shape[0], starts):
        return decode(query, key_cache, value_cache, block_table, kv_lens, sinks, options)
    if capturing(query):
        raise _gathers()
    lengths = kv_lens_host.tolist()
    return one_by_one(query, key_cache, value_cache, block_table, starts, lengths, sinks, options)


def _gathers() -> CaptureError:
    return CaptureError(
        "torch's attention for a prefill gathers the sequences' keys, whose number no replay can change",
        'capture decode steps only; or remove the option kernels.paged_attention, or set it to "triton"',
    )


def _flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    ends: Tensor,
    longest_query: int,
    longest: int,
    options: AttentionOptions,
    **paged: Tensor,
) -> Tensor:
    window = options.window
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        starts.contiguous(),
        ends,
        longest_query,
        longest,
        0.0,
        options.causal and window is None,
        False,
        scale=options.scale,
        window_size_left=-1 if window is None else window - 1,
        # A causal mask implies 0. Passing it would keep flash attention from grouping a decode's heads.
        window_size_right=-1 if window is None else 0 if options.causal else window - 1,
        **paged,
    )[0]
    return attended


def gathered(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, kv_lens: Tensor, kv_lens_host: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all sequences, each ``[all tokens, num_kv_heads, head_dim]``."""
    total, block_size = int(kv_lens_host.sum()), key_cache.shape[1]
    row = torch.repeat_interleave(
        torch.arange(kv_lens.shape[0], device=kv_lens.device), kv_lens.long(), output_size=total
    )
    position = torch.arange(total, device=kv_lens.device) - (kv_lens.cumsum(0) - kv_lens)[row]
    slots = block_table[row, position // block_size].long() * block_size + position % block_size
    return key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots]


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See :func:`hal.ops.scaled_dot_product_attention`.

    On Hopper, torch uses cuDNN's attention for 16-bit types. It returns None for an empty query, and a nonzero row for
    a query that attends to no key.
    """
    if not query.numel():
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    queries, keys = query.shape[2], key.shape[2]
    if causal and (mask is not None or queries > keys):
        own = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        mask, causal = own if mask is None else own & mask, False
    attended = torch_kernels.scaled_dot_product_attention(query, key, value, mask, scale, causal, softcap, sinks)
    return attended if mask is None else attended.masked_fill(~mask.any(-1, keepdim=True), 0.0)
