"""Drafters that are wrong: each fault is found when they are opened, and names what to look at."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hal.models.eagle3 import LlamaForCausalLMEagle3
from helpers.thorough import MODE, spread, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal import ops
from hal.execution.step_output import StepOutput
from hal.generation.drafting.draft_checkpoints import ModelPlan
from hal.generation.drafting.draft_model import ModelDrafter, Row
from hal.generation.drafting.drafter import DraftConfig, Drafts, plan_drafter
from hal.generation.drafting.expectation import Expectation, examine
from hal.generation.request import Request
from hal.nn import DraftLM
from hal.ops import Operation

CHECKPOINTS = Path("checkpoints")
DENSE, SPARSE = CHECKPOINTS / "tiny-python", CHECKPOINTS / "tiny-python-moe"
Weights = dict[str, Tensor]
Plant = Callable[[Weights, dict[str, Any]], None]
EAGLE = CHECKPOINTS / "tiny-python-eagle3"
BY_SPARSE: dict[str, Any] = {"method": "model", "model": str(SPARSE), "tokens": 4}
BY_HEAD: dict[str, Any] = {"method": "eagle3", "model": str(EAGLE), "tokens": 4}


@contextmanager
def warnings(
    caplog: pytest.LogCaptureFixture, model: Path, draft: str | dict[str, Any], **options: Any
) -> Iterator[list[str]]:
    """Yield the warnings about a drafter, which come when it is opened."""
    found: list[str] = []
    given = {"backend": "cpu", "dtype": "float32", "max_length": 128, "max_sequences": 2, **options}
    with caplog.at_level(logging.WARNING, "hal.generation"), hal.LLM(model, draft=draft, **given):
        found += [each.getMessage() for each in caplog.records if "does not fit the model" in each.getMessage()]
        yield found


def swapped(weights: Weights, one: str, other: str) -> None:
    """Exchange the tensors whose names differ in a part."""
    found = {name.replace(one, other): each for name, each in weights.items() if one in name}
    found |= {name.replace(other, one): each for name, each in weights.items() if other in name}
    weights |= found


def random(weights: Weights, config: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    weights |= {name: torch.randn(each.shape, generator=draw).to(each.dtype) for name, each in weights.items()}


def shifted_embedding(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, 0)


def larger_norms(weights: Weights, config: dict[str, Any]) -> None:
    weights |= {name: each + 1 for name, each in weights.items() if "norm" in name}


def adjacent_pairs(weights: Weights, config: dict[str, Any]) -> None:
    """Reorder the elements of heads as for a rotary embedding of adjacent pairs."""
    size = config["head_dim"]
    order = torch.arange(size).view(2, -1).T.flatten()
    for name, each in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = each.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        elif "q_norm" in name or "k_norm" in name:
            weights[name] = each[order]


def other_base(weights: Weights, config: dict[str, Any]) -> None:
    config["rope_parameters"]["rope_theta"] = 1e6


NOT_ITSELF: dict[str, tuple[Plant, str]] = {
    "random weights": (random, "trained for this model"),
    "shifted embedding": (shifted_embedding, "100 % with the embedding of the model"),
    "norms exchanged": (
        lambda weights, _: swapped(weights, "input_layernorm", "post_attention_layernorm"),
        "100 % with the norms input_layernorm and post_attention_layernorm exchanged",
    ),
    "norms of query and key exchanged": (
        lambda weights, _: swapped(weights, "q_norm", "k_norm"),
        "100 % with the norms q_norm and k_norm exchanged",
    ),
    "layers exchanged": (lambda weights, _: swapped(weights, ".0.", ".1."), "the order of its layers"),
    "norms that add one": (larger_norms, "% with 1 subtracted from the weights of norms"),
    "another rotary base": (other_base, "100 % with the base 10000 of the rotary embedding"),
    "adjacent pairs": (adjacent_pairs, "100 % with pairs of adjacent elements in the rotary embedding"),
}
"""Faults of a checkpoint that drafts for the same model, and what is said of each."""


def exchanged_norms(weights: Weights, config: dict[str, Any]) -> None:
    swapped(weights, "input_layernorm", "post_attention_layernorm")


def reversed_inputs(weights: Weights, config: dict[str, Any]) -> None:
    """Exchange the columns for embeddings and for hidden states."""
    for name in weights:
        if any(f"{each}_proj" in name for each in "qkv"):
            weights[name] = weights[name].roll(config["hidden_size"], 1)


def reversed_layers(weights: Weights, config: dict[str, Any]) -> None:
    """Reverse the order of the layers that the head reads."""
    weights["fc.weight"] = torch.cat(weights["fc.weight"].split(config["hidden_size"], 1)[::-1], 1)


def layers_before(weights: Weights, config: dict[str, Any]) -> None:
    """Number the layers as if their outputs were read."""
    layers = [each - 1 for each in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = layers


HEADS: dict[str, tuple[Plant, str]] = {
    "norms exchanged": (exchanged_norms, "with the norms input_layernorm and post_attention_layernorm exchanged"),
    "inputs reversed": (reversed_inputs, "with the 2 parts of the input of model.layers.0.self_attn.qkv_proj reversed"),
    "layers reversed": (reversed_layers, "parts of the input of fc reversed"),
    "other layers": (layers_before, "with the inputs of the model's layers 1, 2, 3"),
}
"""Faults of a checkpoint of EAGLE-3."""


def planted(source: Path, folder: Path, plant: Plant) -> Path:
    """Write a checkpoint with a fault."""
    shutil.copytree(source, folder)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    plant(weights, config)
    save_file({name: each.clone() for name, each in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("source", "fault"), [*((DENSE, each) for each in NOT_ITSELF), *((EAGLE, each) for each in HEADS)]
)
def test_a_checkpoint_that_is_wrong(source: Path, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant, named = (HEADS if source is EAGLE else NOT_ITSELF)[fault]
    with warnings(caplog, DENSE, str(planted(source, tmp_path / "drafter", plant))) as found:
        assert len(found) == 1
        assert named in found[0]


def one_late(x: Tensor) -> Tensor:
    return torch.cat([x[:1], x[:-1]])


class LateHiddenModel(LlamaForCausalLMEagle3):
    def read(self, found: Tensor) -> Tensor:
        return one_late(super().read(found))


class LateTokensModel(LlamaForCausalLMEagle3):
    def forward(self, batch: Any, states: Any) -> Any:
        return super().forward(attrs.evolve(batch, token_ids=one_late(batch.token_ids)), states)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (LateHiddenModel, "the hidden states of the position behind"),
        (LateTokensModel, "the tokens of the position behind"),
    ],
)
def test_a_model_that_is_wrong(model: type[LlamaForCausalLMEagle3], named: str) -> None:
    found = examined(BY_HEAD, model=model)
    assert f"with {named}" in found.faults[0]


class LateHidden(ModelDrafter):
    """Reads the hidden states of the position before."""

    def _read(self, output: StepOutput) -> Tensor | None:
        hidden = super()._read(output)
        return None if hidden is None else one_late(hidden)


class SameHidden(ModelDrafter):
    """Reads in each step of a chain what the first one read."""

    def _first(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        ends = torch.stack([torch.cat(row.hidden)[row.known - row.cached - 1] for row in rows])
        return super()._first(rows)[0], ends


class FurtherPositions(ModelDrafter):
    """Counts the positions of drafted tokens one too many."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        step = self._runner.step
        self._runner.step = lambda batch, *rows: step(  # type: ignore[method-assign]
            batch if rows else attrs.evolve(batch, positions=batch.positions + 1), *rows
        )


class UnreadPrompts(ModelDrafter):
    """Counts prompts as read that it does not read."""

    def _read_prompts(self, requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int]) -> None:
        for each in requests:
            self._rows[each].cached = self._rows[each].known


class LateDrafts(ModelDrafter):
    """Leaves the first draft out."""

    def propose(self, requests: Sequence[Request], most: int) -> Drafts:
        found = super().propose(requests, most)
        assert isinstance(found.tokens, Tensor)
        return Drafts(found.counts, found.tokens.roll(-1, 1))


def examined(
    draft: dict[str, Any], kind: type[ModelDrafter] = ModelDrafter, model: type[DraftLM] | None = None
) -> Expectation:
    """Return what is found of a drafter for the dense checkpoint, with another class of the drafter or its model."""
    checkpoint, config = hal.Checkpoint.open(DENSE), DraftConfig.of(draft)
    given = {"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 512}}
    with ExitStack() as stack:
        backend = stack.enter_context(hal.open(given, activate=False))
        plan, target = plan_drafter(config, checkpoint, backend), hal.load_model(checkpoint, backend)
        assert isinstance(plan, ModelPlan)
        plan.model_class = model
        plan.load(target, backend, None)
        runner = stack.enter_context(hal.Runner(target, backend, max_sequences=2))
        drafting = plan.open(runner, stack, 2, 128).drafting
        assert drafting is not None
        return examine(runner, kind(drafting, config.tokens, 2, 128), checkpoint.tokenizer(), 2, 128)


@pytest.mark.parametrize("kind", [LateHidden, SameHidden, FurtherPositions, UnreadPrompts, LateDrafts])
def test_steps_that_read_wrongly(kind: type[ModelDrafter]) -> None:
    found = examined(BY_HEAD if kind in (LateHidden, SameHidden) else BY_SPARSE, kind)
    assert len(found.faults) == 1, found
    assert "are not those that its model computes for whole texts" in found.faults[0]
    assert "positions, cached tokens and hidden states" in found.faults[0]


@pytest.mark.parametrize("draft", [BY_SPARSE, BY_HEAD], ids=["model", "head"])
def test_a_kernel_that_is_wrong(draft: dict[str, Any]) -> None:
    def wrap(operation: Operation, kernel: Any) -> Any:
        return (lambda *args: kernel(*args).roll(1, 0)) if operation.name == "silu_and_mul" else kernel

    with ops.intercepted(wrap):
        found = examined(draft)
    assert len(found.faults) == 1, found
    assert "`hal compare --draft` finds a wrong kernel" in found.faults[0]


@thorough(MODE, "bfloat16|graph|moe")
@spread
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"compiler": "graph"}], ids=["", "bfloat16", "graph"])
@pytest.mark.parametrize(
    ("model", "draft"),
    [
        ("tiny-python", "tiny-python"),
        ("tiny-python", "tiny-python-moe"),
        ("tiny-python-moe", "tiny-python"),
        ("tiny-python-hybrid", "tiny-python"),
        ("tiny-python-latent", "tiny-python"),
        ("tiny-python", "tiny-python-eagle3"),
        ("tiny-python-hybrid", "mtp"),
    ],
)
def test_right_drafters(model: str, draft: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with warnings(
        caplog, CHECKPOINTS / model, draft if draft == "mtp" else str(CHECKPOINTS / draft), **options
    ) as found:
        assert not found
