"""Tests for ``hal bench``: alternating runs, arithmetic, and no figures for wrong results.

No test asserts a duration.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest
import torch
from click.testing import CliRunner, Result
from helpers import ROOT, toys
from helpers.checkpoints import random_checkpoint
from helpers.distributions import install
from helpers.thorough import DTYPE, EXHAUSTIVE, FAMILY, LONG, MODE, PROCESSES, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal import ops
from hal.bench import (
    bench_report,
    floor,
    hal_side,
    measurement,
    peak_memory,
    plan,
    plot,
    routing,
    timing,
    transformers_side,
)
from hal.bench.hal_side import HalSide
from hal.bench.llama_side import write_gguf
from hal.bench.plan import SHAPES, BenchmarkError
from hal.bench.transformers_side import only_imported_extensions
from hal.bench.workload import Contender, Inputs, prompts
from hal.checkpoint import random_weights
from hal.checkpoint.loading import build_model
from hal.cli import main
from hal.nn import CausalLM, Linear
from hal.quantize.quantize_checkpoint import quantize_checkpoint

TINY = SHAPES["tiny"]
SPARSE = {**SHAPES["tiny-experts"], "num_experts": 6, "moe_intermediate_size": 12}


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(floor, "MOST_READ_BYTES", 1 << 20)
    monkeypatch.setattr(floor, "MATMUL_SIZES", (32,))


def tiny(**keys: Any) -> plan.Plan:
    return plan.Plan(**{"workload": "decode", "shapes": "tiny", "length": 20, "repeats": 3} | keys)


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def succeeds(*arguments: str | Path) -> Result:
    result = bench(*arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def uncompiled(setting: plan.Setting) -> transformers_side.TransformersSide:
    """Return transformers without its compiled mode, which takes half a minute."""
    side = transformers_side.TransformersSide(setting)
    side.modes = ("eager",)
    return side


@pytest.fixture(scope="module", params=["eager", "compiled"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any]]:
    """Return a complete decode run against transformers, and its JSON."""
    pytest.importorskip("transformers", reason="transformers is the other contender")
    file = tmp_path_factory.mktemp("bench") / "decode.json"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "eager":
            patch.setitem(measurement.SIDES, "transformers", uncompiled)
        patch.setattr(floor, "READ_BYTES", 1 << 20)
        patch.setattr(floor, "MOST_READ_BYTES", 1 << 20)
        patch.setattr(floor, "MATMUL_SIZES", (32,))
        options = ("--context", 20, "--batch-size", 3, "--against", "transformers")
        modes = ("--compiler", "eager", "--compiler", "graph")
        result = succeeds("decode", "--shapes", "tiny", *options, *modes, "--figures", file)
    return result, json.loads(file.read_text())


class TestDecode:
    @pytest.fixture
    def contenders(self) -> list[str]:
        return ["hal eager", "hal graph", "transformers eager", "transformers compiled"]

    @thorough(MODE)
    def test_every_compiler_has_its_turn(self, tmp_path: Path) -> None:
        file = tmp_path / "decode.json"
        options = ("--context", 20, "--batch-size", 1, "--batch-size", 3, "--repeats", 3)
        result = succeeds("decode", "--shapes", "tiny", *options, "--figures", file)
        ours = [f"hal {compiler}" for compiler in hal.open("cpu").compilers]
        figures = json.loads(file.read_text())
        for kind, names in (("measurements", ours), ("agreements", ours[1:])):
            found = [(each["batch_size"], each["contender"]) for each in figures[kind]]
            assert found == [(size, name) for size in (1, 3) for name in names]
        assert all(each["difference"] < 1e-4 for each in figures["agreements"])
        rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
        for size in (1, 3):
            assert f"- batch {size}: all contenders agree: logits differ by at most " in result.stdout
            assert all(any(row.startswith(f"{size} {name}") for row in rows) for name in (*ours, "floor"))

    @thorough(MODE)
    def test_a_cache_in_8_bits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HAL_CACHE__DTYPE", "int8")
        file = tmp_path / "decode.json"
        modes = ("--compiler", "eager", "--compiler", "graph")
        succeeds("decode", "--shapes", "tiny", "--context", 20, "--repeats", 3, *modes, "--figures", file)
        figures = json.loads(file.read_text())
        assert [each["contender"] for each in figures["agreements"]] == ["hal graph"]
        assert all(each["difference"] < 1e-4 for each in figures["agreements"])

    @thorough(MODE)
    @pytest.mark.parametrize("ran", ["compiled"], indirect=True)
    def test_the_table(self, ran: tuple[Result, dict[str, Any]], contenders: list[str]) -> None:
        lines = ran[0].stdout.splitlines()
        assert lines[0].startswith("decode: tiny, float32, 0.1 MB of weights, 20 tokens in the cache, 15 repeats")
        header = "batch contender median ms spread ms tokens/s vs transformers eager vs transformers compiled x floor"
        assert " ".join(lines[3].split()).startswith(header)
        rows = lines[4 : lines.index("", 4)]
        starts = [f"3 {name}" for name in [*contenders, "floor"]]
        assert [" ".join(row.split())[: len(start)] for row, start in zip(rows, starts, strict=True)] == starts
        assert "- batch 3: all contenders agree: logits differ by at most " in ran[0].stdout
        assert "- batch 3: floor: weights " in ran[0].stdout

    @thorough(MODE)
    @pytest.mark.parametrize("ran", ["compiled"], indirect=True)
    def test_the_figures(self, ran: tuple[Result, dict[str, Any]], contenders: list[str]) -> None:
        figures = ran[1]
        assert figures["format"] == bench_report.FORMAT
        parts = "format plan dtype weight_bytes environment agreements measurements floors launches notes"
        assert set(figures) == {*parts.split(), "launches_per_layer_of_peers"}
        assert figures["launches"] == []
        assert figures["launches_per_layer_of_peers"] == {}
        assert figures["environment"]["emulated"] is False
        assert figures["plan"] | {"workload": "decode", "shapes": "tiny", "length": 20} == figures["plan"]
        assert {"cpu", "cores", "threads", "device", "versions"} <= set(figures["environment"])
        assert set(figures["environment"]["versions"]) == {"python", "torch-hal", "torch", "transformers"}
        assert [(each["batch_size"], each["contender"]) for each in figures["measurements"]] == [
            (3, name) for name in contenders
        ]
        assert [(each["batch_size"], each["contender"]) for each in figures["agreements"]] == [
            (3, name) for name in contenders[1:]
        ]
        assert all(each["difference"] < 1e-4 for each in figures["agreements"])
        assert all(len(each["seconds"]) == 15 for each in figures["measurements"])

    @thorough(MODE, r"\[compiled")
    def test_ratios_follow_from_the_raw_figures(self, ran: tuple[Result, dict[str, Any]]) -> None:
        medians = {
            (each["batch_size"], each["contender"]): statistics.median(each["seconds"])
            for each in ran[1]["measurements"]
        }
        floors = {each["batch_size"]: each for each in ran[1]["floors"]}
        rivals = {name for _, name in medians if name.startswith("transformers ")}
        assert "transformers eager" in rivals
        for each in ran[1]["measurements"]:
            median = statistics.median(each["seconds"])
            assert each["median_seconds"] == median
            assert set(each["speedup"]) == rivals
            for name, ratio in each["speedup"].items():
                assert ratio == pytest.approx(medians[each["batch_size"], name] / median)
            assert each["tokens_per_second"] == pytest.approx(each["batch_size"] / median)
            floor_ = floors[each["batch_size"]]
            weights, cache = floor_["work"]["parts"].values()
            parts = [(floor_, weights)]
            if (products := floor_["products"]) is not None:
                parts.append((products, products["work"]["parts"]["projections"]))
            took = [amount * statistics.median(part["probe_seconds"]) / part["probe_amount"] for part, amount in parts]
            assert each["times_floor"] == pytest.approx(median / (max(took) + cache * took[0] / weights))


class TestDrafts:
    def test_texts_with_and_without_drafts(self, tmp_path: Path) -> None:
        file, prompts = tmp_path / "drafts.json", tmp_path / "prompts.txt"
        prompts.write_text("x = [1, 2, 3, 1, 2, 3, 1,\nimport os\nclass Reader:\n")
        shared = ("--batch-size", "2", "--compiler", "eager", "--repeats", "3", "--dtype", "float32")
        options = ("--draft", "ngram", "--draft-tokens", "3", "--prompts-file", prompts, "--figures", file)
        shown = succeeds("decode", ROOT / "checkpoints" / "tiny-python", *shared, *options).stdout
        (found,) = json.loads(file.read_text())
        assert len(found["plain_seconds"]) == len(found["draft_seconds"]) == 3
        assert (found["tokens"], found["equal"]) == (3 * 64, 1.0)
        drafted, accepted = found["acceptance"]["drafted"], found["acceptance"]["accepted"]
        assert len(drafted) == len(accepted) == 3
        assert found["acceptance_by_place"] == [some / all_ for some, all_ in zip(accepted, drafted, strict=True)]
        assert 0 < accepted[0] <= drafted[0]
        assert f"{found['ratio']:.2f}" in shown

    @pytest.mark.parametrize(
        ("options", "refused"),
        [
            (("--draft", "ngram"), "--draft needs a CHECKPOINT"),
            (("nowhere", "--draft", "ngram", "--context", "8"), "--context cannot be used with --draft"),
            (("nowhere", "--draft", "ngram", "--trace"), "--trace cannot be used with --draft"),
            (("nowhere", "--draft", "ngram", "--repeats", "0"), "number of repeats must be at least 1"),
            (("nowhere", "--prompts-file", __file__), "--prompts-file needs --draft"),
        ],
    )
    def test_what_is_refused(self, options: tuple[str, ...], refused: str) -> None:
        result = bench("decode", *options)
        assert result.exit_code == 2
        assert refused in result.stderr


class TestCheckpoints:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Return a model whose keys are small and whose queries are large, as training may leave them.

        On keys of another size, attention takes one of several equal keys, by the rounding of bfloat16.
        """
        folder = random_checkpoint(tmp_path / "sharp", num_hidden_layers=6, dtype="bfloat16")
        file = folder / "model.safetensors"
        factors = {"q_norm": 16.0, "k_norm": 1 / 16}
        weights = {
            name: weight * next((factor for norm, factor in factors.items() if norm in name), 1.0)
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
        return folder

    @thorough(LONG)
    def test_the_cache_is_computed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A random cache made contenders that are right differ by 0.85 of the logits' norm."""
        pytest.importorskip("transformers", reason="transformers is the other contender")
        monkeypatch.setitem(measurement.SIDES, "transformers", uncompiled)
        chosen = plan.Plan(
            workload="decode",
            checkpoint=str(folder),
            backend="cpu",
            batch_sizes=(8,),
            length=40,
            repeats=3,
            compilers=("eager",),
            against=("transformers",),
        )
        (found,) = measurement.run(chosen).agreements[8]
        assert found.contender == "transformers eager"
        assert found.difference < 0.1

    def test_a_prompt_of_several_steps(self, folder: Path) -> None:
        """The cache is that of one prefill, whatever the steps; larger batches repeat its sequences."""
        found = []
        for most in (2048, 7):
            setting = plan.prepare(
                plan.Plan(workload="decode", checkpoint=str(folder), backend="cpu", length=40, dtype="float32")
            )
            setting.backend.configure(attrs.evolve(setting.backend.config, max_prefill_tokens=most))
            filled = HalSide(setting).prefilled(18)
            assert [each["key"].shape for each in filled] == [(16, 40, 2, 16)] * 6
            keys, values = Inputs(setting, 18, filled).cached(5).values()
            assert torch.equal(keys[16:], keys[:2])
            assert not torch.equal(values[0], values[1])
            found.append(keys)
        torch.testing.assert_close(*found)


ARCHITECTURES = {
    "Glm5Next": "Glm5NextForConditionalGeneration",
    "DeepseekV4": "DeepseekV4ForCausalLM",
    "Qwen4ExpText": "Qwen4ExpForCausalLM",
}


def latents(shapes: str) -> dict[str, Any]:
    """Return a small config of one of the shapes of DeepSeek."""
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "index_head_dim": 12}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    index = {"index_n_heads": 2, "index_topk": 7, "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    query = {} if shapes == "v2-lite" else {"q_lora_rank": 24}
    (full,) = (each for name, each in SHAPES.items() if name.startswith(f"deepseek-{shapes}-"))
    own = ("architectures", "model_type", "tie_word_embeddings")
    small = {key: size for key, size in (TINY | sizes | experts | index).items() if key in full and key not in own}
    return full | small | query


class TestRecurrentLayers:
    """A step changes their states, which each contender restores before the next one."""

    @thorough(EXHAUSTIVE, "compiled")
    @pytest.mark.parametrize("mode", ["eager", "compiled"])
    def test_steps_of_transformers_agree(self, mode: str) -> None:
        pytest.importorskip("transformers", reason="transformers is the other contender")
        setting = plan.prepare(tiny(shapes="tiny-hybrid", compilers=("eager", "graph")))
        inputs = Inputs(setting, 3)
        ours = HalSide(setting)
        contenders = [ours.contender(each, inputs) for each in ours.modes]
        contenders.append(transformers_side.TransformersSide(setting).contender(mode, inputs))
        for _ in range(2):  # the first run leaves other states
            found = timing.check(contenders, setting.dtype)
            assert [each.contender for each in found] == ["hal graph", f"transformers {mode}"]
            assert all(each.difference < 1e-4 for each in found)

    def test_the_states_of_a_prefill(self, tmp_path: Path) -> None:
        """A step after a checkpoint's prefill gives the logits of the whole sequence."""
        folder = toys.write(tmp_path / "hybrid", {**SHAPES["tiny-hybrid"], "torch_dtype": "float32"})
        setting = plan.prepare(tiny(shapes=None, checkpoint=str(folder), compilers=("eager",)))
        ours = HalSide(setting)
        inputs = Inputs(setting, 2, ours.prefilled(2))
        assert [[*layer] for layer in inputs.prefilled] == [["matrix", "window"], ["key", "value"]]
        step = ours.contender("eager", inputs)
        texts = [[*cached, *new] for cached, new in zip(prompts(96, 2, 20), inputs.tokens.tolist(), strict=True)]
        runner = hal.Runner(hal.load_model(folder, setting.backend), setting.backend)
        blocks = [runner.blocks.take(runner.spec.blocks_for(21)) or [] for _ in texts]
        whole = runner.step(runner.batch(texts, blocks, slots=runner.slots.take(2))).logits
        step.reset()
        torch.testing.assert_close(step.step(), whole, rtol=1e-4, atol=1e-4)


class TestLatents:
    """A layer keeps a latent of each token, and the other part of its key; an index selects what attention reads."""

    @thorough(EXHAUSTIVE, "compiled")
    @pytest.mark.parametrize(("shapes", "mode"), [("v2-lite", "eager"), ("v3.2", "eager"), ("v3.2", "compiled")])
    def test_steps_of_transformers_agree(self, shapes: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers", reason="transformers is the other contender")
        monkeypatch.setattr(plan, "SHAPES", {shapes: latents(shapes)})
        setting = plan.prepare(tiny(shapes=shapes, compilers=("eager", "graph")))
        inputs = Inputs(setting, 3)
        ours = HalSide(setting)
        contenders = [ours.contender(each, inputs) for each in ours.modes]
        contenders.append(transformers_side.TransformersSide(setting).contender(mode, inputs))
        for _ in range(2):
            found = timing.check(contenders, setting.dtype)
            assert all(each.difference < 1e-4 for each in found)

    def test_the_rows_of_a_prefill(self, tmp_path: Path) -> None:
        folder = toys.write(tmp_path / "latents", latents("v3.2"))
        setting = plan.prepare(tiny(shapes=None, checkpoint=str(folder), compilers=("eager",)))
        ours = HalSide(setting)
        inputs = Inputs(setting, 2, ours.prefilled(2))
        assert [[*layer] for layer in inputs.prefilled] == [["latent", "rope", "index"]] * 2
        step = ours.contender("eager", inputs)
        texts = [[*cached, *new] for cached, new in zip(prompts(96, 2, 20), inputs.tokens.tolist(), strict=True)]
        runner = hal.Runner(hal.load_model(folder, setting.backend), setting.backend)
        blocks = [runner.blocks.take(runner.spec.blocks_for(21)) or [] for _ in texts]
        torch.testing.assert_close(step.step(), runner.step(runner.batch(texts, blocks)).logits, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("family", ["Glm5Next", "DeepseekV4", "Qwen4ExpText"])
    def test_entries_of_groups(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers", reason="transformers makes the config")
        from helpers.random_hybrids import draw_config

        config = {**draw_config(family, 1).to_dict(), "architectures": [ARCHITECTURES[family]]}
        monkeypatch.setattr(plan, "SHAPES", {"groups": config})
        setting = plan.prepare(tiny(shapes="groups", length=150, dtype="float32", compilers=("eager", "graph")))
        ours, inputs = HalSide(setting), Inputs(setting, 3)
        contenders = [ours.contender(mode, inputs) for mode in ours.modes]
        for _ in range(2):
            assert timing.check(contenders, setting.dtype)[0].difference < 1e-4
        with pytest.raises(BenchmarkError, match="omit --against"):
            transformers_side.TransformersSide(setting).contender("eager", inputs)

    def test_entries_of_groups_are_not_taken_from_a_prefill(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers", reason="transformers makes the checkpoint")
        from helpers.random_hybrids import build

        build(tmp_path, "Glm5Next", 1)
        setting = plan.prepare(tiny(shapes=None, checkpoint=str(tmp_path), length=40, compilers=("eager",)))
        with pytest.raises(BenchmarkError, match="keeps the state 'index', which the benchmark cannot take"):
            HalSide(setting).prefilled(2)

    def test_the_floor_reads_what_is_selected(self) -> None:
        """16 + 8 elements of 7 tokens, and 12 of the index of all; queries of 8 + 8 elements and values of 8."""
        model = random_weights.meta_model({**latents("v3.2"), "first_k_dense_replace": 2})
        assert floor.decode_bytes(model, torch.float32, 3, 20).parts["cache"] == 4 * 3 * 2 * (7 * (16 + 8) + 20 * 12)
        pairs = sum(min(token + 1, 7) for token in range(20))
        assert floor.prefill_operations(model, 4, 3, 20).parts["attention"] == 2 * 3 * 2 * 4 * (8 + 8 + 8) * pairs


class TestPrefill:
    @thorough(FAMILY)
    def test_against_transformers(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers", reason="transformers is the other contender")
        options = ("--tokens", 20, "--batch-size", 2, "--against", "transformers", "--repeats", 3)
        result = succeeds("prefill", "--shapes", "tiny", *options, "--figures", tmp_path / "prefill.json")
        figures = json.loads((tmp_path / "prefill.json").read_text())
        assert [each["contender"] for each in figures["measurements"]] == ["hal eager", "transformers eager"]
        assert figures["agreements"][0]["difference"] < 1e-4
        (each, _), (floor_,) = figures["measurements"], figures["floors"]
        assert each["tokens_per_second"] == pytest.approx(40 / each["median_seconds"])
        assert floor_["work"]["unit"] == "operations"
        assert "- transformers compiles only decode steps, so its prefill is eager" in result.stdout
        assert "- 3 repeats are too few to quote a figure: use at least 15 (--repeats)" in result.stdout

    @thorough(FAMILY)
    @pytest.mark.parametrize(("shapes", "length"), [("llama", 200), ("tiny-hybrid", 70), ("tiny-experts", 40)])
    def test_other_families_against_transformers(
        self, shapes: str, length: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """transformers stacks the experts of a layer, the checkpoint does not; all contenders have the same weights."""
        pytest.importorskip("transformers", reason="transformers is the other contender")
        sizes = "hidden_size intermediate_size head_dim num_hidden_layers num_attention_heads num_key_value_heads"
        small = {key: TINY[key] for key in ("dtype", "vocab_size", *sizes.split())}
        llama = {**SHAPES["llama-3.2-1b"], **small, "tie_word_embeddings": False}
        monkeypatch.setattr(plan, "SHAPES", {**SHAPES, "llama": llama})
        chosen = tiny(workload="prefill", shapes=shapes, length=length, against=("transformers",))
        (found,) = measurement.run(chosen).agreements[1]
        assert found.difference < 1e-4

    @thorough(MODE)
    def test_pieces_are_captured_for_the_whole_prompt(self, caplog: pytest.LogCaptureFixture) -> None:
        """The default sizes, up to 1,024 tokens, would run a longer prompt uncaptured under another name."""
        measurement.run(tiny(workload="prefill", length=200, batch_sizes=(6,), compilers=("eager", "piecewise")))
        assert not [each for each in caplog.messages if "runs uncaptured" in each]
        assert any(each.endswith("pieces: 1200 tokens") for each in caplog.messages), "the only size"

    def test_what_no_graph_holds_runs_optimized(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "hal.compile")
        found = measurement.run(tiny(workload="prefill", length=20, compilers=("eager", "graph")))
        assert [each.contender for each in found.measurements] == ["hal eager", "hal graph"]
        assert any(each.startswith("optimized a step") for each in caplog.messages)


class TestTurns:
    @staticmethod
    def recorded(warm: bool, rounds: int = 3) -> tuple[list[str], dict[str, list[float]]]:
        events: list[str] = []
        ticks = iter(range(1000))

        def contender(name: str) -> Contender:
            def step() -> Tensor:
                assert not gc.isenabled()
                events.append(f"step {name}")
                return torch.empty(0)

            return Contender(name, step, lambda: events.append(f"reset {name}"))

        def clock() -> float:
            events.append("clock")
            return float(next(ticks))

        seconds = timing.interleave(
            [contender("a"), contender("b")], rounds, warm=warm, synchronize=lambda: events.append("wait"), clock=clock
        )
        return events, seconds

    @thorough(LONG)
    def test_each_round_has_everyone_and_every_other_goes_backwards(self) -> None:
        events, seconds = self.recorded(warm=False)
        order = [event[-1] for event in events if event.startswith("step")]
        assert order == ["a", "b", "b", "a", "a", "b"]
        assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3}
        assert gc.isenabled()

    def test_only_the_step_is_timed(self) -> None:
        turn = ["reset {0}", "wait", "clock", "step {0}", "wait", "clock"]
        assert self.recorded(warm=False, rounds=1)[0] == [each.format(name) for name in "ab" for each in turn]
        turn = ["reset {0}", "step {0}", *turn]
        assert self.recorded(warm=True, rounds=1)[0] == [each.format(name) for name in "ab" for each in turn]

    def test_a_difference_within_the_spread_is_noise(self) -> None:
        steady, wide = timing.Summary.of([1.0, 1.1, 1.2]), timing.Summary.of([0.5, 1.3, 2.0])
        assert steady.median == 1.1
        assert steady.spread == pytest.approx(0.1)
        assert timing.noisy(steady, wide)
        assert timing.noisy(wide, steady)
        assert not timing.noisy(steady, timing.Summary.of([1.25, 1.3, 1.35]))


class TestFloor:
    """Computed by hand for the tiny shapes: 2 layers, 4 heads of 16, 2 KV heads, width 32, MLP width 48, 96 tokens."""

    LAYER = 32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48
    NORMS = 2 * (2 * 32 + 2 * 16) + 32

    @staticmethod
    def model(**keys: Any) -> CausalLM:
        return random_weights.meta_model({**TINY, **keys})

    def test_decode_reads_weights_and_cache(self) -> None:
        found = floor.decode_bytes(self.model(), torch.bfloat16, 3, 20)
        assert found.parts == {
            "weights": 2 * (2 * self.LAYER + self.NORMS + 96 * 32),
            "cache": 2 * (3 * 20 * 2 * 2 * 2 * 16),
        }
        assert found.total == sum(found.parts.values())

    def test_an_embedding_of_its_own_is_not_read(self) -> None:
        tied, untied = self.model(), self.model(tie_word_embeddings=False)
        assert sum(each.numel() for each in untied.parameters()) == 96 * 32 + sum(
            each.numel() for each in tied.parameters()
        )
        assert floor.decode_bytes(untied, torch.float32, 1, 5) == floor.decode_bytes(tied, torch.float32, 1, 5)
        assert floor.prefill_operations(untied, 4, 1, 5) == floor.prefill_operations(tied, 4, 1, 5)

    def test_a_packed_table_is_the_output_projection(self, tmp_path: Path) -> None:
        pytest.importorskip("gguf", reason="gguf writes the file")
        shapes = random_weights.RandomCheckpoint.of("tiny", {**TINY, "tie_word_embeddings": True})
        file = tmp_path / "model.gguf"
        write_gguf(shapes, file, "Q8_0")
        kept, wide = (build_model(hal.Checkpoint.open(file), quantized_weights=each) for each in ("kept", "auto"))
        assert floor.prefill_operations(kept, 4, 1, 5) == floor.prefill_operations(wide, 4, 1, 5)
        bytes_of = [floor.decode_bytes(each, torch.bfloat16, 1, 5).parts["weights"] for each in (kept, wide)]
        assert bytes_of[0] < 0.7 * bytes_of[1]

    def test_a_sliding_window_is_all_that_is_read(self) -> None:
        model = self.model(use_sliding_window=True, sliding_window=8, max_window_layers=1)
        found = floor.decode_bytes(model, torch.float32, 1, 20)
        assert found.parts["cache"] == 4 * 2 * 2 * 16 * (20 + 7)
        pairs = 20 * 21 // 2 + sum(min(token + 1, 8) for token in range(20))
        assert floor.prefill_operations(model, 4, 1, 20).parts["attention"] == 4 * 4 * 16 * pairs

    def test_prefill_multiplies(self) -> None:
        assert floor.prefill_operations(self.model(), 4, 3, 20).parts == {
            "projections": 2 * (2 * self.LAYER) * 20 * 3,
            "output projection": 2 * (96 * 32) * 3,
            "attention": 2 * 4 * (4 * 16) * (20 * 21 // 2) * 3,
        }

    def test_recurrent_layers(self) -> None:
        """One has 4 heads of 8 x 8 in float32, and 3 rows of 2 * 16 + 32 channels; the other layer has attention."""
        model = random_weights.meta_model({**SHAPES["tiny-hybrid"], "num_experts": 0})
        found = floor.decode_bytes(model, torch.bfloat16, 3, 20)
        assert found.parts["states"] == 2 * 3 * (4 * 4 * 8 * 8 + 2 * 3 * 64)
        assert found.parts["cache"] == 2 * (3 * 20 * 2 * 2 * 16)
        assert floor.prefill_operations(model, 4, 3, 20).parts["recurrence"] == 3 * 20 * 6 * 4 * 8 * 8

    def test_decode_multiplies(self) -> None:
        """By the layers and the output projection, tied or not."""
        for model in (self.model(), self.model(tie_word_embeddings=False)):
            assert floor.decode_products(model, 3).parts == {"projections": 2 * (2 * self.LAYER + 96 * 32) * 3}

    def test_only_the_chosen_experts_count(self) -> None:
        """Two sparse layers, of 6 experts with 3 matrices of 32 x 12, and a router each. Their MLPs are not dense."""
        model = self.model(**SPARSE)
        chosen = [routing.Routing(2, 6), routing.Routing(5, 6)]
        dense = 2 * (self.LAYER - 3 * 32 * 48 + 32 * 6) + self.NORMS + 96 * 32
        found = floor.decode_bytes(model, torch.bfloat16, 3, 20, chosen)
        assert found.parts == {
            "weights": 2 * dense,
            "experts": 2 * (2 + 5) * 3 * 32 * 12,
            "cache": 2 * (3 * 20 * 2 * 2 * 2 * 16),
        }
        products = floor.decode_products(model, 3, chosen).parts
        assert products == {"projections": 2 * (dense - self.NORMS) * 3, "experts": 2 * (6 + 6) * 3 * 32 * 12}
        prefill = floor.prefill_operations(model, 4, 3, 20, chosen)
        assert prefill.parts["experts"] == 2 * (6 + 6) * 3 * 32 * 12
        assert prefill.parts["projections"] == 2 * (dense - self.NORMS - 96 * 32) * 20 * 3
        with pytest.raises(BenchmarkError, match="4 projections with the axis num_experts, but a step chose experts 3"):
            floor.decode_bytes(model, torch.bfloat16, 3, 20, [*chosen, chosen[0]])
        with pytest.raises(BenchmarkError, match="chose experts 0 times"):
            floor.decode_bytes(model, torch.bfloat16, 3, 20)

    @thorough(MODE)
    @pytest.mark.parametrize("workload", ["decode", "prefill"])
    def test_a_run_counts_the_experts_that_its_batch_chooses(
        self, workload: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One sequence chooses 2 of 6 experts in each layer; 40, all of them."""
        monkeypatch.setattr(plan, "SHAPES", {"tiny": SPARSE})
        result = measurement.run(tiny(workload=workload, batch_sizes=(1, 40), compilers=("eager",)))
        one, many = (each.work.parts["experts"] for each in result.floors)
        expert = 3 * 32 * 12
        expected = (2 * 2, 2 * 6) if workload == "decode" else (2 * 2 * 2 * 20, 2 * 2 * 2 * 20 * 40)
        size = 4 if workload == "decode" else 1
        assert (one, many) == (expected[0] * expert * size, expected[1] * expert * size)

    def test_choices_are_recorded_in_order(self, cpu: hal.Backend) -> None:
        alike, apart = torch.zeros(4, 6), 9.0 * torch.eye(6)[:4]
        with routing.recorded() as found:
            for logits in (alike, apart):
                hal.ops.topk_route(logits, None, 1, False, True, 1.0, 1, 1, 1)
        assert found == [routing.Routing(1, 4), routing.Routing(4, 4)]
        with routing.recorded() as found:
            ops.softplus_route(torch.zeros(2, 4), None, torch.tensor([[0, 3], [3, 1]]).int(), 2, 1.0)
        assert found == [routing.Routing(3, 4)]

    def test_quantized_weights_have_their_own_size(self, tmp_path: Path) -> None:
        plain = hal.Checkpoint.open(ROOT / "checkpoints/tiny-python")
        quantize_checkpoint(plain, tmp_path / "int4", "w4a16", group_size=32)
        quantized = hal.Checkpoint.open(tmp_path / "int4")
        models = build_model(plain), build_model(quantized)
        with hal.open({"backend": "cpu", "dtype": "bfloat16"}) as backend:
            loaded = None, hal.load_model(quantized, backend)
        sizes = [
            floor.decode_bytes(each, torch.bfloat16, 1, 4, loaded=held).parts["weights"]
            for each, held in zip(models, loaded, strict=True)
        ]
        numbers = sum(each.weight.numel() for each in models[0].modules() if isinstance(each, Linear))
        assert sizes[0] - sizes[1] == numbers * (2 - 0.5 - 2 / 32)  # a scale for 32 numbers of 4 bits
        prefills = [floor.prefill_operations(each, 4, 1, 20).parts for each in models]
        assert prefills[0] == prefills[1]

        products = [floor.decode_products(each, 3).parts for each in models]
        table = models[0].model.embed_tokens.weight.numel()
        assert products == [{"projections": 2 * (numbers + table) * 3}, {"unquantized projections": 2 * table * 3}]

    def test_quantized_experts_have_their_own_size(self, tmp_path: Path) -> None:
        plain = hal.Checkpoint.open(
            toys.write(tmp_path / "plain", {**SPARSE, "moe_intermediate_size": 64, "dtype": "bfloat16"})
        )
        quantize_checkpoint(plain, tmp_path / "int4", "w4a16", group_size=32)
        quantized = hal.Checkpoint.open(tmp_path / "int4")
        models = build_model(plain), build_model(quantized)
        with hal.open({"backend": "cpu", "dtype": "bfloat16"}) as backend:
            loaded = None, hal.load_model(quantized, backend)
        chosen = [routing.Routing(2, 6), routing.Routing(5, 6)]
        sizes = [
            floor.decode_bytes(each, torch.bfloat16, 3, 4, chosen, held).parts["experts"]
            for each, held in zip(models, loaded, strict=True)
        ]
        numbers = (2 + 5) * 3 * 32 * 64
        assert sizes == [2 * numbers, numbers * (0.5 + 2 / 32)]
        prefills = [floor.prefill_operations(each, 4, 3, 20, chosen).parts for each in models]
        assert prefills[0] == prefills[1]
        assert "experts" not in floor.decode_products(models[1], 3, chosen).parts

    def test_seconds(self) -> None:
        work = floor.Work({"weights": 500, "experts": 100, "cache": 200}, "bytes")
        read = measurement.Floor(1, work, "sum", 1000, [4.0, 2.0, 1.0])
        assert read.rate == 500
        assert read.seconds == 1.6
        for operations, seconds in ((1100, 1.6), (1300, 1.7)):  # the weights take 1.2 to read, and the cache 0.4
            products = measurement.Floor(1, floor.Work({"projections": operations}, "operations"), "", 1000, [1.0, 1.0])
            assert attrs.evolve(read, products=products).seconds == pytest.approx(seconds)

    def test_probes_do_what_they_say(self, cpu: hal.Backend) -> None:
        read, matmul = floor.read_probe(cpu.device), floor.matmul_probe(cpu.device, torch.bfloat16)
        assert read.amount == 1 << 20
        assert "of 1 MiB" in read.description
        product = "matmul 32 x 32 x 32 in bfloat16"
        assert re.fullmatch(rf"products in registers, of which {product} reaches \d+%", matmul.description)
        assert matmul.contender.step() == matmul.amount

    def test_probes_of_a_device_without_its_own(self) -> None:
        matmul = floor.matmul_probe(hal.vendor.HostDevice(), torch.bfloat16)
        assert matmul.amount == 2 * 32**3
        assert matmul.description == "matmul 32 x 32 x 32 in bfloat16"
        assert matmul.contender.step().dtype == torch.bfloat16

    def test_the_cpu_reads_all_of_a_buffer(self, cpu: hal.Backend) -> None:
        words = torch.arange(1, (1 << 15) + 1)  # 256 KiB, whole pieces
        read = cpu.device.reading(words)
        assert read is not None
        assert read() == 1 << 15  # the exclusive or of 1 to 1 << 15


class TestAgreement:
    @staticmethod
    def gives(name: str, logits: Tensor) -> Contender:
        return Contender(name, lambda: logits, lambda: None)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (torch.tensor([[3.0, 5.0]]), "do not compute the same: their logits differ by 0.2 of their norm"),
            (torch.tensor([[1.0, math.nan]]), "do not compute the same"),
            (torch.ones(1, 3), r"returned logits \[1, 3\], and a \[1, 2\]"),
        ],
    )
    def test_another_result_is_refused(self, other: Tensor, message: str) -> None:
        contenders = [self.gives("a", torch.tensor([[3.0, 4.0]])), self.gives("b", other)]
        with pytest.raises(BenchmarkError, match=message):
            timing.check(contenders, torch.bfloat16)

    def test_rounding_is_not(self) -> None:
        contenders = [
            self.gives("a", torch.tensor([[1.0, 2.0], [2.0, 1.999]])),
            self.gives("b", torch.tensor([[1.0, 2.0], [1.999, 2.0]])),
        ]
        (found,) = timing.check(contenders, torch.float32)
        assert found.difference == pytest.approx(0.0005, rel=1e-2)
        assert (found.same_tokens, found.sequences) == (1, 2)

    @thorough(DTYPE, r"\[bfloat16")
    @pytest.mark.parametrize("wrong", ["positions", "kv_lens"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_mode_that_goes_wrong_is_never_timed(
        self, monkeypatch: pytest.MonkeyPatch, wrong: str, dtype: str
    ) -> None:
        """In the second mode every token has the previous token's position or length."""
        contender = HalSide.contender
        build = hal.Runner.batch

        def faulty(self: HalSide, mode: str, inputs: Inputs) -> Contender:
            def one_less(*args: Any, **keys: Any) -> hal.step.Batch:
                batch = build(*args, **keys)
                changes = {wrong: getattr(batch, wrong) - 1}
                if wrong == "kv_lens":
                    changes["kv_lens_host"] = batch.kv_lens_host - 1
                return attrs.evolve(batch, **changes)

            with pytest.MonkeyPatch.context() as patch:
                if mode != "eager":
                    patch.setattr(hal.Runner, "batch", one_less)
                return contender(self, mode, inputs)

        monkeypatch.setattr(HalSide, "contender", faulty)
        monkeypatch.setattr(measurement, "interleave", lambda *args, **keys: pytest.fail("a wrong result was timed"))
        with pytest.raises(BenchmarkError, match="hal graph and hal eager do not compute the same"):
            measurement.run(tiny(compilers=("eager", "graph"), dtype=dtype))

    @pytest.mark.parametrize("workload", ["decode", "prefill"])
    def test_steps_leave_no_trace(self, workload: plan.Workload) -> None:
        pytest.importorskip("transformers", reason="transformers is the other contender")
        setting = plan.prepare(tiny(workload=workload, batch_sizes=(2,)))
        for side in (HalSide(setting), transformers_side.TransformersSide(setting)):
            contender = side.contender("eager", Inputs(setting, 2))
            contender.reset()
            first = contender.step().clone()
            for _ in range(3):
                contender.reset()
                assert torch.equal(contender.step(), first)


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--shapes", "qwen3-0.6"], "unknown shapes 'qwen3-0.6'\nremedy: did you mean 'qwen3-0.6b'?"),
            ([], "no checkpoint and no shapes given"),
            (["somewhere", "--shapes", "tiny"], "both a checkpoint and shapes given"),
            (["nowhere"], "no checkpoint at nowhere"),
            (["--shapes", "tiny", "--compiler", "grahp"], "has no compiler 'grahp'\nremedy: did you mean 'graph'?"),
            (["--shapes", "tiny", "--against", "vllm"], "cannot measure against 'vllm'"),
            (["--shapes", "tiny", "--batch-size", "0"], "the batch size must be at least 1, not 0"),
            (["--shapes", "tiny", "--threads", "0"], "cores must be at least 1, not 0"),
            (
                ["--shapes", "tiny", "--repeats", "2"],
                "2 repeats are too few to measure a spread\nremedy: use --repeats with at least 3",
            ),
            (["--shapes", "tiny", "--dtype", "int8"], "unknown value 'int8'"),
            (["--shapes", "tiny", "--backend", "abacus"], "no driver 'abacus' is installed"),
            (["--shapes", "tiny", "--context", "256"], "sequences of 257 tokens exceed the model's maximum of 256"),
            (["--shapes", "tiny", "--backend", "cpu", "--trace"], "the backend cpu does not count launches"),
            (
                ["--shapes", "tiny", "--figures", "no/such/folder/x"],
                "no/such/folder/x cannot be written: No such file or",
            ),
            (["--shapes", "tiny", "--figures", "/"], "/ cannot be written: Is a directory"),
        ],
    )
    def test_before_anything_is_loaded(
        self, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hal, "load_model", lambda *args, **keys: pytest.fail("a model was loaded"))
        result = bench("decode", *arguments)
        assert result.exit_code == 2, result.exception
        assert message in result.stderr
        assert "remedy: " in result.stderr
        assert result.stdout == ""

    def test_a_file_that_is_there_is_kept_if_nothing_is_measured(self, tmp_path: Path) -> None:
        old, new = tmp_path / "old.json", tmp_path / "new.json"
        old.write_text("figures")
        for file in (old, new):
            assert bench("decode", "nowhere", "--figures", file).exit_code == 2
        assert old.read_text() == "figures"
        assert not new.exists()

    @thorough(PROCESSES)
    def test_what_the_environment_says_of_compiling_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HAL_COMPILATION__DEBUG", "true")
        result = succeeds("decode", "--shapes", "tiny", "--context", 8, "--compiler", "eager", "--repeats", 3)
        assert (
            "warning: compilation.debug of the environment is not read, because the benchmark sets the compiler; use "
            "--compilation-config"
        ) in result.stderr

    def test_weights_or_caches_that_do_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers", reason="transformers is the other contender")
        one = {"length": 1, "compilers": ("eager",)}
        free = 2 * plan.prepare(tiny(**one)).weight_bytes
        stats = hal.vendor.MemoryStats(allocated=0, peak=0, reserved=0, free=free, total=1 << 30)
        monkeypatch.setattr(hal.vendor.HostDevice, "memory_stats", lambda self: stats)
        plan.prepare(tiny(**one))
        with pytest.raises(BenchmarkError, match="the weights of all contenders take"):
            plan.prepare(tiny(**one, against=("transformers",)))
        with pytest.raises(BenchmarkError, match=r"and their caches \d MiB.*\n.*smaller shapes, batch sizes"):
            plan.prepare(tiny(length=100, compilers=("eager",), batch_sizes=(1, 64)))

    @thorough(PROCESSES)
    @pytest.mark.parametrize(("name", "library"), [("transformers", "transformers"), ("llama.cpp", "llama-cpp-python")])
    def test_a_library_that_is_missing(self, name: str, library: str) -> None:
        options = ["bench", "decode", "--shapes", "tiny", "--against", name]
        hidden = "import sys; sys.modules['transformers'] = sys.modules['llama_cpp'] = None"
        program = f"{hidden}; from hal.cli import main; main()"
        command = [sys.executable, "-c", program, *options]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        extra = " (or 'torch-hal[bench]')" if name == library else ""
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith(f"error: --against {name} needs {library}, which cannot be imported")
        assert f"remedy: pip install {library}{extra}\n" in result.stderr
        assert result.stdout == ""

    def test_a_rival_that_does_not_know_the_model(self) -> None:
        pytest.importorskip("transformers", reason="transformers is the other contender")
        setting = plan.prepare(tiny())
        unknown = attrs.evolve(setting.checkpoint, config={**TINY, "model_type": "no_such_model"})
        with pytest.raises(BenchmarkError, match="transformers does not support the model"):
            transformers_side.TransformersSide(attrs.evolve(setting, checkpoint=unknown))


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "parameters"),
        [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360), ("llama-3.2-1b", 1_235_814_400)],
    )
    def test_have_as_many_parameters_as_the_released_models(self, name: str, parameters: int) -> None:
        assert sum(each.numel() for each in random_weights.meta_model(SHAPES[name]).parameters()) == parameters

    def test_random_values_are_the_same_each_time(self, cpu: hal.Backend) -> None:
        checkpoint = random_weights.RandomCheckpoint.of("tiny", TINY)
        names = list(checkpoint.tensors)
        once, again = (dict(checkpoint.read(each)) for each in (names, names[::-1]))
        for name in names:
            assert once[name].shape == checkpoint.tensors[name].shape
            assert once[name].dtype == torch.float32
            assert torch.equal(once[name], again[name])
        model = hal.load_model(checkpoint, cpu)
        loaded = dict(model.named_parameters())
        assert torch.equal(loaded["model.embed_tokens.weight"], once["model.embed_tokens.weight"])


class TestMemory:
    @thorough(PROCESSES)
    def test_a_process_that_fails(self) -> None:
        with pytest.raises(BenchmarkError, match="the memory of hal nonsense failed: the backend cpu has no compiler"):
            peak_memory.peak(tiny(), 1, "hal nonsense")


class TestProgress:
    @thorough(PROCESSES)
    def test_a_run_says_what_runs_and_how_long_it_will_take(self) -> None:
        said: list[str] = []
        plan_ = tiny(batch_sizes=(1, 2), compilers=("eager", "graph"))
        measurement.run(plan_, said.append)
        assert all(re.match(r"\[\d+ s\] ", each) for each in said)
        texts = [each.partition("] ")[2] for each in said]
        assert texts[0] == "loading tiny into hal"
        for number, size in enumerate((1, 2), 1):
            expected = [
                f"batch {size}: batch size {number} of 2",
                f"batch {size}: preparing hal eager, 1 of 2",
                f"batch {size}: preparing hal graph, 2 of 2",
                f"batch {size}: checking that all compute the same",
                f"batch {size}: timing, 3 rounds",
            ]
            mine = [each for each in texts if each.startswith(f"batch {size}:") and "still running" not in each]
            assert mine[:-1] == expected
            assert re.fullmatch(rf"batch {size}: timing: 1 of 3 rounds, about \d+ s left", mine[-1])


class TestReport:
    @staticmethod
    def result(**seconds: list[float]) -> measurement.Result:
        measurements = [measurement.Measurement(f"hal {name}", 1, times, 0.5, None) for name, times in seconds.items()]
        floors = [measurement.Floor(1, floor.Work({"weights": 100}, "bytes"), "sum", 100, [1.0, 1.0, 1.0])]
        where = {
            "backend": "cpu",
            "device": "d",
            "cpu": "c",
            "cores": 1,
            "usable_cores": 1,
            "other_threads": 0.0,
            "threads": 1,
            "versions": {},
            "emulated": False,
        }
        return measurement.Result(tiny(), "float32", 100, where, {}, measurements, floors)

    def test_a_shared_machine_is_noted(self) -> None:
        result = self.result(eager=[2.0, 2.1, 2.2])
        assert not [line for line in bench_report.notes(result) if "other processes" in line]
        cores = os.cpu_count() or 1
        result.environment.update(usable_cores=cores, other_threads=3.0)
        [note] = [line for line in bench_report.notes(result) if "other processes" in line]
        assert note.startswith(f"other processes run 3 threads on the {cores} cores of this machine"), note

    def test_noise_is_marked(self) -> None:
        result = self.result(eager=[2.0, 2.1, 2.2], graph=[1.0, 2.0, 3.0], other=[4.0, 4.1, 4.2])
        _, rows = bench_report.table(result)
        assert [row[5] for row in rows] == ["1", "1.05 ~", "0.51", ""]
        (noise,) = [note for note in bench_report.notes(result) if "no difference can be claimed" in note]
        assert noise.startswith("batch 1: hal graph and hal eager differ by 100.0 ms, less than their spread")

    def test_faster_than_the_floor(self) -> None:
        assert any("faster than the floor" in note for note in bench_report.notes(self.result(eager=[0.5, 0.5, 0.5])))
        assert not any(
            "faster than the floor" in note for note in bench_report.notes(self.result(eager=[1.5, 1.5, 1.5]))
        )

    def test_a_note_names_what_took_longer(self) -> None:
        result = self.result(eager=[2.0, 2.0, 2.0])
        for operations, part in ((50, "take less time than their weights"), (150, "take longer than their weights")):
            products = measurement.Floor(
                1, floor.Work({"projections": operations}, "operations"), "mul", 100, [1.0] * 3
            )
            found = attrs.evolve(result, floors=[attrs.evolve(result.floors[0], products=products)])
            (note,) = [each for each in bench_report.notes(found) if each.startswith("batch 1: floor: weights 100 B")]
            assert part in note
            assert f"{operations * 10:.1f} ms: projections {operations} FLOP, at 100 FLOP/s (mul)" in note


class TestPlot:
    PAGES = ROOT / "docs" / "reference" / "figures"
    SHAPES = "{http://www.w3.org/2000/svg}"

    def test_the_bars_are_the_medians(self) -> None:
        result = TestReport.result(**{"<a>": [2.0, 2.1, 2.2], "b": [4.0, 4.0, 4.0]})
        root = ElementTree.fromstring(plot.times(bench_report.as_json(result)))
        texts = [each.text for each in root.iter(f"{self.SHAPES}text")]
        assert texts[0] == "decode: tiny, float32, 20 tokens: ms, median and quartiles"
        assert texts[1:6] == ["batch 1 (dashed: floor, 1000 ms)", "hal <a>", "2100", "hal b", "4000"]
        first, second = (float(each.attrib["width"]) for each in [*root.iter(f"{self.SHAPES}rect")][1:])
        assert first / second == pytest.approx(2.1 / 4, abs=0.01)
        assert plot.launches(bench_report.as_json(result)) == ""

    def test_the_command(self, tmp_path: Path) -> None:
        file = tmp_path / "figures.json"
        file.write_text(json.dumps(bench_report.as_json(TestReport.result(eager=[2.0, 2.0, 2.0]))))
        once, twice = (succeeds("plot", *[file] * count).stdout for count in (1, 2))
        assert twice.count("hal eager") == 2 * once.count("hal eager") == 2
        for content in ("{", "[]", '{"format": 0}'):
            file.write_text(content)
            result = bench("plot", file)
            assert (result.exit_code, result.stdout) == (2, "")
            assert "remedy: name a file that --figures wrote" in result.stderr

    @pytest.mark.parametrize("name", sorted(each.stem for each in PAGES.glob("*.svg")))
    def test_those_of_the_pages_are_those_of_their_figures(self, name: str) -> None:
        """`hal bench plot docs/reference/figures/NAME*.json > docs/reference/figures/NAME.svg` makes one."""
        files = sorted(self.PAGES.glob(f"{name}*.json"), key=lambda each: (len(each.name), each.name))
        assert (self.PAGES / f"{name}.svg").read_text() == plot.times(*map(plot.read_figures, files))


class TestLlama:
    @pytest.mark.parametrize(("shapes", "kind", "error"), [("tiny", "F32", 0), ("tiny-experts", "Q8_0", 4e-3)])
    def test_the_weights_are_written(self, shapes: str, kind: str, error: float, tmp_path: Path) -> None:
        pytest.importorskip("gguf", reason="gguf writes the file")
        written = random_weights.RandomCheckpoint.of(shapes, SHAPES[shapes])
        write_gguf(written, tmp_path / "model.gguf", kind)
        read = hal.Checkpoint.open(tmp_path / "model.gguf")
        assert read.tensors.keys() == written.tensors.keys()
        found = dict(read.read(read.tensors))
        for name, values in written.read(written.tensors):
            assert (found[name] - values).abs().max() <= error, name

    def test_scaled_positions_are_written(self, tmp_path: Path) -> None:
        pytest.importorskip("gguf", reason="gguf writes the file")
        config = SHAPES["llama-3.2-1b"] | {key: value for key, value in TINY.items() if isinstance(value, int)}
        write_gguf(random_weights.RandomCheckpoint.of("tiny", config), tmp_path / "model.gguf", "F32")
        read = hal.Checkpoint.open(tmp_path / "model.gguf").config["rope_scaling"]
        assert read["rope_type"] == "llama3"
        assert read["factor"] == config["rope_parameters"]["factor"]

    def test_what_has_no_name_there(self, tmp_path: Path) -> None:
        pytest.importorskip("gguf", reason="gguf writes the file")
        tiny = random_weights.RandomCheckpoint.of("tiny", TINY)
        checkpoint = attrs.evolve(tiny, config=TINY | {"architectures": ["OlmoForCausalLM"]})
        with pytest.raises(BenchmarkError, match="hal writes no GGUF file of OlmoForCausalLM"):
            write_gguf(checkpoint, tmp_path / "model.gguf", "F32")
        left_out = attrs.evolve(tiny, config={key: TINY[key] for key in TINY if key != "rms_norm_eps"})
        with pytest.raises(BenchmarkError, match="no rms_norm_eps, which a GGUF file states"):
            write_gguf(left_out, tmp_path / "model.gguf", "F32")

    @pytest.mark.parametrize("workload", ["decode", "prefill"])
    def test_both_compute_the_same(self, workload: plan.Workload) -> None:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python, which pip builds from source, is not installed")
        result = measurement.run(tiny(workload=workload, compilers=("eager",), against=("llama.cpp",)))
        names = ["hal eager", "llama.cpp F32", "llama.cpp Q8_0", "llama.cpp Q4_0"]
        assert [each.contender for each in result.measurements] == names
        assert [each.contender for each in result.agreements[1]] == names[1:2] * (workload == "prefill")


def test_a_library_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interface differs: transformers 5.23 has another name for an argument, and ignores the one of 5.24."""
    install(tmp_path, "transformers", "", version="5.23.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = bench("prefill", "--shapes", "tiny", "--against", "transformers")
    assert result.exit_code == 2, result.stderr
    assert "--against transformers works with transformers <5.25,>=5.24, and 5.23.0 is installed" in result.stderr
    assert "pip install 'torch-hal[transformers]'" in result.stderr


def test_the_command_stays_light() -> None:
    program = "import sys, hal.cli; print(sys.modules.keys() & {'hal.bench', 'hal.generation.scheduler', 'torch'})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


class TestLaunches:
    """Runs on the CPU, with a backend that counts calls of its kernels."""

    class Counting(hal.Backend):
        def __init__(self) -> None:
            self.calls: Counter[str] = Counter()
            super().__init__(
                "counting",
                hal.vendor.HostDevice(),
                kernels={name: self.counted(name) for name in ("linear", "rms_norm", "paged_attention", "embedding")},
            )

        def counted(self, name: str) -> Callable[..., Any]:
            def kernel(*args: Any) -> Any:
                self.calls[name] += 1
                return ops.operation(name).body(*args)

            return kernel

        @contextmanager
        def counting_launches(self) -> Iterator[Counter[str]]:
            found: Counter[str] = Counter()
            before = self.calls.copy()
            yield found
            found.update(self.calls - before)

    @pytest.fixture
    def setting(self) -> Iterator[plan.Setting]:
        settled = plan.prepare(tiny(backend="cpu", batch_sizes=(1, 3)))
        counting = self.Counting()
        counting.configure(settled.backend.config)
        counting.activate()
        yield attrs.evolve(settled, backend=counting, modes=("eager",))
        hal.open("cpu")

    def test_a_layers_are_what_a_second_layer_adds(self, setting: plan.Setting) -> None:
        found = hal_side.count_launches(setting, lambda text: None)
        assert [(each.contender, each.batch_size) for each in found] == [("hal eager", 1), ("hal eager", 3)]
        for each in found:
            assert each.layer == {"linear": 4, "rms_norm": 4, "paged_attention": 1}
            assert each.outside == {"embedding": 1, "linear": 1, "rms_norm": 1}
            assert each.per_layer == 9

    def test_a_model_of_one_layer_is_counted_with_that_layer_twice(self, setting: plan.Setting, tmp_path: Path) -> None:
        opened = hal.Checkpoint.open(random_checkpoint(tmp_path / "qwen3", num_hidden_layers=1))
        (found, _) = hal_side.count_launches(attrs.evolve(setting, checkpoint=opened), lambda text: None)
        assert found.layer == {"linear": 4, "rms_norm": 4, "paged_attention": 1}

    @thorough(FAMILY)
    def test_kinds_of_layers_are_cut_too(self, setting: plan.Setting) -> None:
        kinds = ["full_attention", "full_attention"]
        config = {**TINY, "layer_types": kinds, "num_hidden_layers": 2}
        checkpoint = random_weights.RandomCheckpoint.of("kinds", config)
        found = hal_side.count_launches(attrs.evolve(setting, checkpoint=checkpoint), lambda text: None)
        assert found[0].per_layer == 9

    def test_a_config_that_says_its_layers_elsewhere_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        setting = plan.prepare(tiny(backend="cpu"))
        meta = random_weights.meta_model(TINY)
        monkeypatch.setattr(hal_side, "meta_model", lambda config, source: meta)
        with pytest.raises(BenchmarkError, match="needs a model of 1 layers, but num_hidden_layers=1 gives 2"):
            hal_side.count_launches(setting, lambda text: None)

    def test_the_table_and_what_stands_beneath(self) -> None:
        counted = [
            hal_side.Launches(name, size, Counter({"linear": 4, "copy": size - 1}), Counter({"copy": copies}))
            for size in (1, 2)
            for name, copies in (("hal eager", 0), ("hal graph", 6))
        ]
        result = attrs.evolve(TestReport.result(eager=[1.0, 1.0, 1.0]), launches=counted)
        columns, rows = bench_report.launches_table(result)
        assert columns == ["batch", "kernel"] + [
            f"hal {mode}, {where}" for mode in ("eager", "graph") for where in ("a layer", "outside")
        ]
        assert rows == [
            ["1", "linear", "4", "0", "4", "0"],
            ["1", "copy", "0", "0", "0", "6"],
            ["1", "all", "4", "0", "4", "6"],
            ["2", "linear", "4", "0", "4", "0"],
            ["2", "copy", "1", "0", "1", "6"],
            ["2", "all", "5", "0", "5", "6"],
        ]
        assert list(bench_report.launches_notes(result))[1:] == [
            "other implementations, per layer: 10 by SGLang 0.5.23, Qwen3, graph mode"
        ]
        figures = bench_report.as_json(result)
        assert figures["launches"][2] == {
            "contender": "hal eager",
            "batch_size": 2,
            "layer": {"linear": 4, "copy": 1},
            "outside": {"copy": 0},
            "per_layer": 5,
        }
        assert figures["launches_per_layer_of_peers"] == {"SGLang 0.5.23, Qwen3, graph mode": 10}

    def test_a_kernel_of_the_first_layer_alone_is_outside(self) -> None:
        one, two = Counter(rms_norm=1, add_rms_norm=1), Counter(rms_norm=1, add_rms_norm=3, cast=0)
        layer = hal_side._difference(two, one)
        assert layer == {"add_rms_norm": 2}
        assert hal_side._difference(one, layer) == {"rms_norm": 1, "add_rms_norm": -1}


class TestExtensions:
    """transformers imports installed extensions of torch by vendors, and some fail to import."""

    def test_only_those_that_are_imported_are_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(tmp_path, "acme", "[torch.backends]\nold = acme_old:load\nnew = acme_new.inner:load\n")
        for name in ("acme_old", "acme_new"):
            (tmp_path / f"{name}.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.import_module("acme_old")
        with only_imported_extensions():
            assert importlib.util.find_spec("acme_old") is not None
            assert importlib.util.find_spec("acme_new") is None
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module("acme_new")
        importlib.import_module("acme_new")
        for name in ("acme_old", "acme_new"):
            del sys.modules[name]

    @thorough(PROCESSES)
    @thorough(EXHAUSTIVE, r"\[bench")
    @pytest.mark.parametrize("command", ["bench", "train"])
    def test_a_process_that_finds_all_that_are_installed(self, repository: Path, command: str, tmp_path: Path) -> None:
        """If torch_npu is installed without CANN, importing it fails. The memory is measured in further processes."""
        pytest.importorskip("transformers", reason="transformers is the other contender")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("HAL_", "TORCH_DEVICE"))}
        figures = tmp_path / "figures.json"
        options = ["--shapes", "tiny", "--tokens", "8", "--repeats", "3", "--against", "transformers", "--memory"]
        options += ["--figures", str(figures)]
        arguments = {
            "bench": ["-c", "from hal.cli import main; main()", "bench", "prefill", "--backend", "cpu", *options],
            "train": ["tools/checkpoints/train.py", "--help"],
        }
        result = subprocess.run(
            [sys.executable, *arguments[command]],
            cwd=repository,
            env={**kept, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert result.returncode == 0, result.stderr
        if command == "bench":
            measured = json.loads(figures.read_text())["measurements"]
            assert [each["contender"] for each in measured] == ["hal eager", "transformers eager"]
            assert all(each["peak_bytes"] > 0 for each in measured)
            assert "peak / weights" in result.stdout


def test_the_layers_of_a_text_model_in_a_table() -> None:
    from hal.bench.hal_side import config_of_layers

    text = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"]}
    cut = config_of_layers({"vision_config": {"depth": 3}, "text_config": text}, 2)
    assert cut == {"vision_config": {"depth": 3}, "text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"]}}


def test_every_list_with_an_entry_for_each_layer_is_cut() -> None:
    from hal.bench.hal_side import config_of_layers

    table = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "head_dim": 16}
    types = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "indexer_types": ["full"] * 4}
    cut = config_of_layers({"num_hidden_layers": 4, **types, "linear_attn_config": table}, 2)
    assert cut["linear_attn_config"] == {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 16}
    assert (cut["mlp_layer_types"], cut["indexer_types"]) == (["dense", "sparse"], ["full"] * 2)
