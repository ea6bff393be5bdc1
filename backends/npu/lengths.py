"""The lengths that attention reads on the host: limits of a launch, records of a capture, updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hal.device.host_values import HostValues
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel

Update = Callable[[Mapping[str, Tensor]], Any]

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


@attrs.frozen
class HostCall:
    """A captured call of an operation that reads host values.

    Attributes:
        operation: the operation's name.
        recorded: the number of updatable launches that torch_npu recorded for the call; normally 1.
        updates: whether the kernel's launches need updates. If not, it reads lengths on the device.
        fixes: whether replays need the capture's numbers of queries.
        names: the host values' names in replays, by the operation's arguments.
    """

    operation: str
    recorded: int
    updates: bool
    fixes: bool
    names: Mapping[str, str]


class CaptureWatch(TorchDispatchMode):
    """A dispatch mode that forwards calls to torch_npu's mode of the current graph, and records host values.

    torch_npu enters one mode for each graph. This mode stays active across several graphs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode: Any = None
        self._host_values: HostValues | None = None
        self._calls: list[HostCall] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as torch_npu's mode does."""
        return True

    def start(self, mode: Any, host_values: HostValues) -> None:
        """Forward calls to the mode of a graph, and record its host values."""
        self._mode, self._host_values, self._calls = mode, host_values, []

    def stop(self) -> list[HostCall]:
        """Stop forwarding and recording; return the recorded calls with host values."""
        self._mode = self._host_values = None
        calls, self._calls = self._calls, []
        return calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs) if self._mode is None else self._mode.__torch_dispatch__(func, types, args, kwargs)

    def wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        """Return a kernel that records each call with host values and the launches torch_npu recorded for it."""
        if not operation.host:
            return kernel
        chosen: Callable[..., Kernel] = getattr(kernel, "chosen", lambda *args: kernel)

        def recording(*args: Any, **kwargs: Any) -> Any:
            if self._mode is None or self._host_values is None:
                return kernel(*args, **kwargs)
            records = self._mode.graph_dispatch_records
            arguments, before, outer = operation.arguments(args, kwargs), len(records), len(self._calls)
            names = {name: self._host_values.record(name, arguments[name], operation.name) for name in operation.host}
            result = kernel(*args, **kwargs)
            within = self._calls[outer:]
            own = len(records) - before - sum(each.recorded for each in within)
            if within and not own:  # A fused operation without a kernel calls others, which have the host values too.
                return result
            ran = chosen(*arguments.values())
            if choose := getattr(ran, "chosen", None):
                ran = choose(*arguments.values())
            updates = getattr(ran, "updates", True)
            fixes = getattr(ran, "fixes_queries", not updates)
            self._calls.append(HostCall(operation.name, own, updates, fixes, names))
            return result

        return recording
