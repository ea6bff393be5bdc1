"""Steps of data ranks whose layers exchange tokens: all ranks run steps of the same shape, even those without a batch.

The ranks first exchange the shapes of their batches. Each then extends its own by sequences of padding, so that every
collective in the model has equal shapes on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from hal.device.group import Group
from hal.drivers.backend import Backend
from hal.errors import BatchError
from hal.nn import CausalLM
from hal.parallel.host_values import check_host_group, gather_numbers
from hal.step import Batch, StateSpec, StepShape
from hal.step.padding import extended, padding_batch


@attrs.frozen(eq=False)
class AlignedStep:
    """This rank's part of a step that the data ranks run together.

    Attributes:
        batch: the rank's batch, extended by padding.
        shape: its shape, in which ``tokens`` is the same on all ranks.
        uniform: whether all sequences of all ranks have the same number of queries, one of ``compilation.queries``.
    """

    batch: Batch
    shape: StepShape
    uniform: bool


class Lockstep:
    """Keeps the steps of data ranks alike.

    Args:
        hosts: the data ranks; see :class:`hal.parallel.Mesh`.
        model: its batches are padded.
        spec: the specification of the model's states.
        backend: runs the steps.

    Raises:
        ConfigError: the process group of ``hosts`` does not carry CPU tensors.
    """

    def __init__(self, hosts: Group, model: CausalLM, spec: StateSpec, backend: Backend) -> None:
        check_host_group(hosts)
        self._hosts, self._batch_type, self._max_length = hosts, model.batch_type, model.max_length
        self._queries = frozenset(backend.config.compilation.queries)
        self._block_size, self._device = spec.block_size, backend.device.torch

    def align(self, batch: Batch | None) -> AlignedStep | None:
        """Agree on the shape of the next step. All data ranks call it.

        Args:
            batch: this rank's batch; None if it has none.

        Returns:
            This rank's step; None if no rank has a batch.

        Raises:
            BatchError: the batch has no tokens.
            CommunicationError: another rank has ended, or does not come within its timeout.
        """
        if batch is not None and not batch.num_tokens:
            raise BatchError("the batch has no tokens, and the data ranks step together", "call Runner.idle instead")
        mine = StepShape(0, 0, 0) if batch is None else batch.shape
        shapes = [StepShape(*each) for each in gather_numbers(self._hosts, attrs.astuple(mine))]
        busy = [each for each in shapes if each.tokens]
        if not busy:
            return None
        queries = busy[0].queries
        uniform = queries in self._queries and all(each.queries == queries for each in busy)
        tokens = max(each.tokens for each in busy)
        lengths = self._lengths(tokens - mine.tokens, queries if uniform else self._max_length)
        if lengths:
            padding = padding_batch(self._batch_type, lengths, block_size=self._block_size, device=self._device)
            batch = padding if batch is None else extended(batch, padding)
        assert batch is not None, "a rank without a batch has padding"
        return AlignedStep(batch, batch.shape, uniform)

    def all_agree(self, yes: bool) -> bool:
        """Return whether all data ranks say yes. All of them call it."""
        return all(each for (each,) in gather_numbers(self._hosts, [yes]))

    @staticmethod
    def _lengths(tokens: int, most: int) -> list[int]:
        """Return the lengths of sequences that have ``tokens`` tokens in total, at most ``most`` each."""
        return [min(most, tokens - start) for start in range(0, tokens, most)]


def agreement(backend: Backend, lockstep: Lockstep | None) -> Callable[[bool], bool]:
    """Return ``all_agree`` of :class:`hal.execution.context.FormContext`.

    Args:
        backend: its mesh has the ranks.
        lockstep: keeps the steps of data ranks alike; None if they step alone.
    """
    tensor = backend.mesh.tensor

    def all_agree(yes: bool) -> bool:
        if tensor.size > 1:
            no = torch.full((1,), float(not yes), device=backend.device.torch)
            yes = not backend.kernels["all_reduce"](no, tensor.name).item()
        return yes if lockstep is None else lockstep.all_agree(yes)

    return all_agree
