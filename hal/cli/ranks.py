"""The options that say how ranks share a model, and the start of the ranks that they ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import click

from hal.cli.stdout import result_stream
from hal.config.bounds import RANKS
from hal.config.settings import ExpertsMode, ParallelConfig

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint

TENSOR_PARALLEL = "Split the model between N ranks of this machine, which are started if this process is none."
EXPERTS = "How the ranks share mixtures of experts; by default, each holds a part of every expert."
OPTION = "--tensor-parallel"


def tensor_parallel(text: str = TENSOR_PARALLEL) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that adds the option with a help text. Its value is None if it is not given."""
    return click.option(OPTION, type=click.IntRange(1, RANKS), metavar="N", help=text)


def parallel(data: str, tensor: str = TENSOR_PARALLEL) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that adds all options of how ranks share a model, with help texts for two of them.

    Their values are None if they are not given.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--experts", type=click.Choice(get_args(ExpertsMode)), help=EXPERTS)(command)
        command = click.option("--data-parallel", type=click.IntRange(1, RANKS), metavar="N", help=data)(command)
        return tensor_parallel(tensor)(command)

    return decorate


def start_ranks(
    parallel: ParallelConfig,
    checkpoint: Checkpoint,
    stdin: bytes | None = None,
    source: str = "auto",
    *,
    leads: bool = False,
) -> bool:
    """Run this process's command in several ranks, unless it is one of them or the only one.

    Args:
        parallel: the ranks.
        checkpoint: of the model that they share.
        stdin: what this process has read from stdin.
        source: ``model_source`` of the configuration.
        leads: whether rank 0 decides when all end; see :func:`run_ranks`.

    Returns:
        Whether ranks ran the command; if so, this process has nothing left to do.

    Raises:
        ConfigError: the machine cannot run as many ranks, or they cannot share the model. None is started.
        SystemExit: a rank failed. The status is that of the first one.
    """
    from hal.checkpoint.loading import check_shared
    from hal.device.host_capacity import check_ranks
    from hal.parallel.launch import run_ranks
    from hal.parallel.launcher_variables import is_rank

    if (ranks := parallel.size) == 1 or is_rank():
        return False
    check_ranks(ranks)
    check_shared(checkpoint, parallel, source)
    command = ["-m", "hal_command", *sys.argv[1:]]
    failure = run_ranks(command, ranks, stdin=stdin, stdout=result_stream(), leads=leads)
    if failure is None:
        return True
    if failure.text:
        click.echo(f"rank {failure.rank} of {ranks} failed:\n{failure.text.rstrip()}", err=True)
    assert failure.status is not None  # There is no time limit.
    if failure.ending is not None:
        click.echo("error: {}\nremedy: {}".format(*failure.ending), err=True)
    raise SystemExit(failure.status if failure.status > 0 else 128 - failure.status)
