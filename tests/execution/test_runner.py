"""Tests for the runner: buckets, failed captures, checks of batches, and caches of another layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import hal
from hal import ops
from hal.errors import BatchError, CheckpointError, CompileError, ConfigError, DriverIncompatible, ModelError
from hal.execution.capture.capture_sizes import bucket_for, capture_sizes
from hal.execution.capture.captured_form import CapturedForm
from hal.nn import CausalLM, Embedding, WeightUse
from hal.nn.model import LayerState
from hal.step import Batch
from hal.step.state import key_value_states


class Toy(CausalLM):
    """A model without attention, whose forward may do what a graph cannot capture."""

    vocab_size, max_length, states = 11, 64, (key_value_states(1, 8),)

    def __init__(self, *, reads_above: int | None = None) -> None:
        super().__init__()
        self.embedding = Embedding(self.vocab_size, 8)
        torch.nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(0))
        self.reads_above = reads_above

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Toy:
        return cls()

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        if self.reads_above is not None and batch.num_sequences > self.reads_above:
            hidden = hidden * float(hidden.abs().max())
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.as_linear(hidden)


class ToyOfTokens(Toy):
    """A model that only uses tokens."""

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        return self.embedding(batch.token_ids)


class ToyWithWindow(Toy):
    """A model that reads the last tokens of a sequence only."""

    states = (key_value_states(1, 8, window=8),)


def opened(**compilation: Any) -> hal.Backend:
    return hal.open({"backend": "cpu", "compilation": {"compiler": "graph", **compilation}})


@torch.inference_mode()
def eagerly(runner: hal.Runner, batch: Batch) -> Tensor:
    """Return the logits of the last tokens, by the model's own Python code."""
    hidden: Tensor = runner.model(batch, runner.states.layers)
    return runner.model.logits(hidden[batch.query_start_loc[1:] - 1])


def decode_batch(runner: hal.Runner, size: int) -> Batch:
    return runner.batch([[row % 11] for row in range(size)], [[row + 1] for row in range(size)])


def test_capture_sizes_follow_the_config() -> None:
    def sizes(**config: Any) -> list[int]:
        return capture_sizes(hal.CompilationConfig(**config), (1, 2, 4, 8, 16, 32))

    assert sizes() == [1, 2, 4, 8, 16, 32]
    assert sizes(max_capture_size=5) == [1, 2, 4]
    assert sizes(capture_sizes=(9, 3, 3)) == [3, 9]
    assert sizes(capture_sizes=(9, 3), max_capture_size=8) == [3]
    with pytest.raises(ConfigError, match="leave nothing to capture"):
        sizes(capture_sizes=(8,), max_capture_size=4)
    assert [bucket_for(n, [2, 4]) for n in range(1, 6)] == [2, 2, 4, 4, None]


def test_a_model_that_cannot_be_traced_raises_with_the_place() -> None:
    with pytest.raises(CompileError, match=r"Toy cannot be traced, in forward at .*test_runner\.py:\d+: "):
        hal.Runner(Toy(reads_above=2), opened(capture_sizes=[2, 4]))


def test_or_runs_those_sizes_eagerly_if_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    runner = hal.Runner(Toy(reads_above=2), opened(capture_sizes=[2, 4], on_capture_error="eager"))
    assert "decode batches of 4 sequences run in a larger bucket or uncaptured" in caplog.text
    for size in (1, 2, 3, 4):
        batch = decode_batch(runner, size)
        torch.testing.assert_close(runner.step(batch).logits, eagerly(runner, batch))


@pytest.mark.parametrize(
    ("tokens", "blocks", "cached", "message"),
    [
        ([[11]], [[1]], None, "token id 11, out of the range 0 to 10"),
        ([[1]], [[0]], None, "block 0, out of the range 1 to"),
        ([[1] * 65], [[1, 2]], None, "65 tokens long; the model takes 64"),
        ([[1]], [[1]], [64], "65 tokens long"),
        ([[1], []], [[1], [2]], None, "sequence 1 has no new token"),
        ([], [], None, "0 token lists"),
        ([[1]], [[1], [2]], None, "1 token lists, 2 block lists"),
        ([[1]], [[]], None, "its 0 blocks hold 0"),
        ([[1]], [[1]], [-1], "-1 tokens cached"),
        ([[1], [2]], [[1], [2]], [0], "1 cached lengths"),
        ([[1.5]], [[1]], None, r"token id \[1.5\], not integers"),
        (["ab"], [[1]], None, "token id 'ab', not integers"),
        ([5, 6], [[1], [2]], None, "token id 5, not integers"),
        ([[5]], [1], None, "block 1, not integers"),
        (None, [[1]], None, "token_ids is None"),
        ([[1]], 1, None, "block_ids is 1"),
        ([[1]], [[1]], 3, "cached is 3"),
        ([torch.tensor([1, 2])], [[1]], None, "sequence 0 is a tensor"),
        ([[1]], [[1.0]], None, r"block \[1.0\], not integers"),
        ([[1]], [[1]], [1.0], r"\[1.0\] tokens cached, not integers"),
        ([[1], [2]], [[1], [2, 3, 2]], None, "sequence 1 has block 2 twice"),
    ],
)
def test_wrong_batches_are_refused(
    cpu: hal.Backend, tokens: list[list[int]], blocks: list[list[int]], cached: list[int] | None, message: str
) -> None:
    runner = hal.Runner(Toy(), cpu)
    with pytest.raises(BatchError, match=message):
        runner.batch(tokens, blocks, cached=cached)


@pytest.mark.parametrize("kind", ["numpy", "tensor"])
def test_lengths_of_any_kind_are_checked(cpu: hal.Backend, kind: str) -> None:
    runner = hal.Runner(Toy(), cpu)
    cached: Any = [pytest.importorskip("numpy").int64(64)] if kind == "numpy" else torch.tensor([64])
    with pytest.raises(BatchError, match="65 tokens long; the model takes 64"):
        runner.batch([[1]], [[1]], cached=cached)


@pytest.mark.parametrize(
    ("blocks", "cached", "message"),
    [
        ([-3], 0, "block -3"),
        ([2**31], 0, "block 2147483648"),
        ([1], 2**31 - 2, "2147483648 tokens long"),
    ],
)
def test_batches_that_no_cache_can_have(blocks: list[Any], cached: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        hal.step.Batch.build([[1, 2]], [blocks], block_size=16, cached=[cached])


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_blocks_hold_a_token_or_more(size: Any) -> None:
    with pytest.raises(BatchError, match=f"block_size is {size}"):
        hal.step.Batch.build([[1, 2]], [[1]], block_size=size)


def test_any_integers_will_do() -> None:
    numpy = pytest.importorskip("numpy", reason="needs numpy")
    for tokens in ([[1, 2]], [numpy.array([1, 2])], numpy.array([[1, 2]]), [[numpy.int64(1), 2]]):
        batch = hal.step.Batch.build(tokens, [numpy.array([3])], block_size=16, cached=numpy.array([1]))
        assert batch.slot_mapping.tolist() == [49, 50]
        assert batch.token_ids.tolist() == [1, 2]


class Meeting(Toy):
    """A model that calls a function during each of its traces."""

    meet: Callable[[], Any]

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        if isinstance(batch.token_ids, FakeTensor):
            self.meet()
        return super().forward(batch, states)


def test_another_thread_runs_the_model_while_it_is_traced() -> None:
    model, eager, graphs = Meeting(), hal.open("cpu"), opened(capture_sizes=[4])
    eager.activate()
    serving = hal.Runner(model, eager)
    batch = decode_batch(serving, 3)
    expected, found = serving.step(batch).logits.clone(), []

    def step() -> Tensor:
        return eagerly(serving, batch)

    with ThreadPoolExecutor(1) as threads:
        model.meet = lambda: found.append(threads.submit(step).result())
        graphs.activate()
        made = hal.Runner(model, graphs)
    assert found
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    torch.testing.assert_close(made.step(batch).logits, expected)


@pytest.mark.parametrize(
    "config",
    [
        {"compiler": "eager"},
        {"compiler": "graph", "capture_sizes": [4]},
        {"compiler": "piecewise_eager", "splitting_ops": ["embedding"]},
    ],
    ids=lambda config: config["compiler"],
)
@pytest.mark.parametrize("wrong", [-1, 1, 3])
def test_rows_of_logits_outside_the_step_are_refused(config: dict[str, Any], wrong: int) -> None:
    """In every mode: with padding, the rows would be those of padding."""
    runner = hal.Runner(ToyOfTokens(), hal.open({"backend": "cpu", "compilation": config}))
    with pytest.raises(BatchError, match=f"rows has {wrong}, out of the range 0 to 0"):
        runner.step(decode_batch(runner, 1), torch.tensor([wrong]))


class TestModelsThatForget:
    """Requirements on models are checked where it costs nothing per step."""

    class LastRow(Toy):
        def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
            return self.embedding(batch.token_ids)[-1:]

    class Nothing(Toy):
        forward = CausalLM.forward

    def test_a_row_for_each_token(self, cpu: hal.Backend) -> None:
        runner = hal.Runner(self.LastRow(), cpu)
        with pytest.raises(ModelError, match=r"LastRow.forward returned hidden states of \[1, 8\], not \[3, width\]"):
            runner.step(runner.batch([[1, 2, 3]], [[1]]))

    def test_a_row_for_each_token_at_markers(self) -> None:
        config = {"compiler": "piecewise_eager", "splitting_ops": ["embedding"]}
        with pytest.raises(ModelError, match=r"LastRow.forward returned hidden states of \[1, 8\]"):
            hal.Runner(self.LastRow(), hal.open({"backend": "cpu", "compilation": config}))

    def test_the_vocabulary(self, cpu: hal.Backend) -> None:
        model = Toy()
        model.vocab_size = 12
        runner = hal.Runner(model, cpu)
        with pytest.raises(ModelError, match=r"Toy.logits returned \[2, 11\], not logits of \[2, 12\]"):
            runner.step(decode_batch(runner, 2))

    def test_to_compute_anything(self, cpu: hal.Backend) -> None:
        runner = hal.Runner(self.Nothing(), cpu)
        with pytest.raises(ModelError, match=r"Nothing.forward returned NoneType"):
            runner.step(decode_batch(runner, 2))


def test_buckets_share_the_memory_of_the_largest() -> None:
    def pool(*sizes: int) -> Any:
        backend = opened(capture_sizes=sizes)
        runner = hal.Runner(Toy(), backend)
        assert len(backend.captured_graphs) == len(sizes)
        (shared,) = {id(graph.pool): graph.pool for graph in backend.captured_graphs}.values()
        assert runner.forms
        return shared

    assert pool(1, 2, 4, 8, 16, 32).nbytes == pool(32).nbytes > 0


def test_a_model_on_another_device_is_refused() -> None:
    model = Toy().to("meta")
    with pytest.raises(ConfigError, match="the model is on meta, and the backend cpu on cpu"):
        hal.Runner(model, opened())


@pytest.mark.parametrize("size", [(1 << 16) + 1, 2**40, 2**70])
def test_a_size_that_nothing_could_hold_is_refused(size: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"capture_sizes must be at most 65536, not {size}|at most 64 bits, found int {size}"
    ):
        hal.Runner(Toy(), opened(capture_sizes=[2, size]))


def test_a_cache_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal.device.host_device.host_memory", lambda: (1 << 30, 1 << 30))
    backend = hal.open({"backend": "cpu", "cache": {"num_tokens": (1 << 31) - 1}})
    with pytest.raises(ConfigError, match=r"MiB free\n.*lower cache\.num_tokens"):
        hal.Runner(Toy(), backend)


def test_head_dims_and_the_model_class(cpu: hal.Backend, trained: Path) -> None:
    narrow = hal.Backend("narrow", cpu.device, kernels={}, limits=hal.vendor.Limits(head_dims=(64,)))
    with pytest.raises(ConfigError, match="no attention kernel for head_dim 128"):
        hal.load_model(trained, narrow)
    with pytest.raises(CheckpointError, match="do not fit"):
        hal.load_model(trained, cpu, model_class=Toy)


def test_progress_reaches_the_whole(cpu: hal.Backend, trained: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = hal.load_model(trained, cpu, progress=lambda done, total: seen.append((done, total)))
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_block_table_wider_than_captured_runs_uncaptured_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    runner = hal.Runner(ToyOfTokens(), opened(capture_sizes=[1]))
    for blocks in ([1, 2], [1, 2], [1, 2, 3]):
        wide = runner.batch([[1]], [blocks])
        torch.testing.assert_close(runner.step(wide).logits, eagerly(runner, wide))
    (said,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert said == "a step of 1 sequence runs uncaptured: its block table has more columns than the 1 captured"


def test_capture_sizes_and_tables_of_an_engines_largest_batch() -> None:
    runner = hal.Runner(Toy(), opened(), max_sequences=3, max_length=64)
    form = runner.forms["decode"]
    assert isinstance(form, CapturedForm)
    assert [shape.sequences for shape in form.shapes] == [1, 2, 4]
    assert form.context.max_blocks == runner.spec.blocks_for(64)


@pytest.mark.parametrize("wrong", [65, 0, -1, 2.5, True])
def test_lengths_that_the_model_does_not_take_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"sequences of {wrong} tokens were asked for, and Toy takes 1 to 64"):
        hal.Runner(Toy(), opened(), max_length=wrong)


@pytest.mark.parametrize(
    ("max_length", "model", "longest"),
    [(None, ToyWithWindow, 32), (64, ToyWithWindow, 64), (48, ToyWithWindow, 48), (64, Toy, 32), (16, Toy, 16)],
)
def test_an_engine_that_frees_blocks_has_long_sequences(max_length: int | None, model: type[Toy], longest: int) -> None:
    """The cache has two blocks of 16 tokens, beside the dummy block."""
    with hal.open({"backend": "cpu", "cache": {"block_size": 16}}) as backend:
        runner = hal.Runner(model(), backend, max_length=max_length, num_blocks=3)
        with pytest.raises(BatchError, match="max_length is 0, not an integer of 1 or more"):
            runner.input_batch(2, 0)
        inputs = runner.input_batch(2)
        blocks = [0] * (longest // 16 - 1) + [1] if model is ToyWithWindow else [1, 2][: longest // 16]
        inputs.add([1] * longest, blocks, cached=longest - 1)
        batch = inputs.batch()
        assert batch.positions.tolist() == [longest - 1]
        torch.testing.assert_close(runner.step(batch).logits, eagerly(runner, batch))
        with pytest.raises(BatchError, match=f"a row takes {longest}"):
            inputs.add([1] * (longest + 1), [1], cached=longest)


class TestCacheLayout:
    """A backend whose cache has heads before slots, as on some hardware."""

    @staticmethod
    def turned(cache: Tensor) -> Tensor:
        return cache.transpose(1, 2)

    def kernels(self) -> dict[str, Any]:
        store, attend = (ops.operation(name).reference for name in ("store_kv_cache", "paged_attention"))

        def store_turned(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            canonical = [self.turned(cache).contiguous() for cache in (keys, values)]
            store(key, value, *canonical, slots)
            for cache, new in zip((keys, values), canonical, strict=True):
                cache.copy_(self.turned(new))

        def attend_turned(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
            return attend(query, self.turned(keys).contiguous(), self.turned(values).contiguous(), *rest)

        return {"store_kv_cache": store_turned, "paged_attention": attend_turned}

    def backend(self, cpu: hal.Backend, kernels: dict[str, Any]) -> hal.Backend:
        turned = self.turned

        class Turned(hal.Backend):
            def allocate(self, spec: hal.step.StateSpec) -> hal.step.StateMemory:
                layers = super().allocate(spec).layers
                with torch.inference_mode():
                    return hal.step.StateMemory(
                        spec,
                        tuple({name: turned(each).contiguous() for name, each in state.items()} for state in layers),
                    )

        return Turned("turned", cpu.device, kernels=kernels, state_layout="heads first")

    def test_a_model_runs_on_it_unchanged(self, cpu: hal.Backend, trained: Path) -> None:
        cpu = hal.open({"backend": "cpu", "dtype": "float32"})
        backend = self.backend(cpu, self.kernels())
        backend.configure(cpu.config)
        tokens = []
        for each in (cpu, backend):
            each.activate()
            model = hal.load_model(trained, each)
            runner = hal.Runner(model, each)
            heads = model.states[0]["key"].shape[0]
            assert (runner.states.layers[0]["key"].shape[1] == heads) == (each is backend)
            params = hal.SamplingParams(max_new_tokens=16)
            tokens.append([token.token_id for token in hal.generate(runner, [[5, 6, 7], [8] * 70], params)])
        assert tokens[0] == tokens[1]
        cpu.activate()

    def test_a_model_prepared_for_another_backend_is_refused(self, cpu: hal.Backend, trained: Path) -> None:
        class Prepares(hal.Backend):
            def prepare_weights(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
                return {name: weight.clone() for name, weight in weights.items()}

        model = hal.load_model(trained, Prepares("prepares", cpu.device, kernels={}))
        with pytest.raises(ConfigError, match="weights were prepared by the backend prepares"):
            hal.Runner(model, cpu)

    def test_a_missing_kernel_fails_when_it_is_opened(self, cpu: hal.Backend) -> None:
        kernels = self.kernels()
        del kernels["store_kv_cache"]
        with pytest.raises(DriverIncompatible, match="'heads first' but no kernel for store_kv_cache"):
            self.backend(cpu, kernels)

    def test_an_operation_of_few_models_is_refused_when_it_is_called(self, cpu: hal.Backend) -> None:
        refused = self.backend(cpu, self.kernels()).resolve(hal.ops.operation("attend_chosen"))
        with pytest.raises(DriverIncompatible, match="'heads first' but no kernel for attend_chosen, which was called"):
            refused()
