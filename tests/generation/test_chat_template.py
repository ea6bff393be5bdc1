"""Tests that chat templates give transformers' prompts, token for token, and that hostile ones are stopped.

The templates are written here, in the style of families that are in use: what each needs of Jinja differs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import write_json
from transformers import AutoTokenizer

import hal
from hal.errors import CheckpointError, ConfigError, HalError
from hal.generation.llm import chat_template
from hal.generation.llm.chat_template import ChatTemplate

CHATML = """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
THINKING = """
{%- set ns = namespace(last=messages|length - 1, tools=false) %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}
        {{- "\n" }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n<|im_end|>\n' }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string and not message.content.startswith('<tool') %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ content }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function else call %}
            {{- '\n<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- (call.arguments|tojson) ~ '}</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{{- "<|header|>system<|end|>\n\nToday: " + date_string + "\n\n" }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system + eos_token }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '"}' + eos_token }}
    {%- elif message.content is mapping or message.content is iterable %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
"""
INSTRUCTIONS = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
"""
TURNS = """
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim if item['type'] == 'text' else '<' + item['type'] + '>' }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""
TAGS = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + '<|end|>' }}
{% elif message['role'] == 'assistant' %}
{% generation %}
{{ '<|assistant|>\n'  + message['content'] + '<|end|>' }}
{% endgeneration %}
{% else %}
{% continue %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
MACROS = """
{%- macro typed(spec, depth=0) -%}
    {%- if spec.type == "object" -%}
        {{- "{" }}
        {%- for name, inner in spec.properties|dictsort -%}
            {{- name }}{{ "?" if name not in (spec.required or []) }}: {{ typed(inner, depth + 1) }}
            {{- ", " if not loop.last }}
        {%- endfor -%}
        {{- "}" }}
    {%- elif spec.enum -%}
        {{- spec.enum | map("tojson") | join(" | ") -}}
    {%- else -%}
        {{- spec.type -}}
    {%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}
{{- "type " ~ tool.function.name ~ " = (_: " ~ typed(tool.function.parameters) ~ ") => any; // " }}
{{- tool.function.description | replace("\n", " ") | upper }}
{% endfor %}
{%- for message in messages | rejectattr("role", "equalto", "tool") | list %}
    {{- "<|" ~ message.role | capitalize ~ "|>" if message.content else "" }}{{ message.content or "" }}
{% endfor %}
{%- filter trim %}   {{ eos_token if not add_generation_prompt else "<|go|>" }}   {% endfilter %}
"""
SENTENCES = """{{ bos_token }}{% set separators = [' ', eos_token] %}
{%- for message in messages -%}
{%- if loop.first and message.role == 'system' -%}{{ message.content ~ separators[0] }}
{%- else -%}{{ message.role.upper() }}: {{ message.content.strip() ~ separators[loop.index0 % 2] }}
{%- endif -%}
{%- endfor -%}
{{ 'ASSISTANT:' if add_generation_prompt and messages[-1].role == 'user' }}"""
FAMILIES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "headers": HEADERS,
    "instructions": INSTRUCTIONS,
    "turns": TURNS,
    "tags": TAGS,
    "macros": MACROS,
    "sentences": SENTENCES,
}
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
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    read = template_of(folder_with(trained, tmp_path / "model", template))
    with pytest.raises(HalError, match=message):
        read.render(CONVERSATIONS[0])


def test_what_is_missing_is_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no chat template.*\n.*Instruct"):
        template_of(trained)
    template = template_of(folder_with(trained, tmp_path / "model", THINKING))
    with pytest.raises(ConfigError, match=r"has no switch 'enable_thought'\n.*enable_thinking"):
        template.render(CONVERSATIONS[0], enable_thought=False)
    wrong: Any
    for wrong in ([], "hi", [{"content": "x"}], ["hi"]):
        with pytest.raises(ConfigError, match="message"):
            template.render(wrong)
    with pytest.raises(ConfigError, match="tools is"):
        template.render(CONVERSATIONS[0], tools=[len])  # type: ignore[list-item]
