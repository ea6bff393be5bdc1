"""Models that draft for another one, whose hidden states they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hal.errors import CheckpointError
from hal.nn.decoder import DecoderLM
from hal.nn.model import CausalLM
from hal.step.model_batches import draft_batch


class DraftLM(DecoderLM):
    """Predicts the token behind the next one, from the next token and the hidden states of a target model.

    Its batches are those of :func:`hal.step.draft_batch`. The hidden states that a step returns are the field
    ``hidden_states`` of the step for the token after.

    Attributes:
        reads: the extra tensor of the target that :meth:`read` gets; None for its hidden states.
    """

    reads: str | None = None

    def read(self, found: Tensor) -> Tensor:
        """Map what the target computed, ``[tokens, ...]``, to ``hidden_states``, ``[tokens, hidden_size]``."""
        return found

    def share(self, target: CausalLM) -> None:
        """Use the embedding and the output projection of the target, whose weights are equal."""
        assert isinstance(target, DecoderLM)
        old: list[nn.Module] = [self.base.embed_tokens]
        self.base.embed_tokens = target.base.embed_tokens
        if not self.tied:
            old.append(self.lm_head)
            self.lm_head = target.lm_head
        if self.loaded is not None:
            self.loaded = self.loaded.without(*old)

    def finish_loading(self, backend: Any, checkpoint: Any) -> None:
        """Declare the hidden states in the dtype of the weights."""
        table = self.base.embed_tokens
        self.batch_type = draft_batch(table.width, table.dtype)


class DraftVocabulary(nn.Module):
    """Spreads the logits of the tokens that a model can draft over the whole vocabulary.

    Args:
        vocab_size: the whole vocabulary.
        size: the tokens that it can draft.
    """

    columns: Tensor | None

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.vocab_size, self.size = vocab_size, size
        self.register_buffer("columns", None, persistent=False)

    def load(self, backend: Any, checkpoint: Any) -> None:
        """Read the checkpoint's ``d2t``, ``[size]``: for each token that it can draft, what to add to its number.

        Raises:
            CheckpointError: it is missing, or names a token twice, or one that is not in the vocabulary.
        """
        if "d2t" not in checkpoint.tensors and self.size == self.vocab_size:
            return
        ((_, offsets),) = checkpoint.read(["d2t"])
        if list(offsets.shape) != [self.size]:
            raise CheckpointError(
                f"{checkpoint.path} has d2t of {list(offsets.shape)}, and drafts {self.size} tokens",
                "set draft_vocab_size in config.json to the rows of lm_head.weight",
            )
        drafted = torch.arange(self.size) + offsets.long()
        columns = torch.full((self.vocab_size,), self.size)
        if drafted.min() < 0 or drafted.max() >= self.vocab_size or len(drafted.unique()) < self.size:
            raise CheckpointError(
                f"{checkpoint.path} has d2t with a token twice, or outside of 0 to {self.vocab_size - 1}",
                "save it as token - index for each token that the head drafts",
            )
        columns[drafted] = torch.arange(self.size)
        self.columns = columns.to(backend.device.torch)

    def forward(self, logits: Tensor) -> Tensor:
        """Map ``[rows, size]`` to ``[rows, vocab_size]``, with -inf for tokens that cannot be drafted."""
        if self.columns is None:
            return logits
        absent = logits.new_full((logits.shape[0], 1), -torch.inf)
        return torch.cat([logits, absent], dim=-1).index_select(1, self.columns)

    if TYPE_CHECKING:
        __call__ = forward
