"""Comparison of ranks that split a model with a single device: each rank runs both, on the same tokens.

The ranks' kernels cannot get the single device's arguments, because they compute parts. So results of whole runs are
compared, and the limit is the difference between two runs of the single device that differ only by rounding. What a
rank computes is compared with its slice of the single device's result, or, after a collective, with the whole result. A
partial sum is not compared: its collective follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import load_model
from hal.compare.compare_backends import common_block_size, common_dtype, configure
from hal.compare.comparison_results import Call, CompareError, RankComparison, RankDifference
from hal.compare.drifts import LOGITS, Drifts
from hal.compare.texts import Prompts, Texts, new_runner
from hal.compare.watch import ModelWatch, Seen
from hal.config import CompilationConfig
from hal.device.group import Group
from hal.drivers.backend import Backend
from hal.nn import CausalLM
from hal.nn.linear import IN, OUT
from hal.nn.weights.weight import EQUALLY, Share
from hal.ops import Operation
from hal.ops.rounding import DRIFT_RATIO, Disturbance, drift
from hal.parallel.launch import agreed
from hal.progress import Say, going_on, silent, since_start


@attrs.frozen(eq=False)
class Record:
    """A call and its floating-point results, in float32 on the CPU."""

    call: Call
    collective: bool
    results: list[Tensor]


def compare_ranks(
    checkpoint: Checkpoint, alone: Backend, rank: Backend, prompts: Prompts, *, say: Say = silent
) -> RankComparison:
    """Run the prompts eagerly on a single device and on this rank, and compare. Every rank calls it.

    Args:
        checkpoint: what both load: ``alone`` the whole model, ``rank`` this rank's part.
        alone: opened without other ranks.
        rank: opened with the other ranks of this one.
        prompts: run together: one prefill, then decode steps.
        say: called with progress messages, also from another thread.

    Raises:
        ConfigError: the ranks cannot split the model.
        CompareError: the split model calls other operations than the whole one.
        NumericsError: the single device's logits contain NaN.
    """
    group = rank.mesh.tensor
    dtype, block_size = common_dtype(checkpoint, alone, rank), common_block_size(alone, rank)
    for backend in (alone, rank):
        configure(backend, prompts, block_size, CompilationConfig(), dtype)
    say = since_start(say)
    with going_on(say, "loading the whole model") as done:
        whole = load_model(checkpoint, alone, progress=done)
    with going_on(say, "loading the ranks' parts") as done:
        part = load_model(checkpoint, rank, progress=done)
    runners = new_runner(whole, alone), new_runner(whole, alone), new_runner(part, rank)
    watches = ModelWatch(whole), ModelWatch(whole), ModelWatch(part)
    pairing = _Pairing(part, group)
    texts, drifts = Texts(prompts, block_size, whole.max_length), Drifts()
    with going_on(say, f"comparing {group.size} ranks with a single device") as done:
        while running := texts.running:
            records: list[list[Record]] = [[], [], []]
            logits = []
            for index, (watch, runner) in enumerate(zip(watches, runners, strict=True)):
                moving = Disturbance(runner.spec.dtype) if index == 1 else None
                with watch.step(texts.step, _recording(records[index], moving)):
                    logits.append(texts.run(runner))
            pairing.compare(*records)
            expected, disturbed, found = ({LOGITS: each} for each in logits)
            tokens = drifts.step(expected, found, (expected, disturbed), running)
            texts.take(agreed(tokens, rank.mesh))  # Devices of one kind need not give the same bits.
            done(texts.step, prompts.max_new_tokens)
    return RankComparison(
        backend=rank.name,
        rank=group.rank,
        ranks=group.size,
        steps=texts.step,
        tokens=texts.chosen,
        compared=pairing.compared,
        partial=pairing.partial,
        first=pairing.first(),
        choices=drifts.choices(),
    )


def _recording(into: list[Record], disturbance: Disturbance | None) -> Seen:
    """Return what runs each kernel and keeps its results, moved by about one rounding if there is a disturbance."""

    def seen(call: Call, operation: Operation, kernel: Any, args: tuple[Any, ...]) -> Any:
        returned = kernel(*args)
        if disturbance is not None:
            returned = tree_map_only(Tensor, disturbance.moved, returned)
        floats = [each for each in tree_leaves(returned) if isinstance(each, Tensor) and each.is_floating_point()]
        kept = [each.detach().float().cpu().clone() for each in floats]
        into.append(Record(call, operation.collective, kept))
        return returned

    return seen


class _Pairing:
    """Pairs the calls of the split model with those of the whole one, and compares them.

    Attributes:
        compared: number of results compared.
        partial: number of results not compared, because they are a part of a sum.
    """

    def __init__(self, part: CausalLM, group: Group) -> None:
        self._modules: dict[str, nn.Module] = dict(part.named_modules())
        self._group = group
        self.compared = self.partial = 0
        self._differences: list[tuple[Call, tuple[str, str], float]] = []
        self._rounding: dict[tuple[str, str], float] = {}

    def compare(self, whole: Sequence[Record], disturbed: Sequence[Record], part: Sequence[Record]) -> None:
        """Compare the calls of a step."""
        calls = list(_with_collectives(part))
        for place, (one, (mine, joined)) in enumerate(zip(whole, calls, strict=False)):
            if (one.call.operation, one.call.path) != (mine.call.operation, mine.call.path):
                raise self._other_calls(mine.call, one.call)
            found = mine if joined is None else joined
            for index, (value, expected) in enumerate(zip(found.results, one.results, strict=False)):
                self._compare(one.call, found, value, expected, disturbed[place].results[index])
        if len(whole) != len(calls):
            raise self._other_calls(calls[-1][0].call, whole[-1].call)

    def _compare(self, call: Call, found: Record, value: Tensor, expected: Tensor, moved: Tensor) -> None:
        module = self._modules.get(call.path)
        if not found.collective and getattr(module, "shard", None) == IN and value.shape == expected.shape:
            self.partial += 1
            return
        if found.collective:
            value = value[..., : expected.shape[-1]]  # without padding
            slices = expected, moved
        else:
            cut = _rank_slice(module, expected, value, self._group)
            if cut is None:
                self.partial += 1
                return
            slices = cut(expected), cut(moved)
        self.compared += 1
        key = call.path, call.operation
        self._rounding[key] = max(self._rounding.get(key, 0.0), drift(slices[1], slices[0]))
        self._differences.append((found.call, key, drift(value, slices[0])))

    def first(self) -> RankDifference | None:
        """Return the first call whose result differs by more than rounding explains."""
        for call, key, size in self._differences:
            limit = DRIFT_RATIO * self._rounding[key]
            if not size <= limit:  # also if it is NaN
                return RankDifference(call, size, limit)
        return None

    def _other_calls(self, mine: Call, one: Call) -> CompareError:
        return CompareError(
            f"in step {mine.step}, the rank calls {mine.operation} in {mine.path}, where the single device calls "
            f"{one.operation} in {one.path}",
            "compare a model whose layers call the same operations if they are split",
        )


def _with_collectives(part: Sequence[Record]) -> Iterator[tuple[Record, Record | None]]:
    """Yield each call that is no collective, with the collective that joins its results, or None."""
    waiting: Record | None = None
    for record in part:
        if not record.collective:
            if waiting is not None:
                yield waiting, None
            waiting = record
        elif waiting is not None:
            yield waiting, record
            waiting = None
    if waiting is not None:
        yield waiting, None


def _rank_slice(module: nn.Module | None, expected: Tensor, value: Tensor, group: Group) -> Any:
    """Return the function that takes this rank's part of a result of the single device; None if there is no such part.

    A projection's parts are cut one by one. Of other results, a rank has consecutive elements, such as heads.
    """
    if value.shape == expected.shape:
        return lambda tensor: tensor
    differing = [dim for dim, size in enumerate(value.shape) if size != expected.shape[dim]]
    if value.dim() != expected.dim() or len(differing) != 1:
        return None
    (dim,) = differing
    parts, share = [expected.shape[dim]], Share(repeat=True)
    if getattr(module, "shard", None) == OUT:
        parts = list(getattr(module, "parts", {}).values()) or parts
        share = getattr(module, "share", EQUALLY)
    kept, start = [], 0
    for size in parts:
        first, last = share.interval(size, group.rank, group.size)
        kept.append(torch.arange(start + first, start + last))
        start += size
    places = torch.cat(kept)
    if len(places) != value.shape[dim] or start != expected.shape[dim]:
        return None
    return lambda tensor: tensor.index_select(dim, places)
