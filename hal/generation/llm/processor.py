"""Prompts of conversations: the checkpoint's chat template, and the images of the messages.

Processors prepare images and videos for the encoders of models. Any package can register one in the entry-point group
``hal.processors``. hal prepares no image itself.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from tokenizers import Tokenizer

from hal.checkpoint.checkpoint import Checkpoint
from hal.config.plugins import Plugins, instance_of
from hal.errors import CheckpointError
from hal.generation.llm.chat_template import ChatTemplate
from hal.generation.llm.images import read_image
from hal.generation.llm.messages import Message, media_of, normalized, without_media
from hal.generation.llm.prompts import MultimodalPrompt
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


class Conversations:
    """Writes the prompts of conversations. Threading: any thread may call it.

    Args:
        model: returns the model, for images; it may be on the meta device.
    """

    def __init__(
        self, checkpoint: Checkpoint, tokenizer: Callable[[], Tokenizer], model: Callable[[], CausalLM]
    ) -> None:
        self._checkpoint, self._tokenizer, self._model = checkpoint, tokenizer, model
        self._template: ChatTemplate | None = None
        self._preparation: Preparation | None = None
        self._lock = threading.Lock()

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, switches: Mapping[str, Any]
    ) -> list[int] | MultimodalPrompt:
        """Return the prompt of a conversation; see :meth:`hal.LLM.chat_prompt`."""
        found = normalized(messages)
        if kinds := [kind for _, kind, _ in media_of(found)]:
            self._model().check_kinds(kinds)
        written, media = without_media(found)
        if self._template is None:
            self._template = ChatTemplate.read(self._checkpoint)
            self._template.warn_of_other_endings(self._tokenizer(), self._checkpoint.stop_token_ids)
        text = self._template.render(written, tools=tools, **switches)
        tokens = self._encoded(text)
        if not media:
            return tokens
        with self._lock:
            if self._preparation is None:
                self._preparation = open_processor(self._checkpoint)
        return MultimodalPrompt(*prompt_with(self._model(), self._preparation, tokens, media, self._encoded))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer().encode(text, add_special_tokens=False).ids)
