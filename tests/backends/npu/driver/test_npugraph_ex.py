"""Tests for torch_npu's compiler npugraph_ex on the emulated CANN: its logits are those of eager steps."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import emulated_cann
import pytest
import torch
from click.testing import CliRunner
from hal.backends.npu.npugraph_ex.compiled_code import CodeCache
from helpers.checkpoints import random_checkpoint
from helpers.pieces import eagerly
from helpers.thorough import AGAIN, EXHAUSTIVE, MODE, thorough
from torch import Tensor, fx
from torch._functorch import config as functorch_config

import hal
from hal.cli import main
from hal.errors import CaptureError, CompileError, ConfigError, DeviceError, GraphError, HostValueError
from hal.execution.capture.full_graph import FullGraphForm
from hal.step import Batch, StaticBatch, StepShape

pytestmark = pytest.mark.usefixtures("one_thread")

Opened = Callable[..., hal.Backend]
ATTENTION = "FusedInferAttentionScoreV3"
SIZES = [2, 4]
SMALL = {"head_dim": 128, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compile cache that most tests share."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of one layer with random weights."""
    return random_checkpoint(tmp_path_factory.mktemp("small") / "qwen3", **SMALL, num_hidden_layers=1)


@pytest.fixture
def opened(npu: Opened, folder: Path) -> Opened:
    def compiled(
        options: dict[str, Any] | None = None, *, dtype: str = "float16", num_tokens: int = 2048, **compilation: Any
    ) -> hal.Backend:
        chosen = {"compiler": "npugraph_ex", "capture_sizes": SIZES, "cache_dir": str(folder), **compilation}
        return npu(dtype=dtype, cache={"num_tokens": num_tokens}, compilation=chosen, options=options or {})

    return compiled


def prefilled(runner: hal.Runner, lengths: Sequence[int]) -> list[list[int]]:
    """Fill the cache with a sequence of each length; return their blocks."""
    blocks = [[1 + 3 * row + block for block in range(3)] for row in range(len(lengths))]
    runner.step(runner.batch([[7 + row] * length for row, length in enumerate(lengths)], blocks))
    return blocks


def check(runner: hal.Runner, seed: int = 0, steps: int = 2) -> None:
    """Check steps on some of four sequences, in any order, each with another length, against eager steps.

    Padding and fused kernels change the rounding.
    """
    draw = random.Random(seed)
    longest = [draw.randint(2, 300) for _ in range(4)]
    blocks = prefilled(runner, longest)
    for number in range(steps):
        rows = draw.sample(range(4), 1 + number % 4)
        batch = runner.batch(
            [[5 + row] for row in rows],
            [blocks[row] for row in rows],
            cached=[draw.randint(1, longest[row]) for row in rows],
        )
        with runner.backend.translating_errors():
            found = runner.step(batch).logits.cpu()
            same(found, eagerly(runner, batch).cpu(), f"seed {seed}, step {number}")


def same(found: Tensor, expected: Tensor, where: str = "") -> None:
    near = 3e-2 if found.dtype == torch.float16 else 1e-1
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=near, msg=lambda message: f"{where}: {message}")


def eager_logits(model: Any, backend: hal.Backend) -> list[Tensor]:
    """Return the logits of a prompt from the model's Python code."""
    states = backend.allocate(hal.step.StateSpec(tuple(model.states), next(model.parameters()).dtype, 4, 128))
    batch = hal.step.Batch.build([list(range(5, 60))], [[1]], block_size=128).to(backend.device.torch)
    with torch.inference_mode():
        return [model.logits(model(batch, states.layers)).cpu()]


def loaded(trained: Path, backend: hal.Backend) -> hal.Runner:
    return hal.Runner(hal.load_model(trained, backend), backend)


class TestTokens:
    @thorough(MODE, r"\[float16-\{'(npugraph_ex|nz_w)")
    @pytest.mark.parametrize(
        ("dtype", "options"),
        [
            ("float16", {"attention": "atb"}),
            ("bfloat16", {"nz_cache": True}),
            ("float16", {"nz_weights": True}),
            ("float16", {"npugraph_ex": {"pattern_fusion_pass": False, "capture_error_mode": "global"}}),
        ],
        ids=str,
    )
    def test_options(self, opened: Opened, small: Path, dtype: str, options: dict[str, Any]) -> None:
        runner = loaded(small, opened(options, dtype=dtype, capture_sizes=[2, 4]))
        check(runner, seed=1, steps=4)

    def test_a_sliding_window(self, opened: Opened, tmp_path: Path) -> None:
        """The kernel holds the mask as a tensor, which becomes an input of the graph."""
        window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
        path = random_checkpoint(tmp_path / "qwen3", **SMALL, **window)
        check(loaded(path, opened(capture_sizes=[2])), seed=3)

    @thorough(MODE, r"piecewise|\[(float16-32-graph|bfloat16-64-npugraph_ex)")
    @pytest.mark.parametrize("compiler", ["graph", "piecewise", "npugraph_ex"])
    @pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("float16", 32)])
    def test_softcaps_and_sinks(self, opened: Opened, tmp_path: Path, compiler: str, dtype: str, head_dim: int) -> None:
        """Sinks in the softmax or after it, a softcap, both, and a window: one in each layer."""
        path = random_checkpoint(tmp_path / "qwen3", head_dim=head_dim, num_hidden_layers=4)
        own = {} if compiler == "npugraph_ex" else {"cache_dir": None}
        backend = opened(dtype=dtype, compiler=compiler, capture_sizes=[2, 4], **own)
        model: Any = hal.load_model(path, backend)
        layers = ((True, {}), (False, {"softcap": 1.0}), (True, {"softcap": 2.0}), (True, {"window": 20}))
        plain = [each.clone() for each in eager_logits(model, backend)]
        for layer, (sinks, options) in zip(model.model.layers, layers, strict=True):
            inner = layer.self_attn
            inner.attention.options = attrs.evolve(inner.attention.options, **options)
            if sinks:
                values = torch.linspace(-1.0, 2.0, inner.qkv_proj.sizes[0] // head_dim)
                inner.sinks = torch.nn.Parameter(values.to(inner.o_proj.weight), requires_grad=False)
        assert not torch.allclose(eager_logits(model, backend)[0], plain[0], atol=0.1), "the options have no effect"
        check(hal.Runner(model, backend), seed=4, steps=4)

    @thorough(MODE)
    @pytest.mark.parametrize("compiler", ["graph", "npugraph_ex"])
    def test_a_window_that_is_packed(
        self, opened: Opened, tmp_path: Path, compiler: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In bfloat16 with heads of 128, captured for more sequences than the cache has blocks.

        Lengths that need more blocks are refused before anything is launched, and the runner runs such a step eagerly.
        """
        window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}
        path = random_checkpoint(tmp_path / "qwen3", head_dim=128, num_hidden_layers=1, **window)
        own = {} if compiler == "npugraph_ex" else {"cache_dir": None}
        runner = loaded(path, opened(dtype="bfloat16", num_tokens=384, compiler=compiler, capture_sizes=[8], **own))
        blocks = [[1, 2], [1, 3]]
        runner.step(runner.batch([[5] * 130], blocks[:1]))
        runner.step(runner.batch([[9]], blocks[1:], cached=[128]))
        alone = runner.batch([[7]], blocks[:1], cached=[130])
        same(runner.step(alone).logits.cpu(), eagerly(runner, alone).cpu())
        both = runner.batch([[7], [7]], [blocks[0], [1, 2]], cached=[130, 200])
        assert runner.spec.num_blocks == 4
        same(runner.step(both).logits.cpu(), eagerly(runner, both).cpu())
        three = runner.batch([[7], [7], [7]], [*blocks, [1, 2]], cached=[130, 129, 200])
        form = runner.forms["decode"]
        assert isinstance(form, FullGraphForm)
        bucket = form.bucket_for(three.shape)
        assert bucket is not None
        bucket.static.fill(three)
        graph, host_values = bucket.graphs[0], bucket.static.host_values(three)
        with (
            emulated_cann.trace() as trace,
            pytest.raises(HostValueError, match=r"captured over 4 blocks, .* counting shared"),
        ):
            graph.replay(**{name: each for name, each in host_values.items() if name in graph.host_values})
        assert not trace.ran(kind="graph")
        with emulated_cann.trace() as trace:
            for _ in range(2):
                same(runner.step(three).logits.cpu(), eagerly(runner, three).cpu())
        assert not trace.ran(kind="graph")
        told = [each.getMessage() for each in caplog.records if "runs uncaptured" in each.getMessage()]
        assert len(told) == 1
        assert told[0].startswith("a step of 3 sequences runs uncaptured: its attention was captured over 4 blocks")
        same(runner.step(alone).logits.cpu(), eagerly(runner, alone).cpu())


class TestTrace:
    def test_one_capture_for_twenty_sets_of_lengths(self, opened: Opened, small: Path) -> None:
        """Growing, shrinking and permuted lengths; each result is that of an eager step."""
        backend = opened()
        model = hal.load_model(small, backend)
        with emulated_cann.trace() as trace:
            runner = hal.Runner(model, backend)
        assert trace.counts(phase="capture")[ATTENTION] == len(SIZES) * len(model.states)
        blocks = prefilled(runner, [300] * 4)
        draw = random.Random(11)
        sets = [[1 + 14 * step + row for row in range(4)] for step in range(8)]
        sets += [[280 - 30 * step - row for row in range(4)] for step in range(6)]
        sets += [draw.sample([1, 127, 128, 257], 4) for _ in range(6)]
        batches = [runner.batch([[9], [8], [7], [6]], blocks, cached=lengths) for lengths in sets]
        with emulated_cann.trace() as trace:
            for lengths, batch in zip(sets, batches, strict=True):
                found = runner.step(batch).logits.cpu()
                assert torch.equal(found, eagerly(runner, batch).cpu()), lengths
        assert not trace.ran(phase="capture")
        assert len(trace.ran(kind="graph")) == len(sets) == 20
        assert trace.counts(phase="replay")[ATTENTION] == 20 * len(model.states)

    @thorough(MODE, r"\[\{'")
    @pytest.mark.parametrize("options", [{}, {"nz_cache": True}], ids=str)
    def test_it_launches_what_the_compiler_graph_does(
        self, opened: Opened, small: Path, options: dict[str, Any]
    ) -> None:
        counts = []
        for compiler in ("graph", "npugraph_ex"):
            own = {} if compiler == "npugraph_ex" else {"cache_dir": None}
            runner = loaded(small, opened(options, compiler=compiler, capture_sizes=[4], **own))
            batch = runner.batch([[1]] * 4, prefilled(runner, [8] * 4), cached=[8] * 4)
            runner.step(batch)
            torch.npu.synchronize()
            with emulated_cann.trace() as trace:
                runner.step(batch)
            counts.append(trace.counts(phase="replay"))
        graph, ex = counts
        for each in counts:  # torch_npu's compiler reuses memory in place where it can.
            each["Sin"] += each.pop("InplaceSin", 0)
        assert ex == graph
        assert ex["Matmul"] == 4 * len(runner.model.states) + 1


class TestCache:
    def test_a_second_start_compiles_nothing(
        self, opened: Opened, small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "hal.npu")
        for taken in (0, 2):
            backend = opened(capture_sizes=[2, 4], cache_dir=str(tmp_path))
            check(loaded(small, backend))
            said = [each for each in caplog.messages if each.startswith("npugraph_ex compiled the steps")]
            assert said[-1].endswith(f"{taken} were cached")
        assert len(list(tmp_path.glob("npugraph_ex/*/step.py"))) == 2

    @thorough(MODE, r"\[cut off")
    @pytest.mark.parametrize("damage", ["cut off", "other code"])
    def test_a_broken_one_is_made_anew(
        self, opened: Opened, small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
    ) -> None:
        def compiled() -> hal.Runner:
            return loaded(small, opened(capture_sizes=[2], cache_dir=str(tmp_path)))

        compiled()
        (file,) = tmp_path.glob("npugraph_ex/*/step.py")
        whole = file.read_text()
        file.write_text(whole[: len(whole) // 2] if damage == "cut off" else whole.replace("npu_swiglu", "abs"))
        check(compiled())
        assert f"{file} is damaged; hal recreates it" in caplog.text
        caplog.clear()
        check(compiled())
        assert "damaged" not in caplog.text

    @thorough(MODE, r"\[file")
    @pytest.mark.parametrize("opened_to", ["file", "folder"])
    def test_one_that_others_may_write_is_made_anew(
        self, opened: Opened, small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, opened_to: str
    ) -> None:
        """A cache entry is code that would run here."""
        loaded(small, opened(capture_sizes=[2], cache_dir=str(tmp_path)))
        (file,) = tmp_path.glob("npugraph_ex/*/step.py")
        planted = "raise SystemExit('planted')"
        contents = json.loads((file.parent / "contents.json").read_text())
        contents["files"][file.name] = hashlib.sha256(planted.encode()).hexdigest()
        (file.parent / "contents.json").write_text(json.dumps(contents))
        file.write_text(planted)
        at_fault = file if opened_to == "file" else file.parent
        at_fault.chmod(0o777)
        check(loaded(small, opened(capture_sizes=[2], cache_dir=str(tmp_path))))
        assert f"another user could have written {at_fault}; hal recreates it" in caplog.text
        assert [stat.S_IMODE(each.stat().st_mode) for each in (file.parent, file)] == [0o700, 0o600]
        assert planted not in file.read_text()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the owner of a file")
    def test_nothing_is_kept_in_anothers_folder(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = tmp_path / "npugraph_ex"
        folder.mkdir()
        os.chown(folder, 12345, 12345)
        assert CodeCache(str(tmp_path), {"capture_error_mode": "thread_local"}).compile(tiny_step())
        assert f"the cache folder {folder} belongs to user" in caplog.text
        assert "set compilation.cache_dir to a folder that only you can write to" in caplog.text
        assert not list(folder.iterdir())

    def test_code_that_cannot_be_kept_runs(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "npugraph_ex").touch()
        assert CodeCache(str(tmp_path), {"capture_error_mode": "thread_local"}).compile(tiny_step())
        assert f"the compile cache {tmp_path / 'npugraph_ex'} cannot be written" in caplog.text
        assert [each.name for each in tmp_path.iterdir()] == ["npugraph_ex"]

    def test_static_kernels_want_a_folder_of_their_own(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        cache = CodeCache(str(tmp_path / "file"), {"static_kernel_compile": True})
        with pytest.raises(CompileError, match="static kernels cannot be stored in") as caught:
            cache.compile(tiny_step())
        assert "compilation.cache_dir" in caught.value.remedy

    def test_options_that_are_functions_are_not_kept(self, tmp_path: Path) -> None:
        seen: list[int] = []

        def look(graph: fx.GraphModule, inputs: object, config: object) -> None:
            seen.append(len(graph.graph.nodes))

        for _ in range(2):
            CodeCache(str(tmp_path), {"post_grad_custom_pre_pass": look}).compile(tiny_step())
        assert len(seen) == 2
        assert not list(tmp_path.glob("npugraph_ex/*"))

    def test_static_kernels_are_kept_with_the_code(self, tmp_path: Path) -> None:
        """On hardware torch_npu compiles static kernels when the code first runs.

        Here only the arguments of that call are visible.
        """
        from hal.backends.npu.npugraph_ex.native_nodes import LENGTHS  # noqa: F401  (imports torch_npu's part)

        cache = CodeCache(str(tmp_path), {"static_kernel_compile": True, "capture_error_mode": "thread_local"})
        names = cache.compile(tiny_step())
        told = names["compile_configs"]
        assert told["static_kernel_compile"] is True
        assert Path(told["static_kernel_compile.compile_cache_dir"]).parent == tmp_path / "npugraph_ex"
        assert told["static_kernel_compile.use_cache_compile"] is True


def tiny_step() -> Any:
    """Return the native step of a model that sums the rows of its embedding."""
    from hal.backends.npu.npugraph_ex.native_nodes import native_step

    weight = torch.ones(8, 16, dtype=torch.float16, device="npu")

    def step(token_ids: Tensor, *rest: Any) -> tuple[Tensor]:
        return (rest[-1][token_ids].cumsum(-1),)

    return native_step(step, [weight], two_sequences())


def two_sequences() -> StaticBatch:
    return StaticBatch(Batch, StepShape.uniform(2), max_blocks=1, block_size=128, device=torch.device("npu", 0))


class TestErrors:
    @thorough(MODE, r"\[raise")
    @pytest.mark.parametrize("policy", ["raise", "eager"])
    def test_a_failing_compile(
        self, opened: Opened, small: Path, caplog: pytest.LogCaptureFixture, policy: str
    ) -> None:
        def broken(graph: fx.GraphModule, inputs: object, config: object) -> None:
            raise ValueError("this pass is broken")

        backend = opened({"npugraph_ex": {"post_grad_custom_pre_pass": broken}}, on_capture_error=policy)
        model = hal.load_model(small, backend)
        if policy == "raise":
            with pytest.raises(CompileError, match=r'npugraph_ex failed: this pass is broken\n.*"graph"'):
                hal.Runner(model, backend)
            return
        runner = hal.Runner(model, backend)
        for size in SIZES:
            told = f"decode batches of {size} sequences run in a larger bucket or uncaptured: npugraph_ex failed"
            assert f"{told}: this pass is broken" in caplog.text
        check(runner, steps=4)
        assert caplog.text.count("runs uncaptured: no size was captured") == 1

    @thorough(MODE, r"\[raise")
    @pytest.mark.parametrize("policy", ["raise", "eager"])
    def test_a_failing_capture(
        self, opened: Opened, small: Path, caplog: pytest.LogCaptureFixture, policy: str
    ) -> None:
        backend = opened(on_capture_error=policy)
        model = hal.load_model(small, backend)
        # torch_npu begins two captures for each graph; the first is empty.
        with emulated_cann.faults.streams(first=2):
            if policy == "raise":
                with pytest.raises(CaptureError, match=r"no stream left for it \(207008"):
                    hal.Runner(model, backend)
            else:
                check(hal.Runner(model, backend), steps=4)
                assert "decode batches of 4 sequences run in a larger bucket or uncaptured" in caplog.text
        check(hal.Runner(model, opened()), steps=4)

    def test_lengths_that_a_kernel_reads_as_numbers(self) -> None:
        """Such a graph would be right for the captured lengths only."""
        from hal.backends.npu.npugraph_ex.native_nodes import native_step

        def reads(token_ids: Tensor, *rest: Any) -> tuple[Tensor]:
            return (token_ids + rest[6].tolist()[0],)

        with pytest.raises(
            CompileError, match=r"the lengths of only 0 of the \d operations that read them \(aten\.add"
        ):
            CodeCache(None, {}).compile(native_step(reads, [], two_sequences()))

    @thorough(MODE, r"\[(Matmul|SwiGlu)")
    @thorough(EXHAUSTIVE, r"\[SwiGlu")
    @pytest.mark.parametrize("kernel", [ATTENTION, "Matmul", "SwiGlu"])
    def test_a_kernel_timeout(self, opened: Opened, small: Path, kernel: str) -> None:
        runner = loaded(small, opened())
        for _ in range(2):
            blocks = prefilled(runner, [20, 30])
            batch = runner.batch([[1], [2]], blocks, cached=[20, 30])
            with (
                emulated_cann.faults.hang(kernel, 0.05),
                pytest.raises(DeviceError, match="507014"),
                runner.backend.translating_errors(),
            ):
                runner.step(batch).logits.cpu()
            check(runner, steps=4)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"static_kernels": True}, "static_kernels requires CANN's op_compiler, which the emulated CANN lacks"),
            ({"npugraph_ex": {"patern_fusion_pass": False}}, r"does not have; did you mean .*pattern_fusion_pass"),
            ({"npugraph_ex": {"capture_limit": "many"}}, "sets 'capture_limit' to 'many': Please set integer type"),
            ({"npugraph_ex": {"clone_input": True}}, "sets 'clone_input'\n.*hal sets it"),
            ({"npugraph_ex": {"force_eager": True}}, 'the compiler "eager"'),
            ({"npugraph_ex": {"super_kernel_optimize": True}}, "which the emulated CANN does not support"),
            ({"device": 1}, "has run it on NPU 0, .*one device per process"),
        ],
        ids=str,
    )
    def test_what_cannot_be_had(self, opened: Opened, small: Path, options: dict[str, Any], message: str) -> None:
        if "device" in options:
            loaded(small, opened(capture_sizes=[2]))
        backend = opened(options, capture_sizes=[2])
        model = hal.load_model(small, backend)
        with pytest.raises(ConfigError, match=message):
            hal.Runner(model, backend)

    def test_debug_names_a_tensor_that_was_replaced(self, opened: Opened, small: Path) -> None:
        runner = loaded(small, opened(debug=True, capture_sizes=[2]))
        check(runner)
        blocks = prefilled(runner, [20, 30])
        norm = runner.model.get_parameter("model.norm.weight")
        norm.data = norm.data.clone()
        with pytest.raises(GraphError, match=r"model\.norm\.weight has another address"):
            runner.step(runner.batch([[1], [2]], blocks, cached=[20, 30]))


def test_the_process_is_left_as_it_was(opened: Opened, small: Path) -> None:
    """torch_npu's package installs signal handlers at import, and needs another setting of torch under CI=1."""
    aliasing = functorch_config.error_on_custom_op_aliasing
    backend = opened(capture_sizes=[2])
    stream = torch.npu.current_stream()
    check(loaded(small, backend))
    assert torch.npu.current_stream() == stream
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert functorch_config.error_on_custom_op_aliasing == aliasing


@thorough(AGAIN)
def test_explain_shows_what_came_of_it(small: Path, folder: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    config = json.dumps({"compiler": "npugraph_ex", "cache_dir": str(folder), "max_capture_size": 4})
    arguments = ["--backend", "npu", "--dtype", "float16", "--compilation-config", config, "--batch-size", "3"]
    result = CliRunner().invoke(main, ["explain", str(small), *arguments, "--dump", str(dump)])
    assert result.exit_code == 0, result.output
    calls = {
        row[0]: int(row[1])
        for line in result.stdout.splitlines()
        if len(row := line.split()) == 3 and row[1].isdecimal()
    }
    assert "hal.ops.kernels.torch_kernels.linear" in result.stdout
    native, compiled = calls["native"], calls["npugraph_ex"]
    assert 0 < compiled < native, "at least unused results are removed"
    assert [each.name for each in sorted(dump.iterdir())] == [
        "0-trace.py",
        "1-rewrite.py",
        "2-native.py",
        "3-npugraph_ex.py",
    ]
    code = (dump / "3-npugraph_ex.py").read_text(encoding="utf-8")
    before = (dump / "2-native.py").read_text(encoding="utf-8")
    for text in (before, code):
        assert text.count("npu_fused_infer_attention_score") >= 1
    compile(code, "dump", "exec")
    assert len(re.findall(r"\n    \w+ = torch\.ops\.", code)) < compiled
    hal.open("cpu")
