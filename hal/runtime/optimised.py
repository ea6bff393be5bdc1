"""A model's step as an optimised function: traced anew where its Python would do otherwise for other sizes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hal.backend import Backend
from hal.batch import Batch
from hal.compile.optimise import OptimisedStep, optimise_model
from hal.compile.trace import Caches, batch_tensors, example_batch
from hal.config import CompilationConfig
from hal.kv_cache import KVCache
from hal.nn import CausalLM


class OptimisedModel:
    """Runs decode steps as the model does, on the graphs that the backend's passes made of it.

    Attributes:
        optimised: by batch size, the step that serves it; most sizes share one.

    Raises:
        CompileError: the model cannot be traced, or a pass failed; by ``prepare`` or the first step of a size.
    """

    def __init__(self, model: CausalLM, backend: Backend, cache: KVCache, config: CompilationConfig) -> None:
        self._model, self._backend, self._cache, self._config = model, backend, cache, config
        self._lowered: list[tuple[OptimisedStep, Callable[..., tuple[Tensor]]]] = []
        self._steps: dict[int, Callable[..., tuple[Tensor]]] = {}
        self.optimised: dict[int, OptimisedStep] = {}

    def prepare(self, size: int) -> Callable[..., tuple[Tensor]]:
        """Trace and optimise what runs decode steps of ``size`` sequences, if nothing did yet.

        Returns:
            A function from the tensors of a batch, in the order of its fields, to ``(logits,)``.
        """
        if size not in self._steps:
            example = example_batch(size, size, size, columns=2 * size + 3, device=self._backend.device.torch)
            known = next((each for each in self._lowered if each[0].traced.serves(example)), None)
            if known is None:
                known = self._optimise(example)
                self._lowered.append(known)
            self.optimised[size], self._steps[size] = known
        return self._steps[size]

    def _optimise(self, example: Batch) -> tuple[OptimisedStep, Callable[..., tuple[Tensor]]]:
        size = example.num_sequences
        passes = self._config.passes
        step = optimise_model(self._model, example, self._cache.layers, self._backend, passes, any_size=size > 1)
        step.hoist(self._backend)
        return step, step.lowered()

    def __call__(self, batch: Batch, caches: Caches) -> Tensor:
        """Logits, as the model gives them. ``caches`` are those that it was made for."""
        (logits,) = self.prepare(batch.num_sequences)(*batch_tensors(batch))
        return logits
