"""Checkpoints of random weights that never touch a disk."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.nn import CausalLM, MergedLinear
from hal.runtime.checkpoint import Checkpoint
from hal.runtime.checkpoint_files import TensorInfo
from hal.runtime.model_classes import find_model


@attrs.frozen
class RandomCheckpoint(Checkpoint):
    """A checkpoint whose values are drawn when they are read, always the same ones for a name and shape.

    Matrices are drawn such that hidden states keep their size from layer to layer; vectors are ones, as norms begin.
    """

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> RandomCheckpoint:
        """A checkpoint with the tensors that the model registered for ``config`` takes, in the config's dtype."""
        tensors = {key: TensorInfo(Path(name), shape, "BF16") for key, shape in _shapes(meta_model(config))}
        return cls(Path(name), config, tensors)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The values of ``names``, in that order, as CPU tensors of the checkpoint's dtype."""
        for name in names:
            shape = self.tensors[name].shape
            values = torch.ones(shape, dtype=self.dtype)
            if len(shape) > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values.normal_(std=1 / math.sqrt(shape[-1]), generator=generator)
            yield name, values


def meta_model(config: Mapping[str, Any]) -> CausalLM:
    """The model registered for a config.json, with shapes and no values.

    Raises:
        CheckpointError: no model is registered for it.
        ConfigError: the config is not one that the model takes.
    """
    architecture = Checkpoint(Path("config.json"), config, {}).architecture
    with torch.device("meta"):
        return find_model(architecture).from_config(config)


def _shapes(model: CausalLM) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            if not isinstance(module, MergedLinear):
                yield f"{path}.{name}", shape
                continue
            for part, rows in module.parts.items():
                yield f"{path.rpartition('.')[0]}.{part}.{name}", (rows, *shape[1:])
