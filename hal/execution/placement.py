"""The check that a model is where its runner's backend is."""

from __future__ import annotations

from hal.drivers.backend import Backend
from hal.errors import ConfigError
from hal.nn import CausalLM


def check_placed(model: CausalLM, backend: Backend) -> None:
    """Raise ConfigError if a model was prepared by another backend, or is on another device."""
    if model.prepared_by not in (None, backend.name):
        raise ConfigError(
            f"the model's weights were prepared by the backend {model.prepared_by}, not by {backend.name}",
            f"load the model again, on the backend {backend.name}",
        )
    device = next(model.parameters()).device
    if device != backend.device.torch:
        raise ConfigError(
            f"the model is on {device}, and the backend {backend.name} on {backend.device.torch}",
            "load the model on the backend of the runner, or move it there",
        )
