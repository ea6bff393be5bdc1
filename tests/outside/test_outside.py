"""Models, operations and a compiler of a package beside the tree, in every mode, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys

import hal
from hal import ops
from hal.errors import ConfigError

MODES = ("eager", "graph", "piecewise", "piecewise_eager", "inductor")


def opened(architecture: str, mode: str, **compilation: Any) -> hal.Backend:
    chosen: dict[str, Any] = {"compiler": mode, **compilation}
    if mode.startswith("piecewise"):
        chosen |= {"splitting_ops": list(toys.SPLIT_AT[architecture]), "prefill": {"capture_sizes": [8, 24]}}
    if mode != "eager":
        chosen["capture_sizes"] = [1, 2, 3]
    return hal.open({
        "backend": "cpu", "compilation": chosen,
        "cache": {"num_tokens": 256, "block_size": 8, "num_sequences": toys.SLOTS},
    })  # fmt: skip


@pytest.fixture(scope="module", params=sorted(toys.SPLIT_AT))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("toys") / request.param
    return request.param, toys.checkpoint(folder, request.param)


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
    """Samples, axes and dtypes of another package's operations are examined like hal's own."""
    toys.find_model("RecurrentForCausalLM")
    toys.find_model("LatentForCausalLM")
    own = [each for each in ops.catalogue().values() if each.namespace == "hal_toys"]
    assert sorted(each.name for each in own) == ["causal_conv", "latent_attention", "linear_attention", "store_latent"]
    assert {each.name: each.state for each in own}["causal_conv"] == ("window",)


def test_generate_hands_out_slots_and_resets_them(tmp_path: Path) -> None:
    backend = opened("RecurrentForCausalLM", "eager")
    model = hal.load_model(toys.checkpoint(tmp_path / "model", "RecurrentForCausalLM"), backend)
    runner = hal.Runner(model, backend)
    params = hal.SamplingParams(max_new_tokens=5)
    prompts = [[row + 1, 2, 3] for row in range(8)]
    together = [[], [], [], [], [], [], [], []]  # type: list[list[int]]
    for token in hal.generate(runner, prompts, params):
        together[token.prompt].append(token.token_id)
    assert runner.slots.num_free == toys.SLOTS
    for prompt, expected in zip(prompts, together, strict=True):
        assert [token.token_id for token in hal.generate(runner, [prompt], params)] == expected


def test_prefixes_are_not_shared_by_a_model_with_slots(tmp_path: Path) -> None:
    backend = hal.open({"backend": "cpu", "cache": {"reuse_prefixes": True}})
    model = hal.load_model(toys.checkpoint(tmp_path / "model", "RecurrentForCausalLM"), backend)
    with pytest.raises(ConfigError, match="keeps matrix for each sequence"):
        hal.Runner(model, backend)


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
