"""Calls of attention in a step: what a layer asks for, and the step that serves them over the paged cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal.nn import Attention, LayerState
from hal.sources.transformers.in_class import Returned
from hal.sources.transformers.phase import PHASE
from hal.step import Batch


@attrs.frozen
class Call:
    """One call of attention. A step makes the same calls in the same order as the probe.

    Attributes:
        owner: the index of the call that stores the keys and values; its own unless layers share them.
        value_dim: elements of a value head. In the cache, narrower ones are padded to those of a key head.
        tuning: the tokens of a step and the factor of Llama 4's attention temperature; None for none.
    """

    owner: int
    value_dim: int
    tuning: tuple[float, float] | None = None


class Step:
    """One step of the model: gives each call of attention its layer and its state.

    Args:
        layers: the attention of each call.
        states: the states of each call.
        in_class: whether classes of the model compute attention themselves.

    Attributes:
        products: what merged projections computed, by the layer's id, with their input.
        positions: of the tokens, ``[tokens, 1]``.
        store: takes what a layer gives to its cache, and returns what the layer gets; None if attention does it.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        layers: Sequence[Attention],
        batch: Batch,
        states: Sequence[LayerState],
        *,
        in_class: bool = False,
    ) -> None:
        self.products: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions = batch.positions.unsqueeze(1)
        self.store = self._store if in_class else None
        self._calls, self._layers, self._batch, self._states = calls, layers, batch, states
        self._next = 0
        self._attended: Tensor | None = None

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
        if self._calls[self._next].owner == self._next:
            self._write(key, value)
        return self._attend(query.squeeze(2), options.get("s_aux")).unsqueeze(1)

    def _score(self, query: Tensor, keys: Tensor) -> Tensor:
        """Attend with the queries of a class that computes attention itself, and return scores that do not matter."""
        layer, tokens = self._layers[self._next], self._batch.positions.shape[0]
        self._attended = self._attend(query.reshape(tokens, -1, layer.head_dim), None)
        return query.new_zeros(*query.shape[:-1], keys.shape[-1])

    def _weigh(self, weights: Tensor, values: Tensor) -> Tensor:
        """Return what the last :meth:`_score` computed, in the shape of the product."""
        assert self._attended is not None
        return self._attended.reshape(*weights.shape[:-1], values.shape[-1])

    def _store(self, key: Tensor, value: Tensor) -> tuple[Returned, Returned]:
        self._write(key, value)
        return Returned(key, self._score), Returned(value, self._weigh)

    def _write(self, key: Tensor, value: Tensor) -> None:
        """Store the keys and values ``[tokens, heads, 1, head_dim]`` of the next call."""
        call, layer, state = self._calls[self._next], self._layers[self._next], self._states[self._next]
        key, value = key.squeeze(2), value.squeeze(2)
        if call.value_dim < layer.head_dim:
            zeros = value.new_zeros(*value.shape[:-1], layer.head_dim - call.value_dim)
            value = torch.cat((value, zeros), -1)
        self._dtype = key.dtype
        layer.store(key, value, self._batch, state)

    def _attend(self, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend with the queries ``[tokens, heads, head_dim]`` of the next call."""
        call, layer, batch = self._calls[self._next], self._layers[self._next], self._batch
        state = self._states[call.owner]
        self._next += 1
        if call.tuning is not None:
            every, factor = call.tuning
            turns = torch.floor((batch.positions.float() + 1.0) / every)
            query = query * (torch.log1p(turns) * factor + 1.0)[:, None, None]
        query = query.to(self._dtype)
        attended = layer.attend(query, batch, state, None if sinks is None else sinks.to(query.dtype))
        return attended[..., : call.value_dim] if call.value_dim < layer.head_dim else attended


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
