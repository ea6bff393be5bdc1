"""The pytest plugin of the conformance suite, :mod:`hal.testing`: creates a test per case, and reports by area.

The module lies outside the package ``hal``, because pytest loads it in every run where torch-hal is installed, and
importing ``hal`` imports torch. Functions import ``hal`` only for test modules with a ``conformance``.
"""

from __future__ import annotations

from typing import Any

import pytest

KEY = "hal_conformance"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create a test for each case of the module's ``conformance``."""
    if "conformance_case" not in metafunc.fixturenames:
        return
    conformance: Any = getattr(metafunc.module, "conformance", None)
    if conformance is None:
        pytest.fail(
            f"{metafunc.module.__name__} imports hal.testing.suite but defines no `conformance`\n"
            '  remedy: conformance = Conformance(backend="...")',
            pytrace=False,
        )
    problem = _problem_with(conformance)
    if problem:
        pytest.fail(problem, pytrace=False)
    metafunc.parametrize("conformance_case", [_parameter(conformance, case) for case in conformance.cases])


def _problem_with(conformance: Any) -> str:
    """Return the error in the hook's patterns, or an empty string."""
    from hal.errors import HalError

    try:
        conformance.check_patterns()
    except HalError as error:
        return str(error)
    return ""


def _parameter(conformance: Any, case: Any) -> Any:
    from hal.testing.case import unsupported

    marks: list[pytest.MarkDecorator] = []
    exception = conformance.exception(case.name)
    if exception is not None:
        kind, pattern, reason = exception
        if kind == "untried":
            marks.append(pytest.mark.skip(reason=reason))
        elif kind == "failing":
            marks.append(pytest.mark.xfail(reason=reason, strict=True))
        else:
            case = unsupported(case, pattern, reason)
    return pytest.param(case, marks=marks, id=case.name)


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """Say how many cases run, and how to run fewer."""
    names = [case.name for item in items if (case := _case_of(item)) is not None]
    parts = [name.split("/") for name in names]  # as operations/rms_norm/float32/sample-0
    dtype = next((each[2] for each in parts if each[0] == "operations" and len(each) > 3), None)
    short = [name for name in names if name.startswith("devices/") or f"/{dtype}/" in name]
    if dtype is None or len(short) > len(names) / 2:  # already a short form
        return []
    return [
        f"conformance: {len(names)} cases, which take minutes, mostly those of whole models; "
        f"pytest -k 'devices or (operations and {dtype})' is a short form"
    ]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Record backend, area and case on the item's reports, which may come from another process."""
    case = _case_of(item)
    if case is not None:
        item.user_properties.append((KEY, [item.module.conformance.title, case.area, case.name]))  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Record the shapes with which an operation failed, and omit the traceback of failures that the suite raises."""
    report = yield
    error: Any = call.excinfo.value if call.excinfo is not None else None
    if _case_of(item) is not None and hasattr(error, "shapes"):
        report.user_properties.append((f"{KEY}_shapes", [error.operation, error.shapes, error.size]))
    if _case_of(item) is not None and _raised_by_suite(error) and not item.config.getoption("fulltrace"):
        report.longrepr = call.excinfo.getrepr(style="value")  # type: ignore[union-attr]
    return report


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last case of a module, drop the models and graphs that its cases share."""
    module: Any = getattr(item, "module", None)
    if _case_of(item) is not None and module is not getattr(nextitem, "module", None):
        module.conformance.target.release()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table by area and the smallest failing shapes."""
    reports = [
        (kind, dict(report.user_properties))
        for kind in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        for report in terminalreporter.stats.get(kind, ())
        if any(name == KEY for name, _ in getattr(report, "user_properties", ()))
    ]
    if not reports:
        return
    from hal.testing.conformance_report import Outcome, summary

    outcomes = [Outcome.of(kind, properties, KEY) for kind, properties in reports]
    for backend in dict.fromkeys(each.backend for each in outcomes):
        terminalreporter.section(f"conformance of {backend}")
        for line in summary([each for each in outcomes if each.backend == backend]):
            terminalreporter.write_line(line)


def _raised_by_suite(error: BaseException | None) -> bool:
    """Return whether the suite itself raised ``error``; its traceback then adds nothing to the message."""
    if not isinstance(error, AssertionError) or error.__cause__ is not None:
        return False
    from hal.testing.case import raised_in

    return raised_in(error).startswith("hal.testing")


def _case_of(item: pytest.Item) -> Any:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("conformance_case")
