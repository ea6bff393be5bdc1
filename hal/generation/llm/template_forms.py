"""What a chat template reads of a message: content as text or in parts, and calls as objects or text.

A template is asked by rendering it once for each role, with a text that it must write and names that it must not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hal.errors import ConfigError
from hal.generation.llm.template_sandbox import FAILURES, Refused, compiled, in_time

TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens, which templates read as variables."""
TEXT, PARTS = "text", "parts"
_TEXTS, _KEY, _NAME, _ARGUMENT, _ID = (
    ("First text", "next text"),
    "probe_key",
    "probe_name",
    "probe_argument",
    "probe0000",
)
_USER = {"role": "user", "content": "Hello"}
_CALLS = [{"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {_ARGUMENT: 1}}}]


def in_form(messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Return messages as a template reads them.

    Where it reads text alone, texts of parts are joined by line breaks, as in vLLM and llama.cpp. Where it reads parts
    alone, a text becomes one. Null beside calls of tools stays if the template reads it; elsewhere it is an empty text.

    Args:
        messages: normalized messages, with parts of images as templates read them.
        source: the template.

    Raises:
        ConfigError: a message has an image or a video, and the template reads text alone.
    """
    found = []
    for index, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls")
        if calls and isinstance(calls, list):
            null, as_text = calls_of(source)
            message = {**message, "tool_calls": [*map(_with_text, calls)] if as_text else calls}
            if null and not content:
                found.append({**message, "content": None})
                continue
        forms = forms_of(source, message["role"])
        content = "" if content is None else content
        if isinstance(content, str) and forms == {PARTS}:
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, str) and PARTS not in forms:
            texts = [each["text"] for each in content if each["type"] == "text"]
            if len(texts) == len(content):
                content = "\n".join(texts)
            elif TEXT in forms:
                kind = next(each["type"] for each in content if each["type"] != "text")
                raise ConfigError(
                    f"message {index} has a part of type {kind}, and the chat template reads a message of the role "
                    f"{message['role']!r:.40} as text alone",
                    "leave it out, or use a checkpoint whose template reads parts",
                )
        found.append({**message, "content": content})
    return found


@functools.lru_cache(maxsize=64)
def forms_of(source: str, role: str) -> frozenset[str]:
    """Return in which forms a template reads the content of a role's messages: text, parts, or both.

    Neither if the template does not write the message of such a role, or fails.
    """
    before: list[dict[str, Any]] = [] if role in ("system", "developer", "user") else [_USER]
    if role == "tool":
        before.append({"role": "assistant", "content": None, "tool_calls": _CALLS})
    after = [] if role in ("user", "tool") else [_USER]
    if role != "user":
        before, after = in_form(before, source), in_form(after, source)
    parts = [{"type": "text", "text": each, _KEY: ""} for each in _TEXTS]
    found = set()
    for form, content in ((TEXT, " ".join(_TEXTS)), (PARTS, parts)):
        message = {"role": role, "content": content, "tool_call_id": _ID, "name": _NAME}
        written = _written(source, [*before, message, *after])
        if all(each in written for each in _TEXTS) and _KEY not in written:
            found.add(form)
    return frozenset(found)


@functools.lru_cache(maxsize=8)
def calls_of(source: str) -> tuple[bool, bool]:
    """Return whether a template reads null beside calls of tools, and whether it reads their arguments as text.

    The first way that writes the call counts, and objects beside an empty text if none does.
    """
    before, empty = in_form([_USER], source), "" if TEXT in forms_of(source, "assistant") else []
    for as_text in (False, True):
        for content in (None, empty):
            calls = [*map(_with_text, _CALLS)] if as_text else _CALLS
            written = _written(source, [*before, {"role": "assistant", "content": content, "tool_calls": calls}])
            printed = f"'{_ARGUMENT}'" in written or (content is None and "None" in written)
            if _NAME in written and not printed:
                return content is None, as_text
    return False, False


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _written(source: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a conversation; nothing if the template fails."""
    variables = {**dict.fromkeys(TOKENS, ""), "documents": None, "tools": None, "add_generation_prompt": True}
    try:
        return in_time(lambda: compiled(source)[0].render(messages=messages, **variables))
    except (*FAILURES, Refused, RecursionError, MemoryError):
        return ""
