"""The interface of compilers, which run a model's steps, for hal, drivers and other packages.

A compiler registered in the entry-point group ``hal.compilers`` is available on every backend that it supports. A
driver passes its own compilers to :class:`hal.Backend`. A compiler makes one form for each runner; the form runs steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from hal.step import Batch, StepShape

Outputs = tuple[Tensor, ...]
"""What a step computes for its tokens: hidden states ``[tokens, width]``, the model's ``extra`` tensors, and, of a form
that computes them, logits ``[tokens, vocab_size]``. All are valid until the next step."""
Plan = Callable[[], Outputs]
"""Runs a step that was planned. It is called at most once, before the next step is planned."""


class PhaseForm(ABC):
    """The compiled form of a model for one runner, which runs the steps of some shapes.

    Attributes:
        with_logits: whether its steps compute the logits of all their tokens. Otherwise the runner computes those that
            are asked for.
        uncaptured: runs a step of any shape without graphs, if the form has such code. The runner then traces none.
    """

    with_logits: bool = False
    uncaptured: Callable[[Batch], Outputs] | None = None

    @abstractmethod
    def plan(self, batch: Batch, shape: StepShape) -> Plan | str:
        """Decide whether and how the form runs a batch. Nothing is launched, and no memory of a graph is written.

        Returns:
            A function that runs the step, or why the form cannot run it. The runner warns once for each distinct
            reason, so a reason must not contain values that change with each step.
        """

    def stages(self, shape: StepShape) -> tuple[Any, ...]:
        """Return the stages after the rewrites, as ``hal.compile.optimize.Stage`` objects, for ``hal explain``."""
        return ()

    def close(self) -> None:  # noqa: B027 (most forms hold nothing to free explicitly)
        """Free the form's device resources."""


class Compiler(ABC):
    """One way to run steps, selected by ``compilation.compiler``.

    Attributes:
        name: the compiler's name in a configuration.
        reads: the configuration keys that it reads, of ``splitting_ops``, ``passes``, ``torch_compile_max_bs``,
            ``cache_dir`` and ``queries``. A key that no chosen compiler reads is an error. Every compiler reads the
            capture sizes.
        any_shape: whether its forms run steps of any shape. Otherwise they run only steps whose sequences all have the
            same number of queries, which is one of the configured ``queries``.
        traces: whether its steps are traced. If so, a model that cannot be traced for steps that no graph holds is
            refused, unless ``on_capture_error`` is ``eager``. Otherwise such steps run the model's Python.
    """

    name: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    any_shape: ClassVar[bool] = False
    traces: ClassVar[bool] = True

    def unsupported(self, backend: Any) -> str | None:
        """Return why the compiler does not support a :class:`hal.Backend`, or None if it does."""
        return None

    @abstractmethod
    def make(self, context: Any) -> PhaseForm:
        """Make the form that runs a model's steps.

        Args:
            context: a :class:`hal.execution.context.FormContext`, with the model, backend, states and configuration.

        Raises:
            CaptureError: the steps cannot be captured.
            CompileError: the steps cannot be compiled.
            ConfigError: the configuration does not fit the model.
        """
