"""Tests for the conformance hook in a separate pytest run: exceptions, reports, and invalid hooks."""

from __future__ import annotations

import pytest
import torch
from helpers.thorough import PROCESSES, thorough

from hal import ops, vendor
from hal.errors import ConfigError
from hal.testing import Conformance

pytest_plugins = ["pytester"]

HOOK = """
from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

{before}
conformance = Conformance(backend={backend!r}, {more})
"""
BROKEN = """
from types import MappingProxyType
from hal.backends.cpu.driver import CpuBackend, CpuOptions

def wrong(x, weight, eps):
    return x * 2

def opened():
    backend = CpuBackend(CpuOptions(native=False, pack_weights=False))
    backend.kernels = MappingProxyType({**backend.kernels, "rms_norm": wrong})
    return backend
"""
RAISING = BROKEN.replace("return x * 2", 'raise RuntimeError("no such kernel")')
WITHOUT_LIBRARY = """
import sys, types, hal

class Acme(hal.vendor.Driver):
    name, api_version = "acme", (4, 0)
    def probe(self):
        return hal.vendor.Probe(True)
    def open(self, options):
        import a_library_that_is_not_there

from importlib.metadata import EntryPoint
from hal.drivers import registry
registry.DRIVERS.load = lambda name: Acme()
"""
UNAVAILABLE = """
from hal.errors import DriverUnavailable

def opened():
    raise DriverUnavailable("there is no Acme card", "buy one")
"""
DECLARES = """
from hal.ops import FLOATING, op

def _samples(draw):
    for rows, width in ((1, 32), (5, 48)):
        yield (draw.normal(rows, width),)

@op(
    samples=_samples, namespace="acme", axes={"x": "rows width", "return": "rows width"},
    dtypes={"x": FLOATING, "return": "x"}, rowwise="rows",
)
def acme_halve(x: "Tensor") -> "Tensor":
    return x / 2

acme_halve
"""


CPU = Conformance(backend="cpu")
"""Imported before pytester's runs in this process, which unload the modules that they import."""
for each in CPU.cases[:2]:
    each.run()
assert vendor.Driver, "hal keeps lazily imported modules, which must not be unloaded"


def run(
    pytester: pytest.Pytester,
    chosen: str,
    more: str = "",
    before: str = "",
    backend: str = "cpu",
    *options: str,
    apart: bool = False,
) -> pytest.RunResult:
    pytester.makepyfile(test_vendor=HOOK.format(backend=backend, more=more, before=before))
    start = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
    return start("-p", "no:cacheprovider", "-rsxX", "-k", chosen, *options)


def test_a_passing_run_and_its_table(pytester: pytest.Pytester) -> None:
    result = run(pytester, "devices/ or [streams/")
    result.assert_outcomes(passed=20)
    result.stdout.fnmatch_lines(
        [
            "*conformance of cpu*",
            "area * cases * passed * skipped * expected to fail * failed",
            "devices * 13 * 13 * 0 * 0 * 0",
            "streams * 7 * 7 * 0 * 0 * 0",
            "all * 20 * 20 * 0 * 0 * 0",
        ]
    )


@thorough(PROCESSES)
def test_the_table_of_several_workers(pytester: pytest.Pytester) -> None:
    result = run(pytester, "[streams/", "", "", "cpu", "-n", "2", apart=True)
    result.stdout.fnmatch_lines(["streams * 7 * 7 * 0 * 0 * 0"])


def test_unsupported_is_tried_and_counts_as_skipped_with_its_reason(pytester: pytest.Pytester) -> None:
    without = "opened = lambda: hal.Backend('plain', hal.vendor.HostDevice(), kernels={})"
    more = 'unsupported={"graphs/*": "there are no graphs"}, open=opened'
    result = run(pytester, "graphs/ and not replay", more, f"import hal\n{without}")
    assert set(result.parseoutcomes()) == {"skipped", "deselected"}
    result.stdout.fnmatch_lines(["graphs * 0 * 0 * 0", "SKIPPED*there are no graphs"])


def test_unsupported_that_passes_is_an_error(pytester: pytest.Pytester) -> None:
    result = run(pytester, "[streams/", 'unsupported={"streams/o*": "one queue only"}')
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*the case passes, but the entry 'streams/o[*]' of `unsupported` says: "
            "one queue only; remove the entry, or *",
            "streams * 7 * 6 * 0 * 0 * 1",
        ]
    )


@thorough(PROCESSES)
def test_untried_is_not_even_run(pytester: pytest.Pytester) -> None:
    ends = BROKEN.replace("return x * 2", "import os; os._exit(3)")
    more = (
        'untried={"operations/rms_norm/*": "it ends the process"}, unsupported={"operations/rms_*": "too"}, open=opened'
    )
    result = run(pytester, "/rms_norm/float32/sample-0", more, ends, apart=True)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*it ends the process"])


def test_failing_is_expected_to_fail_and_the_smallest_shapes_are_shown(pytester: pytest.Pytester) -> None:
    result = run(pytester, "operations/rms_norm/float32", "open=opened", BROKEN)
    assert result.parseoutcomes()["failed"] >= 5
    result.stdout.fnmatch_lines(
        [
            "*conformance of cpu*",
            "rms_norm fails; smallest failing shapes: x float32[[]1, 64], weight float32[[]64], eps 1e-06 "
            "(operations/rms_norm/float32/sample-0)",
        ]
    )
    known = 'failing={"operations/rms_norm/float32/*[!y0]": "issue 12"}, open=opened'
    result = run(pytester, "operations/rms_norm/float32/sample-1", known, BROKEN)
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["operations * 1 * 0 * 0 * 1 * 0", "XFAIL*issue 12"])


def test_an_expected_failure_that_passes_is_an_error(pytester: pytest.Pytester) -> None:
    result = run(pytester, "[streams/", 'failing={"streams/order": "issue 12"}')
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*issue 12*", "streams * 7 * 6 * 0 * 0 * 1"])


@pytest.mark.parametrize("kind", ["untried", "unsupported", "failing"])
def test_a_pattern_that_matches_nothing_is_an_error(pytester: pytest.Pytester, kind: str) -> None:
    result = run(pytester, "[streams/", f'{kind}={{"operations/rms_nrm/*": "typed in haste"}}')
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "*the pattern 'operations/rms_nrm/*' matches none of the * cases of the backend cpu*",
            "*did you mean 'operations/rms_norm/*'*",
        ]
    )


def test_only_some_cases_are_made() -> None:
    conformance = Conformance(backend="cpu", only=("streams/*", "operations/rms_norm/float32/*"))
    assert {each.area for each in conformance.cases} == {"devices", "streams", "operations"}
    assert [each.name for each in conformance.cases if each.area == "devices"] == ["devices/open"]
    conformance.check_patterns()
    with pytest.raises(ConfigError, match=r"the pattern 'streems/\*' matches none of the \d+ cases"):
        Conformance(backend="cpu", only=("streams/*", "streems/*")).check_patterns()


def test_an_exception_without_a_reason_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'graphs/\\*' has no reason"):
        Conformance(backend="cpu", unsupported={"graphs/*": " "})


def test_unavailable_is_skipped_and_missing_fails(pytester: pytest.Pytester) -> None:
    result = run(pytester, "test_conformance", 'open=opened, failing={"graphs/*": "never seen here"}', UNAVAILABLE)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*there is no Acme card; buy one"])
    result = run(pytester, "test_conformance", backend="no-such-driver")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no driver 'no-such-driver' is installed*"])


@thorough(PROCESSES)
def test_a_library_that_the_probe_did_not_miss_fails(pytester: pytest.Pytester) -> None:
    """Otherwise a misspelled import would look like a machine without the device."""
    result = run(pytester, "test_conformance", before=WITHOUT_LIBRARY, backend="acme", apart=True)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*the probe reports the driver as available, but * No module named 'a_library_that_is_*"]
    )


@thorough(PROCESSES)
def test_a_failure_is_told_without_the_suites_own_lines(pytester: pytest.Pytester) -> None:
    result = run(pytester, "/rms_norm/float32/sample-0", "open=opened", BROKEN, apart=True)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rms_norm(x float32*", "result 0 is off: *"])
    result.stdout.no_fnmatch_line("*check.py*def*")
    result.stdout.no_fnmatch_line("*problems = *")
    more = ("cpu", "--full-trace")
    shown = run(pytester, "/rms_norm/float32/sample-0", "open=opened", BROKEN, *more, apart=True)
    shown.stdout.fnmatch_lines(["*problems = *"])


@thorough(PROCESSES)
def test_a_kernel_that_raises_is_shown_with_its_line_and_shapes(pytester: pytest.Pytester) -> None:
    result = run(pytester, "/rms_norm/float32/sample-0", "open=opened", RAISING, apart=True)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            '>*raise RuntimeError("no such kernel")',
            "E * it raised RuntimeError: no such kernel",
            "rms_norm fails; smallest failing shapes: x float32[[]1, 64], *",
        ]
    )


def test_a_hook_that_names_two_backends_is_an_error() -> None:
    with pytest.raises(ConfigError, match="`config` sets backend='cuda', but `backend` is 'cpu'"):
        Conformance(backend="cpu", config={"backend": "cuda"})


def test_a_module_without_the_hook_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_vendor="from hal.testing.suite import *  # noqa: F403\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*defines no `conformance`*"])


@thorough(PROCESSES)
def test_an_operation_is_covered_the_day_it_is_declared(pytester: pytest.Pytester) -> None:
    result = run(pytester, "acme_halve", "", "from torch import Tensor\n" + DECLARES, apart=True)
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] > 20, outcomes
    assert set(outcomes) <= {"passed", "deselected"}


def test_a_run_without_conformance_imports_neither_torch_nor_hal(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest loads the plugin in every run of every project in an environment with torch-hal."""
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)  # then `import hal` prepares the import of torch
    pytester.makepyfile("""
        import sys

        def test_elsewhere(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("hal")
            assert not {"torch", "hal"} & {name.partition(".")[0] for name in sys.modules}
    """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_every_operation_has_cases_in_every_area_that_it_concerns() -> None:
    conformance = Conformance(backend="cpu")
    names = [each.name for each in conformance.cases]
    assert len(set(names)) == len(names)
    assert {each.area for each in conformance.cases} == {
        "devices",
        "streams",
        "events",
        "memory",
        "operations",
        "invariance",
        "rewrites",
        "graphs",
        "runners",
        "models",
        "errors",
        "limits",
        "leaks",
        "closing",
        "ranks",
    }
    of_ranks = {  # Some are compared together.
        one for each in names if each.startswith("ranks/operations/") for one in each.split("/")[2].split("+")
    }
    for operation in (each for each in ops.catalogue().values() if each.namespace == "hal"):
        assert f"graphs/replay/{operation.name}" in names
        assert f"leaks/operations/{operation.name}" in names
        assert (operation.name in of_ranks) == operation.collective
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            subject = f"operations/{operation.name}/{str(dtype).removeprefix('torch.')}"
            count = sum(1 for _ in operation.samples(ops.Draw(dtype)))
            assert {f"{subject}/sample-{number}" for number in range(count)} | {f"{subject}/node"} <= set(names)
            assert not operation.fused or f"rewrites/{operation.name}/{str(dtype)[6:]}/another-reader" in names
        edges = f"operations/{operation.name}/float32/rows-0" in names
        empty = operation.rowwise is None and any(
            next(each for each in sample if isinstance(each, torch.Tensor)).numel() == 0
            for sample in operation.samples(ops.Draw())
        )
        assert edges or empty or operation.host, f"{operation.name} is not tried without rows"


def test_no_case_is_named_after_a_number_that_changes() -> None:
    first, again = (tuple(each.name for each in Conformance(backend="cpu").cases) for _ in range(2))
    assert first == again
