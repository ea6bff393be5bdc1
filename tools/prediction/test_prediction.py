"""Tests for predicted steps: the work of a rank, the formula, and the files of assumptions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner

from hal.bench.plan import SHAPES
from hal.config import ParallelConfig
from hal.config.settings import ExpertsMode
from hal.errors import ConfigError

from .__main__ import main
from .assumptions import Assumptions, ExpertFigures
from .deployments import Planner, Workload, collective_time, step_time
from .step_work import Exchange, StepKind, StepWork, split_model_of

ROOT = Path(__file__).parents[2]
FILES = {name: Path(__file__).parent / f"ascend-{name}.toml" for name in ("910b", "a3")}
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
        whole = split_model_of(DENSE, ParallelConfig(tensor=1), torch.bfloat16, FUSED).work(kind)
        half = split_model_of(DENSE, ParallelConfig(tensor=2), torch.bfloat16, FUSED).work(kind)
        norms = 2 * (3 * (2 * 4096 + 2 * 128) + 4096)
        assert half.memory.parts["cache"] * 2 == whole.memory.parts["cache"]
        assert (half.memory.parts["weights"] - norms) * 2 == whole.memory.parts["weights"] - norms
        assert half.compute.parts == {name: count // 2 for name, count in whole.compute.parts.items()}
        assert whole.exchanges == ()
        assert whole.memory.parts["activations"] > half.memory.parts["activations"] > 0

    @pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
    def test_two_sums_in_each_layer(self, config: dict[str, Any]) -> None:
        work = split_model_of(config, ParallelConfig(tensor=4), torch.bfloat16, FUSED).work(StepKind(5))
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        sums = [Exchange(5 * hidden * 2, 2, 4, operation="all_reduce")] * (1 + 2 * 3)
        logits = Exchange(5 * vocabulary * 2, 1, 4, operation="all_gather")
        assert sorted(work.exchanges, key=lambda each: each.rounds) == [logits, *sums]

    def test_launches_of_a_layer(self) -> None:
        """Those of the page on launches: 12 for a dense layer in bfloat16, of which one stores keys and values."""
        three = split_model_of(DENSE, ParallelConfig(tensor=1), torch.bfloat16, FUSED).work(StepKind(1)).launches
        four = (
            split_model_of({**DENSE, "num_hidden_layers": 4}, ParallelConfig(tensor=1), torch.bfloat16, FUSED)
            .work(StepKind(1))
            .launches
        )
        unfused = (
            split_model_of({**DENSE, "num_hidden_layers": 4}, ParallelConfig(tensor=1), torch.bfloat16, ())
            .work(StepKind(1))
            .launches
        )
        assert four - three == 12
        assert unfused - four == 8

    def test_experts_that_a_batch_reads(self) -> None:
        model = split_model_of(SPARSE, ParallelConfig(tensor=1), torch.bfloat16, FUSED)
        expert = 3 * 2048 * 768 * 2 * 3  # of three layers
        for tokens, distinct in ((1, 8), (1000, 128)):
            assert model.work(StepKind(tokens)).memory.parts["experts"] == distinct * expert
        assert model.work(StepKind(16)).memory.parts["experts"] == math.ceil(128 * (1 - (120 / 128) ** 16)) * expert

    def test_attention_reads_the_context(self) -> None:
        model = split_model_of(DENSE, ParallelConfig(tensor=1), torch.bfloat16, FUSED)
        short, long = (model.work(StepKind(2, context=context)) for context in (0, 50))
        token = 3 * 2 * 8 * 128 * 2
        assert long.memory.parts["cache"] - short.memory.parts["cache"] == 2 * 50 * token
        assert long.compute.parts["attention"] == 51 * short.compute.parts["attention"]
        assert long.held - short.held == 2 * 50 * token

    def test_heads_that_ranks_cannot_share(self) -> None:
        with pytest.raises(ConfigError, match="3 ranks cannot share 32 heads"):
            split_model_of(DENSE, ParallelConfig(tensor=3), torch.bfloat16, FUSED)


class TestWholeExperts:
    """Ranks that share whole experts; the collectives are those of the layers' code, as a trace has them."""

    HIDDEN, TOKENS, CHOSEN = 2048, 6, 8

    def work(self, tensor: int, data: int, experts: ExpertsMode, imbalance: float = 1.0) -> StepWork:
        parallel = ParallelConfig(tensor=tensor, data=data, experts=experts)
        return split_model_of(SPARSE, parallel, torch.bfloat16, FUSED).work(StepKind(self.TOKENS), imbalance)

    def test_a_dispatch(self) -> None:
        work = self.work(1, 4, "dispatch")
        rows = self.TOKENS * self.CHOSEN * self.HIDDEN * 2
        assert (
            work.exchanges
            == tuple(
                Exchange(rows, 1, 4, personal=True, operation=name) for name in ("expert_dispatch", "expert_combine")
            )
            * 3
        )
        assert work.exchanges[0].sent == rows * 3 // 4

    def test_all_ranks_gather_the_tokens(self) -> None:
        message = self.HIDDEN + 3 * self.CHOSEN  # with the weights of the chosen experts, and the experts as two digits
        gathered = Exchange(2 * self.TOKENS * message * 2, 1, 2, stride=2, operation="all_gather_rows")
        scattered = Exchange(2 * self.TOKENS * self.HIDDEN * 2, 1, 2, stride=2, operation="reduce_scatter")
        summed = Exchange(self.TOKENS * self.HIDDEN * 2, 2, 2, operation="all_reduce")
        found = self.work(2, 2, "all_gather").exchanges
        assert [each for each in found if each.operation != "all_gather"] == [
            summed,
            *[summed, gathered, scattered, summed] * 3,
        ]

    def test_weights_and_products_of_the_busiest_rank(self) -> None:
        split = self.work(4, 1, "split")
        expert = 3 * 2048 * 768
        for imbalance in (1.0, 1.5):
            work = self.work(1, 4, "dispatch", imbalance)
            share = imbalance * self.CHOSEN / 128
            distinct = math.ceil(32 * (1 - (1 - share) ** (4 * self.TOKENS)))
            assert work.memory.parts["experts"] == 3 * distinct * expert * 2
            rows = round(32 * share * 4 * self.TOKENS)
            assert work.compute.parts["experts"] == 3 * 2 * rows * expert
            assert work.exchanges[0].nbytes == round(imbalance * self.TOKENS * self.CHOSEN * self.HIDDEN * 2)
        assert self.work(4, 1, "split", 1.5) == split
        held = split.held - self.TOKENS * 3 * 2 * 128 * 2
        assert held < self.work(4, 1, "dispatch").held

    def test_deployments(self, assumed: Assumptions) -> None:
        planner = Planner(SPARSE, attrs.evolve(assumed, experts=ExpertFigures(modes=("all_gather",))))
        names = [each.name for each in planner.deployments(2, Workload(4, name="decode"))]
        assert names == ["2 x 1", "1 x 2", "2 x 1 all_gather", "1 x 2 all_gather"]
        dense = Planner(DENSE, attrs.evolve(assumed, experts=ExpertFigures(modes=("all_gather",))))
        assert [each.name for each in dense.deployments(2, Workload(4, name="decode"))] == ["2 x 1", "1 x 2"]


class TestFormula:
    def test_a_sum_within_a_node(self, assumed: Assumptions) -> None:
        # Three quarters of 4 MB pass twice at 100 GB/s.
        assert collective_time(Exchange(4_000_000, 2, 4), assumed) == pytest.approx(60e-6 + 10e-6)

    def test_a_gather_between_nodes(self, assumed: Assumptions) -> None:
        # Within nodes 3 MB at 100 GB/s; between two nodes half of the quarter of a device, at 5 GB/s.
        assert collective_time(Exchange(4_000_000, 1, 8), assumed) == pytest.approx(30e-6 + 100e-6 + 30e-6)

    def test_rows_for_each_rank(self, assumed: Assumptions) -> None:
        # Of 8 parts, 3 pass within the node at 100 GB/s, and 4 to the other node at 5 GB/s.
        rows = Exchange(4_000_000, 1, 8, personal=True)
        assert collective_time(rows, assumed) == pytest.approx(15e-6 + 400e-6 + 30e-6)

    def test_a_group_of_every_second_rank(self, assumed: Assumptions) -> None:
        # Two of its four ranks are in each node: half of 4 MB within, half of the half between.
        gathered = Exchange(4_000_000, 1, 4, stride=2)
        assert collective_time(gathered, assumed) == pytest.approx(20e-6 + 200e-6 + 30e-6)

    def test_overlap(self, assumed: Assumptions) -> None:
        work = split_model_of(DENSE, ParallelConfig(tensor=2), torch.bfloat16, FUSED).work(StepKind(1))
        plain = step_time(work, assumed)
        half = step_time(work, attrs.evolve(assumed, overlap=0.5))
        assert half.total == pytest.approx(plain.total - plain.collectives / 2)
        slow = attrs.evolve(assumed, overlap=1.0, within=attrs.evolve(assumed.within, latency_us=1e6))
        hidden = max(plain.memory, plain.compute)  # Collectives cannot hide behind more work than there is.
        assert step_time(work, slow).collectives == pytest.approx(
            step_time(work, attrs.evolve(slow, overlap=0.0)).collectives - hidden
        )

    def test_a_step(self, assumed: Assumptions) -> None:
        work = split_model_of(DENSE, ParallelConfig(tensor=2), torch.bfloat16, FUSED).work(StepKind(1))
        time = step_time(work, assumed)
        assert time.memory == pytest.approx(work.memory.total / (0.7 * 1.6e12))
        assert time.compute == pytest.approx(work.compute.total / (0.6 * 376e12))
        assert time.launches == pytest.approx(3e-6 * work.launches)
        assert time.collectives == sum(collective_time(each, assumed) for each in work.exchanges)
        assert time.total == max(time.memory, time.compute) + time.launches + time.collectives

    def test_copies_share_the_sequences(self, assumed: Assumptions) -> None:
        found = Planner(DENSE, assumed).deployments(4, Workload(10, context=16, name="decode"))
        assert [(each.parallel.data, each.parallel.tensor) for each in found] == [(4, 1), (2, 2), (1, 4)]
        sequences = [
            round(each.work.memory.parts["cache"] * each.parallel.tensor / (17 * 3 * 2 * 8 * 128 * 2)) for each in found
        ]
        assert sequences == [3, 5, 10]

    def test_what_does_not_fit(self, assumed: Assumptions) -> None:
        small = attrs.evolve(assumed, device=attrs.evolve(assumed.device, memory_gib=0.5))
        found = Planner(DENSE, small).deployments(2, Workload(1, name="decode"))
        assert found
        assert not any(each.fits for each in found)


class TestAssumptions:
    @pytest.mark.parametrize("name", FILES)
    def test_every_figure_of_a_shipped_file_has_a_source(self, name: str) -> None:
        read = Assumptions.read(FILES[name])
        parts = {part: attrs.asdict(getattr(read, part)) for part in ("device", "experts", "within", "between")}
        keys = {f"{part}.{key}" for part, values in parts.items() for key in values}
        assert set(read.sources) == keys | {"devices_per_node", "overlap"}

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            ("launch_us = 3.0", "launch_ms = 3.0", r"unknown key 'launch_ms' .*launch_us"),
            ("memory_gib = 64\n", "", "required key 'memory_gib' is missing"),
            ("latency_us = 15", "latency_us = 0", "latency_us must be more than 0, not 0"),
            ("flop_efficiency = 0.6", "flop_efficiency = 1.6", "flop_efficiency must be more than 0 and at most 1"),
            ("overlap = 0.0", "overlap = 1.1", "overlap must be from 0 to 1, not 1.1"),
            ("imbalance = 1.5", "imbalance = 0.5", "imbalance must be at least 1, not 0.5"),
            ('["all_gather"]', '["split"]', 'modes has "split", which is always considered'),
            ('["all_gather"]', '["all_to_one"]', "all_to_one"),
            ('["add_rms_norm"]', '["add_norm"]', r"'add_norm' is no fused operation .*add_rms_norm"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, old: str, new: str, problem: str) -> None:
        text = FILES["910b"].read_text(encoding="utf-8")
        file = tmp_path / "mine.toml"
        file.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(ConfigError, match=problem):
            Assumptions.read(file)


def test_a_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((ROOT / "checkpoints/tiny-python/config.json").read_bytes())
    for model in (tmp_path, tmp_path / "config.json"):
        result = CliRunner().invoke(main, [str(model), "--devices", "4", "--assume", str(FILES["a3"])])
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
    ("model", "assume", "problem"),
    [
        ("tiny", "a.toml", "cannot read the config file a.toml"),
        ("tiny", "a.yaml", "neither .toml nor .json"),
        ("tinny", str(FILES["a3"]), "no config of a model can be read at tinny"),
    ],
)
def test_errors(model: str, assume: str, problem: str) -> None:
    result = CliRunner().invoke(main, [model, "--devices", "2", "--assume", assume])
    assert result.exit_code == 2
    assert problem in result.stderr
