"""The mesh: how the ranks of a job are arranged in groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import attrs
from torch import distributed

from hal.config.settings import ParallelConfig
from hal.device.group import SOLO, Group, forget_group, register_group
from hal.errors import CommunicationError, ConfigError

_numbers = itertools.count(1)
"""Numbers of meshes, for the names of their groups. Ranks make their meshes in the same order."""


@attrs.frozen
class Mesh:
    """The groups that this rank is in, by what they share.

    Attributes:
        tensor: the ranks that split each layer.
        data: the ranks that hold the same part of the model, and take different batches.
        expert: all ranks, if they share the experts; otherwise this rank alone. It may be one of the other groups.
        hosts: the ranks of ``data``, over a process group that carries CPU tensors, by which their hosts agree on
            steps, or tell that they still work. Operations do not use it.
    """

    tensor: Group = SOLO
    data: Group = SOLO
    expert: Group = SOLO
    hosts: Group = SOLO

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor.size * self.data.size

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints."""
        return self.tensor.rank == self.data.rank == 0

    @classmethod
    def of(
        cls,
        *,
        tensor: Any = None,
        data: Any = None,
        expert: Any = None,
        hosts: Any = None,
        timeout: float = ParallelConfig().timeout,
    ) -> Self:
        """Return the mesh of an engine's process groups of ``torch.distributed``; None for this rank alone.

        The groups stay the engine's, and end with it. :meth:`close` makes their names free.

        Args:
            tensor: the group of the ranks that split each layer.
            data: the group of the ranks that hold the same part of the model.
            expert: the group of all ranks, for ``parallel.experts`` other than ``split``. Consecutive ranks of it are
                those of a tensor group.
            hosts: a group of the ranks of ``data`` that carries CPU tensors, such as one of gloo; None if ``data``
                does.
            timeout: see :class:`Group`.
        """
        number, made = next(_numbers), list[tuple[Any, Group]]()
        given = {"tensor": tensor, "data": data, "expert": expert, "hosts": data if hosts is None else hosts}
        for name, each in given.items():
            known = next((group for other, group in made if other is each), None)
            made.append((each, SOLO if each is None else known or _registered(f"{name}{number}", each, timeout)))
        return cls(*(group for _, group in made))

    @classmethod
    def planned(cls, tensor: int) -> Self:
        """Return the mesh of rank 0 of ``tensor`` ranks that are not started, to split and trace a model without them.

        Collectives over its groups raise :class:`~hal.errors.CommunicationError`.
        """
        if tensor == 1:
            return cls()
        made = Group(f"planned{next(_numbers)}", 0, tensor, planned=True)
        register_group(made)
        return cls(tensor=made)

    def close(self) -> None:
        """Forget the groups. The process groups themselves stay."""
        for each in (self.tensor, self.data, self.expert, self.hosts):
            forget_group(each)


def _registered(name: str, process_group: Any, timeout: float) -> Group:
    size = distributed.get_world_size(process_group)
    if size == 1:
        return SOLO
    made = Group(name, distributed.get_rank(process_group), size, process_group, timeout)
    register_group(made)
    return made


def connect(config: ParallelConfig, backend: str) -> Mesh:
    """Join the ranks that ``torchrun``, ``hal`` or an engine started, and arrange them in a mesh.

    Ranks of one tensor group are consecutive, so that they are on one machine if the machine holds as many.

    Args:
        config: the sizes of the mesh.
        backend: the backend of ``torch.distributed``, such as ``gloo``.

    Raises:
        ConfigError: the number of ranks is not the product of the sizes, or no ranks were started.
        CommunicationError: the ranks do not reach each other.
    """
    if config.size == 1:
        return Mesh()
    limit = timedelta(seconds=config.timeout)
    if not distributed.is_initialized():
        try:
            with _explained("join the other ranks"):
                _start(backend, limit)
        except ValueError as error:  # of torch, for a variable that is not set
            raise ConfigError(
                f"parallel asks for {config.size} ranks, and this process was not started as one of them: {error}",
                f"run it under `torchrun --nproc-per-node {config.size}`, or use `hal generate --tensor-parallel`",
            ) from None
    ranks = distributed.get_world_size()
    if ranks != config.size:
        raise ConfigError(
            f"parallel asks for {config.data} x {config.tensor} = {config.size} ranks, and {ranks} were started",
            f"start {config.size} ranks, or change parallel.tensor and parallel.data",
        )
    with _explained("make the groups of the mesh"):
        rows = [[*range(first, first + config.tensor)] for first in range(0, config.size, config.tensor)]
        columns = [[*range(first, config.size, config.tensor)] for first in range(config.tensor)]
        tensor, data = _group_among(rows, limit), _group_among(columns, limit)
        expert = None if config.experts == "split" else distributed.group.WORLD
        hosts = None
        if data is not None and not carries_cpu_tensors(data):
            hosts, _ = distributed.new_subgroups_by_enumeration(columns, timeout=limit, backend="gloo")
        return Mesh.of(tensor=tensor, data=data, expert=expert, hosts=hosts, timeout=config.timeout)


def _group_among(lists: list[list[int]], limit: timedelta) -> Any:
    """Return the process group of this rank's list of ranks; None if it is alone. All ranks of the job call it.

    A device mesh of torch would give its groups torch's default time limit.
    """
    if len(lists[0]) == 1:
        return None
    if len(lists) == 1:
        return distributed.group.WORLD
    found, _ = distributed.new_subgroups_by_enumeration(lists, timeout=limit)
    return found


def carries_cpu_tensors(process_group: Any) -> bool:
    """Return whether a process group's collectives take CPU tensors."""
    return "cpu" in str(distributed.get_backend_config(process_group))


def _start(backend: str, limit: timedelta) -> None:
    """Initialize torch.distributed as soon as all ranks are there. Not every backend would notice a missing one."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, ranks = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    store.set(f"hal/joined/{rank}", "")
    store.wait([f"hal/joined/{each}" for each in range(ranks)], limit)
    mine = PrefixStore("hal", store)
    distributed.init_process_group(backend, store=mine, rank=rank, world_size=ranks, timeout=limit)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, distributed.DistError) as error:
        raise CommunicationError(
            f"this rank could not {what}: {str(error).partition(chr(10))[0]}",
            "check that all ranks were started, and that they reach each other at MASTER_ADDR and MASTER_PORT",
        ) from error
