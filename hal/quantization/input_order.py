"""The order of the inputs of weights whose groups were chosen by activations (act-order)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.errors import CheckpointError
from hal.nn import ValueCheck, Weight
from hal.nn.linear import EXPERTS, IN
from hal.quantization.integer_arithmetic import AGAIN
from hal.quantization.stored_layer import StoredLayer

ROWS = 64
"""The rows of a weight whose columns are ordered at once."""
GROUPS = "input_groups"
"""The group of each input, of a weight that is dequantized."""
_CONSECUTIVE = "use a checkpoint that was quantized with desc_act false, or with actorder null or weight"


def group_index(stored: StoredLayer, name: str, **options: Any) -> Weight:
    """Return the declaration of the group of each input of a layer.

    Args:
        stored: the layer.
        name: the tensor's name in the checkpoint.
        options: further attributes of :class:`hal.nn.Weight`.
    """
    return stored.layer.declare(
        name,
        IN,
        every_rank=not stored.any_groups and stored.layer.shard != EXPERTS,
        optional=not stored.form.ordered,
        checks=_checks(stored),
        stored=(torch.int32, torch.int64),
        **options,
    )


def _checks(stored: StoredLayer) -> tuple[ValueCheck, ...]:
    size, width = stored.group_size, stored.layer.in_features
    count = -(-width // size)

    def consecutive() -> Tensor:
        return torch.arange(width, device="cpu") // size

    found = [
        ValueCheck(
            lambda values: bool(((values >= 0) & (values < count)).all()),
            f"has groups other than 0 to {count - 1}",
            AGAIN,
        ),
    ]
    if stored.any_groups:
        return tuple(found)
    found.append(
        ValueCheck(
            lambda values: torch.equal(values.long().bincount(minlength=count), consecutive().bincount()),
            f"has groups of other sizes than {size}",
            AGAIN,
        )
    )
    if not stored.form.ordered:
        found.append(
            ValueCheck(
                lambda values: torch.equal(values.long(), consecutive()),
                "orders the inputs of a layer whose description says otherwise (desc_act) by activations (act-order)",
                _CONSECUTIVE,
            )
        )
    return tuple(found)


def input_order(stored: StoredLayer, key: str, name: str) -> dict[str, Tensor | None]:
    """Return the order of the inputs of a layer, or their groups, where the weight is dequantized.

    Args:
        stored: the layer. The groups have been checked, as :func:`group_index` declares.
        key: the key of the group of each input, for each part, in ``stored.tensors``.
        name: the tensor's name in the checkpoint.

    Returns:
        ``input_order``: the inputs, those of the first group first, of experts with a first dimension more; this rank's
            part. None if they have that order.
        ``input_groups``: the group of each of this rank's inputs, of experts with a first dimension more; absent where
            the weight is not dequantized.

    Raises:
        CheckpointError: parts have different orders.
    """
    index = stored.tensors.get(key)
    if not stored.form.ordered:
        return {}
    found: dict[str, Tensor | None] = {"input_order": None}
    if index is None:
        return found
    rows, parts = index.long().flatten(0, -2), index.shape[-2]
    for row, groups in enumerate(rows):
        if not torch.equal(groups, rows[row - row % parts]):
            names = stored.names[stored.first_expert * parts :]
            raise CheckpointError(
                f"{names[row]}.{name} orders the inputs by activations otherwise than {names[row - row % parts]}, with "
                "which it is merged",
                _CONSECUTIVE,
            )
    if stored.any_groups:
        return {**found, GROUPS: rows[::parts].reshape(*index.shape[:-2], -1)}
    orders = rows[::parts].argsort(dim=-1, stable=True)
    if torch.equal(orders, torch.arange(orders.shape[-1]).expand_as(orders)):
        return found
    return {**found, "input_order": orders if stored.layer.num_experts is not None else orders[0]}


def ordered(stored: StoredLayer, weight: Tensor, inputs: dict[str, Tensor | None]) -> Tensor:
    """Return a weight with its columns in an order of the inputs, in the memory of the given one.

    Args:
        stored: the layer.
        weight: int8 or int4 numbers, as :func:`hal.ops.linear` takes them, of all ranks if they gather inputs.
        inputs: the result of :func:`input_order`, whose order becomes that of this rank's columns.
    """
    order, (start, end) = inputs.get("input_order"), stored.inputs
    if order is not None:
        for each, own in zip(weight, order, strict=True) if order.dim() > 1 else ((weight, order),):
            _order(each, own)
    if not stored.gathers:
        return weight
    if order is not None:
        inputs["input_order"] = order[..., start:end].clone()
    in_one = stored.form.kind.count
    return weight[..., start // in_one : end // in_one].contiguous()


def _order(weight: Tensor, order: Tensor) -> None:
    packed, first, second = weight.dtype is torch.int32, order[::2], order[1::2]
    for rows in (weight.view(torch.uint8) if packed else weight).split(ROWS):
        columns = rows.t().contiguous()  # whole rows are copied much faster than single numbers
        if packed:
            numbers = torch.stack((columns & 15, columns >> 4), 1).flatten(0, 1)
            rows.copy_((numbers.index_select(0, first) | numbers.index_select(0, second) << 4).t())
        else:
            rows.copy_(columns.index_select(0, order).t())
