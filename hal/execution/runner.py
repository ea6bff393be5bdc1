"""The runner: what an engine drives. It owns the model's states and its graphs; the engine owns blocks and slots."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.device.capture_lock import CAPTURING, check_not_capturing
from hal.device.closing import Closable
from hal.drivers.backend import Backend
from hal.drivers.compiler import Form
from hal.drivers.compiler_registry import EAGER
from hal.errors import ConfigError
from hal.execution.check_logits import check_logits
from hal.execution.context import FormContext, Phase
from hal.execution.state_spec import check_fits, spec_of
from hal.nn import CausalLM
from hal.step import Batch, Bounds, StateMemory, StepShape
from hal.step.batch import DUMMY_BLOCK
from hal.step.block_allocator import BlockAllocator, SlotAllocator
from hal.step.prefix_cache import PrefixCache

log = logging.getLogger("hal.execution")


@attrs.frozen(eq=False)
class StepOutput:
    """What a step gives.

    Attributes:
        logits: ``[rows, vocab_size]``, of the weights' dtype: a row for each of the batch's ``logits_indices``. Valid
            until the runner's next step.
    """

    logits: Tensor


class Runner(Closable):
    """Runs the steps of one model on one backend, as the backend's config says.

    A context manager: at the end of the block it is closed. :meth:`close` frees its graphs, their streams and its
    states at once, and lets go of the model, whose weights stay with the caller. It waits for a step of another thread
    to return. Logits that steps gave may be in the memory of graphs, so nobody may read them any more. Every later use
    raises ClosedError. A runner is closed before its backend, or with it.

    A step holds any mix of new prompts and running sequences. The config's compilers capture or compile steps of some
    shapes: that of ``decode`` those whose sequences all have the same small number of new tokens, that of ``prefill``
    the others. What no captured form fits runs eagerly, with one warning for each reason. Every mode gives the same
    tokens, up to rounding.

    Args:
        model: from :func:`hal.load_model`, or built and filled otherwise; on the backend's device.
        backend: on which its steps run, in any thread, whichever backend is active.
        max_sequences: that a batch will hold at most. Default capture sizes that no batch reaches are left out.
        max_length: tokens that a sequence will hold at most; None for what model and cache allow.

    Attributes:
        spec: of the states.
        blocks: hands out the blocks of states per token; :func:`hal.generate` takes them here, and so can an engine.
        prefixes: if the config says ``reuse_prefixes``, hands out blocks in place of ``blocks``, shared by sequences
            that begin alike; it keeps what was used, so an engine beside it takes its blocks here, too.

    Raises:
        ConfigError: the states do not fit the device's memory, the compiler is not one that the runner runs, the
            model was loaded for another backend, or it has a state that no prefix can share.
        CaptureError: a graph could not be captured.
        CompileError: the step could not be compiled.
        ClosedError: the backend is closed.
    """

    def __init__(
        self, model: CausalLM, backend: Backend, *, max_sequences: int | None = None, max_length: int | None = None
    ) -> None:
        super().__init__(
            f"this runner on the backend {backend.name}", "make another with hal.Runner, on a backend that is open"
        )
        self.backend = backend
        self._model: CausalLM | None = model
        self._states: StateMemory | None = None
        self._slots: SlotAllocator | None = None
        self._forms: dict[Phase, Form] = {}
        self._max_sequences = max_sequences
        self._warned: set[str] = set()
        self._checked = False
        with backend.uses:  # it is not closed before the runner is made, and closes that
            try:
                self._make(model, max_length)
            except BaseException:
                self._let_go()  # else what raised would hold the memory, as long as somebody looks at it
                raise
            backend.runners.add(self)

    def _make(self, model: CausalLM, max_length: int | None) -> None:
        backend = self.backend
        _check_placed(model, backend)
        self.spec = spec_of(model, backend)
        check_fits(self.spec, backend)
        with backend.explaining():
            self._states = states = backend.allocate(self.spec)
        self.blocks = BlockAllocator(self.spec.num_blocks)
        self._slots = SlotAllocator(self.spec.num_slots, states.reset_slots)
        self.prefixes = PrefixCache(self.blocks, self.spec.block_size) if backend.config.cache.reuse_prefixes else None
        self._bounds = Bounds(model.vocab_size, DUMMY_BLOCK + 1, self.spec.num_blocks, model.max_length)
        longest = min(model.max_length, self.spec.num_tokens)
        self._max_length = longest if max_length is None else min(longest, max_length)
        self._queries = frozenset(backend.config.compilation.queries)
        phases: tuple[Phase, ...] = ("decode", "prefill")
        chosen = [phase for phase in phases if backend.config.compilation.of(phase).compiler != EAGER]
        if not chosen:
            return
        token = backend.enter()
        try:
            with backend.explaining(), CAPTURING:  # for what is left on the device is counted before any capture
                for phase in chosen:
                    self._forms[phase] = self._make_form(phase)
        finally:
            backend.leave(token)

    @property
    def model(self) -> CausalLM:
        """The model that it runs."""
        if self._model is None:
            raise self.uses.error()
        return self._model

    @property
    def states(self) -> StateMemory:
        """What the model keeps between steps."""
        if self._states is None:
            raise self.uses.error()
        return self._states

    def _make_form(self, phase: Phase) -> Form:
        config = self.backend.config.compilation.of(phase)
        return self.backend.compiler(config.compiler).make(FormContext(
            self.model, self.backend, self.states, config, phase, self._max_sequences, self._max_length
        ))  # fmt: skip

    @property
    def forms(self) -> Mapping[Phase, Form]:
        """What runs the steps of each phase that is not eager."""
        return MappingProxyType(self._forms)

    @property
    def slots(self) -> SlotAllocator:
        """Hands out the slots of states per sequence."""
        if self._slots is None:
            raise self.uses.error()
        return self._slots

    def batch(
        self,
        token_ids: Sequence[Sequence[int]],
        block_ids: Sequence[Sequence[int]],
        *,
        cached: Sequence[int] | None = None,
        all_logits: bool = False,
        **fields: Any,
    ) -> Any:
        """:meth:`hal.Batch.build` for this runner's cache and device, with every number checked against the model's.

        Args:
            token_ids: per sequence, its new tokens.
            block_ids: per sequence, all blocks it owns, in order.
            cached: per sequence, how many tokens the cache holds already; None for none.
            all_logits: ask for the logits of every token instead of each sequence's last.
            fields: the tensors of fields that the model's batch class declares beside; see ``CausalLM.batch_type``.

        Raises:
            BatchError: also for a token id or block out of range, or a sequence longer than the model was made for.
            ClosedError: the runner is closed.
        """
        self.uses.check_open()
        with self.backend.explaining():  # the copies to the device meet what failed there before, in any thread
            return self.model.batch_type.build(
                token_ids,
                block_ids,
                block_size=self.spec.block_size,
                cached=cached,
                all_logits=all_logits,
                device=self.backend.device.torch,
                bounds=self._bounds,
                fields=fields,
            )

    def step(self, batch: Batch) -> StepOutput:
        """Run the new tokens of all sequences, in steps of at most ``max_prefill_tokens`` of the config.

        Args:
            batch: any mix of new prompts, chunks of long ones, and running sequences.

        Raises:
            BatchError: its tensors' shapes do not fit together; a logits index is not of its tokens; or it takes
                several steps, and its logits_indices are not sorted.
            ModelError: the model gave no logits, or not as many as were asked for.
            ClosedError: the runner is closed.
        """
        with self.uses:
            token = self.backend.enter()
            try:
                return self._step(batch)
            finally:
                self.backend.leave(token)

    def _step(self, batch: Batch) -> StepOutput:
        batch.check()
        with self.backend.explaining(), torch.inference_mode():
            most = self.backend.config.max_prefill_tokens
            if batch.num_tokens <= most or batch.num_tokens == batch.num_sequences:
                return StepOutput(self._run(batch))
            parts = batch.split(most)
            # Each step's are valid until the next.
            return StepOutput(torch.cat([self._run(part).clone() for part in parts]))

    def _run(self, batch: Batch) -> Tensor:
        shape = batch.shape
        form = self._form_for(batch, shape)
        if form is not None:
            logits = form.run(batch, shape)
            if not self._checked:  # once, as it is no more than the model's own mistake that it finds
                check_logits(self.model, logits, batch)
                self._checked = True
            return logits
        return check_logits(self.model, self.model(batch, self.states.layers), batch)

    def _form_for(self, batch: Batch, shape: StepShape) -> Form | None:
        """The first form that serves a batch; None for the model's own Python."""
        if not self._forms:
            return None
        refusal = None
        decodes = shape.queries in self._queries
        for phase in ("decode", "prefill") if decodes else ("prefill", "decode"):
            form = self._forms.get(phase)
            if form is None:
                if (phase == "decode") == decodes:
                    return None  # these steps are eager by the configuration
                continue
            why = form.refusal(batch, shape)
            if why is None:
                return form
            refusal = refusal or why
        if refusal is not None and refusal not in self._warned:
            self._warned.add(refusal)
            log.warning("a step of %s runs eagerly: %s", shape, refusal)
        return None

    def _check_closable(self) -> None:
        super()._check_closable()
        check_not_capturing()

    def _free(self) -> None:
        with ExitStack() as stack:  # goes on to the end, whatever raises
            stack.callback(self._collect)
            stack.callback(self.backend.runners.discard, self)
            stack.callback(self._let_go)
            with self.backend.explaining():
                self.backend.device.synchronize()  # for what still runs

    def _let_go(self) -> None:
        forms = list(self._forms.values())
        self._forms.clear()
        self._model = self._states = self._slots = None
        with ExitStack() as stack:
            for form in forms:
                stack.callback(form.close)

    def _collect(self) -> None:
        """Give the memory back to the device. Traces leave references in circles, which only a collection finds."""
        gc.collect()
        with CAPTURING:  # a capture of another thread's may be disturbed by it
            self.backend.device.empty_cache()


def _check_placed(model: CausalLM, backend: Backend) -> None:
    if model.prepared_by not in (None, backend.name):
        raise ConfigError(
            f"the model's weights were prepared by the backend {model.prepared_by}, not by {backend.name}",
            "load the model once more, on the backend that is to run it",
        )
    device = next(model.parameters()).device
    if device != backend.device.torch:
        raise ConfigError(
            f"the model is on {device}, and the backend {backend.name} on {backend.device.torch}",
            "load the model on the backend that is to run it, or move it there",
        )
