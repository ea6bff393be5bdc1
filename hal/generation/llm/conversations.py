"""Prompts of conversations: the checkpoint's chat template, and the images of the messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from hal.checkpoint.checkpoint import Checkpoint
from hal.generation.llm.chat_template import ChatTemplate
from hal.generation.llm.messages import Message, media_of, normalized, without_media
from hal.generation.llm.processor import Preparation, open_processor, prompt_with
from hal.generation.llm.prompts import MultimodalPrompt
from hal.nn import CausalLM


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
