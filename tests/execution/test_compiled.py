"""Tests for decode steps compiled by Inductor: graphs and results at every batch size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.checkpoints import random_checkpoint
from helpers.stepping import states_of
from helpers.thorough import EXHAUSTIVE, LONG, MODE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.compile.inductor_backend import compile_step
from hal.compile.trace import StepSizes, TracedStep, trace_step
from hal.errors import BatchError, CompileError, ConfigError
from hal.execution.inductor import InductorForm
from hal.nn import CausalLM
from hal.step import Batch

KEPT = ("linear", "paged_attention", "store_kv_cache")


def open_runner(path: Path, **compilation: Any) -> hal.Runner:
    config = {"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 2048, "block_size": 16}}
    backend = hal.open({**config, "compilation": compilation})
    return hal.Runner(hal.load_model(path, backend), backend)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of one layer: g++ compiles each of a layer's kernels."""
    return random_checkpoint(tmp_path_factory.mktemp("compiled") / "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def runners(checkpoint: Path) -> Callable[[str], hal.Runner]:
    """Return a function that opens runners on first use.

    They are eager; compiled for one sequence and more, for more only, and for one only.
    """
    sizes = {"both": [1, 2, 4, 8], "many": [2, 4, 8], "one": [1]}

    @cache
    def runner(which: str) -> hal.Runner:
        compiled = {"compiler": "inductor", "capture_sizes": sizes[which]} if which != "eager" else {}
        return open_runner(checkpoint, **compiled)

    return runner


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of sequences for which Inductor is asked, and not run."""
    found: list[int] = []
    monkeypatch.setattr(InductorForm, "_compile", lambda self, sequences, queries: found.append(sequences))
    return found


def decode_some(runner: hal.Runner, sequences: list[list[int]], steps: int = 3) -> Tensor:
    """Return the logits of the last ``steps`` tokens, decoded one by one after a prefill of the others."""
    runner.backend.activate()
    blocks = [runner.blocks.take(runner.spec.blocks_for(len(each))) for each in sequences]
    assert None not in blocks
    owned = [each for each in blocks if each is not None]
    runner.step(runner.batch([each[:-steps] for each in sequences], owned))
    made = []
    for step in range(-steps, 0):
        cached = [len(each) + step for each in sequences]
        batch = runner.batch([[each[step]] for each in sequences], owned, cached=cached)
        made.append(runner.step(batch).logits.clone())
    for each in owned:
        runner.blocks.give_back(each)
    return torch.stack(made)


@thorough(EXHAUSTIVE, "-many")
@thorough(MODE, "-(one|many)")
@pytest.mark.parametrize("which", ["both", "many", "one"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 17])
def test_every_batch_size(which: str, size: int, runners: Callable[[str], hal.Runner]) -> None:
    sequences = [[(5 * row + index * index) % 200 for index in range(20 + 7 * row)] for row in range(size)]
    expected = decode_some(runners("eager"), sequences)
    found = decode_some(runners(which), sequences)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_it_says_once_what_it_does_not_compile(
    runners: Callable[[str], hal.Runner], checkpoint: Path, compiled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    runner = open_runner(checkpoint, compiler="inductor", capture_sizes=[1])
    for size in (2, 3, 2):
        sequences = [[1, 2, 3, 4, 5]] * size
        torch.testing.assert_close(decode_some(runner, sequences), decode_some(runners("eager"), sequences))
    said = [record for record in caplog.records if "runs uncaptured" in record.getMessage()]
    assert len(said) == 1
    assert "takes a single sequence" in said[0].getMessage()
    assert runners("eager").spec == runner.spec


@pytest.mark.parametrize("which", ["eager", "both"])
@pytest.mark.parametrize("form", ["int32", "strided", "expanded"])
def test_an_engines_own_tensors(form: str, which: str, runners: Callable[[str], hal.Runner]) -> None:
    """Tensors of another integer dtype or with strides give the same result."""
    runner = runners(which)
    runner.backend.activate()
    blocks = runner.blocks.take(4) or []
    with torch.inference_mode():
        for _, cache in runner.states.tensors():
            cache.normal_(generator=torch.Generator().manual_seed(3))
    batch = runner.batch([[7], [7], [7], [7]], [[block] for block in blocks], cached=[10] * 4)
    expected = runner.step(batch).logits.clone()
    alike = ("token_ids", "positions", "kv_lens")
    if form == "int32":
        changed = {name: getattr(batch, name).int() for name in ("token_ids", "positions")}
    elif form == "strided":
        changed = {name: getattr(batch, name).repeat_interleave(2)[::2] for name in alike}
    else:
        changed = {name: getattr(batch, name)[:1].expand(4) for name in alike}
    found = runner.step(attrs.evolve(batch, **changed)).logits
    runner.blocks.give_back(blocks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@thorough(MODE, r"\[inductor")
@pytest.mark.parametrize("compiler", ["eager", "graph", "inductor"])
def test_tensors_that_do_not_fit_together(compiler: str, checkpoint: Path) -> None:
    runner = open_runner(checkpoint, compiler=compiler, capture_sizes=[2])
    batches = [runner.batch([[7, *more], [8]], [[1], [2]], cached=[3, 4]) for more in ([], [9])]
    for name in ("block_table", "kv_lens_host", "query_start_loc", "query_start_loc_host", "positions", "slot_mapping"):
        for batch in batches:
            longer = attrs.evolve(batch, **{name: torch.cat([getattr(batch, name)] * 2)})
            with pytest.raises(BatchError, match=f"the batch's {name} has the shape "):
                runner.step(longer)


@thorough(MODE)
def test_nothing_kept_whole(checkpoint: Path) -> None:
    """A backend may leave all operations to Inductor.

    Then block tables of any width are valid, also for one sequence.
    """
    cpu = hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 512, "block_size": 16}})
    bare = hal.Backend("bare", cpu.device, kernels={}, inductor=())
    bare.configure(attrs.evolve(cpu.config, compilation=hal.CompilationConfig("inductor", capture_sizes=(1, 4))))
    bare.activate()
    runner = hal.Runner(hal.load_model(checkpoint, bare), bare)
    sequences = [list(range(20)), list(range(30, 70)), [5] * 17]
    expected = decode_some(open_runner(checkpoint), sequences)
    torch.testing.assert_close(decode_some(runner, sequences), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(decode_some(runner, sequences[1:2]), expected[:, 1:2], rtol=1e-4, atol=1e-3)
    cpu.activate()


def traced(runner: hal.Runner, size: int = 4) -> TracedStep:
    return trace_step(runner.model, runner.states, StepSizes(size), whole=KEPT)


def test_kept_operations_stay_and_the_others_go(runners: Callable[[str], hal.Runner]) -> None:
    runner = runners("eager")
    step = traced(runner)
    called = Counter(node.target for node in step.graph.graph.nodes if node.op == "call_function")
    layers = len(runner.model.states)
    ours = {each.name: count for target, count in called.items() if (each := ops.operation_of_node(target))}
    assert ours == {"linear": 4 * layers, "paged_attention": layers, "store_kv_cache": layers}


def test_caches_are_written_where_they_are(runners: Callable[[str], hal.Runner]) -> None:
    """No node creates a tensor of a cache's size, and the caches themselves are mutated."""
    runner = runners("both")
    nbytes = runner.states.layers[0]["key"].nbytes
    made = [
        node
        for node in traced(runner).graph.graph.nodes
        if node.op == "call_function"
        and isinstance(value := node.meta.get("val"), Tensor)
        and isinstance(value.numel(), int)
        and value.numel() * value.element_size() >= nbytes
    ]
    assert not made
    runner.backend.activate()
    (block,) = runner.blocks.take(1) or []
    batch = runner.batch([[5], [6]], [[block], [block]], cached=[0, 1])
    before = [tensor.clone() for _, tensor in runner.states.tensors()]
    runner.step(batch)
    runner.blocks.give_back([block])
    for old, new in zip(before, (tensor for _, tensor in runner.states.tensors()), strict=True):
        changed = (old != new).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[block, 0], [block, 1]]


class Stateless(CausalLM):
    """A model without states, with one weight."""

    vocab_size, max_length, states = 11, 64, ({},)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Stateless:
        return cls()


class Reads(Stateless):
    """A model that reads a tensor's value, which compiled models must not."""

    def forward(self, batch: Batch, states: Any) -> Tensor:
        return torch.zeros(int(batch.kv_lens.max()), 4)


class Fixes(Stateless):
    """A model that specializes a size to that of the example."""

    def forward(self, batch: Batch, states: Any) -> Tensor:
        return batch.kv_lens.float().view(int(batch.kv_lens.shape[0]), 1)


def test_a_size_that_the_model_fixes_shows() -> None:
    step = trace_step(Fixes(), states_of(Fixes()), StepSizes(4), whole=())
    assert "sequences = 4" in step.specialized_axes
    assert not [each for each in step.specialized_axes if each.startswith("blocks")]


def test_a_step_for_one_size_alone_runs_no_others(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TracedStep, "specialized_axes", ["blocks = 5"])
    with pytest.raises(CompileError, match="for other sizes than the example's: it fixes blocks = 5"):
        open_runner(checkpoint, compiler="inductor", capture_sizes=[1])


def test_it_compiles_once_for_one_and_once_for_more(checkpoint: Path, compiled: list[int]) -> None:
    open_runner(checkpoint, compiler="inductor", capture_sizes=[1, 2, 3, 4, 8])
    assert len(compiled) == 2
    assert compiled[0] == 1 < compiled[1]


def test_sizes_of_decode_alone(checkpoint: Path, compiled: list[int]) -> None:
    open_runner(checkpoint, compiler="inductor", capture_sizes=[1, 8], decode={"capture_sizes": [1]})
    assert compiled == [1]
    with pytest.raises(ConfigError, match=r"capture_sizes \[4\] and max_capture_size 2 leave nothing"):
        open_runner(checkpoint, decode={"compiler": "inductor", "capture_sizes": [4], "max_capture_size": 2})


def test_a_model_that_reads_values_is_refused(cpu: hal.Backend) -> None:
    with pytest.raises(CompileError, match="Reads cannot be traced") as caught:
        trace_step(Reads(), states_of(Reads()), StepSizes(2), whole=())
    assert "remove Python code that depends on a tensor's value" in str(caught.value)


def test_a_failing_compiler_says_so_or_leaves_it_to_eager(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import hal.execution.inductor as module

    def fails(step: TracedStep) -> Any:
        raise CompileError("Inductor failed: no compiler", "install one")

    monkeypatch.setattr(module, "compile_step", fails)
    with pytest.raises(CompileError, match="no compiler"):
        open_runner(checkpoint, compiler="inductor")
    runner = open_runner(checkpoint, compiler="inductor", on_capture_error="eager")
    assert "decode batches run uncaptured: Inductor failed" in caplog.text
    logits = decode_some(runner, [[1, 2, 3, 4, 5]])
    torch.testing.assert_close(logits, decode_some(open_runner(checkpoint), [[1, 2, 3, 4, 5]]), rtol=1e-4, atol=1e-3)


@thorough(LONG)
def test_a_step_by_itself(runners: Callable[[str], hal.Runner]) -> None:
    """Trace, compile and call a step without a runner."""
    runner = runners("eager")
    runner.backend.activate()
    run = compile_step(traced(runner))
    blocks = runner.blocks.take(3) or []
    batch = runner.batch([[7], [8], [9]], [[block] for block in blocks], cached=[0, 0, 0])
    with torch.inference_mode():
        found = run(batch.tensors())[0].clone()
    expected = runner.step(batch).hidden_states
    runner.blocks.give_back(blocks)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
