"""Operations of torch_npu that compute and communicate (MC2), against torch.distributed. Run by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch_npu

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS, INNER, COLUMNS = 4 * RANKS, 256, 24
Calls = dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + RANK)
    return torch.randn(*shape, generator=generator).half().npu()


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name by which HCCL knows a group on this rank."""
    return group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank(group))


def fused(name: str) -> Calls:
    return {
        "all-reduce": lambda x, w: torch_npu.npu_mm_all_reduce_base(x, w, name),
        "gather": lambda x, w: torch_npu.npu_all_gather_base_mm(x, w, name, RANKS)[0],
        "scatter": lambda x, w: torch_npu.npu_mm_reduce_scatter_base(x, w, name, RANKS),
    }


def all_reduced(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x @ w
    dist.all_reduce(out)
    return out


def gathered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(RANKS * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(whole, x)
    return whole @ w


def scattered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0] // RANKS, w.shape[1])
    dist.reduce_scatter_tensor(out, x @ w)
    return out


APART: Calls = {"all-reduce": all_reduced, "gather": gathered, "scatter": scattered}


def matmuls(name: str) -> None:
    x, w = random(ROWS, INNER, seed=1), random(COLUMNS, INNER, seed=2).t()
    for which, call in fused(name).items():
        assert torch.equal(call(x, w), APART[which](x, w)), f"rank {RANK}: {which}"
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            out = call(x, w)
        for seed in (3, 4):
            x.copy_(random(ROWS, INNER, seed=seed))
            graph.replay()
            assert torch.equal(out, APART[which](x, w)), f"rank {RANK}: replayed {which}"


def experts(name: str) -> None:
    """Send tokens to experts, each of which multiplies by its number, and back, eagerly and in a graph."""
    count, choices, number = 6, 3, 4 * RANKS
    group = {"group_ep": name, "ep_world_size": RANKS, "ep_rank_id": RANK, "moe_expert_num": number}

    def chosen(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + RANK)
        most = number - seed
        rows = [torch.randperm(most, generator=generator)[:choices] for _ in range(count)]
        return torch.stack(rows).int().npu()

    def there_and_back() -> torch.Tensor:
        sent = torch_npu.npu_moe_distribute_dispatch_v2(x, ids, **group)
        local = torch.arange(number // RANKS, device="npu") + RANK * (number // RANKS)
        ends = sent[3].cumsum(0)
        which = (torch.arange(sent[0].shape[0], device="npu").unsqueeze(1) >= ends).sum(1)
        factors = (local[which.clamp(max=len(local) - 1)] + 1).unsqueeze(1)
        rows = sent[0] * factors.half()
        return torch_npu.npu_moe_distribute_combine_v2(rows, ids, sent[2], sent[4], weights, **group)

    def due() -> torch.Tensor:
        total = torch.zeros(x.shape, device="npu")
        for choice in range(choices):
            result = x * (ids[:, choice, None] + 1).half()
            total += result.float() * weights[:, choice, None]
        return total.half()

    x, ids, weights = random(count, 64, seed=1), chosen(1), random(count, choices, seed=2).float()
    assert torch.equal(there_and_back(), due()), f"rank {RANK}: experts"
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = there_and_back()
    for seed in (0, 3):
        ids.copy_(chosen(seed))
        x.copy_(random(count, 64, seed=seed))
        graph.replay()
        assert torch.equal(out, due()), f"rank {RANK}: experts, replayed"


def main() -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    matmuls(name_of(dist.group.WORLD))
    experts(name_of(dist.new_group(list(range(RANKS)))))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank-{RANK}-well\n")


if __name__ == "__main__":
    main()
