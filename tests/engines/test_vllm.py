"""Tests of hal inside vLLM. Most need vLLM: `make test-vllm` runs them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from helpers.distributions import installed
from helpers.vllm_programs import found_by, needs_vllm, run

import hal
from hal.config.sources import environment_mapping
from hal.engines.vllm import register
from hal.engines.vllm.request import Requests
from hal.step import Bounds, InputBatch


@pytest.mark.parametrize(
    ("environment", "active"),
    [
        ({}, False),
        ({"HAL_VLLM": "1"}, True),
        ({"HAL_VLLM": "0"}, False),
        ({"VLLM_PLUGINS": "hal"}, True),
        ({"VLLM_PLUGINS": "other,hal"}, True),
        ({"VLLM_PLUGINS": "other"}, False),
    ],
)
def test_hal_is_active_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], active: bool
) -> None:
    for name in ("HAL_VLLM", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert "vllm" not in environment_mapping()
    assert register() == ("hal.engines.vllm.platform.HalPlatform" if active else None)


def new_requests() -> Requests:
    bounds = Bounds(vocab_size=100, first_block=1, num_blocks=20, max_length=64)
    inputs = InputBatch(
        hal.step.Batch, max_sequences=6, max_length=64, block_size=16, device=hal.vendor.HostDevice(), bounds=bounds
    )
    return Requests(inputs, seed="0")


def scheduled(
    *began: SimpleNamespace,
    ended: Sequence[str] = (),
    counts: Mapping[str, int] = MappingProxyType({}),
    again: Mapping[str, int] = MappingProxyType({}),
) -> SimpleNamespace:
    """Return the output of vLLM's scheduler for a step with new requests, and with those that start anew."""
    cached = SimpleNamespace(
        req_ids=[*again],
        new_block_ids=[[[block]] for block in again.values()],
        num_computed_tokens=[0] * len(again),
        num_output_tokens=[0] * len(again),
        resumed_req_ids={*again},
    )
    return SimpleNamespace(
        finished_req_ids=ended, scheduled_new_reqs=began, scheduled_cached_reqs=cached, num_scheduled_tokens=counts
    )


def began(name: str, prompt: list[int], block: int, **others: Any) -> SimpleNamespace:
    """Return a new request of vLLM's."""
    values = {
        "num_computed_tokens": 0,
        "sampling_params": SimpleNamespace(seed=None),
        "mm_features": [],
        "prefill_token_ids": None,
        "lora_request": None,
    }
    return SimpleNamespace(req_id=name, prompt_token_ids=prompt, block_ids=[[block]], **(values | others))


def test_all_ranks_keep_requests_in_the_same_rows() -> None:
    """The scheduler names those that ended in a set, which is in another order in each process."""

    def rows(ended: tuple[str, ...]) -> list[str]:
        requests = new_requests()
        new = [began(name, [1, 2], 1 + index) for index, name in enumerate("abcdef")]
        requests.update(scheduled(*new, counts=dict.fromkeys("abcdef", 2)))
        requests.update(scheduled(ended=ended))
        return [each.name for each in requests.running("abcdef")]

    found = [rows(order) for order in itertools.permutations("acd")]
    assert sorted(found[0]) == ["b", "e", "f"]
    assert found == found[:1] * 6


def test_a_preempted_request_that_comes_as_a_new_one_starts_anew() -> None:
    """Steps for the second model runner have its outputs behind its prompt, without one that was dropped."""
    requests = new_requests()
    requests.update(scheduled(began("a", [1, 2], 1), counts={"a": 2}))
    (first,) = requests.running(["a"])
    seed = first.seed
    for token in (5, 6, 7):
        requests.settle([first], [token])
    requests.update(scheduled(began("a", [1, 2], 3, prefill_token_ids=[1, 2, 5, 6]), counts={"a": 4}))
    (again,) = requests.running(["a"])
    assert (again.outputs, again.computed, again.blocks, again.seed) == ([5, 6], 0, [[3]], seed)
    requests.update(scheduled(began("b", [1, 2], 4, prefill_token_ids=[1, 2, 9]), ended=["a"], counts={"b": 3}))
    assert [each.tokens for each in requests.running(["b"])] == [[1, 2, 9]]


@pytest.mark.parametrize("dropped", [0, 1])
@pytest.mark.parametrize("runner", [1, 2])
def test_a_session_goes_on_drawing(dropped: int, runner: int) -> None:
    """Its prompt has the tokens so far, without one that asynchronous scheduling may have sampled in vain."""
    requests = new_requests()
    requests.update(scheduled(began("a", [1, 2], 1), counts={"a": 2}))
    (first,) = requests.running(["a"])
    for token in (5, 6, 7)[: 2 + dropped]:
        requests.settle([first], [token])
    further = [1, 2, 5, 8, 9]
    again = began("a", further, 3, prefill_token_ids=further if runner == 2 else None)
    requests.update(scheduled(again, counts={"a": 5}))
    (extended,) = requests.running(["a"])
    assert (extended.drawn, extended.outputs, extended.seed) == (3, [], first.seed)
    requests.update(scheduled(began("a", [1, 2], 4, sampling_params=SimpleNamespace(seed=-1)), counts={"a": 2}))
    assert requests.running(["a"])[0].seed == 2**63 - 1


def test_a_prompt_is_scored_again_if_its_output_was_dropped() -> None:
    """vLLM drops the output of a step that runs while it resets the requests, and with it the log-probabilities."""
    requests, params = new_requests(), SimpleNamespace(seed=None, prompt_logprobs=1)
    requests.update(scheduled(began("a", [1, 2, 3], 1, sampling_params=params), counts={"a": 3}))
    (request,) = requests.running(["a"])
    assert request.to_score(3) == 2
    request.scored = 2  # and the output has taken the log-probabilities
    requests.settle([request], [5])
    requests.update(scheduled(again={"a": 2}, counts={"a": 3}))
    assert (request.outputs, request.to_score(3)) == ([], 2)
    request.scored, request.prompt_logprobs = 1, ["of a chunk"]  # An output takes them from a whole prompt only.
    requests.update(scheduled(again={"a": 3}, counts={"a": 3}))
    assert (request.to_score(3), request.prompt_logprobs) == (1, ["of a chunk"])


def check_random(
    tmp_path: Path,
    checkpoint: Path,
    device: str,
    compiler: str,
    dtype: str,
    requests: int,
    *,
    devices: int = 1,
    runner: int | None = None,
    parallel: Mapping[str, Any] = MappingProxyType({}),
    **vllm: Any,
) -> dict[str, int]:
    """Check random requests, and return what was counted."""
    if device == "npu" and not installed("torch-npu"):
        pytest.skip("torch_npu is not installed")
    configuration = {"backend": device, "compilation": {"compiler": compiler}, "parallel": dict(parallel)}
    found = found_by(
        "vllm_requests.main",
        tmp_path,
        checkpoint,
        devices=devices,
        runner=runner,
        hal=configuration,
        vllm=vllm,
        dtype=dtype,
        block=16 if device == "cpu" else 128,
        seed=1,
        requests=requests,
    )
    assert found["wrong"] == []
    assert len(found["ties"]) <= (0 if dtype == "float32" else requests // 20)
    assert found["requests"] == requests
    counts: dict[str, int] = found["counts"]
    seen = ("mixed", "decode", "chunks", "resumed", "prefix hits", "ended together")
    assert [kind for kind in seen if not counts[kind]] == []
    return counts


@needs_vllm
@pytest.mark.parametrize(
    ("name", "device", "compiler", "dtype", "requests"),
    [
        ("trained", "cpu", "eager", "float32", 200),
        ("trained", "cpu", "graph", "float32", 200),
        ("trained", "cpu", "piecewise", "float32", 200),
        ("trained_experts", "cpu", "graph", "float32", 60),
        ("trained", "npu", "eager", "float16", 200),
        ("trained", "npu", "graph", "float16", 200),
        ("trained", "npu", "piecewise", "float16", 200),
        ("trained", "npu", "npugraph_ex", "float16", 200),
    ],
)
@pytest.mark.shows("texts", "vLLM")
@pytest.mark.shows("requests that join running ones", "vLLM")
def test_random_requests_get_the_tokens_of_generate(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, device: str, compiler: str, dtype: str, requests: int
) -> None:
    """A small cache and small steps, so that requests are cut into chunks, resumed, and find cached prefixes."""
    check_random(tmp_path, request.getfixturevalue(name), device, compiler, dtype, requests)


@needs_vllm
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize(
    ("name", "device", "dtype", "requests", "ranks"),
    [
        ("trained", "cpu", "float32", 200, 1),
        ("trained_experts", "cpu", "float32", 60, 2),
        ("trained", "npu", "float16", 60, 1),
    ],
)
@pytest.mark.shows("texts", "vLLM")
def test_steps_for_either_model_runner_give_the_tokens_of_generate(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    name: str,
    device: str,
    dtype: str,
    requests: int,
    ranks: int,
    runner: int,
) -> None:
    """For the second, vLLM schedules a preempted request as a new one, with its outputs."""
    checkpoint = request.getfixturevalue(name)
    check_random(
        tmp_path, checkpoint, device, "graph", dtype, requests, devices=ranks, runner=runner, tensor_parallel_size=ranks
    )


@needs_vllm
@pytest.mark.parametrize(
    ("device", "dtype", "requests", "asynchronous"),
    [("cpu", "float32", 200, False), ("npu", "float16", 60, False), ("npu", "float16", 60, True)],
)
def test_a_step_starts_before_the_tokens_of_the_last_are_on_the_host(
    trained: Path, tmp_path: Path, device: str, dtype: str, requests: int, asynchronous: bool
) -> None:
    counts = check_random(tmp_path, trained, device, "graph", dtype, requests, async_scheduling=asynchronous)
    assert bool(counts["ahead"]) == asynchronous


@needs_vllm
@pytest.mark.parametrize(
    ("name", "device", "compiler", "dtype", "requests", "parallel"),
    [
        ("trained", "cpu", "eager", "float32", 200, {}),
        ("trained", "cpu", "graph", "float32", 200, {}),
        ("trained", "cpu", "piecewise", "float32", 200, {}),
        ("trained_experts", "cpu", "graph", "float32", 100, {}),
        ("trained_experts", "cpu", "graph", "float32", 100, {"experts": "all_to_all"}),
        ("trained", "npu", "eager", "float16", 200, {}),
        ("trained", "npu", "graph", "float16", 200, {}),
        ("trained", "npu", "piecewise", "float16", 200, {}),
        ("trained", "npu", "npugraph_ex", "float16", 200, {}),
    ],
)
@pytest.mark.shows("tensor parallelism", "vLLM")
def test_two_ranks_split_a_model(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    name: str,
    device: str,
    compiler: str,
    dtype: str,
    requests: int,
    parallel: dict[str, Any],
) -> None:
    checkpoint = request.getfixturevalue(name)
    check_random(
        tmp_path, checkpoint, device, compiler, dtype, requests, devices=2, parallel=parallel, tensor_parallel_size=2
    )


@needs_vllm
@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize(
    ("name", "experts", "ranks"),
    [("trained", "split", 1), ("trained_experts", "split", 2), ("trained_experts", "all_to_all", 2)],
)
@pytest.mark.shows("data parallelism", "vLLM")
def test_two_replicas_give_the_tokens_of_generate(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, experts: str, ranks: int, device: str
) -> None:
    """Those of a dense model are alone, and vLLM keeps those of a mixture of experts in step.

    A random request without a seed gets other tokens from each.
    """
    if device == "npu" and not installed("torch-npu"):
        pytest.skip("torch_npu is not installed")
    configuration = {"backend": device, "compilation": {"compiler": "graph"}, "parallel": {"experts": experts}}
    found = found_by(
        "vllm_ranks.replicas",
        tmp_path,
        request.getfixturevalue(name),
        hal=configuration,
        devices=2,
        dtype="float32" if device == "cpu" else "float16",
        vllm={"data_parallel_size": 2},
    )
    assert found["wrong"] == []
    assert len(found["ties"]) <= (0 if device == "cpu" else 2)
    assert found["counts"]["ranks"] == ranks
    assert found["drawn"][0] != found["drawn"][1]


@needs_vllm
def test_a_killed_rank_ends_the_engine(trained: Path, tmp_path: Path) -> None:
    found = found_by("vllm_ranks.killed", tmp_path, trained, hal={"backend": "cpu"}, vllm={"tensor_parallel_size": 2})
    assert found["error"].startswith("RuntimeError")  # vLLM's, from the error of the other rank
    assert found["seconds"] < 30
    assert found["left"] == []


CONNECTED = {
    "kv_connector": "HalConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"folder": "/dev/shm/prefixes"},
}
"""vLLM's ``kv_transfer_config`` for hal's KV connector."""
REFUSED = {
    "enable_lora=True, fully_sharded_loras=True": "hal does not support vLLM's fully_sharded_loras = True",
    "enable_lora=True, lora_target_modules=['q_proj']": "hal does not support vLLM's target_modules = ['q_proj']",
    "enable_lora=True, enable_moe_shared_loras=True": "hal does not support vLLM's enable_moe_shared_loras = True",
    "enable_lora=True, lora_dtype='float16'": "hal does not support vLLM's lora_dtype = torch.float16",
    "kv_transfer_config={'kv_connector': 'NixlConnector', 'kv_role': 'kv_both'}": (
        "hal does not support vLLM's kv_connector = NixlConnector"
    ),
    f"kv_transfer_config={CONNECTED | {'kv_connector_extra_config': {}}}": "HalConnector has no folder",
    f"kv_transfer_config={CONNECTED | {'kv_connector_extra_config': {'folder': 'a', 'fast': 1}}}": (
        "hal does not read fast in kv_connector_extra_config"
    ),
    "kv_offloading_size=1": "hal does not support vLLM's kv_offloading_size = 1",
    "pipeline_parallel_size=2": "hal does not support vLLM's pipeline_parallel_size = 2",
    "additional_config={'hal': {'parallel': {'tensor': 2}}}": "has parallel.tensor = 2, which vLLM decides",
    "additional_config={'Hal': {'backend': 'npu'}}": "hal does not read Hal in vLLM's additional_config, only hal",
    "additional_config={'hal': {}, 'compilation': {}}": "hal does not read compilation in vLLM's additional_config",
    "kv_cache_dtype='fp8_e5m2'": "hal does not support vLLM's kv_cache_dtype = fp8_e5m2",
    "load_format='pt'": "hal does not support vLLM's load_format = pt",
    "ignore_patterns=['a*']": "hal does not support vLLM's ignore_patterns = ['a*'] in load_config",
    "safetensors_load_strategy='eager'": "hal does not support vLLM's safetensors_load_strategy = eager in load_config",
    "enable_prompt_embeds=True": "hal does not support vLLM's enable_prompt_embeds = True",
    "enable_dbo=True": "hal does not support vLLM's enable_dbo = True",
    "hf_overrides={'rope_theta': 1e6}": "hal does not support vLLM's hf_overrides = {'rope_theta': 1000000.0}",
    "hf_config_path='checkpoints/tiny-python'": "hal does not support vLLM's hf_config_path = checkpoints/tiny-python",
    "model_impl='transformers'": "hal does not support vLLM's model_impl = transformers",
    "use_fp64_gumbel=True": "hal does not support vLLM's use_fp64_gumbel = True",
    "distributed_timeout_seconds=5": "hal does not support vLLM's distributed_timeout_seconds = 5",
    "all2all_backend='deepep_low_latency'": "hal does not support vLLM's all2all_backend = deepep_low_latency",
    "cpu_offload_gb=1": "hal does not support vLLM's uva = ",
    "attention_config={'backend': 'FLASH_ATTN'}": "hal does not support vLLM's backend = ",
    "attention_config={'flash_attn_version': 3}": "hal does not support vLLM's flash_attn_version = 3",
    "runner='pooling'": "hal does not support vLLM's runner = pooling",
    "quantization='fp8'": "vLLM's quantization = fp8 of a checkpoint that is not quantized",
    "quantization_config={'linear': 'fp8_per_tensor'}": "hal does not support vLLM's quantization_config = ",
    "performance_mode='interactivity'": "hal does not support vLLM's performance_mode = interactivity",
    "cpu_distributed_timeout_seconds=5": "hal does not support vLLM's cpu_distributed_timeout_seconds = 5",
    "ubatch_size=2": "hal does not support vLLM's ubatch_size = 2",
    "optimization_level=0": "hal does not support vLLM's optimization_level = ",
    "cudagraph_metrics=True": "hal does not support vLLM's cudagraph_metrics = True",
    "compilation_config={'mode': 3}": "hal does not support vLLM's mode = ",
    "compilation_config={'splitting_ops': ['a']}": "hal does not support vLLM's splitting_ops = ['a']",
    "compilation_config={'custom_ops': ['+rms_norm']}": "hal does not support vLLM's custom_ops = ['+rms_norm']",
    "speculative_config={'method': 'ngram_gpu', 'num_speculative_tokens': 2}": "vLLM's method = ngram_gpu in specul",
    "speculative_config={'method': 'ngram', 'num_speculative_tokens': 33}": "vLLM's num_speculative_tokens = 33",
    "speculative_config={'method': 'ngram', 'num_speculative_tokens': 2, 'rejection_sample_method': 'block'}": (
        "hal does not support vLLM's rejection_sample_method = block in speculative_config"
    ),
    "speculative_config={'method': 'ngram', 'num_speculative_tokens': 2}, logits_processors=['a:B']": (
        "hal does not support vLLM's logits_processors with speculative decoding"
    ),
}
"""Arguments that hal refuses before a worker starts, and why."""


@needs_vllm
def test_what_is_refused_in_the_configuration(trained: Path) -> None:
    program = (
        "import json, sys\n"
        "from vllm import EngineArgs\n"
        "from vllm.config import KVTransferConfig\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        asked = eval(f'dict({arguments})')\n"
        "        if 'kv_transfer_config' in asked:\n"
        "            asked['kv_transfer_config'] = KVTransferConfig(**asked['kv_transfer_config'])\n"
        f"        EngineArgs(model={str(trained)!r}, max_model_len=64, **asked).create_engine_config()\n"
        "    except Exception as error:\n"
        "        print('refused:', json.dumps([arguments, f'{type(error).__name__}: {error}']))\n"
    )
    accepted = [
        "",
        "enforce_eager=True",
        f"kv_transfer_config={CONNECTED}",
        "enable_lora=True, max_loras=2, max_cpu_loras=4, max_lora_rank=8",
        "use_tqdm_on_load=False",
        "kv_cache_dtype='fp8'",
        "kv_cache_dtype='int8_per_token_head'",
        "compilation_config={'cudagraph_capture_sizes': [4]}",
        "speculative_config={'method': 'ngram', 'num_speculative_tokens': 32, 'prompt_lookup_max': 3}",
    ]
    result = run(program, json.dumps([*REFUSED, *accepted]), runner=1)  # The second takes processors beside drafts.
    lines = [each.removeprefix("refused: ") for each in result.stdout.splitlines() if each.startswith("refused: ")]
    found = dict(map(json.loads, lines))
    assert [each for each in accepted if each in found] == [], found
    wrong = {each: found.get(each) for each, problem in REFUSED.items() if problem not in found.get(each, "")}
    assert wrong == {}, result.stderr[-2000:]


ON_CPU = "dtype='float32', additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 200000}}}"
UNREAD = {"VLLM_BATCH_INVARIANT": "1", "VLLM_FLOAT32_MATMUL_PRECISION": "high"}
CONFIGURED = {"HAL_BACKEND": "cpu", "HAL_CACHE__BLOCK_SIZE": "24.5"}


@needs_vllm
@pytest.mark.parametrize(
    ("environment", "arguments", "problem"),
    [
        (
            {},
            "enforce_eager=True, additional_config={'hal': {'compilation': {'compiler': 'graph'}}}",
            "vLLM's enforce_eager requires compilation.compiler = 'eager', and hal's configuration has "
            "compilation.compiler = 'graph'",
        ),
        (
            {},
            "dtype='float32', additional_config={'hal': {'backend': 'cpu', 'dtype': 'bfloat16'}}",
            "vLLM's dtype requires dtype = 'float32', and hal's configuration has dtype = 'bfloat16'",
        ),
        (
            {},
            "block_size=32, additional_config={'hal': {'backend': 'cpu', 'cache': {'block_size': 16}}}",
            "vLLM's block_size requires cache.block_size = 32, and hal's configuration has cache.block_size = 16",
        ),
        (
            {},
            "compilation_config={'cudagraph_capture_sizes': [4]}, "
            "additional_config={'hal': {'backend': 'cpu', 'compilation': {'capture_sizes': [2]}}}",
            "vLLM's cudagraph_capture_sizes requires compilation.capture_sizes = [4], and hal's configuration has "
            "compilation.capture_sizes = [2]",
        ),
        ({}, "additional_config={'hal': {'backend': 'cpu', 'compilr': 1}}", "compilr"),
        *(({name: value}, "", f"hal does not read vLLM's variable {name} = {value}") for name, value in UNREAD.items()),
        (CONFIGURED, "", "found float 24.5 @ environment.cache.block_size"),
        (CONFIGURED, "additional_config={'hal': {'backend': 'none_such'}}", "none_such"),
        (
            {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},  # with which vLLM admits them
            f"max_model_len=100000, {ON_CPU}",
            "sequences of 100000 tokens were asked for, and Qwen3ForCausalLM takes 1 to 1024",
        ),
        ({}, "enable_expert_parallel=True", "hal does not read vLLM's enable_expert_parallel"),
    ],
)
def test_what_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    trained: Path,
    trained_experts: Path,
    environment: dict[str, str],
    arguments: str,
    problem: str,
) -> None:
    """The environment configures hal if no argument does."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = trained_experts if "expert" in arguments else trained
    length = "" if "max_model_len" in arguments else "max_model_len=64, "
    result = run(f"from vllm import LLM; LLM(model={str(model)!r}, {length}{arguments})")
    assert result.returncode != 0
    assert problem in result.stdout + result.stderr


@needs_vllm
@pytest.mark.parametrize("variable", ["VLLM_COMPUTE_NANS_IN_LOGITS", "VLLM_RAISE_ON_LOGIT_NANS"])
def test_logits_with_a_nan(monkeypatch: pytest.MonkeyPatch, trained: Path, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    program = (
        "import torch\n"
        "from vllm import LLM, SamplingParams\n"
        f"engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32', disable_log_stats=False,\n"
        "             additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 1024}}})\n"
        "def corrupted():\n"
        "    return [each.value for each in engine.get_metrics() if each.name == 'vllm:corrupted_requests']\n"
        "params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)\n"
        "engine.generate('x = ', params)\n"
        "before = corrupted()\n"
        "nans = torch.full([engine.llm_engine.model_config.get_hidden_size()], torch.nan)\n"
        "engine.collective_rpc('reload_weights', kwargs={'weights_iterator': [('model.norm.weight', nans)]})\n"
        "engine.generate('x = ', params)\n"
        "print('corrupted:', before, corrupted())\n"
    )
    result = run(program)
    if variable == "VLLM_RAISE_ON_LOGIT_NANS":
        assert result.returncode != 0
        assert "NumericsError: the logits of 1" in result.stderr
    else:
        assert "corrupted: [0] [1]" in result.stdout, result.stdout + result.stderr


@needs_vllm
def test_vllm_names_the_sizes_to_capture(trained: Path) -> None:
    configuration = {"backend": "cpu", "cache": {"num_tokens": 512}, "compilation": {"compiler": "graph"}}
    program = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        f"from vllm import LLM; LLM(model={str(trained)!r}, max_model_len=64, max_num_seqs=4, dtype='float32',\n"
        f"    compilation_config={{'cudagraph_capture_sizes': [4, 2]}}, additional_config={{'hal': {configuration}}})"
    )
    result = run(program)
    assert "captured decode for whole steps: 2 sequences, 4 sequences\n" in result.stderr, result.stdout + result.stderr


@needs_vllm
def test_dense_replicas_count_among_the_ranks_that_share_a_host(trained: Path) -> None:
    program = (
        "from vllm import EngineArgs\n"
        "sizes = dict(tensor_parallel_size=2, data_parallel_size=3, data_parallel_size_local=3, max_model_len=64)\n"
        f"config = EngineArgs(model={str(trained)!r}, **sizes).create_engine_config()\n"
        "config.parallel_config.reconfigure_for_independent_dp_rank()\n"
        "print('ranks:', config.additional_config['hal_local_ranks'])"
    )
    result = run(program)
    assert "ranks: 6\n" in result.stdout, result.stdout + result.stderr


@needs_vllm
def test_ranks_of_a_host_divide_its_memory(trained: Path) -> None:
    found = []
    for ranks in (1, 3):
        config = {"hal": {"backend": "cpu"}, "hal_local_ranks": ranks}
        result = run(
            f"from vllm import LLM; engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32', "
            f"gpu_memory_utilization=0.3, additional_config={config!r})\n"
            "print('blocks:', engine.llm_engine.vllm_config.cache_config.num_gpu_blocks)"
        )
        assert "blocks: " in result.stdout, result.stdout + result.stderr
        found.append(int(result.stdout.partition("blocks: ")[2].split()[0]))
    assert 0 < found[1] < 0.5 * found[0], f"blocks of one and of three ranks: {found}"


@needs_vllm
def test_the_cache_holds_as_many_tokens_as_hal_is_asked_for(monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    """1,024 tokens are 64 blocks of 16, beside vLLM's null block."""
    monkeypatch.setenv("HAL_BACKEND", "cpu")
    monkeypatch.setenv("HAL_CACHE", '{"num_tokens": 1024, "block_size": 16}')
    program = (
        f"from vllm import LLM; engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32')\n"
        "print('blocks:', engine.llm_engine.vllm_config.cache_config.num_gpu_blocks)"
    )
    result = run(program)
    assert "blocks: 65\n" in result.stdout, result.stdout + result.stderr


@needs_vllm
def test_a_name_of_the_hub_is_refused(trained: Path) -> None:
    program = (
        "from vllm import EngineArgs\n"
        "from hal.engines.vllm.vllm_config import check_config\n"
        f"config = EngineArgs(model={str(trained)!r}, max_model_len=64).create_engine_config()\n"
        "config.model_config.model = 'acme/model'\n"
        "check_config(config)\n"
    )
    result = run(program)
    assert "hal loads a checkpoint from a folder, and vLLM's model is acme/model, which is none" in result.stderr


@needs_vllm
def test_images_of_a_model_without_an_encoder_are_refused(trained: Path) -> None:
    program = (
        "from vllm import EngineArgs\n"
        "from vllm.config.multimodal import MultiModalConfig\n"
        "from hal.engines.vllm.vllm_config import check_config\n"
        f"config = EngineArgs(model={str(trained)!r}, max_model_len=64).create_engine_config()\n"
        "config.model_config.multimodal_config = MultiModalConfig(language_model_only=True)\n"
        "check_config(config)\n"
        "print('text alone is taken')\n"
        "config.model_config.multimodal_config = MultiModalConfig()\n"
        "check_config(config)\n"
    )
    result = run(program)
    assert "text alone is taken" in result.stdout, result.stderr
    assert "reads images, which hal does not prepare for" in result.stderr


@needs_vllm
def test_a_paused_engine_resumes(trained: Path) -> None:
    """vLLM clears the caches of a paused worker. It cannot sleep, which gives memory back."""
    program = (
        "import asyncio\n"
        "from vllm import SamplingParams\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "from vllm.v1.engine.async_llm import AsyncLLM\n"
        "async def main():\n"
        f"    arguments = AsyncEngineArgs(model={str(trained)!r}, max_model_len=64, dtype='float32',\n"
        "        additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 1024}}})\n"
        "    engine = AsyncLLM.from_engine_args(arguments)\n"
        "    async def text(name):\n"
        "        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)\n"
        "        async for output in engine.generate('x = ', params, name): pass\n"
        "        return output.outputs[0].text\n"
        "    first = await text('a')\n"
        "    await engine.pause_generation()\n"
        "    print('paused:', await engine.is_paused())\n"
        "    await engine.resume_generation()\n"
        "    print('resumed:', await text('b') == first)\n"
        "    try: await engine.sleep(1)\n"
        "    except Exception as error: print('asleep:', error)\n"
        "    await engine.resume_generation()\n"
        "    print('awake:', await text('c') == first)\n"
        "    engine.shutdown()\n"
        "asyncio.run(main())\n"
    )
    result = run(program)
    for wanted in ("paused: True", "resumed: True", "hal does not support vLLM's sleep of level 1", "awake: True"):
        assert wanted in result.stdout, result.stdout + result.stderr


@needs_vllm
def test_a_failure_of_the_sampler_is_the_one_that_is_reported(trained: Path) -> None:
    """With asynchronous scheduling, the next step has begun, and would fail for want of a token."""
    program = (
        "from vllm import LLM, SamplingParams\n"
        f"engine = LLM(model={str(trained)!r}, max_model_len=64, dtype='float32', async_scheduling=True,\n"
        "             additional_config={'hal': {'backend': 'cpu', 'cache': {'num_tokens': 1024}}})\n"
        "worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker\n"
        "def fails(*_): raise ArithmeticError('the sampler has failed')\n"
        "worker.model_runner.sampler.register_forward_pre_hook(fails)\n"
        "engine.generate('x = ', SamplingParams(max_tokens=4))\n"
    )
    result = run(program)
    assert result.returncode != 0
    assert result.stderr.rstrip().splitlines()[-1].endswith("ArithmeticError: the sampler has failed"), result.stderr
