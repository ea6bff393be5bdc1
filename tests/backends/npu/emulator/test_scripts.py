"""Tests that unmodified scripts for torch_npu run on the emulated CANN and give the CPU's results."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hal.backends.npu import emulator
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough
from torch import nn

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import decoder  # noqa: E402

ATTENTION = "FusedInferAttentionScoreV3"


@thorough(PROCESSES)
@pytest.mark.parametrize(("dtype", "task_queue"), [("float16", "0"), ("bfloat16", "1")])
def test_a_transformer_in_every_mode(dtype: str, task_queue: str) -> None:
    program = (SCRIPTS / "decoder.py").read_text()
    assert not re.search(r"\bhal\b|emulat", program), "the script must not depend on the emulator"
    command = [sys.executable, "-c", "from hal.cli import main; main(prog_name='hal')", "emulate", "--"]
    environ = {**os.environ, "TASK_QUEUE_ENABLE": task_queue, "PYTHONSAFEPATH": "1"}
    command += [sys.executable, str(SCRIPTS / "decoder.py"), dtype]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    errors = dict(line.rsplit(": ", 1) for line in result.stdout.splitlines())
    assert list(errors) == list(decoder.MODES)
    assert max(map(float, errors.values())) < decoder.TOLERANCE[getattr(torch, dtype)]


@pytest.mark.parametrize("mode", [mode for mode in decoder.MODES if mode != "eager"])
def test_twenty_sets_of_lengths_take_one_capture(mode: str) -> None:
    torch._dynamo.reset()
    with emulator.trace() as trace:
        error = decoder.worst_error(mode, torch.float16, count=20, seed=1)
    assert error < decoder.TOLERANCE[torch.float16]
    assert trace.counts(phase="capture")[ATTENTION] == decoder.LAYERS
    replays = [record for record in trace.records if record.kind == "graph"]
    assert len(replays) == 20
    assert trace.counts(phase="replay")[ATTENTION] == 20 * decoder.LAYERS


@torch.inference_mode()
def test_a_stale_length_would_show() -> None:
    """The tests above rely on this: with another step's lengths, a replay gives other results."""
    reference, model = decoder.models(torch.float16)
    step = decoder.Graph(model, decoder.Inputs(), update_first=True)
    tokens, lengths = next(decoder.steps(1))
    expected = reference.on_cpu(tokens, lengths)

    def error() -> float:
        return float((step.logits.float().cpu() - expected).abs().max() / expected.abs().max())

    step(tokens, lengths)
    assert error() < decoder.TOLERANCE[torch.float16]
    step.update([2] * decoder.BATCH)
    step.graph.replay()
    assert error() > 10 * decoder.TOLERANCE[torch.float16]


def test_graphed_callables() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    on_npu = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    on_npu.load_state_dict(module.state_dict())
    on_npu = on_npu.npu().requires_grad_(False)
    graphed = torch.npu.make_graphed_callables(on_npu, (torch.zeros(8, 16, device="npu"),))
    with emulator.trace() as trace:
        results = [graphed((x + offset).npu()).cpu() for offset in range(3)]
    for offset, result in enumerate(results):
        torch.testing.assert_close(result, module(x + offset).detach())
    assert len(trace.ran(kind="graph")) == 3
    assert not trace.ran(phase="capture")


def test_the_accelerators_graph() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    on_npu, weight_on_npu = x.npu(), weight.npu()
    stream = torch.npu.Stream()
    graph = torch.accelerator.Graph()
    with torch.npu.stream(stream):
        torch.relu(on_npu @ weight_on_npu)
        stream.synchronize()
        graph.capture_begin()
        result = torch.relu(on_npu @ weight_on_npu)
        graph.capture_end()
    for scale in (1.0, -2.0):
        on_npu.copy_(x * scale)
        graph.replay()
        torch.testing.assert_close(result.cpu(), torch.relu(x * scale @ weight))


@thorough(PROCESSES)
@thorough(EXHAUSTIVE, r"\[1\]")
@pytest.mark.parametrize("task_queue", ["0", "1"])
def test_two_processes_wait_for_each_others_events(task_queue: str) -> None:
    environ = {**os.environ, "TASK_QUEUE_ENABLE": task_queue}
    command = [sys.executable, str(SCRIPTS / "interprocess_events.py")]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert result.stdout == "well\n", result.stderr


class TestInterprocessEvents:
    def test_what_they_are_not_for(self) -> None:
        acl = ctypes.CDLL("libascendcl.so")
        stream, event, plain = torch.npu.Stream(), ctypes.c_void_p(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.npu_stream)
        assert acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 0x41) == 107000
        assert acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 0x40) == 0
        assert acl.aclrtRecordEvent(event, handle) == 0
        assert acl.aclrtSynchronizeEvent(event) == 0
        result = (ctypes.c_char * 64)()
        assert acl.aclrtEventElapsedTime(result, event, event) == 207000
        assert acl.aclrtEventGetTimestamp(event, result) == 207000
        assert acl.aclrtQueryEventWaitStatus(event, result) == 207000
        assert acl.aclrtResetEvent(event, handle) == 207000
        assert acl.aclrtCreateEventExWithFlag(ctypes.byref(plain), 1) == 0
        assert acl.aclrtIpcGetEventHandle(plain, result) == 107000
        assert acl.aclmdlRICaptureBegin(handle, 0) == 0
        assert acl.aclrtRecordEvent(event, handle) == 207000
        assert acl.aclrtStreamWaitEvent(handle, event) == 207000
        assert acl.aclmdlRICaptureEnd(handle, ctypes.byref(ctypes.c_void_p())) == 0

    @thorough(PROCESSES)
    def test_a_handle_of_a_process_that_has_ended(self) -> None:
        program = "import torch, torch_npu, sys; e = torch.npu.Event(interprocess=True); e.record(); " + (
            "torch.npu.synchronize(); print(e.ipc_handle().hex())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        with pytest.raises(RuntimeError, match="has no event for this handle"):
            torch.npu.Event.from_ipc_handle(torch.device("npu:0"), bytes.fromhex(done.stdout))
