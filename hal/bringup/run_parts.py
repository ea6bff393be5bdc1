"""Runs the parts of a bring-up, each in a process with a time limit, and reports their outcome in JSON and HTML."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
from jinja2 import Environment

from hal.bench.plot import launches, times
from hal.bringup.parts import Outcome, Part, Request, compare_texts, parts, read_output
from hal.config.child_process import LOG_LINES, ChildProcess, line_writer, read_lines
from hal.config.process_keeper import ProcessKeeper
from hal.progress import Say
from hal.testing.case import Case, NotApplicable
from hal.testing.conformance import Conformance

SHORT = ("devices", "graphs", "operations")
STOPPED = 3
"""The exit status after a failure, if cases are left."""
DTYPES = ("float32", "bfloat16", "float16")
CASE_SECONDS = 180.0
"""The most time of a case of the conformance suite."""
RESTARTS = 25
"""After so many cases that failed, the rest runs in one process."""
TRACE = "--trace"
"""An option of `hal bench`, without which a backend that counts no launches is measured."""
PAUSE = 0.2
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
PROGRAM = ("-m", "hal_command")
CONFORMANCE = ("-m", "hal.bringup.run_parts")


def run_parts(request: Request, options: Mapping[str, Any], folder: Path, say: Say) -> list[Outcome]:
    """Run all parts; write the output of each to the folder.

    Args:
        options: the driver's options, such as those of ``--emulate``.
        folder: an existing folder.
    """
    found = []
    for part in parts(request):
        say(f"{part.title} ...")
        outcome = (
            _conformance(part, request, options, folder, say) if not part.arguments else _run(part, request, folder)
        )
        say(f"  {outcome.status} after {outcome.seconds:.0f} s" + (f": {outcome.lines[0]}" if outcome.lines else ""))
        found.append(outcome)
    compare_texts(found)
    return found


def _run(part: Part, request: Request, folder: Path) -> Outcome:
    output, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    figures = folder / f"{part.name}-figures.json"
    arguments = [*part.arguments, *(("--figures", str(figures)) if part.figures else ())]
    begin = time.monotonic()
    code, error = _process([*PROGRAM, *arguments], output, log, request.seconds)
    if error.get("key") == "launches" and TRACE in arguments:  # `hal bench` refused it
        arguments.remove(TRACE)
        code, error = _process([*PROGRAM, *arguments], output, log, request.seconds)
    found, told = read_output(figures if part.figures else output), str(error.get("message", "")).splitlines()
    return _outcome(part, shlex.join(["hal", *arguments]), code, time.monotonic() - begin, found, log, told)


def _outcome(
    part: Part,
    command: str,
    code: int | None,
    seconds: float,
    found: list[Any],
    log: Path,
    told: Sequence[str] = (),
) -> Outcome:
    lines: list[str] = []
    good = False
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):  # The output is that of a failure, or none.
        good, lines = part.judge(found)
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    lines[:0] = told  # hal's own error
    if code is None:
        lines.insert(0, f"it did not end, and was ended after {seconds:.0f} s")
    elif code != 0:
        lines.insert(0, f"it ended with status {code}" if code > 0 else f"signal {-code} ended it")
    return Outcome(
        name=part.name,
        title=part.title,
        command=command,
        status="late" if code is None else "passed" if good and code == 0 else "failed",
        seconds=seconds,
        lines=lines,
        data=found,
        log=last,
    )


def _process(arguments: list[str], output: Path, log: Path, seconds: float) -> tuple[int | None, Mapping[str, Any]]:
    """Run Python; return its exit status, or None if its time was over, and its error; see :class:`ChildProcess`."""
    with output.open("wb") as out, ProcessKeeper() as keeper:
        process = ChildProcess(arguments, keeper, variables=UNBUFFERED, stdout=out, log=log)
        code = process.wait(seconds)
        if code == 0:
            keeper.ended()
        return code, process.error()


def _conformance(part: Part, request: Request, options: Mapping[str, Any], folder: Path, say: Say) -> Outcome:
    """Run the cases in a process, and those after one that fails, hangs or crashes in another.

    A device may not work any more in a process where something has failed.
    """
    results, log = folder / "conformance.jsonl", folder / "conformance.log"
    results.write_bytes(b"")
    begin, found = time.monotonic(), list[dict[str, Any]]()
    code: int | None = 0
    wanted: dict[str, Any] = {"backend": request.backend, "options": dict(options), "dtype": request.dtype}
    wanted |= {"whole": request.conformance == "whole"}
    late = False
    for restart in range(RESTARTS + 1):
        left = request.seconds - (time.monotonic() - begin)
        if left <= 0:
            late = True
            break
        wanted |= {"first": len(found), "stop_at_failure": restart < RESTARTS}
        code, late = _cases([*CONFORMANCE, json.dumps(wanted), str(results)], results, log, left)
        found, running = _results(results)
        if code == 0 and running is None:
            break
        if running is not None:
            status = "hung" if code is None else "crashed"
            message = f"it did not end within {CASE_SECONDS:g} s" if code is None else f"the process ended with {code}"
            found.append({"name": running, "status": status, "message": message})
            with line_writer(results) as write:
                write(found[-1])
            say(f"  {running}: {status}")
        if late or (running is None and code not in (0, STOPPED)):
            break
    else:
        message = f"were not run: {RESTARTS} processes ended before them"
        found.append({"name": "the cases that are left", "status": "failed", "message": message})
    told = found and (code is None or code in (0, STOPPED))  # A case that hung is among the results.
    good_code = None if late else 0 if told else code
    return _outcome(part, "the cases of hal.testing", good_code, time.monotonic() - begin, found, log)


def _cases(arguments: list[str], results: Path, log: Path, seconds: float) -> tuple[int | None, bool]:
    """Run cases until one takes too long.

    Returns:
        The exit status, None if the process was ended; and whether the time of all cases is over.
    """
    end = time.monotonic() + seconds
    with ProcessKeeper() as keeper:
        process = ChildProcess(arguments, keeper, variables=UNBUFFERED, log=log)
        size, since = 0, time.monotonic()
        while (code := process.poll()) is None:
            now = time.monotonic()
            if (written := results.stat().st_size) != size:
                size, since = written, now
            if now > end or now > since + CASE_SECONDS:
                return None, now > end
            time.sleep(PAUSE)
        if code == 0:
            keeper.ended()
    return code, False


def _results(file: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the results in a file, and the name of the case that has begun and not ended."""
    found: list[dict[str, Any]] = []
    running = None
    for entry in read_lines(file):
        if "begins" in entry:
            running = entry["begins"]
        else:
            found.append(entry)
            running = None
    return found, running


def as_json(request: Request, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the document to send."""
    return {"format": 1, "request": attrs.asdict(request), "parts": [attrs.asdict(each) for each in outcomes]}


def page(request: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the page."""
    template = (files(__package__) / "page.html.template").read_text(encoding="utf-8")
    title = f"Bring-up of {request.backend}{' (emulated)' if request.emulate else ''}"
    values = {"title": title, "request": request, "outcomes": outcomes, "plots": _plots}
    return Environment(autoescape=True, keep_trailing_newline=True).from_string(template).render(values)


def _plots(outcome: Outcome) -> Iterator[str]:
    """Yield the plots of figures of ``hal bench``."""
    document = outcome.data[0] if outcome.name in ("decode", "prefill") and outcome.data else None
    if isinstance(document, dict) and document.get("measurements"):
        yield times(document)
        yield launches(document)


def run_cases(wanted: dict[str, Any], file: str) -> int:
    """Run cases in this process, with a line of JSON in a file before and after each; return the exit status.

    It ends after the first case that fails, if it is told to: another process runs those that are left.

    Args:
        wanted: the backend, its options, the number of the first case, and which cases run.
        file: the file to which lines are added.
    """
    conformance = Conformance(backend=wanted["backend"], config={"options": wanted["options"]})
    cases = list(_wanted(conformance, wanted))
    with line_writer(Path(file)) as tell:
        for number, case in enumerate(cases[wanted["first"] :], wanted["first"]):
            tell({"begins": case.name})
            begin = time.perf_counter()
            status, message = _run_case(case)
            tell({"name": case.name, "status": status, "message": message, "seconds": time.perf_counter() - begin})
            if status == "failed" and wanted["stop_at_failure"] and number + 1 < len(cases):
                return STOPPED
    return 0


def _run_case(case: Case) -> tuple[str, str]:
    try:
        case.run()
    except NotApplicable as error:
        return "skipped", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def _wanted(conformance: Conformance, wanted: dict[str, Any]) -> Iterator[Case]:
    """Yield the cases: all, or the short form, in one dtype and without whole models."""
    others = {f"/{each}/" for each in DTYPES if each != wanted["dtype"]}
    for case in conformance.cases:
        if wanted["whole"] or (case.area in SHORT and not any(each in case.name for each in others)):
            yield case


if __name__ == "__main__":
    code = run_cases(json.loads(sys.argv[1]), sys.argv[2])
    sys.stderr.flush()
    os._exit(code)  # A device that does not work may keep the process from ending.
