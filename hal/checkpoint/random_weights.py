"""Checkpoints with random weights, which exist only in memory."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.checkpoint import hub
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.model_registry import AUTO, find_model_class
from hal.checkpoint.safetensors_files import TensorInfo, TensorSlice
from hal.checkpoint.weight_bindings import bindings_of
from hal.config.untrusted_files import read_json
from hal.errors import CheckpointError
from hal.nn import CausalLM
from hal.quantization.checkpoint_format import config_keys


@attrs.frozen
class RandomCheckpoint(Checkpoint):
    """A checkpoint whose values are generated on reading, and depend only on a tensor's name and shape.

    Matrices are scaled to preserve the magnitude of hidden states; vectors are ones, as initial norm weights are.
    Integers count along the last dimension, so that the experts of a token in a table differ. It measures speed, or is
    loaded where a training loop brings the weights later (:func:`hal.replace_weights`).
    """

    @classmethod
    def open(cls, path: str | Path, *, revision: str | None = None) -> RandomCheckpoint:
        """Return a checkpoint with random weights for the config.json of a folder or model of the hub.

        Args:
            path, revision: as in :meth:`hal.Checkpoint.open`. Of a model of the hub, only config.json is downloaded.

        Raises:
            CheckpointError: config.json is missing or damaged, or as :meth:`of`.
            ConfigError: the config is invalid for the model.
        """
        folder = hub.folder_of(path, revision, weights=False)
        return cls.of(str(folder), read_json(folder / "config.json"))

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> RandomCheckpoint:
        """Return a checkpoint with the tensors of the model for ``config``, in its dtype.

        Args:
            name: names the checkpoint in errors.
            config: the content of a config.json.

        Raises:
            CheckpointError: no source has a model for it, or it is of quantized weights.
            ConfigError: the config is invalid for the model.
        """
        if key := next((each for each in config_keys() if each in config), None):
            raise CheckpointError(
                f"{name} has {key} in config.json, and random weights are not quantized",
                "remove the key, or load the checkpoint's own weights",
            )
        tensors = {
            piece.source: TensorInfo(Path(name), piece.source_shape, "BF16" if floating else "I32")
            for binding in bindings_of(meta_model(config))
            for floating in [binding.tensor.is_floating_point()]
            for piece in binding.pieces()
        }
        return cls(Path(name), config, tensors)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors in that order, on the CPU in the checkpoint's dtype."""
        for name in names:
            shape = self.tensors[name].shape
            if not self.tensors[name].is_floating_point:
                yield name, torch.arange(shape[-1], dtype=torch.int32).expand(shape).contiguous()
                continue
            values = torch.ones(shape, dtype=self.dtype)
            if len(shape) > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values.normal_(std=1 / math.sqrt(shape[-1]), generator=generator)
            yield name, values

    def read_slices(self, wanted: Sequence[TensorSlice]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield, for each slice in order, its index, 0 and all of its values."""
        for place, each in enumerate(wanted):
            for _, values in self.read([each.name]):
                yield place, 0, values[tuple(slice(*taken) for taken in each.taken)]


def meta_model(config: Mapping[str, Any], source: str = AUTO) -> CausalLM:
    """Create the model of a config.json on the meta device.

    Args:
        config: the content of config.json.
        source: ``model_source`` of a configuration.

    Raises:
        CheckpointError: no source has a model for it.
        ConfigError: the config is invalid for the model.
    """
    architecture = Checkpoint(Path("config.json"), config, {}).architecture
    with torch.device("meta"):
        return find_model_class(architecture, config, source).from_config(config)
