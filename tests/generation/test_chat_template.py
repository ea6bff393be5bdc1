"""Tests that chat templates give transformers' prompts, token for token, and that hostile ones are stopped.

The files in `templates` are in the style of families that are in use: what each needs of Jinja differs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import write_json
from transformers import AutoTokenizer

import hal
from hal.errors import BatchError, CheckpointError, ConfigError, HalError
from hal.generation.llm import template_sandbox
from hal.generation.llm.chat_template import ChatTemplate
from hal.generation.llm.messages import normalized
from hal.generation.llm.processor import Conversations
from hal.nn import CausalLM

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(TEMPLATES.glob("*.jinja"))}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|header|>", "<|end|>", "<start_of_turn>", "<end_of_turn>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather <now> & "here",\nin degrés',
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "unit": {"type": "string", "enum": ["°C", "°F"]}},
                "required": ["place"],
            },
        },
    }
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": '  Hi <there> & "you" \U0001f600\n'}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>hm</think>\n\nb"},
        {"role": "user", "content": "c é 日本"},
    ],
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}],
    },
    {"role": "tool", "content": "rain"},
]


def folder_with(trained: Path, folder: Path, template: Any, *, file: bool = False) -> Path:
    folder.mkdir()
    shutil.copy(trained / "tokenizer.json", folder)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "additional_special_tokens": SPECIAL,
    }
    if file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", config)
    return folder


def template_of(folder: Path) -> ChatTemplate:
    return ChatTemplate.read(hal.Checkpoint(folder, {}, {}))


@pytest.mark.parametrize(
    ("template", "stops", "warns"),
    [
        (FAMILIES["chatml"], {0}, "ends turns with <|im_end|>"),
        (FAMILIES["chatml"], {0, "<|im_end|>"}, None),
        (FAMILIES["chatml"] + "{{ eos_token }}", {0}, None),
        (FAMILIES["sentences"], {0}, None),
    ],
)
def test_a_turn_whose_end_does_not_stop_is_warned_about(
    template: str,
    stops: set[Any],
    warns: str | None,
    trained: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = folder_with(trained, tmp_path / "model", template)
    tokenizer = hal.Checkpoint(folder, {}, {}).tokenizer()
    ids = [each if isinstance(each, int) else tokenizer.token_to_id(each) for each in stops]
    checkpoint = hal.Checkpoint(folder, {"eos_token_id": ids}, {})
    Conversations(checkpoint, lambda: tokenizer, CausalLM).prompt(CONVERSATIONS[0], None, {})
    assert [warns in each for each in caplog.messages if warns] == [True] * bool(warns)
    assert bool(caplog.messages) == bool(warns)


@pytest.mark.parametrize("file", [False, True], ids=["config", "file"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_transformers(family: str, file: bool, trained: Path, tmp_path: Path) -> None:
    folder = folder_with(trained, tmp_path / "model", FAMILIES[family], file=file)
    theirs = AutoTokenizer.from_pretrained(folder)
    checkpoint = hal.Checkpoint(folder, {}, {})
    ours, template = checkpoint.tokenizer(), ChatTemplate.read(checkpoint)
    cases: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        (each, {"add_generation_prompt": generation, "tools": tools})
        for each in CONVERSATIONS
        for generation in (True, False)
        for tools in (None, TOOLS)
    ]
    if family in ("thinking", "headers", "macros"):
        cases += [(CALLS, {"add_generation_prompt": True, "tools": TOOLS})]
    if family == "thinking":
        cases += [(CONVERSATIONS[0], {"enable_thinking": switch}) for switch in (True, False)]
    if family == "headers":
        cases += [(CONVERSATIONS[1], {"date_string": "1 Jan 2030"})]
    for messages, options in cases:
        options = {"add_generation_prompt": True, **options}
        text = template.render(messages, **options)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
        tokens = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert ours.encode(text, add_special_tokens=False).ids == list(tokens)


def test_the_template_for_tools_is_chosen_by_name(trained: Path, tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = template_of(folder_with(trained, tmp_path / "model", templates))
    assert template.render(CONVERSATIONS[0]) == "plain"
    assert template.render(CONVERSATIONS[0], tools=TOOLS) == "with tools"
    other = template_of(folder_with(trained, tmp_path / "other", templates[1:]))
    with pytest.raises(CheckpointError, match=r"no chat template 'default'\n.*known: tool_use"):
        other.render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(10 ** 9) %}{% endfor %}", "1000000000 is too large"),
        ("{{ 'a'.ljust(10 ** 9) }}", "1000000000 is too large"),
        ("{{ 'a' | center(width=10 ** 9) }}", "1000000000 is too large"),
        ("{{ '{:999999999}'.format(1) }}", "too wide a text"),
        ("{{ '%999999999d' % 1 }}", "too wide a text"),
        ("{{ '%999999999d' | format(1) }}", "too wide a text"),
        (
            "{% for a in range(90000) %}{% for b in range(90000) %}{{ a }}{% endfor %}{% endfor %}",
            "takes longer than 0.3 seconds",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "does what the sandbox forbids"),
        ("{{ messages.append(1) }}", "does what the sandbox forbids"),
        ("{{ 'a' * 10 ** 12 }}", "too long"),
        ("{{ 9 ** 99 }}", "too large"),
        ("{{ raise_exception('no system role') }}", "refuses the conversation: no system role"),
        ("{% if %}", "is no Jinja template: line 1"),
        ("{% include 'secret' %}", "failed"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ nothing.more }}", "failed: 'nothing' is undefined"),
    ],
)
def test_hostile_and_broken_templates_are_errors(
    template: str, message: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.3)
    read = template_of(folder_with(trained, tmp_path / "model", template))
    with pytest.raises(HalError, match=message):
        read.render(CONVERSATIONS[0])


def test_what_is_missing_is_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no chat template.*\n.*Instruct"):
        template_of(trained)
    template = template_of(folder_with(trained, tmp_path / "model", FAMILIES["thinking"]))
    with pytest.raises(ConfigError, match=r"has no switch 'enable_thought'\n.*enable_thinking"):
        template.render(CONVERSATIONS[0], enable_thought=False)
    wrong: Any
    for wrong in ([], "hi", [{"content": "x"}], ["hi"]):
        with pytest.raises(ConfigError, match="message"):
            template.render(wrong)
    with pytest.raises(ConfigError, match="tools is"):
        template.render(CONVERSATIONS[0], tools=[len])  # type: ignore[list-item]


LOOP = "{% for m in messages %}{{ m.role }}:"
CALL_NAMES = "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments|tojson }}{% endfor %};"
IN_PARTS = "{% for p in m.content %}{{ p.text|trim if p.type == 'text' else '<' + p.type + '>' }}{% endfor %}"
READERS = {
    "trimmed text": LOOP + "{{ m.content | trim }}" + CALL_NAMES + "{% endfor %}",
    "added text": LOOP + "{{ '' + m.content }}" + CALL_NAMES + "{% endfor %}",
    "parts": LOOP + IN_PARTS + CALL_NAMES + "{% endfor %}",
    "parts in a macro": "{% macro w(c) %}{% for p in c %}{{ p['text'] }}{% endfor %}{% endmacro %}"
    + LOOP
    + "{{ w(m['content']) }}"
    + CALL_NAMES
    + "{% endfor %}",
    "both": LOOP
    + "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    + IN_PARTS
    + "{% endif %}"
    + CALL_NAMES
    + "{% endfor %}",
    "parts of users alone": LOOP
    + "{% if m.role == 'user' %}"
    + IN_PARTS
    + "{% else %}{{ m.content }}{% endif %}"
    + CALL_NAMES
    + "{% endfor %}",
    "the first part of a system": LOOP
    + "{% if m.role != 'system' or m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    + CALL_NAMES
    + "{% endfor %}",
    "calls beside null": LOOP
    + "{% if m.content is none %}"
    + CALL_NAMES
    + "{% else %}{{ m.content }};{% endif %}"
    + "{% endfor %}",
    "arguments as text": LOOP
    + "{{ m.content or '' }}"
    + CALL_NAMES.replace("{{ c.function.arguments|tojson }}", "{{ '' + c.function.arguments }}")
    + "{% endfor %}",
    "arguments as they are": LOOP + "{{ m.content or '' }}" + CALL_NAMES.replace("|tojson", "") + "{% endfor %}",
}


def parts_of(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


@pytest.mark.parametrize("reader", READERS)
def test_a_template_gets_the_content_that_it_reads(reader: str, trained: Path, tmp_path: Path) -> None:
    """Each way to write a conversation gives what the template writes of the form that it reads."""
    template = template_of(folder_with(trained, tmp_path / "model", READERS[reader]))
    arguments: Any
    for text in (str, parts_of):
        for empty in (None, "", [], ...):
            for arguments in ({"zone": 1}, '{"zone": 1}'):
                call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
                called = {"role": "assistant", "tool_calls": [call]} | ({} if empty is ... else {"content": empty})
                messages = [{"role": "system", "content": text("s")}, {"role": "user", "content": text("a")}, called]
                messages += [{"role": "tool", "content": text("r")}, {"role": "developer", "content": text("d")}]
                written = template.render(normalized(messages))
                assert written == 'system:s;user:a;assistant:!now{"zone": 1};tool:r;developer:d;'
    joint = "" if reader in ("parts", "parts in a macro", "both", "parts of users alone") else "\n"
    assert template.render(normalized([{"role": "user", "content": parts_of("a", "b")}])) == f"user:a{joint}b;"
    single: Any = parts_of("a")[0]
    for content, expected in ((single, "a"), ([], ""), (None, ""), ("", "")):
        assert template.render(normalized([{"role": "user", "content": content}])) == f"user:{expected};"
    image = [{"role": "user", "content": [{"type": "image"}, single]}]
    if reader in ("parts", "both", "parts of users alone"):
        assert template.render(image) == "user:<image>a;"
    elif "macro" not in reader:
        with pytest.raises(ConfigError, match=r"message 0 has a part of type image, .* the role 'user' as text alone"):
            template.render(image)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": [{"type": "audio"}]}, "message 0 has a part {'type': 'audio'}"),
        ({"content": ["a"]}, "message 0 has a part 'a'"),
        ({"content": [{"type": "text", "text": 3}]}, "message 0 has a part"),
        ({"content": 3}, "message 0 has a part 3"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "message 0 has a part"),
        ({"tool_calls": [{"function": {"arguments": "{"}}]}, "the arguments of a call in message 0 are '{'"),
    ],
)
def test_what_is_no_content_is_refused(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(BatchError, match=re.escape(problem)):
        normalized([{"role": "user", **message}])
