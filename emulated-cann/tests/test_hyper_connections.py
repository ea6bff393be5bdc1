"""Tests of the operators of hyper-connections, which are for Ascend 950: values by their documents, and refusals."""

from __future__ import annotations

import pytest
from support.children import on_soc

PROGRAM = """
import torch, torch_npu

def npu(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=draw).to("npu", dtype)

def refused(word, call, *given, **options):
    try:
        call(*given, **options)
        torch.npu.synchronize()
    except RuntimeError as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{word} was expected")

def pre(count=4, width=32, dtype=torch.bfloat16, alpha=3, **options):
    rows = count * count + 2 * count
    given = npu(5, count, width, dtype=dtype), npu(rows, count * width), npu(alpha), npu(rows)
    return (*given, *torch_npu.npu_mhc_pre(*given, **options))

draw = torch.Generator().manual_seed(3)
for count in (4, 6, 8):
    x, phi, alpha, bias, inner, post, mix, *further = pre(count, norm_eps=1e-3, hc_eps=1e-2, out_flag=1)
    flat = x.cpu().double().flatten(1)
    inverse = (flat.square().mean(1, keepdim=True) + 1e-3).rsqrt()
    product = flat @ phi.cpu().double().t()
    offsets = bias.cpu().split((count, count, count * count))
    parts = (product * inverse).split((count, count, count * count), 1)
    first, second, third = (part * factor + offset for part, factor, offset in zip(parts, alpha.cpu(), offsets))
    weights = first.sigmoid() + 1e-2
    expected = (weights.unsqueeze(-1) * x.cpu().double()).sum(1)
    torch.testing.assert_close(inner.cpu().double(), expected, rtol=1e-2, atol=1e-2)
    for found, wanted in ((post, 2 * second.sigmoid()), (mix.flatten(1), third), *zip(
        further, (inverse.squeeze(1), product, weights)
    )):
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
    mixed, *_ = torch_npu.npu_mhc_sinkhorn(mix, eps=1e-3, num_iters=3)
    rows = third.unflatten(1, (count, count)).softmax(-1) + 1e-3
    rows = rows / (rows.sum(1, keepdim=True) + 1e-3)
    for _ in range(2):
        rows = rows / (rows.sum(2, keepdim=True) + 1e-3)
        rows = rows / (rows.sum(1, keepdim=True) + 1e-3)
    torch.testing.assert_close(mixed.cpu().double(), rows, rtol=1e-4, atol=1e-4)
    output = npu(5, 32, dtype=torch.bfloat16)
    for matrix, streams in ((mixed, rows.mT @ x.cpu().double()), (None, x.cpu().double())):
        found = torch_npu.npu_mhc_post(x, matrix, output, post).cpu().double()
        wanted = streams + post.cpu().double().unsqueeze(-1) * output.cpu().double().unsqueeze(1)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-2)
refused("n must be 4, 6 or 8, but is 5", pre, 5)
refused("D must be a multiple of 16, up to 16384, but is 40", pre, width=40)
refused("x must be one of", pre, dtype=torch.float32)
refused("products in HF32 are not emulated", pre, inner_precise=1)
refused("4, 6 or 8", torch_npu.npu_mhc_sinkhorn, npu(5, 3, 3))
refused("num_iters must be from 1 to 100, but is 101", torch_npu.npu_mhc_sinkhorn, npu(5, 4, 4), num_iters=101)
refused("out_flag 1 are not emulated", torch_npu.npu_mhc_sinkhorn, npu(5, 4, 4), out_flag=1)
refused("h_post must have shape", torch_npu.npu_mhc_post, x, None, output, npu(5, 7))
refused("x's dtype", torch_npu.npu_mhc_post, x, None, output.half(), post)
print("well")
"""
ELSEWHERE = """
import torch, torch_npu

x, output = (torch.ones(shape, dtype=torch.half).npu() for shape in ((5, 4, 32), (5, 32)))
try:
    torch_npu.npu_mhc_post(x, None, output, torch.ones(5, 4).npu())
    torch.npu.synchronize()
except RuntimeError as error:
    print("MhcPost is for Ascend 950, not for Ascend910_9391" in str(error))
"""


@pytest.mark.parametrize(
    ("soc", "program", "printed"), [("Ascend950PR_9599", PROGRAM, "well\n"), ("Ascend910_9391", ELSEWHERE, "True\n")]
)
def test_on_a_product(soc: str, program: str, printed: str, clean: dict[str, str]) -> None:
    assert on_soc(soc, program, clean) == printed
