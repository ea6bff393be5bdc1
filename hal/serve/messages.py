"""Messages of requests. Files of this machine are not read for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.errors import BatchError
from hal.generation.llm.messages import media_of, normalized
from hal.serve.api_error import ApiError


def request_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a request, normalized.

    Raises:
        ConfigError: these are no messages with roles.
        ApiError: a part is invalid, or an image or a video is no data URL; or arguments of a call are no JSON.
    """
    try:
        found = normalized(messages)
    except BatchError as error:
        raise ApiError(400, error.problem, error.remedy, param="messages") from None
    for index, kind, given in media_of(found):
        if not (isinstance(given, str) and given.startswith("data:")):
            raise ApiError(
                400,
                f"message {index} has the {kind} {given!r:.70}; hal serve takes images and videos as data URLs",
                f'give {{"type": "{kind}_url", "{kind}_url": {{"url": "data:..."}}}}',
                param="messages",
            )
    return found
