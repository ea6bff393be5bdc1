"""The number of threads beside other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hal.backends.cpu import driver
from hal.backends.cpu.thread_count import LONGEST_PATIENCE, PATIENCE, SETTLED, SharedThreadCount, ThreadCount
from helpers.thorough import LONG, PROCESSES, thorough

import hal
from hal.device.host_capacity import RunningThreads, cpu_quotas, usable_cores


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test's backends a count of their own: other tests of the process may keep backends open."""
    monkeypatch.setattr(driver, "SHARED", SharedThreadCount())


def count(threads: int, cores: int) -> ThreadCount:
    """Return a count that is told the running threads, and does not count those of this machine."""
    torch.set_num_threads(threads)
    uncounted = RunningThreads()
    uncounted.close()
    made = ThreadCount(cores, uncounted)
    made.use()
    return made


def chosen(of: ThreadCount, running: int, start: float, seconds: float) -> list[int]:
    """Return torch's numbers of threads in steps of 10 ms that end with as many running threads."""
    numbers = []
    for step in range(round(seconds / 0.01)):
        of.observe(start + step * 0.01, running)
        numbers.append(torch.get_num_threads())
    return numbers


def test_an_idle_machine_keeps_all_threads() -> None:
    assert set(chosen(count(4, cores=4), 4, 0.0, 10.0)) == {4}


def test_threads_that_others_need_are_given_up_and_taken_back() -> None:
    two = count(2, cores=2)
    assert chosen(two, 3, 0.0, 0.1)[:3] == [2, 1, 1], "one busy process beside two threads on two cores"
    assert set(chosen(two, 2, 0.1, 10.0)) == {1}, "the other process still runs"
    later = chosen(two, 1, 20.0, 1.0)
    assert later[0] == 1
    assert later[round(PATIENCE / 0.01) + 1] == later[-1] == 2
    torch.set_num_threads(2)


def test_one_count_is_no_load() -> None:
    four = count(4, cores=4)
    numbers = [torch.get_num_threads()]
    for step, running in enumerate([4, 9, 4, 4, 9, 4, 9, 4]):
        four.observe(step * 0.01, running)
        numbers.append(torch.get_num_threads())
    assert set(numbers) == {4}


def test_two_processes_share_the_cores() -> None:
    """Each counts both; the counts are the sum of what they use."""
    both = [count(16, cores=16), count(16, cores=16)]
    uses = [16, 16]
    for step in range(400):
        for index, each in enumerate(both):
            torch.set_num_threads(uses[index])
            each.use()
            each.observe(step * 0.01, sum(uses))
            uses[index] = torch.get_num_threads()
    assert sum(uses) <= 17, uses
    assert min(uses) >= 4, uses


def test_patience_grows_while_the_load_comes_back() -> None:
    two, now, waits = count(2, cores=2), 0.0, []
    for _ in range(8):
        while torch.get_num_threads() == 2:
            two.observe(now, 4)
            now += 0.01
        start = now
        while torch.get_num_threads() == 1:
            two.observe(now, 1)
            now += 0.01
        waits.append(round(now - start, 1))
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(LONGEST_PATIENCE, abs=0.1)
    for step in range(round(SETTLED / 0.01) + 50):
        two.observe(now + step * 0.01, 2)
    now += SETTLED + 1
    two.observe(now, 4)
    two.observe(now, 4)
    assert len([each for each in chosen(two, 1, now + 0.01, 1.0) if each == 1]) == pytest.approx(PATIENCE / 0.01, abs=2)


def test_a_number_that_the_program_sets_is_the_most() -> None:
    two = count(4, cores=4)
    torch.set_num_threads(3)
    two.use()
    assert (two.most, torch.get_num_threads()) == (3, 3)
    chosen(two, 6, 0.0, 0.1)
    assert torch.get_num_threads() < 3
    assert chosen(two, 1, 1.0, 10.0)[-1] == 3


def test_backends_share_the_number(no_other_backends: None) -> None:
    torch.set_num_threads(2)
    x = torch.ones(1, 4)
    with hal.open("cpu") as first, hal.open("cpu") as second:
        assert first.threads is second.threads
        first.threads.observe(0.0, 99)
        first.threads.observe(0.01, 99)
        for each in (first, second, first):
            each.ops.add_rms_norm(x, x, torch.ones(4), 1e-6)
            assert (torch.get_num_threads(), each.threads.most) == (1, 2)
        first.close()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with hal.open("cpu") as third:
        assert third.threads is not first.threads


def test_a_number_above_the_cores_is_the_programs_wish(no_other_backends: None) -> None:
    torch.set_num_threads((os.cpu_count() or 1) + 3)
    with hal.open("cpu") as backend:
        assert backend.threads.most == (os.cpu_count() or 1) + 3


@pytest.mark.parametrize("had", [True, False], ids=["had another", "is new"])
def test_each_thread_of_the_program_takes_the_number(had: bool) -> None:
    four = count(4, cores=4)
    chosen(four, 8, 0.0, 0.02)
    chosen_here, seen = torch.get_num_threads(), []

    def step() -> None:
        if had:
            torch.set_num_threads(4)  # before its first step
        four.use()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    four.use()
    assert [*seen, torch.get_num_threads(), four.most] == [chosen_here, chosen_here, 4]


@contextmanager
def busy_processes() -> Iterator[None]:
    """Run more processes than there are cores."""
    started = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) + 1)
    ]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def check_one_thread_is_soon_used(runner: hal.Runner) -> None:
    batch, until = runner.batch([[5]], [[1]]), time.monotonic() + 60
    while torch.get_num_threads() > 1:
        assert time.monotonic() < until, "two threads beside busy processes for a minute"
        runner.step(batch)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts running threads")
def test_steps_beside_busy_processes_use_fewer_threads(no_other_backends: None, repository: Path) -> None:
    torch.set_num_threads(2)
    with hal.open("cpu") as backend:
        runner = hal.Runner(hal.load_model(repository / "checkpoints/tiny-python", backend), backend)
        torch.set_num_threads(2)  # even if the machine was busy when the backend was opened
        runner.step(runner.batch([[5]], [[1]]))
        with busy_processes():
            check_one_thread_is_soon_used(runner)
    assert torch.get_num_threads() == 2, "closing restores the number"


@thorough(LONG)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts running threads")
def test_a_backend_opened_beside_busy_processes_begins_with_fewer_threads(no_other_backends: None) -> None:
    torch.set_num_threads(2)
    with busy_processes():
        until = time.monotonic() + 60
        while True:
            with hal.open("cpu") as backend:
                assert torch.get_num_threads() == 2, "before anything runs"
                backend.ops.add_rms_norm(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), 1e-6)
                if torch.get_num_threads() == 1:
                    break
            assert time.monotonic() < until, "two threads beside busy processes for a minute"
    assert torch.get_num_threads() == 2, "closing restores the number"


def test_quotas_and_affinity_limit_the_cores(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    assert list(cpu_quotas(tmp_path)) == [], "not Linux"
    write("proc/self/cgroup", "12:cpu,cpuacct:/docker/1f\n0::/user/shell\n")
    assert list(cpu_quotas(tmp_path)) == [], "not mounted"
    write("sys/fs/cgroup/cpu/docker/1f/cpu.cfs_quota_us", "-1\n")
    write("sys/fs/cgroup/cpu/docker/1f/cpu.cfs_period_us", "100000\n")
    write("sys/fs/cgroup/user/shell/cpu.max", "max 100000\n")
    assert list(cpu_quotas(tmp_path)) == []
    assert usable_cores(tmp_path) == usable_cores()
    write("sys/fs/cgroup/cpu/docker/1f/cpu.cfs_quota_us", "150000\n")
    write("sys/fs/cgroup/user/cpu.max", "40000 100000\n")
    assert list(cpu_quotas(tmp_path)) == [1.5, 0.4]
    assert usable_cores(tmp_path) == 1
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system has no affinity")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@thorough(PROCESSES, r"\[a (count|policy)")
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    ids=["none", "a count", "a policy"],
)
def test_torch_is_imported_with_bounded_spinning(given: dict[str, str], expected: str) -> None:
    program = "import hal, torch, json, os; print(json.dumps(sorted(each for each in os.environ if 'GOMP' in each)))"
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, **given, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr
    assert json.loads(done.stdout) == [each for each in given if "GOMP" in each], "left in the environment"
