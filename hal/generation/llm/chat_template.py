"""Chat templates: the prompt of a conversation, as the checkpoint's Jinja template writes it.

A template is code from a checkpoint. It runs in Jinja's sandbox, without access to Python's attributes, and for a
limited time.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hal.checkpoint.checkpoint import Checkpoint
from hal.config.untrusted_files import is_there, regular_file
from hal.errors import CheckpointError, ConfigError, listed

SECONDS = 5.0
"""The longest time that a template may take, of a processor."""
MOST = 1 << 24
"""The most characters or elements that one multiplication may make."""
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens, which templates read as variables."""
CONFIG, FILE, OTHERS = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
_OTHER_FILES = ("chat_template.json", "special_tokens_map.json")
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
ARGUMENTS = frozenset({"self", "messages", "tools"})
"""Names that no switch has: they are arguments."""

Message = Mapping[str, Any]
"""A message: ``role`` and ``content``, and what else the template reads, such as ``tool_calls``."""


class _Raised(Exception):
    """The template refuses the conversation."""


class _TooLong(Exception):
    """The template takes too long."""


class _Generation(Extension):
    """The tag ``generation``, which marks the assistant's text for training. It changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what the tag holds."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses what takes much memory in one call."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product, a power or a formatted text."""
        if operator == "%":
            _check_format(left)
        elif operator == "**":
            if abs(left) > 1 << 32 or abs(right) > 64:
                raise SecurityError(f"{left} ** {right} is too large")
        else:
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * count > MOST:
                    raise SecurityError(f"a sequence of {len(sequence) * count} elements is too long")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, such as ``ljust``."""
        _check_sizes(args, kwargs)
        _check_format(getattr(getattr(function, "__wrapped__", function), "__self__", None))  # Jinja wraps str.format.
        return super().call(context, function, *args, **kwargs)


def _check_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for each in (*args, *kwargs.values()):
        if isinstance(each, int) and abs(each) > MOST:
            raise SecurityError(f"{each} is too large")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and ("{" in text or "%" in text) and re.search(r"\d{7,}", text):
        raise SecurityError(f"{text[:40]!r} formats too wide a text")


def _bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter_)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_sizes(args, kwargs)
        _check_format(value)
        return filter_(value, *args, **kwargs)

    return bounded


def _refuse(message: str) -> None:
    raise _Raised(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Unlike Jinja's filter, it leaves <, > and & as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[Template, frozenset[str]]:
    """Return a template, and the names that it reads."""
    environment = _environment()
    names = meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), frozenset(names)


def _environment() -> Environment:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda text: datetime.now().astimezone().strftime(text)
    made.filters |= {name: _bounded(made.filters[name]) for name in ("center", "format", "indent")}
    del made.globals["lipsum"]
    return made


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
        tokens = {name: found for name in TOKENS if (found := _token(config.get(name) or special.get(name)))}
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
            messages: the messages.
            tools: the JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of the assistant's answer.
            switches: further variables of the template, such as ``enable_thinking``.

        Raises:
            ConfigError: the messages are not what a template takes, the template refuses them, or it has no such
                switch.
            CheckpointError: the template is damaged, takes too long, or reads attributes of Python's objects.
        """
        _check(messages, tools)
        name, source = self._chosen(bool(tools))
        try:
            template, known = _compiled(source)
            if unknown := sorted(switches.keys() - known):
                raise ConfigError(
                    f"the chat template of {self.folder} has no switch {unknown[0]!r}",
                    f"leave it out; {listed(known - _OWN - set(TOKENS))}",
                )
            variables = {**self.tokens, "documents": None, **switches}
            variables |= {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
            return _in_time(lambda: template.render(variables))
        except _Raised as error:
            raise ConfigError(
                f"the chat template of {self.folder} refuses the conversation: {error}", "change the messages"
            ) from None
        except _TooLong:
            problem = f"takes longer than {SECONDS:g} seconds"
        except TemplateSyntaxError as error:
            problem = f"is no Jinja template: line {error.lineno}: {error.message}"
        except SecurityError as error:
            problem = f"does what the sandbox forbids: {error}"
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"failed: {error}"
        except (RecursionError, MemoryError) as error:
            problem = f"failed: {type(error).__name__}"
        raise CheckpointError(
            f"the chat template {name!r} of {self.folder} {problem}",
            "check the messages, or write the prompt without a template",
        )

    def _chosen(self, with_tools: bool) -> tuple[str, str]:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise CheckpointError(
                f"{self.folder} has no chat template 'default'", f"add it to {CONFIG}; {listed(self.sources)}"
            )
        return name, self.sources[name]


def _in_time(render: Callable[[], str]) -> str:
    """Run a template's code, and interrupt it after :data:`SECONDS`."""
    end = time.thread_time() + SECONDS
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise _TooLong
        return trace

    sys.settrace(trace)
    try:
        return render()
    finally:
        sys.settrace(before)


def _check(messages: Any, tools: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f"messages is {messages!r:.70}", 'give a list such as [{"role": "user", "content": "Hi"}]')
    for index, each in enumerate(messages):
        if not (isinstance(each, Mapping) and isinstance(each.get("role"), str)):
            raise ConfigError(f"message {index} is {each!r:.70}", 'give {"role": ..., "content": ...}')
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
