"""Compiled steps: what configurations may ask for, traces that serve several sizes, torch.compile, and hal explain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import hal
from hal import ops
from hal.batch import Batch
from hal.cli import main
from hal.compile.optimise import optimise_model
from hal.compile.rewrite import Rewrite
from hal.compile.trace import example_batch
from hal.errors import CompileError, ConfigError
from hal.nn import CausalLM, Embedding, Linear, RMSNorm
from hal.ops.preparing import PreparingKernel

SIZES = (1, 2, 3, 5, 17)


class Toy(CausalLM):
    """Sums and norms, and a Python condition on the number of tokens."""

    vocab_size, max_length, num_layers, num_kv_heads, head_dim = 32, 64, 1, 1, 16
    tied: Mapping[str, str] = {}

    def __init__(self, doubles_above: int | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding, self.out = Embedding(32, 16), Linear(16, 32)
        self.norms = nn.ModuleList(RMSNorm(16, 1e-6) for _ in range(3))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.doubles_above = doubles_above

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Toy:
        return cls()

    def forward(self, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        for norm in self.norms:
            hidden = hidden + norm(hidden).relu()
        if self.doubles_above is not None and batch.num_tokens > self.doubles_above:
            hidden = hidden * 2
        logits: Tensor = self.out(hidden[batch.logits_indices])
        return logits


def opened(**compilation: Any) -> hal.Backend:
    return hal.open({"backend": "cpu", "compilation": compilation})


def decoded(runner: hal.Runner, size: int) -> tuple[Tensor, Tensor]:
    """What a decode step gives, and the same by the model's own Python."""
    batch = runner.batch([[row % 32] for row in range(size)], [[row + 1] for row in range(size)])
    with torch.inference_mode():
        return runner.decode(batch).clone(), runner.model(batch, runner.cache.layers)


class TestConfigurations:
    @pytest.mark.parametrize(
        ("compilation", "message"),
        [
            ({"compiler": "graf"}, "no compiler 'graf'"),
            ({"prefill": {"compiler": "graph"}}, "no compiler 'graph' for prefill"),
            ({"compiler": "piecewise", "splitting_ops": ["paged_atention"]}, "'paged_atention', which is no operation"),
            ({"compiler": "piecewise", "splitting_ops": []}, "must name an operation"),
            ({"compiler": "graph", "splitting_ops": ["linear"]}, "splitting_ops is given, and the compiler 'graph'"),
            ({"compiler": "graph", "passes": {"ad_rms_norm": False}}, "no pass 'ad_rms_norm'"),
            ({"compiler": "eager", "passes": {"add_rms_norm": False}}, "passes is given, and the compiler 'eager'"),
            ({"compiler": "inductor", "torch_compile_max_bs": 4}, "torch_compile_max_bs is given"),
            ({"compiler": "graph", "cache_dir": "/tmp"}, "cache_dir is given"),
            ({"compiler": "piecewise_eager", "passes": {"add_rms_norm": False}}, "passes is given"),
            ({"decode": {"compilr": "graph"}}, "compilr"),
        ],
    )
    def test_what_cannot_work_is_refused_when_the_backend_is_opened(
        self, compilation: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            opened(**compilation)

    def test_an_unknown_name_is_answered_with_the_known_ones(self) -> None:
        with pytest.raises(ConfigError) as caught:
            opened(compiler="graph", passes={"ad_rms_norm": False})
        assert "did you mean 'add_rms_norm'?" in str(caught.value)
        with pytest.raises(ConfigError) as caught:
            opened(compiler="piecewise", splitting_ops=["paged_atention"])
        assert "did you mean 'paged_attention'?" in str(caught.value)

    def test_phases(self) -> None:
        config = hal.CompilationConfig(
            compiler="npugraph", capture_sizes=(1, 2), passes={"a": False},
            prefill=hal.PhaseConfig(compiler="piecewise", passes={"b": True}),
        )  # fmt: skip
        decode, prefill = config.of("decode"), config.of("prefill")
        assert (decode.compiler, decode.capture_sizes, decode.passes) == ("graph", (1, 2), {"a": False})
        assert (prefill.compiler, prefill.capture_sizes) == ("piecewise", None)
        assert prefill.passes == {"a": False, "b": True}
        assert hal.CompilationConfig(compiler="piecewise").of("prefill").compiler == "piecewise"
        assert hal.CompilationConfig(compiler="graph").of("prefill").compiler == "eager"

    def test_a_pass_that_is_off_does_not_run(self) -> None:
        names = []
        for passes in ({}, {"add_rms_norm": True}, {"add_rms_norm": False}):
            runner = hal.Runner(Toy(), opened(compiler="graph", capture_sizes=[2], passes=passes))
            step = runner._decode.optimised.optimised[2]  # type: ignore[attr-defined]
            names.append([each.name for each in step.report.passes])
        assert "add_rms_norm" in names[0]
        assert names[0] == names[1]
        assert "add_rms_norm" not in names[2]

    def test_above_torch_compile_max_bs_the_models_python_is_captured(self) -> None:
        runner = hal.Runner(Toy(), opened(compiler="graph", capture_sizes=[1, 2, 4], torch_compile_max_bs=2))
        assert sorted(runner._decode.optimised.optimised) == [1, 2]  # type: ignore[attr-defined]
        for size in (1, 2, 3, 4):
            torch.testing.assert_close(*decoded(runner, size))


class TestTraces:
    @pytest.mark.parametrize("doubles_above", [None, 0, 1, 2, 4, 16, 100])
    def test_python_that_depends_on_sizes_is_followed(self, doubles_above: int | None) -> None:
        runner = hal.Runner(Toy(doubles_above), opened(compiler="graph", capture_sizes=list(SIZES)))
        for size in SIZES:
            torch.testing.assert_close(*decoded(runner, size))

    def test_one_trace_serves_all_sizes_but_one(self) -> None:
        """A single row is a case of its own to torch, whose shapes it can tell apart."""
        runner = hal.Runner(Toy(), opened(compiler="graph", capture_sizes=list(SIZES)))
        steps = runner._decode.optimised.optimised  # type: ignore[attr-defined]
        assert len({id(step) for size, step in steps.items() if size > 1}) == 1
        runner = hal.Runner(Toy(doubles_above=4), opened(compiler="graph", capture_sizes=list(SIZES)))
        steps = runner._decode.optimised.optimised  # type: ignore[attr-defined]
        assert steps[5] is steps[17]
        assert steps[2] is steps[3]
        assert steps[3] is not steps[5]
        assert steps[2].traced.conditions != []

    def test_piecewise_refuses_a_model_that_asks_for_sizes(self) -> None:
        with pytest.raises(CompileError, match=r"does not do the same for all sizes: it asks for s\d+ "):
            hal.Runner(Attending(doubles_above=4), opened(compiler="piecewise"))


class Attending(Toy):
    """With an operation to split at."""

    def forward(self, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        heads = hidden.view(-1, 1, 16)
        ops.store_kv_cache(heads, heads, *caches[0], batch.slot_mapping)
        lengths = batch.query_start_loc_host, batch.kv_lens_host
        attended = ops.paged_attention(
            heads, *caches[0], batch.block_table, batch.query_start_loc, batch.kv_lens, *lengths, 0.25, True, None
        )
        hidden = hidden + attended.flatten(1)
        if self.doubles_above is not None and batch.num_tokens > self.doubles_above:
            hidden = hidden * 2
        logits: Tensor = self.out(hidden[batch.logits_indices])
        return logits


class TestDriversOwn:
    """What a driver may bring: rewrites, passes, kernels that prepare arguments, compilers."""

    def test_a_rewrite_a_pass_and_a_preparing_kernel(self, cpu: hal.Backend) -> None:
        calls: list[str] = []

        def relu_twice(x: Tensor) -> Tensor:
            return x.relu().relu()

        rewrite = Rewrite("relu_once", relu_twice, torch.ops.aten.relu.default, lambda draw: [(draw.normal(3, 4),)])

        def count_nodes(graph: torch.fx.GraphModule) -> int:
            calls.append("pass")
            return len(graph.graph.nodes)

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return x @ weight

        prepared = PreparingKernel(linear, {"weight": lambda weight: weight.t()})
        kernels = {"linear": prepared}
        backend = hal.Backend("own", cpu.device, kernels=kernels, compilers=("own",), rewrites=(rewrite, count_nodes))
        assert backend.pass_names == ("relu_once", "count_nodes")

        class Twice(Toy):
            def forward(self, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
                hidden = self.embedding(batch.token_ids).relu().relu()
                return self.out(hidden) + self.out(hidden * 2)

        model = Twice()
        backend.activate()
        example = example_batch(3, 3, 3, columns=5, device=torch.device("cpu"))
        step = optimise_model(model, example, [], backend, {}, any_size=True)
        assert len(step.report["relu_once"].matches) == 1
        assert calls == ["pass"]
        assert step.at_most["relu_once"] == 0  # it calls no operation of hal's to count
        step.hoist(backend)
        transposes = [node for node in step.traced.graph.graph.nodes if node.target is torch.ops.aten.t.default]
        assert len(transposes) == 1, "prepared once for both calls"
        run = step.lowered()
        for size in (2, 3, 9):
            batch = example_batch(size, size, size, columns=4, device=torch.device("cpu"))
            from hal.compile.trace import batch_tensors

            (found,) = run(*batch_tensors(batch))
            torch.testing.assert_close(found, model(batch, []))
        cpu.activate()


def test_a_rewrite_that_only_nearly_matched_is_a_warning(cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    def halved(x: Tensor) -> Tensor:
        return x.relu() * 0.5

    def even(x: Tensor) -> str | None:
        return None if x.shape[-1] % 32 == 0 else f"the width {x.shape[-1]} is no multiple of 32"

    def samples(width: int) -> Any:
        return lambda draw: [(draw.normal(3, width),)]

    rewrite = Rewrite("halved", halved, lambda x: x.clamp(min=0) / 2, samples(32), even, samples(16))
    backend = hal.Backend("own", cpu.device, kernels={}, compilers=("own",), rewrites=(rewrite,))

    class Halved(Toy):
        def forward(self, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
            return self.out(self.embedding(batch.token_ids).relu() * 0.5)

    backend.activate()
    example = example_batch(3, 3, 3, columns=5, device=torch.device("cpu"))
    with caplog.at_level("WARNING", "hal.compile"):
        optimise_model(Halved(), example, [], backend, {}, any_size=True)
        assert caplog.messages == [
            "Halved: the rewrite halved was applied nowhere: the width 16 is no multiple of 32 (1 times)"
        ]
        caplog.clear()
        optimise_model(Toy(), example, [], backend, {}, any_size=True)
        assert not caplog.messages, "nothing there that it could be applied to"
    cpu.activate()


@pytest.fixture
def dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("dynamo")
class TestTorchCompile:
    def test_a_model(self, trained: Path) -> None:
        backend = hal.open({"backend": "cpu", "dtype": "float32"})
        model = hal.load_model(trained, backend)
        runner = hal.Runner(model, backend)
        compiled = torch.compile(model, backend="hal", fullgraph=True)
        with torch.inference_mode():
            for size in (1, 3, 4):
                blocks = [[row + 1] for row in range(size)]
                prompt = runner.batch([[5, 6, 7]] * size, blocks)
                torch.testing.assert_close(
                    compiled(prompt, runner.cache.layers), model(prompt, runner.cache.layers), rtol=1e-5, atol=1e-5
                )
                step = runner.batch([[8]] * size, blocks, cached=[3] * size)
                torch.testing.assert_close(
                    compiled(step, runner.cache.layers), model(step, runner.cache.layers), rtol=1e-5, atol=1e-5
                )

    def test_rewrites_are_applied(self, cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
        def function(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            total = x + y
            return ops.rms_norm(total, weight, 1e-6) + total

        arguments = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
        with torch.inference_mode():
            found = torch.compile(function, backend="hal", fullgraph=True)(*arguments)
            torch.testing.assert_close(found, function(*arguments))
        assert "add_rms_norm: 1 applied" in caplog.text
        caplog.clear()
        torch.compiler.reset()
        with torch.inference_mode():
            options = {"passes": {"add_rms_norm": False}}
            torch.compile(function, backend="hal", fullgraph=True, options=options)(*arguments)
        assert "add_rms_norm" not in caplog.text

    def test_an_unknown_option(self, cpu: hal.Backend) -> None:
        with pytest.raises(Exception, match="the compiler hal has no option 'pases'"):
            torch.compile(lambda x: x + 1, backend="hal", options={"pases": {}})(torch.ones(3))

    def test_a_model_that_breaks_the_graph_is_told_where(self, cpu: hal.Backend) -> None:
        def function(x: Tensor) -> Tensor:
            return x * x.max().item() if x.max().item() > 1 else x

        with pytest.raises(Exception, match=r"test_compiling\.py"):
            torch.compile(function, backend="hal", fullgraph=True)(torch.ones(3))


class TestExplain:
    def run(self, *arguments: str) -> list[str]:
        result = CliRunner().invoke(main, ["explain", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    def test_a_graph(self, trained: Path, tmp_path: Path) -> None:
        lines = self.run(str(trained), "--backend", "cpu", "--compiler", "graph", "--dump", str(tmp_path / "dump"))
        assert lines[0] == "Qwen3ForCausalLM, 4 layers, on cpu: a decode step of 2, graph"
        assert len(lines) < 40
        rows = {line.split()[0]: line.split()[1:] for line in lines if line}
        assert rows["add_rms_norm"][0] == "8"
        assert int(rows["add_rms_norm"][1]) >= 8
        assert {"trace", "rewrite", "lower"} <= set(rows)
        dumped = sorted((tmp_path / "dump").iterdir())
        assert [each.name for each in dumped] == ["0-trace.py", "1-rewrite.py"]
        before, after = (each.read_text(encoding="utf-8") for each in dumped)
        assert "add_rms_norm" not in before
        assert after.count("hal.add_rms_norm.default") == 8
        assert "key_cache_0" in after
        compile(after, "dump", "exec")

    def test_pieces(self, trained: Path, tmp_path: Path) -> None:
        config = json.dumps({"compiler": "piecewise", "splitting_ops": ["paged_attention"]})
        lines = self.run(str(trained), "--backend", "cpu", "--compilation-config", config, "--dump", str(tmp_path))
        assert any(line.startswith("5 pieces are captured") and "paged_attention" in line for line in lines)
        text = (tmp_path / "2-split.txt").read_text(encoding="utf-8")
        assert text.count("eager: paged_attention") == 4

    def test_errors(self, trained: Path) -> None:
        result = CliRunner().invoke(main, ["explain", str(trained), "--backend", "cpu", "--compiler", "graf"])
        assert result.exit_code == 2
        assert "error: the backend cpu has no compiler 'graf'" in result.stderr
        assert result.stdout == ""
