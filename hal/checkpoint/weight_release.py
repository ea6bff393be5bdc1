"""Weights whose memory is given back for some time, as while a training loop needs it."""

from __future__ import annotations

from typing import Literal

import attrs

from hal.checkpoint.weight_replacement import loaded_weights, replace_tensors
from hal.drivers.backend import Backend
from hal.drivers.stowed_weight import StowedWeight
from hal.errors import ConfigError
from hal.nn import CausalLM

Kept = Literal["device", "host", "files", "none"]
"""What is kept of weights: they stay on the device; a copy on the host; the checkpoint's files; or nothing."""


class ReleasedWeights:
    """The weights of a loaded model that give back their memory, at once or in :meth:`free`.

    Args:
        model: loaded on the backend. No step may be running.
        kept: what is kept of the values, other than ``device``.

    Attributes:
        released: the bytes of the device that were given back.
        addresses_kept: whether the weights keep their addresses, so that graphs stay valid.

    Raises:
        BatchError: requests use adapters, whose values are to be read again.
        ConfigError: ``kept`` is ``files``, and these have other weights.
        ModelError: :func:`hal.load_model` did not load the model.
    """

    def __init__(self, model: CausalLM, backend: Backend, kept: Kept) -> None:
        self._model, self._adapters = model, model.adapters
        loaded = loaded_weights(model)
        self._checkpoint = loaded.checkpoint if kept == "files" else None
        if kept == "files" and self._checkpoint is None:
            raise ConfigError(
                "weights is files, and the weights were replaced by others than a whole checkpoint's",
                'set weights to "host" or "none"',
            )
        weights = [each for layer in loaded.layers for each in layer.tensors()]
        weights += [] if self._adapters is None else self._adapters.tensors
        device, copied, self._stowed = backend.device, kept == "host", list[StowedWeight]()
        self.released, self.addresses_kept = 0, True
        if copied:
            self._adapters = None  # They stay, or are copied.
        elif self._adapters is not None:
            self._adapters.check_unused()
        if copied and device.torch.type == "cpu":
            return
        model.loaded = attrs.evolve(loaded, restore=self.restore)
        if copied:
            self._stowed = [backend.stow_weight(each, copy=True) for each in weights]
        else:
            for layer in loaded.layers:
                layer.dropped = True
        if (released := device.give_back(weights)) is not None:
            self.released = released
            return
        self.addresses_kept = False
        self._stowed = self._stowed or [backend.stow_weight(each, copy=False) for each in weights]
        self.released = sum({each.data_ptr(): each.untyped_storage().nbytes() for each in weights}.values())

    def free(self) -> None:
        """Free the weights, if they do not keep their addresses. Nothing that has these may be used any more."""
        for each in [] if self.addresses_kept else self._stowed:
            each.free()

    def restore(self, backend: Backend) -> None:
        """Allocate the weights again, and give them their values, unless nothing was kept of them.

        Those of adapters are read from their folders. A second call has no effect.

        Args:
            backend: of the model's device.

        Raises:
            CheckpointError: the checkpoint or an adapter cannot be read.
            DeviceOutOfMemory: the device has too little memory.
        """
        while self._stowed:  # Those that did not fit are left for the next call.
            self._stowed[-1].restore()
            self._stowed.pop()
        if self._checkpoint is not None:
            replace_tensors(self._model, backend, self._checkpoint)
            self._checkpoint = None
        if self._adapters is not None:
            self._adapters.read_again()
            self._adapters = None
        self._model.loaded = attrs.evolve(loaded_weights(self._model), restore=None)


def dropped_weights(model: CausalLM) -> list[str]:
    """Return the paths of layers whose weights were given up, and not replaced yet."""
    return [each.bindings[0].full_name for each in getattr(model.loaded, "layers", ()) if each.dropped]
