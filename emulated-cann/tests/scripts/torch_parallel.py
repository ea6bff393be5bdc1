"""torch's tensor parallelism (DTensor) and functional collectives, eager and compiled, on NPUs. Run by torchrun.

The models are those of torch's own tests. Results are those of one device, or follow from the ranks.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule, ModelArgs, Transformer

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HEADS, HEAD_DIM, LENGTH = 4, 16, 8


class Attention(nn.Module):
    """Causal attention in plain operations, with this rank's heads."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1) for each in (self.wq, self.wk, self.wv))
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(mask, float("-inf"))
        return self.wo((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


def column_and_row(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    x = torch.randn(20, 10).npu()
    mlp = MLPModule("cpu").npu()
    cut = parallelize_module(copy.deepcopy(mlp), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    assert cut.net1.weight.to_local().shape == (16 // RANKS, 10)
    assert cut.net2.weight.to_local().shape == (10, 16 // RANKS)
    assert_close(cut(x), mlp(x))
    attention, hidden = Attention().npu(), torch.randn(LENGTH, HEADS * HEAD_DIM).npu()
    columns = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
    cut = parallelize_module(copy.deepcopy(attention), mesh, {**columns, "wo": RowwiseParallel()})
    assert cut.wq.weight.to_local().shape == (HEADS * HEAD_DIM // RANKS, HEADS * HEAD_DIM)
    assert_close(cut(hidden), attention(hidden))
    assert_close(torch.compile(cut, backend="aot_eager")(hidden), attention(hidden))


def transformer(mesh: DeviceMesh, sequence: bool) -> None:
    torch.manual_seed(2)
    whole = Transformer(ModelArgs(dropout_p=0.0)).npu().eval()
    cut = Transformer.parallelize(copy.deepcopy(whole), mesh, sequence, local_output_for_attn=True)
    tokens = torch.randint(0, 8, (4, LENGTH)).npu()
    assert_close(cut(tokens), whole(tokens))


def compiled(backend: str | None) -> None:
    """Call functional collectives in a compiled function, three times with other values."""
    group = dist.group.WORLD

    def step(x: Tensor) -> tuple[Tensor, ...]:
        total = collectives.all_reduce(x * 2.0, "sum", group)
        gathered = collectives.all_gather_single(total + RANK, 0, group)
        part = collectives.reduce_scatter_single(gathered, "sum", 0, group)
        # Flat: for tensors of more dimensions, torch_npu 2.13 passes numbers of elements where numbers of rows are due.
        swapped = collectives.all_to_all_single(gathered.flatten(), None, None, group)
        return total, gathered, part, swapped

    call: Callable[[Tensor], tuple[Tensor, ...]] = step
    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(step, backend=backend, dynamic=False, fullgraph=True)
    for value in (1.0, 5.0, 3.0):
        found = [each.cpu() for each in call(torch.full((2, 16), value + RANK, dtype=torch.float16).npu())]
        total = torch.full((2, 16), sum(2 * (value + rank) for rank in range(RANKS)))
        gathered = torch.cat([total + rank for rank in range(RANKS)])
        due = total, gathered, (total + RANK) * RANKS, (total + RANK).repeat(RANKS, 1).flatten()
        for name, one, other in zip(("sum", "gathered", "part", "swapped"), found, due, strict=True):
            assert_close(one.float(), other, rtol=0, atol=0, msg=f"rank {RANK}, {backend}, {value}: {name} is {one}")


@torch.no_grad()
def main() -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    mesh = init_device_mesh("npu", (RANKS,))
    column_and_row(mesh)
    for sequence in (False, True):
        transformer(mesh, sequence)
    for backend in (None, "aot_eager", "npugraph_ex"):
        compiled(backend)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank-{RANK}-well\n")


if __name__ == "__main__":
    main()
