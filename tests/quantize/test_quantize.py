"""Tests for writing checkpoints with int8 layers: content, calibration, and errors."""

from __future__ import annotations

import json
import math
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hal.models.qwen3 import Qwen3ForCausalLM
from helpers.checkpoints import INDEX, random_checkpoint
from helpers.quantized import (
    DESCRIPTION,
    DOWN,
    FORMATS,
    PARTS,
    SCHEMES,
    TEXT,
    Format,
    Scheme,
    all_tensors,
    change_tensors,
    error,
    kept_layers,
    load,
    logits,
    wide,
)
from helpers.thorough import DTYPE, MODE, thorough
from torch import Tensor

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import build_model
from hal.checkpoint.quantized_layers import linear_layers
from hal.cli import main
from hal.errors import CheckpointError, ConfigError, NumericsError
from hal.nn import Linear
from hal.ops.forms import Form, dequantize
from hal.quantization import integer_arithmetic
from hal.quantization.checkpoint_format import Written, formats
from hal.quantization.integer_arithmetic import (
    activation_for,
    packed_signed,
    quantize_groups,
    quantize_weight,
    signed_weight,
)
from hal.quantize.calibration import input_ranges
from hal.quantize.quantize_checkpoint import quantize_checkpoint


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "plain", shards=3, attention_bias=True, dtype="bfloat16")


def make(source: Path, target: Path, format: Format, scheme: Scheme, **options: Any) -> Path:
    calibration = TEXT if scheme == "w8a8" else None
    return quantize_checkpoint(source, target, scheme, format=format, calibration=calibration, **options).path


@thorough(MODE, r"\[modelslim")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("format", FORMATS)
def test_round_trip(format: Format, scheme: Scheme, plain: Path, tmp_path: Path) -> None:
    folder = make(plain, tmp_path / "out", format, scheme)
    before, after = all_tensors(plain), all_tensors(folder)
    for name, values in before.items():
        layer, _, suffix = name.rpartition(".")
        if layer.rpartition(".")[2] not in PARTS:
            assert torch.equal(after[name], values), name
        elif suffix == "weight":
            scale = values.float().abs().amax(-1, keepdim=True) / 127
            assert torch.equal(after[name], (values.float() / scale).round().to(torch.int8))
            assert torch.equal(after[f"{layer}.weight_scale"], scale)
    assert {file.name for file in folder.iterdir()} == {
        *(file.name for file in plain.iterdir()),
        *([DESCRIPTION] if format == "modelslim" else []),
    }
    assert not any(file.name.startswith(".") for file in tmp_path.iterdir()), "no temporary files must remain"
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert set(weight_map) == set(after)
    model = load(folder)
    modules = dict(model.named_modules())
    assert len(kept_layers(model)) == 8
    assert error(logits(model).float(), logits(load(plain)).float()) < 0.06
    meta = build_model(Checkpoint.open(folder))
    assert {path: type(module) for path, module in meta.named_modules()} == {
        path: type(module) for path, module in modules.items()
    }


def test_both_formats_say_the_same(plain: Path, tmp_path: Path) -> None:
    found = [logits(load(make(plain, tmp_path / name, name, "w8a8_dynamic"))) for name in FORMATS]
    assert torch.equal(*found)


@thorough(DTYPE, r"\[b?float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_modelslim_scales_are_of_its_dtypes(dtype: str, tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "plain", dtype=dtype)
    tensors = all_tensors(make(source, tmp_path / "out", "modelslim", "w8a8"))
    assert tensors[f"{DOWN}.input_scale"].dtype == tensors[f"{DOWN}.input_offset"].dtype == getattr(torch, dtype)
    deq_scale = tensors[f"{DOWN}.deq_scale"]
    assert deq_scale.dtype == (torch.int64 if dtype == "float16" else torch.float32)
    values = deq_scale.to(torch.int32).view(torch.float32) if dtype == "float16" else deq_scale
    scale = tensors[f"{DOWN}.input_scale"].float() * tensors[f"{DOWN}.weight_scale"].flatten()
    assert torch.equal(values, scale)
    sums = tensors[f"{DOWN}.weight"].sum(-1) * tensors[f"{DOWN}.input_offset"].long()
    assert torch.equal(tensors[f"{DOWN}.quant_bias"].long(), -sums)


def test_ranges_are_those_of_the_inputs(plain: Path) -> None:
    """Ranges over several windows, by layer path, are compared with those that hooks of the test recorded."""
    backend = hal.open("cpu")
    model = hal.load_model(plain, backend)
    seen: dict[str, list[Tensor]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(lambda _, given, path=path: seen.setdefault(path, []).append(given[0]))
    tokens = [index * 7 % 250 for index in range(100)]
    ranges = input_ranges(model, backend, tokens, window=32)
    assert set(ranges) == {path for path, module in model.named_modules() if isinstance(module, Linear)}
    for path, (low, high) in ranges.items():
        assert sum(len(each) for each in seen[path]) == 100
        assert (low, high) == (min(map(torch.min, seen[path])).item(), max(map(torch.max, seen[path])).item())
    assert backend.config.cache == hal.CacheConfig(), "its configuration must not change"
    before = len(seen[path])
    logits(model)
    assert len(seen[path]) > before
    assert input_ranges(model, backend, tokens, window=32) == ranges, "no hook must remain"


def test_the_active_backend_stays(plain: Path, tmp_path: Path) -> None:
    backend = hal.open("cpu")
    make(plain, tmp_path / "out", "modelslim", "w8a8")
    assert hal.active_backend() is backend


@pytest.mark.parametrize(
    ("low", "high", "symmetric"), [(-1.0, 3.0, False), (-1.0, 3.0, True), (0.5, 2.0, False), (-4.0, -1.0, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_activation_takes_its_range_and_zero(low: float, high: float, symmetric: bool, dtype: torch.dtype) -> None:
    found = activation_for(low, high, symmetric=symmetric, dtype=dtype)
    assert torch.tensor(found.scale, dtype=torch.float64).to(dtype).item() == found.scale
    assert found.offset == 0 or not symmetric
    for value in (low, 0.0, high):
        number = max(-128, min(127, round(value / found.scale + found.offset)))
        assert abs((number - found.offset) * found.scale - value) <= (0 if value == 0 else 1.5 * found.scale)


def test_nothing_to_scale() -> None:
    assert activation_for(0.0, 0.0, symmetric=False).scale > 0
    weight, scale = quantize_weight("x", torch.tensor([[0.0, 0.0], [-2.0, 1.0]]))
    assert (weight.tolist(), scale.tolist()) == ([[0, 0], [-127, 64]], [1.0, pytest.approx(2 / 127)])
    with pytest.raises(CheckpointError, match="x has values that are not finite"):
        quantize_weight("x", torch.tensor([[math.nan]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "w8a8"], "requires a calibration text"),
        (["--scheme", "w2a16"], "unknown scheme 'w2a16'"),
        (["--scheme", "w8a16", "--group-size", "32"], "w8a16 has no groups, but group_size is 32"),
        (["--scheme", "w4a16", "--group-size", "0"], "group_size is 0"),
        (
            ["--scheme", "w4a16", "--group-size", "12"],
            "q_proj has 32 inputs, which is no multiple of the group_size 12",
        ),
        (["--scheme", "w8a16", "--keep", "layers.7"], "no layer that would be quantized has the name 'layers.7'"),
        (["--scheme", "w8a16", "--keep", "q_proj"], "q_proj is kept, but model.layers.0.self_attn.k_proj is not"),
        (["--scheme", "w8a8_dynamic", "--format", "gguf"], "unknown format 'gguf'"),
        (["--scheme", "w8a8_dynamic", "--calibration", "{text}"], "uses no calibration text"),
        (["--scheme", "w8a8_dynamic", "--calibration-tokens", "5"], "text, but calibration_tokens is 5"),
        (["--scheme", "w8a8", "--calibration", "{missing}"], "cannot be read"),
        (["--scheme", "w8a8", "--calibration", "{empty}"], "has no tokens"),
        (["--scheme", "w8a8", "--calibration", "{bytes}"], "cannot be read"),
        (["--scheme", "w8a8", "--calibration", "{text}", "--calibration-tokens", "0"], "calibration tokens is 0"),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str, plain: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("text", "missing", "empty", "bytes")}
    files["text"].write_text(TEXT)
    files["empty"].write_text("")
    files["bytes"].write_bytes(b"\xff")
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["quantize", str(plain), str(out), *(each.format(**files) for each in arguments)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.partition("\nremedy: ")[0]
    assert "\nremedy: " in result.stderr
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_dynamic"])
def test_the_command_says_what_it_does_and_since_when(scheme: str, plain: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    given = ["--scheme", scheme, *(["--calibration", str(text), "--calibration-tokens", "20"] * (scheme == "w8a8"))]
    result = CliRunner().invoke(main, ["quantize", str(plain), str(tmp_path / "out"), *given])
    assert result.exit_code == 0, result.stderr
    errors = dict(line.split() for line in result.stdout.splitlines()[1:])
    assert len(errors) == 14
    assert all(0.001 < float(each) < 0.01 for each in errors.values())
    calibrating = ["loading the model to calibrate it", "calibrating on 20 tokens"] if scheme == "w8a8" else []
    said = re.findall(r"^\[\d+ s\] (.*)$", result.stderr, re.MULTILINE)
    assert [each for each in said if " left" not in each and "still running" not in each] == [
        *calibrating,
        "writing 14 quantized layers and the other weights",
    ]


def test_calibration_and_writing_say_how_much_is_done(plain: Path, tmp_path: Path) -> None:
    read: list[tuple[int, int]] = []
    with hal.open({"backend": "cpu", "dtype": "float32"}) as backend:
        input_ranges(
            hal.load_model(plain, backend), backend, list(range(20)), window=8, progress=lambda *each: read.append(each)
        )
    assert read == [(8, 20), (16, 20), (20, 20)]
    written: list[tuple[int, int]] = []
    made = quantize_checkpoint(plain, tmp_path / "out", "w8a8_dynamic", progress=lambda *each: written.append(each))
    assert written == sorted(set(written)), "it grows"
    assert written[-1] == (made.bytes_before, made.bytes_before)


def refused(source: Path, target: Path, message: str) -> None:
    result = CliRunner().invoke(main, ["quantize", str(source), str(target), "--scheme", "w8a8_dynamic"])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_full_disk_is_told(plain: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        refused(plain, tmp_path / "out", "cannot be written: ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("*out*"))


def test_the_output_projection_has_the_name_that_the_model_gives(tmp_path: Path) -> None:
    class Renamed(Qwen3ForCausalLM):
        output_projection = "down_proj"

    checkpoint = Checkpoint.open(random_checkpoint(tmp_path, tie_word_embeddings=False))
    layers = [name for name, _ in linear_layers(build_model(checkpoint, Renamed))]
    assert "lm_head" in layers
    assert not [name for name in layers if name.endswith("down_proj")]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_output_projection_in_int8(tied: bool, tmp_path: Path) -> None:
    """With a scale for each row, whatever the scheme; a tied table stays beside it."""
    plain = random_checkpoint(tmp_path / "plain", shards=2, tie_word_embeddings=tied)
    made = quantize_checkpoint(plain, tmp_path / "out", "w4a16", group_size=16, head=True)
    before, after = all_tensors(plain), all_tensors(made.path)
    table = before["model.embed_tokens.weight"]
    assert torch.equal(after["model.embed_tokens.weight"], table)
    assert "lm_head.weight" not in after
    assert made.errors["lm_head"] < 0.01
    config = json.loads((made.path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    section = config["quantization_config"]
    assert section["ignore"] == []
    assert section["config_groups"]["group_1"]["targets"] == ["lm_head"]
    head = kept_layers(load(made.path))["lm_head"]
    assert head.form == Form("int8")
    wanted = table if tied else before["lm_head.weight"]
    assert error(wide(head), wanted.float()) < 0.01
    alone = quantize_checkpoint(plain, tmp_path / "without", "w4a16", group_size=16).path
    assert error(logits(load(made.path)).float(), logits(load(alone)).float()) < 0.02


def test_an_output_projection_that_is_refused(plain: Path, tmp_path: Path) -> None:
    """Before the calibration."""
    said = list[str]()
    options: dict[str, Any] = {"format": "modelslim", "calibration": "a b c", "head": True, "say": said.append}
    with pytest.raises(ConfigError, match="modelslim does not store an output projection in w8a16_group"):
        quantize_checkpoint(plain, tmp_path / "out", "w8a8", **options)
    assert not said
    form = Form("int8")
    with pytest.raises(ConfigError, match="one scheme in the format modelslim, and lm_head has another"):
        formats()["modelslim"].describe({}, Written("w8a8", form, {"lm_head": ("w8a16", form)}), [], {})


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("bits", "width", "group"), [(4, 24, 8), (4, 24, 24), (8, 22, 11)])
def test_ranges_of_rows(bits: int, width: int, group: int, zero_points: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is quantized and packed as it is alone, in any range. Zero points fit numbers of one sign better."""
    weight = torch.randn(7, width, generator=torch.Generator().manual_seed(1)).abs()
    weight[2] = 0
    form = Form(f"int{bits}", columns=group, zero_points=zero_points)
    whole = quantize_groups(weight, form, torch.float32)
    monkeypatch.setattr(integer_arithmetic, "ELEMENTS", 2 * width)
    numbers, scale, zero = found = quantize_groups(weight, form, torch.float32)
    assert (zero is None) == (whole[2] is None) == (not zero_points)
    assert all(torch.equal(one, two) for one, two in zip(found, whole, strict=True) if one is not None)  # type: ignore[arg-type]
    packed = signed_weight(packed_signed(numbers, bits), bits, width)
    wanted = (0.06 if zero_points else 0.15) if bits == 4 else 0.01
    assert error(dequantize(form, packed, scale, zero), weight) < wanted


def test_folders_that_are_refused(plain: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "a file").write_text("")
    refused(plain, taken, "exists already")
    refused(plain, plain, "exists already")
    refused(plain, taken / "a file", "exists already")
    refused(plain, taken / "a file" / "below", "cannot be written")
    refused(tmp_path / "nothing", tmp_path / "out", "no checkpoint at")
    made = make(plain, tmp_path / "made", "modelslim", "w8a8_dynamic")
    refused(made, tmp_path / "out", "already quantized")
    assert {file.name for file in taken.iterdir()} == {"a file"}
    empty = tmp_path / "empty"
    empty.mkdir()
    assert make(plain, empty, "modelslim", "w8a8_dynamic") == empty


def test_a_model_that_does_not_compute(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "plain")
    change_tensors(source, lambda tensors: tensors["model.layers.0.input_layernorm.weight"].fill_(math.inf))
    with pytest.raises(NumericsError, match=r"the input of model\.layers\.0\.self_attn\.qkv_proj is not finite"):
        make(source, tmp_path / "out", "modelslim", "w8a8")
    assert not (tmp_path / "out").exists()
