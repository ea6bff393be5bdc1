"""Regular expressions over layers' names: they match what Python's do, and none takes long."""

from __future__ import annotations

import random
import re
import time

import pytest

from hal.errors import CheckpointError, ConfigError
from hal.quantization.compressed_tensors import Matcher
from hal.quantization.layer_patterns import LayerPattern

# As they stand in public checkpoints and in recipes of llm-compressor.
REAL = [
    r".*lm_head", r".*mlp.gate$", r".*self_attn.(q|k|v)_proj.*", r".*self_attn.o_proj*", r".*[qkv]_proj", r"visual.*",
    r".*self_attn[.](q|k|v|o)_proj$", r"model\.layers\.(0|3)\..*", r"model\.layers\.\d+\.mlp\..*", r"^mtp\..*",
    r".*(?:mlp|ffn)\.experts\.\d+\.(?:gate_proj|up_proj|down_proj|w[123])$",
    r".*\.layers\.(?:3|7)\.self_attn(?:\..*)?$",
    r".*(?:^|\.)(?:attn|self_attn)(?:\.|$).*", r"^(?!.*mlp.experts).*", r"^(?!.*\.mlp\.experts(?:\.|$)).*$",
    r"model\.layers\.(?:[0-9]|[1-5][0-9]|60)\..*", r"model\.layers\.[^0]\..+", r"model\.layers\.\d{1,2}\.mlp.*",
    r"(?:model\.)?mtp(?:\..*)?", r".*\\.mlp", r"", r"model.layers.0.self_attn.q_proj",
]  # fmt: skip
NAMES = [
    "lm_head", "model.lm_head", "visual.blocks.3.attn.qkv", "mtp", "mtp.fc", "attn.q", "x.norm", "",
    *(f"model.layers.{layer}.{part}" for layer in (0, 3, 17, 60) for part in (
        "self_attn.q_proj", "self_attn.o_proj", "self_attn.o_pro", "mlp.gate", "mlp.gate_proj", "mlp.experts.3.w1",
        "mlp.experts.12.down_proj.x", "self_attn",
    )),
]  # fmt: skip


def test_what_checkpoints_hold_is_read_as_python_does() -> None:
    taken = {text: [name for name in NAMES if LayerPattern(text).match(name)] for text in REAL}
    assert taken == {text: [name for name in NAMES if re.match(text, name)] for text in REAL}
    assert len({tuple(each) for each in taken.values()}) > 12, "they tell names apart"


def drawn(draw: random.Random, depth: int = 0, ahead: bool = False) -> str:
    """An expression of what is read."""
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


@pytest.mark.parametrize("seed", range(4), ids="seed={}".format)
def test_any_expression_matches_what_pythons_does(seed: int) -> None:
    draw, matched = random.Random(seed), 0
    for _ in range(1500):
        text = drawn(draw)
        for _ in range(4):
            name = "".join(draw.choice("ab1.\n") for _ in range(draw.randrange(7)))
            matched += (found := LayerPattern(text).match(name))
            assert found == bool(re.match(text, name)), (text, name)
    assert 1000 < matched < 5000


@pytest.mark.parametrize(
    "text",
    [
        r"(?:\w+[.\w]*)*-",
        r"(a|a)*b",
        r"((a*)*)*b",
        ".*a" * 30 + "!",
        r"(?!(?:.*a)*!).*-",
        "(" * 40 + "a*" + ")*" * 40 + "b",
    ],
)
def test_no_expression_takes_long(text: str) -> None:
    """Python's own would try exponentially many ways."""
    matcher, began = Matcher.of([f"re:{text}"], "ignore"), time.perf_counter()
    assert not matcher.names_layer("a" * 60)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    "text",
    [r"(a)\1", r"(?<!a)b", r"(?i)a", r"(?P<x>a)", r"a*+", r"\bx", r"(?=a(?!b))", r"(ab){3}", r"a{101}", r"(?>a)", "a{"],
)
def test_what_is_not_read_is_refused(text: str) -> None:
    re.compile(text)
    with pytest.raises(ConfigError, match=r"ignore of quantization_config .* which hal does not read") as caught:
        Matcher.of([f"re:{text}"], "ignore")
    assert repr(text) in caught.value.problem
    assert "the lookaheads" in caught.value.remedy


@pytest.mark.parametrize("text", ["(", "a**", "[b", "a{2,1}", "a{" + "9" * 5000 + "}", "a{99999999999}"])
def test_what_is_no_expression_is_damage(text: str) -> None:
    with pytest.raises(CheckpointError, match="holds a bad regular expression"):
        Matcher.of([f"re:{text}"], "ignore")


def test_a_nest_without_end() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        Matcher.of(["re:" + "(" * 5000 + ")" * 5000], "targets")
