"""Parts of a call, and kernels that call another kernel once for each row.

The rows of a row-wise operation are independent. Of an operation on sequences, a part is some consecutive tokens of one
sequence, with the tokens before them cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.device.capture_checks import is_capturing
from hal.errors import CaptureError, OperationError
from hal.ops.declaration.axes import LEADING, SEQUENCES, TOKENS
from hal.ops.declaration.declaration_checks import TWIN
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel

STARTS, LENGTHS = "query_start_loc", "kv_lens"
ASSIGNMENTS, COUNTS = "assignments", "counts"
"""The axis of rows that are sorted by expert, and the argument that gives the rows of each."""
Part = tuple[int, int, int]
"""A sequence, its first new token that the part has, and the end."""


def row_by_row(operation: Operation, kernel: Kernel) -> Kernel | None:
    """Return a kernel that calls another one once for each row, so that a row's result depends on no other row.

    The rows of one call have the shapes of all others, whatever the batch. Lengths are read on the host, which no
    capture permits.

    Returns:
        None if a row depends on others.
    """
    if operation.name == "expert_permute":
        return kernel  # It moves rows, and computes nothing.
    if operation.name == "expert_unpermute":
        return _each_combination(kernel)
    if by_expert(operation) and not operation.fused:
        return _each_assignment(operation, kernel)
    of_sequences = STARTS in operation.signature.parameters
    if of_sequences and operation.mutates:
        return _each_update(operation, kernel)
    if operation.rowwise is None or operation.collective:
        return None
    return (_each_token if of_sequences else _each_row)(operation, kernel)


def by_expert(operation: Operation) -> bool:
    """Return whether an operation's rows are sorted by expert."""
    return any(ASSIGNMENTS in shape.names for _, shape in operation.constraints.shapes)


def _each_row(operation: Operation, kernel: Kernel) -> Kernel:
    names = tuple(operation.signature.parameters)

    def run(*given: Any, out: Any = None) -> Any:
        arguments = dict(zip(names, given, strict=True))
        leading = leading_shape(operation, arguments)
        flat = flattened(operation, arguments)
        count = row_count(operation, flat)
        if count == 0:
            return _written(kernel(*given), out)
        rows = [kernel(*_row(operation, flat, row).values()) for row in range(count)]
        return _written(_joined(operation, rows, leading), out)

    return run


def _each_assignment(operation: Operation, kernel: Kernel) -> Kernel:
    """Return a kernel that calls another one for each row that is sorted by expert, whose expert the counts say."""
    names = tuple(operation.signature.parameters)

    def run(*given: Any, out: Any = None) -> Any:
        arguments = dict(zip(names, given, strict=True))
        counts: Tensor = arguments[COUNTS]
        of_rows = _with_dims(operation, arguments, ASSIGNMENTS)
        rows = next(value.shape[dim] for _, value, dim in of_rows)
        if rows == 0:
            return _written(kernel(*given), out)
        ends, row = counts.cumsum(0), torch.arange(rows, device=counts.device)[:, None]
        owned = ((row >= ends - counts) & (row < ends)).to(counts.dtype)
        found = []
        for place in range(rows):
            own = {name: _alone(value, dim, place) for name, value, dim in of_rows}
            found.append(kernel(*{**arguments, **own, COUNTS: owned[place].clone()}.values()))
        return _written(torch.cat(found), out)

    return run


def _each_combination(kernel: Kernel) -> Kernel:
    """Return a kernel of ``expert_unpermute`` that calls another one for each token."""

    def run(rows: Tensor, positions: Tensor, weights: Tensor, *, out: Any = None) -> Any:
        tokens, top_k = weights.shape
        if tokens == 0:
            return _written(kernel(rows, positions, weights), out)
        taken = rows.index_select(0, positions).unflatten(0, weights.shape)
        own = torch.arange(top_k, device=positions.device, dtype=positions.dtype)
        found = [kernel(taken[token].clone(), own, _alone(weights, 0, token)) for token in range(tokens)]
        return _written(torch.cat(found), out)

    return run


def _each_update(operation: Operation, kernel: Kernel) -> Kernel:
    """Return a kernel that calls another one, which updates a state of each sequence, for one token after the other.

    The state after a token that is not kept is written where the last one will be.
    """
    names = tuple(operation.signature.parameters)

    def run(*given: Any, out: Any = None) -> Any:
        arguments = dict(zip(names, given, strict=True))
        _refuse_capture(operation, given[0])
        read, written, rows = arguments.get("read_slots"), arguments.get("write_slots"), list[Tensor]()
        if written is None and read is not None:
            written = read[:, None]
        slot = torch.empty(0)
        for sequence, (start, end) in enumerate(pairwise(on_host(arguments, STARTS))):
            for at in range(end - start):
                own = with_parts(operation, arguments, [(sequence, at, at + 1)])[0]
                if written is not None:
                    kept = max(written.shape[1] - (end - start - at), -1)
                    own["read_slots"] = own["read_slots"] if at == 0 else slot.view(1)
                    own["write_slots"] = slot = written[sequence, kept].view(1, 1)
                rows.append(kernel(*own.values()))
        if not rows:
            return _written(kernel(*given), out)
        rows += [torch.zeros_like(rows[0])] * (len(given[0]) - len(rows))  # of padding
        return _written(torch.cat(rows), out)

    return run


def _refuse_capture(operation: Operation, given: Tensor) -> None:
    if is_capturing() and not given.is_cpu:  # A tape of the CPU calls a kernel again in each replay.
        raise CaptureError(
            f"numerics.invariant calls {operation.name} for each token, by lengths that a capture cannot update",
            "use the compiler eager, or piecewise with its default splitting_ops",
        )


def _each_token(operation: Operation, kernel: Kernel) -> Kernel:
    names = tuple(operation.signature.parameters)

    def run(*given: Any, out: Any = None) -> Any:
        arguments = dict(zip(names, given, strict=True))
        if not getattr(given[-1], "causal", True):
            raise OperationError(
                f"{operation.name} is not causal, so that its tokens cannot be computed one at a time",
                "set numerics.invariant to false for this model",
            )
        _refuse_capture(operation, given[0])
        starts: list[int] = on_host(arguments, STARTS)
        parts = [(s, at, at + 1) for s, (start, end) in enumerate(pairwise(starts)) for at in range(end - start)]
        rows = [kernel(*with_parts(operation, arguments, [part])[0].values()) for part in parts]
        tokens = row_count(operation, arguments)
        if not rows or len(rows) < tokens:  # of padding, and of none
            rows.append(kernel(*_without_sequences(operation, arguments, len(rows)).values()))
        return _written(_joined(operation, rows, None), out)

    return run


def _written(result: Any, out: Any) -> Any:
    """Return a result, written to the tensors that a replay gives, if it gives some."""
    if out is None:
        return result
    for to, value in zip(tree_leaves(out), tree_leaves(result), strict=True):
        to.copy_(value)
    return out


def _without_sequences(operation: Operation, arguments: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Return a call with the tokens from ``first`` on, past the last sequence."""
    found = with_rows(operation, arguments, torch.arange(first, row_count(operation, arguments)))
    for name, value in arguments.items():
        if name.removesuffix(TWIN) in (STARTS, LENGTHS):
            found[name] = torch.zeros_like(value)
    return found


def _joined(operation: Operation, rows: Sequence[Any], leading: torch.Size | None) -> Any:
    """Return the results of rows as those of one call."""
    if rows[0] is None:
        return None
    several = isinstance(rows[0], tuple)
    found = []
    for place, each in enumerate(zip(*rows, strict=True) if several else [rows]):
        shape = operation.constraints.results[place]
        dim = shape.dim(operation.rowwise or "", each[0].dim())
        whole = torch.cat(list(each), 0 if dim is None else dim)
        found.append(whole if leading is None else whole.unflatten(0, leading))
    return tuple(found) if several else found[0]


def leading_shape(operation: Operation, arguments: Mapping[str, Any]) -> torch.Size | None:
    """Return the sizes of the axes that ``...`` represents, if there are several; else None."""
    if operation.rowwise != LEADING:
        return None
    for name, value in arguments.items():
        shape = operation.constraints.shape(name)
        if isinstance(value, Tensor) and shape is not None and shape.leading is not None:
            count = value.dim() - len(shape.axes)
            return value.shape[:count] if count > 1 else None
    return None


def flattened(operation: Operation, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the axes that ``...`` represents as one."""
    if leading_shape(operation, arguments) is None:
        return dict(arguments)
    found = {}
    for name, value in arguments.items():
        shape = operation.constraints.shape(name)
        leads = isinstance(value, Tensor) and shape is not None and shape.leading is not None
        found[name] = value.flatten(0, value.dim() - len(shape.axes) - 1) if leads and shape is not None else value
    return found


def row_count(operation: Operation, arguments: Mapping[str, Any]) -> int:
    """Return the number of rows of a call."""
    sizes = (value.shape[dim] for _, value, dim in _with_dims(operation, arguments, operation.rowwise or TOKENS))
    return next(sizes, 1)


def _with_dims(operation: Operation, arguments: Mapping[str, Any], axis: str) -> list[tuple[str, Tensor, int]]:
    found = []
    for name, value in arguments.items():
        shape = operation.constraints.shape(name)
        if isinstance(value, Tensor) and shape is not None:
            dim = shape.dim(axis, value.dim())
            if dim is not None:
                found.append((name, value, dim))
    return found


def with_rows(operation: Operation, arguments: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """Return the arguments of a call with some rows, by their numbers, as new memory."""
    found = dict(arguments)
    for name, value, dim in _with_dims(operation, arguments, operation.rowwise or TOKENS):
        found[name] = value.index_select(dim, rows.to(value.device))
    return found


def _row(operation: Operation, arguments: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the arguments of a call with one row, as :func:`with_rows`, without indices that a capture would copy."""
    found = dict(arguments)
    for name, value, dim in _with_dims(operation, arguments, operation.rowwise or TOKENS):
        found[name] = _alone(value, dim, row)
    return found


def _alone(value: Tensor, dim: int, row: int) -> Tensor:
    return value.narrow(dim, row, 1).clone(memory_format=torch.contiguous_format)


def on_host(arguments: Mapping[str, Any], name: str) -> list[int]:
    """Return the values of a step's argument, of its copy on the host if there is one."""
    values = arguments.get(name + TWIN)
    found: list[int] = (arguments[name] if values is None else values).tolist()
    return found


def with_parts(
    operation: Operation, arguments: Mapping[str, Any], parts: Sequence[Part]
) -> tuple[dict[str, Any], list[int]]:
    """Return the arguments of a call with some tokens of some sequences, and the numbers of these tokens.

    A sequence's block table ends with the block of its last token.
    """
    starts: list[int] = on_host(arguments, STARTS)
    tokens = [starts[sequence] + at for sequence, first, end in parts for at in range(first, end)]
    found = with_rows(operation, arguments, torch.tensor(tokens, dtype=torch.int64))
    chosen = torch.tensor([sequence for sequence, _, _ in parts])
    for name, value, dim in _with_dims(operation, arguments, SEQUENCES):
        found[name] = value.index_select(dim, chosen.to(value.device))
    counts = torch.tensor([0, *(end - first for _, first, end in parts)]).cumsum(0)
    for name, value in arguments.items():
        if name.removesuffix(TWIN) == STARTS:
            found[name] = counts.to(value)
        elif name.removesuffix(TWIN) == LENGTHS:
            later = torch.tensor([starts[sequence + 1] - starts[sequence] - end for sequence, _, end in parts])
            found[name] = found[name] - later.to(value)
    if "block_table" in found and LENGTHS in found and len(parts) == 1:
        size = max((v.shape[d] for _, v, d in _with_dims(operation, arguments, "block_size")), default=0)
        if size:
            columns = max(1, -(-on_host(found, LENGTHS)[0] // size))
            found["block_table"] = found["block_table"][:, :columns].contiguous()
    return found, tokens
