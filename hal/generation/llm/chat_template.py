"""Chat templates: the prompt of a conversation, as the checkpoint's Jinja template writes it.

A template is code from a checkpoint: see :mod:`hal.generation.llm.template_sandbox`. What it reads of a message
(content as text or in parts, calls as objects or text) is found by rendering it once for each role.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.tokenizer_files import ENDINGS, NAMED
from hal.config.untrusted_files import is_there, regular_file
from hal.errors import CheckpointError, ConfigError, UnknownKey, listed
from hal.generation.llm.messages import Message, check_messages
from hal.generation.llm.template_sandbox import FAILURES, Refused, TooLong, compiled, in_time

log = logging.getLogger("hal.generation")
CONFIG, FILE, OTHERS = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
_OTHER_FILES = ("chat_template.json", "special_tokens_map.json")
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
ARGUMENTS = frozenset({"self", "messages", "tools"})
"""Names that no switch has: they are arguments."""
TEXT, PARTS = "text", "parts"
_TEXTS = "First text", "next text"
_KEY, _NAME, _ARGUMENT, _ID = "probe_key", "probe_name", "probe_argument", "probe0000"
_USER = {"role": "user", "content": "Hello"}
_CALLS = [{"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {_ARGUMENT: 1}}}]


@attrs.frozen
class ChatTemplate:
    """The chat templates of a checkpoint.

    Attributes:
        folder: the checkpoint's folder or file, for errors.
        sources: the templates by name. ``tool_use`` is for conversations with tools, ``default`` for the others.
        tokens: the special tokens, by name.
    """

    folder: Path
    sources: Mapping[str, str]
    tokens: Mapping[str, str]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> ChatTemplate:
        """Read the templates of a checkpoint: chat_template.jinja, or else the key ``chat_template`` of
        tokenizer_config.json; or the template in the metadata of a GGUF file.

        Raises:
            CheckpointError: it has none, or a file is damaged.
        """
        folder, (config, older, special) = checkpoint.path, map(checkpoint.files.json, (CONFIG, *_OTHER_FILES))
        if is_there(folder / FILE):
            sources: Any = {"default": _text(folder / FILE)}
            if (folder / OTHERS).is_dir():
                sources |= {each.stem: _text(each) for each in sorted((folder / OTHERS).glob("*.jinja"))}
        else:
            sources = config.get("chat_template") or older.get("chat_template")
            if isinstance(sources, list) and all(isinstance(each, Mapping) for each in sources):
                sources = {each.get("name"): each.get("template") for each in sources}
            elif isinstance(sources, str):
                sources = {"default": sources}
        if not sources:
            raise CheckpointError(
                f"{folder} has no chat template: neither {FILE}, chat_template in {CONFIG}, nor one in a GGUF file's "
                "metadata",
                "use a checkpoint that was trained for conversations, often named -Instruct or -Chat; or continue a "
                "prompt instead",
            )
        if not isinstance(sources, dict) or not all(isinstance(each, str) for pair in sources.items() for each in pair):
            raise CheckpointError(
                f"chat_template in {folder / CONFIG} is {sources!r:.60}", "make it a text, or a list of named texts"
            )
        tokens = {name: found for name in NAMED if (found := _token(config.get(name) or special.get(name)))}
        return cls(folder, sources, tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: the messages. The part of an image is ``{"type": "image"}``; see :func:`in_form`.
            tools: the JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of the assistant's answer.
            switches: further variables of the template, such as ``enable_thinking``.

        Raises:
            ConfigError: the messages are not what a template takes, the template refuses them, or it has no such
                switch.
            CheckpointError: the template is damaged, takes too long, or reads attributes of Python's objects.
        """
        check_messages(messages)
        _check_tools(tools)
        name, source = self._chosen(bool(tools))
        try:
            template, known = compiled(source)
            if unknown := sorted(switches.keys() - known):
                raise UnknownKey(
                    f"the chat template of {self.folder} has no switch {unknown[0]!r}",
                    f"leave it out; {listed(known - _OWN - set(NAMED))}",
                    key=unknown[0],
                )
            variables = {**self.tokens, "documents": None, **switches}
            variables |= {
                "messages": in_form(messages, source),
                "tools": tools or None,
                "add_generation_prompt": add_generation_prompt,
            }
            return in_time(lambda: template.render(variables))
        except Refused as error:
            raise ConfigError(
                f"the chat template of {self.folder} refuses the conversation: {error}", "change the messages"
            ) from None
        except TooLong as error:
            problem = str(error)
        except TemplateSyntaxError as error:
            problem = f"is no Jinja template: line {error.lineno}: {error.message}"
        except SecurityError as error:
            problem = f"does what the sandbox forbids: {error}"
        except FAILURES as error:
            problem = f"failed: {error}"
        except (RecursionError, MemoryError) as error:
            problem = f"failed: {type(error).__name__}"
        raise CheckpointError(
            f"the chat template {name!r} of {self.folder} {problem}",
            "check the messages, or write the prompt without a template",
        )

    def warn_of_other_endings(self, tokenizer: Tokenizer, stop_token_ids: frozenset[int]) -> None:
        """Log a warning if the templates end turns with tokens none of which ends a text."""
        texts = "".join(self.sources.values())
        written = {self.tokens.get("eos_token", "")} if "eos_token" in texts else set()
        written |= {each for each in ENDINGS if each in texts}
        ids = {text: index for text in sorted(written) if (index := tokenizer.token_to_id(text)) is not None}
        if ids and not stop_token_ids & {*ids.values()}:
            log.warning(
                "the chat template of %s ends turns with %s, which eos_token_id does not name, so that answers may not "
                "end: add the token to eos_token_id in generation_config.json, or give it in stop_token_ids",
                self.folder,
                " or ".join(f"{text} ({index})" for text, index in ids.items()),
            )

    def _chosen(self, with_tools: bool) -> tuple[str, str]:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise CheckpointError(
                f"{self.folder} has no chat template 'default'", f"add it to {CONFIG}; {listed(self.sources)}"
            )
        return name, self.sources[name]


def _check_tools(tools: Any) -> None:
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(each, Mapping) for each in tools)):
        raise ConfigError(f"tools is {tools!r:.70}", "give a list of JSON schemas, one for each function")


def _text(file: Path) -> str:
    try:
        return regular_file(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "download the checkpoint again") from None


def _token(value: Any) -> str | None:
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else None


def in_form(messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Return messages as a template reads them.

    Where it reads text alone, texts of parts are joined by line breaks, as in vLLM and llama.cpp. Where it reads parts
    alone, a text becomes one. Null beside calls of tools stays if the template reads it; elsewhere it is an empty text.

    Args:
        messages: normalized messages, with parts of images as templates read them.

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
    variables = {**dict.fromkeys(NAMED, ""), "documents": None, "tools": None, "add_generation_prompt": True}
    try:
        return in_time(lambda: compiled(source)[0].render(messages=messages, **variables))
    except (*FAILURES, Refused, RecursionError, MemoryError):
        return ""
