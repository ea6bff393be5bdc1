"""Drivers with one bug each, and a correct twin. Except for the bug, each is the CPU driver."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from hal.backends.cpu import kernels as right
from hal.backends.cpu.driver import CpuBackend, CpuOptions
from hal.backends.cpu.tape import Tape
from torch import Tensor, fx

import hal
from hal import ops
from hal.device.graph import Graph
from hal.device.host_values import HostValues
from hal.errors import CaptureError
from hal.ops.kernels import torch_kernels


class Twin(CpuBackend):
    """The CPU driver with torch's kernels and replaceable parts."""

    def __init__(
        self,
        kernels: Mapping[str, Any] = MappingProxyType({}),
        limits: hal.vendor.Limits | None = None,
        rewrites: Sequence[Any] = (),
        tape: Callable[[], Graph] = Tape,
    ) -> None:
        super().__init__(CpuOptions(native=False, pack_weights=False))
        self.kernels = MappingProxyType({**self.kernels, **kernels})
        self.limits = limits or self.limits
        self.rewrites = tuple(rewrites)
        self.compilers = ("eager", "graph")
        self._tape = tape

    def graph(self) -> Graph:
        return self._tape()


# Kernels.


def wrong_epsilon(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch_kernels.rms_norm(x, weight, 1e-5)


def accumulates_in_half(x: Tensor, weight: Tensor, bias: Tensor | None = None, *others: Any) -> Tensor:
    if x.dtype != torch.float16 or others[0] is not None:
        return torch_kernels.linear(x, weight, bias, *others)
    total = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for column in range(x.shape[-1]):
        total = total + x[..., column, None] * weight[:, column]
    return total if bias is None else total + bias


def sums_squares_in_half(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype != torch.float16:
        return torch_kernels.rms_norm(x, weight, eps)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotates_in_place(query: Tensor, key: Tensor, *angles: Any) -> tuple[Tensor, Tensor]:
    rotated, other = right.rotary_embedding(query, key, *angles)
    return query.copy_(rotated), other


class KeepsScratch:
    """Keeps scratch memory for each shape, and does not update the last row."""

    def __init__(self) -> None:
        self.scratch: dict[torch.Size, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        kept = self.scratch.setdefault(x.shape, torch.zeros_like(x, dtype=torch.float32))
        if x.shape[0] > 1:
            kept[:-1] = x[:-1].float()
        else:
            kept.copy_(x.float())
        return right.silu_and_mul(kept.clone()).to(x.dtype)


class KeepsResult:
    """Returns the same memory at every call."""

    def __init__(self) -> None:
        self.results: dict[Any, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        made = right.silu_and_mul(x)
        return self.results.setdefault((made.shape, made.dtype), torch.empty_like(made)).copy_(made)


def leaves_a_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype)
    result[:-1] = torch_kernels.rms_norm(x, weight, eps)[:-1]
    return result


def fills_padding(*arguments: Any) -> Tensor:
    """A sequence of length 0 attends to another sequence's token."""
    given = list(arguments)
    given[5], given[7] = given[5].clamp(min=1), given[7].clamp(min=1)
    return right.paged_attention(*given)


def stops_before_the_edge(*arguments: Any) -> Tensor:
    """Ignores the last token of a full block."""
    given, size = list(arguments), arguments[1].shape[1]
    for place in (5, 7):
        lens = given[place]
        given[place] = torch.where((lens % size == 0) & (lens > 1), lens - 1, lens)
    return right.paged_attention(*given)


def takes_no_48(*arguments: Any) -> Tensor:
    if arguments[1].shape[1] == 48:
        raise ValueError("blocks of 48 tokens")
    return right.paged_attention(*arguments)


class KeepsAll:
    """Keeps every result alive."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.kept.append(right.silu_and_mul(x))
        return self.kept[-1].clone()


def swallows(x: Tensor) -> Tensor:
    try:
        return right.silu_and_mul(x)
    except Exception:
        return torch.zeros(1)


def scratches_its_input(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = torch_kernels.rms_norm(x, weight, eps)
    x.mul_(0.5)
    return result


def writes_a_slot_more(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    torch_kernels.store_kv_cache(key, value, key_cache, value_cache, slot_mapping)
    slots = set(range(key_cache.shape[0] * key_cache.shape[1])) - set(slot_mapping.tolist())
    key_cache.view(-1, *key_cache.shape[2:])[min(slots)] = 0


def pads_into_block_1(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes to the first block of a sequence instead of the dummy block."""
    size = key_cache.shape[1]
    slots = torch.where(slot_mapping < size, slot_mapping + size, slot_mapping)
    torch_kernels.store_kv_cache(key, value, key_cache, value_cache, slots)


def hides_nan(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch_kernels.rms_norm(x, weight, eps).nan_to_num()


# Graphs.


class StaleLengths(Tape):
    """A replay reads the captured lengths."""

    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        super()._launch({name: tensor.clone() for name, tensor in self.host_values.items()})


class ForgetsHostValues(Tape):
    """Captures correctly, but does not report the host values that its launches read."""

    def _end(self, made: Any) -> tuple[Any, Any]:
        captured = super()._end(made)
        self.host_values = HostValues()
        return captured


class LaunchesFirst(Tape):
    """Launches before it checks the host values."""

    def replay(self, **host_values: Any) -> None:
        with torch.inference_mode():
            for call in self._calls:
                call()
        super().replay(**host_values)


class ForgetsErrors(Tape):
    """Ends in an empty capture if the function raises."""

    def capture(self, fn: Callable[[], Any], **options: Any) -> Any:
        try:
            return super().capture(fn, **options)
        except Exception:
            return None


class WrapsErrors(Tape):
    """Raises CaptureError for any exception of the function."""

    def _explain(self, error: Exception) -> hal.HalError:
        return CaptureError(str(error), "look at it")


class NeverDies(Tape):
    """Keeps every graph alive."""

    alive: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        super().__init__()
        NeverDies.alive.append(self)


class Few(Tape):
    """A graph of which at most eight can be alive at once."""

    alive: ClassVar[WeakSet[Graph]] = WeakSet()

    def capture(self, fn: Callable[[], Any], **options: Any) -> Any:
        if len(Few.alive) >= 8:
            raise CaptureError("the ninth graph", "drop another")
        outputs = super().capture(fn, **options)
        Few.alive.add(self)
        return outputs

    def reset(self) -> None:
        super().reset()
        Few.alive.discard(self)


class KeepsOutputs(Tape):
    """Keeps a capture's outputs alive."""

    def _end(self, made: Any) -> tuple[Any, Any]:
        captured = super()._end(made)
        self.kept = captured[0]
        return captured


# Caches.


class KeepsCaches(Twin):
    """Keeps every cache alive."""

    def allocate(self, spec: hal.step.StateSpec) -> hal.step.StateMemory:
        self.caches = [*getattr(self, "caches", ()), super().allocate(spec)]
        return self.caches[-1]


# Rewrites.


def blind(module: fx.GraphModule) -> int:
    """Fuse the sum and the norm without checking other uses of the sum."""
    count = 0
    for norm in list(module.graph.nodes):
        if norm.target is not torch.ops.hal.rms_norm.default:
            continue
        total = norm.args[0]
        if total.op != "call_function" or total.target is not torch.ops.aten.add.Tensor:
            continue
        with module.graph.inserting_before(norm):
            fused = module.graph.call_function(ops.operation("add_rms_norm").overload, (*total.args, *norm.args[1:]))
            first = module.graph.call_function(operator.getitem, (fused, 0))
        first.meta["val"] = norm.meta["val"]
        norm.replace_all_uses_with(first)
        module.graph.erase_node(norm)
        total.replace_all_uses_with(total.args[0])
        count += 1
    return count
