"""Tests for models with weights of 8 and 4 bits on the NPU: logits against the CPU's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import quantized as int8
from helpers.checkpoints import random_checkpoint
from helpers.gguf_writing import write_gguf
from helpers.low_bits import DENSE, SPARSE, Format, gpt_oss_pair, pair
from helpers.low_bits_on_ranks import CASES
from helpers.quantized import error
from helpers.rank_programs import compiled_logits
from helpers.ranks import on_npus
from helpers.thorough import DTYPE, EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal.nn import CausalLM, Linear, QuantizedEmbedding
from hal.ops.form_samples import INT8_DYNAMIC
from hal.ops.forms import Form

Opened = Callable[..., hal.Backend]
pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = [1, 7, 30, 4, 200, 19]
FORMATS = {
    "packed": Format("compressed-tensors", symmetric=True),
    "awq": Format("awq", dtype=torch.float16),
    "gptq-8-bits": Format("gptq", bits=8, symmetric=True),
    "gptq_v2-8-bits": Format("gptq_v2", bits=8),
    "fp8-blocks": Format("fp8"),
    "packed-ordered": Format("compressed-tensors", symmetric=True, ordered=True),
    "gptq-ordered": Format("gptq", symmetric=True, ordered=True),
}


def logits(folder: Path, backend: str, compiler: str, dtype: str, **config: Any) -> Tensor:
    compilation = {"compiler": compiler, "capture_sizes": [1]}
    with (
        hal.open({"backend": backend, "dtype": dtype, "compilation": compilation, **config}) as on,
        hal.Runner(hal.load_model(folder, on), on) as runner,
    ):
        found = [runner.step(runner.batch([TOKENS], [[1]]), hal.step.ALL).logits.cpu().clone()]
        found.append(runner.step(runner.batch([[5]], [[1]], cached=[len(TOKENS)])).logits.cpu().clone())
    return torch.cat(found)


def check(quantized: Path, plain: Path, *compilers: str, **config: Any) -> None:
    """Check that an NPU's logits are as close to float32, within a few roundings, as the CPU's of plain weights."""
    exact, rounded = logits(plain, "cpu", "eager", "float32"), logits(plain, "cpu", "eager", "bfloat16")
    for compiler in compilers:
        found = logits(quantized, "npu", compiler, "bfloat16", **config)
        assert error(found.float(), exact) < 2 * error(rounded.float(), exact) + 0.01, compiler


def forms(model: CausalLM) -> set[Form]:
    """Return the forms of a model's quantized projections."""
    return {each.form for each in model.modules() if isinstance(each, Linear) and each.quantized}


@thorough(EXHAUSTIVE, r"\[(awq-sparse|fp8-blocks-dense|gptq-8-bits|gptq_v2-8-bits|packed-ordered|gptq-ordered-sparse)")
@thorough(MODE, r"\[(awq-dense|fp8-blocks-sparse|packed-dense|gptq-ordered-dense)")
@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_logits_are_those_of_the_dequantized_weights(format: Format, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Within a few roundings to bfloat16, in each mode. Expert choices are those of nearly equal routers."""
    quantized, plain = pair(tmp_path, format, **overrides)
    check(quantized, plain, "eager", "graph", "npugraph_ex", quantized_weights="kept")


def test_a_tied_table_of_a_gguf_file(tmp_path: Path) -> None:
    """It stays packed, and a step widens the rows of its tokens only, eager and in graphs."""
    plain = random_checkpoint(tmp_path / "plain", **{**DENSE, "attention_bias": False})
    file = write_gguf(plain, tmp_path / "model.gguf", kind="Q4_1")
    with hal.open({"backend": "npu", "dtype": "bfloat16", "quantized_weights": "kept"}) as on:
        assert isinstance(hal.load_model(file, on).get_submodule("model.embed_tokens"), QuantizedEmbedding)
    check(file, file, "eager", "graph", "npugraph_ex", quantized_weights="kept")


def test_groups_of_16_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At load, since no operator takes them, and each step would widen the weights; groups of 32 stay packed."""
    sizes = {**DENSE, "hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 4096, "attention_bias": False}
    plain = random_checkpoint(tmp_path / "plain", **sizes)
    for kind, packed in (("Q4_K", True), ("Q6_K", False)):
        file = write_gguf(plain, tmp_path / f"{kind}.gguf", kind=kind)
        config = {"dtype": "bfloat16", "quantized_weights": "kept"}
        caplog.clear()
        with hal.open({"backend": "npu", **config}) as on:
            model = hal.load_model(file, on)
        assert bool(forms(model)) == packed
        warned = re.findall(r"multiples of 32, .* 4 layers \(Q6_K\) .*: (\d+) MiB in place of (\d+) MiB", caplog.text)
        count = sum(each.weight.numel() for each in model.modules() if isinstance(each, Linear))
        assert warned == ([] if packed else [(str(2 * count >> 20), str(count + count // 16 * 4 >> 20))])
    exact, found = logits(file, "cpu", "eager", "float32"), logits(file, "npu", "graph", **config)
    assert error(found.float(), exact) < 0.03


FLOAT8 = {
    "fp8": (Format("fp8"), Form("float8", rows=32, columns=32)),
    "fp8_dynamic": (Format("compressed-fp8", group=0, activations=True), Form("float8", inputs="float8")),
    "fp8_static": (Format("FP8", group=-1), Form("float8", inputs="static_float8")),
}


@pytest.mark.parametrize("scheme", FLOAT8)
def test_float8_becomes_int8(npu: Opened, scheme: str, tmp_path: Path) -> None:
    """On the generations whose matrix units do not multiply float8, unless it is to be kept."""
    format, stored = FLOAT8[scheme]
    quantized, _ = pair(tmp_path, format, **DENSE)
    assert npu().limits.requantized == tuple(FLOAT8)
    for asked, form in (("auto", INT8_DYNAMIC), ("kept", stored)):
        with hal.open({"backend": "npu", "dtype": "bfloat16", "quantized_weights": asked}) as on:
            model = hal.load_model(quantized, on)
        assert forms(model) == {form}


@thorough(DTYPE, r"-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["compressed-tensors", "modelslim"])
def test_a_row_of_zeros_with_the_scale_0(form: int8.Format, dtype: str, tmp_path: Path) -> None:
    """Of static W8A8, whose scales the device takes in a format of their own. Its results are 0 in each mode."""
    folder = int8.make_pair(tmp_path, form, "w8a8", num_hidden_layers=1, attention_bias=False).folder
    scale = "deq_scale" if form == "modelslim" else "weight_scale"

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in ("self_attn.v_proj", "mlp.down_proj"):
            tensors[f"model.layers.0.{layer}.weight"][3] = 0
            tensors[f"model.layers.0.{layer}.{scale}"][3] = 0

    int8.change_tensors(folder, change)
    exact = logits(folder, "cpu", "eager", "float32")
    for compiler in ("eager", "graph"):
        assert error(logits(folder, "npu", compiler, dtype).float(), exact) < 0.05, compiler


@thorough(MODE, r"\[(eager|npugraph_ex)\]")
@pytest.mark.parametrize("compiler", ["eager", "graph", "npugraph_ex"])
def test_experts_of_gpt_oss(compiler: str, tmp_path: Path) -> None:
    quantized, plain = gpt_oss_pair(tmp_path)
    check(quantized, plain, compiler)


@thorough(MODE)
@thorough(EXHAUSTIVE, r"\[(?!bfloat16-2-mxfp4|float16-4-modelslim-w4a8-0-dense)")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ranks(dtype: str, count: int, name: str, tmp_path: Path) -> None:
    """Within a few roundings of one CPU in float32, or where ranks round parts of a row to int8, of int8."""
    case, compilers = CASES[name], ["eager", "graph"]
    path, parallel = str(case.write(tmp_path)), {"tensor": count}
    npu = {"backend": "npu", "options": {"emulator": "on"}, "quantized_weights": "kept", **case.config}
    exact, rounded = (
        compiled_logits(path, each, ["eager"], {}, {**case.config, "backend": "cpu"})["eager"]
        for each in ("float32", dtype)
    )
    bound = 2 * error(rounded.float(), exact) + (0.03 if case.rounded else 0.01)
    arguments = {"checkpoint": path, "dtype": dtype, "compilers": compilers, "parallel": parallel, "on": npu}
    for rank in on_npus("compiled_logits", count, **arguments):
        for compiler in compilers:
            assert error(rank[compiler].float(), exact) < bound, compiler
