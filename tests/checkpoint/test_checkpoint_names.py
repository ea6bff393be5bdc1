"""Tests for names in a checkpoint and for the files that they refer to: each opens, or raises a CheckpointError.

Each case has a time limit, because opening a pipe could block forever.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.checkpoints import INDEX, random_checkpoint, write_json
from helpers.limited import limited

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.config.untrusted_files import JSON_BYTES, is_plain_name, read_json
from hal.errors import CheckpointError

LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "sharded", shards=2)


def read_all(folder: Path, backend: hal.Backend) -> None:
    """Read every file of a checkpoint's folder that hal can open."""
    checkpoint = Checkpoint.open(folder)
    _ = checkpoint.stop_token_ids, checkpoint.quantization
    checkpoint.tokenizer()
    hal.load_model(checkpoint, backend)


def refused(folder: Path, backend: hal.Backend, message: str) -> None:
    with limited(), pytest.raises(CheckpointError, match=message) as caught:
        read_all(folder, backend)
    assert caught.value.remedy
    assert len(caught.value.problem) < 1000
    caught.value.problem.encode()  # The message must be printable.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a" * 5000 + ".safetensors", r"lacks 'aaa.*\.\.\. \(5012 characters\), which model.safetensors.index.json"),
        ("é" * 200 + ".safetensors", "lacks 'ééé.*, which"),  # 400 bytes of 212 characters
        ("a" * 5000, r"names 'aaa.*\(5000 characters\), which is no safetensors file of the folder"),
        ("nul\0byte.safetensors", r"names 'nul\\x00byte.safetensors', which is no"),
        ("half\ud800.safetensors", r"lacks 'half\\ud800.safetensors'"),
        ("byte\udcff.safetensors", r"lacks 'byte\\udcff.safetensors'"),
        ("../outside.safetensors", "names '../outside.safetensors', which is no"),
        ("a/../../outside.safetensors", "which is no safetensors file of the folder"),
        ("..\\outside.safetensors", "which is no safetensors file of the folder"),
        ("./model.safetensors", "which is no safetensors file of the folder"),
        ("/etc/passwd", "names '/etc/passwd', which is no"),
        ("/dev/zero.safetensors", "which is no safetensors file of the folder"),
        ("~/model.safetensors", "which is no safetensors file of the folder"),
        ("", "names '', which is no"),
        (".", "names '.', which is no"),
        ("..", "names '..', which is no"),
        ("\n.safetensors", r"lacks '\\n.safetensors'"),
        ("config.json", "names 'config.json', which is no safetensors file"),
    ],
    ids=lambda value: value[:30].encode("ascii", "backslashreplace").decode(),
)
def test_names_of_the_weight_map(name: str, message: str, sharded: Path, cpu: hal.Backend) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    write_json(sharded / INDEX, {"weight_map": {**weight_map, LAYER: name}})
    refused(sharded, cpu, message)


def test_a_thousand_files_that_are_not_there(sharded: Path, cpu: hal.Backend) -> None:
    write_json(sharded / INDEX, {"weight_map": {str(each): f"{each:05}.safetensors" for each in range(1000)}})
    refused(sharded, cpu, r"lacks '00000.safetensors', .* and 960 more, which")


def folder(place: Path) -> None:
    place.mkdir()


def pipe(place: Path) -> None:
    os.mkfifo(place)


def bound(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        before = Path.cwd()
        os.chdir(place.parent)  # A socket's path can have about 100 characters.
        try:
            opened.bind(place.name)
        finally:
            os.chdir(before)


def linked(target: str) -> Callable[[Path], None]:
    return lambda place: place.symlink_to(target)


KINDS = {
    "a folder": (folder, "is a folder, not a file"),
    "a pipe": (pipe, "is a pipe, not a file"),
    "a socket": (bound, "is a socket, not a file"),
    "a link to a device": (linked("/dev/zero"), "is a device, not a file"),
    "a link to a folder": (linked("/etc"), "is a folder, not a file"),
    "a link to nothing": (linked("nothing"), "cannot be read: No such file or directory"),
    "a link to a name too long": (linked("/" + "a" * 3000), "cannot be read: File name too long"),
    "a link to a file of others": (linked("/proc/self/mem"), "cannot be read|holds no|is not"),
}
FILES = (
    "config.json",
    INDEX,
    "model-00001-of-00002.safetensors",
    "generation_config.json",
    "tokenizer.json",
    "quant_model_description.json",
)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_under_a_name(kind: str, file: str, sharded: Path, cpu: hal.Backend) -> None:
    make, message = KINDS[kind]
    (sharded / file).unlink(missing_ok=True)
    make(sharded / file)
    refused(sharded, cpu, message)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_only_file_of_weights_may_be(kind: str, tmp_path: Path, cpu: hal.Backend) -> None:
    make, message = KINDS[kind]
    random_checkpoint(tmp_path / "single")
    (tmp_path / "single" / "model.safetensors").unlink()
    make(tmp_path / "single" / "model.safetensors")
    refused(tmp_path / "single", cpu, message)


@pytest.mark.parametrize("file", FILES[:-1])
def test_links_to_files_are_followed(file: str, sharded: Path, cpu: hal.Backend) -> None:
    """A download cache stores files elsewhere, under their hashes."""
    blobs = sharded.parent / "blobs"
    blobs.mkdir()
    shutil.move(sharded / file, blobs / "5ca1ab1e")
    (sharded / file).symlink_to("../blobs/5ca1ab1e")
    read_all(sharded, cpu)


@pytest.mark.parametrize("file", FILES[:-1])
def test_files_that_may_not_be_read(file: str, sharded: Path, cpu: hal.Backend) -> None:
    (sharded / file).chmod(0)
    if os.access(sharded / file, os.R_OK):
        pytest.skip("this user can read every file")
    refused(sharded, cpu, "(?i)permission denied")


def test_a_weights_file_whose_name_is_no_text(tmp_path: Path, cpu: hal.Backend) -> None:
    random_checkpoint(tmp_path / "bytes")
    os.rename(tmp_path / "bytes" / "model.safetensors", os.fsencode(tmp_path / "bytes") + b"/\xff.safetensors")
    refused(tmp_path / "bytes", cpu, r"'\\udcff.safetensors' in .* cannot be read: its path is not valid Unicode")


def test_json_without_end(sharded: Path, cpu: hal.Backend) -> None:
    with (sharded / "config.json").open("wb") as stream:
        stream.truncate(1 << 40)
    refused(sharded, cpu, f"config.json has 1048576 MiB, and the limit is {JSON_BYTES >> 20} MiB")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": Infinity}', "a = Infinity, which is not finite"),
        ('{"a": {"b": [0, {"c": -1e999}]}}', r"a\.b\[1\]\.c = -Infinity"),
        ('{"a": [[NaN]]}', r"a\[0\]\[0\] = NaN"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
        ('{"a": ' + "[" * 990 + "NaN" + "]" * 990 + "}", "cannot be read|NaN"),
    ],
    ids=lambda text: text[:30],
)
def test_numbers_are_finite(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path / "some.json")


@pytest.mark.parametrize("name", ["model.safetensors", "...", "~", "a b", "é", "-"])
def test_plain_names(name: str) -> None:
    assert is_plain_name(name)
