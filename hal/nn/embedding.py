"""Token embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.linear import OUT, Linear
from hal.nn.weights.weight import PADDED, Consumer, TiedUse, Weight


class Embedding(nn.Module):
    """An embedding table ``[vocab_size, width]``; :meth:`as_linear` uses it as a tied output projection.

    Ranks that split it hold consecutive rows, the last ones padded.

    Args:
        vocab_size: the number of rows.
        width: the number of features.
        multiplier: factor of the rows that are looked up, which is rounded to their dtype.

    Attributes:
        weight: the table, or this rank's rows.
        projection: the table as the driver prepared it for :meth:`as_linear`; None if that is the table itself.
    """

    def __init__(self, vocab_size: int, width: int, multiplier: float = 1.0) -> None:
        super().__init__()
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        self._multipliers = {dtype: float(torch.tensor(multiplier, dtype=dtype, device="cpu")) for dtype in dtypes}
        self.vocab_size, self.width, self.multiplier = vocab_size, width, multiplier
        self.first = 0
        self.group: str | None = None
        self.weight = nn.Parameter(torch.empty(vocab_size, width), requires_grad=False)
        self.projection: Tensor | None
        self.register_buffer("projection", None, persistent=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of the table, and of its tied use."""
        projecting = TiedUse("projection", Consumer("linear", "weight"))
        return {
            "weight": Weight(("weight",), "vocab_size width", shard="vocab_size", share=PADDED, tied_use=projecting)
        }

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that are looked up."""
        return self.weight.dtype

    @property
    def rows(self) -> int:
        """The rows that this rank holds."""
        return self.weight.shape[0]

    def split(self, tensor: Group) -> None:
        """Look up this rank's rows from now on, and add the ranks' results."""
        self.group = tensor.name
        self.first, _ = PADDED.interval(self.vocab_size, tensor.rank, tensor.size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map ``[tokens]`` to ``[tokens, width]``."""
        found = self._of_ranks(token_ids)
        multiplier = self._multipliers[found.dtype]
        return found if multiplier == 1.0 else found * multiplier

    if TYPE_CHECKING:
        __call__ = forward

    def _of_ranks(self, token_ids: Tensor) -> Tensor:
        if self.group is None:
            return self._lookup(token_ids)
        rows = token_ids - self.first
        other = (rows < 0) | (rows >= self.rows)
        found = self._lookup(rows.masked_fill(other, 0))
        return ops.all_reduce(found.masked_fill(other.unsqueeze(-1), 0.0), self.group)

    def _lookup(self, rows: Tensor) -> Tensor:
        return ops.embedding(rows, self.weight)

    def as_linear(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to logits ``[..., vocab_size]``."""
        logits = ops.linear(x, self.weight if self.projection is None else self.projection, None)
        if self.group is None:
            return logits
        gathered = ops.all_gather(logits, self.group)
        return gathered if gathered.shape[-1] == self.vocab_size else gathered[..., : self.vocab_size]

    def linear(self) -> Linear:
        """Return the tied output projection as a layer without values."""
        with torch.device("meta"):
            return Linear(self.width, self.vocab_size, shard=OUT, share=PADDED, gather=True)


class QuantizedEmbedding(Embedding):
    """An embedding whose table is a tied output projection with a quantized weight.

    Args:
        embedding: the layer to replace.
        table: in the place of the layer that :meth:`Embedding.linear` returns.

    Attributes:
        table: the output projection.
        unit: ``[1]``, of the dtype of computation.
    """

    unit: Tensor

    def __init__(self, embedding: Embedding, table: Linear) -> None:
        with torch.device("meta"):
            super().__init__(embedding.vocab_size, embedding.width, embedding.multiplier)
            self.register_buffer("unit", torch.empty(1))
        del self.weight
        self.table = table

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of the unit. The table declares its tensors."""
        return {"unit": Weight((), "one", values=(1.0,))}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that are looked up."""
        return self.unit.dtype

    @property
    def rows(self) -> int:
        """The rows that this rank holds."""
        return self.table.weight.shape[0]

    def _lookup(self, rows: Tensor) -> Tensor:
        table = self.table
        return ops.embedding(rows, table.weight, table.weight_scale, table.weight_zero_point, self.dtype, table.form)

    def as_linear(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to logits ``[..., vocab_size]``."""
        return self.table(x)
