"""Tests of gradients on the emulated NPU, through PyTorch's autograd, against the CPU in float32."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import DTYPE, thorough
from torch import Tensor
from torch.nn import functional

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}
PLANES = (2, 4, 8, 8)
TARGET = torch.tensor([0, 3, 1, -100])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    if x.device.type == "npu":
        return torch_npu.npu_rms_norm(x, weight)[0]
    return functional.rms_norm(x, weight.shape, weight, eps=1e-6)


def swiglu(x: Tensor) -> Tensor:
    if x.device.type == "npu":
        return torch_npu.npu_swiglu(x)
    gate, linear = x.chunk(2, -1)
    return functional.silu(gate) * linear


def attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options)


HEADS, GROUPS = (2, 4, 16, 32), (2, 2, 16, 32)
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    **{
        name: (getattr(functional, name), [(4, 6)]) for name in ("silu", "relu", "leaky_relu", "elu", "softplus", "glu")
    },
    **{name: (getattr(functional, name), [(4, 6)]) for name in ("hardswish", "hardsigmoid", "logsigmoid")},
    "gelu": (lambda x: functional.gelu(x, approximate="tanh"), [(4, 6)]),
    **{name: (getattr(torch, name), [(4, 6)]) for name in ("sigmoid", "tanh", "sqrt", "var")},
    "softmax": (lambda x: x.softmax(-1), [(4, 6)]),
    "log_softmax": (lambda x: x.log_softmax(0), [(4, 6)]),
    "swiglu": (swiglu, [(4, 8)]),
    "rms_norm": (rms_norm, [(2, 3, 8), (8,)]),
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, w.shape, w, b), [(2, 3, 8), (8,), (8,)]),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), [PLANES, (4,), (4,)]),
    "batch_norm": (lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True), [PLANES, (4,), (4,)]),
    "conv2d": (functional.conv2d, [PLANES, (6, 4, 3, 3), (6,)]),
    "linear": (functional.linear, [(4, 6), (5, 6), (5,)]),
    "embedding": (lambda w: functional.embedding(torch.tensor([[1, 3, 1]], device=w.device), w), [(5, 4)]),
    "cross_entropy": (lambda x: functional.cross_entropy(x, TARGET.to(x.device)), [(4, 6)]),
    "nll_loss2d": (lambda x: functional.nll_loss(x, TARGET.view(1, 2, 2).to(x.device)), [(1, 6, 2, 2)]),
    **{name: (getattr(functional, name), [(4, 6), (4, 6)]) for name in ("mse_loss", "l1_loss", "smooth_l1_loss")},
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 3, 2, 1), [PLANES]),
    "adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, 3), [PLANES]),
    "max_pool2d": (lambda x: functional.max_pool2d(x, (3, 2), (2, 1), (1, 0), (1, 2)), [PLANES]),
    "attention": (attention(), [HEADS, HEADS, HEADS]),
    "causal attention": (attention(is_causal=True), [HEADS, HEADS, HEADS]),
    "attention with groups": (attention(is_causal=True, enable_gqa=True), [HEADS, GROUPS, GROUPS]),
}


@thorough(DTYPE, "float16")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradient(name: str, dtype: torch.dtype) -> None:
    function, shapes = CASES[name]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    inputs = [(torch.rand(shape, generator=generator) * 2 + 0.1).to(dtype) for shape in shapes]
    like = function(*(each.float() for each in inputs))
    above = torch.randn(like.shape, generator=generator).to(dtype)

    def gradients(device: str, dtype: torch.dtype) -> list[Tensor]:
        given = [each.detach().to(device, dtype).requires_grad_() for each in inputs]
        return [each.cpu().float() for each in torch.autograd.grad(function(*given), given, above.to(device, dtype))]

    torch.testing.assert_close(
        gradients("npu", dtype), gradients("cpu", torch.float32), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
