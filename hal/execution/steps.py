"""The run of single steps: the choice of the form that runs each, alone or together with other ranks.

Importing hal.compile takes seconds, so only optimized code imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs, PhaseForm, Plan
from hal.errors import ModelError
from hal.execution.capture.captured_form import CapturedForm
from hal.execution.context import FormContext, Phase
from hal.execution.lockstep import AlignedStep, Lockstep
from hal.execution.step_output import StepOutput, check_hidden, check_logits
from hal.nn import CausalLM
from hal.step import LAST, NONE, Batch, StepShape, Wanted
from hal.step.rows import check_rows, split_batch, taken

log = logging.getLogger("hal.execution")


@attrs.define(eq=False)
class Uncaptured:
    """A phase's step and its logits for any number of tokens: optimized code, or the module's Python.

    Attributes:
        context: the phase. Each rank decides alone about a module that cannot be traced.
        optimizes: whether optimized code runs.
        step: the optimized step; a form that has it may set it.
    """

    context: FormContext
    optimizes: bool
    step: Callable[[Any], Outputs] | None = None
    _logits: Callable[..., Outputs] | None = None

    def prepare(self) -> None:
        """Trace and optimize the step for all sizes at once, unless that is done.

        Raises:
            CompileError: the module cannot be traced, or a pass failed.
        """
        if self.step is None and self.optimizes:
            from hal.execution.optimized_model import step_of_any_size

            self.step = self._made(partial(step_of_any_size, self.context))

    def same(self, other: Uncaptured) -> bool:
        """Return whether both run the same code of the model, so that one serves both phases."""
        first, second = self.context, other.context
        settings = [(each.config.passes, each.refuses) for each in (first, second)]
        return self.optimizes == other.optimizes and settings[0] == settings[1]

    def run(self, batch: Any) -> Outputs:
        """Return the hidden states and the extra tensors of a batch, or the embeddings of an encoder's."""
        self.prepare()
        return self.context.eagerly(batch) if self.step is None else self.step(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, ``[rows, width]``."""
        if self._logits is None and self.optimizes:
            from hal.execution.optimized_model import logits_of_any_size

            self._logits = self._made(partial(logits_of_any_size, self.context, hidden))
        return self.context.model.logits(hidden) if self._logits is None else self._logits(hidden)[0]

    def _made(self, make: Callable[[], Callable[..., Outputs]]) -> Callable[..., Outputs] | None:
        name = type(self.context.module).__name__
        made = self.context.attempt(make, f"steps that no graph holds run the Python code of {name}")
        if isinstance(made, str):
            self.optimizes = False
            return None
        return made


@attrs.define(eq=False)
class _Planned:
    """A step that was decided on: how it runs, whether that computes logits, and what computes them otherwise."""

    plan: Plan
    with_logits: bool
    uncaptured: Uncaptured


class Steps:
    """Runs the steps of one runner.

    Its methods are called in the block of :meth:`hal.Runner.running`.

    Args:
        model: the model.
        backend: runs the steps, as its configuration says.
        uncaptured: what runs the steps of each phase that no form accepts.
        lockstep: keeps the steps of data ranks alike; None if this rank steps alone.

    Attributes:
        forms: the form of each phase that is not eager.
        uncaptured: as given.
        encoder_replays: the number of the encoder's steps that ran on graphs.
    """

    def __init__(
        self, model: CausalLM, backend: Backend, uncaptured: Mapping[Phase, Uncaptured], lockstep: Lockstep | None
    ) -> None:
        self.forms: dict[Phase, PhaseForm] = {}
        self.uncaptured = uncaptured
        self.encoder_replays = 0
        self._model, self._backend, self._lockstep = model, backend, lockstep
        self._queries, self._debug = backend.config.compilation.queries, backend.config.compilation.debug
        self._has_logits = model.has_logits
        self._warned: set[str] = set()
        self._checked = self._checked_logits = False
        self._returned: tuple[Tensor, ...] = ()

    def step(self, batch: Batch, rows: Wanted = LAST) -> StepOutput:
        """Run the new tokens of all sequences; see :meth:`hal.Runner.step`."""
        batch.check()
        if rows is not LAST:
            rows = check_rows(rows, batch)
        if rows is not NONE and not self._has_logits:
            raise ModelError(
                f"{type(self._model).__name__} computes no logits, and rows is {rows}",
                "pass rows=hal.step.NONE, and read hidden_states",
            )
        most, tokens = self._backend.config.max_prefill_tokens, batch.token_ids.shape[0]
        if not self._model.causal:
            batch.check_whole(most)
        if tokens <= most or tokens == batch.num_sequences:
            return self._run(batch, rows)
        return self._run_parts(batch, rows, most)

    def encode(self, batch: Any) -> Outputs:
        """Run a step of the encoder."""
        form, shape = self.forms.get("encoder"), batch.shape
        plan = None if form is None else form.plan(batch, shape)
        if isinstance(plan, str):
            self._warn(plan, shape)
        elif plan is not None:
            self.encoder_replays += isinstance(form, CapturedForm)
            return plan()
        return self.uncaptured["encoder"].run(batch)

    def _run_parts(self, batch: Batch, rows: Wanted, max_tokens: int) -> StepOutput:
        """Run a batch in steps of at most ``max_tokens`` tokens."""
        parts = split_batch(batch, rows, max_tokens)
        found: list[tuple[Tensor, ...]] = []
        logits = []
        for part, wanted in parts.steps:
            output = self._run(part, wanted)
            found.append(tuple(each.clone() for each in (output.hidden_states, *output.extra.values())))
            if wanted is not NONE:
                logits.append(output.logits.clone())
        hidden, *extra = (torch.cat(each) for each in zip(*found, strict=True))
        return StepOutput(
            hidden, dict(zip(self._model.extra, extra, strict=True)), parts.join(logits) if logits else None
        )

    def idle(self) -> bool:
        """Run a step without a batch of this rank, and return whether another rank had one."""
        step = None if self._lockstep is None else self._lockstep.align(None)
        if self._lockstep is None or step is None:
            return False
        self._plan_together(self._lockstep, step).plan()
        return True

    def _run(self, batch: Batch, rows: Wanted) -> StepOutput:
        """Run one step, which may have more tokens than ``batch``, and return what the batch asks for."""
        if self._debug:
            self._invalidate(batch)
        shape, lockstep, tokens = batch.shape, self._lockstep, batch.token_ids.shape[0]
        if lockstep is None:
            planned = self._plan(batch, shape, rows)
        else:
            aligned = lockstep.align(batch)
            assert aligned is not None, "this rank has a batch"
            planned = self._plan_together(lockstep, aligned)
        found = planned.plan()
        if found[0].shape[0] > tokens:
            found = tuple([each[:tokens] for each in found])
        logits: Tensor | None = None
        if planned.with_logits:
            *found_first, logits = found
            found = tuple(found_first)
        if not self._checked:  # Once suffices: the check finds errors of the model's code only.
            check_hidden(self._model, found, tokens)
            self._checked = True
        if rows is NONE:
            logits = None
        elif logits is None:
            hidden = taken(found[0], rows, batch, shape)
            logits = planned.uncaptured.logits(hidden)
            if not self._checked_logits:
                check_logits(self._model, logits, hidden.shape[0])
                self._checked_logits = True
        elif rows is not LAST or shape.queries != 1:
            logits = taken(logits, rows, batch, shape)
        output = StepOutput(found[0], dict(zip(self._model.extra, found[1:], strict=True)), logits)
        if self._debug:
            self._returned = (*found, *(() if logits is None else (logits,)))
        return output

    def _plan_together(self, lockstep: Lockstep, step: AlignedStep) -> _Planned:
        """Plan a step of all data ranks."""
        phase: Phase = "decode" if step.uniform else "prefill"
        form = self.forms.get(phase)
        if form is not None:
            plan = form.plan(step.batch, step.shape)
            if isinstance(plan, str):
                self._warn(plan, step.shape)
            # Forms may pad a step further, so that the ranks use the same one.
            if lockstep.all_agree(not isinstance(plan, str)):
                return _Planned(plan, form.with_logits, self.uncaptured[phase])  # type: ignore[arg-type]
        return self._without_form(phase, step.batch)

    def _plan(self, batch: Batch, shape: StepShape, rows: Wanted) -> _Planned:
        """Plan a step on the first form that accepts the batch, or without one."""
        decodes = shape.queries in self._queries
        own: Phase = "decode" if decodes else "prefill"
        refusal = None
        phases: tuple[Phase, Phase] = ("decode", "prefill") if decodes else ("prefill", "decode")
        for phase in phases if self.forms else ():
            form = self.forms.get(phase)
            if form is None:
                if phase == own:
                    break  # The configuration makes these steps uncaptured.
                continue
            if form.with_logits and rows is NONE:
                continue  # Its graphs would compute them.
            plan = form.plan(batch, shape)
            if not isinstance(plan, str):
                return _Planned(plan, form.with_logits, self.uncaptured[own])
            refusal = refusal or plan
        if refusal is not None:
            self._warn(refusal, shape)
        return self._without_form(own, batch)

    def _without_form(self, phase: Phase, batch: Batch) -> _Planned:
        uncaptured = self.uncaptured[phase]
        return _Planned(partial(uncaptured.run, batch), False, uncaptured)

    def _warn(self, refusal: str, shape: StepShape) -> None:
        if refusal not in self._warned:
            self._warned.add(refusal)
            log.warning("a step of %s runs uncaptured: %s", shape, refusal)

    def _invalidate(self, batch: Batch) -> None:
        """Fill what the last step returned with NaN, except what the batch reads."""
        read = {tensor.untyped_storage().data_ptr() for tensor in batch.tensors()}
        for tensor in self._returned:
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in read:
                tensor.fill_(float("nan"))
        self._returned = ()
