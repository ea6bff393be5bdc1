"""The ranks that vLLM starts for tensor and data parallelism, among which hal divides the model."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import attrs
from vllm.distributed import destroy_distributed_environment, init_distributed_environment

import hal


def choose_device(parallel: Any, local_rank: int) -> None:
    """Set ``LOCAL_RANK``, from which hal's drivers take the device, to the number of this rank's device.

    Args:
        parallel: vLLM's parallel configuration.
        local_rank: the rank's number among those of its replica on this machine.
    """
    assigned = parallel.assigned_physical_gpu_ids
    if assigned is not None:
        os.environ["LOCAL_RANK"] = str(assigned[local_rank])
    elif parallel.world_size > 1:
        os.environ["LOCAL_RANK"] = str(local_rank)


def join_ranks(backend: hal.Backend, parallel: Any, rank: int, local_rank: int, init_method: str) -> None:
    """Join the other ranks.

    Args:
        backend: an open backend without ranks.
        parallel: vLLM's parallel configuration.
        rank: the rank's number in its replica.
        local_rank: the rank's number among those of its replica on this machine.
        init_method: where the ranks of the replica meet.

    Raises:
        ConfigError: the backend does not work with several devices.
        CommunicationError: the ranks do not reach each other.
    """
    tensor, data = parallel.world_size, parallel.data_parallel_size  # 1 for a dense model, whose replicas are alone
    if tensor * data == 1:
        return
    config = backend.config
    if backend.distributed is not None:  # Otherwise configure() refuses.
        timeout = timedelta(seconds=config.parallel.timeout)
        init_distributed_environment(tensor, rank, init_method, local_rank, backend.distributed, timeout)
    backend.configure(attrs.evolve(config, parallel=attrs.evolve(config.parallel, tensor=tensor, data=data)))


def leave_ranks(parallel: Any) -> None:
    """End what :func:`join_ranks` has started."""
    if parallel.world_size * parallel.data_parallel_size > 1:
        destroy_distributed_environment()
