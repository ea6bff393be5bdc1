"""The mesh: how the ranks of a job are arranged in groups."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

import attrs
from torch import distributed

from hal.config.settings import ParallelConfig
from hal.device.group import SOLO, Group, forget_group, register_group
from hal.errors import CommunicationError, ConfigError

MISSING = "check that all ranks were started, and that they reach each other at MASTER_ADDR and MASTER_PORT"
"""The remedy of an error at the start of ranks."""
_numbers = itertools.count(1)
"""Numbers of meshes, for the names of their groups. Ranks make their meshes in the same order."""
_joined: list[Mesh] = []
"""The meshes that :func:`connect` made, until they are closed."""
_lock = threading.Lock()
_started: dict[Any, int] = {}
"""The default process group, if hal has started torch.distributed, and the number of meshes that use it."""
_starts = 0
"""How often hal has started torch.distributed in this process, for the names of keys in the store."""


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
    _made: list[Any] = attrs.field(factory=list, eq=False, repr=False, kw_only=True)

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
    def planned(cls, tensor: int, data: int = 1, *, experts: bool = False) -> Self:
        """Return the mesh of rank 0 of ranks that are not started, to split and trace a model without them.

        Collectives over its groups raise :class:`~hal.errors.CommunicationError`.

        Args:
            tensor: the number of ranks that split each layer.
            data: the number of ranks that hold the same part of the model.
            experts: whether all ranks share the experts.
        """
        number = next(_numbers)
        return cls(
            tensor=_planned(f"planned_tensor{number}", tensor),
            data=_planned(f"planned_data{number}", data),
            expert=_planned(f"planned_expert{number}", tensor * data if experts else 1),
        )

    def close(self) -> None:
        """Forget the groups, and destroy the process groups that :func:`connect` has made. An engine's stay.

        The last mesh that uses it also destroys the default process group, if :func:`connect` has started
        ``torch.distributed``.
        """
        for each in (self.tensor, self.data, self.expert, self.hosts):
            forget_group(each)
        if any(each is self for each in _joined):
            _joined[:] = [each for each in _joined if each is not self]
            for group in (self.tensor, self.data, self.expert, self.hosts):
                group.process_group = None  # Its threads end with the last reference to it.
            _destroy(self._made)


def _planned(name: str, size: int) -> Group:
    if size == 1:
        return SOLO
    made = Group(name, 0, size, planned=True)
    register_group(made)
    return made


def _registered(name: str, process_group: Any, timeout: float) -> Group:
    size = distributed.get_world_size(process_group)
    if size == 1:
        return SOLO
    made = Group(name, distributed.get_rank(process_group), size, process_group, timeout)
    register_group(made)
    return made


def is_rank() -> bool:
    """Return whether this process was started as a rank, by :func:`run_ranks` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched() -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Raises:
        ConfigError: the variables of a rank do not hold its numbers.
    """
    texts = os.environ["RANK"], os.environ["WORLD_SIZE"]
    rank, ranks = (int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1 for text in texts)
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"the variables RANK and WORLD_SIZE are {texts[0]!r:.40} and {texts[1]!r:.40}, not a rank and their number",
            "start the process with torchrun, which sets both for each rank, or unset them",
        )
    return rank, ranks


def joined(config: ParallelConfig, mesh: Mesh, name: str, distributed: str | None) -> Mesh:
    """Return the mesh that a configuration asks for: the present one if it fits, or that of ranks that join now.

    Args:
        config: the sizes of the mesh.
        mesh: the present one.
        name: the name of the driver, for errors.
        distributed: the driver's backend of ``torch.distributed``; None for none.

    Raises:
        ConfigError: the configuration does not fit the mesh or the driver, or as :func:`connect`.
        CommunicationError: as :func:`connect`.
    """
    if (config.tensor, config.data) in ((1, 1), (mesh.tensor.size, mesh.data.size)):
        if config.experts != "split" and mesh.expert.size != mesh.size:
            raise ConfigError(
                f"parallel.experts is {config.experts!r}, and the mesh has no group of all ranks",
                "open another backend; an engine passes the group of all ranks as expert= to hal.parallel.Mesh.of",
            )
        return mesh
    if mesh.size > 1:
        raise ConfigError(
            f"parallel asks for {config.tensor} x {config.data} ranks, and this backend works with "
            f"{mesh.tensor.size} x {mesh.data.size}",
            "open another backend",
        )
    if distributed is None:
        raise ConfigError(
            f"the backend {name} does not work with several devices", "leave parallel out of the configuration"
        )
    return connect(config, distributed)


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
    made = list[Any]()
    try:
        mesh = _connected(config, backend, made)
    except BaseException:
        _destroy(made)
        raise
    _joined.append(attrs.evolve(mesh, made=made))
    return _joined[-1]


@atexit.register
def _leave() -> None:
    """Close all meshes before Python ends. A thread of gloo that frees a tensor later would abort the process."""
    for each in list(_joined):
        each.close()


def _connected(config: ParallelConfig, backend: str, made: list[Any]) -> Mesh:
    """Return the mesh. Appends the process groups to destroy at its end to ``made``."""
    limit = timedelta(seconds=config.timeout)
    if not distributed.is_initialized():
        if is_rank():  # Each rank would wait for all.
            _check_size(launched()[1], config)
        try:
            with explained("join the other ranks", MISSING):
                _start(backend, limit)
        except ValueError as error:  # of torch, for a variable that is not set
            raise ConfigError(
                f"parallel asks for {config.size} ranks, and this process was not started as one of them: {error}",
                f"run it under `torchrun --nproc-per-node {config.size}`, or use `hal generate --tensor-parallel`",
            ) from None
    with _lock:
        if distributed.group.WORLD in _started:
            _started[distributed.group.WORLD] += 1
            made.append(distributed.group.WORLD)
    _check_size(distributed.get_world_size(), config)
    with explained("make the groups of the mesh", MISSING):
        rows = [[*range(first, first + config.tensor)] for first in range(0, config.size, config.tensor)]
        columns = [[*range(first, config.size, config.tensor)] for first in range(config.tensor)]
        tensor, data = _group_among(rows, limit, made), _group_among(columns, limit, made)
        expert = None if config.experts == "split" else distributed.group.WORLD
        hosts = None
        if data is not None and not carries_cpu_tensors(data):
            hosts, _ = distributed.new_subgroups_by_enumeration(columns, timeout=limit, backend="gloo")
            made.append(hosts)
        return Mesh.of(tensor=tensor, data=data, expert=expert, hosts=hosts, timeout=config.timeout)


def _check_size(ranks: int, config: ParallelConfig) -> None:
    if ranks != config.size:
        raise ConfigError(
            f"parallel asks for {config.data} x {config.tensor} = {config.size} ranks, and {ranks} were started",
            f"start {config.size} ranks, or change parallel.tensor and parallel.data",
        )


def _destroy(made: list[Any]) -> None:
    """Destroy process groups, the last one first, but the default one only if no other mesh uses it."""
    while made:
        each = made.pop()
        with _lock:
            if each in _started:
                _started[each] -= 1
                if _started[each]:
                    continue
                del _started[each]
        with suppress(ValueError):  # The program has destroyed the default group, and with it all others.
            distributed.destroy_process_group(each)


def _group_among(lists: list[list[int]], limit: timedelta, made: list[Any]) -> Any:
    """Return the process group of this rank's list of ranks; None if it is alone. All ranks of the job call it.

    A new group is appended to ``made``.

    A device mesh of torch would give its groups torch's default time limit.
    """
    if len(lists[0]) == 1:
        return None
    if len(lists) == 1:
        return distributed.group.WORLD
    found, _ = distributed.new_subgroups_by_enumeration(lists, timeout=limit)
    made.append(found)
    return found


def carries_cpu_tensors(process_group: Any) -> bool:
    """Return whether a process group's collectives take CPU tensors."""
    return "cpu" in str(distributed.get_backend_config(process_group))


def _start(backend: str, limit: timedelta) -> None:
    """Initialize torch.distributed as soon as all ranks are there. Not every backend would notice a missing one."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    global _starts
    store, rank, ranks = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    store = PrefixStore(f"hal/{_starts}", store)  # An earlier start has left its keys.
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{each}" for each in range(ranks)], limit)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    _starts += 1
    with _lock:
        _started.clear()
        _started[distributed.group.WORLD] = 0


@contextmanager
def explained(what: str, remedy: str = "look for the first error of another rank") -> Iterator[None]:
    """Raise CommunicationError in place of torch's error inside the block, which does ``what``."""
    try:
        yield
    except (RuntimeError, distributed.DistError) as error:
        raise CommunicationError(f"this rank could not {what}: {str(error).partition(chr(10))[0]}", remedy) from error
