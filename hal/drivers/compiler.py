"""Compilers and forms: the ways to run a model's steps, as an interface for hal, drivers and other packages.

A compiler is registered in the entry-point group ``hal.compilers`` under its name, and then serves every backend that
it supports; a driver gives its own to :class:`hal.Backend`. For each runner, a compiler makes a form, which runs steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from hal.step import Batch, StepShape


class Form(ABC):
    """Runs the steps of some shapes, for one runner."""

    @abstractmethod
    def refusal(self, batch: Batch, shape: StepShape) -> str | None:
        """Return why the form cannot run a batch; None if it can. Asked before anything is launched.

        The runner warns once for each reason, so that one does not name what differs from step to step.
        """

    @abstractmethod
    def run(self, batch: Batch, shape: StepShape) -> Tensor:
        """Run a batch that :meth:`refusal` has nothing against.

        Returns:
            Logits ``[rows, vocab_size]``; valid until the next step.
        """

    def stages(self, shape: StepShape) -> tuple[Any, ...]:
        """Return what came after the rewrites, as ``hal.compile.optimise.Stage`` objects, for ``hal explain``."""
        return ()

    def close(self) -> None:  # noqa: B027 (most forms hold nothing that must be freed by hand)
        """Free what the form holds of the device."""


class Compiler(ABC):
    """One way to run steps, by a name that a configuration can give as ``compilation.compiler``.

    Attributes:
        name: what a configuration calls it.
        reads: keys of the configuration that it reads, of ``splitting_ops``, ``passes``, ``torch_compile_max_bs``,
            ``cache_dir`` and ``queries``. A key that no chosen compiler reads is refused. All read the capture sizes.
        any_shape: whether its forms run steps of any shape. Otherwise they run those whose sequences all have the same
            number of queries, one of the configuration's ``queries``.
    """

    name: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    any_shape: ClassVar[bool] = False

    def unsupported(self, backend: Any) -> str | None:
        """Return why the compiler does not serve a :class:`hal.Backend`; None if it does."""
        return None

    @abstractmethod
    def make(self, context: Any) -> Form:
        """Make the form that runs a model's steps.

        Args:
            context: a :class:`hal.execution.context.FormContext`: the model, its backend and states, and the
                configuration.

        Raises:
            CaptureError: the steps cannot be captured.
            CompileError: they cannot be compiled.
            ConfigError: the configuration does not suit the model.
        """
