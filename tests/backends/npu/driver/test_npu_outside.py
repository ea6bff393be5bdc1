"""Tests that models of a separate package give the CPU's tokens on the emulated NPU, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toys
from helpers.thorough import MODE, PROCESSES, thorough

import hal
from hal.errors import CaptureError

Opened = Callable[..., hal.Backend]
MODES = ("eager", "graph", "piecewise", "piecewise_eager", "npugraph_ex")

pytestmark = pytest.mark.usefixtures("toys_installed")


def configured(architecture: str, mode: str) -> dict[str, Any]:
    compilation: dict[str, Any] = {"compiler": mode}
    if mode.startswith("piecewise"):
        compilation |= {"splitting_ops": list(toys.SPLIT_AT[architecture]), "prefill": {"capture_sizes": [8, 24]}}
    if mode != "eager":
        compilation["capture_sizes"] = [1, 3]
    return {
        "compilation": compilation,
        "cache": {"num_tokens": 9 * 128, "block_size": 128, "num_sequences": toys.SLOTS},
        "dtype": "float16",
    }


@pytest.fixture(scope="module", params=sorted(toys.SPLIT_AT))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, toys.checkpoint(tmp_path_factory.mktemp("toys") / request.param, request.param)


@thorough(
    MODE, r"\[(?!Recurrent).*-(piecewise|npugraph)\w*\]|\[(?!Recurrent|Experts).*-graph\]|\[Recurrent.*-piecewise\]"
)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_in_batches_that_change(made: tuple[str, Path], npu: Opened, mode: str) -> None:
    architecture, folder = made
    schedule = toys.Schedule.drawn(11, 61, count=5)
    assert schedule.mixed >= 1
    exact = hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 256, "num_sequences": toys.SLOTS}})
    expected = toys.alone(hal.Runner(hal.load_model(folder, exact), exact), schedule, architecture)
    backend = npu(**configured(architecture, mode))
    model = hal.load_model(folder, backend)
    if (architecture, mode) == ("RecurrentForCausalLM", "npugraph_ex"):
        # The code that torch_npu generates writes a state from a view of the same memory, so it is refused with an
        # error.
        with pytest.raises(CaptureError, match="the code that npugraph_ex generated fails in its capture"):
            hal.Runner(model, backend)
        return
    runner = hal.Runner(model, backend)
    assert toys.check(runner, schedule, expected, architecture, 2e-2) > 50


@thorough(PROCESSES)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_runners_of_two_backends_serve_side_by_side(npu: Opened, trained: Path, mode: str) -> None:
    """Runners on the CPU and on the NPU, alternating and in two threads, give the same results as alone."""
    compilation = {"compiler": mode} | ({} if mode == "eager" else {"capture_sizes": [2]})
    cpu = hal.open({"backend": "cpu", "dtype": "float16", "compilation": compilation})
    backends = [cpu, npu(dtype="float16", compilation=compilation)]
    runners = [hal.Runner(hal.load_model(trained, each), each) for each in backends]
    prompts = [[5, 6, 7], [8, 9]]
    expected = []
    for runner in runners:
        runner.step(runner.batch(prompts, [[1], [2]]))
        expected.append(runner.step(runner.batch([[3], [4]], [[1], [2]], cached=[3, 2])).logits.cpu())
    assert not cpu.active

    def again(index: int, times: int) -> list[torch.Tensor]:
        runner = runners[index]
        found = []
        for _ in range(times):
            batch = runner.batch([[3], [4]], [[1], [2]], cached=[3, 2])
            with torch.inference_mode():
                found.append(runner.step(batch).logits.cpu())
        return found

    for index in (0, 1, 0, 0, 1):
        assert torch.equal(*again(index, 1), expected[index])
    with ThreadPoolExecutor(2) as threads:
        for index, done in enumerate([threads.submit(again, index, 20) for index in (0, 1)]):
            assert all(torch.equal(each, expected[index]) for each in done.result())
