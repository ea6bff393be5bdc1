"""The decoder: an embedding, layers of a mixer and an MLP, and an output projection.

A model family assembles one from layers of ``hal.nn``: its ``from_config`` chooses what config.json says.

Source: Touvron et al., *LLaMA: Open and Efficient Foundation Language Models*, 2023; Ainslie et al., *GQA*, 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.errors import ConfigError
from hal.nn.attention import Norm
from hal.nn.decoder_config import DecoderConfig
from hal.nn.embedding import Embedding
from hal.nn.linear import Linear
from hal.nn.model import Angles, CausalLM, LayerState, Mixer
from hal.nn.norm import RMSNorm
from hal.nn.streams import StreamMean
from hal.nn.weights.weight import PADDED
from hal.step.batch import Batch
from hal.step.model_batches import SlotBatch
from hal.step.state import SEQUENCE, LayerStates

LAYER_INPUTS = "layer_inputs"
"""The extra tensor of :meth:`DecoderLM.keep_inputs`."""


@attrs.frozen(kw_only=True)
class LayerNorms:
    """Where a layer has norms, by their names in the checkpoint; None for no norm.

    Attributes:
        before_attention: of the attention's input.
        after_attention: of the attention's output, before it is added to the residual.
        before_mlp: of the MLP's input. If it is the name before the attention, both read one norm's output.
        after_mlp: of the MLP's output, before it is added to the residual.
    """

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORMS = LayerNorms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
"""One before the attention and one before the MLP, as in Llama."""
POST_NORMS = LayerNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
"""One after the attention and one after the MLP, as in OLMo 2."""
SANDWICH_NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
"""Before and after both, as in Gemma 3."""
SHARED_NORM = LayerNorms(before_attention="input_layernorm", before_mlp="input_layernorm")
"""One for attention and MLP, as in the parallel layers of Cohere and Phi."""


class DecoderLayer(nn.Module):
    """One layer: ``hidden + attention(norm(hidden))``, then ``hidden + mlp(norm(hidden))``.

    Args:
        config: the sizes.
        mixer: the attention, or what a layer has in its place; a module, which the layer names ``self_attn``.
        mlp: maps ``[tokens, hidden_size]`` to the same shape.
        norm: makes a norm of a number of features; None for :class:`RMSNorm` with ``config.rms_norm_eps``.
        norms: where the norms are.
        parallel: whether the MLP reads the layer's input, as the attention does.
        residual_multiplier: factor of the outputs of attention and MLP.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mixer: Mixer,
        mlp: nn.Module,
        *,
        norm: Norm | None = None,
        norms: LayerNorms = PRE_NORMS,
        parallel: bool = False,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = mixer, mlp
        self.norms, self.parallel, self.residual_multiplier = norms, parallel, residual_multiplier
        norm = norm or partial(RMSNorm, eps=config.rms_norm_eps)
        for name in dict.fromkeys(attrs.astuple(norms)):
            if name is not None:
                self.add_module(name, norm(config.hidden_size))

    @property
    def states(self) -> LayerStates:
        """The states of the layer on this rank: those of its mixer. A subclass may add to them."""
        return self.self_attn.states

    def forward(self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState, *further: Any) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape. The mixer gets further arguments of the decoder too."""
        normed = self._norm(self.norms.before_attention, hidden)
        attended = self.self_attn(normed, angles, batch, state, *further)
        after_attention = hidden + self._output(self.norms.after_attention, attended)
        read = hidden if self.parallel else after_attention
        if not self.parallel or self.norms.before_mlp != self.norms.before_attention:
            normed = self._norm(self.norms.before_mlp, read)
        return after_attention + self._output(self.norms.after_mlp, self.feed_forward(read, normed, batch))

    def feed_forward(self, hidden: Tensor, normed: Tensor, batch: Batch) -> Tensor:
        """Return the output of the MLP. A subclass may add to it.

        Args:
            hidden: ``[tokens, hidden_size]``, before the norm.
            normed: the norm of it.
            batch: the step.
        """
        output: Tensor = self.mlp(normed)
        return output

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)

    def _output(self, norm: str | None, x: Tensor) -> Tensor:
        x = self._norm(norm, x)
        return x if self.residual_multiplier == 1.0 else x * self.residual_multiplier

    if TYPE_CHECKING:
        __call__ = forward


class Decoder(nn.Module):
    """Maps tokens to normalized hidden states. Layers with the same rotary embedding share its cos and sin.

    Args:
        config: the sizes.
        layers: the layers, in order.
        norm: makes the last norm; see :class:`DecoderLayer`.
        embedding_multiplier: factor of the embeddings; see :class:`Embedding`.
        streams: the ends of the residual streams of :class:`HyperDecoderLayer`; None for one stream.

    Attributes:
        kept_layers: the layers whose inputs are returned, too, ascending; see :meth:`DecoderLM.keep_inputs`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[DecoderLayer],
        *,
        norm: Norm | None = None,
        embedding_multiplier: float = 1.0,
        streams: StreamMean | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, embedding_multiplier)
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(layers)  # type: ignore[assignment]
        used = [each.self_attn.rotaries for each in self.layers]
        rotaries = list(dict.fromkeys(rotary for each in used for rotary in each))
        # Not in a ModuleList: its numbered modules are the layers.
        self._rotaries = [f"rotary{index or ''}" for index in range(len(rotaries))]
        for name, rotary in zip(self._rotaries, rotaries, strict=True):
            self.add_module(name, rotary)
        self._places = [[rotaries.index(rotary) for rotary in each] for each in used]
        self.hc_head = streams
        self.kept_layers: tuple[int, ...] = ()
        self.norm = (norm or partial(RMSNorm, eps=config.rms_norm_eps))(config.hidden_size)

    def forward(self, batch: Batch, states: Sequence[LayerState], kept: list[Tensor] | None = None) -> Tensor:
        """Return the hidden states, ``[tokens, hidden_size]``.

        Args:
            batch: the step.
            states: of each layer.
            kept: gets the inputs of the layers ``kept_layers``, each of the same shape.
        """
        hidden, positions = self.embed(batch), self.positions(batch)
        angles: list[Angles] = [getattr(self, each)(positions, hidden.dtype) for each in self._rotaries]
        arguments = zip(self.layers, self._places, self.further(batch, hidden), strict=True)
        if self.hc_head is not None:
            hidden = self.hc_head.expand(hidden)
        for index, (layer, places, further) in enumerate(arguments):
            stored = self.stored(index)
            own = batch.for_layer(stored)
            if kept is not None and index in self.kept_layers:
                kept.append(hidden)
            hidden = layer(hidden, angles[places[0]] if places else None, own, states[stored], *further)
        if self.hc_head is not None:
            hidden = self.hc_head(hidden)
        normed: Tensor = self.norm(hidden)
        return normed

    def embed(self, batch: Batch) -> Tensor:
        """Return the embeddings of the tokens, ``[tokens, hidden_size]``."""
        return self.embed_tokens(batch.token_ids)

    def positions(self, batch: Batch) -> Tensor:
        """Return the positions that the rotary embeddings read."""
        return batch.positions

    def further(self, batch: Batch, embeddings: Tensor) -> Sequence[tuple[Any, ...]]:
        """Return further arguments of each layer, such as what a subclass computes once, or a layer leaves for others.

        Args:
            batch: the step.
            embeddings: ``[tokens, hidden_size]``, after the factor.
        """
        return [()] * len(self.layers)

    def stored(self, layer: int) -> int:
        """Return the number of the layer whose states a layer reads: its own, unless a subclass shares states."""
        return layer

    if TYPE_CHECKING:
        __call__ = forward


class HeadBias(nn.Module):
    """The bias ``[vocab_size]`` of an output projection whose weight is the table of embeddings; each rank has it."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(vocab_size), requires_grad=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Add it."""
        return logits + self.bias

    if TYPE_CHECKING:
        __call__ = forward


class DecoderLM(CausalLM):
    """A :class:`Decoder` and its output projection, which may be tied to the embedding. Ranks may split it.

    A family derives from it, and its ``from_config`` makes the layers from config.json. Its attribute ``decoder`` may
    be a subclass of :class:`Decoder`. The decoder is the module ``base_name``.

    Args:
        config: the checkpoint's config.
        layers: ``config.num_hidden_layers`` layers.
        norm: makes the last norm; see :class:`DecoderLayer`.
        head_bias: whether the output projection has a bias.
        embedding_multiplier: factor of the embeddings; see :class:`Decoder`.
        streams: see there.
        logits_multiplier: factor of the logits.
        softcap: the bound ``c`` of the logits ``c * tanh(logits / c)``, after the factor; None for none.
        ignored_layers: the number of layers after the last one that a checkpoint has, and the model does not compute,
            such as those that predict further tokens.
    """

    decoder: type[Decoder] = Decoder
    model: Decoder
    layers_have_groups = True

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[DecoderLayer],
        *,
        norm: Norm | None = None,
        head_bias: bool = False,
        embedding_multiplier: float = 1.0,
        streams: StreamMean | None = None,
        logits_multiplier: float = 1.0,
        softcap: float | None = None,
        ignored_layers: int = 0,
    ) -> None:
        super().__init__()
        first = config.num_hidden_layers
        self.ignored_prefixes += tuple(f"model.layers.{each}." for each in range(first, first + ignored_layers))
        self.vocab_size, self.max_length = config.vocab_size, config.rope.longest(config.max_position_embeddings)
        base = self.decoder(config, layers, norm=norm, embedding_multiplier=embedding_multiplier, streams=streams)
        self.add_module(self.base_name, base)
        self.states = [layer.states for layer in base.layers]
        self.causal = all(layer.self_attn.causal for layer in base.layers)
        if any(state.per is SEQUENCE for each in self.states for state in each.values()):
            self.batch_type = SlotBatch
        self.logits_multiplier, self.softcap, self.head_bias = logits_multiplier, softcap, head_bias
        if config.tie_word_embeddings:
            self.tied = {"lm_head.weight": f"{self.base_name}.embed_tokens.weight"}
            if head_bias:
                self.lm_head: Linear | HeadBias = HeadBias(config.vocab_size)
        else:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_size, bias=head_bias, shard="out_features", share=PADDED, gather=True
            )

    def split(self, tensor: Group) -> None:
        """Declare the states of this rank's heads. The layers are split already."""
        self.states = [layer.states for layer in self.base.layers]

    @property
    def base(self) -> Decoder:
        """The decoder."""
        found: Decoder = getattr(self, self.base_name)
        return found

    def keep_inputs(self, layers: Sequence[int], width: int) -> None:
        """Let ``forward`` return the inputs of some layers, too, for a model that drafts for this one.

        They are side by side in the extra tensor ``layer_inputs``, ``[tokens, len(layers) * hidden_size]``. The model's
        runner must not be made yet.

        Args:
            layers: their numbers, ascending.
            width: the ``hidden_size`` that the reader expects.

        Raises:
            ConfigError: the model has another width or no such layer, or its layers have several residual streams.
        """
        count, own = len(self.base.layers), self.base.embed_tokens.width
        if width != own:
            raise ConfigError(
                f"the drafter reads states of {width} features, and the model's have {own}",
                "use a drafter of this model",
            )
        if wrong := [each for each in layers if not 0 <= each < count]:
            raise ConfigError(
                f"the drafter reads the input of layer {wrong[0]}, and the model has layers 0 to {count - 1}",
                "use a drafter of this model",
            )
        if self.base.hc_head is not None or list(layers) != sorted(set(layers)):
            raise ConfigError(
                f"the drafter reads the inputs of layers {list(layers)}, and needs them in ascending order, of one "
                f"residual stream; {type(self).__name__} has {'one' if self.base.hc_head is None else 'several'}",
                "draft with ngram",
            )
        self.base.kept_layers, self.extra = tuple(layers), (*self.extra, LAYER_INPUTS)

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor | tuple[Tensor, ...]:
        if not self.base.kept_layers:
            return self.base(batch, states)
        kept: list[Tensor] = []
        hidden = self.base(batch, states, kept)
        return hidden, torch.cat(kept, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.base.embed_tokens.as_linear(hidden) if self.tied else hidden
        if self.head_bias or not self.tied:
            logits = self.lm_head(logits)
        if self.logits_multiplier != 1.0:
            logits = logits * self.logits_multiplier
        if self.softcap is not None:
            logits = ops.pointwise(logits / self.softcap, "tanh") * self.softcap
        return logits

    if TYPE_CHECKING:
        __call__ = forward
