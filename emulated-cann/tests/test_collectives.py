"""Tests of HCCL on the emulated CANN: results, between devices and between processes, also by torch's own code."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated_cann import control, tracing
from helpers.thorough import EXHAUSTIVE, LONG, PROCESSES, thorough
from support import DOCS
from support.torchrun import environment, torchrun

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = DOCS / "reference" / "emulated-cann.md"
sys.path.insert(0, str(SCRIPTS))

import hccl  # noqa: E402

TORCH = {name: getattr(torch, name) for name in hccl.TYPES if name not in ("uint16", "uint32", "uint64")}
REDUCED = ("int8", "int16", "int32", "int64", "float16", "float32", "bfloat16")
SIZES = (1, 1000, 70000)  # the last is above the size from which ranks share the work


@pytest.fixture(autouse=True)
def _device_0() -> Iterator[None]:
    yield
    hccl.cann.aclrtSetDevice(0)


def values(rank: int, size: int, dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if dtype.startswith(("int", "uint")):
        return torch.randint(0, 9, (size,), generator=generator).to(TORCH[dtype])
    return torch.randn(size, generator=generator, dtype=torch.float64).to(TORCH[dtype])


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in the order of ranks, 16-bit types in float32."""
    wide = [each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in inputs]
    total = wide[0]
    for each in wide[1:]:
        act = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}[op]
        total = act(total, each)
    return total.to(inputs[0].dtype)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def on_all(
    pair: list[hccl.Communicator],
    sends: list[torch.Tensor],
    due: list[torch.Tensor],
    call: Callable[[hccl.Communicator, hccl.Buffer, hccl.Buffer], None],
    captured: bool = False,
) -> None:
    """Call a collective on all ranks, eagerly or in graphs, and compare the results exactly."""
    buffers, graphs = [], []
    for each, send, result in zip(pair, sends, due, strict=True):
        hccl.cann.aclrtSetDevice(each.device)
        buffers.append((hccl.Buffer(raw(send)), hccl.Buffer(np.full(raw(result).shape, 0xA5, np.uint8))))
        if captured:
            with each.capture() as graph:
                call(each, *buffers[-1])
            graphs.append(graph)
        else:
            call(each, *buffers[-1])
    for graph in graphs * 2:
        graph.replay()
    for each, (send, receive), result in zip(pair, buffers, due, strict=True):
        hccl.cann.aclrtSetDevice(each.device)
        each.synchronize()
        np.testing.assert_array_equal(receive.read(), raw(result), f"rank {each.rank}")
        send.free()
        receive.free()
    for graph in graphs:
        graph.destroy()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", REDUCED)
def test_reductions(pair: list[hccl.Communicator], dtype: str, op: str, captured: bool) -> None:
    if op == "prod" and dtype in ("int16", "bfloat16"):
        a = hccl.Buffer(np.zeros(4, np.int16))
        with pytest.raises(hccl.Failed, match=f"does not support the reduction prod of {dtype} on Ascend910B"):
            pair[0].all_reduce(a, a, 4, dtype, op)
        return
    for size in SIZES:
        inputs = [values(rank, size, dtype) for rank in range(2)]
        whole = [values(rank, 2 * size, dtype, seed=1) for rank in range(2)]
        total = reduced(inputs, op)
        on_all(pair, inputs, [total] * 2, lambda c, a, b, n=size: c.all_reduce(a, b, n, dtype, op), captured)
        parts = list(reduced(whole, op).chunk(2))
        on_all(pair, whole, parts, lambda c, a, b, n=size: c.reduce_scatter(a, b, n, dtype, op), captured)
    untouched = torch.full((size * total.element_size(),), 0xA5, dtype=torch.uint8).view(total.dtype)
    on_all(pair, inputs, [untouched, total], lambda c, a, b: c.reduce(a, b, size, dtype, op, 1), captured)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "bfloat16", "float64"])
def test_movements(pair: list[hccl.Communicator], dtype: str, captured: bool) -> None:
    size = 1000
    inputs = [values(rank, size, dtype) for rank in range(2)]
    halves = [[each[:500], each[500:]] for each in inputs]
    on_all(pair, inputs, [torch.cat(inputs)] * 2, lambda c, a, b: c.all_gather(a, b, size, dtype), captured)
    due = [torch.cat([halves[0][rank], halves[1][rank]]) for rank in range(2)]
    on_all(pair, inputs, due, lambda c, a, b: c.all_to_all(a, b, 500, dtype), captured)
    on_all(pair, inputs, halves[1], lambda c, a, b: c.scatter(a, b, 500, dtype, 1), captured)

    on_all(pair, inputs, [inputs[0]] * 2, lambda c, a, b: _broadcast(c, a, b, size, dtype), captured)
    message = [lambda c, a, b: c.send(a, size, 1, dtype), lambda c, a, b: c.receive(b, size, 0, dtype)]
    untouched = torch.full((raw(inputs[0]).size,), 0xA5, dtype=torch.uint8)
    on_all(pair, inputs, [untouched, inputs[0]], lambda c, a, b: message[c.rank](c, a, b), captured)


def _broadcast(c: hccl.Communicator, a: hccl.Buffer, b: hccl.Buffer, size: int, dtype: str) -> None:
    """Broadcast in place from rank 0, and copy the result to `b`."""
    c.broadcast(a, size, dtype, 0)
    counts = [size if each == c.rank else 0 for each in range(c.ranks)]
    c.all_to_all_v(a, b, counts, counts, dtype)


def test_uneven(pair: list[hccl.Communicator]) -> None:
    matrix = [[3, 5], [0, 2]]
    inputs = [values(rank, sum(row), "float32") for rank, row in enumerate(matrix)]
    due = [torch.cat([inputs[0][:3], inputs[1][:0]]), torch.cat([inputs[0][3:], inputs[1]])]
    on_all(
        pair, inputs, due, lambda c, a, b: c.all_to_all_v(a, b, matrix[c.rank], [r[c.rank] for r in matrix], "float32")
    )
    on_all(pair, inputs, due, lambda c, a, b: c.all_to_all_vc(a, b, matrix, "float32"))
    gathered = [values(0, 3, "float16"), values(1, 5, "float16")]
    on_all(pair, gathered, [torch.cat(gathered)] * 2, lambda c, a, b: c.all_gather_v(a, b, [3, 5], "float16"))
    whole = [values(rank, 8, "float16") for rank in range(2)]
    parts = list(reduced(whole, "max").split([3, 5]))
    on_all(pair, whole, parts, lambda c, a, b: c.reduce_scatter_v(a, b, [3, 5], "float16", "max"))


def test_messages_in_a_group(pair: list[hccl.Communicator]) -> None:
    """Each rank receives before it sends, which would wait for ever outside a group."""
    inputs = [values(rank, 5000, "float32") for rank in range(2)]

    def swap(c: hccl.Communicator, a: hccl.Buffer, b: hccl.Buffer) -> None:
        hccl.cann.HcclGroupStart()
        c.receive(b, 5000, 1 - c.rank)
        c.send(a, 5000, 1 - c.rank)
        hccl.cann.HcclGroupEnd()

    on_all(pair, inputs, inputs[::-1], swap)
    on_all(pair, inputs, inputs[::-1], swap, captured=True)


def test_a_group_has_calls_of_one_kind(pair: list[hccl.Communicator]) -> None:
    a = hccl.Buffer(np.zeros(4, np.float32))
    hccl.cann.HcclGroupStart()
    pair[0].receive(a, 0, 1)
    with pytest.raises(hccl.Failed, match="must not be in one group with calls of another kind"):
        pair[0].all_reduce(a, a, 4)
    hccl.cann.HcclGroupEnd()
    with pytest.raises(hccl.Failed, match="without HcclGroupStart"):
        hccl.cann.HcclGroupEnd()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, a: c.all_reduce(a, a, 4, "uint8"), "HcclAllReduce does not support uint8 on Ascend910B"),
        (lambda c, a: c.reduce_scatter_v(a, a, [2, 2], "int64"), "HcclReduceScatterV does not support int64"),
        (lambda c, a: c.broadcast(a, 4, root=2), "rank 2 is not one of the 2 ranks"),
        (lambda c, a: c.send(a, 4, 5), "rank 5 is not one of the 2 ranks"),
        (lambda c, a: hccl.cann.HcclCommDestroy(ctypes.c_void_p(8)), "0x8 is not a live communicator"),
        (lambda c, a: hccl.of_devices([0, 0]), "the devices must exist, and be different"),
        (lambda c, a: hccl.cann.HcclCommInitClusterInfoConfig(b"f", 0, None, None), "no HcclCommInitClusterInfoConfig"),
    ],
)
def test_refusals(
    pair: list[hccl.Communicator], call: Callable[[hccl.Communicator, hccl.Buffer], None], message: str
) -> None:
    with pytest.raises(hccl.Failed, match=message):
        call(pair[0], hccl.Buffer(np.zeros(4, np.float32)))


def test_a_stream_of_another_device(pair: list[hccl.Communicator]) -> None:
    a = hccl.Buffer(np.zeros(4, np.float32))
    with pytest.raises(hccl.Failed, match="HcclAllReduce: the stream is on device 1, and the communicator"):
        hccl.cann.HcclAllReduce(a.address, a.address, hccl.number(4), 4, 0, pair[0].handle, pair[1].stream)


def test_found_by_name_and_device(pair: list[hccl.Communicator]) -> None:
    handles = []
    for each in pair:
        hccl.cann.aclrtSetDevice(each.device)
        handles.append(ctypes.c_void_p())
        hccl.cann.HcclCommGetHandleWithName(each.name.encode(), ctypes.byref(handles[-1]))
    assert pair[0].name == pair[1].name
    assert [each.value for each in handles] == [each.handle.value for each in pair]


@thorough(EXHAUSTIVE, r"\[[2-7]")
@pytest.mark.parametrize("seed", range(8))
def test_any_schedule(pair: list[hccl.Communicator], seed: int) -> None:
    inputs = [values(rank, 100, "float32", seed) for rank in range(2)]
    total = reduced(inputs, "sum")
    with control.schedule(seed):
        on_all(pair, inputs, [total] * 2, lambda c, a, b: c.all_reduce(a, b, 100), captured=seed % 2 == 1)


def test_the_trace_knows_ranks_and_sizes(pair: list[hccl.Communicator]) -> None:
    inputs = [values(rank, 100, "float32") for rank in range(2)]
    with tracing.trace() as trace:
        on_all(pair, inputs, [reduced(inputs, "sum")] * 2, lambda c, a, b: c.all_reduce(a, b, 100))
    found = trace.ran()
    assert [each.name for each in found] == ["HcclAllReduce"] * 2
    assert sorted((each.device, each.rank, each.ranks, each.communicator) for each in found) == [
        (each.device, each.rank, 2, each.name) for each in pair
    ]
    assert {each.bytes for each in found} == {800}


def test_a_wait_for_another_process_is_no_stall(pair: list[hccl.Communicator]) -> None:
    """Rank 1 comes 1.5 s late, and the limit for stalls is 1 s. It is a timer's thread, so this thread waits."""
    a = [hccl.Buffer(np.full(4, 1, np.float32))]
    hccl.cann.aclrtSetDevice(1)
    a.append(hccl.Buffer(np.full(4, 2, np.float32)))

    def later() -> None:
        hccl.cann.aclrtSetDevice(1)
        pair[1].all_reduce(a[1], a[1], 4)

    hccl.cann.aclrtSetDevice(0)
    timer = threading.Timer(1.5, later)
    with control.limits(stall=1):
        timer.start()
        pair[0].all_reduce(a[0], a[0], 4)
        pair[0].synchronize()
        timer.join()
        pair[1].synchronize()
    assert a[0].read().tolist() == [3.0] * 4


@thorough(LONG)
def test_pages_of_large_messages_are_given_back() -> None:
    ranks = hccl.of_devices([0, 1])

    def shared_bytes() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        found, outbox = 0, False
        for line in lines:
            if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
                outbox = "memfd:hccl-outbox" in line
            elif outbox and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
        return found

    size = 8 << 20
    inputs = [values(rank, size, "float32") for rank in range(2)]
    on_all(ranks, inputs, [reduced(inputs, "sum")] * 2, lambda c, a, b: c.all_reduce(a, b, size))
    small = [each[:100] for each in inputs]
    for _ in range(3):
        on_all(ranks, small, [reduced(small, "sum")] * 2, lambda c, a, b: c.all_reduce(a, b, 100))
    assert shared_bytes() < 12 << 20
    for each in ranks:
        each.destroy()


@thorough(EXHAUSTIVE, r"\[[2-4]-")
@pytest.mark.parametrize(("seed", "count"), [(1, 1000), *((seed, 10_000) for seed in range(2, 5))])
def test_random_calls_on_overlapping_groups(tmp_path: Path, seed: int, count: int) -> None:
    results = hccl.run_ranks("hccl_stress.py", "stress", 4, str(tmp_path), seed, count, seconds=400)
    for each in results:
        assert each["wrong"] == [], f"seed {seed}"
        assert each["done"] >= count
        assert each["replayed"] > each["replayed in parts"] > count / 10, f"seed {seed}"


@thorough(PROCESSES)
@thorough(EXHAUSTIVE, r"\[4")
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism_and_functional_collectives(ranks: int) -> None:
    """DTensor's results are those of one device, and functional collectives give exact values."""
    torchrun(SCRIPTS / "torch_parallel.py", ranks)


OTHER_THAN_NCCL = "expects what only NCCL, or CUDA, has"
BROADCAST = "torch's broadcast reads the capability of a CUDA device, which torch_npu does not have"
PADDED = "wrong values: torch_npu pads sizes that are no multiple of 32 bytes, and another device is current"
PROFILER = "torch's profiler refuses the activities that `transfer_to_npu` gives it"
NO_CAPABILITY = "TypeError: 'NoneType' object is not subscriptable"
FAILS = {
    "test_all_gather_cuda": (PADDED, "AssertionError: Tensor-likes are not close!"),
    "test_all_gather_cuda_complex": (PADDED, "AssertionError: Tensor-likes are not close!"),
    "test_barrier_cuda": (BROADCAST, NO_CAPABILITY),
    "test_batch_isend_irecv_mixed_backend_err": (OTHER_THAN_NCCL, "RuntimeError: No backend type associated with"),
    "test_batch_isend_irecv_op_list_err": (OTHER_THAN_NCCL, "AttributeError: 'int' object has no attribute 'group'"),
    "test_broadcast_cuda": (BROADCAST, NO_CAPABILITY),
    "test_gather_cuda": (BROADCAST, NO_CAPABILITY),
    "test_gather_object": (BROADCAST, NO_CAPABILITY),
    "test_gather_object_subgroup": (BROADCAST, NO_CAPABILITY),
    "test_get_backend": (OTHER_THAN_NCCL, "AssertionError: String comparison failed: 'hccl' != 'nccl'"),
    "test_monitored_barrier_allreduce_hang": (OTHER_THAN_NCCL, "AssertionError: RuntimeError not raised"),
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": (OTHER_THAN_NCCL, "AssertionError: RuntimeError not"),
    "test_nccl_backend_bool_broadcast": (BROADCAST, NO_CAPABILITY),
    "test_send_recv_nccl_autograd_profiler": (PROFILER, "TypeError: _prepare_profiler(): incompatible"),
}
"""Tests of torch that fail on NPUs, the reasons, and the starts of their errors. The page counts them."""


@thorough(EXHAUSTIVE)
def test_torchs_own_tests(tmp_path: Path) -> None:
    """Each passes, except those above. The page has the numbers. Some write files to the working directory."""
    command = [sys.executable, str(SCRIPTS / "torch_own_tests.py")]
    done = subprocess.run(
        command, env=environment(4), capture_output=True, text=True, timeout=1500, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = {each["test"]: each["why"] for each in lines if each["result"] == "failed"}
    assert {name: why for name, why in failed.items() if name not in FAILS} == {}
    assert set(FAILS) - set(failed) == set(), "they pass now: remove them here, and change the page's count"
    others = {name: failed[name] for name, (_, start) in FAILS.items() if f"\n{start}" not in failed[name]}
    assert others == {}, "they fail for another reason"
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    counts = Counter(each["result"] for each in lines)
    assert f"{counts['passed']} pass, torch skips {counts['skipped']}, and {counts['failed']} fail" in text
