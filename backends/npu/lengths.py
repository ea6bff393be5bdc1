"""The lengths that attention reads on the host: limits of one launch, and updates for replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

HostValues = Mapping[str, Tensor]
Update = Callable[[HostValues], Any]

FUSED = {
    "npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}
"""The versions of the fused operation, with the update keys of the lengths of queries and of keys."""
DEFAULT_LAYOUT = "BSH"
"""The fused operation's default layout: torch_npu does not record arguments that have their defaults."""
UPDATES: dict[str, dict[str, Update]] = {
    **{
        f"{name}.out": {
            queries: lambda values: values["query_start_loc_host"][1:].tolist(),
            keys: lambda values: values["kv_lens_host"].tolist(),
        }
        for name, (queries, keys) in FUSED.items()
    },
    # Cloned, because torch_npu's queue may read it after the call has returned.
    "_npu_paged_attention.default": {"context_lens": lambda values: values["kv_lens_host"].clone()},
}
"""By the operation that torch_npu records in a capture: how the value of each update key is computed."""
UNCACHED: dict[str, dict[str, Update]] = {
    f"{name}.out": dict.fromkeys(keys, lambda values: values["query_start_loc_host"][1:].tolist())
    for name, keys in FUSED.items()
}
"""The same for packed sequences without a cache, whose keys are as many as their queries."""


def launch_runs(rows: slice, lens: list[int], block_size: int, blocks: int) -> Iterator[slice]:
    """Split sequences of a prefill into runs that one launch of attention accepts.

    Attention rejects a launch whose sequences have more blocks than the cache, summed over the sequences, even where
    they share blocks.
    """
    own = lens[rows]
    # Lengths are symbolic while a graph is traced. Replays check the actual lengths (see PackedLengths).
    if type(own[0]) is int and sum(own) // block_size + len(own) > blocks:
        first, taken = rows.start, 0
        for row, length in enumerate(own, rows.start):
            needed = -(-length // block_size)
            if taken + needed > blocks and row > first:
                yield slice(first, row)
                first, taken = row, 0
            taken += needed
        rows = slice(first, rows.stop)
    yield rows


@attrs.frozen
class PackedLengths:
    """A captured launch whose attention sums blocks over its sequences, shared or not.

    Attributes:
        blocks: the number of blocks in the cache.
        block_size: tokens per block.
    """

    blocks: int
    block_size: int

    def refusal(self, lens: list[int]) -> str | None:
        """Return why a replay does not support these lengths of keys; None if it does."""
        if sum(-(-length // self.block_size) for length in lens) > self.blocks:
            return (
                f"its attention was captured over {self.blocks} blocks, and the {len(lens)} sequences have more "
                "blocks, counting shared blocks once for each sequence"
            )
        return None


def updates_of(record: Any) -> dict[str, Update] | None:
    """Return the updates of a launch that torch_npu recorded, by key; None if the operation is unknown."""
    name = record.op_cache_entry.__name__
    known = (UPDATES if name not in UNCACHED or _reads_cache(record) else UNCACHED).get(name)
    if known is None or not name.endswith(".out"):
        return known
    return {key: update for key, update in known.items() if record.kwargs.get(key) is not None}


def _reads_cache(record: Any) -> bool:
    """Return whether a recorded launch of fused attention reads a paged cache."""
    return record.kwargs.get("block_table") is not None


def updates_queries(updates: Mapping[str, Update]) -> bool:
    """Return whether the updates of a launch include the lengths of its queries."""
    return any(queries in updates for queries, _ in FUSED.values())


def _packet(operation: Any) -> str:
    return str(operation.__name__).partition(".")[0]


def counts_blocks(operation: Any, record: Any) -> bool:
    """Return whether a captured launch is fused attention that sums blocks over its sequences, shared or not.

    It sums them where a sequence has more than one query: in the layout TND, and in BSH with several rows.
    """
    if _packet(operation) not in FUSED or not _reads_cache(record):
        return False
    layout = record.kwargs.get("input_layout", DEFAULT_LAYOUT)
    return bool(layout == "TND" or (layout == "BSH" and record.args[0].shape[1] > 1))


def packed_lengths(record: Any) -> PackedLengths:
    """Return the limit of a captured launch that sums blocks over its sequences."""
    return PackedLengths(record.args[1].shape[0], record.kwargs["block_size"])
