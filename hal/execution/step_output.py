"""The result of a step, its copy to the host, and validation of what a model returns."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs
from hal.errors import BatchError, ModelError
from hal.nn import CausalLM


@attrs.frozen(eq=False)
class StepOutput:
    """What a step computed. All tensors are valid until the runner's next step.

    With ``compilation.debug``, the next step fills them with NaN, so that a later read shows.

    Attributes:
        hidden_states: ``[tokens, width]``, a row for each token of the batch, as the model's ``forward`` returns them.
        extra: further tensors of the model, ``[tokens, ...]``, by the names in ``CausalLM.extra``.
    """

    hidden_states: Tensor
    extra: Mapping[str, Tensor]
    _logits: Tensor | None

    @property
    def logits(self) -> Tensor:
        """``[rows, vocab_size]``, in the weights' dtype, one row for each of the step's ``rows``, in their order.

        Raises:
            BatchError: the step was asked for none.
        """
        if self._logits is None:
            raise BatchError("the step computed no logits: rows is NONE", "pass the rows to Runner.step")
        return self._logits


def check_hidden(model: CausalLM, found: Outputs, tokens: int) -> None:
    """Raise ModelError unless hidden states are ``[tokens, width]``, and the extra tensors have a row per token."""
    for name, tensor in zip(("hidden states", *model.extra), found, strict=False):
        if tensor.shape[:1] == (tokens,) and (name in model.extra or tensor.dim() == 2):
            continue
        wanted = f"[{tokens}, ...]" if name in model.extra else f"[{tokens}, width]"
        raise ModelError(
            f"{type(model).__name__}.forward returned {name} of {list(tensor.shape)}, not {wanted}",
            "return a row for each token; logits are computed in the method logits",
        )


def check_logits(model: CausalLM, logits: Tensor, rows: int) -> None:
    """Raise ModelError unless logits are ``[rows, vocab_size]``."""
    wanted = (rows, model.vocab_size)
    found = getattr(logits, "shape", None)
    if found != wanted:
        what = f"a {type(logits).__name__}" if found is None else f"{list(found)}"
        raise ModelError(
            f"{type(model).__name__}.logits returned {what}, not logits of {list(wanted)}",
            "project hidden states, [rows, width], to vocab_size",
        )


class HostCopy:
    """Tensors of a backend on their way to the host.

    The copies are enqueued behind the work that computes the tensors, and an event behind the copies. The host can
    prepare the next step meanwhile. Threading: any thread may read the copies.

    Args:
        backend: the backend that computes the tensors.
        tensors: tensors on its device, on the current stream. A later step may overwrite them.
    """

    def __init__(self, backend: Backend, *tensors: Tensor) -> None:
        self._backend = backend
        copies = []
        try:
            for each in tensors:
                copies.append(each.to("cpu", non_blocking=True, copy=True))
            self._copied = backend.device.event()
            self._copied.record()
        except Exception as error:
            if (known := backend.explained(error)) is None:
                raise
            raise known from error
        self._copies = tuple(copies)

    @property
    def arrived(self) -> bool:
        """Whether the copies are on the host."""
        return self._copied.query()

    def wait(self) -> tuple[Tensor, ...]:
        """Return the copies, in the order of the tensors. Waits for them.

        Raises:
            DeviceError: work that the device ran before the copies has failed.
        """
        try:
            self._copied.synchronize()
        except Exception as error:
            if (known := self._backend.explained(error)) is None:
                raise
            raise known from error
        return self._copies
