"""Kernels for the exchange of experts' rows between NPUs: npu_moe_distribute_dispatch_v2 and _combine_v2, on A3.

Each is one launch, in which the NPUs write into each other's memory. They serve decode steps: up to 512 tokens, and as
many as the communicator's buffer holds. Other calls run the exchange by :func:`hal.ops.all_to_all`.

The kernels may be the only ones in their communicator, so it is made for them.

Sources: the documentation of torch_npu, npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch_npu
from torch import Tensor, distributed

from hal.device.group import Group, when_forgotten
from hal.device.group import group as group_named
from hal.ops.kernels.kernel_table import Kernel
from hal.parallel.collectives import EXCHANGES

WIDTHS = range(1024, 7168 + 1)
MOST_RANKS, MOST_TOKENS, MOST_CHOICES, MOST_EXPERTS = 384, 512, 16, 512
BUFFER = "HCCL_BUFFSIZE"
"""The environment variable with the size of a communicator's buffer, in MiB."""
DEFAULT_BUFFER = 200


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def needed_buffer(tokens: int, width: int, top_k: int, num_experts: int) -> int:
    """Return the bytes of the communicator's buffer that a call needs, for elements of 2 bytes."""
    row = 2 * width
    return 2 * tokens * (num_experts * _up(_up(row, 32) + 64, 512) + top_k * _up(row, 512))


def serves(tokens: int, width: int, top_k: int, num_experts: int, ranks: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels take a call. The answer is the same on all ranks."""
    return (
        2 <= ranks <= MOST_RANKS
        and 1 <= tokens <= MOST_TOKENS
        and width in WIDTHS
        and top_k <= MOST_CHOICES
        and num_experts <= MOST_EXPERTS
        and dtype in (torch.float16, torch.bfloat16)
        and needed_buffer(tokens, width, top_k, num_experts) <= int(os.environ.get(BUFFER, DEFAULT_BUFFER)) << 20
    )


class ExpertExchange:
    """The kernels, and their communicators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: dict[str, str] = {}

    def join(self, group: Group) -> None:
        """Make the communicator for a group, once. All ranks of the job are in the group, and call it."""
        if group.name in self._names:
            return
        process_group: Any = distributed.new_group(backend="hccl")
        # torch_npu takes a rank, of which it uses the index of the device.
        self._names[group.name] = process_group._get_backend(self._device).get_hccl_comm_name(self._device.index)
        when_forgotten(group, partial(self._leave, group.name, process_group))

    def _leave(self, name: str, process_group: Any) -> None:
        del self._names[name]
        with suppress(ValueError):  # The program has destroyed the default group, and with it all others.
            distributed.destroy_process_group(process_group)

    def kernels(self) -> Mapping[str, Kernel]:
        """Return the kernels, by operation."""
        return {"expert_combine": self.expert_combine, "expert_dispatch": self.expert_dispatch}

    def expert_dispatch(
        self, x: Tensor, experts: Tensor, num_experts: int, group: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :func:`hal.ops.expert_dispatch`."""
        options = self._options(experts, x, num_experts, group)
        if options is None:
            composed: tuple[Tensor, Tensor, Tensor, Tensor] = EXCHANGES["expert_dispatch"](
                x, experts, num_experts, group
            )
            return composed
        rows, _, sent, counts, received, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
            x, experts, **options, expert_token_nums_type=1
        )
        return rows, counts, sent, received

    def expert_combine(
        self,
        rows: Tensor,
        experts: Tensor,
        weights: Tensor,
        sent: Tensor,
        received: Tensor,
        num_experts: int,
        group: str,
    ) -> Tensor:
        """See :func:`hal.ops.expert_combine`."""
        options = self._options(experts, rows, num_experts, group)
        if options is None:
            composed: Tensor = EXCHANGES["expert_combine"](rows, experts, weights, sent, received, num_experts, group)
            return composed
        return torch_npu.npu_moe_distribute_combine_v2(  # type: ignore[no-any-return]
            rows, experts, sent, received, weights.float(), **options
        )

    def _options(self, experts: Tensor, rows: Tensor, num_experts: int, group: str) -> dict[str, Any] | None:
        name, ranks = self._names.get(group), group_named(group)
        tokens, top_k = experts.shape
        if name is None or not serves(tokens, rows.shape[1], top_k, num_experts, ranks.size, rows.dtype):
            return None
        return {
            "group_ep": name,
            "ep_world_size": ranks.size,
            "ep_rank_id": ranks.rank,
            "moe_expert_num": num_experts,
            "shared_expert_num": 0,
        }
