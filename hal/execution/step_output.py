"""The result of a step."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from hal.errors import BatchError


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
