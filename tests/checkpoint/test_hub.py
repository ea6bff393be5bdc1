"""Tests of downloads from a hub, a server on 127.0.0.1 with its interface, through huggingface_hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import console_script
from helpers.checkpoints import random_checkpoint
from helpers.hub_server import Hub, serve
from helpers.thorough import LONG, PROCESSES, thorough

import hal
from hal.checkpoint.hub import download
from hal.errors import CheckpointError

NAME = "acme/tiny"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return a checkpoint's files, and others of a repository."""
    folder = random_checkpoint(tmp_path_factory.mktemp("made"))
    made = {each.name: each.read_bytes() for each in folder.iterdir()}
    others = {
        "README.md": b"# tiny",
        "preprocessor_config.json": b'{"patch_size": 16}',
        "pytorch_model.bin": b"pickle" * 300,
        "original/model.safetensors": b"other" * 300,
    }
    pooling = {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "sentence_bert_config.json": b"{ }"}
    pooling |= {"config_sentence_transformers.json": b"{  }", "additional_chat_templates/tool_use.jinja": b"tools"}
    return {**made, **others, **pooling}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with serve(Hub(NAME, {"main": files})) as made:
        yield made


def fetch(hub: Hub, tmp_path: Path, revision: str | None = None) -> Path:
    return download(NAME, revision, endpoint=hub.address, cache_dir=tmp_path / "cache")


def test_a_fresh_download_and_a_second_one(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    folder = fetch(hub, tmp_path)
    expected = sorted({*files} - {"README.md", "pytorch_model.bin", "original/model.safetensors"})
    assert sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()) == expected
    assert hub.downloads() == expected
    assert all((folder / name).read_bytes() == files[name] for name in expected)
    assert hal.Checkpoint.open(folder).architecture == "Qwen3ForCausalLM"
    assert fetch(hub, tmp_path) == folder
    assert hub.downloads() == expected


def test_the_config_alone(hub: Hub, tmp_path: Path) -> None:
    folder = download(NAME, weights=False, endpoint=hub.address, cache_dir=tmp_path)
    assert hub.downloads() == ["config.json"]
    assert hal.RandomCheckpoint.open(folder).architecture == "Qwen3ForCausalLM"


def test_revisions(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    first = fetch(hub, tmp_path)
    config = json.dumps({**json.loads(files["config.json"]), "rms_norm_eps": 0.5}).encode()
    hub.revisions = {"v1": files, "main": {**files, "config.json": config}}
    hub.requests.clear()
    second = fetch(hub, tmp_path)
    assert second != first
    assert hub.downloads() == ["config.json"]
    assert hal.Checkpoint.open(second).config["rms_norm_eps"] == 0.5
    assert (fetch(hub, tmp_path, "v1") / "config.json").read_bytes() == files["config.json"]
    with pytest.raises(CheckpointError, match="acme/tiny has no revision 'v9'"):
        fetch(hub, tmp_path, "v9")


@pytest.mark.parametrize(
    ("status", "reason", "problem", "remedy"),
    [
        (401, "", "answered 401 for acme/tiny", "hf auth login"),
        (403, "GatedRepo", "acme/tiny is gated", "ask for it at http.*/acme/tiny"),
        (404, "RepoNotFound", "no folder acme/tiny here, and no model acme/tiny at http", "check the name"),
        (429, "", "answered 429 for acme/tiny", "wait some minutes"),
        (500, "", "answered 500 for acme/tiny", "try again later"),
    ],
)
def test_refusals(hub: Hub, tmp_path: Path, status: int, reason: str, problem: str, remedy: str) -> None:
    hub.status = status, reason
    with pytest.raises(CheckpointError, match=problem) as caught:
        fetch(hub, tmp_path)
    assert re.search(remedy, caught.value.remedy)


@pytest.mark.parametrize("status", [500, None], ids=["an error of the hub", "no network"])
def test_the_cache_serves_when_the_hub_does_not(
    hub: Hub, tmp_path: Path, status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fetch(hub, tmp_path)
    if status is None:
        hub.address = "http://127.0.0.1:9"
    else:
        hub.status = status, ""
    assert fetch(hub, tmp_path) == folder
    assert f"the copy in {folder} is used" in caplog.text


def test_no_network_and_nothing_cached(hub: Hub, tmp_path: Path) -> None:
    hub.address = "http://127.0.0.1:9"
    with pytest.raises(
        CheckpointError, match=r"acme/tiny cannot be downloaded from http://127\.0\.0\.1:9: ConnectError"
    ):
        fetch(hub, tmp_path)


def test_a_mistyped_path_is_told_before_the_hub_is_asked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "acme/tinny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def download(*args: object, **extra: object) -> Path:
        asked.append(caplog.text)
        return fetch(hub, tmp_path)

    monkeypatch.setattr("hal.checkpoint.hub.download", download)
    assert hal.Checkpoint.open("acme/tiny").architecture == "Qwen3ForCausalLM"
    (told,) = asked
    assert "no checkpoint at acme/tiny: found nothing (did you mean acme/tinny?); asking the hub" in told
    hub.status = 404, "RepoNotFound"
    with pytest.raises(CheckpointError, match=r"no folder acme/tiny here \(did you mean acme/tinny\?\), and no model"):
        fetch(hub, tmp_path / "empty")


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_a_file_that_is_not_what_was_listed(hub: Hub, tmp_path: Path, path: str) -> None:
    hub.changed = frozenset({path})
    with pytest.raises(CheckpointError, match=f"{path} of acme/tiny arrived with the hash"):
        fetch(hub, tmp_path)
    hub.changed = frozenset()
    assert hal.Checkpoint.open(fetch(hub, tmp_path)).architecture == "Qwen3ForCausalLM"


@thorough(LONG)
def test_a_truncated_file(hub: Hub, tmp_path: Path) -> None:
    hub.truncated = frozenset({"model.safetensors"})
    with pytest.raises(CheckpointError, match="acme/tiny cannot be downloaded from"):
        fetch(hub, tmp_path)
    hub.truncated = frozenset()
    assert hal.Checkpoint.open(fetch(hub, tmp_path)).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, r"acme/tiny holds its weights as a pickle \(pytorch_model"),
        ({"config.json": b"{}", "model.gguf": b"x"}, "acme/tiny holds its weights in a GGUF file"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, r"acme/tiny is an adapter \(LoRA\)"),
        ({"README.md": b"x"}, "acme/tiny is no checkpoint: it has no safetensors file"),
        ({"model.safetensors": b"x"}, r"acme/tiny is no checkpoint: it has no config\.json"),
    ],
    ids=lambda value: next(iter(reversed(value))) if isinstance(value, dict) else "",
)
def test_a_repository_without_a_checkpoint(hub: Hub, tmp_path: Path, given: dict[str, bytes], problem: str) -> None:
    hub.revisions = {"main": given}
    with pytest.raises(CheckpointError, match=problem):
        fetch(hub, tmp_path)
    assert hub.downloads() == []


@pytest.mark.parametrize("path", ["../outside.json", "/etc/outside.json", "a/../../outside.json", "a\\..\\b.json"])
def test_a_path_that_climbs_out(hub: Hub, files: dict[str, bytes], tmp_path: Path, path: str) -> None:
    hub.revisions = {"main": {**files, path: b"x"}}
    with pytest.raises(CheckpointError, match="outside its folder"):
        fetch(hub, tmp_path)
    assert hub.downloads() == []


def test_a_file_that_the_hub_lists_and_does_not_have(hub: Hub, tmp_path: Path) -> None:
    hub.absent = frozenset({"model.safetensors"})
    with pytest.raises(CheckpointError, match=r"answered 404 for acme/tiny|cannot be downloaded from"):
        fetch(hub, tmp_path)
    hub.absent = frozenset()
    assert hal.Checkpoint.open(fetch(hub, tmp_path)).architecture == "Qwen3ForCausalLM"


def test_a_file_that_the_index_names_and_the_hub_does_not_list(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    """Such as a shard of the index."""
    index = json.dumps({"weight_map": {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}}).encode()
    hub.revisions = {"main": {**files, "model.safetensors.index.json": index}}
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        hal.Checkpoint.open(fetch(hub, tmp_path))


def test_a_path_has_no_revision(tmp_path: Path, trained: Path) -> None:
    with pytest.raises(CheckpointError, match="has no revision 'v1'"):
        hal.Checkpoint.open(trained, revision="v1")


@thorough(PROCESSES)
def test_the_command_takes_a_name(hub: Hub, tmp_path: Path) -> None:
    """The variables of huggingface_hub are read when it is imported, so in processes of their own."""
    environ = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path)}
    options = ["--prompt", "def", "--max-new-tokens", "3", "--backend", "cpu"]
    command = [console_script("hal"), "generate", NAME, *options]
    once = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert once.returncode == 0, once.stderr
    hub.requests.clear()
    program = f"""
from click.testing import CliRunner
from hal.cli import main
again, other = (CliRunner().invoke(main, ["generate", name, *{options}]) for name in ("{NAME}", "acme/other"))
print(again.stdout, end="")
assert (again.exit_code, other.exit_code) == (0, 2), (again.output, other.output)
assert "HF_HUB_OFFLINE forbids to download it" in other.stderr, other.stderr
"""
    offline = {**environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program]
    again = subprocess.run(command, env=offline, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, once.stdout), again.stderr
    assert hub.requests == []
