"""Tests that regular expressions over layer names match like Python's, in bounded time and memory."""

from __future__ import annotations

import random
import re
import resource
import time
from contextlib import suppress

import pytest
from helpers.thorough import DRAW, thorough

from hal.errors import CheckpointError, ConfigError
from hal.quantization.compressed_tensors import LayerTargets
from hal.quantization.layer_patterns import SECONDS, LayerPattern

# From public checkpoints and recipes of llm-compressor.
REAL = [
    r".*lm_head",
    r".*mlp.gate$",
    r".*self_attn.(q|k|v)_proj.*",
    r".*self_attn.o_proj*",
    r".*[qkv]_proj",
    r"visual.*",
    r".*self_attn[.](q|k|v|o)_proj$",
    r"model\.layers\.(0|3)\..*",
    r"model\.layers\.\d+\.mlp\..*",
    r"^mtp\..*",
    r".*(?:mlp|ffn)\.experts\.\d+\.(?:gate_proj|up_proj|down_proj|w[123])$",
    r".*\.layers\.(?:3|7)\.self_attn(?:\..*)?$",
    r".*(?:^|\.)(?:attn|self_attn)(?:\.|$).*",
    r"^(?!.*mlp.experts).*",
    r"^(?!.*\.mlp\.experts(?:\.|$)).*$",
    r"model\.layers\.(?:[0-9]|[1-5][0-9]|60)\..*",
    r"model\.layers\.[^0]\..+",
    r"model\.layers\.\d{1,2}\.mlp.*",
    r"(?:model\.)?mtp(?:\..*)?",
    r".*\\.mlp",
    r"",
    r"model.layers.0.self_attn.q_proj",
]
NAMES = [
    "lm_head",
    "model.lm_head",
    "visual.blocks.3.attn.qkv",
    "mtp",
    "mtp.fc",
    "attn.q",
    "x.norm",
    "",
    *(
        f"model.layers.{layer}.{part}"
        for layer in (0, 3, 17, 60)
        for part in (
            "self_attn.q_proj",
            "self_attn.o_proj",
            "self_attn.o_pro",
            "mlp.gate",
            "mlp.gate_proj",
            "mlp.experts.3.w1",
            "mlp.experts.12.down_proj.x",
            "self_attn",
        )
    ),
]


def test_what_checkpoints_hold_is_read_as_python_does() -> None:
    taken = {text: [name for name in NAMES if pattern(text).match(name)] for text in REAL}
    assert taken == {text: [name for name in NAMES if re.match(text, name)] for text in REAL}
    assert len({tuple(each) for each in taken.values()}) > 12, "patterns must match some names only"


def pattern(text: str) -> LayerPattern:
    return LayerPattern(text, "ignore")


def drawn(draw: random.Random, depth: int = 0, ahead: bool = False) -> str:
    """Draw an expression of the supported syntax."""
    kind = draw.randrange(10)
    if depth > 3 or kind < 4:
        some = ["a", "b", ".", "[ab]", "[^a]", r"\d", "1", "^", "$", r"\.", "a{2}", "b{1,2}", "a{0,}", "[.b-]", r"\W"]
        return draw.choice(some)
    one = drawn(draw, depth + 1, ahead or kind == 9)
    if kind < 6:
        return one + drawn(draw, depth + 1, ahead)
    if kind == 6:
        return f"({one}|{drawn(draw, depth + 1, ahead)})"
    if kind < 9:
        return f"(?:{one}){draw.choice(['*', '+', '?', '*?', '+?', '??'])}"
    return one if ahead else f"(?{draw.choice('!=')}{one})"


@thorough(DRAW, r"\[seed=[1-3]")
@pytest.mark.parametrize("seed", range(4), ids="seed={}".format)
def test_any_expression_matches_what_pythons_does(seed: int) -> None:
    draw, matched = random.Random(seed), 0
    for _ in range(1500):
        text = drawn(draw)
        for _ in range(4):
            name = "".join(draw.choice("ab1.\n") for _ in range(draw.randrange(7)))
            matched += (found := pattern(text).match(name))
            assert found == bool(re.match(text, name)), (text, name)
    assert 1000 < matched < 5000


@pytest.mark.parametrize(
    "text",
    [r"(a)\1", r"(?<!a)b", r"(?<=\.)b", r"a*+", r"a?+b", r"\bx", r"(?=a(?!b))", r"(ab){3}", r"a{101}", r"(a{2}){,2}$"],
)
def test_more_is_read_as_python_does(text: str) -> None:
    names = ["a", "aa", "ab", "aab", "ababab", ".b", "x", "aaaa", "b", "", "a" * 101]
    taken = [name for name in names if pattern(text).match(name)]
    assert taken == [name for name in names if re.match(text, name)]


NAME = "model.layers.17.mlp.experts.12.down_proj"


@thorough(DRAW, r"\[model")
@pytest.mark.parametrize(
    "text",
    [
        r"(?:\w+[.\w]*)*-",
        r"(a|a)*b",
        r"((a*)*)*b",
        ".*a" * 30 + "!",
        r"(?!(?:.*a)*!).*-",
        "(" * 40 + "a*" + ")*" * 40 + "b",
        r"(?:a|a|b|\w|.)+\d$",
        r"(.*.*.*.*.*.*.*)\1x$",
    ],
)
@pytest.mark.parametrize("name", ["a" * 60, NAME])
def test_no_expression_takes_long(name: str, text: str) -> None:
    """Python's matcher would take exponential time."""
    matcher, began = LayerTargets.of([f"re:{text}"], "ignore"), time.thread_time()
    with suppress(ConfigError):
        assert not matcher.entry(name)
    assert time.thread_time() - began < 2 * SECONDS


def test_one_that_takes_too_long_is_refused() -> None:
    text = r"(?:a|a|b|\w|.)+\d$"
    with pytest.raises(
        ConfigError, match=r"ignore of quantization_config in config.json takes more than 1 s"
    ) as caught:
        LayerTargets.of([f"re:{text}"], "ignore").entry(NAME)
    assert repr(text) in caught.value.problem
    assert repr(NAME) in caught.value.problem
    assert "list the layers by name" in caught.value.remedy


def test_names_share_the_time_of_an_expression() -> None:
    """The time limit is per expression; otherwise thousands of layers could take just less than the limit each."""
    slow, began = pattern(r"(.*)(.*)(.*)(.*)(.*)\1\2\3\4\5[^\w.]$"), time.thread_time()
    with pytest.raises(ConfigError, match="takes more than 1 s"):
        any(slow.match(f"{NAME}.{number}") for number in range(1000))
    assert time.thread_time() - began < 2 * SECONDS


def test_quick_names_take_none_of_it() -> None:
    quick = pattern(r".*self_attn.(q|k|v)_proj.*")
    assert (
        sum(quick.match(f"model.layers.{layer}.self_attn.{part}_proj") for layer in range(20_000) for part in "qo")
        == 20_000
    )


@pytest.mark.parametrize(
    "text",
    [
        "(" * 60 + "a" + ")+" * 60,
        "(" * 60 + ")+" * 60,
        "(?:" * 4 + "a" + "){1000}" * 4,
        "a{99999999}",
        "(?:[a-z]{500}b){500}",
        "(a{9}|" * 9 + "){9}" * 9,
        "a" * 200_000,
    ],
)
def test_one_too_large_to_compile_is_refused(text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="more than 100000 parts") as caught:
        LayerTargets.of([f"re:{text}"], "ignore")
    assert f"{text!r:.80}" in caught.value.problem
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize(
    "text",
    [
        r"(?i)a",
        r"(?P<x>a)",
        r"(?P<x>a)(?P=x)",
        r"(?>a)",
        r"(a)?(?(1)b|c)",
        r"a(?#()b",
        "(?x:a # (\n)",
        "a{",
        "a{e<=2}",
        "[[:alpha:]]",
    ],
)
@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_what_is_not_read_is_refused(text: str) -> None:
    re.compile(text)
    with pytest.raises(ConfigError, match=r"ignore of quantization_config .* which hal does not support") as caught:
        LayerTargets.of([f"re:{text}"], "ignore")
    assert repr(text) in caught.value.problem
    assert "escape a literal brace" in caught.value.remedy


@pytest.mark.parametrize(
    "text", ["(", "a**", "[b", "a{2,1}", "a{" + "9" * 5000 + "}", "a{99999999999}", r"(?R)", r"\p{L}", r"(?<=a*)b"]
)
def test_what_is_no_expression_of_pythons_is_damage(text: str) -> None:
    with pytest.raises(CheckpointError, match="is not valid") as caught:
        LayerTargets.of([f"re:{text}"], "ignore")
    assert f"{text!r:.80}" in caught.value.problem


def test_a_nest_without_end() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        LayerTargets.of(["re:" + "(" * 5000 + ")" * 5000], "targets")
