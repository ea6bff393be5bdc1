"""Tests for drivers: entry points, loading by name, choice by probe and priority, and errors with reasons."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hal.backends.cpu.tape import Tape
from helpers.distributions import install
from helpers.thorough import MODE, thorough

import hal
from hal import ops
from hal.device.host_capacity import memory_limits
from hal.drivers import registry
from hal.drivers.driver import ADDED
from hal.errors import ConfigError, DriverError, DriverIncompatible, DriverNotFound, DriverUnavailable, OperationError
from hal.vendor import PreparingKernel
from hal.version import API_VERSION

VENDOR = """
import attrs
import hal
import torch
from hal.config import read

IMPORTED = True

@attrs.frozen
class Card:
    card: int | None = None

class Acme(hal.vendor.Driver):
    name = "acme"
    api_version = (4, 0)
    priority = 10

    def probe(self):
        return hal.vendor.Probe(True)

    def open(self, options):
        self.opened_with = dict(options)
        Acme.last = self
        return hal.Backend(self.name, hal.vendor.HostDevice(), kernels={})

class Absent(Acme):
    priority = 20
    def probe(self):
        return hal.vendor.Probe(False, "there is no Acme card", "buy one")

class Raising(Acme):
    def probe(self):
        raise OSError("bus error")

class NextMinor(Acme):
    api_version = (4, 3)
    def prefetch(self):
        return None

class NextMajor(Acme):
    api_version = (5, 0)

class LastMajor(Acme):
    api_version = (3, 1)

class Unfinished(hal.vendor.Driver):
    name = "unfinished"
    api_version = (4, 0)
    def probe(self):
        return hal.vendor.Probe(True)

class Lettered(Acme):
    variables = "ACME_"

class Picky(Acme):  # reads its options when it is probed, and is not available without the option card
    def probe_for(self, options):
        chosen = read(Card, options, "options of the picky driver")
        return hal.vendor.Probe(chosen.card is not None, "no card is named", "name one")

class Constructed(Acme):
    def __init__(self):
        raise RuntimeError("no card")

class Asking(Acme):
    def __init__(self, card):
        pass

class ExitingProbe(Acme):
    def probe(self):
        raise SystemExit(3)

class ExitingOpen(Acme):
    def open(self, options):
        raise SystemExit("bye")

class BusyOpen(Acme):
    def open(self, options):
        raise RuntimeError("card 0 is busy")

class Otherwise(Acme):
    def open(self, options):
        return hal.Backend("someone_else", hal.vendor.HostDevice(), kernels={})

class Interrupted(Acme):
    def probe(self):
        raise KeyboardInterrupt

class Unrelated:
    pass
"""
BROKEN = {
    "acme_broken": "import a_library_that_is_not_there",
    "acme_runtime": "raise RuntimeError('the SDK is not initialized')",
    "acme_missing": "import ctypes; ctypes.CDLL('libacme_not_there.so')",
    "acme_syntax": "def f(:",
    "acme_asserting": "assert False, 'no card'",
    "acme_exiting": "raise SystemExit(3)",
}
"""Modules that cannot be imported."""
CLASSES = re.findall(r"class (\w+)\(", VENDOR)


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vendor:
    """Return a function that installs a vendor's distribution with the given entry points.

    Driver classes have these names.
    """
    return Vendor(tmp_path / "site", monkeypatch)


@attrs.frozen
class Vendor:
    site: Path
    monkeypatch: pytest.MonkeyPatch

    def distribution(self, package: str, **drivers: str) -> None:
        lines = [f"{name} = {target}" for name, target in drivers.items()]
        install(self.site, package, "\n".join(["[hal.drivers]", *lines]))

    def install(self, **drivers: str) -> None:
        self.distribution("acme", **drivers)
        named = [f"{target.partition(':')[2]}.name = {name!r}" for name, target in drivers.items()]
        named = [line for line in named if line.partition(".")[0] in CLASSES]
        (self.site / "acme_driver.py").write_text("\n".join([textwrap.dedent(VENDOR), *named]))
        for name, text in BROKEN.items():
            (self.site / f"{name}.py").write_text(f"{text}\n")
        self.monkeypatch.delitem(sys.modules, "acme_driver", raising=False)
        self.monkeypatch.syspath_prepend(str(self.site))


def test_by_name_loads_that_driver_only(vendor: Vendor) -> None:
    vendor.install(acme="acme_driver:Acme", broken="acme_broken:Driver")
    assert hal.open("cpu").name == "cpu"
    assert "acme_driver" not in sys.modules
    assert hal.open("acme").name == "acme"
    hal.open("cpu")


def test_a_drivers_own_environment_is_its_options(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor.install(acme="acme_driver:Acme")
    monkeypatch.setenv("HAL_ACME_CARDS", "[1, 2]")
    monkeypatch.setenv("HAL_ACME_MODE", "fast")
    monkeypatch.setenv("HAL_CPU_NONSENSE", "1")  # the probe of acme is not run
    hal.open({"backend": "acme", "options": {"mode": "slow"}}, activate=False)
    assert sys.modules["acme_driver"].Acme.last.opened_with == {"cards": [1, 2], "mode": "slow"}
    with pytest.raises(ConfigError, match="unknown key 'nonsense'"):
        hal.open("cpu")


def test_the_keys_that_a_configuration_sets(vendor: Vendor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hal.read_config("cpu") == {"backend": "cpu"}
    given = {"backend": "cpu", "cache": {"num_tokens": 64}}
    read = hal.read_config(given)
    read["cache"]["block_size"] = 32
    assert given == {"backend": "cpu", "cache": {"num_tokens": 64}}
    (tmp_path / "hal.json").write_text('{"compilation": {"compiler": "graph"}}')
    assert hal.read_config(tmp_path / "hal.json") == {"compilation": {"compiler": "graph"}}
    assert hal.read_config(hal.Config(backend="cpu"))["compilation"]["compiler"] == "eager"
    with pytest.raises(ConfigError, match=r"unknown key 'compilr' .* @ config\.compilation"):
        hal.read_config({"compilation": {"compilr": "graph"}})
    vendor.install(acme="acme_driver:Acme")
    monkeypatch.setenv("HAL_ACME_MODE", "fast")  # an option of a driver, and no key
    monkeypatch.setenv("HAL_CACHE__NUM_TOKENS", "128")
    assert hal.read_config() == {"cache": {"num_tokens": 128}}


def test_auto_takes_the_available_driver_of_highest_priority(vendor: Vendor) -> None:
    vendor.install(acme="acme_driver:Acme", absent="acme_driver:Absent", raising="acme_driver:Raising")
    assert hal.open({}).name == "acme"
    hal.open("cpu")


def test_candidates_report_every_driver_and_never_raise(vendor: Vendor) -> None:
    vendor.install(
        absent="acme_driver:Absent",
        raising="acme_driver:Raising",
        broken="acme_broken:Driver",
        newer="acme_driver:NextMinor",
        typo="acme_driver:Nothing",
    )
    found = {each.name: each.probe for each in registry.candidates()}
    assert found["cpu"].available
    assert found["absent"] == hal.vendor.Probe(False, "there is no Acme card", "buy one")
    assert "bus error" in found["raising"].reason
    assert "a_library_that_is_not_there" in found["broken"].reason
    assert "4.1" in found["newer"].reason
    assert "Nothing" in found["typo"].reason
    assert all(probe.reason and probe.hint for name, probe in found.items() if name != "cpu")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (
            "NextMinor",
            DriverIncompatible,
            r"API 4\.3; .* lacks the additions of 4\.1, 4\.2, 4\.3; .* prefetch",
        ),
        (
            "NextMajor",
            DriverIncompatible,
            r"API 5\.x; .*\n.* with API 5\.x \(acme is registered by acme 1\.0\)$",
        ),
        (
            "LastMajor",
            DriverIncompatible,
            r"API 3\.x; .* 4\.0: .*in any form\n.* docs/how-to/moving-to-4\.md ",
        ),
        ("Unfinished", DriverIncompatible, "lacks open"),
        ("Unrelated", DriverIncompatible, r"not a subclass of hal\.vendor\.Driver"),
        ("Lettered", DriverIncompatible, r"variables = 'ACME_', .* not a tuple\n  remedy: .*\('ACME_',\)"),
        ("Acne", DriverError, "cannot be imported: .* no attribute 'Acne'\n  remedy: .* entry point"),
        ("Absent", DriverUnavailable, "there is no Acme card\n  remedy: buy one"),
        ("acme_broken:Driver", DriverError, "a_library_that_is_not_there"),
        ("acme_runtime:Driver", DriverError, "the driver acme cannot be imported: RuntimeError: the SDK is not init"),
        ("acme_missing:Driver", DriverError, "the driver acme cannot be imported: OSError: libacme_not_there"),
        ("acme_syntax:Driver", DriverError, "the driver acme cannot be imported: SyntaxError: "),
        ("acme_asserting:Driver", DriverError, "the driver acme cannot be imported: AssertionError: no card"),
        ("acme_exiting:Driver", DriverError, "the driver acme cannot be imported: SystemExit: 3"),
        ("Constructed", DriverError, "creating the driver acme failed: RuntimeError: no card"),
        ("Asking", DriverError, r"creating the driver acme failed: .*'card'\n .* Asking\(\) must take no"),
        ("ExitingProbe", DriverError, r"the probe of the driver acme raised SystemExit\(3\)"),
        ("ExitingOpen", DriverError, "opening the driver acme raised SystemExit: bye"),
        ("BusyOpen", DriverError, "opening the driver acme raised RuntimeError: card 0 is busy"),
        ("Otherwise", DriverIncompatible, "acme returned a backend with the name 'someone_else'"),
    ],
)
def test_what_cannot_be_used(vendor: Vendor, target: str, error: type[DriverError], message: str) -> None:
    vendor.install(acme=target if ":" in target else f"acme_driver:{target}")
    with pytest.raises(error, match=message):
        hal.open("acme")


def test_an_entry_point_of_another_name_is_refused(vendor: Vendor) -> None:
    """Otherwise configuration and variables would use one name, and errors and reports the other."""
    vendor.install(acme="acme_driver:Acme")
    type(registry.load_driver("acme")).name = "acme2"
    message = r"entry point acme in hal\.drivers loads a driver whose name is 'acme2'; .*\n.* name = 'acme' in .* Acme"
    with pytest.raises(DriverIncompatible, match=message):
        hal.open("acme")
    (found,) = [each for each in registry.candidates() if each.name == "acme"]
    assert not found.probe.available
    assert "whose name is 'acme2'" in found.probe.reason


def test_two_packages_with_one_driver_are_named(vendor: Vendor) -> None:
    vendor.install(acme="acme_driver:Acme")
    vendor.distribution("apex", acme="acme_driver:Absent")
    message = r"several packages register the driver acme: acme 1\.0, apex 1\.0\n  remedy: uninstall all but one"
    with pytest.raises(DriverError, match=message):
        hal.open("acme")
    assert "several packages" in {each.name: each.probe.reason for each in registry.candidates()}["acme"]


@pytest.mark.parametrize("target", ["acme_exiting:Driver", "acme_driver:Constructed", "acme_driver:ExitingProbe"])
def test_auto_warns_of_a_broken_driver(vendor: Vendor, target: str, caplog: pytest.LogCaptureFixture) -> None:
    vendor.install(acme=target, absent="acme_driver:Absent")
    with caplog.at_level("WARNING", "hal.drivers"):
        assert hal.open({}, activate=False).name == "cpu"
    (told,) = [each.getMessage() for each in caplog.records if each.name == "hal.drivers"]
    assert told.startswith("auto skips the driver acme: ")


def test_an_interruption_is_no_fault_of_the_drivers(vendor: Vendor) -> None:
    vendor.install(acme="acme_driver:Interrupted")
    for config in ("acme", {}):
        with pytest.raises(KeyboardInterrupt):
            hal.open(config)


class TestVariables:
    """A driver's ``HAL_<DRIVER>_*`` variables, if the backend is ``auto``."""

    def test_what_they_say_is_what_is_probed(self, vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
        vendor.install(picky="acme_driver:Picky")
        assert hal.open({}, activate=False).name == "cpu"
        monkeypatch.setenv("HAL_PICKY_CARD", "1")
        assert hal.open({}, activate=False).name == "picky"

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"HAL_PICKY_CARD": "1", "HAL_PICKY_CRAD": "2"}, r"'crad' .*set by HAL_PICKY_CARD, HAL_PICKY_CRAD\)"),
            ({"HAL_PICKY_CRAD": "1"}, r"unknown key 'crad' .*set by HAL_PICKY_CRAD"),
            ({"HAL_PICKY_CARD": "one"}, r"expected int, found str 'one' .*set by HAL_PICKY_CARD"),
            ({"HAL_PICKY_CARD": "{one"}, "HAL_PICKY_CARD is not valid JSON"),
            ({"HAL_CPU_NATIV": "true"}, r"unknown key 'nativ' .*set by HAL_CPU_NATIV\)"),
            ({"HAL_CPU_NATIVE": "{one"}, "HAL_CPU_NATIVE is not valid JSON"),
        ],
    )
    def test_a_wrong_one_is_an_error_by_name(
        self, vendor: Vendor, variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another driver is not chosen, because the variable refers to this one."""
        vendor.install(picky="acme_driver:Picky")
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        named = "picky" if any("PICKY" in name for name in variables) else "cpu"
        for config in ({}, named):
            with pytest.raises(ConfigError, match=message):
                hal.open(config, activate=False)


@pytest.mark.parametrize("minor", range(API_VERSION[1] + 1))
def test_a_driver_for_every_minor_version_so_far_runs(vendor: Vendor, trained: Path, minor: int) -> None:
    """It defines what the first minor version of this major version requires, and nothing newer."""
    vendor.install(acme="acme_driver:Acme")
    driver = registry.load_driver("acme")
    later = {name.partition(".")[2] for names in ADDED.values() for name in names if name.startswith("Driver.")}
    assert not later & set(vars(type(driver)))
    type(driver).api_version = (API_VERSION[0], minor)
    backend = hal.open({"backend": "acme", "dtype": "float32"})
    runner = hal.Runner(hal.load_model(trained, backend), backend)
    tokens = list(hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=3)))
    assert len(tokens) == 3
    hal.open("cpu")


def test_a_later_hal_loads_todays_drivers(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "API_VERSION", (4, 3))
    vendor.install(acme="acme_driver:NextMinor")
    assert hal.open("acme", activate=False).name == "acme"


def test_what_versions_added_is_there_and_all_of_it_is_for_drivers() -> None:
    assert max(ADDED, default=(API_VERSION[0], 0)) == API_VERSION
    for names in ADDED.values():
        for name in names:
            owner, _, attribute = name.partition(".")
            cls = getattr(hal, owner)
            assert hasattr(cls, attribute) or attribute in inspect.signature(cls).parameters, name


def test_an_unknown_driver_names_the_known_ones(vendor: Vendor) -> None:
    vendor.install(acme="acme_driver:Acme")
    with pytest.raises(DriverNotFound, match=r"did you mean 'acme'\? known: acme, cpu"):
        hal.open("acne")


def test_a_probe_that_says_no_must_say_why() -> None:
    with pytest.raises(ValueError, match="reason and a hint"):
        hal.vendor.Probe(False)


class TestChoices:
    def test_a_compiler_by_the_drivers_name_for_it(self, cpu: hal.Backend) -> None:
        class Named(hal.Backend):
            graph = type(cpu).graph

        backend = Named("named", cpu.device, kernels={}, graphs=True, aliases={"acmegraph": "graph"})
        phase = hal.PhaseConfig(compiler="acmegraph")
        for given in (hal.CompilationConfig("acmegraph"), hal.CompilationConfig(decode=phase)):
            backend.configure(hal.Config(backend="named", compilation=given))
            assert backend.config.compilation.of("decode").compiler == "graph"
        with pytest.raises(ConfigError, match="the backend cpu has no compiler 'acmegraph'"):
            hal.open({"backend": "cpu", "compilation": {"compiler": "acmegraph"}})

    @pytest.mark.parametrize("aliases", [{"graph": "eager"}, {"eager": "graph"}, {"mine": "yours"}])
    def test_an_alias_is_another_name_of_a_compiler(self, aliases: dict[str, str], cpu: hal.Backend) -> None:
        with pytest.raises(DriverIncompatible, match="the driver named has the alias"):
            hal.Backend("named", cpu.device, kernels={}, graphs=True, aliases=aliases)

    @pytest.mark.parametrize(
        ("compiler", "message"),
        [
            ("graph", "no compiler 'graph': it cannot capture graphs"),
            ("piecewise", "no compiler 'piecewise': it cannot capture graphs"),
            ("own", "no compiler 'own'\n"),
        ],
    )
    def test_what_the_driver_does_not_bring(self, cpu: hal.Backend, compiler: str, message: str) -> None:
        backend = hal.Backend("bare", cpu.device, kernels={})
        with pytest.raises(ConfigError, match=message):
            backend.configure(hal.Config("bare", compilation=hal.CompilationConfig(compiler)))

    def test_graphs_that_the_driver_promises_and_does_not_bring(self, cpu: hal.Backend) -> None:
        with pytest.raises(DriverIncompatible, match=r"has graphs = True but .*\n.* override Backend\.graph"):
            hal.Backend("promising", cpu.device, kernels={}, graphs=True)
        with pytest.raises(ConfigError, match="has no graphs"):
            hal.Backend("bare", cpu.device, kernels={}).graph()

    @pytest.mark.parametrize(
        "kernel", [lambda x, weight: x, lambda x, weight, *, eps: x, lambda x, weight, eps, more: x]
    )
    def test_a_kernel_of_other_arguments(self, cpu: hal.Backend, kernel: Any) -> None:
        message = r"cannot take the operation's 3 arguments: .*\n.*in this order: x, weight, eps"
        with pytest.raises(OperationError, match=message):
            hal.Backend("short", cpu.device, kernels={"rms_norm": kernel})

    def test_kernels_that_prepare_arguments_are_checked_too(self, cpu: hal.Backend) -> None:
        with pytest.raises(OperationError, match=r"cannot take the operation's 3 arguments"):
            hal.Backend("short", cpu.device, kernels={"rms_norm": PreparingKernel(lambda x, weight: x, {})})
        with pytest.raises(OperationError, match=r"'wieght', but the kernel takes x, weight, eps\n.*'weight'"):
            PreparingKernel(lambda x, weight, eps: x, {"wieght": torch.clone})
        with pytest.raises(OperationError, match="has no signature"):
            PreparingKernel(min, {"x": torch.clone})

    @thorough(MODE, r"\[(piecewise|graph)")
    @pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise", "piecewise_eager"])
    def test_a_runner_is_on_its_own_backend_whichever_is_active(self, trained: Path, compiler: str) -> None:
        """Runners alternate, and run in two threads; calls of operations outside runners use the active backend."""
        compilation = {"compiler": compiler} | ({} if compiler == "eager" else {"capture_sizes": [2]})
        mine = hal.open({"backend": "cpu", "dtype": "float32", "compilation": compilation})
        runs: list[str] = []

        def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            runs.append("other")
            return ops.operation("rms_norm").reference(x, weight, eps)

        class Other(hal.Backend):
            def graph(self) -> hal.vendor.Graph:
                return Tape()

        other = Other("other", hal.vendor.HostDevice(), kernels={"rms_norm": norm}, graphs=True)
        other.configure(hal.config.load({"backend": "other", "dtype": "float32", "compilation": compilation}))
        runners = [hal.Runner(hal.load_model(trained, each), each) for each in (mine, other)]
        assert mine.active
        assert bool(runs) == (compiler != "eager")
        batches = [each.batch([[5], [6]], [[1], [2]]) for each in runners]
        expected = [each.step(batch).logits.clone() for each, batch in zip(runners, batches, strict=True)]
        assert runs
        torch.testing.assert_close(*expected)
        wrong: list[str] = []

        def repeat(index: int) -> None:
            for _ in range(30):
                if not torch.equal(runners[index].step(batches[index]).logits, expected[index]):
                    wrong.append(f"runner {index}")

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(repeat, index) for index in (0, 1)]:
                done.result()
        assert not wrong
        runs.clear()
        ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
        runners[0].step(batches[0])
        assert not runs


class TestLimits:
    @pytest.mark.parametrize(
        ("given", "remedy"),
        [
            ({"dtypes": ()}, "one or more of torch.float32"),
            ({"dtypes": torch.float32}, "a tuple of"),
            ({"dtypes": (torch.float32, torch.float8_e4m3fn)}, "a tuple of"),
            ({"block_sizes": 16}, "positive integers"),
            ({"block_sizes": (64, 0)}, "positive integers"),
            ({"head_dims": [64]}, "positive integers"),
            ({"max_streams": -1}, "at least 0, or None"),
            ({"streams_per_graph": 0}, "at least 1"),
        ],
    )
    def test_what_no_backend_can_take_is_refused(self, given: dict[str, Any], remedy: str) -> None:
        ((name, value),) = given.items()
        with pytest.raises(DriverError, match=re.escape(f"{name}={value!r}")) as caught:
            hal.vendor.Limits(**given)
        assert remedy in caught.value.remedy


class TestMemory:
    """The memory that a process may use."""

    def test_a_container_has_less_than_its_machine(self, tmp_path: Path) -> None:
        """Control groups of versions 1 and 2, in a copy of Linux's file tree; a container's path may be the host's."""

        def write(name: str, text: str) -> None:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

        assert list(memory_limits(tmp_path)) == [], "not Linux"
        write("proc/self/cgroup", "12:cpu:/a\n4:hugetlb,memory:/docker/1f\n0::/user/shell\n")
        assert list(memory_limits(tmp_path)) == [], "not mounted"
        memory = "sys/fs/cgroup/memory"
        for folder, limit, used in ((memory, 9223372036854771712, 5000), (f"{memory}/docker", 3000, 2500)):
            write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
            write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
            write(f"{folder}/memory.stat", "active_file 1\ntotal_active_file 300\ntotal_inactive_file 200\n")
        for folder, limit in (("sys/fs/cgroup/user", "2000"), ("sys/fs/cgroup/user/shell", "max")):
            write(f"{folder}/memory.max", f"{limit}\n")
            write(f"{folder}/memory.current", "700\n")
            write(f"{folder}/memory.stat", "anon 500\nactive_file 150\ninactive_file 50\n")
        assert list(memory_limits(tmp_path)) == [(3000, 2000), (9223372036854771712, 4500), (2000, 500)]

    def test_the_least_limit_counts(self, cpu: hal.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hal.device.host_capacity, "memory_limits", lambda: iter([(1 << 62, 1), (5 << 20, 3 << 20)]))
        stats = cpu.device.memory_stats()
        assert (stats.free, stats.total) == (2 << 20, 5 << 20)
        monkeypatch.setattr(hal.device.host_capacity, "memory_limits", lambda: iter([(100, 200)]))
        assert cpu.device.memory_stats().free == 0, "over the limit"


def test_torch_is_imported_without_the_vendors_packages(tmp_path: Path) -> None:
    """A vendor's package that fails when torch loads it must not break the CPU driver."""
    install(tmp_path, "bad", "[torch.backends]\nbad = bad_backend:load\n")
    (tmp_path / "bad_backend.py").write_text("raise ImportError('libvendor.so is missing')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)

    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)

    assert "libvendor.so is missing" in run("import torch").stderr, "the package must break the import of torch"
    result = run("import hal, os; print(hal.open('cpu').name, 'TORCH_DEVICE_BACKEND_AUTOLOAD' in os.environ)")
    assert result.stdout.split() == ["cpu", "False"], result.stderr
