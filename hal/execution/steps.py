"""The run of single steps: the choice of the form that runs each, alone or together with other ranks."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet

import attrs
from torch import Tensor

from hal.drivers.compiler import Form
from hal.execution.check_logits import check_logits
from hal.execution.context import Phase
from hal.execution.lockstep import Lockstep
from hal.nn import CausalLM
from hal.step import Batch, StateMemory, StepShape

log = logging.getLogger("hal.execution")


@attrs.frozen(eq=False)
class StepOutput:
    """The result of a step.

    Attributes:
        logits: ``[rows, vocab_size]``, in the weights' dtype, one row for each of the batch's ``logits_indices``. Valid
            until the runner's next step.
    """

    logits: Tensor


class Steps:
    """Runs the steps of one runner.

    Args:
        model: the model.
        states: its states.
        queries: the numbers of queries per sequence of decode steps.
        lockstep: keeps the steps of data ranks alike; None if this rank steps alone.

    Attributes:
        forms: the form of each phase that is not eager.
    """

    def __init__(
        self, model: CausalLM, states: StateMemory, queries: AbstractSet[int], lockstep: Lockstep | None
    ) -> None:
        self.forms: dict[Phase, Form] = {}
        self._model, self._states, self._queries, self._lockstep = model, states, queries, lockstep
        self._warned: set[str] = set()
        self._checked = False

    def run(self, batch: Batch) -> Tensor:
        """Run one step, and return its logits."""
        if self._lockstep is None:
            shape = batch.shape
            return self._run_in(self._form_for(batch, shape), batch, shape)
        logits = self._run_together(self._lockstep, batch)
        assert logits is not None, "this rank has a batch"
        return logits

    def idle(self) -> bool:
        """Run a step without a batch of this rank, and return whether another rank had one."""
        return self._lockstep is not None and self._run_together(self._lockstep, None) is not None

    def _run_together(self, lockstep: Lockstep, batch: Batch | None) -> Tensor | None:
        """Run a step of all data ranks, and return the logits of ``batch``; None if no rank has a batch."""
        step = lockstep.align(batch)
        if step is None:
            return None
        form = self.forms.get("decode" if step.uniform else "prefill")
        if form is not None:
            refusal = form.refusal(step.batch, step.shape)
            if refusal is not None:
                self._warn(refusal, step.shape)
            # Forms may pad a step further, so that the ranks use the same one.
            form = form if lockstep.all_agree(refusal is None) else None
        return self._run_in(form, step.batch, step.shape)[: step.rows]

    def _run_in(self, form: Form | None, batch: Batch, shape: StepShape) -> Tensor:
        if form is not None:
            logits = form.run(batch, shape)
            if not self._checked:  # Once suffices: the check finds errors of the model's code only.
                check_logits(self._model, logits, batch)
                self._checked = True
            return logits
        return check_logits(self._model, self._model(batch, self._states.layers), batch)

    def _form_for(self, batch: Batch, shape: StepShape) -> Form | None:
        """Return the first form that accepts a batch, or None for the model's Python code."""
        if not self.forms:
            return None
        refusal = None
        decodes = shape.queries in self._queries
        for phase in ("decode", "prefill") if decodes else ("prefill", "decode"):
            form = self.forms.get(phase)
            if form is None:
                if (phase == "decode") == decodes:
                    return None  # The configuration makes these steps eager.
                continue
            why = form.refusal(batch, shape)
            if why is None:
                return form
            refusal = refusal or why
        if refusal is not None:
            self._warn(refusal, shape)
        return None

    def _warn(self, refusal: str, shape: StepShape) -> None:
        if refusal not in self._warned:
            self._warned.add(refusal)
            log.warning("a step of %s runs eagerly: %s", shape, refusal)
