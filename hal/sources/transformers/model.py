"""The model: transformers' class and hal's :class:`~hal.nn.CausalLM` in one, so that tensors keep their names."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from hal import ops
from hal.checkpoint.cache_dtype import unquantized_cache
from hal.errors import ConfigError, HalError
from hal.nn import CausalLM, LayerState
from hal.parallel import Group
from hal.sources.transformers.architecture import class_of
from hal.sources.transformers.body import (
    CACHE,
    POSITIONS,
    TOKENS,
    BodyProbe,
    Given,
    answer_heads,
    head_logits,
)
from hal.sources.transformers.buffers import fill_buffers, held, settle
from hal.sources.transformers.calls import Step, attend
from hal.sources.transformers.check import check_logits
from hal.sources.transformers.conversions import conversions_of
from hal.sources.transformers.expert_loops import replace_loops
from hal.sources.transformers.layers import Inputs
from hal.sources.transformers.masks import mask
from hal.sources.transformers.phase import NAME, REMEDY, running
from hal.sources.transformers.positions import answer_positions
from hal.sources.transformers.probe import NoCache, Probe, check_lengths, skip_experts, tune_in_attention
from hal.sources.transformers.replacement import (
    declare_weights,
    merge_projections,
    refusal_to_split,
    replace_layers,
    tie,
)
from hal.step import Batch

log = logging.getLogger("hal.checkpoint")

UNBOUNDED = 1 << 20
"""The longest sequence of a model whose config has no limit."""


class TransformersLM(CausalLM):
    """A causal language model of transformers.

    Its tokens are sequences of length 1 in a batch, so that no layer but attention sees two of them, and each tensor
    has the tokens as its first dimension, as pieces of a graph need it.
    """

    of: ClassVar[Any]
    """transformers' class, from which the class of a model is derived, too."""
    recognize = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TransformersLM:
        """Build the model from a checkpoint's config.json, without weights.

        Raises:
            ConfigError: the model needs what hal does not have; the message says what.
        """
        found, _ = class_of(config)
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, mask)
        ExpertsInterface.register(NAME, skip_experts)
        made = type(found.__name__, (TransformersLM, found), {"of": found, "__module__": found.__module__})
        try:
            return _made(made, config, keep_padding=False)
        except HalError as error:
            raise error.reworded(f"{found.__name__}: {error.problem}", error.remedy) from error.__cause__
        except Exception as error:  # Code of a family that is built in another way may raise anything.
            try:
                return _made(made, config, keep_padding=True)
            except Exception:  # The first error says more.
                problem = f"{found.__name__} of transformers does not run over hal's cache: {why(error)}"
                raise ConfigError(problem, REMEDY) from error

    @property
    def output_projection(self) -> str:  # type: ignore[override]
        """The name of the module that computes the logits."""
        return self._modules.get("output_projection", self._head)  # type: ignore[return-value]  # Two families have one.

    def _adapt(self) -> None:
        """Find out what the model computes, while it has no values, and put hal's layers into it."""
        theirs: Any = self  # transformers' part of the class
        text = theirs.config.get_text_config()
        self.requires_grad_(False)
        self.max_length = int(getattr(text, "max_position_embeddings", None) or UNBOUNDED)
        self.base_name = theirs.base_model_prefix or "model"
        head = theirs.get_output_embeddings()
        self._head = next((path for path, each in self.named_modules() if each is head), "lm_head")
        self._unexpected = tuple(re.compile(each) for each in theirs._keys_to_ignore_on_load_unexpected or ())
        conversions = conversions_of(self)
        self.other_names = conversions.names
        given: dict[Given, Any] = {TOKENS: _integers(), POSITIONS: _integers(), CACHE: NoCache()}
        self._unread = replace_loops(self, conversions)
        answer_positions(self)
        tune_in_attention(self)
        check_lengths(self)
        inputs, bodies, probe = Inputs(self), BodyProbe(self, given), Probe(self, given[POSITIONS])
        try:
            with running(probe), probe.zeros, held(self):
                self.of.forward(
                    self,
                    input_ids=given[TOKENS],
                    position_ids=given[POSITIONS],
                    cache=given[CACHE],
                    use_cache=True,
                    return_dict=True,
                )
        finally:
            inputs.close()
            bodies.close()
        if not probe.calls:
            raise ConfigError(
                "it calls no attention by transformers' interface, and stores no keys and values in transformers' "
                "cache",
                REMEDY,
            )
        self._body, self._calls, self._in_class = bodies.body(), tuple(probe.calls), probe.in_class
        self.hal_attention = nn.ModuleList(probe.layers)
        self.causal = all(layer.options.causal for layer in probe.layers)
        declare_weights(self, conversions)
        self.replaced = replace_layers(self, conversions, probe.layers[0].head_dim, inputs.widths())
        self.replaced["merged"] = merge_projections(self, inputs.groups())
        self.tied = dict(theirs.all_tied_weights_keys)
        self._shared = tie(self)
        answer_heads(self.get_submodule(self._body.path))
        self._declare_states()
        self._check_outputs()
        fill_buffers(self)
        settle(self, self.max_length)

    def _check_outputs(self) -> None:
        """Run both functions on the meta device with the new layers, which shows the number of logits."""
        given: dict[Given, Any] = {TOKENS: _integers(), POSITIONS: _integers(), CACHE: NoCache()}
        probe = Probe(self, given[POSITIONS])
        self._share_tied(True)
        with ops.intercepted(lambda operation, _: operation.node):
            with running(probe), probe.zeros, held(self):
                hidden = self._body(self, given)
            self.vocab_size = self.logits(hidden.reshape(-1, hidden.shape[-1])).shape[-1]
        self._share_tied(False)  # Each is loaded once.
        if probe.calls != list(self._calls):
            raise ConfigError("it does not call attention alike in each step", REMEDY)

    def _share_tied(self, on: bool) -> None:
        """Let tied tensors be their sources', or none."""
        for target, source in self._shared.items():
            path, _, last = target.rpartition(".")
            self.get_submodule(path).register_parameter(last, self.get_parameter(source) if on else None)

    def _declare_states(self) -> None:
        layers: Any = self.hal_attention
        self.states = [
            layer.states if call.owner == index else {}
            for index, (call, layer) in enumerate(zip(self._calls, layers, strict=True))
        ]

    def ignores(self, name: str) -> bool:
        """Return whether transformers skips a tensor of a checkpoint."""
        return name in self._unread or any(each.search(name) for each in self._unexpected)

    def split(self, tensor: Group) -> None:
        """Declare the states of this rank's heads. The layers are split already.

        Raises:
            ConfigError: transformers' plan splits a layer in a way that hal has no layer for, or there is no plan.
        """
        if (problem := refusal_to_split(self)) is not None:
            raise ConfigError(f"{self.of.__name__} cannot be split between {tensor.size} ranks: {problem}", REMEDY)
        self._declare_states()

    def finish_loading(self, backend: Any, checkpoint: Any) -> None:
        """Share tied tensors, move computed ones to the device, and compare the model with transformers' own.

        Raises:
            ConfigError: the logits differ.
        """
        device = backend.device.torch
        self._share_tied(True)
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        ranks = backend.mesh.tensor.size
        # transformers' own attention does not repeat key heads between ranks.
        if backend.config.check_model and all(each.num_kv_heads % ranks == 0 for each in self.hal_attention):
            token = backend.enter()
            try:
                with torch.inference_mode(), unquantized_cache(self):
                    check_logits(self, backend, checkpoint)
            finally:
                backend.leave(token)

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        """Return the hidden states ``[tokens, width]``."""
        given = {TOKENS: batch.token_ids.unsqueeze(1), POSITIONS: batch.positions.unsqueeze(1), CACHE: NoCache()}
        layers: Any = self.hal_attention
        with running(Step(self._calls, layers, batch, states, in_class=self._in_class)):
            hidden = self._body(self, given)
        return hidden.reshape(-1, hidden.shape[-1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Map ``[rows, width]`` to ``[rows, vocab_size]``."""
        return head_logits(self, self._body, hidden)


def _made(made: Any, config: Mapping[str, Any], *, keep_padding: bool) -> TransformersLM:
    """Return a model with hal's layers.

    Args:
        made: its class.
        config: the content of config.json.
        keep_padding: whether the model knows its padding token. Some families look for it among the tokens in each
            step, on the host; others compute with it.
    """
    _, read = class_of(config)
    read._attn_implementation = read._experts_implementation = NAME
    try:
        model: TransformersLM = made(read)
    except KeyError as error:
        if error.args != (NAME,):
            raise
        read._attn_implementation = "eager"  # It chooses a class of attention, of which one spells it out.
        model = made(read)
        read._attn_implementation = NAME
    if not keep_padding:
        vars(read.get_text_config())["pad_token_id"] = None
    model._adapt()
    return model


def _integers() -> Tensor:
    return torch.zeros(3, 1, dtype=torch.int64, device="meta")


def why(error: Exception) -> str:
    """Return what an exception of a model without values means, with the class of transformers that raised it."""
    name = _class_of(error)
    if "nonzero" in str(error) or "meta tensor" in str(error) or "data-dependent" in str(error):
        return (
            f"{name} chooses what it computes by the values of tensors, such as which experts or languages occur, "
            "which a captured step does not see"
        )
    first = str(error).partition("\n")[0]
    return f"{name} does not compute the tokens of a step one by one ({type(error).__name__}: {first:.120})"


def _class_of(error: Exception) -> str:
    """Return the name of the innermost class of transformers' model code in which an exception was raised."""
    name, trace = "a layer", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and ".modeling_" in str(trace.tb_frame.f_globals.get("__name__")):
            name = type(owner).__name__
        trace = trace.tb_next
    return name
