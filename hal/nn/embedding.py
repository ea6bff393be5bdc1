"""Token embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.weights.weight import Consumer, TiedUse, Weight


class Embedding(nn.Module):
    """An embedding table ``[vocab_size, width]``; :meth:`as_linear` uses it as a tied output projection.

    Attributes:
        weight: the table.
        projection: the table as the driver prepared it for :meth:`as_linear`; None if that is the table itself.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width), requires_grad=False)
        self.projection: Tensor | None
        self.register_buffer("projection", None, persistent=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of the table, and of its tied use."""
        projecting = TiedUse("projection", Consumer("linear", "weight"))
        return {"weight": Weight(("weight",), "vocab_size width", shard="vocab_size", tied_use=projecting)}

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map ``[tokens]`` to ``[tokens, width]``."""
        return ops.embedding(token_ids, self.weight)

    if TYPE_CHECKING:
        __call__ = forward

    def as_linear(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to logits ``[..., vocab_size]``."""
        return ops.linear(x, self.weight if self.projection is None else self.projection, None)
