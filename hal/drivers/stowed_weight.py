"""A weight whose memory is given back for some time, on a device that cannot keep addresses."""

from __future__ import annotations

from torch import Tensor


class StowedWeight:
    """A weight in torch's ordinary memory.

    Args:
        weight: it stays the model's tensor.
        values: a copy of it on the host; None to leave its values unspecified.
    """

    def __init__(self, weight: Tensor, values: Tensor | None) -> None:
        self._weight, self._values = weight, values
        self.nbytes = weight.untyped_storage().nbytes()

    def free(self) -> None:
        """Free the memory. Nothing that has its address is used any more."""
        self._weight.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the memory, with the values that were copied, or with zeros, which a capture may read."""
        storage = self._weight.untyped_storage()
        if storage.nbytes() != self.nbytes:  # Other weights may have the same one.
            storage.resize_(self.nbytes)
        if self._values is None:
            self._weight.zero_()
        else:
            self._weight.copy_(self._values)
            self._values = None
