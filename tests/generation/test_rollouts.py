"""Tests of hal.LLM as the rollout of a training loop: new weights, sleep, and log-probabilities of given tokens."""

from __future__ import annotations

import ast
import gc
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import adapter_of
from helpers.checkpoints import EXPERTS, random_checkpoint
from helpers.gguf_writing import write_gguf
from helpers.low_bits import Format, pair
from helpers.quantized import PARTS, all_layers, error, load, make_pair
from helpers.ranks import in_ranks
from helpers.replacing import PROMPTS, generated, tensors
from helpers.thorough import EXHAUSTIVE, MODE, PROCESSES, thorough
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import hal
from hal.errors import AsleepError, BatchError, CheckpointError, ConfigError
from hal.quantization.stored_layer import FloatLayer, Writer
from hal.quantize.quantize_checkpoint import quantize_checkpoint
from hal.step import ALL

log = logging.getLogger("tests")
CONFIG: dict[str, Any] = {"cache": {"block_size": 16, "num_tokens": 2048}, "compilation": {"capture_sizes": [1, 2, 4]}}
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
Texts = list[tuple[int, ...]]


def opened(folder: Path, compiler: str = "graph", **options: Any) -> hal.LLM:
    config = {**CONFIG, **options.pop("config", {})}
    return hal.LLM(folder, backend="cpu", dtype="float32", compiler=compiler, max_sequences=8, config=config, **options)


def texts(llm: hal.LLM) -> Texts:
    return [each.token_ids for each in llm.generate([list(each) for each in PROMPTS], **GREEDY)]


def texts_of(folder: Path) -> Texts:
    with opened(folder) as llm:
        return texts(llm)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("two")
    return random_checkpoint(folder / "1", seed=1), random_checkpoint(folder / "2", seed=2)


def test_weights_from_tensors_pairs_and_files(two: tuple[Path, Path]) -> None:
    first, second = two
    before, after = map(texts_of, two)
    assert before != after
    with opened(first) as llm:
        assert texts(llm) == before
        for given, wanted in (
            (tensors(second), after),
            (iter(tensors(first).items()), before),
            (str(second), after),
            (hal.Checkpoint.open(first), before),
        ):
            llm.replace_weights(given)
            assert texts(llm) == wanted


def test_a_wrong_tensor_changes_nothing(two: tuple[Path, Path]) -> None:
    with opened(two[0]) as llm:
        before = texts(llm)
        with pytest.raises(CheckpointError, match="nonsense is not in the model"):
            llm.replace_weights({**tensors(two[1]), "nonsense": torch.ones(1)})
        assert texts(llm) == before
        with pytest.raises(ConfigError, match="no drafter with weights"):
            llm.replace_weights({}, drafter=True)


def test_each_text_has_one_version_of_the_weights(two: tuple[Path, Path]) -> None:
    """Texts that run end with the former weights, and those that come later have the new ones."""
    wanted = [sorted(each) for each in map(texts_of, two)]
    given = [tensors(each) for each in two]
    with opened(two[0]) as llm, ThreadPoolExecutor(4) as threads:
        going = []
        for version in (1, 0, 1, 0):
            going += [threads.submit(texts, llm) for _ in range(4)]
            llm.replace_weights(given[version])
            assert sorted(texts(llm)) == wanted[version]
        each_prompt = [set(pair) for pair in zip(*map(texts_of, two), strict=True)]
        for done in going:
            assert all(text in both for text, both in zip(done.result(), each_prompt, strict=True))


def test_weights_of_a_drafter(two: tuple[Path, Path]) -> None:
    """A drafter with the model's own weights is always right. Its texts are the model's in any case."""
    draft = {"method": "model", "model": str(two[1]), "tokens": 2, "adapt": False, "examine": False}
    after = texts_of(two[0])
    with opened(two[0], draft=draft) as llm:
        assert texts(llm) == after
        assert llm.acceptance is not None
        assert llm.acceptance.rate < 0.5
        llm.replace_weights(tensors(two[0]), drafter=True)
        drafted, accepted = sum(llm.acceptance.drafted), sum(llm.acceptance.accepted)
        assert texts(llm) == after
        new = sum(llm.acceptance.drafted) - drafted
        assert sum(llm.acceptance.accepted) - accepted == new > 0


@thorough(PROCESSES)
def test_weights_from_a_process_group(two: tuple[Path, Path]) -> None:
    """Rank 0 trains, and rank 1 generates. A refused tensor keeps neither waiting."""
    _, found = in_ranks("broadcast_weights", 2, first=str(two[0]), second=str(two[1]))
    before, after = ([list(each) for each in texts_of(folder)] for folder in two)
    assert found == {"before": before, "after": after, "refused": True, "again": before}


def quantized_as(first: Path, plain: Path, folder: Path) -> Path:
    """Write the layers of a checkpoint in the form of another, by the rule of its format."""
    shutil.copytree(first, folder)
    description, found = hal.Checkpoint.open(first).quantization, dict[str, torch.Tensor]()
    assert description is not None
    for name, tensor in tensors(plain).items():
        layer, _, part = name.rpartition(".")
        stored = description[1].stored_as(layer) if part == "weight" and layer.endswith(PARTS) else None
        if stored is None:
            found[name] = tensor
            continue
        assert isinstance(stored.reader, Writer)
        written = stored.reader.write(FloatLayer(name, tensor, None, tensor.dtype), stored.form)
        found |= {f"{layer}.{each}": value.contiguous() for each, value in written.items()}
    save_file(found, folder / "model.safetensors")
    return folder


BLOCKS = {"block": 32, "tensor": -1}


def two_of(kind: str, folder: Path) -> tuple[list[Path], list[Path]]:
    """Return two checkpoints in floating point, and the same quantized: by hal, by the rules of formats, or by ggml."""
    scheme, _, detail = kind.partition("/")
    sizes: dict[str, Any] = {**(EXPERTS if detail == "experts" else {}), "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"attention_bias": True} if scheme in ("awq", "gptq", "compressed-tensors") else {}
    plain = [random_checkpoint(folder / f"{seed}", seed=seed, **sizes) for seed in (1, 2)]
    if detail == "w8a8":
        return plain, [
            make_pair(folder / f"{seed}-made", scheme, "w8a8", seed=seed, **sizes).folder  # type: ignore[arg-type]
            for seed in (1, 2)
        ]
    if scheme == "gguf":
        return plain, [write_gguf(each, each.with_suffix(".gguf"), kind=detail) for each in plain]
    if detail in BLOCKS or scheme in ("awq", "gptq", "gptq_v2", "compressed-tensors", "int-quantized"):
        bits = int(detail) if detail.isdigit() else 4
        pair(folder / "pair", Format(scheme, bits, BLOCKS.get(detail, 32)), **sizes)
        made = [quantized_as(folder / "pair/quantized", each, each.with_suffix(".rule")) for each in plain]
        wide, true = (
            all_layers(load(each, dtype="float32", quantized_weights=weights))
            for each, weights in ((made[0], "dequantized"), (plain[0], "auto"))
        )
        assert max(error(wide[path].weight, layer.weight) for path, layer in true.items()) < 1.5 / 2**bits
        return plain, made
    groups = {"group_size": 32} if scheme == "w4a16" else {}
    return plain, [quantize_checkpoint(each, each.with_suffix(".hal"), scheme, **groups).path for each in plain]


@thorough(MODE, "w8a16|fp8|/experts|gptq_v2|int-quantized|Q5_1|modelslim")
@pytest.mark.parametrize(
    "kind",
    [
        *("w8a8_dynamic", "w8a16", "w4a16", "fp8", "w8a8_dynamic/experts"),
        *("awq", "awq/experts", "gptq", "gptq_v2/8", "compressed-tensors", "int-quantized/8"),
        *(
            "fp8/block",
            "fp8/tensor",
            "compressed-tensors/w8a8",
            "modelslim/w8a8",
            "gguf/Q8_0",
            "gguf/Q4_0",
            "gguf/Q5_1",
        ),
    ],
)
def test_weights_are_quantized_at_arrival(kind: str, tmp_path: Path) -> None:
    plain, folders = two_of(kind, tmp_path)
    (probe,) = PROMPTS[1:2]
    kept: dict[str, Any] = {"config": {"quantized_weights": "kept"}} if kind.startswith("gguf") else {}
    with opened(folders[1], **kept) as fresh:
        wanted = texts(fresh)
        expected = fresh.log_probabilities([list(probe[:5])], [list(probe[5:])])[0]
    with opened(folders[0], **kept) as llm:
        for given in (tensors(plain[1]), iter(tensors(plain[1]).items())):
            llm.replace_weights(tensors(plain[0]))
            assert texts(llm) != wanted
            llm.replace_weights(given)
            assert texts(llm) == wanted
            assert torch.equal(llm.log_probabilities([list(probe[:5])], [list(probe[5:])])[0], expected)


@pytest.mark.parametrize(
    ("kind", "weights", "problem"),
    [
        ("act-order", "auto", r"groups by activations of the former weights \(act-order\)"),
        ("gguf/Q6_K", "kept", "package gguf does not quantize to the Q6_K"),
        ("gguf/Q8_0", "kept", "model.embed_tokens.weight is tied to another tensor, but their values differ"),
        ("modelslim", "auto", "the bias of its w8a8 layer has the scales of the former weights"),
        ("mxfp4-pack-quantized", "auto", "hal does not write the mxfp4"),
    ],
)
def test_what_cannot_be_quantized_at_arrival(kind: str, weights: str, problem: str, tmp_path: Path) -> None:
    scheme, _, detail = kind.partition("/")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
    plain = random_checkpoint(tmp_path / "plain", **sizes, attention_bias=scheme == "modelslim")
    given = tensors(plain)
    if scheme == "modelslim":
        folder = make_pair(tmp_path / "made", "modelslim", "w8a8", **sizes, attention_bias=True).folder
    elif scheme == "gguf":
        folder = write_gguf(plain, tmp_path / "model.gguf", kind=detail)
        given["lm_head.weight"] = given["model.embed_tokens.weight"] + 1
    else:
        folder, _ = pair(tmp_path, Format("gptq", ordered=True) if kind == "act-order" else Format(kind), **sizes)
    with opened(folder, config={"quantized_weights": weights}) as llm:
        before = texts(llm)
        with pytest.raises(CheckpointError, match=problem):
            llm.replace_weights(given)
        assert texts(llm) == before
        llm.sleep(weights="files")
        llm.wake()
        assert texts(llm) == before


def test_experts_by_the_names_of_transformers(tmp_path: Path) -> None:
    """transformers has one tensor for the experts of a layer, and the checkpoint one for each expert."""
    folder = random_checkpoint(tmp_path / "checkpoint", **EXPERTS)
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(5)
    trained = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = trained.state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    tokens = list(range(5, 25))
    with torch.no_grad():
        logits = trained(torch.tensor([tokens])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    with opened(folder) as llm:
        for given in (state, iter(state.items())):
            llm.replace_weights(tensors(folder))
            assert (llm.log_probabilities([tokens[:1]], [tokens[1:]])[0] - expected).abs().max() > 0.01
            llm.replace_weights(given)
            assert (llm.log_probabilities([tokens[:1]], [tokens[1:]])[0] - expected).abs().max() < 1e-5
        with pytest.raises(CheckpointError, match="has 16 projections of experts in its place"):
            llm.replace_weights({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(3, 3)})


@thorough(MODE, "eager")
@pytest.mark.parametrize("compiler", ["graph", "eager"])
def test_log_probabilities_are_the_log_softmax_of_the_logits(compiler: str, two: tuple[Path, Path]) -> None:
    """Also of prompts that take several steps, and of several prompts in a step."""
    rows, starts = [list(range(3, 90)), [7, 8, 9, 10], list(range(90, 40, -1))], [1, 2, 30]
    with opened(two[0], compiler, config={"max_prefill_tokens": 64}) as llm:
        found = llm.log_probabilities(
            [row[:start] for row, start in zip(rows, starts, strict=True)],
            [row[start:] for row, start in zip(rows, starts, strict=True)],
        )
    settings = {**CONFIG, "max_prefill_tokens": 64, "compilation": {"compiler": compiler}}
    with hal.open({"backend": "cpu", "dtype": "float32", **settings}) as backend:
        runner = hal.Runner(hal.load_model(two[0], backend), backend)
        for row, start, each in zip(rows, starts, found, strict=True):
            blocks = runner.blocks.take(runner.spec.blocks_for(len(row)))
            logits = runner.step(runner.batch([row], [blocks or []]), ALL).logits.float()
            wanted = logits.log_softmax(-1)[start - 1 : -1].gather(1, torch.tensor(row[start:])[:, None])[:, 0]
            assert each.dtype == torch.float32
            torch.testing.assert_close(each, wanted, rtol=0, atol=1e-5)
    reference = AutoModelForCausalLM.from_pretrained(two[0], dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(torch.tensor([rows[0]])).logits[0].log_softmax(-1)
    wanted = logits[:-1].gather(1, torch.tensor(rows[0][1:])[:, None])[:, 0]
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-4)


def resident() -> int:
    """Return the process's resident bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("compiler", ["graph", "eager"])
def test_sleep_and_wake(compiler: str, two: tuple[Path, Path]) -> None:
    """Graphs stay on a CPU, because addresses do."""
    first, second = two
    before, after = map(texts_of, two)
    with opened(first, compiler) as llm:
        assert texts(llm) == before
        for weights in ("device", "host", "files", "none"):
            graphs = dict(llm._runner.forms)
            slept = llm.sleep(weights=weights)  # type: ignore[arg-type]
            assert slept.addresses_kept
            assert slept.caches >= 1 << 20
            assert (slept.weights > 0) == (weights in ("files", "none"))
            for call in (texts, lambda each: each.score([[5]], [[6]])):
                with pytest.raises(AsleepError, match=r"sleeps: its caches.*\n.*wake"):
                    call(llm)
            with pytest.raises(AsleepError, match="sleeps"):
                llm.sleep()
            llm.wake("caches")
            if weights in ("device", "host"):
                llm.wake()
                assert texts(llm) == before
                continue
            with pytest.raises(AsleepError, match="its weights gave back their memory"):
                llm.replace_weights(tensors(second))
            llm.wake("weights")
            if weights == "none":
                some = {"model.norm.weight": tensors(second)["model.norm.weight"]}
                llm.replace_weights(some)
                with pytest.raises(AsleepError, match=r"1\d weights of .* were dropped.*\n.*replace_weights"):
                    texts(llm)
                llm.replace_weights(tensors(second))
            assert texts(llm) == (after if weights == "none" else before)
            assert llm._runner.forms == graphs
        with pytest.raises(ConfigError, match="replaced by others"):
            llm.sleep(weights="files")
        llm.replace_weights(first)
        llm.sleep(weights="files")
        llm.wake()
        llm.wake()
        assert texts(llm) == before


def test_a_drafter_sleeps_too(two: tuple[Path, Path]) -> None:
    draft = {"method": "model", "model": str(two[1]), "tokens": 2, "adapt": False, "examine": False}
    with opened(two[0], draft=draft) as llm:
        before = texts(llm)
        llm.sleep(weights="none")
        llm.wake()
        llm.replace_weights(tensors(two[0]))
        with pytest.raises(AsleepError, match="were dropped"):
            texts(llm)
        llm.replace_weights(tensors(two[1]), drafter=True)
        assert texts(llm) == before


def test_what_cannot_sleep(two: tuple[Path, Path]) -> None:
    with hal.open({"backend": "cpu", "dtype": "float32", **CONFIG}) as backend:
        runner = hal.Runner(hal.load_model(two[0], backend), backend)
        running = hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=4))
        next(running)
        with pytest.raises(BatchError, match="sequences hold 1 blocks"):
            hal.sleep(runner)
        left = [token.token_id for token in running]
        with pytest.raises(ConfigError, match="weights is 'disk'"):
            hal.sleep(runner, weights="disk")  # type: ignore[arg-type]
        with hal.Runner(runner.model, backend), pytest.raises(ConfigError, match="another runner has the same model"):
            hal.sleep(runner, weights="files")
        hal.sleep(runner, weights="files", caches=False)
        with pytest.raises(AsleepError, match="its weights gave back"):
            list(hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=4)))
        hal.wake(runner)
        again = [token.token_id for token in hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=4))]
        assert again[1:] == left


def test_packed_weights_and_adapters_give_back_their_memory(tmp_path: Path) -> None:
    """Weights that oneDNN packed, too: the model has some on a processor where that is faster."""
    folder = random_checkpoint(tmp_path / "model", hidden_size=512, intermediate_size=2048)
    adapter_of(tensors(folder), tmp_path / "style", rank=8)
    room = {"adapters": {"slots": 2, "rank": 8}}
    with opened(folder, config=room, adapters=dict.fromkeys(("style", "other"), tmp_path / "style")) as llm:
        model = llm._runner.model
        held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        wanted = [texts(llm), [llm.generate([[5, 6]], adapter="style", **GREEDY)[0].token_ids]]
        for weights in ("files", "none"):
            before = resident()
            slept = llm.sleep(weights=weights, caches=False)  # type: ignore[arg-type]
            asleep = resident()
            assert slept.weights > held - (1 << 20)
            assert before - asleep > held - (2 << 20)
            llm.wake()
            if weights == "none":
                llm.replace_weights(folder)
            assert [texts(llm), [llm.generate([[5, 6]], adapter="style", **GREEDY)[0].token_ids]] == wanted
            log.info("resident MiB: %d before, %d asleep, %d after", before >> 20, asleep >> 20, resident() >> 20)
    assert texts_of(folder) == wanted[0]


@pytest.mark.parametrize("weights", ["host", "files", "none"])
def test_a_runner_that_is_closed_asleep_leaves_weights_to_the_next(weights: Any, two: tuple[Path, Path]) -> None:
    with hal.open({"backend": "cpu", "dtype": "float32", **CONFIG}) as backend:
        model = hal.load_model(two[0], backend)
        with hal.Runner(model, backend) as runner:
            wanted = generated(runner)
            hal.sleep(runner, weights=weights)
        with hal.Runner(model, backend) as runner:
            if weights == "none":
                with pytest.raises(AsleepError, match="were dropped"):
                    generated(runner)
                hal.replace_weights(runner, two[0])
            assert generated(runner) == wanted


OF_A_FRESH_PROCESS = """
import sys
from pathlib import Path
from test_rollouts import texts_of
print([texts_of(Path(each)) for each in sys.argv[1:]])
"""


@thorough(EXHAUSTIVE, "300")
@pytest.mark.parametrize("rounds", [6, 300])
def test_rounds_of_generation_sleep_and_new_weights(rounds: int, two: tuple[Path, Path]) -> None:
    """Eight threads generate all the time. Each text is one of a fresh process, or a refusal; memory does not grow."""
    seed = random.randrange(1 << 30)
    log.info("seed %d", seed)
    draw = random.Random(seed)
    command = [sys.executable, "-c", OF_A_FRESH_PROCESS, *map(str, two)]
    python = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, cwd=Path(__file__).parent, env=python, check=True, stdout=subprocess.PIPE, text=True)
    fresh: list[Texts] = ast.literal_eval(ran.stdout)
    given = [tensors(each) for each in two]
    allowed = [set(pair) for pair in zip(*fresh, strict=True)]
    ended, found, refused = threading.Event(), [0] * 8, [0] * 8
    with opened(two[0]) as llm, ThreadPoolExecutor(8) as threads:

        def client(number: int) -> None:
            while not ended.is_set():
                try:
                    for text, either in zip(texts(llm), allowed, strict=True):
                        assert text in either
                    found[number] += 1
                except AsleepError:
                    refused[number] += 1
                    ended.wait(0.002)

        clients = [threads.submit(client, number) for number in range(8)]
        memory = []
        try:
            for count in range(rounds):
                version, weights = draw.randrange(2), draw.choice(["device", "host", "none"])
                llm.sleep(weights=weights)  # type: ignore[arg-type]
                if draw.randrange(2):
                    llm.wake("weights")
                    llm.replace_weights(given[version] if draw.randrange(2) else iter(given[version].items()))
                    llm.wake("caches")
                else:
                    llm.wake()
                    llm.replace_weights(str(two[version]) if draw.randrange(2) else given[version])
                assert texts(llm) == fresh[version], count
                memory.append(resident())
        finally:
            ended.set()
        for each in clients:
            each.result()
        assert min(found) > 0
        log.info("texts %s, refused %s, resident %s", found, refused, memory[:: max(1, rounds // 6)])
        assert max(memory[rounds // 2 :]) < max(memory[: rounds // 2]) + (24 << 20)
        assert llm.sleep().addresses_kept


@thorough(PROCESSES)
def test_a_policy_gradient_loop(repository: Path) -> None:
    """hal's log-probabilities of a whole text have the bits of those of the steps that generated it."""
    program = ["tools/rollouts/policy_gradient.py", "checkpoints/tiny-python", "--rounds", "2", "--samples", "2"]
    result = subprocess.run(
        [sys.executable, *program, "--new-tokens", "6"],
        cwd=repository,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    _, *rounds = [line.split(" | ") for line in result.stdout.splitlines()]
    assert [line[0] for line in rounds] == ["0", "1"]
    for _, _, of_hal, of_transformers, given in rounds:
        assert float(of_hal) == 0
        assert 0 < float(of_transformers) < 1e-3
        assert int(given) > 0


@thorough(PROCESSES)
def test_ranks_share_the_model(two: tuple[Path, Path]) -> None:
    """An error of all ranks leaves them as they were."""
    found, _ = in_ranks("rollout", 2, first=str(two[0]), second=str(two[1]))
    before, after = ([list(each) for each in texts_of(folder)] for folder in two)
    assert found.pop("refused")
    assert found == {"before": before, "replaced": after, "from files": before, "woken": before, "new": after}
