"""Calls of attention in a step: what a layer asks for, and the step that serves them over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import Attention, LayerState
from hal.step import Batch

NAME = "hal_paged"
"""The name of the functions for attention, masks and experts in transformers' registries."""


class Phase(Protocol):
    """What a call of the model is for: a probe, a step, or the logits of a step."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Serve a layer; the arguments are those of an attention function, as is the result."""


PHASE: ContextVar[Any] = ContextVar("hal_phase", default=None)
"""What runs in this context. It is no argument of the layers, because many drop the arguments that they do not know."""


@contextmanager
def running(phase: Any) -> Iterator[None]:
    """Let ``phase`` serve the layers that are called in the block."""
    token = PHASE.set(phase)
    try:
        yield
    finally:
        PHASE.reset(token)


@attrs.frozen
class Call:
    """One call of attention. A step makes the same calls in the same order as the probe.

    Attributes:
        owner: the index of the call that stores the keys and values; its own unless layers share them.
        value_dim: elements of a value head. In the cache, narrower ones are padded to those of a key head.
    """

    owner: int
    value_dim: int


class Step:
    """One step of the model: gives each call of attention its layer and its state.

    Args:
        calls: the calls, in order.
        layers: the attention of each call.
        batch: the step.
        states: the states of each call.

    Attributes:
        products: what merged projections computed, by the layer's id, with their input.
        positions: of the tokens, ``[tokens, 1]``.
    """

    def __init__(
        self, calls: Sequence[Call], layers: Sequence[Attention], batch: Batch, states: Sequence[LayerState]
    ) -> None:
        self.products: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions = batch.positions.unsqueeze(1)
        self._calls, self._layers, self._batch, self._states = calls, layers, batch, states
        self._next = 0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Store the keys and values ``[tokens, heads, 1, head_dim]``, and attend."""
        call, layer, batch = self._calls[self._next], self._layers[self._next], self._batch
        state = self._states[call.owner]
        query, key, value = (each.squeeze(2) for each in (query, key, value))
        if call.value_dim < layer.head_dim:
            zeros = value.new_zeros(*value.shape[:-1], layer.head_dim - call.value_dim)
            value = torch.cat((value, zeros), -1)
        if call.owner == self._next:
            ops.store_kv_cache(key, value, state["key"], state["value"], batch.slot_mapping)
        self._next += 1
        sinks = options.get("s_aux")
        attended = ops.paged_attention(
            query,
            state["key"],
            state["value"],
            batch.block_table,
            batch.query_start_loc,
            batch.kv_lens,
            batch.query_start_loc_host,
            batch.kv_lens_host,
            None if sinks is None else sinks.to(query.dtype),
            layer.options,
        )
        if call.value_dim < layer.head_dim:
            attended = attended[..., : call.value_dim]
        return attended.unsqueeze(1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Serve a layer by what runs; the function for ``AttentionInterface``."""
    return PHASE.get().attend(module, query, key, value, scaling, attention_mask, options), None
