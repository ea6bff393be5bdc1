"""Runs a Triton kernel with guarded memory, and compares it with its operation's reference.

In Triton's interpreter every tensor that the kernel is given, and every one that it allocates, starts or ends at
protected memory: an access past that end kills the process. On a GPU, compute-sanitizer detects such accesses.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hal.backends.triton import KERNELS
from hal.backends.triton.interpreter import INTERPRETED
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hal import ops
from hal.ops import Sample
from hal.ops.tolerance import assert_agree
from helpers.thorough import DRAW

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE = torch.device("cpu" if INTERPRETED.value else "cuda")
EXPERTS = frozenset(
    {
        "expert_mlp",
        "expert_permute",
        "expert_unpermute",
        "grouped_linear",
        "quant_expert_mlp_dynamic",
        "quant_expert_mlp_static",
        "topk_route",
    }
)
"""The operations of mixtures of experts, whose tests have files of their own."""
RECURRENT = frozenset({"causal_conv1d", "delta_rule_gates", "gated_delta_rule", "gated_rms_norm", "l2_norm"})
"""The operations of recurrent layers, likewise."""
further = pytest.mark.thorough(DRAW)
"""Marks what is left to `make test-all`: the interpreter is slow."""
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def by_turns(names: str | tuple[str, ...], values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by values and by ``dtype``. `make test-all` runs each value in one dtype, which they have in turn."""
    cases = [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), dtype, marks=[further] * (at != number % 3))
        for number, value in enumerate(values)
        for at, dtype in enumerate(DTYPES)
    ]
    return pytest.mark.parametrize((*((names,) if isinstance(names, str) else names), "dtype"), cases, ids=str)


SIDES = ("before", "after")
"""The side of a tensor on which the protected memory is."""

_libc = ctypes.CDLL(None, use_errno=True)


def check(
    name: str,
    dtype: torch.dtype,
    sample: Sample,
    kernel: Callable[..., Any] | None = None,
    sides: Sequence[str] = SIDES,
) -> Any:
    """Return the kernel's results, after comparing them with the reference's and those of several runs bit for bit.

    Host values are withheld, because a graph is replayed with other host values than the captured ones.
    """
    operation = ops.operation(name)
    places = {argument: place for place, argument in enumerate(operation.signature.parameters)}
    expected = clones(sample)
    wanted = operation.reference(*expected)
    runs = []
    for side in sides:
        given = [fenced(value, side) if isinstance(value, Tensor) else value for value in sample]
        for argument in operation.host:
            given[places[argument]] = torch.full_like(sample[places[argument]], -(2**31))
        before = clones(given)
        with fencing(side):
            found = (kernel or KERNELS[name])(*given)
        for argument, now, was in zip(places, given, before, strict=False):  # Arguments with defaults may be left out.
            if isinstance(now, Tensor) and argument not in operation.mutates:
                assert same_bits(now, was), f"{name} wrote into {argument}"
        mutated = [given[places[argument]] for argument in operation.mutates]
        assert_agree(operation, dtype, (found, mutated), (wanted, [expected[places[a]] for a in operation.mutates]))
        runs.append([value.clone() for value in tree_leaves((found, mutated)) if isinstance(value, Tensor)])
    assert all(same_bits(one, other) for one, other in zip(runs[0], runs[-1], strict=True)), f"{name}: two runs differ"
    return found


def moved(values: Iterable[Any]) -> list[Any]:
    """Return the values, tensors on the device."""
    return [value.to(DEVICE) if isinstance(value, Tensor) else value for value in values]


def clones(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of one dtype are equal, NaN included."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.itemsize]
    return torch.equal(first.view(integers), second.view(integers))


def fenced(tensor: Tensor, side: str) -> Tensor:
    """Return a copy with the same strides on the device.

    On the CPU it is next to protected memory, and gaps hold NaN.
    """
    if tensor.numel() == 0:
        return tensor.to(DEVICE)
    single = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if DEVICE.type == "cpu":
        memory = between_fences(count, tensor.dtype, side)
    else:
        memory = torch.empty(count, dtype=tensor.dtype, device=DEVICE)
    memory.as_strided(single.shape, single.stride()).copy_(single)
    return memory.as_strided(tensor.shape, tensor.stride())


def between_fences(count: int, dtype: torch.dtype, side: str) -> Tensor:
    """Return ``count`` elements on the CPU next to protected memory, filled with NaN or a distinctive number."""
    page, size = mmap.PAGESIZE, count * dtype.itemsize
    body = -(-size // page) * page
    memory = mmap.mmap(-1, body + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (start, start + page + body):
        if _libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page if side == "before" else page + body - size
    tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return tensor.fill_(float("nan") if dtype.is_floating_point else 77)


def fencing(side: str) -> AbstractContextManager[Any]:
    """Guard the kernel's allocations in the block, and forbid it to read device values on the host."""
    return _Fencing(side) if DEVICE.type == "cpu" else nullcontext()


class _Fencing(TorchDispatchMode):
    def __init__(self, side: str) -> None:
        super().__init__()
        self._side = side

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a kernel's launch must not wait for a value"
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and result.numel():
            return between_fences(result.numel(), result.dtype, self._side).view(result.shape)
        return result
