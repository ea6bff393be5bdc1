"""The checks of collectives and split layers, which every rank of a group runs in the same order.

``python -m hal.testing.rank_checks FOLDER`` is the program of a rank. It reads an order from stdin: the configuration
of :func:`hal.open`, and what to do. It writes its results to FOLDER as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hal
from hal import ops
from hal.checkpoint.weight_bindings import Binding, bindings_of, set_tensor
from hal.device.group import SOLO, Group
from hal.drivers.backend import Backend
from hal.nn import Embedding, Linear, WeightUse
from hal.nn.linear import IN, OUT
from hal.nn.mlp import MLP, GatedMLP
from hal.nn.norm import RMSNorm
from hal.nn.router import Router, SparseMLP
from hal.nn.weights.weight import EQUALLY
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.operation import Operation
from hal.ops.tolerance import assert_agree
from hal.testing.case import NotApplicable, require
from hal.testing.target import dtype_name

Check = Callable[[], str]
"""Returns a digest of this rank's results, or an empty string if the ranks' results need not be equal."""

TOKENS, HIDDEN, WIDTH, VOCABULARY = 6, 64, 128, 101
LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "linear-out": lambda: Linear(HIDDEN, WIDTH, bias=True, shard=OUT, gather=True),
    "linear-in": lambda: Linear(HIDDEN, WIDTH, bias=True, shard=IN),
    "gated-mlp": lambda: GatedMLP(HIDDEN, WIDTH),
    "mlp": lambda: MLP(HIDDEN, WIDTH, activation="gelu", bias=True),
    "norm-of-parts": lambda: nn.Sequential(
        Linear(HIDDEN, WIDTH, shard=OUT), RMSNorm(WIDTH, 1e-6, share=EQUALLY), Linear(WIDTH, HIDDEN, shard=IN)
    ),
    "sparse-mlp": lambda: SparseMLP(Router(HIDDEN, 4, 2, renormalize=True), WIDTH),
    "embedding": lambda: Embedding(VOCABULARY, HIDDEN),
}
"""Layers that ranks split, by name."""
ROUNDINGS = 4.0
"""Factor of the tolerance of split layers, whose parts are rounded before they are joined."""
EXCHANGE = ("expert_dispatch", "expert_combine")
"""Operations that are compared together: what the first passes to the second depends on the kernel."""
PAUSE = 0.1
"""Seconds between two looks at a file."""
CHECKS, SKIPPING = "checks", "skipping"
"""What a rank can be told to do: all checks; or, all ranks but the last, to wait for a collective that one skips."""


def checks(backend: Backend) -> Iterator[tuple[str, Check]]:
    """Yield names and checks. The group is the one that the backend is in when a check runs."""
    for operation in ops.catalogue().values():
        if operation.collective and operation.name not in EXCHANGE:
            for dtype in backend.limits.dtypes:
                yield f"operations/{operation.name}/{dtype_name(dtype)}", partial(_operation, backend, operation, dtype)
    for dtype in backend.limits.dtypes:
        yield f"operations/{'+'.join(EXCHANGE)}/{dtype_name(dtype)}", partial(_exchange, backend, dtype)
    for name in LAYERS:
        for dtype in backend.limits.dtypes:
            yield f"layers/{name}/{dtype_name(dtype)}", partial(_layer, backend, name, dtype)
    yield "graphs/all_reduce", partial(_graph, backend)


def _operation(backend: Backend, operation: Operation, dtype: torch.dtype) -> str:
    """Compare an operation on each sample with what it declares over the ranks' arguments."""
    group = backend.mesh.tensor
    assert operation.over_shards is not None
    found = []
    done = list[tuple[Any, Any, Sample, Sample]]()
    seeds = range(group.size)
    for drawn in zip(*(operation.samples(Draw(dtype, seed=seed)) for seed in seeds), strict=True):
        shards = [_in_group(sample, group) for sample in drawn]
        expected = operation.over_shards(shards)
        if len(expected) != group.size:
            continue  # rows that the ranks cannot share
        mine = shards[group.rank]
        given = tuple(each.to(backend.device.torch) if isinstance(each, Tensor) else each for each in mine)
        done.append((operation.function(*given), expected[group.rank], given, mine))
    for result, wanted, given, before in done:  # Only now, so that a rank that fails leaves no other waiting.
        assert_agree(operation, dtype, result, wanted, times=group.size)
        for old, new in zip(before, given, strict=True):
            require(not isinstance(old, Tensor) or torch.equal(old, new.cpu()), "it changed an argument")
        found.append(result)
    require(bool(found), f"the ranks can share no sample of {operation.name}")
    return _digest(found) if operation.name == "all_reduce" else ""


def _exchange(backend: Backend, dtype: torch.dtype) -> str:
    """Dispatch rows to experts, double them, and combine them."""
    group, done = backend.mesh.tensor, list[tuple[Tensor, ...]]()
    dispatch, combine = map(ops.operation, EXCHANGE)
    assert dispatch.over_shards is not None
    seeds = range(group.size)
    for drawn in zip(*(dispatch.samples(Draw(dtype, seed=seed)) for seed in seeds), strict=True):
        shards = [_in_group(sample, group) for sample in drawn]
        x, experts, num_experts, _ = shards[group.rank]
        weights = Draw(dtype, seed=group.size + group.rank).normal(*experts.shape).abs()
        device = backend.device.torch
        chosen = experts.to(device)
        rows, counts, sent, received = ops.expert_dispatch(x.to(device), chosen, num_experts, group.name)
        result = ops.expert_combine(rows * 2, chosen, weights.to(device), sent, received, num_experts, group.name)
        expected, numbers, *_ = dispatch.over_shards(shards)[group.rank]
        doubled = (x.float() * 2 * weights.float().sum(-1, keepdim=True)).to(dtype)
        done.append((rows, expected, counts, numbers, result, doubled))
    for rows, expected, counts, numbers, result, doubled in done:
        require(torch.equal(counts.cpu(), numbers), f"{counts.tolist()} rows of this rank's experts, not {numbers}")
        used = int(numbers.sum())  # The rows beyond are unspecified.
        require(torch.equal(rows[:used].cpu(), expected[:used]), "the dispatched rows are not those of the tokens")
        assert_agree(combine, dtype, result, doubled)
    return ""


def _in_group(sample: Sample, group: Group) -> Sample:
    return tuple(group.name if isinstance(each, str) and each == SOLO.name else each for each in sample)


def _layer(backend: Backend, name: str, dtype: torch.dtype) -> str:
    """Compare a split layer with the whole one, both on this rank."""
    group, draw = backend.mesh.tensor, Draw(dtype)
    whole, part = LAYERS[name](), LAYERS[name]()
    bindings = bindings_of(part)
    sources = {
        piece.source: draw.normal(*piece.source_shape, scale=piece.source_shape[-1] ** -0.5)
        for binding in bindings_of(whole)
        for piece in binding.pieces()
    }
    _fill(backend, bindings_of(whole), sources, dtype, SOLO)
    for each in part.modules():
        if callable(split := getattr(each, "split", None)):
            split(group)
    _fill(backend, bindings, sources, dtype, group)
    x = draw.integers(0, VOCABULARY, TOKENS) if name == "embedding" else draw.normal(TOKENS, HIDDEN)
    mine = x.chunk(group.size, -1)[group.rank] if name == "linear-in" else x
    with torch.inference_mode():
        expected, found = whole(x.to(backend.device.torch)), part(mine.contiguous().to(backend.device.torch))
    assert_agree(None, dtype, found, expected.cpu(), f"the layer {name}", times=ROUNDINGS)
    return _digest([found])


def _fill(
    backend: Backend, bindings: list[Binding], sources: Mapping[str, Tensor], dtype: torch.dtype, group: Group
) -> None:
    """Fill a layer with a rank's part of the sources, as the loader does."""
    for binding in bindings:
        ranks = group if hasattr(binding.module, "split") else SOLO
        tensor = torch.zeros(binding.local_shape(ranks.size), dtype=dtype)
        for piece in binding.pieces(ranks.rank, ranks.size):
            taken = tuple(slice(*each) for each in piece.taken)
            if not (binding.weight.first_rank_only and ranks.rank > 0):
                piece.put(tensor, 0, sources[piece.source][taken])
        placed, consumer = tensor.to(backend.device.torch), binding.weight.consumer
        if consumer is not None:
            name = consumer.argument
            placed = backend.prepare_weights({name: placed}, WeightUse(consumer.operation, dtype))[name]
        set_tensor(binding.module, binding.name, placed)


def _graph(backend: Backend) -> str:
    """Replay a captured all_reduce with new inputs."""
    if not backend.graphs:
        raise NotApplicable("the backend has no graphs")
    group = backend.mesh.tensor
    x = torch.ones(4, HIDDEN, dtype=backend.limits.dtypes[0], device=backend.device.torch)
    graph = backend.graph()
    try:
        summed, replays = graph.capture(lambda: ops.all_reduce(x, group.name)), []
        for factor in (1, 3, 2):
            x.fill_(factor * (group.rank + 1))
            graph.replay()
            backend.device.synchronize()
            replays.append((factor * group.size * (group.size + 1) / 2, summed.cpu().clone()))
        for expected, found in replays:
            require(bool((found == expected).all()), f"a replay gave {found.flatten()[0]}, not {expected}")
        return _digest([found for _, found in replays])
    finally:
        graph.close()


def _digest(results: list[Tensor]) -> str:
    parts = [each.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for each in results if each.numel()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main(folder: str) -> None:
    """Run the order."""
    order = json.load(sys.stdin)
    with hal.open(order["config"]) as backend:
        result = _checks(backend) if order["what"] == CHECKS else _skipping(backend, Path(folder, "0.json"))
        Path(folder, f"{backend.mesh.tensor.rank}.json").write_text(json.dumps(result), encoding="utf-8")
        if order["what"] == SKIPPING:
            os._exit(0)  # Closing a group whose collective failed may wait for the other ranks.


def _checks(backend: Any) -> dict[str, dict[str, str]]:
    """Return the outcome of each check: ``digest``, ``problem`` or ``skipped``."""
    found = {}
    for name, check in checks(backend):
        try:
            with backend.translating_errors():
                found[name] = {"digest": check()}
        except NotApplicable as reason:
            found[name] = {"skipped": str(reason)}
        except AssertionError as error:
            found[name] = {"problem": str(error)}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"problem": f"it raised {error!r}"}
    return found


def _skipping(backend: Any, waited: Path) -> dict[str, Any]:
    """Return the error with which a collective ends that the last rank skips, and after how many seconds.

    Args:
        waited: the file of a rank that waits, which the rank that skips the collective expects.
    """
    group = backend.mesh.tensor
    x = torch.ones(2, 64, dtype=backend.limits.dtypes[0], device=backend.device.torch)
    ops.all_reduce(x, group.name)
    backend.device.synchronize()
    start = time.monotonic()
    if group.rank == group.size - 1:
        while not waited.exists() and time.monotonic() < start + 3 * group.timeout:
            time.sleep(PAUSE)
        return {"error": "", "seconds": 0.0}
    try:
        with backend.translating_errors():
            ops.all_reduce(x, group.name)
            backend.device.synchronize()
    except Exception as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - start, "text": str(error)}
    return {"error": "", "seconds": time.monotonic() - start}


if __name__ == "__main__":
    main(*sys.argv[1:])
