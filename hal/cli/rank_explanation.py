"""The report of ``hal explain`` on planned ranks: a rank's weights, and the collectives of its decode step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hal.cli.console import print_table
from hal.cli.explanation import captures_python, spec_of_blocks, without_numbers
from hal.cli.stdout import echo
from hal.errors import CompileError

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.compile.collective_calls import CollectiveCall
    from hal.compile.rewrite_report import Report
    from hal.compile.trace import TracedStep
    from hal.drivers.backend import Backend
    from hal.nn import CausalLM

WITHOUT_REWRITES = frozenset({"eager", "inductor", "piecewise_eager"})
"""Compilers that apply no rewrite."""


def explain_ranks(opened: Checkpoint, model: CausalLM, on: Backend, size: int) -> None:
    """Print what one of the planned ranks holds, and what it exchanges in a decode step of ``size`` sequences."""
    from hal.checkpoint.loading import build_for, distribute_experts
    from hal.checkpoint.weight_bindings import bindings_of, weight_bytes
    from hal.parallel import Mesh

    dtype, experts = next(model.parameters()).dtype, on.config.parallel.experts
    whole = build_for(on, opened)
    if experts != "split":
        distribute_experts(whole, experts, on.mesh)
    mine, all_of_them = (weight_bytes(bindings_of(whole), dtype, mesh) for mesh in (on.mesh, Mesh()))
    echo(f"a rank of {on.mesh.size} holds {_mib(mine)} of the {_mib(all_of_them)} of weights")
    if on.mesh.data.size > 1 and experts == "split":
        echo(f"the {on.mesh.data.size} copies of the model exchange nothing in a step")
    try:
        calls = _calls(model, on, size)
    except CompileError as error:  # which a compiler that needs the trace reports, too
        echo(f"the collectives of a step are not listed, because {error.problem}\n")
        return
    if not calls:
        echo()
        return
    rows = Counter((each.operation, without_numbers(each.of), each.sent) for each in calls)
    print_table(
        ("collective", "results of", "times", "a rank sends, each time"),
        [(name, of, str(times), _kib(sent)) for (name, of, sent), times in rows.items()],
    )
    sent = _kib(sum(each.sent for each in calls))
    routed = ", if experts get equally many tokens" if any(each.routed for each in calls) else ""
    echo(f"a step has {len(calls)} collectives, in which a rank sends {sent}{routed}; {_fusion(model, on, size)}\n")


def _fusion(model: CausalLM, on: Backend, size: int) -> str:
    """Return how many collectives are fused with other operations, and why the others are not."""
    from hal import ops
    from hal.compile.collective_calls import called
    from hal.compile.optimize import kept_whole, optimize

    config = on.config.compilation.of("decode")
    if config.compiler in WITHOUT_REWRITES or captures_python(config, size):
        return "none is fused: this compiler applies no rewrite"
    step = optimize(partial(_traced, model, on, size, kept_whole(on)), on, config.passes)
    known = [each.name for each in ops.catalogue().values() if each.fused and each.collective]
    found = Counter(each.name for _, each in called(step.traced.graph.graph) if each.collective)
    fused = [f"{found[name]} in {name}" for name in known if found[name]]
    left = sum(times for name, times in found.items() if name not in known)
    if not left:
        return f"all are fused: {', '.join(fused)}"
    return f"{', '.join([*fused, f'{left} not fused'])}{_why(on, known, step.report)}"


def _why(on: Backend, known: Sequence[str], report: Report) -> str:
    """Return why collectives are not fused, after a colon."""
    if not known:
        return ": hal declares no operation that contains a collective"
    reasons = []
    if absent := [name for name in known if name not in on.kernels]:
        reasons.append(f"{on.name} has no kernel for {', '.join(absent)}")
    for each in report.passes:
        if each.name in known:
            reasons += [
                f"{each.name} was skipped at {times} sites: {why}" for why, times in each.reasons.most_common(2)
            ]
    return f": {'; '.join(reasons)}" if reasons else ""


@contextmanager
def without_ranks(on: Backend) -> Iterator[None]:
    """Run the bodies of collectives in place of kernels inside the block, if the ranks are only planned.

    So a step can be captured. Its results are wrong, and its shapes right.
    """
    from hal import ops

    if not any(each.planned for each in (on.mesh.tensor, on.mesh.data, on.mesh.expert)):
        yield
        return
    with ops.intercepted(lambda operation, kernel: operation.reference if operation.collective else kernel):
        yield


def _calls(model: CausalLM, on: Backend, size: int) -> list[CollectiveCall]:
    from hal.compile.collective_calls import collective_calls, whole_without_fusion

    return collective_calls(_traced(model, on, size, whole_without_fusion()), model)


def _traced(model: CausalLM, on: Backend, size: int, whole: Collection[str]) -> TracedStep:
    from hal.compile.trace import StepSizes, trace_step
    from hal.step import ALL, NONE

    rows = ALL if model.has_logits else NONE
    states, sizes = on.allocate(spec_of_blocks(model, on, 2)), StepSizes(size, any_size=False)
    return trace_step(model, states, sizes, whole=whole, decompose=False, rows=rows)


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _kib(nbytes: float) -> str:
    return f"{nbytes / 2**10:.4g} KiB"
