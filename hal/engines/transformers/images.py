"""Images through transformers' image processors, in the entry-point group ``hal.processors``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from hal import Checkpoint
from hal.config.optional_libraries import need
from hal.errors import BatchError, CheckpointError
from hal.generation.llm.processor import Preparation, Processor
from hal.nn import EncoderItem

FILE = "preprocessor_config.json"


class TransformersProcessor(Processor):
    """The image processors of transformers, as a checkpoint's ``preprocessor_config.json`` names them."""

    name: ClassVar[str] = "transformers"

    def open(self, checkpoint: Checkpoint) -> Preparation:
        """Return the checkpoint's image processor.

        Raises:
            CheckpointError: the checkpoint has no preprocessor_config.json, or transformers cannot read it.
            ConfigError: transformers or pillow is not installed.
        """
        folder = Path(checkpoint.path)
        if not (folder / FILE).is_file():
            raise CheckpointError(
                f"{folder} has no {FILE}, which says how images are prepared",
                "leave the images out, or download the whole checkpoint of a model that reads them",
            )
        need("PIL", "vision", "an image")
        image_processing = need("transformers.models.auto.image_processing_auto", "vision", "an image")
        try:
            # The same pixels whether torchvision is installed or not.
            found = image_processing.AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        except Exception as error:  # transformers raises anything for a damaged file.
            raise CheckpointError(
                f"{folder / FILE} cannot be read: {type(error).__name__}: {error!s:.200}",
                "download the checkpoint again",
            ) from error
        return _Images(found)


class _Images(Preparation):
    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def items(self, images: Sequence[Any]) -> list[EncoderItem]:
        found = []
        for index, image in enumerate(images):
            try:
                prepared = self._processor(images=[image], return_tensors="pt")
                values, grid = prepared["pixel_values"], prepared["image_grid_thw"][0].tolist()
            except (ValueError, KeyError, TypeError) as error:
                raise BatchError(
                    f"image {index} of {image.size[0]} x {image.size[1]} pixels cannot be prepared: {error!s:.200}",
                    "give an image of which neither side is many times the other",
                ) from error
            values = values.to(torch.float32).contiguous()
            digest = hashlib.sha256(repr(grid).encode() + values.numpy().tobytes()).digest()
            found.append(EncoderItem("image", values, tuple(grid), digest))
        return found
