"""Tests for models, operations and a compiler of a separate package, in all modes on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toys
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal import ops
from hal.errors import CheckpointError, ConfigError
from hal.nn import WeightUse
from hal.step import ALL

MODES = ("eager", "graph", "piecewise", "piecewise_eager", "inductor")

pytestmark = pytest.mark.usefixtures("toys_installed")


def opened(architecture: str, mode: str, **compilation: Any) -> hal.Backend:
    chosen: dict[str, Any] = {"compiler": mode, **compilation}
    if mode.startswith("piecewise"):
        sizes = {"prefill": {"capture_sizes": [8, 24]}}
        chosen |= {"splitting_ops": list(toys.SPLIT_AT[architecture]), **sizes, **compilation}
    if mode != "eager":
        chosen["capture_sizes"] = [1, 2, 3]
    return hal.open(
        {
            "backend": "cpu",
            "compilation": chosen,
            "cache": {"num_tokens": 256, "block_size": 8, "num_sequences": toys.SLOTS},
        }
    )


@pytest.fixture(scope="module", params=sorted(toys.SPLIT_AT))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("toys") / request.param
    return request.param, toys.checkpoint(folder, request.param)


@thorough(EXHAUSTIVE, r"\[\w+ForCausalLM-inductor")
@thorough(EXHAUSTIVE, r"\[((Latent|Experts)ForCausalLM-piecewise_eager|(Experts|Pictures)ForCausalLM-graph)")
@thorough(MODE, r"\[(?!Recurrent).*-(piecewise\w*|inductor)\]|\[(?!Recurrent).*-graph\]|\[Recurrent\w+-inductor")
@pytest.mark.parametrize("mode", MODES)
def test_a_model_in_batches_that_change(made: tuple[str, Path], mode: str) -> None:
    architecture, folder = made
    schedule = toys.Schedule.drawn(7, 61)
    assert schedule.mixed >= 3
    eager = opened(architecture, "eager")
    expected = toys.alone(hal.Runner(hal.load_model(folder, eager), eager), schedule, architecture)
    backend = opened(architecture, mode)
    runner = hal.Runner(hal.load_model(folder, backend), backend)
    assert toys.check(runner, schedule, expected, architecture, 2e-5) > 100


def test_every_operation_meets_its_declaration() -> None:
    """Samples, axes and dtypes of another package's operations are checked like hal's."""
    toys.find_model("RecurrentForCausalLM")
    toys.find_model("LatentForCausalLM")
    toys.find_model("ExpertsForCausalLM")
    own = [each for each in ops.catalogue().values() if each.namespace == "hal_toys"]
    assert sorted(each.name for each in own) == [
        "causal_conv",
        "expert_linear",
        "linear_attention",
        "store_toy_latent",
        "toy_latent_attention",
    ]
    assert {each.name: each.state for each in own}["causal_conv"] == ("window",)


def test_generate_hands_out_slots_and_resets_them(tmp_path: Path) -> None:
    backend = opened("RecurrentForCausalLM", "eager")
    model = hal.load_model(toys.checkpoint(tmp_path / "model", "RecurrentForCausalLM"), backend)
    runner = hal.Runner(model, backend)
    params = hal.SamplingParams(max_new_tokens=5)
    prompts = [[row + 1, 2, 3] for row in range(8)]
    together = [[], [], [], [], [], [], [], []]  # type: list[list[int]]
    for token in hal.generate(runner, prompts, params):
        together[token.prompt_index].append(token.token_id)
    assert runner.slots.num_free == toys.SLOTS
    for prompt, expected in zip(prompts, together, strict=True):
        assert [token.token_id for token in hal.generate(runner, [prompt], params)] == expected


def test_states_move_on_once_whatever_rows_of_logits_are_asked_for(tmp_path: Path) -> None:
    """The head runs once for all rows, after the pieces that advance the states."""
    folder = toys.checkpoint(tmp_path / "model", "RecurrentForCausalLM")
    text = [index % 61 for index in range(80)]
    found = []
    for mode in ("eager", "piecewise_eager"):
        more = {} if mode == "eager" else {"prefill": {"capture_sizes": [96]}}
        backend = opened("RecurrentForCausalLM", mode, **more)
        runner = hal.Runner(hal.load_model(folder, backend), backend)
        blocks = runner.blocks.take(runner.spec.blocks_for(81)) or []
        slots = runner.slots.take(1)
        first = runner.step(runner.batch([text], [blocks], slots=slots), ALL).logits.clone()
        second = runner.step(runner.batch([[5]], [blocks], cached=[80], slots=slots)).logits.clone()
        found.append(torch.cat([first, second]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_prefixes_are_not_shared_by_a_model_with_slots(tmp_path: Path) -> None:
    backend = hal.open({"backend": "cpu", "cache": {"reuse_prefixes": True}})
    model = hal.load_model(toys.checkpoint(tmp_path / "model", "RecurrentForCausalLM"), backend)
    with pytest.raises(ConfigError, match="keeps matrix per sequence"):
        hal.Runner(model, backend)


def test_drafts_are_refused_by_a_model_whose_states_cannot_be_dropped(tmp_path: Path) -> None:
    folder = toys.checkpoint(tmp_path / "model", "RecurrentForCausalLM")
    with pytest.raises(ConfigError, match="keeps matrix per sequence, from which rejected drafts cannot be dropped"):
        hal.LLM(folder, backend="cpu", draft="ngram")


def test_a_compiler_of_another_package(tmp_path: Path) -> None:
    backend = opened("LatentForCausalLM", "counting")
    assert "counting" in backend.compilers
    model = hal.load_model(toys.checkpoint(tmp_path / "model", "LatentForCausalLM"), backend)
    runner = hal.Runner(model, backend)
    schedule = toys.Schedule.drawn(3, 61)
    eager = opened("LatentForCausalLM", "eager")
    expected = toys.alone(hal.Runner(model, eager), schedule, "LatentForCausalLM")
    backend.activate()
    assert toys.check(runner, schedule, expected, "LatentForCausalLM", 2e-5) > 100
    assert {shape.queries for shape in runner.forms["decode"].steps} == {1}  # type: ignore[attr-defined]


class Notes(hal.Backend):
    """A driver that prepares the experts' weights, and records its calls."""

    def __init__(self, cpu: hal.Backend) -> None:
        super().__init__("notes", cpu.device, kernels=cpu.kernels)
        self.told: list[tuple[str, WeightUse, torch.Size]] = []

    def prepare_weights(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        self.told += [(name, use, weight.shape) for name, weight in weights.items()]
        own = use.operation == "expert_linear"
        return {name: weight.clone() if own else weight for name, weight in weights.items()}


def test_experts_are_stacked_merged_and_transposed(tmp_path: Path) -> None:
    folder = toys.checkpoint(tmp_path / "model", "ExpertsForCausalLM")
    stored = load_file(folder / "model.safetensors")
    backend = Notes(hal.open("cpu", activate=False))
    model = hal.load_model(folder, backend)
    for layer in range(3):
        experts = model.get_submodule(f"layers.{layer}.mlp")
        for expert in range(4):
            name = f"layers.{layer}.mlp.experts.{expert}"
            parts = [stored[f"{name}.{part}.weight"] for part in ("gate", "up")]
            assert torch.equal(experts.gate_up[expert], torch.cat(parts))
            assert torch.equal(experts.down[expert], stored[f"{name}.down_transposed"].t())
    told = [
        (name, each.dtype, each.shared, *shape)
        for name, each, shape in backend.told
        if each.operation == "expert_linear"
    ]
    weight = "weight", torch.float32, False, 4, 32
    assert sorted(told, key=str) == 3 * [(*weight, 16)] + 3 * [(*weight, 32)]
    assert {each.operation for _, each, _ in backend.told} == {"expert_linear", "linear"}
    assert model.prepared_by == "notes"


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = toys.checkpoint(tmp_path / "model", "ExpertsForCausalLM")
    stored = load_file(folder / "model.safetensors")
    stored["layers.1.mlp.experts.2.up.weight"] = torch.ones(16, 31)
    del stored["layers.0.mlp.experts.3.down_transposed"]
    save_file(stored, folder / "model.safetensors")
    wrong = r"3.down_transposed is missing; .*experts.2.up.weight is \[16, 31\], not \[16, 32\]"
    with pytest.raises(CheckpointError, match=wrong):
        hal.load_model(folder, hal.open("cpu"))
