"""Processors, which prepare images for the encoders of models. Any package can register one.

It is registered in the entry-point group ``hal.processors``. hal prepares no image itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from hal.checkpoint.checkpoint import Checkpoint
from hal.config.plugins import Plugins, instance_of
from hal.errors import CheckpointError
from hal.generation.llm.images import read_image
from hal.nn import CausalLM, EncoderItem

GROUP = "hal.processors"


class Processor(ABC):
    """Prepares the images of prompts for a checkpoint's model.

    Attributes:
        name: its name in the entry-point group.
    """

    name: ClassVar[str]

    @abstractmethod
    def open(self, checkpoint: Checkpoint) -> Preparation:
        """Return what prepares images as the files of a checkpoint say.

        Raises:
            CheckpointError: the checkpoint has no such files, or they are damaged.
            ConfigError: a library is not installed.
        """


class Preparation(ABC):
    """Prepares images for one checkpoint. Threading: one thread at a time."""

    @abstractmethod
    def items(self, images: Sequence[Any]) -> list[EncoderItem]:
        """Return images of PIL, in RGB, as items of the model's encoder.

        Raises:
            BatchError: an image cannot be prepared.
        """


PROCESSORS: Plugins[Processor] = Plugins(GROUP, "processor", instance_of(Processor, GROUP))


def open_processor(checkpoint: Checkpoint) -> Preparation:
    """Return what prepares the images of a checkpoint, of the first processor that can."""
    refusal: Exception | None = None
    for name in PROCESSORS.names():
        try:
            return PROCESSORS.load(name).open(checkpoint)
        except CheckpointError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    raise CheckpointError("no processor of images is installed", "pip install 'torch-hal[vision]'")


def prompt_with(
    model: CausalLM, preparation: Preparation, tokens: Sequence[int], images: Sequence[Any]
) -> tuple[list[int], list[EncoderItem]]:
    """Return a prompt whose placeholders are those of each embedding, and its items.

    Args:
        model: the model.
        preparation: prepares the images.
        tokens: the prompt, with one placeholder for each image.
        images: see :func:`read_image`.

    Raises:
        BatchError: an image cannot be read, or there are more or fewer than placeholders.
        ModelError: the model reads text alone.
    """
    items = preparation.items([read_image(each, f"image {index}") for index, each in enumerate(images)])
    return model.expand(tokens, items), items
