"""The interfaces of causal language models, and of the mixers of their layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from hal.device.group import Group
from hal.errors import ConfigError, ModelError
from hal.nn.choices import Choices
from hal.nn.encoder import Encoder, EncoderItem, Placement
from hal.nn.rotary import RotaryEmbedding
from hal.step.batch import Batch
from hal.step.state import LayerStates

LayerState = Mapping[str, Tensor]
"""The state tensors of a layer, by name."""
Angles = tuple[Tensor, Tensor] | None
"""The cos and sin of a layer's positions; None for a layer without a rotary embedding."""


class Mixer(Protocol):
    """Lets a token read other tokens, such as :class:`SelfAttention` and :class:`GatedDeltaNet`; a module.

    Attributes:
        rotaries: the rotary embedding, in a tuple; empty for none. Layers share it.
        states: the states of the layer on this rank, by name.
        causal: whether a token reads only tokens up to itself.
    """

    @property
    def rotaries(self) -> tuple[RotaryEmbedding, ...]: ...

    @property
    def states(self) -> LayerStates: ...

    @property
    def causal(self) -> bool: ...

    def split(self, tensor: Group) -> None:
        """Compute this rank's part from now on."""

    def __call__(self, hidden: Tensor, angles: Angles, batch: Any, state: LayerState) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape.

        What :meth:`hal.nn.Decoder.further` returns for the layer follows.

        Args:
            hidden: the tokens.
            angles: of the rotary embedding; None without one.
            batch: the step, of the model's ``batch_type``.
            state: the layer's states.
        """


class CausalLM(nn.Module):
    """Base of all causal language models. A model sets the attributes and implements the methods.

    :meth:`forward` computes hidden states, and :meth:`logits` maps those that a step asks for to logits. A model
    without ``logits``, such as one that computes embeddings, runs like any other, with ``rows=NONE``.

    It is registered in the entry-point group ``hal.models`` under the architecture name in config.json.

    Attributes:
        model_types: the values of ``model_type`` in config.json that the class is for, where other models have its
            architecture's name too; empty for all. A subclass does not inherit it.
        vocab_size: the size of the vocabulary, and of the last dimension of the logits.
        extra: names of further tensors that ``forward`` returns, each with a row per token.
        max_length: the maximum sequence length, in tokens.
        states: the states of each layer, by name; an empty mapping for a layer without state.
        batch_type: the class of its batches: :class:`hal.step.Batch`, or a subclass with more fields.
        layers_have_groups: whether each layer reads ``batch.for_layer(index)``, so that an engine may give the layers
            several block tables; see :func:`hal.step.grouped_batch`.
        output_projection: the name of the module that computes the logits, which `hal quantize` leaves as it is.
        tied: the parameter that a checkpoint tensor repeats, by the tensor's name.
        encoder: the encoder of inputs beside tokens, a module of the model; None for a model of text alone.
        placeholders: the kinds of the encoder's items, by the token that stands for an embedding of them.
        prepared_by: the backend that prepared weights or replaced layers at load; None if neither was done.
        base_name: the module without the output projection. Checkpoints of that module alone lack its name.
        other_names: the model's spelling of a part of tensor names, by the spelling that a checkpoint may have instead.
        ignored: name suffixes of checkpoint tensors to skip, because the config has the same information.
        ignored_prefixes: name prefixes of checkpoint tensors to skip, of parts that the model does not compute, such as
            ``vision_tower.``.
        causal: whether a token's hidden states depend only on tokens up to it. If not, as in models of embeddings, all
            tokens of a sequence must be in one step, and the model generates no text.
        recognize: whether compilers look for hal's operations in what the model computes in plain torch.
        loaded: the record of :func:`hal.load_model` that :func:`hal.replace_weights` reads; None for other models.
        adapters: the adapters of its projections; None without room for them.
        choices: what its layers choose that steps return or take; see :func:`hal.nn.keep_choices`. None for nothing.
    """

    model_types: tuple[str, ...] = ()
    vocab_size: int
    max_length: int
    states: Sequence[LayerStates]
    extra: tuple[str, ...] = ()
    batch_type: type[Batch] = Batch
    layers_have_groups: bool = False
    output_projection: str = "lm_head"
    tied: Mapping[str, str] = MappingProxyType({})
    base_name: str = "model"
    other_names: Mapping[str, str] = MappingProxyType({})
    ignored: tuple[str, ...] = ()
    ignored_prefixes: tuple[str, ...] = ()
    causal: bool = True
    recognize: bool = False
    prepared_by: str | None = None
    loaded: Any = None
    adapters: Any = None
    choices: Choices | None = None

    @property
    def encoder(self) -> Encoder | None:
        return None

    @property
    def placeholders(self) -> Mapping[int, str]:
        return MappingProxyType({})

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> CausalLM:
        """Build the model from a checkpoint's config.json, on the default device, with uninitialized weights.

        Raises:
            ConfigError: the model does not support the config.
        """

    @abstractmethod
    def forward(self, batch: Any, states: Sequence[LayerState]) -> Tensor | tuple[Tensor, ...]:
        """Run one step.

        Args:
            batch: the new tokens, of the class ``batch_type``.
            states: the state tensors of each layer, by name; written in place.

        Returns:
            Hidden states ``[tokens, width]``. If ``extra`` names further tensors, a tuple of the hidden states and
            these, in the same order, each ``[tokens, ...]``.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states of some tokens, ``[rows, width]``, to logits ``[rows, vocab_size]``.

        It is no part of :meth:`forward`, because a step computes logits for the rows that its caller asks for.

        Raises:
            ModelError: the model has no output projection, which is the default.
        """
        raise ModelError(
            f"{type(self).__name__} computes no logits", "pass rows=hal.step.NONE to Runner.step, or override logits"
        )

    @property
    def has_logits(self) -> bool:
        """Whether the model computes logits."""
        return type(self).logits is not CausalLM.logits

    def ignores(self, name: str) -> bool:
        """Return whether a checkpoint tensor of this name is skipped."""
        return name.endswith(self.ignored) or name.startswith(self.ignored_prefixes)

    def split(self, tensor: Group) -> None:
        """Compute this rank's part from now on, after the model's layers were split.

        A model that ranks can split overrides it, and declares the states that this rank keeps. Layers have a method of
        the same name: those with weights that ranks share, such as :class:`hal.nn.Linear`, and those whose computation
        depends on the numbers of features.

        Args:
            tensor: the ranks that split each layer.

        Raises:
            ConfigError: ranks cannot split the model, which is the default.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be split between {tensor.size} ranks",
            "set parallel.tensor to 1, or override split in the model",
        )

    def place(self, tokens: Sequence[int], items: Sequence[EncoderItem]) -> Placement:
        """Return where the embeddings of items go in a prompt.

        Args:
            tokens: the prompt. It has a placeholder for each embedding.
            items: the items, in the order of their placeholders.

        Raises:
            BatchError: the placeholders are not those of the items.
            ModelError: the model has no encoder, which is the default.
        """
        raise _unread(self, (each.kind for each in items))

    def expand(
        self, tokens: Sequence[int], items: Sequence[EncoderItem], encode: Callable[[str], Sequence[int]] | None = None
    ) -> list[int]:
        """Return a prompt in which the placeholder of each item is repeated for each of its embeddings.

        Args:
            tokens: the prompt, with one placeholder for each item.
            items: the items, in the order of their placeholders.
            encode: returns the tokens of a text, such as the time of a video's frame. Without it, no text is added.

        Raises:
            BatchError: the placeholders are not those of the items.
            ModelError: the model has no encoder, which is the default.
        """
        raise _unread(self, (each.kind for each in items))

    def check_kinds(self, kinds: Iterable[str]) -> None:
        """Check that the model reads items of some kinds, such as ``video``.

        Raises:
            ModelError: it does not read one of them.
        """
        if unread := set(kinds).difference(() if self.encoder is None else self.placeholders.values()):
            raise _unread(self, unread)

    def finish_loading(self, backend: Any, checkpoint: Any) -> None:
        """Complete a model whose weights were loaded, such as with tensors that no checkpoint has. Does nothing here.

        Args:
            backend: the :class:`hal.Backend` that the model was loaded for.
            checkpoint: the :class:`hal.Checkpoint` that it was loaded from.

        Raises:
            HalError: the model cannot run.
        """

    def share(self, target: CausalLM) -> None:
        """Use the weights of the model that this one drafts for, where both have the same. Does nothing here.

        Args:
            target: the model, loaded for the same backend. This model's runner must not be made yet.
        """

    if TYPE_CHECKING:
        __call__ = forward


def _unread(model: CausalLM, kinds: Iterable[str]) -> ModelError:
    reads = " and ".join(["text", *(f"{each}s" for each in sorted(set(model.placeholders.values())))])
    given = " and ".join(sorted(set(kinds))) or "item"
    return ModelError(
        f"{type(model).__name__} reads {reads} alone; given: {given}", f"leave the {given} out, or use another model"
    )


def flat_outputs(model: CausalLM, found: Any) -> tuple[Tensor, ...]:
    """Return what a model's ``forward`` returned as a tuple: hidden states, then the ``extra`` tensors.

    Raises:
        ModelError: it is not one tensor, or one for each name in ``extra`` beside it.
    """
    flat = found if isinstance(found, tuple) else (found,)
    if len(flat) == 1 + len(model.extra) and all(isinstance(each, Tensor) for each in flat):
        return flat
    kinds = ", ".join(type(each).__name__ for each in flat)
    raise ModelError(
        f"{type(model).__name__}.forward returned {kinds}",
        f"return hidden states, and a tensor for each name in `extra`, {list(model.extra)}",
    )
