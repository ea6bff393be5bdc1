"""Runs a function in several processes that are ranks of ``torch.distributed`` on this machine.

The processes are forked from a server that has imported torch, hal and torch's compilers, so that a rank starts in
milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import TCPStore

from hal.parallel.launch import variables_of_rank

CONTEXT = multiprocessing.get_context("forkserver")
# What a rank would import to load a model, capture and compile its steps, and generate: seconds of a core.
PRELOADED = [
    "hal.backends.cpu.native.shared_memory",
    "hal.backends.cpu.tape",
    "hal.checkpoint.loading",
    "hal.drivers.registry",
    "hal.execution.capture.full_graph",
    "hal.execution.inductor",
    "hal.execution.runner",
    "hal.generation.generate",
    "hal.models",
    "hal.parallel.host_values",
    "networkx",
    "stevedore.enabled",
]
PRELOADED_FOR_NPUS = [
    "torch_npu",
    "torch_npu.npu.npugraph_ex",
    "hal.backends.npu.driver",
    "hal.backends.npu.kernels",
    "hal.backends.npu.npugraph_ex.compiler",
]
"""No module of these opens a device, which a forked process could not use."""
CONTEXT.set_forkserver_preload(PRELOADED)

LOST = "lost"
"""The result of a rank that ended without one, such as a killed one."""


def run(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` on each rank, and return the results, or exceptions, by rank.

    Args:
        function: can be pickled.
        ranks: the number of ranks.
        arguments: the function's further arguments.
        timeout: seconds.
        environ: the ranks' environment, in which ``hal.open`` connects them; None to connect them by gloo before.

    Raises:
        TimeoutError: a rank did not end in time. It is killed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        CONTEXT.Process(target=_rank, args=(function, rank, ranks, store.port, sender, arguments, environ), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    until = time.monotonic() + timeout
    results = [_received(receiver, until) for receiver, _ in pipes]
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    if stuck:
        raise TimeoutError(f"ranks {stuck} of {ranks} did not end within {timeout} s; the results are {results}")
    return results


def succeeded(results: list[Any]) -> list[Any]:
    """Return the results of all ranks; raise the exception of one that failed."""
    for each in results:
        if isinstance(each, BaseException):
            raise each
    assert LOST not in results
    return results


def _received(receiver: Connection, until: float) -> Any:
    try:
        return receiver.recv() if receiver.poll(max(0.0, until - time.monotonic())) else LOST
    except EOFError:
        return LOST


def _rank(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    port: int,
    sender: Connection,
    arguments: tuple[Any, ...],
    environ: Mapping[str, str] | None,
) -> None:
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
        os.environ.update(variables_of_rank(rank, ranks, port))
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = TCPStore("127.0.0.1", port, is_master=False)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    try:
        result = function(rank, *arguments)
    except BaseException as error:
        result = error
    sender.send(result)
    os._exit(0)  # Without the wait of torch.distributed for ranks that a test has killed.
