"""Tests that numbers from outside are bounded by what they allocate or start, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import click
import pytest
import torch
from click.testing import CliRunner
from hal.backends.npu.emulation import is_installed
from helpers.checkpoints import random_checkpoint
from helpers.limited import limited
from helpers.thorough import MODE, thorough
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hal
from hal.bench.plan import SHAPES
from hal.checkpoint.loading import check_shared
from hal.cli import main
from hal.config import AdaptersConfig, CacheConfig, CompilationConfig, Config, ParallelConfig, PhaseConfig, bounds, read
from hal.device import host_capacity
from hal.errors import BatchError, CaptureError, ConfigError
from hal.execution.memory_plan import plan_memory
from hal.execution.state_spec import check_fits
from hal.parallel import connect, launch
from hal.step import StateSpec
from hal.step.state import SEQUENCE, State

NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
TEXTS = st.one_of(
    st.sampled_from(["199999", "nan", "inf", "-inf", "1e400", "0", "-1", "0.5", "true", "many", "", "9" * 5000]),
    st.integers(2**31, 10**30).map(str),
    st.integers(-(10**30), 0).map(str),
)
"""Values of options. No option takes a number of these as the number of something that takes long."""
VALUES = st.one_of(
    st.sampled_from([float("nan"), float("inf"), 0, -1, 0.5, True, False, "many", "", [], {}]),
    st.integers(-(2**70), 0),
    st.integers(2**31, 2**70),
    st.integers(2**20 + 1, 2**70),
)
RUNS = settings(
    max_examples=6, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def numeric_options(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the command and the name of every option that takes a number."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from numeric_options(found, (*path, name))
    for each in command.params:
        if isinstance(each, click.Option) and isinstance(each.type, NUMBERS) and not each.count:
            yield path, each.opts[0]


OPTIONS = list(numeric_options(main))


def numeric_fields(cls: type) -> Iterator[str]:
    """Yield the fields of a configuration that hold an integer, or a list of them."""
    for name, kind in get_type_hints(cls).items():
        if int in (kind, *get_args(kind)) or tuple[int, ...] in (kind, *get_args(kind)):
            yield name


FIELDS = [
    (cls, name)
    for cls in (Config, CacheConfig, CompilationConfig, PhaseConfig, ParallelConfig, AdaptersConfig)
    for name in numeric_fields(cls)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(
        tmp_path_factory.mktemp("bounded") / "model", num_hidden_layers=1, max_position_embeddings=32
    )


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where ranks would be started."""

    def start(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(launch.subprocess, "Popen", start)


def arguments_of(path: tuple[str, ...], checkpoint: Path, folder: Path) -> list[str]:
    """Return arguments with which a command does little, for another option beside them."""
    bench = ["--shapes", "tiny", "--compiler", "eager", "--backend", "cpu"]
    return {
        ("generate",): [str(checkpoint), "--prompt", "a", "--backend", "cpu"],
        ("chat",): [str(checkpoint), "--backend", "cpu"],
        ("bench", "decode"): bench,
        ("bench", "prefill"): bench,
        ("compare",): [str(checkpoint), "--prompt", "a", "--backend", "cpu", "--backend", "cpu"],
        ("explain",): [str(checkpoint), "--backend", "cpu", "--compiler", "eager"],
        ("doctor",): ["--backend", "nobody"],
        ("quantize",): [
            str(checkpoint),
            str(folder / "out"),
            "--scheme",
            "w8a8",
            "--calibration",
            str(folder / "nothing.txt"),
        ],
        ("emulate",): ["--", "no-such-program"],
        # An address of nobody's, so that no server goes on.
        ("serve",): [str(checkpoint), "--backend", "cpu", "--host", "203.0.113.1"],
        ("bringup",): [str(checkpoint), "--backend", "nobody", "--output", str(folder / "out")],
    }[path]


def test_every_command_with_numbers_is_tried() -> None:
    assert {path for path, _ in OPTIONS} == {
        ("generate",),
        ("chat",),
        ("bench", "decode"),
        ("bench", "prefill"),
        ("compare",),
        ("explain",),
        ("doctor",),
        ("quantize",),
        ("serve",),
        ("bringup",),
        *([("emulate",)] if is_installed() else []),
    }
    assert len(OPTIONS) > 30


@thorough(MODE, r"generate---(repetition|presence|frequency|seed|top|max)|compare---max-new")
@pytest.mark.usefixtures("_no_process")
@pytest.mark.parametrize(
    ("path", "name"), OPTIONS, ids=lambda each: " ".join(each) if isinstance(each, tuple) else each
)
@RUNS
@given(text=TEXTS)
def test_numbers_of_options(path: tuple[str, ...], name: str, checkpoint: Path, tmp_path: Path, text: str) -> None:
    """Each is taken, or answered by an error of hal's or click's, without a process, a thread or much memory."""
    before = torch.get_num_threads()
    with limited():
        result = CliRunner().invoke(main, [*path, name, text, *arguments_of(path, checkpoint, tmp_path)])
    assert result.exit_code in (0, 1, 2), (text, result.exception, result.stderr)
    assert result.exit_code != 2 or "error:" in result.stderr.lower(), (text, result.stderr)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda each: each if isinstance(each, str) else each.__name__)
@RUNS
@given(value=VALUES)
def test_numbers_of_configurations(cls: type, name: str, value: Any) -> None:
    """A field is read within its bounds only."""
    for number in (value, [value]):
        refused, held = "", None
        try:
            held = getattr(read(cls, {name: number}), name)
        except ConfigError as error:
            refused = error.problem
        known = held is None or held == attrs.fields_dict(cls)[name].default
        within = all(1 <= each <= bounds.TOKENS for each in (held if type(held) is tuple else [held or 1]))
        assert name in refused or known or within or name == "seed", (held, refused)


def test_a_configuration_that_python_makes() -> None:
    for make in (
        lambda: CacheConfig(num_tokens=0),
        lambda: CacheConfig(num_tokens=2**31),
        lambda: ParallelConfig(tensor=10**5000),
        lambda: CompilationConfig(capture_sizes=()),
        lambda: CompilationConfig(splitting_ops=()),
    ):
        with pytest.raises(ConfigError):
            make()


class TestRanks:
    @pytest.mark.usefixtures("_no_process")
    def test_more_than_the_machine_has_memory_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_capacity, "_limit", lambda name: 10**9)
        with pytest.raises(ConfigError, match=r"99999 ranks cannot run .* MiB are free"):
            launch.run_ranks(["-c", ""], 99_999)

    @pytest.mark.parametrize(
        ("tasks", "files", "told"), [(40, 20_000, "4 threads, and this user may have 40"), (10**6, 40, "4 open files")]
    )
    def test_the_least_limit_counts(self, tasks: int, files: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_capacity, "_limit", {"RLIMIT_NOFILE": files, "RLIMIT_NPROC": tasks}.get)
        monkeypatch.setattr(host_capacity, "host_memory", lambda: (1 << 40, 1 << 40))
        host_capacity.check_ranks(8)
        with pytest.raises(ConfigError, match=told):
            host_capacity.check_ranks(11)

    def test_the_tasks_of_a_container(self, tmp_path: Path) -> None:
        group = tmp_path / "sys/fs/cgroup/shell"
        for file, text in (
            (tmp_path / "proc/self/cgroup", "0::/shell\n"),
            (group / "pids.max", "100\n"),
            (group / "pids.current", "70\n"),
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert list(host_capacity.task_limits(tmp_path)) == [(100, 70)]

    @pytest.mark.usefixtures("_no_process")
    @pytest.mark.parametrize("ranks", [3, 99_999])
    @pytest.mark.parametrize("command", ["generate", "compare", "bench"])
    def test_the_command_starts_none(self, command: str, ranks: int, checkpoint: Path) -> None:
        given = {
            "generate": [str(checkpoint), "--prompt", "a", "--backend", "cpu"],
            "compare": [str(checkpoint), "--prompt", "a", "--backend", "cpu"],
            "bench": ["decode", str(checkpoint), "--backend", "cpu"],
        }[command]
        result = CliRunner().invoke(main, [command, *given, "--tensor-parallel", str(ranks)])
        assert result.exit_code == 2, result.exception
        assert ("cannot share" if ranks == 3 else "cannot run on this machine") in result.stderr

    def test_experts_that_ranks_cannot_share(self) -> None:
        sparse = hal.RandomCheckpoint.of("sparse", SPARSE)
        check_shared(sparse, ParallelConfig(tensor=2, data=2, experts="all_gather"))
        with pytest.raises(ConfigError, match="5 ranks cannot hold 8 experts"):
            check_shared(sparse, ParallelConfig(data=5, experts="all_gather"))

    @pytest.mark.parametrize(
        ("rank", "ranks", "told"),
        [
            ("0", "99999", "parallel asks for 1 x 2 = 2 ranks, and 99999 were started"),
            ("2", "2", "RANK and WORLD_SIZE are '2' and '2'"),
            ("-1", "2", "RANK and WORLD_SIZE are '-1' and '2'"),
            ("0", "many", "RANK and WORLD_SIZE are '0' and 'many'"),
            ("0", "9" * 5000, "RANK and WORLD_SIZE are '0' and '9999"),
        ],
    )
    def test_a_launcher_that_says_otherwise(
        self, rank: str, ranks: str, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The ranks would wait for each other until the timeout."""
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        with limited(), pytest.raises(ConfigError, match=told):
            connect(ParallelConfig(tensor=2, timeout=100), "gloo")


SPARSE = SHAPES["tiny-experts"] | {"num_hidden_layers": 1, "num_key_value_heads": 4}


class TestRunners:
    @pytest.fixture
    def model(self, cpu: hal.Backend, checkpoint: Path) -> Any:
        return hal.load_model(checkpoint, cpu)

    @pytest.mark.parametrize("number", [0, -1, True, 0.5, "2", 10**9, 10**400])
    def test_sequences(self, number: Any, model: Any, cpu: hal.Backend) -> None:
        with limited():
            with pytest.raises(ConfigError, match="max_sequences must be"):
                hal.Runner(model, cpu, max_sequences=number)
            with pytest.raises(ConfigError, match="max_sequences must be"):
                plan_memory(model, cpu, max_sequences=number)
            with hal.Runner(model, cpu) as runner, pytest.raises((ConfigError, BatchError)):
                runner.input_batch(number)

    def test_captures(self, model: Any, cpu: hal.Backend) -> None:
        many = list(range(1, bounds.CAPTURES + 2))
        with pytest.raises(ConfigError, match="capture_sizes must have at most 512 entries, not 513"):
            hal.open({"backend": "cpu", "compilation": {"compiler": "graph", "capture_sizes": many}})

    @pytest.mark.parametrize("queries", [[1], [1, 2]], ids=["300 steps", "600 steps"])
    def test_a_capture_whose_logits_do_not_fit(
        self, queries: list[int], model: Any, cpu: hal.Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first step would take more memory than there is. The sizes count for each number of queries."""
        compilation = {"compiler": "graph", "capture_sizes": [*range(1, 300), 1 << 16], "queries": queries}
        monkeypatch.setattr(host_capacity, "memory_limits", lambda: iter([(1 << 40, (1 << 40) - (10 << 20))]))
        with (
            hal.open({"backend": "cpu", "cache": {"num_tokens": 64}, "compilation": compilation}) as backend,
            limited(),
            pytest.raises(CaptureError, match=r"the logits of a step .* MiB, and 10 MiB are free"),
        ):
            hal.Runner(model, backend)

    def test_blocks_of_a_model_that_keeps_nothing_in_them(self, cpu: hal.Backend) -> None:
        """Their number is bounded by the host's memory, which holds the list of free ones."""
        spec = StateSpec(({"matrix": State(SEQUENCE, (2, 2))},), torch.float32, 2**31 - 1, 1, num_slots=2)
        with pytest.raises(ConfigError, match=r"the list of the cache's 2147483647 blocks takes 98303 MiB"):
            check_fits(spec, cpu)


def test_new_tokens_of_a_comparison_end_with_the_model(checkpoint: Path) -> None:
    options = ["--backend", "cpu", "--backend", "cpu", "--prompt", "a", "--max-new-tokens", str(10**12), "--json"]
    with limited():
        result = CliRunner().invoke(main, ["compare", str(checkpoint), *options])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)
