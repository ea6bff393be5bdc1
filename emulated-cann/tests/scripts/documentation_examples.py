"""The examples in the documents of torch_npu's operations, run as written on the emulated NPU.

    python documentation_examples.py FOLDER [--only TEXT] [--ranks] [--report FILE]

FOLDER holds the documents: `docs/zh/custom_APIs/torch_npu` of op-plugin (gitcode.com/Ascend/op-plugin, and its mirror
on GitHub). An example is a block of Python in a section of examples, without the output that follows the code, and
with torch and torch_npu imported if it imports neither. Those that do not run on an Atlas A2 are tried on the other
SoCs. `--ranks` also runs those that start a process for each rank. Prints each example that differs, then the counts:

- ran: it ran to its end, without a change.
- explained: a reason of EXPLAINED, such as a mistake in the example. None is the emulated CANN's.
- refused: the error names the operation that the emulated CANN lacks.
- failed: anything else. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

SOCS = ("Ascend910B3", "Ascend950PR_9589", "Ascend310P3")
SECONDS = 120
SECTION = re.compile(r"示例|[Ee]xample")
PART = re.compile(
    r"^#+ (?P<title>[^\n]*)$|^(?P<indent>[ \t]*)```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^[ \t]*```", re.S | re.M
)
RANKS = re.compile(r"torch\.distributed|torch\.multiprocessing|torchrun")
REFUSED = (
    r"the emulated CANN has no (\w+)",
    r"torch_npu runs (\w+) through the single-operator interface",
    r"(?:aclnn|ATB's )(\w+): .*not emulated",
    r"ATB's (\w+) is not emulated",
    r"(AclrtHostRegister) failed",
)
GRAPH, SKIPPED = "the graph engine is not emulated", "it starts a process for each rank, and --ranks is not given"
EXPLAINED = (
    (r"torchair|graph engine|GEInitialize|libge_runner", GRAPH),
    (SKIPPED, SKIPPED),
    (r"^(status -14|it took)", "it takes longer than the limit of the script on a CPU"),
    (r"chunk_gated_delta_rule:2$", "it gives ends of sequences where its document wants lengths"),
    (r"No module named|PackageNotFoundError", "it imports another package"),
    (r"^(Syntax|Indentation|Name|UnboundLocal|FileNotFound)Error", "the example is incomplete"),
    (
        r"has no attribute|unexpected keyword|missing value for|positional argument",
        "torch_npu 2.13 has another interface",
    ),
)
"""A pattern of an error or of an example's name, and the reason."""


def examples(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and source of each example in a document."""
    shown, count = False, 0
    for found in PART.finditer(path.read_text()):
        if found["title"] is not None:
            shown = bool(SECTION.search(found["title"]))
        elif shown and found["kind"].lower() in ("", "python", "py") and "npu" in found["body"]:
            count += 1
            yield f"{path.stem}:{count}", code_of(textwrap.dedent(found["body"]))


def code_of(body: str) -> str:
    """Return the code of a block: without prompts, and without the output that follows it."""
    if re.search(r"^\s*>>>", body, re.M):
        lines = [line.lstrip() for line in body.splitlines()]
        code = "".join(f"{line[4:]}\n" for line in lines if re.match(r"(>>>|\.\.\.)( |$)", line))
    else:
        code = re.split(r"^[(\[]*(?:tensor\(|torch\.Size)", body, maxsplit=1, flags=re.M)[0]
    return code if re.search(r"\bimport torch\b", code) else f"import torch, torch_npu\n{code}"


def needs_graph_engine(source: str) -> bool:
    """Return whether an example compiles with torchair, and not in a mode that replays captures instead."""
    return "torchair" in source and not re.search(r"npugraph_ex|reduce-overhead", source)


def execute(name: str, source: str, folder: str) -> str:
    """Run an example in a process of its own; return its error, or nothing."""
    path = Path(folder, re.sub(r"\W", "_", name) + ".py")
    path.write_text(source)
    if RANKS.search(source):
        return in_ranks(path) if os.environ.get("WITH_RANKS") else SKIPPED
    error = path.with_suffix(".error")
    error.write_text("")
    child = os.fork()
    if child == 0:
        inside(path, source, error)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return error.read_text() or ("" if status == 0 else f"status {status}")


def in_ranks(path: Path) -> str:
    """Run a file that starts processes for its ranks; end all of them if it takes too long."""
    with tempfile.TemporaryFile("w+") as output:
        options = {"cwd": path.parent, "stdout": output, "stderr": output, "start_new_session": True}
        with subprocess.Popen([sys.executable, str(path)], **options) as process:  # type: ignore[call-overload]
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return f"it took {SECONDS} s"
        output.seek(0)
        return "" if status == 0 else output.read()[-4000:] or f"status {status}"


def inside(path: Path, source: str, error: Path) -> None:
    """Run a file's source in this process, and end it."""
    signal.alarm(SECONDS)
    os.chdir(path.parent)
    output = os.open(path.with_suffix(".output"), os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1), os.dup2(output, 2)
    sys.argv = [str(path)]
    status = 0
    try:
        import torch

        exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
        if torch.npu.is_initialized():
            torch.npu.synchronize()
    except SystemExit as end:
        status = int(bool(end.code))
        if status:
            error.write_text(path.with_suffix(".output").read_text()[-4000:])
    except BaseException as failure:
        status = 1
        error.write_text("".join(traceback.format_exception_only(failure)))
    os._exit(status)


def work(examples_of: list[tuple[str, str]], report: str) -> None:
    """Run examples in this process's children, on the emulated NPU of this process, and append their errors."""
    import torch
    import torch_npu  # noqa: F401

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, open(report, "a") as results:
        for name, source in examples_of:
            error = GRAPH if needs_graph_engine(source) else execute(name, source, folder)
            results.write(json.dumps([name, error]) + "\n")
            results.flush()


def on_soc(soc: str, given: list[tuple[str, str]], folder: str) -> dict[str, str]:
    """Return the error of each example on a SoC; an empty one if it ran."""
    asked, report = Path(folder, "asked"), Path(folder, "report")
    asked.write_text(json.dumps(given))
    report.write_text("")
    command = [sys.executable, "-m", "emulated_cann.command", "run", "--devices", "16", "--soc", soc, "--"]
    command += [sys.executable, __file__, "--work", str(asked), "--report", str(report)]
    subprocess.run(command, check=True, env={**os.environ, "TASK_QUEUE_ENABLE": "0"})
    return dict(json.loads(line) for line in report.read_text().splitlines())


def outcome(name: str, error: str) -> tuple[str, str]:
    """Return the outcome of an error, and the reason."""
    last = next((line for line in reversed(error.splitlines()) if re.match(r"[\w.]+(Error|Exception)\b", line)), error)
    for pattern in REFUSED:
        if found := re.search(pattern, error):
            return "refused", found[1]
    for pattern, reason in EXPLAINED:
        if re.search(pattern, last) or re.search(pattern, name):
            return "explained", reason
    return "failed", error.strip()[:1500]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the examples of a folder; return 1 if one fails without a reason."""
    parser = argparse.ArgumentParser(description="Run the examples of torch_npu's documents on the emulated NPU.")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="examples whose name contains this")
    parser.add_argument("--ranks", action="store_true", help="also run those that start processes")
    parser.add_argument("--report", help="a file for the outcomes as JSON")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work:
        work(json.loads(Path(given.work).read_text()), given.report)
        return 0
    if given.ranks:
        os.environ["WITH_RANKS"] = "1"
    found = [each for path in sorted(given.folder.rglob("*.md")) for each in examples(path) if given.only in each[0]]
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for soc in SOCS:
            remaining = [each for each in found if errors.get(each[0], "not run") not in ("", GRAPH, SKIPPED)]
            for name, error in on_soc(soc, remaining, folder).items():
                if not error or name not in errors:
                    errors[name] = error
    outcomes = {name: outcome(name, errors[name]) if errors[name] else ("ran", "") for name, _ in found}
    for name, (kind, reason) in outcomes.items():
        if kind != "ran":
            sys.stdout.write(f"{kind}: {name}: {reason}\n")
    if given.report:
        Path(given.report).write_text(json.dumps(outcomes, indent=1))
    counts = Counter(kind for kind, _ in outcomes.values())
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in ("ran", "explained", "refused", "failed"))
    sys.stdout.write(f"{len(found)} examples: {summary}\n")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
