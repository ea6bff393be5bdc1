"""Tests of data parallelism: ranks that hold copies of a model share the prompts, and step together where they must."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers import rank_programs
from helpers.rank_processes import LOST, run, succeeded
from helpers.ranks import in_ranks
from helpers.thorough import EXHAUSTIVE, LONG, MODE, PROCESSES, thorough
from torch import distributed

import hal
from hal.errors import CommunicationError, ConfigError
from hal.parallel import Group, Mesh
from hal.parallel.host_values import check_host_group

EXCHANGES = ["all_gather", "all_to_all", "dispatch"]
PROMPTS = ([5, 6, 7], [8, 9], [40, 41, 42, 43])


def _check(checkpoint: Path, parallel: dict[str, Any], compilers: list[str], **more: Any) -> None:
    """Assert that each rank gets the tokens that one process gives for every prompt."""
    arguments = {"checkpoint": str(checkpoint), "dtype": "float32", **more}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={})["eager"]
    ranks = parallel.get("tensor", 1) * parallel["data"]
    found = in_ranks("tokens", ranks, **arguments, compilers=compilers, parallel=parallel)
    for compiler in compilers:
        assert [each[compiler] for each in found] == [alone] * ranks, compiler


@thorough(EXHAUSTIVE, r"\[sizes2")
@thorough(MODE, r"\[sizes1")
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "tensor": 2}, {"data": 4}])
def test_copies_share_the_prompts(trained: Path, sizes: dict[str, int]) -> None:
    """With penalties, and without."""
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.8}, {}, {"presence_penalty": 1.5, "temperature": 0.9}
    _check(trained, sizes, ["graph"], sampling=penalties)


@thorough(EXHAUSTIVE, r"\[sizes[12]|\[sizes0-\w+-all_")
@thorough(MODE)
@pytest.mark.parametrize("experts", EXCHANGES)
@pytest.mark.parametrize(
    ("sizes", "compilers"),
    [
        ({"data": 2}, ["eager", "piecewise"]),
        ({"data": 4}, ["graph"]),
        ({"data": 2, "tensor": 2}, ["piecewise"]),
    ],
)
def test_copies_share_experts(trained_experts: Path, experts: str, sizes: dict[str, int], compilers: list[str]) -> None:
    _check(trained_experts, {**sizes, "experts": experts}, compilers)


@thorough(EXHAUSTIVE, r"\[(all_gather|dispatch)")
@thorough(MODE)
@pytest.mark.parametrize("experts", EXCHANGES)
def test_a_rank_without_a_prompt_steps_too(trained_experts: Path, experts: str) -> None:
    _check(trained_experts, {"data": 2, "experts": experts}, ["graph"], prompts=1)


def _ends_early(rank: int, checkpoint: str) -> None:
    parallel = {"data": 2, "experts": "all_gather", "timeout": 20}
    with hal.open({"backend": "cpu", "dtype": "float32", "parallel": parallel}) as backend:
        model = hal.load_model(checkpoint, backend)
        with hal.Runner(model, backend) as runner:
            assert not runner.idle()  # Both are here now.
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            runner.idle()


def test_a_rank_that_ends_while_another_waits(trained_experts: Path) -> None:
    killed, waiting = run(_ends_early, 2, str(trained_experts))
    assert killed == LOST
    assert isinstance(waiting, CommunicationError)
    assert "this rank could not exchange values" in str(waiting)


def _idle_alone(rank: int, checkpoint: str) -> bool | None:
    with hal.open({"backend": "cpu", "dtype": "float32", "parallel": {"data": 2, "timeout": 20}}) as backend:
        model = hal.load_model(checkpoint, backend)
        with hal.Runner(model, backend) as runner:
            return runner.idle() if rank == 0 else None


@thorough(PROCESSES)
def test_copies_that_do_not_exchange_tokens_are_not_idle_together(trained: Path) -> None:
    assert succeeded(run(_idle_alone, 2, str(trained))) == [False, None]


def _of_an_engine(rank: int, checkpoint: str) -> tuple[list[str], list[list[int]]]:
    world, hosts = distributed.group.WORLD, distributed.new_group(backend="gloo")
    mesh = Mesh.of(data=world, expert=world, hosts=hosts)
    config = {"backend": "cpu", "dtype": "float32", "parallel": {"experts": "all_gather"}}  # The mesh has the sizes.
    with hal.open(config, mesh=mesh) as backend, hal.Runner(hal.load_model(checkpoint, backend), backend) as runner:
        texts: list[list[int]] = [[], [], []]
        for token in hal.generate(runner, PROMPTS, hal.SamplingParams(max_new_tokens=6)):
            texts[token.prompt_index].append(token.token_id)
    names = [each.name.rstrip("0123456789") for each in (mesh.tensor, mesh.data, mesh.expert, mesh.hosts)]
    mesh.close()
    return names, texts


def test_groups_of_an_engine(trained_experts: Path) -> None:
    """The hosts agree on steps over a separate group."""
    alone: list[list[int]] = [[], [], []]
    with (
        hal.open({"backend": "cpu", "dtype": "float32"}) as backend,
        hal.Runner(hal.load_model(str(trained_experts), backend), backend) as runner,
    ):
        for token in hal.generate(runner, PROMPTS, hal.SamplingParams(max_new_tokens=6)):
            alone[token.prompt_index].append(token.token_id)
    found = succeeded(run(_of_an_engine, 2, str(trained_experts)))
    assert found == [(["solo", "data", "data", "hosts"], alone)] * 2


def _of_unlike_loads(rank: int, checkpoint: str, timeout: float, fails: bool) -> list[list[int]]:
    """Generate the first prompt on rank 0 at once, and the second on rank 1 in more than the timeout."""
    world = distributed.group.WORLD
    hosts = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    mesh = Mesh.of(data=world, hosts=hosts, timeout=timeout)
    tokens = 8
    with hal.open({"backend": "cpu", "dtype": "float32"}, mesh=mesh) as backend:
        runner = hal.Runner(hal.load_model(checkpoint, backend), backend)

        def slowly(*_: object) -> None:
            if fails:
                raise ValueError("the fault of rank 1")
            time.sleep(1.5 * timeout / tokens)

        if rank == 1:
            runner.model.register_forward_hook(slowly)
        texts: list[list[int]] = [[], []]
        params = [hal.SamplingParams(max_new_tokens=count) for count in (1, tokens)]
        for token in hal.generate(runner, PROMPTS[:2], params):
            texts[token.prompt_index].append(token.token_id)
    mesh.close()
    return texts


@thorough(LONG)
def test_copies_wait_longer_than_the_timeout_for_one_that_works(trained: Path) -> None:
    found = succeeded(run(_of_unlike_loads, 2, str(trained), 4.0, False))
    assert found[0] == found[1]
    assert [len(text) for text in found[0]] == [1, 8]


def test_a_copy_that_fails_is_an_error_of_the_others(trained: Path) -> None:
    waiting, failed = run(_of_unlike_loads, 2, str(trained), 20.0, True)
    assert isinstance(failed, ValueError)
    assert isinstance(waiting, CommunicationError)
    assert "rank 1 of 2 raised an exception" in str(waiting)


def test_hosts_that_no_group_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal.parallel.host_values.carries_cpu_tensors", lambda process_group: False)
    with pytest.raises(ConfigError, match=r"does not carry CPU tensors\n.*as `hosts`"):
        check_host_group(Group("pair", 0, 2, object()))
