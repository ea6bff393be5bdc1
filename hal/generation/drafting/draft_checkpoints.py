"""Drafters that are models: another checkpoint of the same vocabulary, the model's own MTP layer, and EAGLE-3."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import attrs
import torch

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import Progress, build_model, load_model
from hal.checkpoint.model_registry import find_model, knows, make_model
from hal.checkpoint.safetensors_files import DTYPES
from hal.checkpoint.tensor_names import speller
from hal.drivers.backend import Backend
from hal.errors import ConfigError
from hal.execution.runner import Runner
from hal.execution.state_spec import spec_of, states_per_sequence
from hal.generation.drafting.draft_model import ModelDrafter
from hal.generation.drafting.drafter import DraftConfig, Drafter, DrafterType, DraftPlan
from hal.nn import CausalLM, DecoderLM, DraftLM
from hal.step.fields import DUMMY_BLOCK
from hal.step.state import StateSpec

EMBEDDING = "embed_tokens.weight"
"""The end of the name of an embedding."""


@attrs.define
class ModelPlan(DraftPlan):
    """A drafting model.

    Attributes:
        checkpoint: where its weights are.
        model_class: its class; None for that of the checkpoint's architecture.
        model: the model, when it is loaded.
    """

    tokens: int
    checkpoint: Checkpoint
    model_class: type[CausalLM] | None = None
    model: CausalLM | None = None

    def load(self, model: CausalLM, backend: Backend, progress: Progress | None) -> StateSpec | None:
        """Load the weights."""
        given: dict[str, Any] = {} if self.model_class is None else {"model_class": self.model_class}
        self.model = loaded = load_model(self.checkpoint, backend, progress=progress, adapters=False, **given)
        loaded.share(model)
        return spec_of(loaded, backend, DUMMY_BLOCK + 2)

    def open(self, runner: Runner, stack: ExitStack, max_sequences: int, max_length: int) -> Drafter:
        """Return the drafter, with a runner of its own."""
        assert self.model is not None, "load comes first"
        spec = runner.spec
        own = Runner(self.model, runner.backend, max_sequences=max_sequences, num_blocks=spec.num_blocks)
        stack.enter_context(own)
        if own.spec.block_size != spec.block_size:
            raise ConfigError(
                f"the drafter's cache has blocks of {own.spec.block_size} tokens, and the model's of {spec.block_size}",
                "set cache.block_size to a number that suits both",
            )
        return ModelDrafter(own, self.tokens, max_sequences, max_length)


class DraftModel(DrafterType):
    """``model``: another checkpoint of the same vocabulary, smaller or in fewer bits."""

    name = "model"

    def plan(self, config: DraftConfig, checkpoint: Checkpoint, backend: Backend) -> DraftPlan:
        """Compare the vocabularies."""
        found, drafting, _ = _opened(config, checkpoint)
        if in_slots := states_per_sequence(drafting):
            raise ConfigError(
                f"the drafter {type(drafting).__name__} keeps {in_slots[0]} per sequence, which drafts would change",
                "draft with a model that keeps states per token only",
            )
        if found.has_tokenizer and checkpoint.has_tokenizer:
            own, theirs = found.tokenizer().get_vocab(), checkpoint.tokenizer().get_vocab()
            if wrong := [token for token, number in theirs.items() if own.get(token) != number]:
                raise _other_vocabulary(
                    f"the token {theirs[wrong[0]]} as {_name(own, theirs[wrong[0]])}, and the model's as {wrong[0]!r}"
                )
        return ModelPlan(config.tokens, found)


class PredictingLayer(DrafterType):
    """``mtp``: the layer of the model's own checkpoint that predicts the token after the next one."""

    name = "mtp"

    def plan(self, config: DraftConfig, checkpoint: Checkpoint, backend: Backend) -> DraftPlan:
        """Find the layer's class and its tensors."""
        _check_options(config)
        if config.model is not None:
            raise ConfigError(
                f"draft.model is {config.model!r}, and mtp reads the model's own checkpoint", "leave it out"
            )
        name = checkpoint.architecture.replace("ForCausalLM", "MTP").replace("ForConditionalGeneration", "MTP")
        if name == checkpoint.architecture or not knows(name):
            raise ConfigError(
                f"hal has no layer that predicts further tokens for {checkpoint.architecture}",
                "draft with ngram, or with a smaller checkpoint",
            )
        found = find_model(name)
        layer = make_model(found, checkpoint.model_config)
        first = f"{layer.base_name}.fc.weight"
        spell = speller(layer, {first})
        if not any(spell(each).startswith(f"{layer.base_name}.fc.") for each in checkpoint.tensors):
            raise ConfigError(
                f"{checkpoint.path} has no tensors of a layer that predicts further tokens ({first})",
                "draft with ngram, or use the published checkpoint, which has them",
            )
        return ModelPlan(config.tokens, checkpoint, found)


class EagleHead(DrafterType):
    """``eagle3``: a head of EAGLE-3 that was trained for the model."""

    name = "eagle3"

    def plan(self, config: DraftConfig, checkpoint: Checkpoint, backend: Backend) -> DraftPlan:
        """Compare the sizes and the embeddings."""
        found, head, model = _opened(config, checkpoint)
        if not isinstance(head, DraftLM):
            raise ConfigError(
                f"{found.path} is of {type(head).__name__}, which is no head of EAGLE-3",
                "set draft.method to model, or name a head's checkpoint",
            )
        if not isinstance(model, DecoderLM):
            raise ConfigError(
                f"a head of EAGLE-3 reads the layers of a model of hal's, and the model is {type(model).__name__}",
                "draft with ngram, or with a smaller checkpoint",
            )
        head.share(model)
        _check_embedding(found, checkpoint)
        return ModelPlan(config.tokens, found)


def _opened(config: DraftConfig, checkpoint: Checkpoint) -> tuple[Checkpoint, CausalLM, CausalLM]:
    """Return a drafter's checkpoint, its model and the model that it drafts for, both without weights.

    Raises:
        ConfigError: no checkpoint is named, or it is of another vocabulary.
    """
    _check_options(config)
    if config.model is None:
        raise ConfigError(f"draft.method is {config.method}, and draft.model is not set", "name its checkpoint")
    found = Checkpoint.open(config.model)
    drafting, model = (build_model(each) for each in (found, checkpoint))
    if drafting.vocab_size != model.vocab_size:
        raise _other_vocabulary(f"{drafting.vocab_size} tokens, and the model's {model.vocab_size}")
    return found, drafting, model


def _check_embedding(head: Checkpoint, model: Checkpoint) -> None:
    """Compare a head's embedding, if it has one, with that of the model, which it will use."""
    tables = []
    for each in (head, model):
        for name, info in each.tensors.items():
            if name.endswith(EMBEDDING) and DTYPES[info.dtype].is_floating_point:
                tables += [value.to(torch.float32, copy=True) for _, value in each.read([name])]
    if len(tables) < 2:
        return
    own, theirs = tables
    if own.shape != theirs.shape or not torch.allclose(own, theirs, rtol=1e-2, atol=1e-3):
        raise ConfigError(
            f"{head.path} has another embedding than {model.path}", "use the model that the head was trained for"
        )


def _check_options(config: DraftConfig) -> None:
    if config.options:
        raise ConfigError(
            f"draft.options has {next(iter(config.options))!r}, and {config.method} has no options", "leave it out"
        )


def _name(vocabulary: dict[str, int], number: int) -> str:
    return next((repr(token) for token, each in vocabulary.items() if each == number), "no token")


def _other_vocabulary(found: str) -> ConfigError:
    return ConfigError(f"the drafter has another vocabulary: {found}", "draft with a model of the same tokenizer")
