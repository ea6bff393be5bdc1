"""Tests for FRACTAL_NZ: the memory layout, and operations on it."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("internal_formats")

ND, NZ = 2, 29


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return small integers, whose sums of products are exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def stored(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the raw storage through CANN, because torch_npu's copy to the CPU would convert the format."""
    torch.npu.synchronize()
    result = torch.empty(shape, dtype=tensor.dtype)
    device_to_host = ctypes.c_int(2)
    address, size = ctypes.c_void_p(tensor.untyped_storage().data_ptr()), ctypes.c_size_t(result.nbytes)
    code = ctypes.CDLL("libascendcl.so").aclrtMemcpy(
        ctypes.c_void_p(result.data_ptr()), size, address, size, device_to_host
    )
    assert code == 0
    return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (40, 72), (1, 1), (16, 33), (3, 24, 40)], ids=str)
def test_round_trip(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrix = numbers(shape, dtype)
    fractal = torch_npu.npu_format_cast(matrix.npu(), NZ)
    assert torch_npu.get_npu_format(fractal) == NZ
    assert torch.equal(torch_npu.npu_format_cast(fractal, ND).cpu(), matrix)


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float16, 16), (torch.int8, 32)], ids=str)
def test_tiles(dtype: torch.dtype, columns: int) -> None:
    """The layout is [N / C0, K / 16, 16, C0], padded with zeros, as in CANN's documentation of data formats."""
    matrix = numbers((40, 72), dtype)
    fractal = torch_npu.npu_format_cast(matrix.npu(), NZ)
    tiles = -(-72 // columns), -(-40 // 16), 16, columns
    padded = functional.pad(matrix, (0, tiles[0] * columns - 72, 0, tiles[1] * 16 - 40))
    expected = padded.reshape(tiles[1], 16, tiles[0], columns).permute(2, 0, 1, 3)
    assert torch.equal(stored(fractal, tiles), expected)


def test_what_torch_npu_would_lose_is_refused() -> None:
    """torch_npu's copy into FRACTAL_NZ casts the target to itself and loses the source."""
    matrix, other = numbers((32, 64), torch.float16), numbers((32, 64), torch.float16) + 1
    fractal = torch_npu.npu_format_cast(matrix.npu(), NZ)
    for source in (other, other.npu()):
        with pytest.raises(RuntimeError, match=r"161002[\s\S]*FRACTAL_NZ already[\s\S]*load in ND and cast afterwards"):
            fractal.copy_(source)
    layer = torch.nn.Linear(64, 32, bias=False).half().npu()
    layer.weight.data = torch_npu.npu_format_cast(layer.weight.data, NZ)
    with pytest.raises(RuntimeError, match="load in ND and cast afterwards"):
        layer.load_state_dict({"weight": other})
    assert torch.equal(torch_npu.npu_format_cast(fractal, ND).cpu(), matrix)
    fractal.copy_(torch_npu.npu_format_cast(other.npu(), NZ))  # the raw storage
    assert torch.equal(torch_npu.npu_format_cast(fractal, ND).cpu(), other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products(dtype: torch.dtype) -> None:
    weight, x = numbers((48, 80), dtype), numbers((5, 48), dtype)
    fractal = torch_npu.npu_format_cast(weight.npu(), NZ)
    expected = (x.double() @ weight.double()).to(dtype)
    assert torch.equal((x.npu() @ fractal).cpu(), expected)
    assert torch.equal(torch.mm(x.npu(), fractal).cpu(), expected)

    other = numbers((7, 80), dtype)
    bias = numbers((48,), dtype)
    expected = (other.double() @ weight.double().t()).to(dtype)
    assert torch.equal(functional.linear(other.npu(), fractal).cpu(), expected)
    expected = (other.double() @ weight.double().t() + bias.double()).to(dtype)
    assert torch.equal(functional.linear(other.npu(), fractal, bias.npu()).cpu(), expected)
