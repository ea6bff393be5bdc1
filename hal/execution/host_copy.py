"""Copies of a step's results to the host, which do not make the host wait for the step."""

from __future__ import annotations

from torch import Tensor

from hal.drivers.backend import Backend


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
