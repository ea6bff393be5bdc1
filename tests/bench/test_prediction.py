"""Tests for predicted steps: the work of a rank, the formula, the files of assumptions, and the page's tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from helpers import deployment_tables
from helpers.deployment_tables import FILES

from hal.bench.contenders.shapes import SHAPES
from hal.bench.prediction.assumptions import Assumptions
from hal.bench.prediction.deployments import Planner, Workload
from hal.bench.prediction.step_time import collective_time, step_time
from hal.bench.prediction.step_work import Exchange, StepKind, split_model_of
from hal.cli import main
from hal.errors import ConfigError

DENSE: dict[str, Any] = {**SHAPES["qwen3-8b"], "num_hidden_layers": 3}
SPARSE: dict[str, Any] = {**SHAPES["qwen3-30b-a3b-4-layers"], "num_hidden_layers": 3}
FUSED = ("add_rms_norm",)


@pytest.fixture
def assumed() -> Assumptions:
    """Figures that make times easy to compute by hand."""
    return attrs.evolve(
        Assumptions.read(FILES["910b"]),
        devices_per_node=4,
        within=attrs.evolve(Assumptions.read(FILES["910b"]).within, gb_per_s=100, efficiency=1.0, latency_us=10),
        between=attrs.evolve(Assumptions.read(FILES["910b"]).between, gb_per_s=10, efficiency=0.5, latency_us=20),
    )


class TestWork:
    def test_ranks_share_what_one_device_does(self) -> None:
        kind = StepKind(4, context=100)
        whole = split_model_of(DENSE, 1, torch.bfloat16, FUSED).work(kind)
        half = split_model_of(DENSE, 2, torch.bfloat16, FUSED).work(kind)
        norms = 2 * (3 * (2 * 4096 + 2 * 128) + 4096)
        assert half.memory.parts["cache"] * 2 == whole.memory.parts["cache"]
        assert (half.memory.parts["weights"] - norms) * 2 == whole.memory.parts["weights"] - norms
        assert half.compute.parts == {name: count // 2 for name, count in whole.compute.parts.items()}
        assert whole.exchanges == ()
        assert whole.memory.parts["activations"] > half.memory.parts["activations"] > 0

    @pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
    def test_two_sums_in_each_layer(self, config: dict[str, Any]) -> None:
        work = split_model_of(config, 4, torch.bfloat16, FUSED).work(StepKind(5))
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        sums = [Exchange(5 * hidden * 2, 2)] * (1 + 2 * 3)
        assert sorted(work.exchanges, key=lambda each: each.rounds) == [Exchange(5 * vocabulary * 2, 1), *sums]

    def test_launches_of_a_layer(self) -> None:
        """Those of the page on launches: 12 for a dense layer in bfloat16, of which one stores keys and values."""
        three = split_model_of(DENSE, 1, torch.bfloat16, FUSED).work(StepKind(1)).launches
        four = split_model_of({**DENSE, "num_hidden_layers": 4}, 1, torch.bfloat16, FUSED).work(StepKind(1)).launches
        unfused = split_model_of({**DENSE, "num_hidden_layers": 4}, 1, torch.bfloat16, ()).work(StepKind(1)).launches
        assert four - three == 12
        assert unfused - four == 8

    def test_experts_that_a_batch_reads(self) -> None:
        model = split_model_of(SPARSE, 1, torch.bfloat16, FUSED)
        expert = 3 * 2048 * 768 * 2 * 3  # of three layers
        for tokens, distinct in ((1, 8), (1000, 128)):
            assert model.work(StepKind(tokens)).memory.parts["experts"] == distinct * expert
        assert model.work(StepKind(16)).memory.parts["experts"] == math.ceil(128 * (1 - (120 / 128) ** 16)) * expert

    def test_attention_reads_the_context(self) -> None:
        model = split_model_of(DENSE, 1, torch.bfloat16, FUSED)
        short, long = (model.work(StepKind(2, context=context)) for context in (0, 50))
        token = 3 * 2 * 8 * 128 * 2
        assert long.memory.parts["cache"] - short.memory.parts["cache"] == 2 * 50 * token
        assert long.compute.parts["attention"] == 51 * short.compute.parts["attention"]
        assert long.held - short.held == 2 * 50 * token

    def test_heads_that_ranks_cannot_share(self) -> None:
        with pytest.raises(ConfigError, match="3 ranks cannot share 32 heads"):
            split_model_of(DENSE, 3, torch.bfloat16, FUSED)


class TestFormula:
    def test_a_sum_within_a_node(self, assumed: Assumptions) -> None:
        # Three quarters of 4 MB pass twice at 100 GB/s.
        assert collective_time(Exchange(4_000_000, 2), 4, assumed) == pytest.approx(60e-6 + 10e-6)

    def test_a_gather_between_nodes(self, assumed: Assumptions) -> None:
        # Within nodes 3 MB at 100 GB/s; between two nodes half of the quarter of a device, at 5 GB/s.
        assert collective_time(Exchange(4_000_000, 1), 8, assumed) == pytest.approx(30e-6 + 100e-6 + 30e-6)

    def test_a_step(self, assumed: Assumptions) -> None:
        work = split_model_of(DENSE, 2, torch.bfloat16, FUSED).work(StepKind(1))
        time = step_time(work, 2, assumed)
        assert time.memory == pytest.approx(work.memory.total / (0.7 * 1.6e12))
        assert time.compute == pytest.approx(work.compute.total / (0.6 * 376e12))
        assert time.launches == pytest.approx(3e-6 * work.launches)
        assert time.collectives == sum(collective_time(each, 2, assumed) for each in work.exchanges)
        assert time.total == max(time.memory, time.compute) + time.launches + time.collectives

    def test_copies_share_the_sequences(self, assumed: Assumptions) -> None:
        found = Planner(DENSE, assumed).deployments(4, Workload("decode", 10, context=16))
        assert [(each.data, each.tensor) for each in found] == [(4, 1), (2, 2), (1, 4)]
        sequences = [
            round(each.work.memory.parts["cache"] * each.tensor / (17 * 3 * 2 * 8 * 128 * 2)) for each in found
        ]
        assert sequences == [3, 5, 10]

    def test_what_does_not_fit_is_never_best(self, assumed: Assumptions) -> None:
        small = attrs.evolve(assumed, device=attrs.evolve(assumed.device, memory_gib=0.5))
        planner = Planner(DENSE, small)
        assert planner.best(2, Workload("decode", 1)) is None
        assert not any(each.fits for each in planner.deployments(2, Workload("decode", 1)))


class TestAssumptions:
    @pytest.mark.parametrize("name", FILES)
    def test_every_figure_of_a_shipped_file_has_a_source(self, name: str) -> None:
        read = Assumptions.read(FILES[name])
        parts = {part: attrs.asdict(getattr(read, part)) for part in ("device", "within", "between")}
        keys = {f"{part}.{key}" for part, values in parts.items() for key in values}
        assert set(read.sources) == keys | {"devices_per_node"}

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            ("launch_us = 3.0", "launch_ms = 3.0", r"unknown key 'launch_ms' .*launch_us"),
            ("memory_gib = 64\n", "", "required key 'memory_gib' is missing"),
            ("latency_us = 15", "latency_us = 0", "latency_us must be more than 0, not 0"),
            ("flop_efficiency = 0.6", "flop_efficiency = 1.6", "flop_efficiency must be more than 0 and at most 1"),
            ('["add_rms_norm"]', '["add_norm"]', r"'add_norm' is no fused operation .*add_rms_norm"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, old: str, new: str, problem: str) -> None:
        text = FILES["910b"].read_text(encoding="utf-8")
        file = tmp_path / "mine.toml"
        file.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(ConfigError, match=problem):
            Assumptions.read(file)


class TestCommand:
    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(main, ["explain", *arguments])

    def test_a_config_without_weights(self, trained: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_bytes((trained / "config.json").read_bytes())
        for model in (tmp_path, tmp_path / "config.json"):
            result = self.run(str(model), "--devices", "4", "--assume", str(FILES["a3"]))
            assert result.exit_code == 0, result.output
            assert "on 4 of Ascend A3" in result.stdout
            rows = [line.split() for line in result.stdout.splitlines()]
            assert [row[:3] for row in rows if row[1:2] == ["x"] and row[0] != "copies"] == [
                ["4", "x", "1"],
                ["2", "x", "2"],
                ["1", "x", "4"],
            ] * 4
            assert "- within.gb_per_s = 196 (arXiv 2506.12708" in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["tiny", "--devices", "2"], "--assume is missing"),
            (["tiny", "--assume", "a.toml"], "--devices is missing"),
            (["tiny", "--devices", "2", "--assume", "a.toml"], "cannot read the config file a.toml"),
            (["tiny", "--devices", "2", "--assume", "a.yaml"], "neither .toml nor .json"),
            (["tinny", "--devices", "2", "--assume", str(FILES["a3"])], "no config of a model can be read at tinny"),
            (["tiny", "--devices", "2", "--assume", "a.toml", "--backend", "cpu"], "--backend has no effect"),
        ],
    )
    def test_errors(self, arguments: list[str], problem: str) -> None:
        result = self.run(*arguments)
        assert result.exit_code == 2
        assert problem in result.stderr


def test_the_page_has_these_tables() -> None:
    """``python tests/helpers/deployment_tables.py`` writes them."""
    made = deployment_tables.generated()
    found = deployment_tables.on_the_page()
    assert found.keys() == made.keys()
    for name, text in made.items():
        assert found[name].splitlines() == text.strip("\n").splitlines(), name
