"""Tests for the CPU's collectives in shared memory: results, failures, and what they leave behind.

Functions that start with an underscore run on the ranks, which are processes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.backends.cpu.driver import COLLECTIVES
from hal.backends.cpu.native.build import load
from hal.backends.cpu.native.shared_memory import SharedMemoryKernels
from hal.backends.cpu.native.shared_segment import _obstacle, _Offer
from helpers.rank_processes import LOST, run, succeeded
from helpers.thorough import DRAW, EXHAUSTIVE, MODE, thorough
from torch import Tensor, distributed

import hal
from hal import ops
from hal.device.group import Group, register_group
from hal.errors import CommunicationError, OperationError
from hal.ops.tolerance import assert_agree
from hal.parallel import SOLO, Mesh

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/ns/pid").exists(), reason="shared memory is for Linux; elsewhere the ranks use gloo"
)

SHAPES = ((0,), (0, 32), (3, 0), (1,), (6, 5), (2, 3, 7), (1, 1024), (6, 2731), (6, 8195), (32769,), (3, 1 << 17))
"""No element, one, odd numbers, 2 KiB, around the sizes where the steps change, and 1.5 MiB."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
IN_PARTS = ("all_to_all", "reduce_scatter")
"""Operations whose rows are parts for each rank."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernels before ranks would do so at once."""
    load()


def _kernels(native: bool = True) -> Any:
    torch.set_num_threads(1)
    return SharedMemoryKernels(load() if native else None)


def _everyone(timeout: float = 30.0) -> Group:
    return Mesh.of(tensor=distributed.group.WORLD, timeout=timeout).tensor


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, ranks: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = 1 if dtype.is_floating_point else 1000
    found = [(scale * torch.randn(shape, generator=generator)).to(dtype) for _ in range(ranks)]
    for each in found[:1]:
        if each.numel() > 20 and dtype.is_floating_point:
            each.view(-1)[3:7] = torch.tensor([float("inf"), float("nan"), 6e4, -0.0])
    return found


def _sum_in_order(shards: list[Tensor]) -> Tensor:
    total = shards[0].float()
    for each in shards[1:]:
        total = total + each.float()
    return total.to(shards[0].dtype)


def _bits(x: Tensor) -> bytes:
    flat = x.clone(memory_format=torch.contiguous_format).view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).digest()


def _compare_with_the_reference(rank: int, ranks: int) -> list[bytes]:
    kernels, group, digests = _kernels(), _everyone(), []
    for seed, (shape, dtype, name) in enumerate(itertools.product(SHAPES, DTYPES + INTEGERS, COLLECTIVES)):
        if dtype in INTEGERS and name != "all_gather_rows":
            with pytest.raises(OperationError, match=f"{name} was given int"):
                getattr(kernels, name)(torch.ones(2, 3, dtype=dtype), group.name)
            continue
        shards = _drawn(shape, dtype, ranks, seed)
        if name in IN_PARTS and shape[0] % ranks:
            with pytest.raises(OperationError, match=f"{name} was given"):
                getattr(kernels, name)(shards[rank], group.name)
            continue
        operation = ops.operation(name)
        expected = operation.over_shards([(each, group.name) for each in shards])[rank]
        strided = torch.stack([shards[rank]] * 2, -1)[..., 0]
        given = torch.full_like(expected, 7.0), torch.full((*expected.shape, 2), 7.0, dtype=dtype)[..., 0]
        for x, out in ((shards[rank], None), (strided, given[0]), (shards[rank], given[1])):
            found = getattr(kernels, name)(x, group.name, out)
            assert out is None or found is out
            assert_agree(operation, torch.float32 if dtype in INTEGERS else dtype, found, expected, equal_nan=True)
        if name in ("all_reduce", "reduce_scatter"):
            in_order = _sum_in_order(shards)
            if name == "reduce_scatter":
                in_order = in_order.chunk(ranks)[rank]
            torch.testing.assert_close(found, in_order, rtol=0, atol=0, equal_nan=True)
        if name not in IN_PARTS:
            digests.append(_bits(found))
    in_place = torch.full((5000, 64), float(rank + 1))
    assert kernels.all_reduce(in_place, group.name, in_place) is in_place
    assert bool((in_place == ranks * (ranks + 1) / 2).all())
    return digests


@thorough(MODE, r"\[3\]")
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.thorough(DRAW)) for ranks in (2, 4))])
def test_they_meet_the_reference_with_the_same_bits(ranks: int) -> None:
    """Sums are those in the order of ranks, in float32, rounded once."""
    results = succeeded(run(_compare_with_the_reference, ranks, ranks))
    assert results[0]
    assert all(each == results[0] for each in results)


MEMBERS = ((0, 1, 2, 3), (0, 1), (1, 2), (2, 3), (0, 3), (0, 2, 3), (1, 3))


def _random_sequence(rank: int, seed: int, calls: int) -> int:
    kernels, draw, groups = _kernels(), random.Random(seed), []
    for members in MEMBERS:
        made = distributed.new_group(list(members))
        if rank in members:
            groups.append(Group(str(members), members.index(rank), len(members), made))
            register_group(groups[-1])
    took = 0
    for call in range(calls):
        members = draw.choice(MEMBERS)
        name, dtype = draw.choice(COLLECTIVES), draw.choice(DTYPES)
        rows, width = draw.choice((1, 2, 5)) * len(members), draw.choice((1, 3, 64, 1024, 20_000))
        if draw.random() < 0.01:
            time.sleep(draw.random() * 0.02 * rank)
        if rank not in members:
            continue
        generator = torch.Generator().manual_seed(seed * 1_000_003 + call)
        shards = [
            torch.randint(-8, 9, (rows, width), generator=generator).to(dtype) for _ in members
        ]  # Sums are exact.
        (group,) = (each for each in groups if each.name == str(members))
        found = getattr(kernels, name)(shards[group.rank], group.name)
        expected = ops.operation(name).over_shards([(each, group.name) for each in shards])[group.rank]
        assert torch.equal(found, expected), f"seed {seed}, call {call}: {name} of {[rows, width]} {dtype} in {members}"
        took += 1
    return took


@thorough(EXHAUSTIVE, r"\[[124]-2500")
@pytest.mark.parametrize(
    ("seed", "calls"), [(0, 120), *(pytest.param(seed, 2500, marks=pytest.mark.thorough(DRAW)) for seed in range(1, 5))]
)
def test_random_sequences_in_overlapping_groups(seed: int, calls: int) -> None:
    took = succeeded(run(_random_sequence, 4, seed, calls, timeout=300.0))
    assert min(took) > calls / 4


def _capture(rank: int, ranks: int) -> list[float]:
    torch.set_num_threads(1)
    backend, group = hal.open({"backend": "cpu", "options": {"native": True}}), _everyone()
    x, graph = torch.full((2, 8), float(rank)), backend.graph()

    def function() -> Tensor:
        total = ops.all_reduce(x * 2.0, group.name)
        return ops.reduce_scatter(ops.all_gather(total + 1.0, group.name), group.name)

    with torch.inference_mode():
        output, found = graph.capture(function), []
        for value in (1.0, 5.0, 3.0):
            x.fill_(value + rank)
            address = output.data_ptr()
            graph.replay()
            assert output.data_ptr() == address
            assert output.shape == (1, 8 * ranks)
            found.append(float(output[0, 0]))
            assert bool((output == found[-1]).all())
    return found


def test_a_tape_replays_them() -> None:
    """Two ranks with x = v + rank: twice the sum of all x, plus 1, and again the sum of both ranks."""
    expected = [(2 * (2 * value + 1) + 1) * 2 for value in (1.0, 5.0, 3.0)]
    assert succeeded(run(_capture, 2, 2)) == [expected, expected]


def _segments() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "hal-collectives" in line]


def _failures(rank: int, fault: str) -> dict[str, Any]:
    """Run 20 all-reduces of three ranks, with a fault of rank 1 at the 21st call, and two calls after the failure."""
    kernels, group = _kernels(), _everyone(timeout=1.0 if fault == "late" else 30.0)
    x = torch.ones(2, 1024)
    for _ in range(20):
        kernels.all_reduce(x, group.name)
    segments = _segments()
    call, start = lambda: kernels.all_reduce(x, group.name), time.monotonic()
    if rank == 1:
        match fault:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "ended":
                os._exit(3)
            case "late":
                time.sleep(2.5)
            case "interrupted":
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            case "shape":
                call = lambda: kernels.all_reduce(torch.ones(2, 1000), group.name)  # noqa: E731
            case "empty":
                call = lambda: kernels.all_reduce(torch.ones(0, 1024), group.name)  # noqa: E731
            case "dtype":
                call = lambda: kernels.all_reduce(x.bfloat16(), group.name)  # noqa: E731
            case "operation":
                call = lambda: kernels.all_gather(x, group.name)  # noqa: E731
            case "large":
                call = lambda: kernels.all_reduce(torch.ones(1 << 20), group.name)  # noqa: E731
    elif fault == "interrupted":
        time.sleep(1.0)
    texts = []
    for attempt in (call, lambda: kernels.all_reduce(x, group.name), lambda: kernels.all_gather(x, group.name)):
        with pytest.raises((CommunicationError, KeyboardInterrupt)) as caught:
            attempt()
        texts.append(f"{caught.type.__name__}: {caught.value}")
    return {"seconds": time.monotonic() - start, "texts": texts, "segments": segments}


WHAT = "all_reduce of [2, 1024] torch.float32"
ENDED = f"ended before it joined {WHAT} in the group 'tensor1' on rank"
DIFFERENT = "the ranks called different collectives in the group 'tensor1'"


@thorough(DRAW, r"\[(ended|shape|empty|dtype|large)")
@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("killed", ("rank 1 (process ", ENDED)),
        ("ended", ("rank 1 (process ", ENDED)),
        ("late", (f"rank 1 did not join {WHAT} in the group 'tensor1' on rank", "of 3 within 1.")),
        ("interrupted", (f"rank 1 was interrupted in {WHAT} by KeyboardInterrupt",)),
        ("shape", (DIFFERENT, WHAT, "rank 1 all_reduce of [2, 1000] torch.float32")),
        ("empty", (DIFFERENT, WHAT, "rank 1 all_reduce of [0, 1024] torch.float32")),
        ("dtype", (DIFFERENT, WHAT, "rank 1 all_reduce of [2, 1024] torch.bfloat16")),
        ("operation", (DIFFERENT, WHAT, "rank 1 all_gather of [2, 1024] torch.float32")),
        ("large", (DIFFERENT, WHAT, "rank 1 all_reduce of [1048576] torch.float32")),
    ],
)
def test_a_failure_reaches_every_rank(fault: str, parts: tuple[str, ...]) -> None:
    """Every rank raises, in time, and so do all later calls."""
    before = set(os.listdir("/dev/shm"))
    results = run(_failures, 3, fault)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "hal" in name]
    if fault in ("killed", "ended"):
        assert results[1] == LOST
        results[1] = results[0]
    for rank, result in enumerate(succeeded(results)):
        assert result["seconds"] < 10.0
        assert result["segments"] == ["/memfd:hal-collectives (deleted)"], "memory without a name"
        first, *later = result["texts"]
        if fault == "interrupted" and rank == 1:
            assert first.startswith("KeyboardInterrupt")
        else:
            assert first.startswith("CommunicationError")
            assert [part for part in parts if part not in first] == [], first
        for each in later:
            assert each.startswith("CommunicationError")
            assert "has failed: " in each
            assert "start the ranks anew" in each


def _without_kernels(rank: int) -> float:
    kernels, group = _kernels(native=rank != 1), _everyone()
    gathered = kernels.all_gather(kernels.all_reduce(torch.ones(3, 4), group.name), group.name)
    rows = kernels.all_gather_rows(torch.full((2, 1), rank, dtype=torch.int32), group.name)
    assert rows.flatten().tolist() == [0, 0, 1, 1]
    assert not _segments()
    return float(kernels.reduce_scatter(gathered[:2], group.name).sum())


def test_a_rank_without_kernels_makes_all_use_gloo() -> None:
    assert succeeded(run(_without_kernels, 2)) == [2.0 * 2 * 8, 2.0 * 2 * 8]


def test_ranks_on_several_machines_share_no_memory() -> None:
    def offer(machine: str, host: str, lacks: str = "") -> _Offer:
        return _Offer(lacks, machine, host, process=1)

    assert _obstacle([offer("a", "one"), offer("a", "one")]) == ""
    assert _obstacle([offer("a", "one"), offer("b", "two")]) == "rank 1 is on another machine than rank 0"
    assert _obstacle([offer("a", "one"), offer("b", "one")]) == "rank 1 is in another container than rank 0"
    assert _obstacle([offer("a", "one", "has no C++ kernels"), offer("b", "two")]) == "rank 0 has no C++ kernels"


def test_a_group_of_one_changes_nothing() -> None:
    kernels, x = _kernels(), torch.randn(4, 6).t()
    for name in COLLECTIVES:
        found = getattr(kernels, name)(x, SOLO.name)
        assert torch.equal(found, x)
        assert found.data_ptr() != x.data_ptr()
