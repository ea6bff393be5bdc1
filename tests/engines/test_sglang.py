"""Tests of hal inside SGLang. Most need SGLang: `make test-sglang` runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributions import installed
from helpers.sglang_server import ENVIRONMENT, needs_sglang
from helpers.vllm_programs import python
from safetensors.torch import load_file, save_file

import hal
from hal.engines.sglang import register
from hal.engines.sglang.server_args import check_checkpoint
from hal.errors import ConfigError, ModelError

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("environment", "active"), [({}, False), ({"SGLANG_PLATFORM": "hal"}, True), ({"SGLANG_PLATFORM": "other"}, False)]
)
def test_hal_is_active_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], active: bool
) -> None:
    for name in ("SGLANG_PLATFORM", "SGLANG_EXTERNAL_MODEL_PACKAGE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", list(before))
    assert register() == ("hal.engines.sglang.platform:HalPlatform" if active else None)
    assert os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE") == ("hal.engines.sglang" if active else None)
    assert (sys.meta_path != before) == active


def test_other_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "hal")
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "others.models")
    with pytest.raises(ConfigError, match=r"SGLANG_EXTERNAL_MODEL_PACKAGE is 'others\.models'"):
        register()


def run(*command: str, timeout: int = 1500) -> subprocess.CompletedProcess[str]:
    """Run Python with SGLang, on the emulated CANN if torch_npu is installed."""
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(
        [*python(), *command], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


ON_NPU = pytest.mark.skipif(not installed("torch-npu"), reason="torch_npu is not installed")


@needs_sglang
@pytest.mark.parametrize(
    ("backend", "name", "compiler", "requests", "arguments"),
    [
        ("cpu", "trained", "eager", 100, {}),
        ("cpu", "trained", "graph", 100, {}),
        ("cpu", "trained", "piecewise", 40, {"page_size": 16, "enable_mixed_chunk": True}),
        ("cpu", "trained", None, 30, {"enable_torch_compile": True, "torch_compile_max_bs": 4}),
        ("cpu", "trained_experts", "graph", 30, {"page_size": 1}),
        pytest.param("npu", "trained", "graph", 40, {"dtype": "float16"}, marks=ON_NPU),
        pytest.param("npu", "trained", "eager", 40, {"dtype": "bfloat16"}, marks=ON_NPU),
    ],
)
@pytest.mark.shows("texts", "SGLang")
@pytest.mark.shows("requests that join running ones", "SGLang")
def test_random_requests_get_the_tokens_of_generate(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: str,
    name: str,
    compiler: str | None,
    requests: int,
    arguments: dict[str, Any],
) -> None:
    """A small cache and small steps, so that requests are cut into chunks, and find cached prefixes.

    SGLang retracts a request in each twentieth step of one case.
    """
    retracting = arguments.get("page_size") == 1
    if retracting:
        monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
        monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")
    out = tmp_path / "found.json"
    asked = {
        "checkpoint": str(request.getfixturevalue(name)),
        "out": str(out),
        "seed": 1,
        "hal": {"backend": backend} | ({"compilation": {"compiler": compiler}} if compiler else {}),
        "requests": requests,
        "arguments": arguments,
    }
    result = run(str(HERE / "sglang_requests.py"), json.dumps(asked))
    assert out.exists(), result.stdout + result.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    print(asked, found["counts"], f"worst score: {found['worst score']}")  # noqa: T201
    assert found["wrong"] == []
    assert found["requests"] == requests
    assert found["worst score"] < (1e-3 if backend == "cpu" else 0.1)  # 16 bits on an NPU
    kinds = ("prefix hits", "chunks", "regex", "penalties", "prompt logprobs") + ("retractions",) * retracting
    assert all(found["counts"][kind] > 0 for kind in kinds)


@needs_sglang
@pytest.mark.shows("new weights while it runs", "SGLang")
def test_a_running_server_takes_new_weights(trained: Path, tmp_path: Path) -> None:
    """SGLang flushes its cache of prefixes, which the former weights computed. hal keeps its captured graphs."""
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    path = other / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    changed = {
        name: tensor * (1 + 0.5 * torch.rand(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in load_file(path).items()
    }
    save_file(changed, path)
    out = tmp_path / "found.json"
    asked = {"first": str(trained), "second": str(other), "out": str(out)}
    result = run(str(HERE / "sglang_weights.py"), json.dumps(asked))
    assert out.exists(), result.stdout + result.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    print(found)  # noqa: T201
    assert found["different"]
    assert [each["name"] for each in found["steps"] if not each["equal"]] == []
    assert [each["updated"] for each in found["steps"]] == [None, None, True, True]
    assert [each["cached"] > 0 for each in found["steps"]] == [False, True, False, False]


SCORES = """
import json, sys, sglang, torch
from sglang.srt.managers.io_struct import GenerateReqInput
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], dtype="float32", context_length=64, max_total_tokens=256, disable_radix_cache=True,
        chunked_prefill_size=-1, mem_fraction_static=0.5, log_level="error",
        json_model_override_args=json.dumps({"hal": {"backend": "cpu"}}),
    )
    asked = {"query": [9, 10, 11], "items": [[12, 13], [14, 13]], "label_token_ids": [20, 21]}
    width = int(sys.argv[2])

    def embedded():
        given = GenerateReqInput(input_embeds=[[0.0] * width] * 3, sampling_params={"max_new_tokens": 1})
        engine.loop.run_until_complete(engine.tokenizer_manager.generate_request(given, None).__anext__())

    overridden = {"embed_override_token_id": 10, "query_embed_overrides": [torch.zeros(width)]}
    for further in (
        embedded, lambda: engine.score(**asked, **overridden),
        lambda: engine.score(**asked, score_extraction_token_id=13), lambda: engine.generate(input_ids=[9, -1]),
        lambda: engine.generate(input_ids=[9], sampling_params={"stream_interval": "often"}),
        lambda: engine.generate(input_ids=[9], sampling_params={"logit_bias": {"5": None}}),
    ):
        try:
            further()
        except ValueError as error:
            print("REFUSED", type(error).__name__, error)
        print("SCORES", engine.score(**asked, apply_softmax=True).scores)
    engine.shutdown()
"""


@needs_sglang
def test_requests_with_what_hal_does_not_read_are_refused(trained: Path, tmp_path: Path) -> None:
    """The caller gets the error, and SGLang's scheduler goes on."""
    program = tmp_path / "scores.py"
    program.write_text(SCORES, encoding="utf-8")
    size = json.loads((trained / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    result = run(str(program), str(trained), str(size), timeout=300)
    refused = [each for each in result.stdout.splitlines() if each.startswith("REFUSED ")]
    problems = ("embeddings in place of tokens", "embeddings in place of tokens", "positions to score at")
    expected = [f"a request to SGLang has {each}, which hal does not support" for each in problems]
    expected += [
        "the prompt has the token id -1",
        "stream_interval has the wrong type",
        "logit_bias has the wrong type",
    ]
    assert len(refused) == len(expected), result.stdout + result.stderr
    for each, problem in zip(refused, expected, strict=True):
        assert each.startswith(f"REFUSED RequestError {problem}")
    with hal.open({"backend": "cpu", "dtype": "float32"}) as backend:
        runner = hal.Runner(hal.load_model(trained, backend), backend)
        logits = runner.step(runner.batch([[9, 10, 11, 12, 13], [9, 10, 11, 14, 13]], [[1], [2]])).logits
    wanted = logits[:, [20, 21]].softmax(-1)
    scores = [json.loads(each[7:]) for each in result.stdout.splitlines() if each.startswith("SCORES ")]
    assert len(scores) == len(expected)
    for found in scores:
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-5)


ACCELERATED = """
import importlib.util, types, torch
if importlib.util.find_spec("torch_npu"):
    import torch_npu
else:  # Another backend of torch's, under its name.
    torch.utils.rename_privateuse1_backend("npu")
    module = types.ModuleType("npu")
    module.is_available = lambda: True
    torch._register_device_module("npu", module)
assert torch.npu.is_available()
import sglang.srt.mem_cache.pool_host.mha
from hal.engines.sglang.hooks import QUERIES
from sglang.srt.utils import common
print("FOUND", *(name for name in QUERIES if getattr(common, name)()))
"""


@needs_sglang
def test_sglang_sees_no_accelerator_of_torch() -> None:
    """With one, SGLang takes its code for NPUs, whose packages hal does not need."""
    result = run("-c", ACCELERATED, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].split() == ["FOUND"]


ARGUMENTS = """
import json, sys
from sglang.srt.server_args import prepare_server_args
found = []
for each in json.loads(sys.argv[2]):
    try:
        prepare_server_args(["--model-path", sys.argv[1], *each]).resolve_once()
        found.append("accepted")
    except (Exception, SystemExit) as error:
        found.append(f"{type(error).__name__}: {error}")
print("FOUND" + json.dumps(found))
"""
ON_CPU = ["--json-model-override-args", '{"hal": {"backend": "cpu"}}']
REFUSED: list[tuple[list[str], str]] = [
    (["--tp-size", "2"], "hal does not support SGLang's tp_size = 2"),
    (["--enable-lora"], "hal does not support SGLang's enable_lora = True"),
    (["--tokenizer-worker-num", "2"], "hal does not support SGLang's tokenizer_worker_num = 2"),
    (["--load-format", "dummy"], "hal does not support SGLang's load_format = 'dummy'"),
    (["--attention-backend", "triton"], "hal does not support SGLang's attention_backend = 'triton'"),
    (["--cuda-graph-bs-decode", "1", "2"], "hal does not support SGLang's cuda_graph_bs_decode = [1, 2]"),
    ([*ON_CPU, "--moe-runner-backend", "triton"], "hal does not support SGLang's moe_runner_backend = 'triton'"),
    ([*ON_CPU, "--ep-size", "2"], "hal does not support SGLang's ep_size = 2"),
    ([*ON_CPU, "--moe-a2a-backend", "deepep"], "hal does not support SGLang's moe_a2a_backend = 'deepep'"),
    ([*ON_CPU, "--model-impl", "transformers"], "hal does not support SGLang's model_impl = 'transformers'"),
    ([*ON_CPU, "--model-loader-extra-config", '{"a": 1}'], "hal does not support SGLang's model_loader_extra_config"),
    ([*ON_CPU, "--disable-chunked-prefix-cache"], "hal does not support SGLang's disable_chunked_prefix_cache = True"),
    ([*ON_CPU, "--kv-canary", "log"], "hal does not support SGLang's kv_canary = 'log'"),
    ([*ON_CPU, "--enable-fp32-lm-head"], "hal does not support SGLang's enable_fp32_lm_head = True"),
    (
        ["--json-model-override-args", '{"hal": {"backend": "cpu"}, "rope_theta": 5.0, "num_hidden_layers": 1}'],
        "hal does not read num_hidden_layers, rope_theta in SGLang's json_model_override_args, only hal",
    ),
    (["--json-model-override-args", '{"hal": {"compilr": 1}}'], "unknown key 'compilr'"),
    (
        [
            "--json-model-override-args",
            '{"hal": {"backend": "cpu", "compilation": {"compiler": "eager"}}}',
            "--enable-torch-compile",
        ],
        "enable_torch_compile is set, and hal's compiler is eager",
    ),
    (
        [
            "--json-model-override-args",
            '{"hal": {"backend": "cpu", "compilation": {"compiler": "inductor"}}}',
            "--enable-torch-compile",
            "--torch-compile-max-bs",
            "4",
        ],
        "torch_compile_max_bs",
    ),
    ([*ON_CPU, "--torch-compile-max-bs", "4"], "torch_compile_max_bs is 4"),
    (
        ["--json-model-override-args", '{"hal": {"backend": "cpu", "cache": {"block_size": 32}}}', "--page-size", "16"],
        "SGLang's page_size requires cache.block_size = 16, and hal's configuration has cache.block_size = 32",
    ),
    (["--compilation-config", '{"compiler": "graph"}'], "SystemExit: 2"),  # SGLang has no such argument.
    (ON_CPU, "accepted"),
    (
        [
            *ON_CPU,
            "--device",
            "cpu",
            "--disable-cuda-graph",
            "--schedule-policy",
            "lpm",
            "--enable-metrics",
            "--load-format",
            "safetensors",
            "--model-impl",
            "sglang",
        ],
        "accepted",
    ),
    ([*ON_CPU, "--enable-torch-compile", "--torch-compile-max-bs", "4"], "accepted"),
]


@needs_sglang
def test_arguments_are_served_or_refused(trained: Path) -> None:
    result = run("-c", ARGUMENTS, str(trained), json.dumps([each for each, _ in REFUSED]), timeout=300)
    assert "FOUND" in result.stdout, result.stderr
    found = json.loads(result.stdout.rpartition("FOUND")[2])
    for (arguments, problem), each in zip(REFUSED, found, strict=True):
        assert problem in each, arguments


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.seeing import build

    path = tmp_path_factory.mktemp("hybrid")
    build("Qwen3_5", 4, path)
    return path


RECURRENT = "layer 0 of Qwen35ForConditionalGeneration keeps states per sequence"


def test_a_model_with_recurrent_layers_is_refused(hybrid: Path, trained: Path) -> None:
    check_checkpoint(str(trained), hal.Config())
    with pytest.raises(ModelError, match=RECURRENT):
        check_checkpoint(str(hybrid), hal.Config())


@needs_sglang
def test_sglang_does_not_start_with_recurrent_layers(hybrid: Path) -> None:
    """hal refuses them before SGLang starts a process."""
    result = run("-c", ARGUMENTS, str(hybrid), json.dumps([ON_CPU]), timeout=300)
    assert "FOUND" in result.stdout, result.stderr
    assert RECURRENT in json.loads(result.stdout.rpartition("FOUND")[2])[0]
