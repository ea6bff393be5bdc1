"""Values that the hosts of ranks exchange, such as the shapes of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from hal.device.group import Group
from hal.errors import ConfigError
from hal.parallel.mesh import carries_cpu_tensors, explained

Value = TypeVar("Value")
LATE = (
    "look for the first error of another rank; every rank calls Runner.step or Runner.idle until all are done, within "
    "parallel.timeout of the others"
)


def check_host_group(group: Group) -> None:
    """Raise ConfigError unless the group's collectives take CPU tensors."""
    if group.size > 1 and not carries_cpu_tensors(group.process_group):
        raise ConfigError(
            "the hosts of the ranks of `data` exchange values, and their process group does not carry CPU tensors",
            "pass Mesh.of a further group as `hosts`, with the same ranks: torch.distributed.new_group(backend='gloo')",
        )


def gather_numbers(group: Group, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, in the order of ranks.

    Args:
        group: a group whose collectives take CPU tensors.
        numbers: this rank's, as many as on the other ranks.

    Raises:
        CommunicationError: another rank has ended, or does not come within the group's timeout.
    """
    given = torch.tensor(numbers, dtype=torch.int64)
    gathered = [torch.empty_like(given) for _ in range(group.size)]
    with explained("exchange values with the other data ranks", LATE):
        distributed.all_gather(gathered, given, group=group.process_group)
    return [each.tolist() for each in gathered]


def gather_values(group: Group, value: Value) -> list[Value]:
    """Return the values of every rank, which can be pickled, in the order of ranks; see :func:`gather_numbers`."""
    gathered: list[Any] = [None] * group.size
    with explained("exchange values with the other data ranks", LATE):
        distributed.all_gather_object(gathered, value, group=group.process_group)
    return gathered
