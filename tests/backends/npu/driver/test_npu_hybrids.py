"""Tests that models with recurrent layers give the CPU's tokens on the emulated NPU, with states in both dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cann import trace
from helpers import repeated_names, toys
from helpers.npu import processes
from helpers.thorough import DTYPE, EXHAUSTIVE, MODE, thorough

import hal

Opened = Callable[..., hal.Backend]
pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "torch_dtype": "float32",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,  # Else a norm amplifies the rounding of small results.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=DTYPES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("hybrid") / request.param
    return request.param, toys.write(folder, {**CONFIG, "mamba_ssm_dtype": request.param})


def opened(npu: Opened, mode: str, dtype: str) -> hal.Backend:
    compilation: dict[str, Any] = {"compiler": mode}
    if mode.startswith("piecewise"):
        compilation["prefill"] = {"capture_sizes": [8, 24]}
    if mode != "eager":
        compilation["capture_sizes"] = [1, 3]
    cache = {"num_tokens": 9 * 128, "block_size": 128, "num_sequences": 2 * toys.SLOTS}
    return npu(compilation=compilation, cache=cache, dtype=dtype)


@thorough(MODE, r"\[(float32-(piecewise|npugraph)|bfloat16-graph)")
@thorough(EXHAUSTIVE, r"\[(bfloat16-(eager|piecewise|npugraph)|float32-graph)")
@pytest.mark.parametrize("mode", ["eager", "graph", "piecewise", "npugraph_ex"])
def test_batches_that_change(saved: tuple[str, Path], npu: Opened, mode: str) -> None:
    state, folder = saved
    schedule = toys.Schedule.drawn(3, 61, count=4)
    exact = hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 256, "num_sequences": toys.SLOTS}})
    expected = toys.alone(hal.Runner(hal.load_model(folder, exact), exact), schedule, "")
    dtype, slack = ("float16", 3e-2) if state == "float32" else ("bfloat16", 1.5e-1)
    backend = opened(npu, mode, dtype)
    runner = hal.Runner(hal.load_model(folder, backend), backend)
    with trace() as launches:
        assert toys.check(runner, schedule, expected, "", slack) > 30
    assert bool(launches.counts()["RecurrentGatedDeltaRule"]) == (state == "bfloat16")


@thorough(MODE, r"\[graph")
@thorough(EXHAUSTIVE, r"\[(piecewise|npugraph)")
@pytest.mark.parametrize("mode", ["eager", "graph", "piecewise", "npugraph_ex"])
def test_the_layer_that_predicts_further_tokens(mode: str, npu: Opened, tmp_path: Path) -> None:
    """The CPU's logits, of prompts and of steps, with hidden states that both are given."""
    folder = toys.write(tmp_path / "mtp", {**CONFIG, "architectures": ["Qwen3_5MTP"]})
    draw = torch.Generator().manual_seed(4)
    steps = [[5, 3, 9], [1, 1, 1], [1, 2, 1], [1, 1, 1]]
    hidden = [torch.randn(sum(counts), 64, generator=draw).half() for counts in steps]
    found = []
    exact = hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 3 * 128, "block_size": 128}})
    for backend in (exact, opened(npu, mode, "float16")):
        runner = hal.Runner(hal.load_model(folder, backend), backend)
        logits, cached = [], [0, 0, 0]
        for counts, given in zip(steps, hidden, strict=True):
            tokens = [[(start + at) % 61 for at in range(count)] for start, count in zip(cached, counts, strict=True)]
            batch = runner.batch(tokens, [[1], [2], [3]], cached=cached, hidden_states=given)
            logits.append(runner.step(batch).logits.float().cpu().clone())
            cached = [start + count for start, count in zip(cached, counts, strict=True)]
        found.append(torch.cat(logits))
    assert (found[1] - found[0]).abs().max() <= 3e-2 * found[0].abs().max()


@thorough(DTYPE, r"\[float32")
@pytest.mark.parametrize("state", DTYPES)
def test_launches_of_a_layer(state: str, npu: Opened, tmp_path: Path) -> None:
    """The page has those of a decode of a recurrent layer, by which a model of two exceeds a model of one."""
    prompts, steps = [[1, 2], [3, 4], [5, 6]], list[Counter[str]]()
    for count in (1, 2):
        types = [*["linear_attention"] * count, "full_attention"]
        config = {**CONFIG, "num_hidden_layers": len(types), "layer_types": types, "mamba_ssm_dtype": state}
        backend = opened(npu, "graph", "bfloat16")
        runner = hal.Runner(hal.load_model(toys.write(tmp_path / str(count), config), backend), backend)
        found = []
        for tokens in (3, 2, 3):  # the first captures
            with backend.counting_launches() as launches:
                params = hal.SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
                assert len(list(hal.generate(runner, prompts, params))) == tokens * len(prompts)
                backend.device.synchronize()
            found.append(launches)
        steps.append(found[2] - found[1])  # the last decode
    rest = Counter({"Add": 2, "RmsNorm": 2, "Matmul": 2, "SwiGlu": 1})  # of norms and the MLP
    own = steps[1] - steps[0]
    assert own & rest == rest
    own -= rest
    page = (processes.ROOT / "docs" / "reference" / "recurrent-layers.md").read_text(encoding="utf-8")
    (row,) = [each.split("|") for each in page.splitlines() if each.startswith("| together |")]
    assert own.total() == int(row[2 + DTYPES.index(state)]), own


@thorough(MODE, r"\[graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_name_is_repeated_after_1200_tokens(npu: Opened, mode: str) -> None:
    """It is not if a state is lost between two chunks, or is that of another sequence."""
    compilation = {"compiler": mode} | ({} if mode == "eager" else {"capture_sizes": [2]})
    cache = {"num_tokens": 24 * 128, "block_size": 128, "num_sequences": 4}
    backend = npu(compilation=compilation, cache=cache, dtype="float16", max_prefill_tokens=512)
    runner = hal.Runner(hal.load_model(repeated_names.FOLDER, backend), backend)
    repeated_names.check(runner, *repeated_names.prompts(hal.Checkpoint.open(repeated_names.FOLDER)))
