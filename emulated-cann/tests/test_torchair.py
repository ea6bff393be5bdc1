"""Tests of torchair, torch_npu's compiler of FX graphs, on the emulated CANN: what it captures, and what needs GE."""

from __future__ import annotations

from collections.abc import Callable

import emulated_cann
import pytest
import torch
import torch_npu
import torchair

ROWS = 3


def step(x: torch.Tensor, weight: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    normed = torch_npu.npu_rms_norm(x @ weight, gamma)[0]
    return torch.relu(normed) + 1


def backend(mode: str) -> Callable[..., object]:
    config = torchair.CompilerConfig()
    config.mode = mode
    return torchair.get_npu_backend(compiler_config=config)


@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
def test_a_compiled_function_is_replayed(mode: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend(mode), dynamic=False, fullgraph=True)
    weight, gamma = torch.randn(4, 8).npu(), torch.rand(8).npu()
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(ROWS, 4).npu()
            with emulated_cann.trace() as trace:
                result = compiled(x, weight, gamma)
                torch.npu.synchronize()
            torch.testing.assert_close(result, step(x, weight, gamma))
    assert trace.counts(phase="replay")["RmsNorm"] == 1


def test_the_graph_engine_is_refused_by_name() -> None:
    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend("max-autotune"), dynamic=False)
    tensors = torch.randn(ROWS, 4).npu(), torch.randn(4, 8).npu(), torch.rand(8).npu()
    with torch.no_grad(), pytest.raises(Exception, match=r"no graph engine \(GE\), and ge::.*; compile with"):
        compiled(*tensors)
    assert torch.ones(2).npu().sum().item() == 2
