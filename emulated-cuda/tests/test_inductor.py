"""Tests for functions compiled by Inductor, on the emulated CUDA."""

from __future__ import annotations

import torch


def test_a_kernel_with_functions_and_a_sum() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.softmax(-1) * y + torch.rsqrt(x.abs() + 1)).sum(-1)

    x, y = (torch.randn(5, 100, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    found = torch.compile(function)(x.cuda(), y.cuda())
    torch.testing.assert_close(found.cpu(), function(x, y), rtol=1e-5, atol=1e-5)
