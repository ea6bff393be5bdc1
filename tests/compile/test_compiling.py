"""Tests for compiled steps: configuration, traces that serve several sizes, torch.compile, and hal explain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.checkpoints import random_checkpoint, random_weights, write_json, write_weights
from helpers.stepping import padding_of, states_of
from helpers.thorough import DRAW, EXHAUSTIVE, FAMILY, thorough
from torch import Tensor, nn

import hal
from hal import ops
from hal.cli import explanation
from hal.compile.optimize import OptimizedStep, all_passes, optimize_model
from hal.compile.rewrite.rewrite import Rewrite, of_operation
from hal.compile.trace import StepSizes
from hal.errors import BackendNotActive, CompileError, ConfigError, DriverIncompatible
from hal.execution.capture.full_graph import FullGraphForm, OptimizedGraphs
from hal.nn import CausalLM, Embedding, Linear, RMSNorm
from hal.nn.model import LayerState
from hal.quantize.quantize_checkpoint import quantize_checkpoint
from hal.step import StepShape
from hal.step.batch import Batch
from hal.step.state import key_value_states
from hal.vendor import PreparingKernel

SIZES = (1, 2, 3, 5, 17)
ANY_ROWS: dict[str, Any] = {"axes": {"x": "rows width"}, "dtypes": {"x": ops.FLOATING}}
"""Axes and dtypes of a rewrite of one tensor."""
PIECES: dict[str, Any] = {"compiler": "piecewise"}
AT: dict[str, Any] = {"splitting_ops": ["linear"]}
OFF: dict[str, Any] = {"passes": {"add_rms_norm": False}}


class Toy(CausalLM):
    """Sums and norms, and a Python condition on the number of tokens."""

    vocab_size, max_length, states = 32, 64, (key_value_states(1, 16),)
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

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        for norm in self.norms:
            hidden = hidden + norm(hidden).relu()
        if self.doubles_above is not None and batch.num_tokens > self.doubles_above:
            hidden = hidden * 2
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.out(hidden)


def opened(**compilation: Any) -> hal.Backend:
    return hal.open({"backend": "cpu", "compilation": compilation})


def optimized(runner: hal.Runner) -> dict[int, OptimizedStep]:
    """Return the step of each number of sequences."""
    form = runner.forms["decode"]
    assert isinstance(form, FullGraphForm)
    assert isinstance(form.maker, OptimizedGraphs)
    return {shape.sequences: step for shape, step in form.maker.optimized.optimized.items()}


def decoded(runner: hal.Runner, size: int) -> tuple[Tensor, Tensor]:
    """Return the logits of a decode step, and those of the model's own Python code."""
    batch = runner.batch([[row % 32] for row in range(size)], [[row + 1] for row in range(size)])
    with torch.inference_mode():
        return runner.step(batch).logits.clone(), runner.model.logits(runner.model(batch, runner.states.layers))


class TestConfigurations:
    @pytest.mark.parametrize(
        ("compilation", "message"),
        [
            ({"prefill": {"compiler": "graph"}}, "no compiler 'graph' for prefill"),
            (PIECES | {"splitting_ops": ["paged_atention"]}, r"\n.*did you mean 'paged_attention'"),
            (PIECES | {"splitting_ops": []}, "must name at least one operation"),
            ({"compiler": "graph", **AT}, "splitting_ops is set, but the compiler 'graph'"),
            ({"compiler": "graph", "passes": {"ad_rms_norm": False}}, r"no pass 'ad_rms_norm'.*\n.*'add_rms_norm'"),
            ({"compiler": "eager", **OFF}, "passes is set, but the compiler 'eager'"),
            ({"compiler": "inductor", "torch_compile_max_bs": 4}, "torch_compile_max_bs is set"),
            ({"compiler": "graph", "cache_dir": "/tmp"}, "cache_dir is set"),
            (
                {"compiler": "graph", "prefill": PIECES, "decode": AT},
                "decode.splitting_ops is set, but the compiler",
            ),
            (
                {"prefill": PIECES, "decode": {"compiler": "eager", **OFF}},
                "decode.passes is set, but the compiler",
            ),
            ({"compiler": "graph", "prefill": {"compiler": "eager", **OFF}}, "prefill.passes is set, but the compiler"),
            ({"compiler": "graph", **AT, "prefill": PIECES | AT}, "splitting_ops is set, but the compiler 'graph'"),
            (
                PIECES | AT | {"decode": AT, "prefill": AT},
                "splitting_ops is set, but decode and prefill both",
            ),
            ({"compiler": "graph", "prefill": {"capture_sizes": [64]}}, "prefill.capture_sizes is set, but prefill"),
            ({"compiler": "graph", "prefill": {"max_capture_size": 64}}, "prefill.max_capture_size is set"),
            ({"prefill": PIECES, "decode": {"capture_sizes": [4]}}, "decode is eager, which captures no graphs"),
        ],
    )
    def test_what_cannot_work_is_refused_at_once(self, compilation: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            opened(**compilation)

    @pytest.mark.parametrize(
        "compilation",
        [
            {"decode": {"compiler": "graph", "capture_sizes": [4]}},
            {"compiler": "graph", "splitting_ops": ["linear"], "prefill": {"compiler": "piecewise"}},
            {"passes": {"add_rms_norm": False}, "prefill": {"compiler": "piecewise"}},
            {"compiler": "piecewise", "splitting_ops": ["linear"], "decode": {"splitting_ops": ["rms_norm"]}},
            {"compiler": "inductor", "decode": {"capture_sizes": [1]}},
            {"decode": {"capture_sizes": [4]}, "prefill": {"capture_sizes": [64]}},  # runs eagerly, for comparison
        ],
    )
    def test_what_some_phase_reads_is_taken(self, compilation: dict[str, Any]) -> None:
        assert opened(**compilation).config.compilation == hal.config.read(hal.CompilationConfig, compilation)

    def test_phases(self) -> None:
        config = hal.CompilationConfig(
            compiler="graph",
            capture_sizes=(1, 2),
            passes={"a": False},
            prefill=hal.PhaseConfig(compiler="piecewise", passes={"b": True}),
        )
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
            step = optimized(runner)[2]
            names.append([each.name for each in step.report.passes])
        assert "add_rms_norm" in names[0]
        assert names[0] == names[1]
        assert "add_rms_norm" not in names[2]

    def test_above_torch_compile_max_bs_the_models_python_is_captured(self) -> None:
        runner = hal.Runner(Toy(), opened(compiler="graph", capture_sizes=[1, 2, 4], torch_compile_max_bs=2))
        assert sorted(optimized(runner)) == [1, 2]
        for size in (1, 2, 3, 4):
            torch.testing.assert_close(*decoded(runner, size))


class TestTraces:
    @thorough(DRAW, r"\[(0|2|16|100)\]")
    @pytest.mark.parametrize("doubles_above", [None, 0, 1, 2, 4, 16, 100])
    def test_python_that_depends_on_sizes_is_followed(self, doubles_above: int | None) -> None:
        runner = hal.Runner(
            Toy(doubles_above), opened(compiler="graph", capture_sizes=list(SIZES), on_capture_error="eager")
        )
        for size in SIZES:
            torch.testing.assert_close(*decoded(runner, size))

    def test_one_trace_serves_all_sizes_but_one(self) -> None:
        """torch specializes a size of 1."""
        runner = hal.Runner(Toy(), opened(compiler="graph", capture_sizes=list(SIZES)))
        steps = optimized(runner)
        assert len({id(step) for size, step in steps.items() if size > 1}) == 1
        runner = hal.Runner(
            Toy(doubles_above=4), opened(compiler="graph", capture_sizes=list(SIZES), on_capture_error="eager")
        )
        steps = optimized(runner)
        assert steps[5] is steps[17]
        assert steps[2] is steps[3]
        assert steps[3] is not steps[5]
        assert steps[2].traced.conditions != []

    def test_a_size_of_its_own(self) -> None:
        """A trace that evaluated a comparison with a size as true has the size as a constant."""

        class Doubles(Toy):
            def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
                logits = super().forward(batch, states)
                return logits * 2 if batch.num_tokens == 5 else logits

        runner = hal.Runner(Doubles(), opened(compiler="graph", capture_sizes=list(SIZES), on_capture_error="eager"))
        for size in SIZES:
            torch.testing.assert_close(*decoded(runner, size))
        steps = optimized(runner)
        assert steps[3] is steps[17]
        assert steps[3] is not steps[5]

    def test_slices_of_what_is_as_long_as_the_batch(self) -> None:
        class Lengths(Toy):
            def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
                new = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
                return super().forward(batch, states) * new[:, None] + batch.kv_lens[-1:]

        runner = hal.Runner(Lengths(), opened(compiler="graph", capture_sizes=list(SIZES), on_capture_error="eager"))
        for size in SIZES:
            torch.testing.assert_close(*decoded(runner, size))

    @pytest.mark.parametrize("compiler", ["graph", "piecewise"])
    def test_a_model_that_asks_for_sizes_is_refused(self, compiler: str, caplog: pytest.LogCaptureFixture) -> None:
        """One trace serves the steps that no graph holds. Otherwise they run the model's Python, if that is allowed."""
        with pytest.raises(CompileError, match=r"depends on sizes: s\d+ .*\n.*on_capture_error"):
            hal.Runner(Attending(doubles_above=4), opened(compiler=compiler))
        runner = hal.Runner(Attending(doubles_above=4), opened(compiler=compiler, on_capture_error="eager"))
        batch = runner.batch([[5, 6, 7, 8, 9], [4]], [[1], [2]])
        for _ in range(2):
            runner.step(batch)
        assert caplog.text.count("steps that no graph holds run the Python code of Attending") == 1
        with torch.inference_mode():
            expected = runner.model(batch, runner.states.layers)
        torch.testing.assert_close(runner.step(batch).hidden_states, expected)

    def test_piecewise_eager_needs_no_trace(self, caplog: pytest.LogCaptureFixture) -> None:
        sizes = {"capture_sizes": [2], "prefill": {"capture_sizes": [4]}}
        runner = hal.Runner(Attending(doubles_above=4), opened(compiler="piecewise_eager", **sizes))
        runner.step(runner.batch([[5] * 6], [[1]]))
        assert "steps that no graph holds run the Python code of Attending" in caplog.text

    def test_inductor_refuses_it_for_more_than_one_sequence(self) -> None:
        with pytest.raises(CompileError, match=r"depends on sizes: s\d+ .*4"):
            hal.Runner(Toy(doubles_above=4), opened(compiler="inductor", capture_sizes=[2, 8]))


class Attending(Toy):
    """A model with an operation to split at."""

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        heads = hidden.view(-1, 1, 16)
        caches = states[0]["key"], states[0]["value"]
        ops.store_kv_cache(heads, heads, *caches, batch.slot_mapping)
        lengths = batch.query_start_loc_host, batch.kv_lens_host
        attended = ops.paged_attention(
            heads,
            *caches,
            batch.block_table,
            batch.query_start_loc,
            batch.kv_lens,
            *lengths,
            None,
            ops.AttentionOptions(0.25),
        )
        hidden = hidden + attended.flatten(1)
        if self.doubles_above is not None and batch.num_tokens > self.doubles_above:
            hidden = hidden * 2
        return hidden


class TestDriversOwn:
    """Parts that a driver can provide: rewrites, passes, kernels that prepare arguments, compilers."""

    def test_a_rewrite_a_pass_and_a_preparing_kernel(self, cpu: hal.Backend) -> None:
        calls: list[str] = []

        def relu_twice(x: Tensor) -> Tensor:
            return x.relu().relu()

        rewrite = Rewrite(
            "relu_once", relu_twice, torch.ops.aten.relu.default, lambda draw: [(draw.normal(3, 4),)], **ANY_ROWS
        )

        def count_nodes(graph: torch.fx.GraphModule) -> int:
            calls.append("pass")
            return len(graph.graph.nodes)

        def linear(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
            return x @ weight

        prepared = PreparingKernel(linear, {"weight": lambda weight: weight.t()})
        kernels = {"linear": prepared}
        backend = hal.Backend("own", cpu.device, kernels=kernels, rewrites=(rewrite, count_nodes))
        assert backend.pass_names == ("relu_once", "count_nodes")

        class Twice(Toy):
            def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
                hidden = self.embedding(batch.token_ids).relu().relu()
                return self.out(hidden) + self.out(hidden * 2)

        model = Twice()
        backend.activate()
        step = optimize_model(model, states_of(Toy()), StepSizes(3), backend, {})
        assert len(step.report["relu_once"].matches) == 1
        assert calls == ["pass"]
        step.hoist(backend)
        transposes = [node for node in step.traced.graph.graph.nodes if node.target is torch.ops.aten.t.default]
        assert len(transposes) == 1, "must be prepared once for both calls"
        run = step.lowered()
        for size in (2, 3, 9):
            batch = padding_of(model, StepShape.uniform(size))
            (found,) = run(*batch.tensors())
            torch.testing.assert_close(found, model(batch, []))
        cpu.activate()

    def test_a_preparation_with_a_constant_of_its_own(self, cpu: hal.Backend) -> None:
        shift = torch.arange(16.0)

        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return x * weight

        class Shifted(Toy):
            def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
                hidden = super().forward(batch, states)[:, :16] * torch.full((16,), 3.0)
                return ops.rms_norm(self.norms[0](hidden), self.norms[0].weight, 1e-6) + torch.tensor([5.0])

        kernel = PreparingKernel(rms_norm, {"weight": lambda weight: weight + shift * torch.tensor([2.0])})
        backend, model = hal.Backend("own", cpu.device, kernels={"rms_norm": kernel}), Shifted()
        backend.activate()
        step = optimize_model(model, states_of(Toy()), StepSizes(3), backend, {})
        step.hoist(backend)
        batch = padding_of(model, StepShape.uniform(3))
        (found,) = step.lowered()(*batch.tensors())
        torch.testing.assert_close(found, model(batch, []))
        cpu.activate()

    def test_a_rewrite_takes_the_place_of_the_operations_it_is_named_after(self, cpu: hal.Backend) -> None:
        """A driver uses this to refuse shapes that the kernel of a fused operation does not support."""
        fused = ops.operation("add_rms_norm")
        guarded = attrs.evolve(of_operation(fused), when=lambda x, residual, weight, eps: "not on Tuesdays")
        kernels = {"add_rms_norm": fused.body, "silu_and_mul": ops.operation("silu_and_mul").body}
        backend = hal.Backend("own", cpu.device, kernels=kernels, rewrites=(guarded,))
        assert backend.pass_names == ("add_rms_norm",)
        assert list(all_passes(backend)) == [guarded]
        backend.activate()
        report = optimize_model(Toy(), states_of(Toy()), StepSizes(3), backend, {}).report["add_rms_norm"]
        assert (len(report.matches), set(report.reasons)) == (0, {"not on Tuesdays"})
        cpu.activate()

    def test_two_passes_of_one_name_are_refused(self, cpu: hal.Backend) -> None:
        def made() -> Any:
            def fold(graph: torch.fx.GraphModule) -> None:
                """A configuration could not distinguish the two."""

            return fold

        with pytest.raises(DriverIncompatible, match="the driver own has more than one rewrite named fold"):
            hal.Backend("own", cpu.device, kernels={}, rewrites=(made(), made()))


def test_a_rewrite_that_only_nearly_matched_is_a_warning(cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    def halved(x: Tensor) -> Tensor:
        return x.relu() * 0.5

    def even(x: Tensor) -> str | None:
        return None if x.shape[-1] % 32 == 0 else f"the width {x.shape[-1]} is no multiple of 32"

    def samples(width: int) -> Any:
        return lambda draw: [(draw.normal(3, width),)]

    def silent(graph: torch.fx.GraphModule) -> None:
        """A pass without a report."""

    rewrite = Rewrite("halved", halved, lambda x: x.clamp(min=0) / 2, samples(32), even, samples(16), **ANY_ROWS)
    backend = hal.Backend("own", cpu.device, kernels={}, rewrites=(rewrite, silent))

    class Halved(Toy):
        def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
            return self.out(self.embedding(batch.token_ids).relu() * 0.5)

    backend.activate()
    with caplog.at_level("WARNING", "hal.compile"):
        step = optimize_model(Halved(), states_of(Toy()), StepSizes(3), backend, {})
        assert caplog.messages == [
            "Halved: the rewrite halved was applied nowhere: the width 16 is no multiple of 32 (1 times)"
        ]
        shown = {name: (applied, missed, why) for name, applied, missed, _, why in explanation._rewrites(step, backend)}
        assert shown["halved"] == ("0", "1", "1 x the width 16 is no multiple of 32")
        assert shown["silent"] == ("", "", "")
        caplog.clear()
        optimize_model(Toy(), states_of(Toy()), StepSizes(3), backend, {"halved": False})
        optimize_model(Toy(), states_of(Toy()), StepSizes(3), backend, {"silent": True})
        optimize_model(Toy(), states_of(Toy()), StepSizes(3), backend, {})
        assert not caplog.messages, "no matching or nearly matching site"
        optimize_model(Toy(), states_of(Toy()), StepSizes(3), backend, {"halved": True})
        (warning,) = caplog.messages
        assert warning.startswith("Toy: the rewrite halved is enabled but was applied nowhere: after the previous")
    cpu.activate()


def test_a_rewrite_that_only_some_layers_have_is_a_warning(
    cpu: hal.Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "hal.compile"):
        step = optimize_model(Toy(), states_of(Toy()), StepSizes(3), cpu, {})
        assert len(step.report["add_rms_norm"].matches) == 2
        assert not caplog.messages
        norms: list[Tensor] = []

        def forward(norm: RMSNorm, x: Tensor) -> Tensor:
            norms.append(x)
            if len(norms) == 2:  # The sum of one layer is read at half precision.
                x = x.half().float()
            return ops.rms_norm(x, norm.weight, norm.eps)

        monkeypatch.setattr(RMSNorm, "forward", forward)
        step = optimize_model(Toy(), states_of(Toy()), StepSizes(3), cpu, {})
    assert len(step.report["add_rms_norm"].matches) == 1
    (warning,) = caplog.messages
    assert warning.startswith("Toy: the rewrite add_rms_norm was applied at 1 sites, skipped at 1 matching sites: ")
    assert "changes the dtype" in warning


@thorough(EXHAUSTIVE, r"\[MistralForCausalLM")
@thorough(FAMILY, r"\[(?!Qwen3ForCausalLM-None)")
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("Qwen3ForCausalLM", None),
        ("LlamaForCausalLM", None),
        ("MistralForCausalLM", None),
        ("Qwen3ForCausalLM", "w8a8"),
        ("LlamaForCausalLM", "w8a8_dynamic"),
    ],
)
def test_no_rewrite_misses_a_place_in_hals_models(
    cpu: hal.Backend, family: str, scheme: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a driver with kernels for every fused operation, so that all derived rewrites are tried."""
    folder = decoder_checkpoint(tmp_path / "plain", family)
    if scheme is not None:
        text = "def read(path): return path" if scheme == "w8a8" else None
        folder = quantize_checkpoint(folder, tmp_path / "quantized", scheme, calibration=text).path
    kernels = {each.name: each.reference for each in ops.catalogue().values()}
    backend = hal.Backend("whole", cpu.device, kernels=kernels)
    backend.configure(hal.Config(backend="whole", dtype="bfloat16"))
    model = hal.load_model(folder, backend)
    backend.activate()
    states = states_of(model, 2, dtype=torch.bfloat16)
    for sizes in (StepSizes(None), StepSizes(2), StepSizes(1), StepSizes(2, queries=3)):
        with caplog.at_level("WARNING", "hal.compile"):
            step = optimize_model(model, states, sizes, backend, {})
        assert sum(len(each.matches) for each in step.report.passes) >= 2 * len(model.states)
        assert not caplog.messages
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
            for size in (1, 3):
                blocks = [[row + 1] for row in range(size)]
                prompt = runner.batch([[5, 6, 7]] * size, blocks)
                torch.testing.assert_close(
                    compiled(prompt, runner.states.layers), model(prompt, runner.states.layers), rtol=1e-5, atol=1e-5
                )
                step = runner.batch([[8]] * size, blocks, cached=[3] * size)
                torch.testing.assert_close(
                    compiled(step, runner.states.layers), model(step, runner.states.layers), rtol=1e-5, atol=1e-5
                )

    def test_rewrites_are_applied(self, cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
        def function(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            total = x + y
            return ops.rms_norm(total, weight, 1e-6) + total

        arguments = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
        with torch.inference_mode():
            found = torch.compile(function, backend="hal", fullgraph=True)(*arguments)
            torch.testing.assert_close(found, function(*arguments))
        assert "add_rms_norm: applied at 1 sites" in caplog.text
        caplog.clear()
        torch.compiler.reset()
        with torch.inference_mode():
            options = {"passes": {"add_rms_norm": False}}
            torch.compile(function, backend="hal", fullgraph=True, options=options)(*arguments)
        assert "add_rms_norm" not in caplog.text

    def test_another_backends_kernels_do_not_run_on(self, cpu: hal.Backend) -> None:
        def rms_norm(hidden: Tensor, by: Tensor, epsilon: float) -> Tensor:
            return hidden * 0 + by

        # With the kernel's parameter names, which can differ from the operation's.
        six = torch.full((4,), 6.0)
        kernel = PreparingKernel(rms_norm, {"by": lambda weight: weight + six})
        backend = hal.Backend("first", cpu.device, kernels={"rms_norm": kernel})
        backend.activate()
        compiled = torch.compile(lambda x, weight: ops.rms_norm(x, weight, 1e-6) * 2, backend="hal", fullgraph=True)
        arguments = torch.ones(2, 4), torch.ones(4)
        with torch.inference_mode():
            assert (ops.rms_norm(*arguments, 1e-6) == 7).all()
            assert (compiled(*arguments) == 14).all()
            cpu.activate()
            with pytest.raises(BackendNotActive, match="compiled for the backend first, but another"):
                compiled(*arguments)
            backend.activate()
            assert (compiled(*arguments) == 14).all()
            cpu.activate()
            torch.compiler.reset()
            assert (compiled(*arguments) < 3).all()

    def test_a_backends_own_function(self, cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
        arguments = torch.randn(2, 4), torch.randn(2, 4), torch.ones(4), 1e-6
        own = cpu.ops.add_rms_norm
        with torch.inference_mode():
            found = torch.compile(lambda *given: own(*given), backend="hal")(*arguments)
            torch.testing.assert_close(found, ops.add_rms_norm(*arguments))

    def test_an_unknown_option(self, cpu: hal.Backend) -> None:
        with pytest.raises(Exception, match="the compiler hal has no option 'pases'"):
            torch.compile(lambda x: x + 1, backend="hal", options={"pases": {}})(torch.ones(3))

    def test_a_model_that_breaks_the_graph_is_told_where(self, cpu: hal.Backend) -> None:
        def function(x: Tensor) -> Tensor:
            return x * x.max().item() if x.max().item() > 1 else x

        with pytest.raises(Exception, match=r"test_compiling\.py"):
            torch.compile(function, backend="hal", fullgraph=True)(torch.ones(3))


def decoder_checkpoint(folder: Path, family: str, layers: int = 3) -> Path:
    """Return a small random decoder of a family, without biases."""
    random_checkpoint(folder, num_hidden_layers=layers, dtype="bfloat16")
    if family == "Qwen3ForCausalLM":
        return folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"architectures": [family]}
    weights = random_weights(config, seed=3)
    write_weights(folder, {name: each for name, each in weights.items() if "_norm." not in name})
    write_json(folder / "config.json", config)
    return folder
