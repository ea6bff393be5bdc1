"""Tests for ``hal doctor``: it reports what works on this machine, and survives failures of vendors' packages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
from helpers.distributions import install
from helpers.late_driver import late_driver
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

import hal
from hal.cli import main
from hal.doctor import checks, doctor_report, findings, host_facts
from hal.doctor.findings import Findings

PASSED = dict.fromkeys(
    ["matmul", "projection", *(f"products of {each}" for each in checks.FORMS), *checks.OPERATIONS, "attention"],
    "passed",
)
"""The checks of a device but that of graphs, which not every driver has."""
ACME = """
import attrs, os, torch
import hal

@attrs.frozen
class Options:
    card: int = 0
    emulator: bool = False

class Acme(hal.vendor.Driver):
    name, api_version, priority = "acme", (4, 0), 7
    requires = ("torch>=2", "a-package-that-is-not-there==1.0")
    variables = ("ACME_",)

    def probe(self):
        return hal.vendor.Probe(True, "two cards")

    def open(self, options):
        chosen = hal.config.read(Options, options, "options of the acme driver")
        return self.backend(chosen, kernels={})

    def backend(self, chosen, **given):
        return hal.Backend(self.name, hal.vendor.HostDevice(f"card {chosen.card}"), **given)

    def devices(self, options):
        return [{**options, "card": card} for card in range(2)]

class Absent(Acme):
    def probe(self):
        return hal.vendor.Probe(False, "there is no Acme card", "buy one")

class StaleGraph(hal.vendor.Graph):
    '''Launches nothing at a replay, though host values are there.'''
    def _capture_context(self, stream):
        def wrap(operation, kernel):
            def recorded(*args):
                for name in operation.host:
                    self.host_values.record(name, operation.arguments(args, {})[name], operation.name)
                return kernel(*args)
            return recorded
        return hal.ops.intercepted(wrap)
    def _begin(self, context, pool): pass
    def _end(self, outputs): return outputs, None
    def _abandon(self): pass
    def _launch(self, host_values): self.host_values.write(host_values)
    def _release(self): pass
    def dump(self, path): pass

class Faulty(Acme):
    def backend(self, chosen, **given):
        class Backend(hal.Backend):
            def graph(self): return StaleGraph()
        def silu_and_mul(x):
            raise RuntimeError("unit 3 is on fire")
        wrong = lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps + 0.1)
        kernels = {"rms_norm": wrong, "silu_and_mul": silu_and_mul}
        return Backend(self.name, hal.vendor.HostDevice(), kernels=kernels, graphs=True)

class RaisesInProbe(Acme):
    def probe(self):
        raise OSError("bus error")

class NoProbe(Acme):
    def probe(self):
        return None

class RaisesInOpen(Acme):
    def open(self, options):
        raise hal.errors.DeviceError("the firmware is old", "update it")

class NoDevices(Acme):
    def devices(self, options):
        return []

class DiesInOpen(Acme):
    def open(self, options):
        os.abort()

class DiesAtTheEnd(Acme):
    def open(self, options):
        import atexit
        atexit.register(os.abort)
        return super().open(options)

class Talkative(Acme):
    '''Writes to stdout, and leaves a child behind that keeps stderr open.'''
    def open(self, options):
        import subprocess
        print("welcome to Acme")
        subprocess.Popen(["sleep", "20"])
        return super().open(options)

class NextMinor(Acme):
    api_version = (4, 99)
"""
BROKEN = {
    "raises": "raise RuntimeError('no libacme.so')",
    "vanishes": "import os; os._exit(0)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "hangs": "import time\nwhile True: time.sleep(1)",
}
"""Modules of drivers that fail when they are imported."""


@attrs.frozen
class Doctor:
    """A folder with one vendor's package."""

    site: Path

    def install(self, drivers: Mapping[str, str], **modules: str) -> None:
        entries = [f"{name} = {target}" for name, target in drivers.items()]
        install(self.site, "acme", "\n".join(["[hal.drivers]", *entries]))
        ours = {target.removeprefix("acme_driver:"): name for name, target in drivers.items() if "acme_" in target}
        named = "".join(f"{each}.name = {name!r}\n" for each, name in ours.items())
        for name, text in {"acme_driver": ACME + named, **modules}.items():
            (self.site / f"{name}.py").write_text(textwrap.dedent(text))

    def run(self, *arguments: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: text for name, text in os.environ.items() if not name.startswith("HAL_") or name == "HAL_CACHE_DIR"
        }
        kept |= {"PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        result = subprocess.run(
            [sys.executable, "-c", "from hal.cli import main; main()", "doctor", *arguments],
            env=kept | environ,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result

    def found(self, *arguments: str, code: int = 0, **environ: str) -> dict[str, Any]:
        return dict(json.loads(self.run("--json", *arguments, code=code, **environ).stdout))

    def driver(self, name: str, *arguments: str, code: int = 0, **environ: str) -> dict[str, Any]:
        """Return the findings for one driver, examined alone."""
        (driver,) = self.found("--backend", name, *arguments, code=code, **environ)["drivers"]
        return dict(driver)


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path / "site")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the findings for all installed drivers: valid ones, and some whose import kills the process."""
    doctor = Doctor(tmp_path_factory.mktemp("everything") / "site")
    broken = {name: text for name, text in BROKEN.items() if name != "hangs"}
    drivers = {name: f"broken_{name}:Driver" for name in broken}
    drivers |= {name: f"acme_driver:{name}" for name in re.findall(r"class (\w+)\(Acme\)", ACME)}
    drivers["acme"] = "acme_driver:Acme"
    doctor.install(drivers, **{f"broken_{name}": text for name, text in broken.items()})
    return doctor.found(code=1)


def of(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in document["drivers"] if each["name"] == name]
    return dict(found)


@thorough(PROCESSES)
@pytest.mark.parametrize(
    ("name", "reason", "logged"),
    [
        (
            "raises",
            "importing the driver: the driver raises cannot be imported: RuntimeError: no libacme.so",
            "no libacme.so",
        ),
        ("vanishes", "importing the driver: it exited with status 0", ""),
        ("crashes", "importing the driver: it was terminated by SIGSEGV", "Fatal Python error: Segmentation fault"),
    ],
)
def test_a_package_that_fails_at_import_is_reported(
    everything: dict[str, Any], name: str, reason: str, logged: str
) -> None:
    found = of(everything, name)
    assert (found["status"], found["reason"], found["api_version"]) == ("broken", reason, None)
    assert logged in "\n".join(found["log"])
    assert found["hint"]


@thorough(PROCESSES)
def test_what_a_driver_that_crashes_leaves_behind_is_ended(doctor: Doctor, tmp_path: Path) -> None:
    file = tmp_path / "child"
    text = f"""
        import os, subprocess
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        with open({str(file)!r}, "w") as file:
            file.write(str(child.pid))
        os.abort()
    """
    doctor.install({"leaves": "leaves:Driver"}, leaves=text)
    assert "SIGABRT" in doctor.driver("leaves", code=1)["reason"]
    child, end = int(file.read_text()), time.monotonic() + 10
    while psutil.pid_exists(child):
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.05)


@thorough(PROCESSES)
def test_and_the_others_are_examined_all_the_same(everything: dict[str, Any]) -> None:
    assert everything["ok"] is False
    cpu, acme, absent = (of(everything, name) for name in ("cpu", "acme", "Absent"))
    assert cpu["status"] == acme["status"] == "works"
    assert (absent["status"], absent["reason"], absent["hint"]) == ("unavailable", "there is no Acme card", "buy one")
    assert "needs driver API 4.99" in of(everything, "NextMinor")["reason"]
    assert of(everything, "NextMinor")["status"] == "broken"


class TestLimits:
    """Each driver has a time limit, and so have all together."""

    @thorough(PROCESSES)
    def test_each_and_all_have_a_limit(self, doctor: Doctor) -> None:
        doctor.install(dict.fromkeys(["a_hangs", "b_hangs"], "broken_hangs:Driver"), broken_hangs=BROKEN["hangs"])
        document = doctor.found("--timeout", "20", "--total-timeout", "32", code=1)
        assert document["ok"] is False
        first, second, cpu = (of(document, name) for name in ("a_hangs", "b_hangs", "cpu"))
        assert (first["status"], first["reason"]) == ("broken", "importing the driver: it was killed after 20 s")
        assert "--timeout" in first["hint"]
        assert any("broken_hangs.py" in line and "line 2" in line for line in first["log"]), first["log"]
        assert second["status"] == "broken"
        assert "it was killed after " in second["reason"]
        assert "--total-timeout" in second["hint"]
        assert (cpu["status"], cpu["reason"]) == ("unavailable", "not examined: the time for all drivers ran out")
        assert "--total-timeout" in cpu["hint"]

    @thorough(PROCESSES)
    def test_an_interrupt_leaves_no_process(self, doctor: Doctor) -> None:
        named = f"hangs_{os.getpid()}"
        doctor.install({named: "broken_hangs:Driver"}, broken_hangs=BROKEN["hangs"])
        environ = {**os.environ, "PYTHONPATH": str(doctor.site), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", "from hal.cli import main; main()", "doctor", "--backend", named],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        with process.stderr:
            while f"examining the driver {named}" not in process.stderr.readline():
                assert process.poll() is None
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
            assert "Traceback" not in process.stderr.read()
        assert [each.pid for each in psutil.process_iter() if named in _command_line(each)] == []


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # the process has just ended
        return []


@thorough(PROCESSES)
def test_what_is_examined_on_each_device(everything: dict[str, Any]) -> None:
    assert [device["name"] for device in of(everything, "acme")["devices"]] == ["card 0", "card 1"]
    for name, graph in (("cpu", "passed"), ("acme", "skipped")):
        for device in of(everything, name)["devices"]:
            outcomes = {each["name"]: each["outcome"] for each in device["checks"]}
            assert outcomes == {**PASSED, "graph": graph}
            measures = device["measures"]
            assert measures["copy_bytes"] == 64 << 20
            assert 0.05 < measures["host_to_device_gb_per_s"] < 1000
            assert 0.05 < measures["device_to_host_gb_per_s"] < 1000
            assert 0.1 < measures["launch_us"] < 10_000
            assert 0 < measures["memory_free_bytes"] < measures["memory_total_bytes"]


@thorough(PROCESSES)
def test_versions(everything: dict[str, Any]) -> None:
    acme, cpu = of(everything, "acme"), of(everything, "cpu")
    assert (acme["package"], acme["version"], acme["api_version"], acme["priority"]) == ("acme", "1.0", "4.0", 7)
    assert (cpu["package"], cpu["version"]) == ("torch-hal", hal.__version__)
    assert everything["hal"] == hal.__version__
    assert everything["driver_api"] == ".".join(map(str, hal.API_VERSION))
    assert everything["schema"] == findings.SCHEMA
    import torch

    assert everything["torch"]["version"] == torch.__version__
    assert everything["torch"]["git_version"] == torch.version.git_version
    rows = {(each["required_by"], each["package"]): each for each in everything["packages"]}
    assert rows["torch-hal", "torch"] | {"found": torch.__version__, "fits": True} == rows["torch-hal", "torch"]
    assert rows["npu", "torch-npu"]["requirement"] == "==2.13.0"
    assert rows["npu", "torch"]["requirement"] == "==2.13.*"
    for extra, package in (
        ("transformers", "transformers"),
        ("vllm", "vllm"),
        ("serve", "starlette"),
        ("cuda", "triton"),
    ):
        row = rows[f"torch-hal[{extra}]", package]
        assert row["requirement"]
        assert row["found"] or not row["fits"]
    missing = rows["acme", "a-package-that-is-not-there"]
    assert (missing["found"], missing["fits"]) == (None, False)


@thorough(PROCESSES)
def test_the_docs_describe_every_key_and_option(everything: dict[str, Any], repository: Path) -> None:
    text = (repository / "docs" / "how-to" / "examine-an-installation.md").read_text(encoding="utf-8")
    assert set(everything) == {field.name for field in attrs.fields(Findings)}
    told = [*everything, *everything["torch"], *everything["packages"][0], *everything["drivers"][0]]
    device = of(everything, "cpu")["devices"][0]
    told += [*device, *device["checks"][0], *device["measures"]]
    assert [key for key in told if f"`{key}`" not in text] == []
    options = [name for option in main.commands["doctor"].params for name in option.opts]
    assert [option for option in options if f"`{option}" not in text] == []


@pytest.mark.parametrize(
    ("requirement", "fits"),
    [("torch>=2", True), ("torch<2", False), ("torch!!", False), ("torch; python_version < '3'", None)],
)
def test_what_fits(requirement: str, fits: bool | None) -> None:
    driver = findings.Driver("acme", "acme:Driver", "acme", "1.0", requires=[requirement])
    rows = [each for each in host_facts.packages([driver]) if each.required_by == "acme"]
    assert [each.fits for each in rows] == ([] if fits is None else [fits])


@pytest.mark.parametrize(("took", "shown"), [(None, "-"), (50.0, "50 ms"), (312.5, "312.5 ms, over 50")])
def test_a_slow_probe_is_shown_as_such(took: float | None, shown: str) -> None:
    driver = findings.Driver("acme", "acme:Driver", "acme", "1.0", probe_ms=took)
    alone = Findings("1", "1.1", "3", "linux", 1, 1, 0.0, findings.Torch(), {}, [], [driver], True)
    columns, (row,) = doctor_report.drivers(alone)
    assert row[columns.index("probe")] == shown


@thorough(PROCESSES)
def test_checks_that_fail(everything: dict[str, Any]) -> None:
    expected = {
        "rms_norm": "times the allowed difference",
        "silu_and_mul": "it raised RuntimeError: unit 3 is on fire",
        "graph": "a replay after the input was set to 5.0",
    }
    found = of(everything, "Faulty")
    assert (found["status"], found["reason"]) == ("broken", f"failed: {', '.join(expected)}")
    for device in found["devices"]:
        failed = {each["name"]: each for each in device["checks"] if each["outcome"] == "failed"}
        assert list(failed) == list(expected)
        assert all(detail in failed[name]["detail"] for name, detail in expected.items()), failed
        assert all(check["remedy"] for check in failed.values())
        assert device["measures"] is not None, "a failed check must not end the examination"


@thorough(PROCESSES)
@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("RaisesInProbe", "probing: it raised OSError('bus error')", "report it"),
        ("NoProbe", "probing: the probe returned None, not a hal.vendor.Probe", "report it"),
        ("RaisesInOpen", "opening the driver: the driver RaisesInOpen: the firmware is old", "update it"),
        ("NoDevices", "opening the driver: the driver can be opened, but its `devices` returned []", "report it"),
        ("DiesInOpen", "opening the driver: it was terminated by SIGABRT", "see the log"),
        ("DiesAtTheEnd", "ending the process: it was terminated by SIGABRT", "see the log"),
    ],
)
def test_a_driver_that_fails_later_than_at_import(
    everything: dict[str, Any], name: str, reason: str, hint: str
) -> None:
    found = of(everything, name)
    assert found["status"] == "broken"
    assert found["reason"].startswith(reason)
    assert hint in found["hint"]


@thorough(PROCESSES)
def test_what_a_driver_writes_and_leaves_behind_disturbs_nothing(everything: dict[str, Any]) -> None:
    assert of(everything, "Talkative")["status"] == "works"


class TestOneDriver:
    def test_it_works(self, doctor: Doctor) -> None:
        doctor.install({"acme": "acme_driver:Acme"})
        result = doctor.run("--backend", "acme")
        assert result.stdout.splitlines()[-1] == "everything that is available works"
        assert "acme: card 1 (cpu)" in result.stdout
        (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("a-package-that-is-not-there")]
        assert row == ["a-package-that-is-not-there", "-", "acme", "==1.0", "not", "installed"]
        assert result.stderr.splitlines() == ["examining torch ...", "examining the driver acme ..."]

    @thorough(PROCESSES)
    def test_unavailable_is_not_what_was_asked_for(self, doctor: Doctor) -> None:
        doctor.install({"absent": "acme_driver:Absent"})
        result = doctor.run("--backend", "absent", code=1)
        assert "there is no Acme card" in result.stdout
        assert "buy one" in result.stdout
        assert result.stdout.splitlines()[-1] == "no examined driver can run here"

    def test_an_unknown_one_names_the_known(self, doctor: Doctor) -> None:
        doctor.install({"acme": "acme_driver:Acme"})
        assert "did you mean 'acme'?" in doctor.run("--backend", "acne", code=2).stderr

    @thorough(PROCESSES)
    def test_options_come_from_its_environment(self, doctor: Doctor) -> None:
        doctor.install({"acme": "acme_driver:Acme"})
        found = doctor.driver("acme", code=1, HAL_ACME_NONSENSE="1")
        assert "unknown key 'nonsense'" in found["reason"]

    @thorough(PROCESSES)
    def test_emulate_is_an_option_that_not_all_have(self, doctor: Doctor) -> None:
        doctor.install({"acme": "acme_driver:Acme"})
        assert doctor.driver("acme", "--emulate")["status"] == "works"
        assert "the driver cpu has no emulated device" in doctor.run("--backend", "cpu", "--emulate", code=2).stderr
        assert "--emulate needs a driver" in doctor.run("--emulate", code=2).stderr


class TestPrivacy:
    @thorough(PROCESSES)
    def test_home_names_and_other_variables_stay_out(self, doctor: Doctor, tmp_path: Path) -> None:
        doctor.install({"raises": "broken_raises:Driver", "acme": "acme_driver:Acme"}, broken_raises=BROKEN["raises"])
        personal = {"HOME": str(tmp_path), "LOGNAME": "alice", "USER": "alice", "ACME_KEYS": "/data/alice/keys"}
        mine = {"CUDA_VISIBLE_DEVICES": "3", "HAL_ACME_CARD": "1", "SECRET": "hunter2"}
        shown = doctor.run("--backend", "raises", code=1, **personal, **mine).stdout
        assert "~/site/broken_raises.py" in shown
        document = doctor.run("--json", "--backend", "acme", **personal, **mine).stdout
        for text in (shown, document):
            assert "alice" not in text
            assert "hunter2" not in text
            assert str(tmp_path) not in text
        variables = json.loads(document)["variables"]
        variables.pop(host_facts.AUTOLOAD, None)
        variables.pop("HAL_CACHE_DIR", None)
        assert variables == {"ACME_KEYS": "/data/USER/keys", "CUDA_VISIBLE_DEVICES": "3", "HAL_ACME_CARD": "1"}


@thorough(PROCESSES)
def test_a_vendors_package_that_breaks_the_import_of_torch(doctor: Doctor) -> None:
    doctor.install({"acme": "acme_driver:Acme"}, acme_backend="raise ImportError('libacme.so is missing')")
    (doctor.site / "acme-1.0.dist-info" / "entry_points.txt").write_text(
        "[hal.drivers]\nacme = acme_driver:Acme\n[torch.backends]\nacme = acme_backend:load\n"
    )
    on = {host_facts.AUTOLOAD: "0"}
    assert doctor.found("--backend", "acme", **on)["torch"]["imports"] is True
    found = doctor.found("--backend", "acme", **{host_facts.AUTOLOAD: "1"}, code=1)
    torch = found["torch"]
    assert torch["imports"] is False
    assert torch["version"], "the version comes from an import without the vendors' packages"
    assert "Failed to load the backend extension: acme" in torch["problem"]
    assert host_facts.AUTOLOAD in torch["remedy"]
    assert "an environment without the package" in torch["remedy"], "transformers imports it in any order"
    # With this variable, hal cannot keep torch from importing the package either, so the driver is unusable.
    assert of(found, "acme")["status"] == "broken"


@thorough(PROCESSES, r"\[[01]\]")
@pytest.mark.parametrize("autoload", ["0", "1", None])
def test_without_torch_the_rest_is_told(doctor: Doctor, autoload: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host_facts.AUTOLOAD, raising=False)
    doctor.install({}, torch="raise ImportError('libtorch.so is missing')")
    environ = {} if autoload is None else {host_facts.AUTOLOAD: autoload}
    shown = doctor.run(code=1, **environ)
    assert shown.stderr == "examining torch ...\n", "no driver is examined"
    lines = shown.stdout.splitlines()
    assert "torch cannot be imported" in lines
    assert "warning: it exited with status 1: ImportError: libtorch.so is missing" in lines
    assert "remedy: reinstall torch" in lines
    assert lines[-1] == "torch cannot be imported"
    found = doctor.driver("cpu", code=1, **environ)
    assert (found["status"], found["reason"], found["hint"]) == (
        "unavailable",
        "not examined: torch cannot be imported",
        "reinstall torch",
    )


class TestRanks:
    """``--tensor-parallel`` starts ranks of each driver that works."""

    @thorough(PROCESSES)
    def test_of_the_cpu(self, doctor: Doctor) -> None:
        result = doctor.run("--backend", "cpu", "--tensor-parallel", "2")
        assert "cpu: 2 ranks (cpu, cpu)" in result.stdout
        rows = {
            line.split()[0]: line.split()[1:] for line in result.stdout.partition("2 ranks (")[2].splitlines() if line
        }
        assert [rows[name][0] for name in ("all_reduce", "all_gather", "reduce_scatter")] == ["passed"] * 3
        assert rows["latency"][1:] == ["us", "all_reduce", "of", "8", "KiB"]
        assert rows["bandwidth"][1:] == ["GB/s", "all_reduce", "of", "64", "MiB"]
        assert float(rows["latency"][0]) > 0
        assert float(rows["bandwidth"][0]) > 0

    @thorough(EXHAUSTIVE)
    def test_a_rank_that_does_not_come(self, doctor: Doctor) -> None:
        doctor.install({"late": "late_driver:Late"}, late_driver=LATE)
        found = doctor.driver("late", "--tensor-parallel", "2", "--timeout", "20", code=1)
        assert found["status"] == "broken"
        assert "2 ranks: rank 1 did not come within 20 s (rank 1 was opening the driver)" in found["reason"]
        assert found["ranks"]["devices"] == ["cpu", ""]

    @thorough(PROCESSES)
    def test_wrong_sums(self, doctor: Doctor) -> None:
        doctor.install({"late": "late_driver:Wrong"}, late_driver=LATE)
        found = doctor.driver("late", "--tensor-parallel", "2", code=1)
        assert found["reason"] == "2 ranks: failed: all_reduce"
        (check,) = (each for each in found["ranks"]["checks"] if each["outcome"] == "failed")
        assert check["detail"].startswith("rank 1: all_reduce, torch.float32: ")

    @thorough(PROCESSES)
    def test_a_driver_of_single_devices(self, doctor: Doctor) -> None:
        doctor.install({"acme": "acme_driver:Acme"})
        found = doctor.driver("acme", "--tensor-parallel", "2")
        assert found["status"] == "works"
        assert found["ranks"]["skipped"] == "the driver acme names no backend of torch.distributed"


LATE = (
    late_driver("time.sleep(600)")
    + """
class Wrong(Late):
    def open(self, options):
        def all_reduce(x, group):
            summed = collectives.all_reduce(x, group)
            return summed + 1 if os.environ.get("RANK") == "1" else summed
        return hal.Backend("late", hal.vendor.HostDevice(), kernels={"all_reduce": all_reduce}, distributed="gloo")
"""
)
"""A module with drivers of which rank 1 is never opened, or wrong."""
