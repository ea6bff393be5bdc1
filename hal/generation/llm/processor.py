"""Processors, which prepare images and videos for the encoders of models. Any package can register one.

It is registered in the entry-point group ``hal.processors``. hal prepares no image itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from hal.checkpoint.checkpoint import Checkpoint
from hal.config.plugins import Plugins, instance_of
from hal.errors import CheckpointError
from hal.generation.llm.images import read_image
from hal.generation.llm.videos import Video, VideoFile
from hal.nn import CausalLM, EncoderItem
from hal.nn.encoder import IMAGE, VIDEO

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


Options = Mapping[str, Mapping[str, Any]]
"""Options of a processor by the kind of the item, ``image`` or ``video``."""


class Preparation(ABC):
    """Prepares images and videos for one checkpoint. Threading: any threads, at the same time.

    Attributes:
        options: the names of the options for each kind. A kind that cannot be prepared has no entry.
    """

    options: Mapping[str, frozenset[str]] = MappingProxyType({IMAGE: frozenset()})

    @abstractmethod
    def items(self, media: Sequence[Any], options: Options = MappingProxyType({})) -> list[EncoderItem]:
        """Return images and videos as items of the model's encoder.

        Args:
            media: images of PIL, in RGB, and videos as frames or files.
            options: override what the checkpoint says.

        Raises:
            BatchError: an image or a video cannot be prepared, or an option has no such name or value.
            ConfigError: a library is not installed.
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
    model: CausalLM,
    preparation: Preparation,
    tokens: Sequence[int],
    media: Sequence[Any],
    encode: Callable[[str], Sequence[int]] | None = None,
) -> tuple[list[int], list[EncoderItem]]:
    """Return a prompt whose placeholders are those of each embedding, and its items.

    Args:
        preparation: prepares the images and videos.
        tokens: the prompt, with one placeholder for each image and video.
        media: images, see :func:`read_image`, and videos as frames or files.
        encode: returns the tokens of a text; see :meth:`hal.nn.CausalLM.expand`.

    Raises:
        BatchError: an image or a video cannot be read, or there are more or fewer than placeholders.
        ModelError: the model does not read images or videos.
    """
    model.check_kinds(VIDEO if isinstance(each, Video | VideoFile) else IMAGE for each in media)
    read = [
        each if isinstance(each, Video | VideoFile) else read_image(each, f"image {index}")
        for index, each in enumerate(media)
    ]
    items = preparation.items(read)
    return model.expand(tokens, items, encode), items
