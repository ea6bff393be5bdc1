"""The lengths that attention reads on the host: what a launch refuses of them, and what a replay gives it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import HostValueError

HostValues = Mapping[str, Tensor]
Update = Callable[[HostValues], Any]

FUSED, DEFAULT_LAYOUT = "npu_fused_infer_attention_score", "BSH"
"""The operation, and its layout where a record names none: arguments that have their defaults are not recorded."""
UPDATES: dict[str, dict[str, Update]] = {
    f"{FUSED}.out": {
        "actual_seq_lengths": lambda values: values["query_start_loc_host"][1:].tolist(),
        "actual_seq_lengths_kv": lambda values: values["kv_lens_host"].tolist(),
    },
    # A copy: torch_npu's queue may read it after the call returned.
    "_npu_paged_attention.default": {"context_lens": lambda values: values["kv_lens_host"].clone()},
}
"""By the operation that torch_npu records in a capture: the keys of its update, each with how it is made."""


def fitting(rows: slice, lens: list[int], block_size: int, blocks: int) -> Iterator[slice]:
    """Runs of these sequences, each for one launch of a prefill: their blocks, counted for each, are at most all.

    Attention refuses more, though sequences may share blocks.
    """
    own = lens[rows]
    # Symbols, while a graph is made, are not looked at: replays look at the lengths (see PackedLengths).
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
    """The lengths of keys for a captured launch that counts blocks, if they fit into its cache.

    Attributes:
        blocks: of the cache.
        block_size: tokens in each.
    """

    blocks: int
    block_size: int

    def __call__(self, values: HostValues) -> list[int]:
        """What its update takes.

        Raises:
            HostValueError: the blocks of the sequences, counted for each, are more than the cache has.
        """
        if (reason := self.refusal(values)) is not None:
            raise HostValueError(
                f"a replay was asked for although {reason}", "ask Graph.refusal() before, and run the batch eagerly"
            )
        lens: list[int] = values["kv_lens_host"].tolist()
        return lens

    def refusal(self, values: Mapping[str, Any]) -> str | None:
        """Return why a replay cannot take these lengths; None if it can."""
        lens: list[int] = torch.as_tensor(values["kv_lens_host"]).tolist()
        if len(list(fitting(slice(0, len(lens)), lens, self.block_size, self.blocks))) > 1:
            return (
                f"its attention was captured over {self.blocks} blocks, and the {len(lens)} sequences, which share "
                "some, have more if those are counted for each"
            )
        return None


def updates_of(record: Any) -> dict[str, Update] | None:
    """What an update gives a launch that torch_npu recorded: by the keys that it was captured with. None if unknown."""
    name = record.op_cache_entry.__name__
    known = UPDATES.get(name)
    if known is None or not name.endswith(".out"):
        return known
    found = {key: update for key, update in known.items() if record.kwargs.get(key) is not None}
    if counts_blocks(record.op_cache_entry, record):
        found["actual_seq_lengths_kv"] = packed_lengths(record)
    return found


def counts_blocks(operation: Any, record: Any) -> bool:
    """Whether a captured launch is one of fused attention that counts the blocks of each sequence, shared or not.

    It does where a sequence has more than one query: in the layout TND, and in BSH with several rows.
    """
    if operation.__name__.partition(".")[0] != FUSED:
        return False
    layout = record.kwargs.get("input_layout", DEFAULT_LAYOUT)
    return bool(layout == "TND" or (layout == "BSH" and record.args[0].shape[1] > 1))


def packed_lengths(record: Any) -> PackedLengths:
    """Of a captured launch that counts blocks, as its record names its arguments."""
    return PackedLengths(record.args[1].shape[0], record.kwargs["block_size"])
