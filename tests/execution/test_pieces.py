"""Tests for piecewise steps on the CPU: results around every bucket and for any split, memory, and errors."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from helpers.checkpoints import random_checkpoint
from helpers.pieces import drawn, eagerly, form_of, graphs_of, marked, tokens_of
from helpers.thorough import AGAIN, DRAW, MODE, thorough
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal import ops
from hal.errors import CaptureError, CompileError, ConfigError, GraphError
from hal.nn import Attention, CausalLM, Embedding, Linear, RMSNorm
from hal.nn.model import LayerState
from hal.step import ALL, LAST, Batch, Rows

DECODE, PREFILL = [2, 4, 8], [8, 16, 40]
EVERYTHING = ("paged_attention", "store_kv_cache", "linear")


def opened(
    prefill: Sequence[int] = PREFILL, *, most: int = 2048, tokens: int = 1024, **compilation: Any
) -> hal.Backend:
    chosen = {"compiler": "piecewise", "capture_sizes": DECODE, "prefill": {"capture_sizes": prefill}, **compilation}
    cache = {"num_tokens": tokens, "block_size": 16}
    return hal.open({"backend": "cpu", "max_prefill_tokens": most, "compilation": chosen, "cache": cache})


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert not found.isnan().any()
    assert (found - expected).abs().max() <= 2e-4 * expected.abs().max()


class Toy(CausalLM):
    """A model with one layer, in which a test can insert code between attention and logits."""

    vocab_size, max_length = 13, 256

    def __init__(self, between: Callable[[Toy, Tensor, Batch], Tensor] | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.embedding, self.qkv = Embedding(13, 32), Linear(32, 6 * 8)
        self.attention, self.out, self.norm = Attention(2, 8), Linear(16, 32), RMSNorm(32, 1e-6)
        self.states = [self.attention.states]
        self.between = between
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(seed))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Toy:
        return cls()

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        query, key, value = self.qkv(hidden).view(-1, 6, 8).split([2, 2, 2], dim=1)
        hidden = hidden + self.out(self.attention(query, key, value, batch, states[0]))
        if self.between is not None:
            hidden = self.between(self, hidden, batch)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.as_linear(hidden)


def check(runner: hal.Runner, sizes: Sequence[int] = (1, 7, 8, 9, 16, 17, 40), turns: int = 1) -> None:
    """Run prefill and decode of these sizes; in two turns, each meets the state that others left."""
    for turn in range(turns):
        for size in sizes:
            batch = drawn(runner, 100 * turn + size, [size], [0])
            assert_same(runner.step(batch).logits.clone(), eagerly(runner, batch))
        for size in (1, 2, 3, 5, 8, 9):
            batch = drawn(runner, 100 * turn + size, [1] * size, [size * row % 7 for row in range(size)])
            assert_same(runner.step(batch).logits.clone(), eagerly(runner, batch))


KINDS: Mapping[str, Mapping[str, Any]] = {
    "tied": {},
    "untied, with biases": {"tie_word_embeddings": False, "attention_bias": True},
    "sliding window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> hal.Runner:
    """Return a runner of a random checkpoint."""
    folder = random_checkpoint(tmp_path_factory.mktemp("model"), seed=3, **KINDS[request.param])
    backend = opened(debug=True)
    return hal.Runner(hal.load_model(folder, backend), backend)


class TestSameAsEager:
    @pytest.fixture
    def runner(self, made: hal.Runner) -> hal.Runner:
        made.backend.activate()
        return made

    @thorough(MODE, r"\[(sliding|untied)")
    def test_around_every_bucket(self, runner: hal.Runner) -> None:
        assert tokens_of(runner, "decode") == DECODE
        assert tokens_of(runner, "prefill") == PREFILL
        assert form_of(runner, "prefill").num_graphs == len(runner.model.states) + 1
        check(runner, (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 39, 40, 41), turns=2)

    @thorough(DRAW, r"\[.*-[2-7]-Rows.(LAST|ALL)\]")
    @pytest.mark.parametrize("rows", [LAST, ALL])
    @pytest.mark.parametrize("seed", range(8))
    def test_mixed_prefill(self, runner: hal.Runner, seed: int, rows: Rows) -> None:
        draw = random.Random(seed)
        count = draw.randint(2, 6)
        lengths, cached = ([draw.randint(low, 12) for _ in range(count)] for low in (1, 0))
        batch = drawn(runner, seed, lengths, cached)
        assert_same(runner.step(batch, rows).logits.clone(), eagerly(runner, batch, rows))

    @pytest.mark.parametrize("most", [3, 16, 23])
    def test_a_prefill_in_steps(self, runner: hal.Runner, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = drawn(runner, most, [40, 1, 17], [0, 9, 4])
        expected = eagerly(runner, batch, ALL)
        monkeypatch.setattr(runner.backend, "config", attrs.evolve(runner.backend.config, max_prefill_tokens=most))
        assert_same(runner.step(batch, ALL).logits, expected)


def test_above_the_largest_bucket_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = hal.Runner(Toy(), opened())
    for _ in range(2):
        batch = drawn(runner, 1, [41], [0])
        assert_same(runner.step(batch).logits, eagerly(runner, batch))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "a step of 1 sequence of 41 tokens each runs uncaptured: it is larger than the largest captured size "
        "(40 tokens)"
    ]


class TestSplitting:
    @pytest.mark.parametrize(
        ("at", "pieces"),
        [(("paged_attention",), 2), (("paged_attention", "store_kv_cache"), 2), (EVERYTHING, 4), (("embedding",), 1)],
    )
    def test_at_several_operations(self, at: Sequence[str], pieces: int) -> None:
        runner = hal.Runner(Toy(), opened(splitting_ops=list(at)))
        assert form_of(runner, "prefill").num_graphs == form_of(runner, "decode").num_graphs == pieces
        check(runner)

    def test_by_a_vendors_names(self) -> None:
        backend = opened()
        made = hal.Backend("other", backend.device, kernels={}, native_names={"acme.attend": "paged_attention"})
        assert made.operation_named("acme.attend") == made.operation_named("paged_attention") == "paged_attention"
        with pytest.raises(
            ConfigError, match=r"splitting_ops has 'acme.atend', which is not the name of an operation\n.*acme.attend"
        ):
            made.operation_named("acme.atend")

    def test_an_operation_that_a_pass_took_in(self) -> None:
        class Added(Toy):
            def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
                hidden = self.embedding(batch.token_ids)
                hidden = hidden + ops.silu_and_mul(torch.cat([hidden, hidden], -1))
                normed = self.norm(hidden)
                return normed + hidden

        with pytest.raises(ConfigError, match="splitting_ops has rms_norm, which") as caught:
            hal.Runner(Added(), opened(splitting_ops=["rms_norm"]))
        assert "add_rms_norm" in caught.value.remedy
        assert "disable the pass" in caught.value.remedy
        check(hal.Runner(Added(), opened(splitting_ops=["rms_norm"], passes={"add_rms_norm": False})))

    def test_nothing_is_left(self) -> None:
        class Late(Toy):
            def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
                hidden = self.embedding(batch.token_ids)
                return hidden.index_select(0, batch.query_start_loc[1:] - 1)

        with pytest.raises(ConfigError, match="nothing can be captured between"):
            hal.Runner(Late(), opened(splitting_ops=["embedding"]))

    def test_sizes_that_the_model_asks_for(self) -> None:
        def asks(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
            return hidden * 2 if hidden.shape[0] > 20 else hidden

        with pytest.raises(CompileError, match=r"Toy depends on sizes: .*20"):
            hal.Runner(Toy(asks), opened())


def _columns(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    """Tokens in the second dimension, read by code between pieces."""
    return ops.linear(hidden.t().contiguous().t(), model.out.weight.t().contiguous(), None) @ model.out.weight.t()


def _heads(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    """One row per head of each token."""
    return ops.linear(hidden.view(-1, 16), model.out.weight, None).view(-1, 64) @ torch.ones(64, 32)


def _twice(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    """Queries other than the step's: more than it has tokens."""
    query = hidden[:, :16].view(-1, 2, 8).repeat(2, 1, 1)
    cache = torch.zeros(4, 16, 2, 8)
    attended = ops.paged_attention(
        query,
        cache,
        cache,
        batch.block_table % 4,
        batch.query_start_loc,
        batch.kv_lens,
        batch.query_start_loc_host,
        batch.kv_lens_host,
        None,
        ops.AttentionOptions(1.0),
    )
    return hidden + attended.sum()


def _other_sizes(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    """Call an operation for some sizes only."""
    return hidden + ops.silu_and_mul(torch.cat([hidden, hidden], -1)) if hidden.shape[0] > 7 else hidden


class Negating(TorchFunctionMode):
    """Negates the sine."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "sin":
            return found
        self.calls += 1
        return -found


class Counting(TorchDispatchMode):
    """Counts the calls that it intercepts."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _in_mode(mode: Any, inside: Callable[..., Tensor], model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    with mode:
        return inside(model, hidden, batch)


def _attend_or_project(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    """A splitting operation after other operations."""
    return ops.linear(hidden.sin()[:, :16] * 2, model.out.weight, None)


def _sine(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    return hidden.sin()


def _lengths(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    """Read inputs that are not available in pieces."""
    total = batch.kv_lens.sum() / batch.block_table.shape[1] + torch.arange(batch.block_table.shape[1]).sum()
    return hidden + total + batch.kv_lens[-1:]


def _view(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    """A view of an operation's result is read after all other uses of the result."""
    first = ops.linear(hidden, model.qkv.weight, None)
    kept = first[:, :16]
    for _ in range(3):
        first = ops.linear(first[:, 16:].contiguous(), model.qkv.weight, None).sin()
    return hidden + ops.linear(kept.contiguous() * first[:, :16], model.out.weight, None)


def _written(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    """A piece writes in place; code between pieces reads the new values."""
    first = ops.linear(hidden, model.qkv.weight, None)
    seen = first[:, :16]
    seen.mul_(2)
    second = ops.linear(first[:, :32].contiguous(), model.qkv.weight, None)
    return hidden + ops.linear((first + second)[:, :16].contiguous(), model.out.weight, None)


def _constants(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
    return hidden * torch.tensor([1.0, 2.0]).repeat(16) + torch.arange(32) / 7.0


@thorough(MODE, r"\[.*-everything")
@pytest.mark.parametrize("at", [("paged_attention",), EVERYTHING], ids=["attention", "everything"])
@pytest.mark.parametrize("between", [_columns, _heads, _lengths, _view, _written, _constants])
def test_what_models_do_between(between: Callable[..., Tensor], at: Sequence[str]) -> None:
    check(hal.Runner(Toy(between), opened(splitting_ops=list(at))), (1, 8, 9, 33))


class Deep(Toy):
    """A model whose layers all read tensors that the first piece makes; each layer is wide inside."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.states = [self.attention.states] * layers
        generator = torch.Generator().manual_seed(1)
        self.wide = nn.Parameter(torch.randn(width, 32, generator=generator) / 6, requires_grad=False)

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        angles = batch.positions.float()[:, None] * torch.arange(1, 9)
        cos, sin = angles.cos(), angles.sin()
        for state in states:
            query, key, value = self.qkv(self.norm(hidden)).view(-1, 6, 8).split([2, 2, 2], dim=1)
            query, key = ops.rotary_embedding(query, key, cos, sin)
            hidden = hidden + self.out(self.attention(query, key, value, batch, state))
            hidden = hidden + (hidden @ self.wide.t()).sin() @ self.wide
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.as_linear(hidden)


class TestMemory:
    def pool(self, sizes: Sequence[int], layers: int = 3) -> int:
        """Return the bytes of the pool that all prefill graphs share."""
        runner = hal.Runner(Deep(layers, 512), opened(sizes, most=4096, decode={"compiler": "eager"}))
        buckets = form_of(runner, "prefill")._buckets
        (pool,) = {graph.pool for found in buckets.values() for bucket in found for graph in bucket.graphs}
        return pool.nbytes

    @thorough(MODE)
    def test_eight_buckets_take_little_more_than_the_largest(self) -> None:
        largest = self.pool([512])
        assert largest <= self.pool([4, 8, 16, 32, 64, 128, 256, 512]) <= 1.15 * largest

    def test_pieces_share_it(self) -> None:
        """A step of many layers takes as much memory as one of few."""
        # The tensors share memory: two wide results at a time, narrow ones, and fragmentation.
        assert self.pool([256], layers=8) <= 256 * 4 * (3 * 512 + 10 * 32)

    def test_tables_of_the_first_piece_stay(self) -> None:
        check(hal.Runner(Deep(3), opened()))

    def test_rows_between_pieces_are_shared(self) -> None:
        runner = hal.Runner(Deep(4), opened(decode={"compiler": "eager"}))
        rows = form_of(runner, "prefill")._rows
        assert len(rows) == 4
        assert len({row.data_ptr() for row in rows.values()}) == 1


class TestErrors:
    def test_a_replaced_weight_is_named(self) -> None:
        runner = hal.Runner(Toy(), opened(debug=True))
        check(runner)
        runner.model.out.weight.data = runner.model.out.weight.data.clone()
        for lengths in ([1], [2, 1]):
            with pytest.raises(GraphError, match=r"out\.weight has another address"):
                runner.step(drawn(runner, 1, lengths, [0] * len(lengths)))

    def test_what_cannot_be_captured(self, caplog: pytest.LogCaptureFixture) -> None:
        def reads(x: Tensor, approximate: str) -> Tensor:
            return torch.nn.functional.gelu(x, approximate=approximate) * (float(x.abs().max()) >= 0)

        def activated(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
            return ops.gelu(hidden, "none")

        def with_it(**compilation: Any) -> hal.Backend:
            backend = opened(**compilation)
            backend.kernels = {**backend.kernels, "gelu": reads}
            backend.activate()
            return backend

        with pytest.raises(CaptureError, match=r"__float__ reads a tensor's value during a capture, in reads at"):
            hal.Runner(Toy(activated), with_it())
        caplog.clear()
        runner = hal.Runner(Toy(activated), with_it(on_capture_error="eager"))
        assert tokens_of(runner, "decode") == []
        for size in PREFILL:
            assert f"prefill batches of {size} tokens run in a larger bucket or uncaptured" in caplog.text
        check(runner)

    def test_what_cannot_be_traced(self, caplog: pytest.LogCaptureFixture) -> None:
        def reads(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
            return hidden * float(hidden.abs().max())

        with pytest.raises(CompileError, match=r"Toy cannot be traced, in reads at .*test_pieces\.py:\d+: "):
            hal.Runner(Toy(reads), opened())
        runner = hal.Runner(Toy(reads), opened(on_capture_error="eager"))
        assert "decode batches run uncaptured: Toy cannot be traced" in caplog.text
        check(runner)

    def test_no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The step that is measured before the captures runs out of memory."""

        def full(*args: Any) -> Any:
            raise torch.OutOfMemoryError("nothing left")

        backend = opened()
        backend.kernels = {**backend.kernels, "paged_attention": full}
        backend.activate()
        with pytest.raises(CaptureError, match=r"a step of 8 sequences does not fit: .*no memory left"):
            hal.Runner(Toy(), backend)

    def test_streams_are_counted(self) -> None:
        backend = opened(splitting_ops=list(EVERYTHING))
        backend.limits = attrs.evolve(backend.limits, max_streams=23)
        with pytest.raises(CaptureError, match="graphs of 3 sizes need 12 streams, and 11 are left for graphs"):
            hal.Runner(Toy(), backend)
        assert backend.streams_in_graphs == 0
        backend.limits = attrs.evolve(backend.limits, max_streams=24)
        runner = hal.Runner(Toy(), backend)
        assert backend.streams_in_graphs == 24
        check(runner)


@thorough(MODE, r"\[graph")
@pytest.mark.parametrize(("compiler", "call"), [("graph", 1), ("piecewise", 1), ("piecewise_eager", 3)])
def test_two_threads_make_runners_at_once(compiler: str, call: int) -> None:
    """The second thread starts during a call of the first one's model, in its trace or in a capture."""
    backend = hal.open({"backend": "cpu", "compilation": {"compiler": compiler, "capture_sizes": [2]}})
    calls, other = 0, Toy()
    second: list[Future[hal.Runner]] = []

    def begins(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            second.append(threads.submit(hal.Runner, other, backend))
            wait(second, timeout=0.3)  # Ends immediately if the second thread waits for the first.
        return hidden

    with ThreadPoolExecutor(1) as threads:
        first = hal.Runner(Toy(begins), backend)
        runners = [first, second[0].result()]
    batch = drawn(first, 1, [1, 1], [0, 0])
    expected = eagerly(first, batch)
    for runner in runners:
        assert_same(runner.step(batch).logits, expected)


def test_phases_are_chosen_apart() -> None:
    runner = hal.Runner(Toy(), opened(decode={"compiler": "eager"}))
    assert list(runner.forms) == ["prefill"]
    check(runner, (7, 8, 9))


class TestMarkers:
    """Piecewise steps without a compiler."""

    @pytest.mark.parametrize("at", [("paged_attention",), ("paged_attention", "store_kv_cache"), EVERYTHING])
    def test_around_every_bucket(self, at: Sequence[str]) -> None:
        runner = marked(Deep(2), opened(splitting_ops=list(at)))
        calls = {"paged_attention": 2, "store_kv_cache": 2, "linear": 4}
        assert graphs_of(runner, "prefill") == 1 + sum(calls[name] for name in at)
        check(runner)
        for seed in range(4):
            batch, rows = drawn(runner, seed, [10, 1, 20], [0, 30, 5]), ALL if seed > 1 else LAST
            assert_same(runner.step(batch, rows).logits.clone(), eagerly(runner, batch, rows))

    @thorough(AGAIN, r"\[(_heads|_constants)")
    @pytest.mark.parametrize("between", [_columns, _heads, _view, _written, _constants])
    def test_what_models_do_between(self, between: Callable[..., Tensor]) -> None:
        check(marked(Toy(between), opened(splitting_ops=list(EVERYTHING))), (1, 8, 9, 33))

    def test_what_the_model_still_has_is_left_alone(self) -> None:
        """The last piece reads the first tensor; no piece between them does."""

        def late(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
            first, part = hidden.sin(), (hidden * 2)[:, 8:24]
            for _ in range(4):
                hidden = ops.linear(hidden.cos()[:, :16] * 2, model.out.weight, None)
            return hidden + first + part.repeat(1, 2)

        check(marked(Toy(late), opened(splitting_ops=list(EVERYTHING))), (7, 8, 9, 40))

    @pytest.mark.parametrize(
        ("between", "at", "message"),
        [
            (_lengths, ["paged_attention"], r"sum reads batch\.kv_lens in a capture"),
            (None, ["linear"], r"paged_attention reads batch\.block_table in a capture, and its shape changes"),
            (
                _twice,
                ["paged_attention"],
                r"paged_attention is called with query \[16, 2, 8\], declared `tokens num_heads head_dim`, in a st",
            ),
        ],
        ids=["lengths", "attention", "twice"],
    )
    def test_what_cannot_be_captured(self, between: Any, at: list[str], message: str) -> None:
        with pytest.raises((CaptureError, CompileError), match=message):
            marked(Toy(between), opened(splitting_ops=at))
        runner = marked(Toy(between), opened(splitting_ops=at, on_capture_error="eager"))
        assert tokens_of(runner, "decode") == []
        check(runner, (3,))

    def test_other_operations_for_other_sizes(self, caplog: pytest.LogCaptureFixture) -> None:
        at = ["paged_attention", "silu_and_mul"]
        said = "for 4 tokens, Toy calls nothing where it calls silu_and_mul for 8"
        with pytest.raises(CaptureError, match=said):
            marked(Toy(_other_sizes), opened(splitting_ops=at))
        runner = marked(Toy(_other_sizes), opened(splitting_ops=at, on_capture_error="eager"))
        assert f"decode batches of 4 tokens run in a larger bucket or uncaptured: {said}" in caplog.text
        assert tokens_of(runner, "decode") == [8]
        batch = drawn(runner, 1, [1] * 8, [3] * 8)
        assert_same(runner.step(batch).logits.clone(), eagerly(runner, batch))

    def test_a_mode_of_the_models_around_a_split(self) -> None:
        """At a replay, the code between graphs would run outside the mode."""
        for mode in (Negating, Counting):
            around = partial(_in_mode, mode(), _attend_or_project)
            marked(Toy(around), opened())
            with pytest.raises(
                CaptureError, match=rf"torch mode is {mode.__name__} where linear splits the step"
            ) as caught:
                marked(Toy(around), opened(splitting_ops=["paged_attention", "linear"]))
            assert 'compilation.compiler to "eager" or "piecewise"' in caught.value.remedy
            check(marked(Toy(), opened()), (3,))

    @pytest.mark.parametrize("at", [["paged_attention"], ["paged_attention", "linear"]])
    def test_a_mode_of_the_models_between_splits(self, at: list[str]) -> None:
        """The mode has the same effect in captures as in eager steps, and the model exits it at the same place."""
        negating, counting = Negating(), Counting()

        def between(model: Toy, hidden: Tensor, batch: Batch) -> Tensor:
            plain = hidden.sin()
            return _in_mode(negating, lambda *_: _in_mode(counting, _sine, model, plain, batch), model, plain, batch)

        runner = marked(Toy(between), opened(splitting_ops=at))
        assert negating.calls > 0
        assert counting.calls > 0
        check(runner, (1, 8, 9))
        x = torch.ones(3)
        assert torch.equal(between(runner.model, x, None), -x.sin().sin())  # type: ignore[arg-type]

    def test_operations_that_are_not_called(self) -> None:
        with pytest.raises(ConfigError, match="splitting_ops has silu_and_mul, which the model does not call"):
            marked(Toy(), opened(splitting_ops=["silu_and_mul"]))
        with pytest.raises(ConfigError, match=r"has quantize, which the model .* it calls embedding, paged_attention"):
            marked(Toy(), opened(splitting_ops=["quantize", "paged_attention", "embedding"]))
