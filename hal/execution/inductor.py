"""Steps compiled by Inductor: once for one sequence, and once for any larger number."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from hal.compile.collectives_of_one import collectives_of_one
from hal.compile.inductor_backend import compile_step
from hal.compile.trace import StepSizes, trace_step
from hal.drivers.compiler import Outputs, PhaseForm, Plan
from hal.errors import CompileError
from hal.execution.capture.capture_sizes import capture_sizes, queries_to_capture
from hal.execution.context import OTHER_RANK, FormContext
from hal.step import Batch, StepShape

log = logging.getLogger("hal.execution")

Step = Callable[[list[Tensor]], Outputs]


class InductorForm(PhaseForm):
    """Compiles the model's step for each number of queries, and runs it on batches of any size, without padding.

    ``capture_sizes`` selects the two variants: 1 selects that for one sequence, any other size that for more. Without
    the first variant, a single sequence is padded to two.

    Raises:
        CompileError: the model cannot be traced or compiled, and ``on_capture_error`` is ``raise``.
    """

    def __init__(self, context: FormContext) -> None:
        self._context = context
        config = context.config
        sizes, numbers = capture_sizes(config, context.backend.limits.capture_sizes), queries_to_capture(config)
        self._pairs = {queries: context.static_batch(StepShape.uniform(2, queries)) for queries in numbers}
        self._one: dict[int, Step] = {}
        self._many: dict[int, Step] = {}
        problem = None
        try:
            for queries in numbers:
                if 1 in sizes:
                    self._one[queries] = self._compile(1, queries)
                if sizes[-1] > 1:
                    self._many[queries] = self._compile(sizes[-1], queries)
        except CompileError as error:
            if config.on_capture_error == "raise":
                raise
            problem = str(error)
        if config.on_capture_error == "eager" and not context.all_agree(problem is None):
            self._one.clear()
            self._many.clear()
            log.warning("%s batches run uncaptured: %s", context.phase, problem or OTHER_RANK)

    def plan(self, batch: Batch, shape: StepShape) -> Plan | str:
        queries = shape.queries
        if queries in self._one and shape.sequences == 1:
            return lambda: self._one[queries](batch.tensors())
        if queries not in self._many:
            known = queries in self._one
            return "the compiled step takes a single sequence" if known else "no step is compiled for its query length"
        if shape.sequences > 1:
            return lambda: self._many[queries](batch.tensors())
        pair = self._pairs[queries]
        if batch.block_table.shape[1] > pair.batch.block_table.shape[1]:
            return "its block table exceeds that of a padded batch"

        def padded() -> Outputs:
            pair.fill(batch)
            for name, value in pair.host_values(batch).items():  # Graphs take host values as separate arguments.
                getattr(pair.batch, name).copy_(value)
            return self._many[queries](pair.batch.tensors())

        return padded

    def _compile(self, sequences: int, queries: int) -> Step:
        context = self._context
        sizes = StepSizes(sequences, queries)
        step = trace_step(context.model, context.states, sizes, whole=context.backend.inductor or ())
        collectives_of_one(step.graph)
        if sequences > 1:
            step.check_any_size(context.model)
        log.info("compiling steps of %s", "one sequence" if sequences == 1 else "two or more sequences")
        compiled = compile_step(step)
        if pinned := step.specialized_axes:
            raise CompileError(
                f"the step cannot be compiled for other sizes than the example's: it fixes {', '.join(pinned)}",
                "add kernels for the operations that it runs, or use the compiler graph",
            )
        return compiled
