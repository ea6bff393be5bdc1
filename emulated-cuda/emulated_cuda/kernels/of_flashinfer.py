"""Replacements for FlashInfer's compiled kernels. FlashInfer's Python code (wrappers, plans, workspaces) is unchanged.

A plan takes the same path as on a GPU: through FlashInfer's pinned memory into its workspace on the device, from which
the kernels read it. So the emulator detects a plan that is staged before the previous one was copied, or that does not
fit the kernel's arguments.

Written for FlashInfer 0.7; the calls of its compiled modules are not a public interface.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .attention import attend, pages
from .stream import launch, on_cpu


def register() -> None:
    """Make the FlashInfer functions that build or load a compiled module return one of these classes."""
    from flashinfer import activation, decode, norm, prefill

    decode.get_batch_decode_module = _decode
    decode.get_batch_prefill_module = prefill.get_batch_prefill_module = _prefill
    norm.get_norm_module = lambda: SimpleNamespace(rmsnorm=_rms_norm, fused_add_rmsnorm=_add_rms_norm)
    norm._use_cuda_norm = lambda device: True
    activation.get_act_and_mul_module = lambda name: SimpleNamespace(silu_and_mul=_silu_and_mul)


def _stage(workspace: Tensor, pinned: Tensor, *of_host: Tensor) -> None:
    """Copy a plan to the device."""
    assert all(each.device.type == "cpu" for each in of_host), "FlashInfer plans need values on the host"
    assert pinned.is_pinned()
    plan = torch.cat([each.to(torch.int32) for each in of_host])
    size = plan.numel() * plan.element_size()
    pinned[:size].view(torch.int32).copy_(plan)
    workspace[:size].view(torch.int32).copy_(pinned[:size].view(torch.int32), non_blocking=True)


def _staged(workspace: Tensor, *expected: Tensor) -> list[Tensor]:
    """Return the parts of the plan that the kernel reads; raise if they do not fit its arguments."""
    sizes = [each.numel() for each in expected]
    parts = list(workspace[: 4 * sum(sizes)].view(torch.int32).split(sizes))
    for found, wanted in zip(parts, expected, strict=True):
        if not torch.equal(found, wanted.to(torch.int32)):
            raise RuntimeError(
                f"stale plan: it has {found.tolist()}, but the kernel's arguments have {wanted.tolist()}"
            )
    return parts


def _attention(
    name: str,
    workspace: Tensor,
    info: list[int],
    starts: Tensor | None,
    tensors: tuple[Tensor, ...],
    *,
    causal: bool,
    window: int,
    cap: float,
    scale: float,
) -> None:
    """Launch batched attention over pages on the current stream.

    Args:
        name: the kernel's name.
        workspace: the memory that holds the plan.
        info: the plan's result: the number of sequences.
        starts: start offsets of the queries of each sequence, and the end of the last; None for one query each.
        tensors: query, key cache, value cache, start offsets of each sequence's pages, pages, length of each last page,
            and the output.
        causal: see :func:`attend`.
        window: see :func:`attend`.
        cap: see :func:`attend`.
        scale: see :func:`attend`.
    """
    workspace = on_cpu(workspace)
    planned_starts = None if starts is None else on_cpu(starts)
    query, key, value, ends, blocks, last, output = map(on_cpu, tensors)

    def kernel() -> None:
        if planned_starts is None:
            begin, (end,) = torch.arange(info[0] + 1), _staged(workspace, ends)
        else:
            begin, end = _staged(workspace, planned_starts, ends)
        for row in range(info[0]):
            used = blocks[end[row] : end[row + 1]]
            length = (used.numel() - 1) * key.shape[1] + int(last[row]) if used.numel() else 0
            tokens = slice(int(begin[row]), int(begin[row + 1]))
            keys, values = pages(key, used, length), pages(value, used, length)
            options: Any = {"causal": causal, "window": window, "cap": cap}
            output[tokens] = attend(query[tokens], keys, values, scale, **options).to(output.dtype)

    launch(f"flashinfer {name}", kernel)


def _decode(*_: Any) -> SimpleNamespace:
    def plan(_float: Any, workspace: Tensor, pinned: Tensor, ends: Tensor, batch: int, *_: Any) -> list[int]:
        _stage(workspace, pinned, ends)
        return [batch]

    def run(
        _float: Any,
        workspace: Tensor,
        info: list[int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        blocks: Tensor,
        last: Tensor,
        output: Tensor,
        _sums: Any,
        _layout: Any,
        window: int,
        _launch: Any,
        _slopes: Any,
        cap: float,
        scale: float,
        *_: Any,
    ) -> None:
        tensors = (query, key, value, ends, blocks, last, output)
        _attention("decode", workspace, info, None, tensors, causal=False, window=window, cap=cap, scale=scale)

    return SimpleNamespace(plan=plan, run=run, workspace_size=None)


def _prefill(*_: Any) -> SimpleNamespace:
    def plan(
        _float: Any,
        workspace: Tensor,
        pinned: Tensor,
        starts: Tensor,
        ends: Tensor,
        _lengths: Any,
        _rows: Any,
        batch: int,
        *_: Any,
    ) -> list[int]:
        _stage(workspace, pinned, starts, ends)
        return [batch]

    def run(
        _float: Any,
        workspace: Tensor,
        info: list[int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        ends: Tensor,
        blocks: Tensor,
        last: Tensor,
        output: Tensor,
        _sums: Any,
        mask: int,
        _layout: Any,
        window: int,
        _launch: Any,
        _mask: Any,
        _bits: Any,
        _slopes: Any,
        _prefix: Any,
        _token: Any,
        _longest: Any,
        cap: float,
        scale: float,
        *_: Any,
    ) -> None:
        tensors = (query, key, value, ends, blocks, last, output)
        _attention("prefill", workspace, info, starts, tensors, causal=mask == 1, window=window, cap=cap, scale=scale)

    return SimpleNamespace(plan=plan, paged_run=run, ragged_run=None, workspace_size=None)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _rms_norm(output: Tensor, x: Tensor, weight: Tensor, eps: float, _launch: Any = None) -> None:
    output, x, weight = on_cpu(output), on_cpu(x), on_cpu(weight)
    launch("flashinfer rmsnorm", lambda: output.copy_(_normed(x.float(), weight, eps)))


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, _launch: Any = None) -> None:
    x, residual, weight = on_cpu(x), on_cpu(residual), on_cpu(weight)

    def kernel() -> None:
        total = x.float() + residual.float()
        residual.copy_(total)
        x.copy_(_normed(total, weight, eps))

    launch("flashinfer fused_add_rmsnorm", kernel)


def _silu_and_mul(output: Tensor, x: Tensor, _launch: Any = None) -> None:
    output, x = on_cpu(output), on_cpu(x)

    def kernel() -> None:
        gate, up = x.float().chunk(2, -1)
        output.copy_(torch.nn.functional.silu(gate) * up)

    launch("flashinfer silu_and_mul", kernel)
