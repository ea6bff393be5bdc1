"""Messages as callers give them, in one form: texts, parts, images and videos, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hal.errors import BatchError, ConfigError
from hal.generation.llm.videos import read_video

KINDS = ("image", "video")
Message = Mapping[str, Any]
"""A message: ``role`` and ``content``, and what else the template reads, such as ``tool_calls``."""


def check_messages(messages: Any) -> None:
    """Raise ConfigError unless these are messages with roles."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f"messages is {messages!r:.70}", 'give a list such as [{"role": "user", "content": "Hi"}]')
    for index, each in enumerate(messages):
        if not (isinstance(each, Mapping) and isinstance(each.get("role"), str)):
            raise ConfigError(f"message {index} is {each!r:.70}", 'give {"role": ..., "content": ...}')


def normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose content is a text, None or a list of parts, and whose calls have objects as arguments.

    A part is ``{"type": "text", "text": ...}``, ``{"type": "image", "image": ...}``, or as in OpenAI's API
    ``{"type": "image_url", "image_url": {"url": ...}}``, which becomes the former. The part of a video has "video" for
    "image", and may have ``"fps"``. A content that is one part becomes a list. Normalized messages stay as they are.

    Raises:
        ConfigError: these are no messages with roles.
        BatchError: a part has another type, or none of what its type says; or arguments are no JSON.
    """
    check_messages(messages)
    found = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            content = [_part(index, each) for each in _listed(content)]
        found.append({**message, "content": content})
        if isinstance(calls := message.get("tool_calls"), list):
            found[-1]["tool_calls"] = [_call(index, each) for each in calls]
    return found


def media_of(messages: Iterable[Any]) -> Iterator[tuple[int, str, Any]]:
    """Yield the index of the message, the kind, and what is given, of each image and video. They may be invalid."""
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in _listed(content):
            if (medium := _medium(part)) is not None:
                yield index, *medium


def without_media(messages: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return normalized messages as chat templates read them, and the images and videos of their parts, in order.

    The template gets ``{"type": "image"}``. A video is read by :func:`read_video`.

    Raises:
        BatchError: a video cannot be read.
    """
    found, media = [], []
    for index, message in enumerate(messages):
        if isinstance(content := message["content"], list):
            for part in content:
                if (medium := _medium(part)) is not None:
                    kind, given = medium
                    where = f"the video of message {index}"
                    media.append(given if kind == "image" else read_video(given, part.get("fps"), where))
            content = [part if part["type"] == "text" else {"type": part["type"]} for part in content]
        found.append({**message, "content": content})
    return found, media


def _listed(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _medium(part: Any) -> tuple[str, Any] | None:
    """Return the kind of an image or a video, and what is given; None of another part."""
    name = part.get("type") if isinstance(part, Mapping) else None
    kind = str(name).removesuffix("_url")
    if kind not in KINDS:
        return None
    given = part.get(name)
    return kind, given.get("url") if name != kind and isinstance(given, Mapping) else given


def _part(index: int, part: Any) -> Any:
    medium = _medium(part)
    if (
        medium is None
        and isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        return part
    if medium is None or medium[1] is None:
        raise BatchError(
            f"message {index} has a part {part!r:.70}",
            'give {"type": "text", "text": ...} or {"type": "image_url", "image_url": {"url": "data:..."}}; '
            "a video is a video_url",
            key="messages",
        )
    kind, given = medium
    return {"type": kind, kind: given, **{name: part[name] for name in ("fps",) if name in part}}


def _call(index: int, call: Any) -> Any:
    """Return a call with its arguments as an object. OpenAI's API has them as text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise BatchError(
            f"the arguments of a call in message {index} are {function['arguments']!r:.70}: {error}",
            "give a JSON object, or its text",
            key="messages",
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}
