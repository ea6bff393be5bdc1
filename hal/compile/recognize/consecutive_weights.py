"""Weights that lie one after another in one storage, so that their concatenation is a view and never stale.

:func:`move_together` gives weights that form. They stay the same parameters, with the same values, as views of a new
storage. What aliased the former memory would no longer alias them, so only weights are moved whose memory nothing else
can write: :func:`why_not_moved` finds what else refers to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import shared_cache


def concatenated(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the concatenation of weights along dimension 0 as a view, or None if they do not lie one after another."""
    first = weights[0]
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for each in weights:
        same = each.untyped_storage()._cdata == storage and each.dtype is first.dtype
        if not same or each.storage_offset() != end or not each.is_contiguous():
            return None
        end += each.numel()
    shape = sum(each.shape[0] for each in weights), *first.shape[1:]
    with torch.inference_mode(False), torch.no_grad():
        return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def move_together(weights: Sequence[Tensor]) -> None:
    """Move weights, for which :func:`why_not_moved` returns None, into a new storage, one after another."""
    with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
        merged = torch.cat([each.detach() for each in weights])
        start = 0
        for each in weights:
            each.data = merged.narrow(0, start, each.shape[0])
            start += each.shape[0]


def why_not_moved(weights: Sequence[Tensor]) -> str | None:
    """Return why weights cannot be moved into one storage, or None if they can."""
    first = weights[0]
    if any(each is other for index, each in enumerate(weights) for other in weights[:index]):
        return "one weight occurs twice"
    if any(each.is_inference() != first.is_inference() or each.device != first.device for each in weights):
        return "some weights were made in inference mode, or are on another device"
    return next((reason for each in weights if (reason := _owned_elsewhere(each)) is not None), None)


def _owned_elsewhere(weight: Tensor) -> str | None:
    """Return what else may write a weight's memory, or None if only the weight refers to it."""
    if type(weight) is not nn.Parameter:
        return f"a weight is a {type(weight).__name__}, not a plain parameter"
    references = _references(weight)  # before this function refers to the storage
    storage = weight.untyped_storage()
    if not weight.is_contiguous() or storage.nbytes() != weight.nbytes:
        return "a weight is a part of another tensor, or not contiguous"
    exported = {each.cdata for each in shared_cache.values()}
    if (weight.is_cpu and storage.is_shared()) or storage._cdata in exported:
        return "other processes share a weight's memory"
    if not storage.resizable():
        return "a weight's memory is that of a file, of numpy or of another library"
    if references != _references(torch.empty(1, device=weight.device)):
        return "another tensor shares a weight's memory"
    return None


def _references(tensor: Tensor) -> tuple[Any, int]:
    """Return the references to a tensor's storage: of tensors, in C++, and of Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
