"""hal's attention for transformers: over dense tensors, and over the paged cache of continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakSet

import attrs
import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from hal import ops
from hal.errors import OperationError

REFUSED = ("position_bias", "attention_bias", "alibi")
"""Arguments of an attention function that change its result, and that hal's operations do not have."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa`` does, with :func:`hal.ops.scaled_dot_product_attention`.

    Args:
        module: the layer; its ``is_causal`` counts if the argument is None.
        query: ``[batch, num_heads, queries, head_dim]``.
        key: ``[batch, num_kv_heads, keys, head_dim]``.
        value: as ``key``.
        attention_mask: ``[batch, 1, queries, keys]``, bool, or None.
        dropout: must be 0.
        scaling: of the scores; None for ``head_dim ** -0.5``.
        is_causal: whether a query attends only up to its own token, if there is no mask.
        kwargs: ``softcap`` and ``s_aux``, the sinks, and what other attention functions need.

    Returns:
        ``[batch, queries, num_heads, head_dim]``, and no weights.

    Raises:
        OperationError: the layer asks for what the operation does not have.
    """
    check(module, attention_mask, dropout, kwargs)
    queries = query.shape[2]
    causal = (
        queries > 1
        and attention_mask is None
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    if causal and key.shape[2] > queries:  # a static cache, of which only the first tokens are filled
        key, value = key[:, :, :queries], value[:, :, :queries]
    if attention_mask is not None:
        attention_mask = attention_mask.expand(query.shape[0], -1, -1, -1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = ops.scaled_dot_product_attention(
        query, key, value, attention_mask, scale, causal, kwargs.get("softcap") or None, sinks_of(query, kwargs)
    )
    return attended.transpose(1, 2).contiguous(), None


def check(module: nn.Module, mask: Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    """Raise OperationError unless hal's attention computes what a layer asks for."""
    asked = [name for name in REFUSED if others.get(name) is not None]
    asked += ["dropout"] if dropout else []
    asked += ["a mask that is not bool [batch, 1, queries, keys]"] if _unlike(mask) else []
    asked += ["attention sinks"] if hasattr(module, "sinks") and others.get("s_aux") is None else []
    if asked:
        raise OperationError(
            f"{type(module).__name__} asks attention for {', '.join(asked)}, which hal's operation does not have",
            "use(model, attention=False) leaves attention to transformers",
        )


def sinks_of(query: Tensor, others: dict[str, Any]) -> Tensor | None:
    """Return the sinks of a layer in the dtype of its queries, or None."""
    sinks: Tensor | None = others.get("s_aux")
    return None if sinks is None else sinks.to(query.dtype)


def _unlike(mask: Tensor | None) -> bool:
    return mask is not None and (mask.dtype is not torch.bool or mask.dim() != 4 or mask.shape[1] != 1)


PAGED = "paged|eager"
"""The one name that continuous batching accepts beside sdpa and flash attention."""
PAGES = "pages"
"""The argument of the function by which a layer's cache reaches it; None for a cache that is no table of blocks."""
STEP = "hal_step"
"""The argument by which a call of the model hands all its layers one :class:`Step`."""


@attrs.frozen(eq=False)
class Rows:
    """Where a step's tokens are, for all layers of one group of the cache.

    Attributes:
        written: ``[new]``, int32: the slots of the new tokens.
        table: ``[sequences, columns]``, int32: the blocks of each sequence.
        starts: ``[sequences + 1]``, int32: where the new tokens of each sequence start.
        lens: ``[sequences]``, int32: the length of each sequence with its new tokens.
        starts_host: ``starts``, on the host.
        lens_host: ``lens``, on the host.
    """

    written: Tensor
    table: Tensor
    starts: Tensor
    lens: Tensor
    starts_host: Tensor
    lens_host: Tensor

    @classmethod
    def of(cls, pages: Any, size: int, kwargs: dict[str, Any]) -> Rows:
        """Read the arguments of an attention function, with one copy to the host, which waits for the device.

        Args:
            size: the number of tokens of a block.
            kwargs: the arguments of the attention function.
        """
        bounds = torch.stack((kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][pages.layer_type])).int()
        lens, bounds_host = bounds[1].diff(), bounds.cpu()
        starts_host, lens_host = bounds_host[0], bounds_host[1].diff()
        new, columns = int(starts_host[-1]), -(-int(lens_host.max()) // size)
        read, written = kwargs["read_index"][pages.index], kwargs["write_index"][pages.index][:new]
        slots = read if read.numel() else written  # With no token in the cache before, only the new ones are read.
        first = bounds[1, :-1, None] + torch.arange(columns, device=bounds.device) * size
        table = (slots[first.clamp(max=slots.shape[0] - 1).long()] // size).int()
        return cls(written.int(), table, bounds[0], lens, starts_host, lens_host)


class Step:
    """One call of the model. A call is a step even if its arguments are those of the call before.

    It travels among the arguments of the layers, so it ends with the call, and nested calls and threads share none.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, Rows] = {}

    def rows(self, pages: Any, size: int, kwargs: dict[str, Any]) -> Rows:
        """Return the rows of a group, which the first of its layers reads."""
        if (found := self._groups.get(pages)) is None:
            found = self._groups[pages] = Rows.of(pages, size, kwargs)
        return found


class UnwrittenCache:
    """The cache that a layer sees: it hands on the new keys and values alone, which hal's attention writes itself.

    transformers' own ``update`` would copy the keys and values of all earlier tokens out of their pages.
    """

    def update(self, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are."""
        return key, value


@attrs.frozen(eq=False)
class ServedLayers:
    """The attention layers of a model that use hal, and the hooks that hand their cache to hal."""

    layers: WeakSet[nn.Module]
    hooks: tuple[RemovableHandle, ...]


class PagedAttention:
    """The function that is registered as :data:`PAGED` while a model uses hal: one for all models of the process.

    It runs :func:`hal.ops.paged_attention` for the layers of these models, and the function that was registered before
    for others, and for layers whose cache is no table of blocks, such as one with a sliding window.
    """

    def __init__(self) -> None:
        self._models: tuple[ServedLayers, ...] = ()
        self._former: Callable[..., Any] = self._attend
        self._registered: Callable[..., Any] = torch.compiler.disable(self._attend)  # It reads lengths on the host.
        self._lock = Lock()

    def add(self, model: nn.Module) -> ServedLayers:
        """Serve a model's layers, and return them."""
        layers = [each for each in model.modules() if hasattr(each, "layer_idx")]
        hooks = [each.register_forward_pre_hook(_keep_pages, with_kwargs=True) for each in layers if _innermost(each)]
        hooks.append(model.register_forward_pre_hook(_begin_step, with_kwargs=True))
        served = ServedLayers(WeakSet(layers), tuple(hooks))
        with self._lock:
            if (registered := AttentionInterface()[PAGED]) is not self._registered:
                self._former = registered
                AttentionInterface.register(PAGED, self._registered)
            self._models = (*self._models, served)
        return served

    def remove(self, served: ServedLayers) -> None:
        """Stop serving the layers that :meth:`add` returned. After the last, the former function is registered."""
        for hook in served.hooks:
            hook.remove()
        with self._lock:
            self._models = tuple(each for each in self._models if each is not served)
            if not self._models and AttentionInterface()[PAGED] is self._registered:
                AttentionInterface.register(PAGED, self._former)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        step = kwargs.pop(STEP, None) or Step()  # The caller called a part of the model.
        if not any(module in each.layers for each in self._models):
            return self._former(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        if PAGES not in kwargs:
            raise OperationError(
                f"{type(module).__name__} of transformers {transformers.__version__} was called without a paged cache",
                "call generate_batch only while hal serves it, with a version that torch-hal[transformers] names",
            )
        if (pages := kwargs.pop(PAGES)) is None:
            return self._former(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        check(module, None, kwargs.get("dropout", 0.0), kwargs)
        key_cache, value_cache = pages.get_cache_for_block_table(module.layer_idx)
        rows = step.rows(pages, key_cache.shape[1], kwargs)
        new = rows.written.shape[0]
        queries, keys, values = (each[0].transpose(0, 1)[:new].contiguous() for each in (query, key, value))
        ops.store_kv_cache(keys, values, key_cache, value_cache, rows.written)
        attended = query.new_zeros(query.shape[2], *queries.shape[1:])
        attended[:new] = ops.paged_attention(
            queries,
            key_cache,
            value_cache,
            rows.table,
            rows.starts,
            rows.lens,
            rows.starts_host,
            rows.lens_host,
            sinks_of(query, kwargs),
            ops.AttentionOptions(kwargs["scaling"], softcap=kwargs.get("softcap") or None),
        )
        return attended[None], None


def _innermost(module: nn.Module) -> bool:
    return not any(hasattr(each, "layer_idx") for each in module.modules() if each is not module)


def _begin_step(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    return (args, {**kwargs, STEP: Step()}) if hasattr(kwargs.get("cache"), "layer_to_allocator") else None


def _keep_pages(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    pages = getattr(kwargs.get("cache"), "layer_to_allocator", {}).get(module.layer_idx)
    if pages is None:
        return None
    if not pages.supports_block_table:
        return args, {**kwargs, PAGES: None}
    return args, {**kwargs, "cache": UnwrittenCache(), PAGES: pages}


PAGED_ATTENTION = PagedAttention()
"""transformers' registry is the process's, so this is, too."""
