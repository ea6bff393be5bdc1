"""Every collective of torch.distributed on torch_npu, against results that follow from the ranks. Run by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZE = 64
SUM = RANKS * (RANKS + 1) // 2


def filled(value: float, size: int = SIZE, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.full((size,), value, dtype=dtype)


def every_rank(values: list[float]) -> torch.Tensor:
    return torch.cat([filled(value) for value in values])


def expect(found: torch.Tensor, due: torch.Tensor, what: str) -> None:
    assert torch.equal(found.cpu().float(), due.float()), f"rank {RANK}: {what}: {found[:4].tolist()} is not {due[:4]}"


def each_collective(mode: str, group: dist.ProcessGroup | None = None) -> None:
    """Call each once, eagerly, asynchronously, or in a graph that is replayed twice."""
    own = RANK + 1
    numbers = [float(rank + 1) for rank in range(RANKS)]
    whole = every_rank(numbers).npu()
    cases: list[tuple[str, torch.Tensor, torch.Tensor, Callable[[torch.Tensor, torch.Tensor], dist.Work | None]]] = []

    def case(name: str, send: torch.Tensor, due: torch.Tensor, call: Callable[..., dist.Work | None]) -> None:
        cases.append((name, send.npu(), due, call))

    asynchronous = mode == "async"
    options = {"group": group, "async_op": asynchronous}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32):
        case(
            f"all_reduce {dtype}",
            filled(own, dtype=dtype),
            filled(SUM, dtype=dtype),
            lambda a, b: dist.all_reduce(b.copy_(a), **options),
        )
    case("max", filled(own), filled(RANKS), lambda a, b: dist.all_reduce(b.copy_(a), dist.ReduceOp.MAX, **options))
    case("all_gather", filled(own), every_rank(numbers), lambda a, b: dist.all_gather_into_tensor(b, a, **options))
    case("reduce_scatter", whole, filled(own * RANKS), lambda a, b: dist.reduce_scatter_tensor(b, a, **options))
    case("all_to_all", whole, filled(own, SIZE * RANKS), lambda a, b: dist.all_to_all_single(b, a, **options))
    case("broadcast", filled(own), filled(RANKS), lambda a, b: dist.broadcast(b.copy_(a), RANKS - 1, **options))
    results = [torch.zeros_like(due, device="npu") for _, _, due, _ in cases]
    torch.npu.synchronize()

    def run() -> None:
        works = [call(send, result) for (_, send, _, call), result in zip(cases, results, strict=True)]
        for work in works:
            if work is not None:
                work.wait()

    if mode == "captured":
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            run()
        for _ in range(2):
            graph.replay()
    else:
        run()
    torch.npu.synchronize()
    for (name, _, due, _), result in zip(cases, results, strict=True):
        expect(result, due, f"{mode} {name}")


def uneven_and_messages() -> None:
    sizes = [rank + 1 for rank in range(RANKS)]
    send = torch.cat([filled(RANK, size) for size in sizes]).npu()
    out = torch.zeros(RANKS * (RANK + 1), dtype=torch.float16, device="npu")
    dist.all_to_all_single(out, send, [RANK + 1] * RANKS, sizes)
    expect(out, torch.cat([filled(rank, RANK + 1) for rank in range(RANKS)]), "all_to_all_v")
    parts = [torch.zeros(size, dtype=torch.float16, device="npu") for size in sizes]
    dist.all_gather(parts, filled(RANK, RANK + 1).npu())
    expect(torch.cat(parts), torch.cat([filled(rank, rank + 1) for rank in range(RANKS)]), "all_gather of sizes")
    left, right = (RANK - 1) % RANKS, (RANK + 1) % RANKS
    received = torch.zeros(SIZE, device="npu")
    message = torch.full((SIZE,), float(RANK), device="npu")
    moves = [dist.P2POp(dist.isend, message, right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    expect(received, torch.full((SIZE,), float(left)), "batch_isend_irecv")
    if RANK < 2:
        (dist.send if RANK == 0 else dist.recv)(message, 1 - RANK)
        expect(message, torch.zeros(SIZE), "send and recv")


def main() -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    for mode in ("eager", "async", "captured"):
        each_collective(mode)
    uneven_and_messages()
    halves = [dist.new_group(list(range(first, RANKS, 2))) for first in (0, 1)]
    others = dist.new_group(list(range(RANKS))[::-1])
    x = filled(RANK + 1).npu()
    dist.all_reduce(x, group=halves[RANK % 2])
    expect(x, filled(sum(rank + 1 for rank in range(RANK % 2, RANKS, 2))), "half")
    each_collective("captured", others)
    gathered: list[object] = [None] * RANKS
    dist.all_gather_object(gathered, {"rank": RANK})
    assert gathered == [{"rank": rank} for rank in range(RANKS)]
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank-{RANK}-well\n")


if __name__ == "__main__":
    main()
