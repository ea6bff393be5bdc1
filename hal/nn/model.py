"""What the runtime asks of every causal language model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hal.step.batch import Batch
from hal.step.state import LayerStates

LayerState = Mapping[str, Tensor]
"""The tensors of a layer's states, by name."""


class CausalLM(nn.Module):
    """Base of all causal language models. A model sets the attributes and implements the two methods.

    Registered in the entry-point group ``hal.models`` under the architecture name of config.json.

    Attributes:
        vocab_size: rows of the logits.
        max_length: the longest sequence it was made for, in tokens.
        states: what each layer keeps between steps, by name; an empty mapping for a layer that keeps nothing.
        batch_type: the class of its batches: :class:`hal.Batch`, or a subclass with further fields.
        output_projection: the name of the module that makes the logits, which quantising leaves as it is.
        tied: names of checkpoint tensors that repeat a parameter of another name, and that parameter.
        prepared_by: the backend that brought weights into a form of its own at load, or put layers of its own in; None
            if neither.
        ignored: ends of the names of checkpoint tensors that are not read, since the config says the same.
    """

    vocab_size: int
    max_length: int
    states: Sequence[LayerStates]
    batch_type: type[Batch] = Batch
    output_projection: str = "lm_head"
    tied: Mapping[str, str] = MappingProxyType({})
    ignored: tuple[str, ...] = ()
    prepared_by: str | None = None

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> CausalLM:
        """Build the model from a checkpoint's config.json, on whatever device is the default; weights are not set.

        Raises:
            ConfigError: the config asks for what the model does not do.
        """

    @abstractmethod
    def forward(self, batch: Any, states: Sequence[LayerState]) -> Tensor:
        """One step.

        Args:
            batch: the new tokens, of the class ``batch_type``.
            states: per layer, the tensors of its states, by name; written in place.

        Returns:
            Logits ``[len(batch.logits_indices), vocab_size]``, of the weights' dtype.
        """

    if TYPE_CHECKING:
        __call__ = forward
