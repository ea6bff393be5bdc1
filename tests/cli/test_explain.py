"""Tests for ``hal explain``: a model's steps in each mode, and the reasons why a step cannot be made."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from helpers import published_configs
from helpers.distributions import install
from helpers.low_bits import gpt_oss_pair
from helpers.seeing import build
from helpers.thorough import MODE, thorough

import hal
from hal import ops
from hal.cli import main
from hal.cli.explanation import explain_step
from hal.quantize.quantize_checkpoint import quantize_checkpoint
from hal.vendor import PartialKernel

READS_VALUES = """
from hal.models.qwen3 import Qwen3ForCausalLM

class Reads(Qwen3ForCausalLM):
    def forward(self, batch, states):
        assert int(batch.token_ids.max()) < self.vocab_size
        return super().forward(batch, states)
"""


class TestExplain:
    def run(self, *arguments: str) -> list[str]:
        result = CliRunner().invoke(main, ["explain", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    def test_latents_and_index_keys_of_a_token(self, tmp_path: Path) -> None:
        path = published_configs.write(tmp_path / "model", "DeepSeek-V3.2")
        lines = self.run(str(path), "--backend", "cpu", "--dtype", "bfloat16")
        assert (
            lines[1] == "states take 336 bytes per token, in bfloat16: 3 layers of 112 (latent 64, rope 16, index 32)"
        )

    def test_a_graph(self, trained: Path, tmp_path: Path) -> None:
        lines = self.run(str(trained), "--backend", "cpu", "--compiler", "graph", "--dump", str(tmp_path / "dump"))
        assert lines[0] == "Qwen3ForCausalLM, 2 layers, on cpu: a decode step of 2, graph"
        assert lines[1] == "states take 2,048 bytes per token, in bfloat16: 2 layers of 1,024 (key 512, value 512)"
        assert len(lines) < 40
        rows = {line.split()[0]: line.split()[1:] for line in lines if line}
        # The first norm and the norms of queries and keys have no addition before them: no structure is missed.
        assert rows["add_rms_norm"][:2] == ["4", "0"]
        assert {"trace", "rewrite", "lower"} <= set(rows)
        dumped = sorted((tmp_path / "dump").iterdir())
        assert [each.name for each in dumped] == ["0-trace.py", "1-rewrite.py"]
        before, after = (each.read_text(encoding="utf-8") for each in dumped)
        assert "add_rms_norm" not in before
        assert after.count("hal.add_rms_norm.default") == 4
        assert "state_0_key" in after
        compile(after, "dump", "exec")

    def test_quantized_layers(self, tmp_path: Path) -> None:
        """Of two layers with 4 experts, 64 inputs and 3 x 64 outputs: 4.25 bits a weight, and biases in float32."""
        quantized, _ = gpt_oss_pair(tmp_path)
        held = 2 * 4 * 3 * 64 * (64 * 17 // 32 + 4)
        assert self.run(str(quantized), "--backend", "cpu")[2] == (
            f"4 quantized layers take {held:,} bytes: float4 in groups of 32"
        )

    @pytest.mark.parametrize(
        ("scheme", "dtype", "form"),
        [
            (None, "bfloat16", "bfloat16"),
            (None, "float32", "float32"),
            ("w8a16", "bfloat16", "int8"),
            ("w4a16", "bfloat16", "int4 in groups of 64"),
            ("w8a8_dynamic", "bfloat16", "int8, and int8 inputs"),
        ],
    )
    def test_what_computes_with_each_weight(
        self, trained: Path, scheme: str | None, dtype: str, form: str, tmp_path: Path
    ) -> None:
        """Equal weights of the two layers have one line."""
        path = trained if scheme is None else tmp_path / "quantized"
        if scheme is not None:
            quantize_checkpoint(trained, path, scheme, group_size=64 if scheme == "w4a16" else None)
        rows = [re.split("  +", line) for line in self.run(str(path), "--backend", "cpu", "--dtype", dtype)]
        table = f"4096 x 192 {dtype}"
        for layer, times, operation, weight in (
            ("model.embed_tokens", "1", "embedding", table),
            ("model.embed_tokens", "1", "linear", table),
            ("model.layers.*.self_attn.qkv_proj", "2", "linear", f"1024 x 192 {form}"),
            ("model.layers.*.mlp.down_proj", "2", "linear", f"192 x 512 {form}"),
        ):
            (described,) = (row[4] for row in rows if row[:4] == [layer, times, operation, weight])
            assert re.match("torch$" if operation == "embedding" else r"(C\+\+|oneDNN|torch) \(", described)

    def test_fused_operations_without_a_kernel(self, trained: Path, cpu: hal.Backend) -> None:
        """They have no row in the table, in which a reader looks for them."""
        lines = self.run(str(trained), "--backend", "cpu", "--compiler", "graph")
        start = "not listed, because cpu has no kernel for them (see `hal ops`): "
        (line,) = (each for each in lines if each.startswith(start))
        absent = set(line.removeprefix(start).split(", "))
        rows = {each.split()[0] for each in lines if each}
        fused = {each.name for each in ops.catalogue().values() if each.fused}
        assert absent == fused - set(cpu.kernels)
        assert "add_rms_norm_quantize" in absent
        assert "add_rms_norm" in rows - absent
        assert not rows & absent

    @pytest.mark.parametrize(("otherwise", "what"), [(None, "the reference"), (torch.add, "another kernel")])
    def test_options_that_a_kernel_lacks(
        self, repository: Path, otherwise: Any, what: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        backend = hal.open({"backend": "cpu", "compilation": {"compiler": "graph"}})
        model: Any = hal.load_model(repository / "checkpoints" / "tiny-python", backend)
        for index, given in ((1, {"softcap": 20.0}), (2, {"softcap": 30.0, "window": 5}), (3, {"window": 5})):
            attention = model.model.layers[index].self_attn.attention
            attention.options = attrs.evolve(attention.options, **given)
        kernel = PartialKernel("paged_attention", backend.kernels["paged_attention"], ("window",), otherwise)
        backend.kernels = MappingProxyType({**backend.kernels, "paged_attention": kernel})
        explain_step(model, backend, 2)
        line = f"2 calls of paged_attention run {what}: the driver's kernel does not support softcap"
        assert capsys.readouterr().out.splitlines().count(line) == 1
        hal.open("cpu")

    @thorough(MODE, r"\[(eager|optimized)")
    @pytest.mark.parametrize(
        ("compiler", "says"),
        [
            ("eager", "the encoder's Python code is run eagerly; no rewrite is applied"),
            ("optimized", "trace    88 "),
            ("graph", "steps of up to 8, 32 embeddings are captured; larger ones run uncaptured"),
        ],
    )
    def test_an_encoder(self, tmp_path: Path, compiler: str, says: str) -> None:
        build("Qwen3VL", 1, tmp_path / "checkpoint")
        compilation = {"encoder": {"compiler": compiler} | ({"capture_sizes": [8, 32]} if compiler == "graph" else {})}
        lines = self.run(
            str(tmp_path / "checkpoint"), "--backend", "cpu", "--compilation-config", json.dumps(compilation)
        )
        first = lines.index(f"Qwen3VLTower, cpu: a step of the encoder, {compiler}")
        assert any(line.startswith(says) for line in lines[first:])

    def test_pieces(self, trained: Path, tmp_path: Path) -> None:
        config = json.dumps({"compiler": "piecewise", "splitting_ops": ["paged_attention"]})
        lines = self.run(str(trained), "--backend", "cpu", "--compilation-config", config, "--dump", str(tmp_path))
        assert any(line.startswith("3 pieces are captured") and "paged_attention" in line for line in lines)
        text = (tmp_path / "2-split.txt").read_text(encoding="utf-8")
        assert text.count("eager: paged_attention") == 2

    @pytest.mark.parametrize(
        ("config", "prefill", "said"),
        [
            (
                {"compiler": "eager"},
                "prefill steps: the model's Python code is run eagerly",
                "the model's Python code is run eagerly; no rewrite is applied",
            ),
            (
                {"compiler": "piecewise_eager"},
                "prefill steps have the compiler piecewise_eager",
                "the model's Python code is captured in 3 pieces; the 2 calls between them, of paged_attention, run "
                "eagerly; no rewrite is applied",
            ),
            (
                {"compiler": "graph", "torch_compile_max_bs": 1},
                "prefill steps are traced once for all sizes, rewritten, and run uncaptured",
                "the model's Python code is captured without compiling, because torch_compile_max_bs is 1; "
                "no rewrite is applied",
            ),
        ],
        ids=["eager", "piecewise_eager", "torch_compile_max_bs"],
    )
    def test_modes_without_a_trace(
        self, config: dict[str, Any], prefill: str, said: str, trained: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "dump"
        options = "--compilation-config", json.dumps(config), "--dump", str(folder)
        lines = self.run(str(trained), "--backend", "cpu", *options)
        assert lines[1].startswith("states take ")
        assert lines[-6:] == ["", prefill, "", said, "", f"no graph to write to {folder}"]
        assert not folder.exists()

    @thorough(MODE)
    def test_inductor(self, trained: Path, tmp_path: Path) -> None:
        """Inductor's trace consists of smaller operations, and has no rewrites."""
        lines = self.run(str(trained), "--backend", "cpu", "--compiler", "inductor", "--dump", str(tmp_path))
        (kept,) = (each for each in lines if "no rewrite is applied; it calls the driver's kernels of " in each)
        assert {"linear", "paged_attention"} <= set(kept.rpartition(" of ")[2].split(", "))
        assert not any("add_rms_norm" in each for each in lines)
        (dumped,) = tmp_path.iterdir()
        code = dumped.read_text(encoding="utf-8")
        assert "hal.paged_attention.default" in code
        assert "hal.rms_norm" not in code

    def test_pieces_that_cannot_be_made(self, trained: Path) -> None:
        config = json.dumps({"compiler": "piecewise", "splitting_ops": ["quantize"]})
        result = CliRunner().invoke(main, ["explain", str(trained), "--backend", "cpu", "--compilation-config", config])
        assert result.exit_code == 2
        assert "splitting_ops has quantize, which the optimized step does not call" in result.stderr

    def test_errors(self, trained: Path) -> None:
        result = CliRunner().invoke(main, ["explain", str(trained), "--backend", "cpu", "--compiler", "graf"])
        assert result.exit_code == 2
        assert "error: the backend cpu has no compiler 'graf'" in result.stderr
        assert result.stdout == ""


class TestRanks:
    """``--tensor-parallel`` splits the model between ranks that are not started."""

    @thorough(MODE, r"\[(eager|piecewise)")
    @pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
    def test_collectives_of_a_step(self, compiler: str, trained: Path) -> None:
        options = f"--backend cpu --dtype bfloat16 --compiler {compiler} --batch-size 3 --tensor-parallel 2"
        lines = TestExplain().run(str(trained), *options.split())
        config = hal.Checkpoint.open(trained).config
        rows = [line.split() for line in lines]
        # Of two ranks in a ring, each sends the half of a tensor, twice for a sum.
        hidden = 3 * config["hidden_size"] * 2 / 1024
        logits = 3 * config["vocab_size"] * 2 / 2 / 1024
        for of, times in (
            ("model.embed_tokens", 1),
            ("model.layers.*.self_attn.o_proj", 2),
            ("model.layers.*.mlp.down_proj", 2),
        ):
            assert ["all_reduce", of, str(times), f"{hidden:.4g}", "KiB"] in rows
        assert ["all_gather", "model.embed_tokens", "1", f"{logits:.4g}", "KiB"] in rows
        (said,) = (line for line in lines if line.startswith("a step has 6 collectives"))
        assert f"a rank sends {5 * hidden + logits:.4g} KiB" in said
        assert "fused" in said
        assert ("this compiler applies no rewrite" in said) == (compiler == "eager")

    def test_weights_of_a_rank(self, trained: Path) -> None:
        lines = TestExplain().run(str(trained), "--backend", "cpu", "--dtype", "float32", "--tensor-parallel", "2")
        whole = sum(4 * math.prod(each.shape) for each in hal.Checkpoint.open(trained).tensors.values()) / 2**20
        (said,) = (line for line in lines if line.startswith("a rank of 2 holds "))
        assert said.endswith(f" MiB of the {whole:.1f} MiB of weights")
        # Norms are not split, and the vocabulary is padded.
        assert 0.49 <= float(said.split()[5]) / whole < 0.51

    def test_whole_experts(self, trained_experts: Path) -> None:
        options = "--backend cpu --dtype bfloat16 --batch-size 3 --data-parallel 2 --experts dispatch"
        lines = TestExplain().run(str(trained_experts), *options.split())
        checkpoint = hal.Checkpoint.open(trained_experts)
        rows = [line.split() for line in lines]
        # At even load, half of the rows for the experts of three tokens go to the other rank.
        sent = 3 * checkpoint.config["num_experts_per_tok"] * checkpoint.config["hidden_size"] * 2 / 2 / 1024
        for name, of in (
            ("expert_dispatch", "model.layers.*.post_attention_layernorm"),
            ("expert_combine", "model.layers.*.mlp.experts.down_proj"),
        ):
            assert [name, of, "1", f"{sent:.4g}", "KiB"] in rows
        (said,) = (line for line in lines if line.startswith("a step has 2 collectives"))
        assert f"a rank sends {2 * sent:.4g} KiB, if experts get equally many tokens" in said
        nbytes = {name: 2 * math.prod(each.shape) for name, each in checkpoint.tensors.items()}
        held = sum(nbytes.values()) - sum(size for name, size in nbytes.items() if ".experts." in name) / 2
        whole = sum(nbytes.values()) / 2**20
        assert f"a rank of 2 holds {held / 2**20:.1f} MiB of the {whole:.1f} MiB of weights" in lines

    def test_copies_that_share_nothing(self, trained: Path) -> None:
        lines = TestExplain().run(str(trained), "--backend", "cpu", "--data-parallel", "2")
        assert "the 2 copies of the model exchange nothing in a step" in lines
        assert not any(line.startswith("a step has") for line in lines)

    def test_a_number_that_does_not_divide(self, trained: Path) -> None:
        arguments = ["explain", str(trained), "--backend", "cpu", "--tensor-parallel", "3"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert "3 ranks cannot share 4 heads of 128 elements equally" in result.stderr

    @pytest.mark.parametrize("compiler", ["eager", "graph"])
    def test_a_model_that_cannot_be_traced(
        self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
    ) -> None:
        """Its collectives stay unknown. Only a compiler that needs a trace fails."""
        install(tmp_path, "reads", "[hal.models]\nReadsForCausalLM = reads_values:Reads\n", reads_values=READS_VALUES)
        monkeypatch.syspath_prepend(str(tmp_path))
        shutil.copytree(trained, tmp_path / "model")
        config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["ReadsForCausalLM"]}))
        arguments = ["--backend", "cpu", "--tensor-parallel", "2", "--compiler", compiler]
        result = CliRunner().invoke(main, ["explain", str(tmp_path / "model"), *arguments])
        why = "Reads cannot be traced, in forward at "
        assert f"the collectives of a step are not listed, because {why}" in result.stdout
        assert result.exit_code == (0 if compiler == "eager" else 2)
        assert result.stderr.startswith("" if compiler == "eager" else f"error: {why}")
        assert ("the model's Python code is run eagerly; no rewrite is applied" in result.stdout) == (
            compiler == "eager"
        )
