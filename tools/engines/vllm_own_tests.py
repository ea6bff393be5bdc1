"""Runs vLLM's own tests through the plugin, and prints how many passed, failed and were skipped, by file, and why.

The tests are not in vLLM's wheel. Unpack them from its source distribution, then name the folder that has ``tests``::

    python -m hal_command emulate -- python tools/engines/vllm_own_tests.py FOLDER [tests/v1/engine ...]

They need pytest-asyncio, pytest-timeout and tblib as well. The models that they name are in a cache of their own,
:mod:`vllm_own_cache`, and all are one small checkpoint, so a test that expects the text of real weights fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

from vllm_own_cache import make_cache

ROOT = Path(__file__).parents[2]
TARGETS = (
    "tests/v1/engine",
    "tests/v1/e2e",
    "tests/v1/sample",
    "tests/v1/core",
    "tests/v1/structured_output",
    "tests/samplers",
    "tests/basic_correctness",
    "tests/entrypoints/llm",
    "tests/entrypoints/openai",
)
ENVIRONMENT = {
    "HAL_VLLM": "1",
    "HAL_BACKEND": "cpu",
    "HAL_CACHE__NUM_TOKENS": "65536",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OMP_NUM_THREADS": "1",
}
REASONS = (
    (r"hal does not (?:support|read) vLLM's (\w+)", r"hal refuses \1"),
    (r"hal\.errors\.(\w+: .{1,80})", r"\1"),
    (
        r"OfflineModeIsEnabled|LocalEntryNotFound|couldn't connect to|[Oo]ffline mode|Cannot find .* local cache"
        r"|Cannot reach|is not a local folder|Name or service not known|name resolution",
        "needs the hub",
    ),
    (r"No module named '((?!vllm\._C)[\w.]+)'", r"needs the module \1"),
    (
        r"not compiled with CUDA|No CUDA|'_OpNamespace' '_\w+'|only supported on CUDA|requires? CUDA|NVIDIA|vllm\._C",
        "needs CUDA or vLLM's kernels",
    ),
    (r"out-of-vocab", "a token that the small vocabulary lacks"),
    (r"Timeout >", "over the time limit"),
)
"""What a failure's text has, and the reason that is printed. The first that fits counts."""
GENERIC = re.compile(r"See root cause above|Server exited unexpectedly")
"""Errors whose cause is in the output of another process."""
GUARD = re.compile(r"^if not current_platform\.is_cuda(?:_alike)?\(\):\n    pytest\.skip\([^)]*\)\n", re.MULTILINE)
CAUSE = re.compile(r"\b[\w.]*(?:Error|Exception): .*")


def reason_of(text: str) -> str:
    """Return why a test failed or was skipped, in a few words."""
    for pattern, reason in REASONS:
        if found := re.search(pattern, text):
            return found.expand(reason)
    lines = [each.strip() for each in text.splitlines() if each.strip()] or ["no message"]
    return lines[0][:120].replace("|", "/")


def unguarded(path: Path) -> Path:
    """Return a copy of a module without the skip of all its tests on platforms other than CUDA, if it has one."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    changed = GUARD.sub("", text)
    if changed == text:
        return path
    copy = path.with_name(f"{path.stem}_unguarded.py")
    copy.write_text(changed, encoding="utf-8")
    return copy


def outcomes(report: Path) -> list[tuple[str, str, str]]:
    """Return the file, outcome and reason of each test in pytest's report, the outcome of its teardown included."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        place = case.get("classname") or case.get("name") or ""
        parts = [each for each in place.split(".") if not each[:1].isupper()]
        outcome, reason = "passed", ""
        for part in case:
            if part.tag == "skipped":
                outcome, reason = "skipped", reason_of(part.get("message") or "")
            elif part.tag in ("failure", "error"):
                said = f"{part.get('message') or ''}\n{part.text or ''}"
                if GENERIC.search(said):
                    logs = "\n".join(each.text or "" for each in case if each.tag.startswith("system"))
                    causes = [each for each in CAUSE.findall(logs) if not GENERIC.search(each)]
                    said = "\n".join(each for each in causes if "vllm._C" not in each) or said
                outcome, reason = "failed", reason_of(said)
        found.append(("/".join(parts[1:]), outcome, reason))
    return found


def run(target: str, folder: Path, environment: dict[str, str], limit: int) -> list[tuple[str, str, str]]:
    """Run one target in a process."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            "--timeout",
            str(limit),
            "--junitxml",
            str(report),
            "-o",
            "junit_logging=all",
            target,
        ]
        log = folder / (target.strip("/").replace("/", "_") + ".log")
        with log.open("w", encoding="utf-8") as out:
            subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
        return outcomes(report) if report.exists() else [(target, "failed", f"pytest ended early: see {log}")]


def main() -> None:
    """Prepare the cache, run the tests, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder that has vLLM's tests")
    parser.add_argument("targets", nargs="*", default=TARGETS, help="files and folders of tests")
    parser.add_argument("--limit", type=int, default=180, help="seconds for each test")
    parser.add_argument("--unguarded", action="store_true", help="run modules that are for CUDA only as well")
    given = parser.parse_intermixed_args()
    cache = given.folder / "hub-cache"
    make_cache(cache, ROOT / "checkpoints" / "tiny-python")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # Some tests run `vllm`.
    environment = {**ENVIRONMENT, **os.environ, "HF_HOME": str(cache), "PATH": path}
    say("| file | run | passed | failed | skipped | why |\n|---|---|---|---|---|---|")
    total: Counter[str] = Counter()
    for target in given.targets:
        if given.unguarded:
            target = str(unguarded(given.folder / target).relative_to(given.folder))
        files: dict[str, Counter[str]] = defaultdict(Counter)
        reasons: dict[str, Counter[str]] = defaultdict(Counter)
        for file, outcome, reason in run(target, given.folder, environment, given.limit):
            files[file][outcome] += 1
            if reason:
                reasons[file][f"{outcome}: {reason}"] += 1
        for file, counts in sorted(files.items()):
            why = "; ".join(f"{count} {reason}" for reason, count in reasons[file].most_common())
            say(row(file, counts, why))
            total += counts
    say(row("all", total, ""))


def row(name: str, counts: Counter[str], why: str) -> str:
    """Return a row of the table."""
    passed, failed = counts["passed"], counts["failed"]
    return f"| {name} | {passed + failed} | {passed} | {failed} | {counts['skipped']} | {why} |"


def say(text: str) -> None:
    """Print at once, since a run takes long."""
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
