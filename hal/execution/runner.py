"""The runner, which an engine drives. It owns the model's states and graphs; the engine owns blocks and slots.

For each step it chooses the form that runs it, such as a captured graph, or the model's Python.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.checkpoint.weight_release import dropped_weights
from hal.config.bounds import SEQUENCES, check_count
from hal.device.capture_checks import CAPTURING, check_not_capturing
from hal.device.closing import Closable
from hal.drivers.backend import Backend
from hal.drivers.compiler import EAGER, OPTIMIZED, PhaseForm
from hal.errors import HalError, ModelError
from hal.execution.context import FormContext, Phase
from hal.execution.encoding import Encoding
from hal.execution.lockstep import Lockstep, agreement
from hal.execution.recorded_choices import RecordedChoices
from hal.execution.sleep_state import Sleep
from hal.execution.state_spec import (
    allocated,
    check_fits,
    check_placed,
    longest_sequence,
    saved_states,
    spec_of,
    windows_of,
)
from hal.execution.step_output import StepOutput
from hal.execution.steps import Steps, Uncaptured
from hal.nn import CausalLM, EncoderItem
from hal.step import LAST, Batch, Bounds, StateMemory, Wanted
from hal.step.block_allocator import BlockAllocator, PrefixCache, SlotAllocator
from hal.step.fields import DUMMY_BLOCK
from hal.step.input_batch import InputBatch

_inside: ContextVar[Runner | None] = ContextVar("hal_runner", default=None)
"""The runner in whose :meth:`Runner.running` this thread is."""


class Runner(Closable):
    """Runs the steps of one model on one backend, as the backend's config says.

    A step holds any mix of new prompts and running sequences. The compiler of ``decode`` captures or compiles steps
    whose sequences all have the same small number of new tokens; that of ``prefill`` the others. A batch that no form
    accepts runs optimized code that is not captured, with one warning per reason; only the compiler ``eager`` runs the
    model's Python code. All modes give the same tokens, up to rounding.

    A runner is a context manager that closes it. :meth:`close` waits for a running step, frees the graphs, their
    streams and the states, and releases the model; the caller keeps the weights. Logits may lie in graph memory, so do
    not read them afterwards. Later uses raise ClosedError. Close a runner before its backend, or with it.

    Args:
        model: from :func:`hal.load_model`, or created and filled otherwise; on the backend's device.
        backend: runs the steps, in any thread, whichever backend is active.
        max_sequences: the most sequences of a batch. Larger default capture sizes are skipped.
        max_length: the most tokens of a sequence; None means the limit of model and cache. An engine that frees the
            blocks before all layers' windows may give sequences more tokens than the cache holds.
        num_blocks: the number of blocks, including the dummy block; None for blocks of ``cache.num_tokens`` tokens.

    Attributes:
        spec: the specification of the states.
        bounds: the ranges of the numbers in a batch.
        blocks: allocates the blocks of per-token states, for :func:`hal.generate` and for engines. An engine that has
            several cache groups allocates pages itself.
        asleep: what sleeps; None for nothing. See :func:`hal.sleep`.
        prefixes: with ``reuse_prefixes``, allocates blocks in place of ``blocks``, and shares those of equal prefixes.
            It keeps used blocks, so an engine must allocate here too. Else None.
        choices: what the model's layers chose for the tokens in the cache, if it records that; see
            :func:`hal.nn.keep_choices`. Else None.

    Raises:
        ConfigError: the states do not fit the device's memory, the compiler is unknown or unsupported, the model was
            loaded for another backend, or takes shorter sequences; or prefixes are to be reused, and the config leaves
            no room for their states per sequence.
        CaptureError: a graph cannot be captured.
        CompileError: the step cannot be compiled.
        ClosedError: the backend is closed.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        *,
        max_sequences: int | None = None,
        max_length: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        super().__init__(f"this runner on the backend {backend.name}", "create another hal.Runner, on an open backend")
        self.backend = backend
        self._model: CausalLM | None = model
        self._states: StateMemory | None = None
        self._slots: SlotAllocator | None = None
        self._steps: Steps | None = None
        self._encoding: Encoding | None = None
        if max_sequences is not None:
            check_count(max_sequences, SEQUENCES, "max_sequences must be")
        self._max_sequences = max_sequences
        with backend.uses:  # The backend stays open until the runner is registered, and closes it from then on.
            try:
                self._make(model, max_length, num_blocks)
            except BaseException:
                self._release_outputs()  # Else the exception's traceback would keep the memory alive.
                raise
            backend.runners.add(self)

    def _make(self, model: CausalLM, max_length: int | None, num_blocks: int | None) -> None:
        backend = self.backend
        check_placed(model, backend)
        if (restore := getattr(model.loaded, "restore", None)) is not None:  # Its last runner was closed asleep.
            with self.running():
                restore(backend)
        self.asleep: Sleep | None = Sleep(frozenset(), None) if dropped_weights(model) else None
        self.spec = spec_of(model, backend, num_blocks)
        check_fits(self.spec, backend)
        self._allocate()
        self.bounds = Bounds(model.vocab_size, DUMMY_BLOCK + 1, self.spec.num_blocks, model.max_length)
        longest = longest_sequence(model, max_length)
        frees_blocks = max_length is not None and self.spec.window is not None
        self._max_length = longest if frees_blocks else min(longest, self.spec.num_tokens)
        self._prepare()

    def _allocate(self) -> None:
        """Allocate the states, and what allocates their blocks and slots."""
        backend = self.backend
        with backend.translating_errors():
            self._states = states = allocated(self.model, backend, self.spec)
        engine_owns = bool(states.pages)
        self.blocks = BlockAllocator(0 if engine_owns else self.spec.num_blocks)
        self._slots = SlotAllocator(0 if engine_owns else self.spec.num_slots - self.spec.num_saved, states.reset_slots)
        self.prefixes = None
        if backend.config.cache.reuse_prefixes:
            saved = saved_states(states, backend.config.cache)
            self.prefixes = PrefixCache(self.blocks, self.spec.block_size, saved)
        self.choices = None
        if (kept := self.model.choices) is not None and kept.record and not engine_owns:
            self.choices = RecordedChoices(kept, backend, self.spec.num_blocks, self.spec.block_size)

    def _prepare(self) -> None:
        """Make what runs the steps."""
        model, backend, lockstep = self.model, self.backend, None
        if backend.lockstep:
            lockstep = Lockstep(backend.mesh.hosts, model, self.states.spec, backend)
        phases: tuple[Phase, ...] = ("decode", "prefill", *(() if model.encoder is None else ("encoder",)))
        compilation = backend.config.compilation
        chosen = [phase for phase in phases if compilation.of(phase).compiler not in (EAGER, OPTIMIZED)]
        uncaptured = {phase: self._uncaptured(phase, chosen) for phase in phases}
        if uncaptured["decode"].same(uncaptured["prefill"]):
            uncaptured["prefill"] = uncaptured["decode"]
        self._steps = Steps(model, backend, uncaptured, lockstep)
        if model.encoder is not None:
            self._encoding = Encoding(model.encoder, backend, self._steps.encode)
        if not chosen:
            return
        all_agree = agreement(backend, lockstep)
        token = backend.enter()
        try:
            with backend.translating_errors(), CAPTURING:  # The free device memory is measured before any capture.
                for phase in chosen:
                    context = self._context(phase, all_agree)
                    form = self._steps.forms[phase] = backend.compiler(context.config.compiler).make(context)
                    uncaptured[phase].step = uncaptured[phase].step or form.uncaptured
                for phase, each in uncaptured.items():
                    if each.context.refuses and (phase != "encoder" or phase in chosen):
                        each.prepare()  # else when a step first needs it
        finally:
            backend.leave(token)

    @property
    def model(self) -> CausalLM:
        """The model."""
        if self._model is None:
            raise self.uses.error()
        return self._model

    @property
    def states(self) -> StateMemory:
        """The states that the model keeps between steps."""
        if self._states is None:
            raise self._unusable()
        return self._states

    def _context(self, phase: Phase, all_agree: Callable[[bool], bool] = bool) -> FormContext:
        config = self.backend.config.compilation.of(phase)
        return FormContext(
            self.model, self.backend, self.states, config, phase, self._max_sequences, self._max_length, all_agree
        )

    def _uncaptured(self, phase: Phase, chosen: Sequence[Phase]) -> Uncaptured:
        """Return what runs the steps of a phase that no form accepts, given the phases with a compiler."""
        context, compilation = self._context(phase), self.backend.config.compilation
        if phase == "encoder":
            return Uncaptured(context, context.config.compiler != EAGER)
        with_logits = [each for each in chosen if each != "encoder"]
        if not with_logits or getattr(compilation, phase).compiler == EAGER:
            return Uncaptured(context, False)
        compiler = self.backend.compiler(compilation.of(phase if phase in chosen else with_logits[0]).compiler)
        if not compiler.traces:
            context = attrs.evolve(context, config=attrs.evolve(context.config, on_capture_error="eager"))
        return Uncaptured(context, True)

    @property
    def _running(self) -> Steps:
        if self._steps is None or self.asleep is not None:
            raise self._unusable()
        return self._steps

    def _unusable(self) -> HalError:
        return self.uses.error() if self.asleep is None or self.closed else self.asleep.error(self.model)

    @property
    def forms(self) -> Mapping[Phase, PhaseForm]:
        """The form of each phase that is not eager."""
        return MappingProxyType({} if self._steps is None else self._steps.forms)

    @property
    def captured_queries(self) -> tuple[int, ...]:
        """The numbers of new tokens per sequence of steps that whole graphs hold, ascending; none without graphs."""
        config = self.backend.config.compilation.of("decode")
        if "decode" not in self.forms or self.backend.compiler(config.compiler).any_shape:
            return ()
        return tuple(sorted(config.queries))

    @property
    def slots(self) -> SlotAllocator:
        """The allocator of the slots of per-sequence states."""
        if self._slots is None:
            raise self._unusable()
        return self._slots

    @property
    def encoding_steps(self) -> int:
        """How many steps the model's encoder has run. Embeddings that were kept take none."""
        return 0 if self._encoding is None else self._encoding.steps

    @property
    def encoding_replays(self) -> int:
        """How many steps of the encoder ran on graphs."""
        return 0 if self._steps is None else self._steps.encoder_replays

    def batch(
        self,
        token_ids: Sequence[Sequence[int]],
        block_ids: Sequence[Sequence[int]],
        *,
        cached: Sequence[int] | None = None,
        **fields: Any,
    ) -> Any:
        """Build a batch for this runner's cache and device. :meth:`hal.step.Batch.build` checks every number.

        Args:
            token_ids: the new tokens of each sequence.
            block_ids: all blocks of each sequence, in order.
            cached: the tokens of each sequence that the cache holds already; None for none.
            fields: tensors of the further fields of the model's batch class; see ``CausalLM.batch_type``.

        Raises:
            BatchError: a token id or block is out of range, a sequence is longer than the model's maximum, or as
                :meth:`hal.step.Batch.build`.
            ClosedError: the runner is closed.
        """
        self.uses.check_open()
        with self.backend.translating_errors():  # Copies to the device report its earlier failures, of any thread.
            return self.model.batch_type.build(
                token_ids,
                block_ids,
                block_size=self.spec.block_size,
                cached=cached,
                device=self.backend.device.torch,
                bounds=self.bounds,
                fields=fields,
            )

    def input_batch(self, max_sequences: int, max_length: int | None = None, *, spare: int = 0) -> InputBatch:
        """Return an empty input batch for this runner's cache and device.

        Args:
            max_sequences: the most rows.
            max_length: the most tokens of a row; None for the runner's ``max_length``.
            spare: the most drafted tokens of a row, which it takes beside the others, and which may all be pending.

        Raises:
            ConfigError: ``max_sequences`` is out of range.
            BatchError: ``max_length`` is not a positive integer.
            ClosedError: the runner is closed.
        """
        self.uses.check_open()
        check_count(max_sequences, SEQUENCES, "max_sequences must be")
        longest = self._max_length if max_length is None else max_length
        return InputBatch(
            self.model.batch_type,
            max_sequences=max_sequences,
            max_length=longest + min(spare, max(0, self.model.max_length - longest)),
            block_size=self.spec.block_size,
            device=self.backend.device,
            bounds=self.bounds,
            windows=windows_of(self.model, self.spec),
            max_pending=max(1, spare),
        )

    def step(self, batch: Batch, rows: Wanted = LAST) -> StepOutput:
        """Run the new tokens of all sequences, in steps of at most ``max_prefill_tokens``.

        If the layers of data ranks exchange tokens (``parallel.experts``), the ranks step together: each waits for the
        others' step or :meth:`idle`, and pads its own to the most tokens of any rank.

        Args:
            batch: any mix of new prompts, chunks of long ones, and running sequences.
            rows: the tokens to compute logits for: ``LAST``, ``ALL`` or ``NONE`` of :mod:`hal.step`, or their numbers
                in the batch, in any order. On a device, numbers are not checked: the host would wait in each step.

        Raises:
            BatchError: the shapes of the tensors are inconsistent, or a row is out of range.
            ModelError: the model returned tensors of other shapes, or computes no logits, and ``rows`` is not ``NONE``.
            CommunicationError: another rank has failed, or does not step within its timeout.
            ClosedError: the runner is closed.
        """
        if _inside.get() is not self:
            with self.running():
                return Runner.step(self, batch, rows)  # not one that overrides it, which has begun this one
        output = self._running.step(batch, rows)
        if self.choices is not None:
            self.choices.record(batch.slot_mapping, output)
        return output

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the runner open in a block, which runs on its backend, in inference mode, and raises its errors.

        :meth:`step` does so itself. What runs several steps, or reads the results of one, enters the block once.

        Raises:
            ClosedError: the runner is closed.
        """
        with self.uses:
            token, before = self.backend.enter(), _inside.set(self)
            try:
                with torch.inference_mode():
                    yield
            except Exception as error:
                if (known := self.backend.explained(error)) is None:
                    raise
                raise known from error
            finally:
                _inside.reset(before)
                self.backend.leave(token)

    def encode(self, items: Sequence[EncoderItem]) -> list[Tensor]:
        """Return the embeddings of images and other inputs, each ``[rows, width]`` on the device.

        The embeddings of the most recent items are kept, and not computed again; see ``cache.num_embeddings``.

        Raises:
            BatchError: an item does not fit the model's encoder.
            ModelError: the model has no encoder, or it returned tensors of other shapes.
            ClosedError: the runner is closed.
        """
        with self.running():
            self.check_awake()
            if self._encoding is None:
                raise ModelError(
                    f"{type(self.model).__name__} has no encoder", "leave the items out, or use another model"
                )
            return self._encoding.encode(items)

    def forget(self) -> None:
        """Drop the prefixes and the embeddings that are kept, which other weights of the model computed."""
        if self.prefixes is not None:
            self.prefixes.clear()
        if self._encoding is not None:
            self._encoding.clear()

    @property
    def sleep_error(self) -> HalError | None:
        """The error of a step while it sleeps, or has weights that were dropped and not replaced; else None."""
        return None if self.asleep is None else self._unusable()

    def check_awake(self) -> None:
        """Raise AsleepError while steps do."""
        if self.asleep is not None:
            raise self._unusable()

    def free_graphs(self, *, states: bool) -> None:
        """Free the graphs, and with ``states`` the states, whose addresses they have, until :meth:`remake`."""
        forms, self._steps, self._encoding = list(self.forms.values()), None, None
        if states:
            self._states = self._slots = None
        for each in forms:
            each.close()
        self._collect()

    def remake(self, *, states: bool) -> None:
        """Allocate the states again if ``states`` is set, or else capture the graphs again, unless they are there."""
        if states and self._states is None:
            check_fits(self.spec, self.backend)
            self._allocate()
        elif not states and self._steps is None:
            self._prepare()

    def idle(self) -> bool:
        """Step without a batch while other data ranks have one.

        A rank that has nothing to run calls it in place of :meth:`step`, until it returns False. If the layers of data
        ranks do not exchange tokens, it returns False immediately.

        Returns:
            Whether any data rank had a batch, so that a step ran.

        Raises:
            CommunicationError: another rank has failed, or does not step within its timeout.
            ClosedError: the runner is closed.
        """
        with self.running():
            return self._running.idle()

    def _check_closable(self) -> None:
        super()._check_closable()
        check_not_capturing()

    def _free(self) -> None:
        with ExitStack() as stack:  # Every step of the release runs, even if another raises.
            stack.callback(self._collect)
            stack.callback(self.backend.runners.discard, self)
            stack.callback(self._release_outputs)
            with self.backend.translating_errors():
                self.backend.device.synchronize()  # Steps may still run.

    def _release_outputs(self) -> None:
        forms = [] if self._steps is None else list(self._steps.forms.values())
        self._model = self._states = self._slots = self._steps = self._encoding = None
        with ExitStack() as stack:
            for form in forms:
                stack.callback(form.close)

    def _collect(self) -> None:
        """Return the memory to the device. Traces leave reference cycles, which only the garbage collector frees."""
        gc.collect()
        with CAPTURING:  # Emptying the cache may disturb another thread's capture.
            self.backend.device.empty_cache()
