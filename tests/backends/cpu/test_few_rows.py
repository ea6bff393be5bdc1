"""Tests for the CPU's products of few rows: every layout, size and instruction set, and what is not finite."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.backends.cpu import capabilities, packing
from hal.backends.cpu.native import build, compiler
from hal.backends.cpu.native.linear_kernels import LinearKernels
from hal.backends.cpu.native.processor import native_flags, portable_flags, processor_flags
from hal.backends.cpu.packing import FewRows, Layout, packed
from helpers.thorough import EXHAUSTIVE, MODE, OPERATION, thorough
from torch import Tensor

import hal
from hal.errors import ConfigError, DriverUnavailable

ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 64)
SIZES = ((96, 64), (1000, 100), (50, 33), (64, 1), (16, 576), (2048, 130))
LOWER = ("avx512_bf16", "avx512", "avx2", "sse4")

LAYOUTS = [False, True] if capabilities.packs(torch.bfloat16) else [False]
"""Whether weights are packed in blocks: the layouts in which the driver keeps bfloat16 weights on this processor."""
every_layout = pytest.mark.parametrize("in_blocks", LAYOUTS)
needs_blocks = pytest.mark.skipif(
    len(LAYOUTS) == 1, reason="on this processor the driver keeps bfloat16 weights plain, as every_layout tests"
)


@pytest.fixture(scope="module")
def tiles(emulated_tiles: ctypes.CDLL) -> LinearKernels:
    return LinearKernels(emulated_tiles)


@thorough(OPERATION, r"\[(?!packed_linear_tiles--O1)")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX is a part of x86 processors")
@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("packed_linear_tiles", "-O0"),
        ("packed_linear_tiles", "-O1"),
        ("peaks", "-O1"),
        ("prompt_attention", "-O1"),
        ("weight_only_tiles", "-O1"),
    ],
)
def test_the_code_of_real_tiles_is_assembled(name: str, level: str, tmp_path: Path) -> None:
    """Few processors have tiles, but each compiler for x86 has their instructions."""
    flags = [level if each == "-O3" else each for each in (*compiler.FLAGS, *portable_flags("x86_64", "amx"))]
    source, made = compiler.SOURCES / f"{name}.cpp", tmp_path / "tiles.o"
    command = [*compiler.compiler(), *flags, "-c", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert bytes.fromhex("c4e27849c0") in made.read_bytes(), "no instruction tilerelease"


@pytest.fixture(scope="module")
def kernels() -> LinearKernels:
    return LinearKernels(build.load())


def product(kernels: LinearKernels, x: Tensor, weight: Tensor, bias: Tensor | None, *, in_blocks: bool) -> Tensor:
    """Return a product by the kernel of few rows."""
    held = packed(weight) if in_blocks else weight
    block = kernels.block_of(weight, held) if in_blocks else 0
    assert bool(block) == in_blocks
    return kernels.few_rows(x, held, bias, FewRows(64, block), kernels.address_of(held))


def check_sizes(kernels: LinearKernels, dtype: torch.dtype, *, in_blocks: bool, counts: tuple[int, ...] = ROWS) -> None:
    torch.manual_seed(0)
    for out, width in SIZES:
        weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
        wide = torch.randn(counts[-1], 2 * width + 1).to(dtype)
        for rows in counts:
            for x in (wide[:rows, :width].contiguous(), wide[:rows, width : 2 * width]):
                for each in (None, bias):
                    found = product(kernels, x, weight, each, in_blocks=in_blocks)
                    expected = x.double() @ weight.double().t() + (0 if each is None else each.double())
                    # The sum rounds in float32, and the result once.
                    slack = torch.finfo(dtype).eps * expected.abs() + 1e-6 * width * expected.abs().max()
                    assert found.dtype is dtype
                    assert ((found.double() - expected).abs() <= slack).all(), f"{out} x {width}, {rows} rows"


@every_layout
def test_weights_of_any_size(kernels: LinearKernels, in_blocks: bool) -> None:
    check_sizes(kernels, torch.bfloat16, in_blocks=in_blocks)


def test_float16_weights_of_any_size(kernels: LinearKernels) -> None:
    check_sizes(kernels, torch.float16, in_blocks=False)


@needs_blocks
@thorough(MODE)
def test_tiles_multiply_packed_weights(tiles: LinearKernels) -> None:
    assert tiles.many
    check_sizes(tiles, torch.bfloat16, in_blocks=True, counts=(*ROWS, 300))
    check_what_is_not_finite(tiles, in_blocks=True)


@thorough(EXHAUSTIVE)
@pytest.mark.parametrize("highest", LOWER)
def test_every_lower_instruction_set(highest: Any) -> None:
    try:
        native_flags(highest)
    except DriverUnavailable as missing:
        pytest.skip(str(missing))
    lower = LinearKernels(build.load(highest))
    check_sizes(lower, torch.bfloat16, in_blocks=LAYOUTS[-1])
    check_sizes(lower, torch.float16, in_blocks=False)
    check_what_is_not_finite(lower, in_blocks=LAYOUTS[-1])


def check_what_is_not_finite(kernels: LinearKernels, *, in_blocks: bool) -> None:
    """A NaN or an infinity of x reaches its row, and one of the weight its column; others stay finite."""
    torch.manual_seed(0)
    for broken in (math.nan, math.inf, -math.inf):
        x, weight = torch.randn(9, 130).bfloat16(), torch.randn(100, 130).bfloat16()
        x[4, 129] = broken
        weight[77, 0] = broken
        found, expected = product(kernels, x, weight, None, in_blocks=in_blocks), x.float() @ weight.float().t()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())
        assert torch.equal(found[expected.isinf()].float(), expected[expected.isinf()])


@every_layout
def test_what_is_not_finite_comes_out(kernels: LinearKernels, in_blocks: bool) -> None:
    check_what_is_not_finite(kernels, in_blocks=in_blocks)


@every_layout
def test_a_row_does_not_depend_on_the_others(kernels: LinearKernels, in_blocks: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 576).bfloat16(), torch.randn(960, 576).bfloat16()
    whole = product(kernels, x, weight, None, in_blocks=in_blocks)
    for rows in (1, 5, 33):
        assert torch.equal(product(kernels, x[:rows], weight, None, in_blocks=in_blocks), whole[:rows])


@every_layout
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, kernels: LinearKernels, in_blocks: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 1536).bfloat16(), torch.randn(4160, 1536).bfloat16()
    expected = product(kernels, x, weight, None, in_blocks=in_blocks)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(product(kernels, x, weight, None, in_blocks=in_blocks), expected)
    finally:
        torch.set_num_threads(before)


@needs_blocks
def test_a_layout_that_fits_two_weights_is_unknown(kernels: LinearKernels) -> None:
    """The layout is found by comparison, which a weight of equal elements does not permit."""
    weight = torch.ones(192, 64).bfloat16()
    assert kernels.block_of(weight, packed(weight)) in (0, 32, 64)
    assert kernels.block_of(weight.float(), packed(weight.float())) == 0


@every_layout
def test_a_weight_that_is_written_keeps_its_address(kernels: LinearKernels, in_blocks: bool) -> None:
    """Captured steps have the address."""
    old, new = torch.randn(96, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    held = torch.nn.Parameter(packed(old) if in_blocks else old, requires_grad=False)
    address = kernels.address_of(held)
    with torch.no_grad():
        held.copy_(packed(new) if in_blocks else new)
    assert kernels.address_of(held) == address
    kernels.few[Layout.of(held)] = FewRows(64, kernels.block_of(new, held) if in_blocks else 0)
    x = torch.randn(4, 64).bfloat16()
    torch.testing.assert_close(kernels.linear(x, held), torch.nn.functional.linear(x, new))


def test_more_rows_and_other_arguments_use_torch(kernels: LinearKernels) -> None:
    weight = torch.randn(96, 64).bfloat16()
    kernels.few[Layout.of(weight)] = FewRows(4)
    for x in (torch.randn(2, 2, 64), torch.randn(5, 64), torch.randn(0, 64), torch.randn(64, 3).t()):
        x = x.bfloat16()
        for out in (None, torch.empty(*x.shape[:-1], 96).bfloat16()):
            found = kernels.linear(x, weight, out=out)
            torch.testing.assert_close(found, torch.nn.functional.linear(x, weight))
            assert out is None or found is out
    with pytest.raises(RuntimeError):
        kernels.linear(torch.randn(2, 65).bfloat16(), weight)
    with pytest.raises(RuntimeError):
        kernels.linear(torch.randn(2, 64), weight)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"instructions": "avx9"}, "instructions"),
        ({"instructions": "avx2", "native": False}, "only the C\\+\\+ kernels have instruction sets"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        hal.open({"backend": "cpu", "options": options})


def test_the_environment_limits_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    if "amx_tile" in processor_flags():
        pytest.skip("this processor has every instruction set that the option names")
    monkeypatch.setenv("HAL_CPU_INSTRUCTIONS", "amx")
    with pytest.raises(DriverUnavailable, match=r"instructions is amx, but this processor, .*, has no amx_tile"):
        hal.open({"backend": "cpu"})


def test_a_kernel_with_tiles_or_beside_widened_weights_may_serve_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it is faster at 512 rows, too; else it is compared up to 64."""

    def measured(many: bool, slow: range, widened: bool = False) -> packing.Measured:
        kernel = LinearKernels(build.load())
        kernel.many = many

        def run(weights: Any, product: Any, x: Tensor) -> float:
            by_kernel = product is not packing.linear
            return 3.0 if not by_kernel else 9.0 if len(x) in slow else 1.0

        monkeypatch.setattr(packing, "_run", run)
        monkeypatch.setattr(packing, "product_dtype", lambda dtype: torch.float32 if widened else dtype)
        monkeypatch.setattr(packing, "packs", lambda dtype: True)
        monkeypatch.setattr(packing, "packed", Tensor.clone)  # timed alone, by run
        monkeypatch.setattr(kernel, "block_of", lambda plain, held: 32)
        return packing.measure(torch.zeros(96, 512, dtype=torch.bfloat16), (1, 1024), kernel)

    assert measured(many=True, slow=range(0)).few_packed == sys.maxsize
    assert measured(many=True, slow=range(512, 1025)).few_packed == 64
    assert measured(many=False, slow=range(0)).few_packed == 64
    assert measured(many=True, slow=range(0)).few_plain == 64
    assert measured(many=False, slow=range(0), widened=True).few_plain == sys.maxsize
    assert measured(many=False, slow=range(512, 1025), widened=True).few_plain == 64
    assert measured(many=False, slow=range(2)).few_packed == 64  # what one row loses, more rows gain
