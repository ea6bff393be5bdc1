"""Messages of OpenAI's API as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hal.serve.api_error import ApiError


def template_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose content is text or parts, and whose calls of tools have arguments as objects.

    Raises:
        ApiError: a message has content that is neither text, image nor video, or arguments that are no JSON object.
    """
    return [_message(index, each) for index, each in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    found = {**message, "content": _content(index, message.get("content"))}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(index, each) for each in calls] if isinstance(calls, list) else calls
    return found


def _content(index: int, content: Any) -> str | list[Any]:
    """Return a text, or parts if not all are text. Files of this machine are not read for a request."""
    if content is None:  # of an assistant that calls tools
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for each in parts:
        if not (_is_text(each) or _is_medium(each)):
            raise ApiError(
                400,
                f"the content of message {index} has {each!r:.70}; hal serve takes text, and images or videos "
                "as data URLs",
                'give {"type": "text", "text": ...} or {"type": "image_url", "image_url": {"url": "data:..."}}; '
                "a video is a video_url",
                param="messages",
            )
    return "".join(each["text"] for each in parts) if all(map(_is_text, parts)) else parts


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_medium(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    address = part.get(kind) if kind in ("image_url", "video_url") else None
    url = address.get("url") if isinstance(address, dict) else None
    return isinstance(url, str) and url.startswith("data:")


def _call(index: int, call: Any) -> Any:
    """Return a call with its arguments as an object: OpenAI's API has them as text, and templates write an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400,
            f"the arguments of a call in message {index} are {function['arguments']!r:.70}: {error}",
            "give a JSON object as text",
            param="messages",
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}
