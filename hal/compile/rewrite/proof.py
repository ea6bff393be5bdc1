"""The proof of a rewrite on its samples, before it changes any model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from hal import ops
from hal.compile.pass_manager import PassManager
from hal.compile.rewrite.pattern import trace_function
from hal.compile.rewrite.proof_samples import as_list, violations
from hal.compile.rewrite.rewrite import Rewrite, prepare
from hal.compile.rewrite_report import PassReport
from hal.errors import CompileError
from hal.ops.declaration.constraints import Draw, Sample, uncovered_axes
from hal.ops.tolerance import assert_agree


def check_rewrite(
    rewrite: Rewrite,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    device: torch.device | str = "cpu",
) -> None:
    """Prove a rewrite on its samples.

    - Both sides return the same, within the tolerance of the replacement's operation or else of the dtype, and write
      the same into their arguments.
    - Applied to its own pattern, the rewrite matches once, and the graph returns what the pattern returns. A second
      application changes nothing.
    - It is applied neither to its inapplicable samples nor to samples in which one tensor violates the declared rank,
      size or dtype.
    - Every sample meets the declared axes and dtypes. Axes with different names differ in some sample.

    Raises:
        CompileError: a check failed. The error names the rewrite, the check and the sample.
    """
    rewrite.check_declared()
    if problems := list(uncovered_axes(rewrite.constraints, rewrite.samples(Draw()))):
        raise _failed(
            rewrite, "its samples", "; ".join(problems), "add samples of other sizes, or declare the sizes as equal"
        )
    _check_violations(rewrite)
    for dtype in dtypes:
        for number, sample in enumerate(rewrite.samples(Draw(dtype, device))):
            what = f"sample {number} of {dtype}"
            if (reason := rewrite.when(*sample)) is not None:
                raise _failed(rewrite, what, f"it does not apply: {reason}", "move the sample to inapplicable_samples")
            expected = _run(rewrite.pattern, sample)
            results = as_list(expected[0])
            if rewrite.constraints.results and (reason := rewrite.constraints.unmet_results(sample, results)):
                raise _failed(rewrite, what, reason, "correct the axes and dtypes of `return`, or leave it out")
            _demand_equal(rewrite, dtype, _run(rewrite.replacement, sample), expected, f"{what}: its sides differ")
            graph, mode = trace_alone(rewrite, sample)
            first = PassManager(graph, mode).add(rewrite).apply().passes[0]
            if len(first.matches) != 1:
                raise _failed(
                    rewrite, what, f"applied to its own pattern, it matched {_times(first)}", "correct the pattern"
                )
            _demand_equal(rewrite, dtype, _run_graph(graph, sample), expected, f"{what}: the rewritten graph differs")
            before = str(graph.graph)
            second = PassManager(graph, mode).add(rewrite).apply().passes[0]
            if second.matches or str(graph.graph) != before:
                raise _failed(rewrite, what, "a second time, it changed the graph again", "keep the pattern out of it")
        _check_inapplicable(rewrite, dtype, device)


def _check_inapplicable(rewrite: Rewrite, dtype: torch.dtype, device: torch.device | str) -> None:
    if rewrite.inapplicable_samples is None:
        return
    for number, sample in enumerate(rewrite.inapplicable_samples(Draw(dtype, device))):
        what = f"inapplicable sample {number} of {dtype}"
        if rewrite.when(*sample) is None:
            raise _failed(rewrite, what, "`when` gives no reason", "let `when` refuse it, or move it to samples")
        graph, mode = trace_alone(rewrite, sample)
        done = PassManager(graph, mode).add(rewrite).apply().passes[0]
        if done.matches:
            raise _failed(
                rewrite, what, f"it was applied {_times(done)}", "let `when` decide by shapes and dtypes alone"
            )


def _check_violations(rewrite: Rewrite) -> None:
    for form in prepare(rewrite):
        for broken, arguments in violations(rewrite.constraints, form.example):
            try:
                _run(rewrite.pattern, arguments)
                graph, mode = trace_alone(rewrite, arguments)
            except Exception:  # The pattern rejects these arguments, so no graph contains it with them.
                continue
            done = PassManager(graph, mode).add(rewrite).apply().passes[0]
            if done.matches:
                raise _failed(
                    rewrite,
                    f"a call with {broken}",
                    "it was applied, which contradicts its declaration",
                    "correct its axes and dtypes",
                )


def _run(function: Any, sample: Sample) -> tuple[Any, list[Any]]:
    """Return a function's result and its arguments afterwards."""
    given = copy.deepcopy(list(sample))
    with torch.no_grad(), ops.intercepted(lambda each, _: each.reference):
        result = function(*given)
    return result, given


def _run_graph(graph: fx.GraphModule, sample: Sample) -> tuple[Any, list[Any]]:
    return _run(lambda *given: graph(*(each for each in given if isinstance(each, Tensor))), sample)


def trace_alone(rewrite: Rewrite, sample: Sequence[Any]) -> tuple[fx.GraphModule, FakeTensorMode]:
    """Return a graph of the rewrite's pattern for a sample, and the mode of its fake tensors."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in sample]

    def copied(*given: Any) -> Any:
        # A rewrite cannot be applied if the graph returns a view of its input directly.
        result = rewrite.pattern(*given)
        return tree_map_only(Tensor, torch.clone, result)

    return trace_function(copied, fakes, mode), mode


def _demand_equal(rewrite: Rewrite, dtype: torch.dtype, found: Any, expected: Any, what: str) -> None:
    target = rewrite.replacement
    operation = ops.operation_of_node(target)
    try:
        assert_agree(operation, dtype, found, expected)
    except AssertionError as error:
        raise _failed(rewrite, what, str(error), "make both sides compute the same") from None


def _times(report: PassReport) -> str:
    return f"{len(report.matches)} times; {'; '.join(report.near_misses) or 'no near miss'}"


def _failed(rewrite: Rewrite, what: str, reason: str, remedy: str) -> CompileError:
    return CompileError(f"the rewrite {rewrite.name} is not proved, at {what}: {reason}", remedy)
