"""Tests that quantized checkpoints give the tokens of hal.generate inside vLLM. `make test-vllm` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import random_checkpoint
from helpers.low_bits import Format, gpt_oss_pair, pair
from helpers.quantized import TEXT
from helpers.vllm_programs import found_by, needs_vllm

from hal.quantize.quantize_checkpoint import quantize_checkpoint

OPTIONS: dict[str, dict[str, Any]] = {
    "w8a16": {},
    "w8a8": {"calibration": TEXT},
    "w8a8_dynamic": {},
    "w4a16": {"group_size": 32},
    "w4a8_dynamic": {"group_size": 32},
    "w8a16_group": {"group_size": 32},
    "fp8": {},
}
"""The schemes that `hal quantize` writes, each with its options."""
Case = tuple[str, dict[str, Any], dict[str, Any]]


@needs_vllm
@pytest.mark.shows("quantized checkpoints", "vLLM")
def test_quantized_checkpoints(tmp_path: Path) -> None:
    """--quantization is the checkpoint's, or refused; --kv-cache-dtype is hal's cache.dtype."""
    plain = random_checkpoint(tmp_path / "plain", dtype="bfloat16", intermediate_size=64)
    cases: dict[str, Case] = {}
    for scheme, options in OPTIONS.items():
        made = quantize_checkpoint(plain, tmp_path / scheme, scheme, format="compressed-tensors", **options)
        cases[scheme] = (str(made.path), {}, {})
    made = quantize_checkpoint(plain, tmp_path / "head", "w4a16", group_size=32, head=True)
    cases["output projection"] = (str(made.path), {}, {})
    cases["named"] = (cases["w4a8_dynamic"][0], {"quantization": "compressed-tensors"}, {})
    made = quantize_checkpoint(plain, tmp_path / "modelslim", "w8a8_dynamic", format="modelslim")
    cases["modelslim"] = (str(made.path), {}, {})
    blocks, _ = pair(tmp_path / "blocks", Format("fp8"), intermediate_size=64)
    rows, _ = pair(tmp_path / "rows", Format("compressed-fp8", group=0))
    cases |= {"fp8 blocks": (str(blocks), {"quantization": "fp8"}, {}), "fp8 rows": (str(rows), {}, {})}
    for name, dtype in (("fp8", "fp8"), ("int8_per_token_head", "int8")):
        cases[f"cache in {name}"] = (str(plain), {"kv_cache_dtype": name}, {"cache": {"dtype": dtype}})
    found = found_by(
        "vllm_families.quantized",
        tmp_path,
        Path(cases["w4a8_dynamic"][0]),
        hal={"backend": "cpu", "compilation": {"compiler": "graph"}},
        cases=cases,
        refused={"another scheme": {"quantization": "fp8"}, "another cache": {"kv_cache_dtype": "fp8_e5m2"}},
    )
    assert found["found"] == {name: [] for name in cases}
    assert "does not match the quantization method" in found["refused"]["another scheme"]
    assert "hal does not support vLLM's kv_cache_dtype = fp8_e5m2" in found["refused"]["another cache"]


PUBLISHED = {
    "awq": Format("awq"),
    "gptq": Format("gptq"),
    "gptq_v2": Format("gptq_v2", bits=8),
    "packed": Format("compressed-tensors"),
    "packed, 8 bits": Format("compressed-tensors", bits=8),
}
"""Formats of other tools, each with zero points."""


@needs_vllm
def test_checkpoints_of_other_tools(tmp_path: Path) -> None:
    """vLLM's names of a method are taken, too."""
    made = {name: pair(tmp_path / name, each, intermediate_size=64) for name, each in PUBLISHED.items()}
    made["mxfp4"] = gpt_oss_pair(tmp_path / "mxfp4")
    cases: dict[str, Case] = {name: (str(quantized), {}, {}) for name, (quantized, _) in made.items()}
    for name in ("awq", "gptq", "mxfp4"):
        cases[f"{name}, named"] = (cases[name][0], {"quantization": name}, {})
    found = found_by(
        "vllm_families.quantized",
        tmp_path,
        made["awq"][0],
        hal={"backend": "cpu", "compilation": {"compiler": "graph"}},
        cases=cases,
        refused={"another scheme": {"quantization": "gptq"}},
    )
    assert found["found"] == {name: [] for name in cases}
    assert "does not match the quantization method" in found["refused"]["another scheme"]
