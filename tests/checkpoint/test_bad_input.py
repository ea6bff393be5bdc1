"""Tests for user errors: a typed error from the API; from the command, exit code 2 and the error with its remedy.

Each case breaks one thing and runs both. A traceback or any output on stdout fails the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from helpers.checkpoints import CONFIG, INDEX, random_checkpoint, random_weights, write_json, write_weights
from torch import Tensor

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.cli import main
from hal.config.bounds import SEQUENCES
from hal.errors import BatchError, CheckpointError, ConfigError, DriverNotFound, HalError, NumericsError, UnknownKey

Damage = Callable[[Path], object]
LAYER = "model.layers.1.mlp.down_proj.weight"


@attrs.frozen
class Case:
    """One invalid input.

    Attributes:
        damage: modifies a checkpoint.
        error: the exception type of the API.
        message: a part of its text, which includes the remedy.
        prompt: the prompt.
        settings: configuration settings; the command reads them from the environment.
    """

    damage: Damage
    error: type[HalError]
    message: str
    prompt: str = "the cat"
    settings: Mapping[str, Any] = attrs.field(factory=dict)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("HAL_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "qwen3")


def nothing(folder: Path) -> None:
    """Leave the checkpoint valid."""


def config(**values: Any) -> Damage:
    """Return damage that sets keys of config.json after the weights were written."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        write_json(file, {**json.loads(file.read_text()), **values})

    return damage


def text(name: str, content: str | bytes) -> Damage:
    """Return damage that replaces a file's content."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def weights(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    """Return damage that changes the tensors of the only safetensors file with ``change``."""

    def damage(folder: Path) -> None:
        tensors = random_weights(json.loads((folder / "config.json").read_text()), seed=0)
        change(tensors)
        write_weights(folder, tensors)

    return damage


def sharded(change: Callable[[Path, dict[str, str]], object]) -> Damage:
    """Return damage that splits the checkpoint into two files and changes its folder and weight map with ``change``."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        random_checkpoint(folder, shards=2)
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        change(folder, weight_map)
        write_json(folder / INDEX, {"weight_map": weight_map})

    return damage


def truncated(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def replaced_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def in_place(name: str) -> Damage:
    """Return damage that puts a file of another format in the place of the weights."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(b"GGUF")

    return damage


def alone(name: str) -> Damage:
    """Return damage that leaves nothing but a file of another format, as such formats need no config.json."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_bytes(b"GGUF")

    return damage


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(1)}, folder / "pytorch_model.bin")


def outside(folder: Path, weight_map: dict[str, str]) -> None:
    """Make the index name an existing file outside the folder."""
    shutil.copy(folder / weight_map[LAYER], folder.parent / "outside.safetensors")
    weight_map[LAYER] = "../outside.safetensors"


FOLDERS = {
    "no such path": Case(shutil.rmtree, CheckpointError, "found nothing"),
    "a GGUF file alone": Case(alone("model.Q4_K_M.gguf"), CheckpointError, "in a GGUF file (model.Q4_K_M.gguf)"),
    "a GGUF file in its place": Case(in_place("model.gguf"), CheckpointError, "give the path of the file"),
    "an ONNX file in its place": Case(in_place("model.onnx"), CheckpointError, "in an ONNX file (model.onnx)"),
    "Flax's file in its place": Case(in_place("flax_model.msgpack"), CheckpointError, "(flax_model.msgpack)"),
    "a file": Case(replaced_by_a_file, CheckpointError, "found a file"),
    "no checkpoint": Case(lambda folder: (folder / "config.json").unlink(), CheckpointError, "has no config.json"),
    "no weights": Case(lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, "no safetensors file"),
    "a pickle": Case(pickled, CheckpointError, "holds its weights as a pickle (pytorch_model.bin)"),
    "a pickle's remedy": Case(pickled, CheckpointError, ", dtype='auto').save_pretrained('"),
    "two files and no index": Case(
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "again.safetensors"),
        CheckpointError,
        "holds 2 safetensors files and no model.safetensors.index.json",
    ),
    "no tokenizer": Case(lambda folder: (folder / "tokenizer.json").unlink(), CheckpointError, "has no tokenizer.json"),
    "a broken tokenizer": Case(text("tokenizer.json", "{}"), CheckpointError, "is not a tokenizer"),
}
CONFIGS = {
    "broken": Case(text("config.json", '{"architectures": ["Qwen3'), CheckpointError, "config.json cannot be read"),
    "not UTF-8": Case(text("config.json", b"\xff\xfe"), CheckpointError, "config.json cannot be read"),
    "a list": Case(text("config.json", "[1]"), CheckpointError, "holds a list, not an object"),
    "nested deeply": Case(text("config.json", '{"a":' * 100_000), CheckpointError, "config.json cannot be read"),
    "no architecture": Case(config(architectures=[]), CheckpointError, "names no architecture"),
    "an unknown architecture": Case(
        config(architectures=["Qwen4ForCausalLM"]),
        CheckpointError,
        "no model 'Qwen4ForCausalLM' is installed; for model_type 'qwen3', transformers has the causal language model "
        "Qwen3ForCausalLM, not Qwen4ForCausalLM",
    ),
    "a missing key": Case(config(hidden_size=None), ConfigError, "required key 'hidden_size' is missing"),
    "a wrong type": Case(config(hidden_size="32"), ConfigError, "expected int, found str '32'"),
    "an unknown activation": Case(config(hidden_act="mish"), ConfigError, "unknown value 'mish' (known: "),
    "scaled positions": Case(
        config(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", "factor": 2}), ConfigError, "yarn"
    ),
    "quantized": Case(config(quantization_config={"bits": 4}), ConfigError, "has no quant_method"),
    "a stop token that is none": Case(text("generation_config.json", '{"eos_token_id": "0"}'), CheckpointError, "'0'"),
    "broken generation config": Case(text("generation_config.json", "{"), CheckpointError, "cannot be read"),
}
TENSORS = {
    "one is missing": Case(weights(lambda tensors: tensors.pop(LAYER)), CheckpointError, f"{LAYER} is missing"),
    "one too many": Case(
        weights(lambda tensors: tensors.update(extra=torch.ones(1))), CheckpointError, "extra is not in the model"
    ),
    "one of another shape": Case(
        weights(lambda tensors: tensors.update({LAYER: torch.ones(32, 47)})),
        CheckpointError,
        f"{LAYER} is [32, 47], not [32, 48]",
    ),
    "one of integers": Case(
        weights(lambda tensors: tensors.update({LAYER: torch.ones(32, 48, dtype=torch.int64)})),
        CheckpointError,
        "is I64",
    ),
    "all of another size than the config says": Case(config(hidden_size=64), CheckpointError, "and 15 more"),
    "fewer layers than the config says": Case(
        config(num_hidden_layers=3), CheckpointError, "model.layers.2.self_attn.k_norm.weight is missing"
    ),
    "layers without end": Case(  # which took hours and all memory before the tensors were checked
        config(num_hidden_layers=10**7), CheckpointError, "has num_hidden_layers 10000000, and the checkpoint has only"
    ),
    "NaN": Case(
        weights(lambda tensors: tensors[LAYER].fill_(float("nan"))), NumericsError, "gave NaN logits for prompt 0"
    ),
}
FILES = {
    "cut in the values": Case(lambda folder: truncated(folder, 0.9), CheckpointError, "it may be truncated"),
    "cut in the header": Case(lambda folder: truncated(folder, 0.002), CheckpointError, "it may be truncated"),
    "empty": Case(lambda folder: truncated(folder, 0), CheckpointError, "it may be truncated"),
    "no safetensors": Case(text("model.safetensors", "a" * 1000), CheckpointError, "model.safetensors cannot be read"),
    "a file that is not there": Case(
        sharded(lambda folder, weight_map: weight_map.update({LAYER: "model-9.safetensors"})),
        CheckpointError,
        "lacks 'model-9.safetensors'",
    ),
    "a path out of the folder": Case(sharded(outside), CheckpointError, "names '../outside.safetensors'"),
    "an absolute path": Case(
        sharded(lambda folder, weight_map: weight_map.update({LAYER: str(folder / weight_map[LAYER])})),
        CheckpointError,
        "which is no safetensors file of the folder",
    ),
    "a pickle in the index": Case(
        sharded(lambda folder, weight_map: weight_map.update({LAYER: "pytorch_model.bin"})),
        CheckpointError,
        "names 'pytorch_model.bin'",
    ),
    "a number in the index": Case(
        sharded(lambda folder, weight_map: weight_map.update({LAYER: 1})), CheckpointError, "has no weight_map"
    ),
    "a tensor in both files": Case(
        sharded(
            lambda folder, weight_map: [
                shutil.copy(folder / weight_map[LAYER], folder / name)
                for name in set(weight_map.values()) - {weight_map[LAYER]}
            ]
        ),
        CheckpointError,
        "both hold model.",
    ),
    "a broken index": Case(text(INDEX, "{"), CheckpointError, f"{INDEX} cannot be read"),
}
SETTINGS = {
    "unknown key": Case(nothing, UnknownKey, "(did you mean '", settings={"backand": "cpu"}),
    "unknown backend": Case(nothing, DriverNotFound, "no driver 'gpu' is installed", settings={"backend": "gpu"}),
}
PROMPTS = {
    "empty": Case(nothing, BatchError, "prompt 0 is empty", prompt=""),
    "longer than the model": Case(nothing, BatchError, "the model takes at most 256", prompt="b" * 300),
}
GROUPS = {
    "folder": FOLDERS,
    "config": CONFIGS,
    "tensors": TENSORS,
    "files": FILES,
    "settings": SETTINGS,
    "prompt": PROMPTS,
}
CASES = [pytest.param(case, id=f"{group}: {name}") for group, cases in GROUPS.items() for name, case in cases.items()]


def continue_by_api(path: Path, prompt: str, config: Mapping[str, Any] | None) -> None:
    """Do what the command does with the API; ``config`` None uses the environment's configuration."""
    backend = hal.open(config)
    checkpoint = Checkpoint.open(path)
    runner = hal.Runner(hal.load_model(checkpoint, backend), backend)
    tokens = checkpoint.tokenizer().encode(prompt).ids
    list(hal.generate(runner, [tokens], hal.SamplingParams(max_new_tokens=3, stop_token_ids=checkpoint.stop_token_ids)))


def check_command(arguments: list[str], *messages: str) -> None:
    result = CliRunner().invoke(main, ["generate", *arguments])
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "\nremedy: " in result.stderr
    assert "Traceback" not in result.stderr
    for message in messages:
        assert message in result.stderr


@pytest.mark.parametrize(
    ("path", "problem", "remedy"),
    [
        ("/Qwen/Qwen3-0.6B", "found nothing", "give the path of a checkpoint's folder or GGUF file"),
        (
            "model.ggml",
            "model.ggml is a GGML file, and hal reads safetensors from folders",
            "made from, in safetensors",
        ),
        ("pytorch_model.bin", "as a pickle (pytorch_model.bin)", "or, on an isolated machine"),
        ("some/model.safetensors", "found a file", "give the folder that holds it and its config.json: some"),
    ],
)
def test_a_path_that_is_no_folder(
    path: str, problem: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if Path(path).suffix in (".ggml", ".bin", ".safetensors"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(b"text")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_a_mistyped_path_and_a_folder_of_checkpoints(checkpoint: Path) -> None:
    mistyped = checkpoint.with_name(f"{checkpoint.name}z")
    with pytest.raises(CheckpointError, match=rf"found nothing \(did you mean {re.escape(str(checkpoint))}\?\)"):
        Checkpoint.open(mistyped)
    with pytest.raises(CheckpointError, match="holds some") as caught:
        Checkpoint.open(checkpoint.parent)
    assert str(checkpoint) in caught.value.remedy


def test_nothing_is_wrong_with_the_checkpoint_itself(checkpoint: Path) -> None:
    continue_by_api(checkpoint, "the cat", {})
    sharded(lambda folder, weight_map: None)(checkpoint)
    continue_by_api(checkpoint, "the cat", {})


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: Case, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case.damage(checkpoint)
    with pytest.raises(HalError) as caught:
        continue_by_api(checkpoint, case.prompt, case.settings)
    assert type(caught.value) is case.error
    assert case.message in str(caught.value)
    assert caught.value.problem
    assert caught.value.remedy
    for key, value in case.settings.items():
        monkeypatch.setenv(f"HAL_{key.upper()}", value if isinstance(value, str) else json.dumps(value))
    if case.settings:
        with pytest.raises(case.error) as caught:
            continue_by_api(checkpoint, case.prompt, None)
        assert case.message in str(caught.value)
    check_command([str(checkpoint), "--prompt", case.prompt, "--max-new-tokens", "3"], case.message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "gpu"], "no driver 'gpu' is installed"),
        (["--dtype", "float23"], "did you mean 'float32'?"),
        (["--compiler", "graphs"], "did you mean 'graph'?"),
        (["--compilation-config", '{"capture_size": [1]}'], "did you mean 'capture_sizes'?"),
        (["--compilation-config", '{"capture_sizes": "1"}'], "expected a list, found str '1'"),
        (["--compilation-config", '{"on_capture_error": "raise", "on_capture_error": "eager"}'], "duplicate keys"),
        (["--compilation-config", "{"], "--compilation-config is not valid JSON"),
        (["--compilation-config", "graph"], "neither a JSON object nor a path"),
        (["--compilation-config", "no_such_file.toml"], "cannot read the config file no_such_file.toml"),
        (["--temperature", "-1"], "temperature is -1.0, out of its range"),
        (["--temperature", "1", "--seed", str(2**64)], f"seed is {2**64}, out of its range"),
        (["--prompt", "\udcff"], "prompt 1 is not valid Unicode"),
        (["--prompt", ""], "prompt 1 is empty"),
    ],
)
def test_bad_options(arguments: list[str], message: str, checkpoint: Path) -> None:
    check_command([str(checkpoint), "--prompt", "a", *arguments], message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n\xff\n", "prompts.txt, line 2 is not UTF-8"),
        (b"a\n\nb\n", "prompts.txt, line 2: prompt 1 is empty"),
        (b"\n", "prompts.txt, line 1: prompt 0 is empty"),
    ],
)
def test_bad_prompts_files(content: bytes, message: str, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    check_command([str(checkpoint), "--prompts-file", str(file)], message)


@pytest.mark.parametrize("content", [b"", None])
def test_no_prompt_at_all(content: bytes | None, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    result = CliRunner().invoke(main, ["generate", str(checkpoint), "--prompts-file", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr


@pytest.mark.parametrize("tokens", [[280], [-1], [0, 1 << 40]])
def test_token_ids_out_of_range(tokens: list[int], checkpoint: Path, cpu: hal.Backend) -> None:
    runner = hal.Runner(hal.load_model(checkpoint, cpu), cpu)
    with pytest.raises(BatchError, match="out of the range 0 to 279"):
        hal.generate(runner, [tokens], hal.SamplingParams())
    with pytest.raises(BatchError, match="out of the range 0 to 279"):
        runner.batch([tokens], [[1]])


@pytest.mark.parametrize("path", ["a" * 5000, "nul\0byte", "checkpoint\udcff"])
def test_paths_that_cannot_be(path: str) -> None:
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
    ],
)
def test_sizes_are_positive(key: str, checkpoint: Path, cpu: hal.Backend) -> None:
    assert key in {*CONFIG, "vocab_size"}
    config(**{key: 0})(checkpoint)
    with pytest.raises(ConfigError, match=f"{key}' must be >= 1"):
        hal.load_model(checkpoint, cpu)


def test_settings_of_training_in_the_tokenizer_are_left_out(checkpoint: Path) -> None:
    tokenizer = Checkpoint.open(checkpoint).tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    before = len(tokenizer.encode("the cat sat on the mat").ids)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    assert before == 50
    assert 3 < len(Checkpoint.open(checkpoint).tokenizer().encode("the cat sat on the mat").ids) < 50


def test_graphs_that_cannot_be_written(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported before anything is loaded."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(hal, "load_model", lambda *args: pytest.fail("a model was loaded"))
    folder = tmp_path / "file" / "below"
    result = CliRunner().invoke(main, ["explain", str(checkpoint), "--backend", "cpu", "--dump", str(folder)])
    assert result.exit_code == 2, repr(result.exception)
    assert f"{folder} cannot be written: Not a directory" in result.stderr.partition("\nremedy: ")[0]


def test_a_step_that_no_memory_holds_is_explained_all_the_same(checkpoint: Path) -> None:
    """A trace needs no memory; this block table needs more addresses than processors have."""
    config(max_position_embeddings=1 << 30)(checkpoint)
    arguments = ["explain", str(checkpoint), "--backend", "cpu", "--compiler", "graph", "--batch-size", str(SEQUENCES)]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
