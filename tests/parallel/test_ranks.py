"""Tests of ranks: collectives between them, their start, and what happens if one fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import rank_processes
from helpers.distributions import install
from helpers.late_driver import late_driver
from helpers.ranks import in_ranks
from helpers.thorough import EXHAUSTIVE, LONG, PROCESSES, thorough

import hal
from hal import ops
from hal.cli import main
from hal.errors import CommunicationError, ConfigError
from hal.parallel import SOLO, Group, Mesh, group, groups
from hal.parallel.collectives import KERNELS
from hal.parallel.launch import run_ranks


def test_a_group_of_one_changes_nothing() -> None:
    x = torch.randn(3, 8)
    for name, kernel in KERNELS.items():
        for result in (kernel(x, SOLO.name), ops.operation(name).reference(x, SOLO.name)):
            assert torch.equal(result, x)
            assert result.data_ptr() != x.data_ptr()


def test_names_of_groups() -> None:
    assert group("solo") is SOLO
    with pytest.raises(ConfigError, match=r"in no group 'sole'\n.*solo"):
        group("sole")
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Group("two", 2, 2, object())
    with pytest.raises(ConfigError, match="no process group"):
        Group("two", 0, 2)


def test_planned_ranks_run_no_collective(cpu: hal.Backend) -> None:
    mesh = Mesh.planned(4)
    try:
        with hal.open("cpu", mesh=mesh) as backend:
            assert (mesh.tensor.size, mesh.tensor.rank, mesh.size) == (4, 0, 4)
            for name in KERNELS:
                with pytest.raises(CommunicationError, match=r"the 4 ranks of the group .* are only planned"):
                    getattr(backend.ops, name)(torch.ones(4, 4), mesh.tensor.name)
        assert group(mesh.tensor.name) is mesh.tensor, "a backend keeps the mesh that it was given"
    finally:
        mesh.close()
    assert Mesh.planned(1) == Mesh()


def test_a_backend_closes_the_mesh_that_it_made() -> None:
    assert rank_processes.run(_groups_of_a_backend, 2) == [([2, 1], ["solo"], [2, 1])] * 2


def _groups_of_a_backend(rank: int) -> tuple[list[int], list[str], list[int]]:
    sizes, names = [], []
    for _ in range(2):
        with hal.open({"backend": "cpu", "parallel": {"tensor": 2}}) as backend:
            summed = ops.all_reduce(torch.full((1, 4), float(rank)), backend.mesh.tensor.name)
            assert summed.tolist() == [[1.0] * 4]
            sizes.append(sorted((each.size for each in groups().values()), reverse=True))
        names.append(sorted(groups()))
    return sizes[0], names[1], sizes[1]


OPENED_TWICE = """
import atexit, os, sys

def threads_of_gloo():
    return [each for each in os.listdir("/proc/self/task") if "gloo" in open(f"/proc/self/task/{each}/comm").read()]

@atexit.register  # Runs last.
def check():
    from torch import distributed
    if distributed.is_initialized() or threads_of_gloo():
        os._exit(5)

import torch, hal
for value in (1, 2):
    backend = hal.open({"backend": "cpu", "parallel": {"tensor": 2}, "options": {"native": False}})
    total = backend.ops.all_reduce(torch.tensor([1.0 * value]), backend.mesh.tensor.name)
    assert total.tolist() == [2 * value] and threads_of_gloo()
    if value == 1:
        backend.close()
        assert not threads_of_gloo()
"""


@thorough(PROCESSES)
@pytest.mark.skipif(sys.platform != "linux", reason="the threads are read from /proc")
def test_the_process_groups_of_a_backend_end_with_it_and_with_python() -> None:
    """A thread of gloo that frees a tensor while Python ends would end the process with SIGABRT."""
    failure = run_ranks(["-c", OPENED_TWICE], 2, seconds=60)
    assert failure is None, failure


@thorough(PROCESSES)
def test_a_closed_backend_leaves_nothing() -> None:
    """No shared memory, no threads, and no process groups, if the backend has started torch.distributed itself."""
    mesh = {"tensor": 2, "data": 2}
    on_its_own = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    for first, *later in in_ranks("opened_and_closed", 4, environ=on_its_own, on={"backend": "cpu"}, parallel=mesh):
        assert (first["memory"], first["started"]) == ([], [])
        assert later == [{"memory": [], "threads": [], "started": []}] * 2


def test_without_other_ranks() -> None:
    with pytest.raises(ConfigError, match="asks for 2 ranks, and this process was not started as one of them"):
        hal.open({"backend": "cpu", "parallel": {"tensor": 2}})


def test_an_engines_groups() -> None:
    with hal.open("cpu", mesh=Mesh()) as backend:
        assert backend.mesh.size == 1
        with pytest.raises(ConfigError, match="not started as one"):
            backend.configure(hal.Config(backend="cpu", parallel=hal.ParallelConfig(tensor=2)))


LAUNCHED = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module", "hal_command")


@thorough(EXHAUSTIVE, r"\[trained_experts-")
@thorough(PROCESSES, r"torch.distributed|data-parallel|experts")
@pytest.mark.shows("tensor parallelism", "the command")
@pytest.mark.shows("data parallelism", "the command")
@thorough(EXHAUSTIVE, r"all_to_all|\[trained-\('-m', 'hal_command'\)-\('--data")
@pytest.mark.parametrize(
    ("name", "program", "options"),
    [
        ("trained", ("-m", "hal_command"), ("--tensor-parallel", "2")),
        ("trained", ("-m", "hal_command"), ("--data-parallel", "2")),
        ("trained", LAUNCHED, ("--tensor-parallel", "2")),
        ("trained_experts", ("-m", "hal_command"), ("--data-parallel", "2", "--experts", "dispatch")),
        ("trained_experts", ("-m", "hal_command"), ("--tensor-parallel", "2", "--experts", "all_to_all")),
    ],
    ids=str,
)
def test_the_command(
    request: pytest.FixtureRequest, name: str, program: tuple[str, ...], options: tuple[str, ...]
) -> None:
    asked = "--prompt=def main():", "--prompt=class Stack:", "--max-new-tokens=12", "--backend=cpu", "--dtype=float32"
    arguments = ["generate", str(request.getfixturevalue(name)), *asked]
    alone = CliRunner().invoke(main, arguments)
    assert alone.exit_code == 0, alone.output
    ran = subprocess.run(
        [sys.executable, *program, *arguments, *options],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        timeout=400,
        check=True,
    )
    assert ran.stdout.decode() == alone.stdout != ""


@thorough(EXHAUSTIVE)  # So is one of different errors, below.
@thorough(PROCESSES)
def test_an_error_of_all_ranks_is_shown_once(trained: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "hal_command", "generate", str(trained), "--prompt", "a", "--tensor-parallel", "3"],
        capture_output=True,
        timeout=200,
        check=False,
        text=True,
    )
    assert ran.returncode == 2
    assert ran.stderr.count("3 ranks cannot share 4 heads of 128 elements equally") == 1
    assert ran.stdout == ""


FAILING = """
import os, sys, time
from pathlib import Path
order, folder, rank = sys.argv[1].split(","), Path(sys.argv[2]), os.environ["RANK"]
new = folder / f"new-{rank}"
new.write_text(str(os.getpid()))
new.rename(folder / rank)
if place := order.index(rank):  # Until run_ranks has noticed the end of the rank before.
    before = folder / order[place - 1]
    while not before.exists():
        time.sleep(0.01)
    try:
        while True:
            os.kill(int(before.read_text()), 0)
            time.sleep(0.01)
    except ProcessLookupError:
        pass
sys.stderr.write(f"error {rank}")
sys.exit(3 + int(rank))
"""


@thorough(LONG, r"\[2,1,0")
@thorough(EXHAUSTIVE, r"\[0,1,2")
@pytest.mark.parametrize("order", ["1,0,2", "0,1,2", "2,1,0"])
def test_of_different_errors_the_first_is_shown(order: str, tmp_path: Path) -> None:
    failure = run_ranks(["-c", FAILING, order, str(tmp_path)], 3, seconds=60)
    first = int(order[0])
    assert failure is not None
    assert (failure.rank, failure.status, failure.text) == (first, 3 + first, f"error {first}" if first else "")


@thorough(LONG)
def test_a_time_limit() -> None:
    start = time.monotonic()
    failure = run_ranks(["-c", "import os, time; time.sleep(60 * int(os.environ['RANK']))"], 2, seconds=6)
    assert failure is not None
    assert (failure.rank, failure.status) == (1, None)
    assert time.monotonic() - start < 30


@thorough(PROCESSES)
def test_different_errors_of_a_command(trained: Path, tmp_path: Path) -> None:
    """Rank 1 cannot open its driver, and rank 0 waits for it. Rank 1's error is shown."""
    late = late_driver("raise DeviceError('card 1 is on fire', 'extinguish it')")
    install(tmp_path, "late", "[hal.drivers]\nlate = late:Late\n", late=late)
    arguments = ["generate", str(trained), "--prompt", "a", "--backend", "late", "--tensor-parallel", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "hal_command", *arguments],
        capture_output=True,
        timeout=200,
        check=False,
        text=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(tmp_path)},
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("rank 1 of 2 failed:\nerror: the driver late: card 1 is on fire")
    assert ran.stderr.count("error: ") == 1
