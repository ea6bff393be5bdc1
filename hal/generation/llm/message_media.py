"""Images and videos in the parts of messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hal.errors import BatchError
from hal.generation.llm.videos import read_video

KINDS = ("image", "video")


def media_kinds(messages: Iterable[Any]) -> set[str]:
    """Return the kinds of images and videos in the parts of messages, which may be invalid."""
    found = set[str]()
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, Mapping):
                found |= {str(part.get("type")).removesuffix("_url")} & {*KINDS}
    return found


def without_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages as chat templates read them, and the images and videos of their parts, in order.

    A part is ``{"type": "image", "image": ...}``, or as in OpenAI's API
    ``{"type": "image_url", "image_url": {"url": ...}}``. The template gets ``{"type": "image"}``. The part of a video
    has "video" for "image", and may have ``"fps"``; see :func:`read_video`.

    Raises:
        BatchError: a part has another type than text, images and videos, or none of what its type says, or a video
            cannot be read.
    """
    found, media = [], []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        parts = []
        for each in content:
            name = each.get("type") if isinstance(each, Mapping) else None
            if name == "text":
                parts.append(each)
                continue
            kind = str(name).removesuffix("_url")
            given = each.get(name) if kind in KINDS else None
            if name != kind and isinstance(given, Mapping):
                given = given.get("url")
            if given is None:
                raise BatchError(
                    f"message {index} has a part {each!r:.70}",
                    'give {"type": "text", "text": ...}, {"type": "image", "image": ...} or '
                    '{"type": "video", "video": ...}',
                )
            parts.append({"type": kind})
            media.append(
                given if kind == "image" else read_video(given, each.get("fps"), f"the video of message {index}")
            )
        found.append({**message, "content": parts})
    return found, media  # type: ignore[return-value]
