"""Tests for Qwen3 against Hugging Face transformers, on random checkpoints and on the trained one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers import comparison
from helpers.comparison import (
    COMPILERS,
    TOLERANCE,
    Case,
    difference,
    draw_rope,
    our_outputs,
    randomize,
    spell_as_before_version_5,
    their_hidden,
    their_logits,
)
from helpers.reference import TEXTS, open_runner, prompts
from helpers.thorough import DRAW, EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal.step import ALL

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

SEEDS = range(30, 70)  # test_the_configurations_cover_what_they_should checks those of `make test-all`, the first 22.
SENSITIVE_SEED = 32  # Two layers, one of them with a window, and an explicit layer_types.


def draw_config(seed: int) -> Any:
    """Draw a Qwen3 configuration, in which hidden_size / num_attention_heads is never head_dim."""
    draw = random.Random(seed)
    kv_heads, layers = draw.choice((1, 2)), draw.randint(1, 4)
    window: dict[str, Any] = {}
    if draw.random() < 0.5:
        window = {"use_sliding_window": True, "sliding_window": draw.randint(5, 20)}
        if draw.random() < 0.5:
            window["layer_types"] = [draw.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
            window["layer_types"][draw.randrange(layers)] = "sliding_attention"
        else:
            window["max_window_layers"] = draw.randrange(layers)
    return transformers.Qwen3Config(
        vocab_size=draw.choice((97, 256, 1000)),
        hidden_size=draw.choice((48, 80, 96, 160)),
        intermediate_size=draw.choice((56, 128, 200)),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * draw.choice((1, 2, 4, 8)),
        num_key_value_heads=kv_heads,
        head_dim=draw.choice((16, 32, 64, 128)),
        max_position_embeddings=128,
        rms_norm_eps=draw.choice((1e-6, 1e-5, 1e-3)),
        rope_parameters={"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4, 5e5, 1e6))},
        attention_bias=draw.random() < 0.5,
        tie_word_embeddings=draw.random() < 0.5,
        attn_implementation="eager",
        **window,
    )


WINDOWED = [seed for seed in SEEDS if draw_config(seed).use_sliding_window]


def older(config: dict[str, Any], draw: random.Random) -> None:
    spell_as_before_version_5(config, draw)
    del config["layer_types"]  # the same as max_window_layers


def build(seed: int, path: Path) -> Case:
    config = draw_config(seed)
    slides = [
        config.use_sliding_window and layer >= config.max_window_layers for layer in range(config.num_hidden_layers)
    ]
    derived = config.layer_types == [f"{'sliding' if each else 'full'}_attention" for each in slides]
    return comparison.build(config, seed, path, older if derived else None)


@pytest.fixture(scope="module", params=SEEDS, ids="seed={}".format)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return build(request.param, tmp_path_factory.mktemp("qwen3"))


def check(case: Case, compiler: str) -> None:
    """Compare the logits and the hidden states of all tokens."""
    logits, hidden = our_outputs(case.runner(compiler), case)
    assert difference(logits, [their_logits(case.model, sequence) for sequence in case.sequences]) <= TOLERANCE
    assert difference(hidden, [their_hidden(case.model, sequence) for sequence in case.sequences]) <= TOLERANCE


@thorough(EXHAUSTIVE, r"\[seed=4\d-(eager|graph)")
@thorough(DRAW, r"\[seed=[4-6]\d(-\w+)?\]|\[seed=[23]\d(-\w+)?\]")
@thorough(EXHAUSTIVE, r"\[seed=([56]\d-graph|5[2-9]|6\d|[2-4][02468]-eager|[2-4][13579]-graph)")
@thorough(EXHAUSTIVE, r"piecewise|\[seed=(?!30|51)\d+-inductor")
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise", "inductor"])
def test_logits(case: Case, compiler: str) -> None:
    check(case, compiler)


@thorough(DRAW, r"\[seed=[4-6]\d(-\w+)?\]|\[seed=[23]\d(-\w+)?\]")
@thorough(EXHAUSTIVE, r"\[seed=(5[2-9]|6\d)")
def test_prefill_after_a_cached_prefix(case: Case) -> None:
    assert case.difference(cuts=case.cuts) <= TOLERANCE


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_scaled_positions(rope_type: str, tmp_path: Path) -> None:
    config = draw_config(SENSITIVE_SEED)
    config.rope_parameters = draw_rope(random.Random(SENSITIVE_SEED), rope_type)
    case = comparison.build(config, SENSITIVE_SEED, tmp_path, spell_as_before_version_5)
    assert case.difference() <= TOLERANCE


@thorough(DRAW, r"\[seed=[4-6]\d(-\w+)?\]|\[seed=[23]\d(-\w+)?\]")
@pytest.mark.parametrize("case", WINDOWED, ids="seed={}".format, indirect=True)
def test_sliding_window_matters(case: Case) -> None:
    """Tested in transformers itself; otherwise the comparison would not test windows."""
    config = case.model.config
    unlimited = transformers.Qwen3Config.from_dict(
        {**config.to_dict(), "use_sliding_window": False, "layer_types": None}, attn_implementation="eager"
    )
    whole = transformers.Qwen3ForCausalLM(unlimited).eval()
    whole.load_state_dict(case.model.state_dict())
    longest = case.sequences[-1]
    with_window, without = their_logits(case.model, longest), their_logits(whole, longest)
    assert difference([with_window[: config.sliding_window]], [without[: config.sliding_window]]) <= TOLERANCE
    assert difference([with_window], [without]) > 100 * TOLERANCE


def test_the_configurations_cover_what_they_should() -> None:
    configs = [draw_config(seed) for seed in SEEDS[:22]]

    def drawn(value: Callable[[Any], Any]) -> set[Any]:
        return {value(config) for config in configs}

    assert drawn(lambda c: c.num_hidden_layers) == {1, 2, 3, 4}
    assert drawn(lambda c: c.rms_norm_eps) == {1e-6, 1e-5, 1e-3}
    assert drawn(lambda c: c.rope_parameters["rope_theta"]) == {100.0, 1e4, 5e5, 1e6}
    assert drawn(lambda c: c.hidden_size == c.num_attention_heads * c.head_dim) == {False}
    assert drawn(lambda c: 0 < c.max_window_layers < c.num_hidden_layers) == {False, True}
    assert drawn(lambda c: c.num_attention_heads // c.num_key_value_heads) == {1, 2, 4, 8}
    assert drawn(lambda c: c.head_dim) == {16, 32, 64, 128}
    assert drawn(lambda c: (c.attention_bias, c.tie_word_embeddings, c.use_sliding_window)) == {
        (bias, tied, window) for bias in (False, True) for tied in (False, True) for window in (False, True)
    }
    assert drawn(lambda c: len(set(c.layer_types))) == {1, 2}  # Some have both kinds of layers.


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda config: config.update(rms_norm_eps=config["rms_norm_eps"] * 10), id="rms_norm_eps"),
        pytest.param(lambda config: config["rope_parameters"].update(rope_theta=101.0), id="rope_theta"),
        pytest.param(lambda config: config.update(sliding_window=config["sliding_window"] + 1), id="sliding_window"),
        pytest.param(lambda config: config.update(use_sliding_window=False), id="use_sliding_window"),
        pytest.param(lambda config: config.update(layer_types=["sliding_attention"] * 2), id="layer_types"),
    ],
)
def test_a_wrong_config_would_be_noticed(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    """The comparison detects a wrong value of each of these keys."""
    case = build(SENSITIVE_SEED, tmp_path / "right")
    assert case.difference(path=case.rewritten(tmp_path, change)) > TOLERANCE


def test_keys_left_out_of_the_config_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    defaults = {"head_dim": 128, "sliding_window": 8, "use_sliding_window": True, "attn_implementation": "eager"}
    sizes = {"hidden_size": 48, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(vocab_size=97, num_hidden_layers=2, max_position_embeddings=64, **sizes, **defaults)
    )
    randomize(model, seed=0)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {"architectures", "model_type", "vocab_size", "num_hidden_layers", "max_position_embeddings", *sizes}
    kept |= {"use_sliding_window", "sliding_window"}  # has no layer below max_window_layers
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in kept}))

    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    runner, tokens = open_runner(tmp_path), list(range(40))
    batch = runner.batch([tokens], [[1, 2, 3]])
    assert difference([runner.step(batch, ALL).logits], [their_logits(model, tokens)]) <= TOLERANCE


NEW_TOKENS = 32
TIE = 2
"""Number of bfloat16 ulps by which two logits may differ and still count as equal.

Rounding two logits to bfloat16 moves their difference by up to one ulp by itself. The hidden state that they are
computed from was rounded too, a dozen times a layer and in other places here than there (transformers rounds a norm
before it applies the weight, we after), which moves them by as much again.
"""
SLACK = 1.2
"""Maximum ratio of our error (against float32) to that of transformers; we round less often."""


@attrs.frozen
class Continuation:
    """The greedy continuation of a prompt by transformers in bfloat16; logits are ``[NEW_TOKENS, vocab_size]``.

    ``exact`` are its logits in float32 on the same tokens.
    """

    prompt: list[int]
    tokens: list[int]
    logits: Tensor
    exact: Tensor


@pytest.fixture(scope="module")
def continuations(trained: Path) -> list[Continuation]:
    rounded, exact = (
        transformers.Qwen3ForCausalLM.from_pretrained(trained, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    rounded.generation_config.eos_token_id = None  # to the maximum length
    found = []
    for prompt in prompts(trained):
        made = rounded.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        sequence = made.sequences[0].tolist()
        logits = their_logits(exact, sequence[:-1])[len(prompt) - 1 :]
        found.append(Continuation(prompt, sequence[len(prompt) :], torch.cat(made.logits).float(), logits))
    return found


def forced_logits(runner: hal.Runner, continuations: Sequence[Continuation]) -> list[Tensor]:
    """Return our logits at the tokens that transformers chose, for all prompts in one batch."""
    blocks, taken = [], 1
    for each in continuations:
        count = runner.spec.blocks_for(len(each.prompt) + NEW_TOKENS)
        blocks.append(list(range(taken, taken + count)))
        taken += count
    steps = [runner.step(runner.batch([each.prompt for each in continuations], blocks)).logits.float()]
    for step in range(NEW_TOKENS - 1):
        cached = [len(each.prompt) + step for each in continuations]
        batch = runner.batch([[each.tokens[step]] for each in continuations], blocks, cached=cached)
        steps.append(runner.step(batch).logits.float())
    return list(torch.stack(steps, dim=1))


def ulps_apart(logits: Tensor, one: int, other: int) -> float:
    """Return the distance of two logits in bfloat16 units in the last place (8 bits) at the larger one's magnitude."""
    a, b = float(logits[one]), float(logits[other])
    ulp = 2.0 ** (math.floor(math.log2(max(abs(a), abs(b)))) - 7)
    return abs(a - b) / ulp


def check_greedy(ours: Sequence[Tensor], continuations: Sequence[Continuation]) -> list[tuple[int, int]]:
    """Check our choices against transformers', token by token on its text; return the positions of ties."""
    ties = []
    for row, (logits, theirs) in enumerate(zip(ours, continuations, strict=True)):
        for step, (our_choice, their_choice) in enumerate(zip(logits.argmax(-1).tolist(), theirs.tokens, strict=True)):
            if our_choice == their_choice:
                continue
            apart = [ulps_apart(each[step], our_choice, their_choice) for each in (logits, theirs.logits, theirs.exact)]
            assert max(apart) <= TIE, f"{TEXTS[row]!r}, token {step}: {our_choice} for {their_choice}, ulps {apart}"
            ties.append((row, step))
    return ties


def error(logits: Sequence[Tensor], continuations: Sequence[Continuation]) -> float:
    """Return the root mean square distance from the float32 logits."""
    return float((torch.cat(list(logits)) - torch.cat([each.exact for each in continuations])).square().mean().sqrt())


@thorough(MODE, r"\[eager")
@thorough(EXHAUSTIVE, r"\[inductor")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_greedy_tokens_of_the_trained_checkpoint(
    compiler: str, continuations: list[Continuation], trained: Path
) -> None:
    runner = open_runner(trained, compiler, dtype="auto")
    assert runner.spec.dtype is torch.bfloat16
    ours = forced_logits(runner, continuations)
    ties = check_greedy(ours, continuations)
    # Rounding affects transformers as much; a mistake would add to it.
    assert error(ours, continuations) <= SLACK * error([each.logits for each in continuations], continuations)

    # The generation loop gives the same text, up to the first tie.
    made: list[list[int]] = [[] for _ in continuations]
    params = hal.SamplingParams(max_new_tokens=NEW_TOKENS)
    for token in hal.generate(runner, [each.prompt for each in continuations], params):
        made[token.prompt_index].append(token.token_id)
    for row, each in enumerate(continuations):
        agreed = min((step for place, step in ties if place == row), default=NEW_TOKENS)
        assert made[row][:agreed] == each.tokens[:agreed]
        assert len(made[row]) == NEW_TOKENS


@pytest.mark.parametrize(("key", "value"), [("rms_norm_eps", 1e-2), ("rope_theta", 1000.0)])
def test_a_wrong_trained_checkpoint_would_be_noticed(
    key: str, value: float, continuations: list[Continuation], trained: Path, tmp_path: Path
) -> None:
    wrong = comparison.rewritten(
        trained,
        tmp_path,
        lambda config: (config["rope_parameters"] if key == "rope_theta" else config).update({key: value}),
    )
    ours = forced_logits(open_runner(wrong, dtype="auto"), continuations)
    assert error(ours, continuations) > SLACK * error([each.logits for each in continuations], continuations)
    with pytest.raises(AssertionError, match="ulps"):
        check_greedy(ours, continuations)
