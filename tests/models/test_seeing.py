"""Tests for models that read images and videos, against Hugging Face transformers, on random checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.comparison import TOLERANCE, difference
from helpers.reference import open_runner
from helpers.seeing import HYBRIDS, IMAGE_ID, VIDEO_ID, Story, build, item, our_logits, story, text, their_logits
from helpers.thorough import DRAW, EXHAUSTIVE, FAMILY, LONG, MODE, thorough

import hal
from hal.checkpoint.model_registry import find_model
from hal.errors import BatchError, ConfigError, ModelError

FAMILIES = ("Qwen3VL", "Qwen3VLMoe", "Qwen2_5_VL", *HYBRIDS)
SEEDS = range(1, 21)


@pytest.fixture(scope="module", params=[(f, s) for s in SEEDS for f in FAMILIES], ids=lambda p: f"{p[0]}-seed={p[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[Story]]:
    family, seed = request.param
    path = tmp_path_factory.mktemp(family)
    model, draw = build(family, seed, path), random.Random(seed)
    kinds: list[list[str]] = [["image"], [], ["image", "image", "image"], ["video"], ["image", "video"]]
    return model, path, [story(draw, model, each) for each in draw.sample(kinds, 4)]


def check(runner: hal.Runner, model: Any, stories: Sequence[Story], cuts: Sequence[int] | None = None) -> None:
    theirs = [their_logits(model, each) for each in stories]
    # Recurrent layers in chunks and token by token differ by half of TOLERANCE in transformers alone.
    slack = 3 * TOLERANCE if runner.slots.needed else TOLERANCE
    assert difference(our_logits(runner, stories, cuts), theirs) <= slack


MORE = r"-seed=([4-9]|1\d|20)|Qwen3_5(Moe)?-seed=[23]"


@thorough(EXHAUSTIVE, r"-seed=([2-9]|1\d|20)")  # Prefills that continue are those of texts without a prefix, too.
def test_logits(case: tuple[Any, Path, list[Story]]) -> None:
    model, path, stories = case
    check(open_runner(path), model, stories)


@thorough(FAMILY, r"\[(Qwen3VLMoe|Qwen3_5)")
@thorough(DRAW, r"-seed=([2-9]|1\d|20)")
@thorough(EXHAUSTIVE, MORE)
def test_a_prefill_continues_within_an_image(case: tuple[Any, Path, list[Story]]) -> None:
    model, path, stories = case
    cuts = [next((at for at, token in enumerate(each.tokens) if token >= IMAGE_ID), 0) + 1 for each in stories]
    cuts = [min(cut, each.length - 1) for cut, each in zip(cuts, stories, strict=True)]
    check(open_runner(path), model, stories, cuts)


@thorough(MODE, r"\[(?!Qwen3VL-).*-seed=1\]")
@thorough(EXHAUSTIVE, r"-seed=([2-9]|1\d|20)|Qwen3_5Moe")
def test_logits_of_captured_steps(case: tuple[Any, Path, list[Story]]) -> None:
    model, path, stories = case
    check(open_runner(path, "graph"), model, stories)


@thorough(EXHAUSTIVE, r"inductor|-seed=([124-9]|1\d|20)|\[(?!Qwen3VL-)")
@thorough(MODE, r"\[Qwen3VL-seed=3-piecewise")
@pytest.mark.parametrize("compiler", ["piecewise", "inductor"])
def test_logits_of_other_compilers(compiler: str, case: tuple[Any, Path, list[Story]]) -> None:
    model, path, stories = case
    check(open_runner(path, compiler), model, stories)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("seeing")
    return build("Qwen3VL", 3, path), path


def generated(runner: hal.Runner, stories: Sequence[Story], tokens: int = 6) -> list[list[int]]:
    """Return the greedy continuations of the stories' prompts."""
    prompts, items = [each.tokens[: each.length] for each in stories], [each.items for each in stories]
    found: list[list[int]] = [[] for _ in stories]
    params = hal.SamplingParams(max_new_tokens=tokens)
    for token in hal.generate(runner, prompts, params, items=items):
        found[token.prompt_index].append(token.token_id)
    return found


def their_tokens(model: Any, told: Story, tokens: int = 6) -> list[int]:
    known = told.tokens[: told.length]
    for _ in range(tokens):
        known.append(int(their_logits(model, attrs.evolve(told, tokens=known))[-1].argmax()))
    return known[told.length :]


def test_generation_of_prompts_with_and_without_images(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    draw = random.Random(7)
    stories = [story(draw, model, kinds) for kinds in (["image"], [], ["video", "image"])]
    runner = open_runner(path)
    assert generated(runner, stories) == [their_tokens(model, each) for each in stories]


def reusing(path: Path, **cache: Any) -> hal.Runner:
    """Return a runner that shares prefixes."""
    cache = {"num_tokens": 2048, "block_size": 4, "reuse_prefixes": True, **cache}
    backend = hal.open({"backend": "cpu", "dtype": "float32", "cache": cache})
    return hal.Runner(hal.load_model(path, backend), backend)


@thorough(FAMILY, r"\[Qwen3_5")
@pytest.mark.parametrize(
    ("family", "saved"),
    [("Qwen3VL", {}), ("Qwen3_5", {"saved_states": 8, "saved_states_interval": 4, "num_sequences": 2})],
)
def test_prefixes_are_shared_only_with_equal_images(family: str, saved: dict[str, int], tmp_path: Path) -> None:
    """Equal tokens with other pixels are another prefix. An image in a shared prefix is not encoded again."""
    model, path = build(family, 3, tmp_path), tmp_path
    draw = random.Random(8)
    first = story(draw, model, ["image", "image"])
    other = item(draw, model, size=first.items[0].grid)
    changed = attrs.evolve(first, items=[other, first.items[1]])
    with reusing(path, num_embeddings=1, **saved) as runner:
        expected = [their_tokens(model, each) for each in (first, changed, first)]
        assert expected[0] != expected[1]
        assert [generated(runner, [each])[0] for each in (first, changed, first)] == expected


def test_a_repeated_image_is_not_encoded_again(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    draw = random.Random(9)
    told = story(draw, model, ["image", "image"])
    with open_runner(path) as runner:
        steps = runner.encoding_steps
        once = runner.encode(told.items)
        assert runner.encoding_steps == steps + 1
        again = runner.encode([told.items[1], told.items[0]])
        assert runner.encoding_steps == steps + 1
        assert torch.equal(once[0], again[1])
        assert torch.equal(once[1], again[0])


def test_the_least_recent_embeddings_are_dropped(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    draw = random.Random(10)
    one, two, three = (item(draw, model, size=(1, 4, 4)) for _ in range(3))
    with reusing(path, num_embeddings=8) as runner:  # two images of four
        runner.encode([one, two])
        runner.encode([one])
        runner.encode([three])
        steps = runner.encoding_steps
        runner.encode([one, three])
        assert runner.encoding_steps == steps
        runner.encode([two])
        assert runner.encoding_steps == steps + 1


def test_new_weights_drop_the_embeddings(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    one = item(random.Random(12), model)
    with reusing(path) as runner:
        (before,) = runner.encode([one])
        bias = model.model.visual.merger.linear_fc2.bias.detach()
        hal.replace_weights(runner, {"model.visual.merger.linear_fc2.bias": bias + 1})
        (after,) = runner.encode([one])
        width = len(bias)
        torch.testing.assert_close(after[:, :width], before[:, :width] + 1)
        assert torch.equal(after[:, width:], before[:, width:])


def test_a_memory_plan_has_the_encoder(seeing: tuple[Any, Path]) -> None:
    _, path = seeing
    backend = hal.open(
        {"backend": "cpu", "dtype": "float32", "max_prefill_tokens": 64, "cache": {"num_embeddings": 100}}
    )
    loaded = hal.load_model(path, backend)
    plan = hal.plan_memory(loaded, backend, max_sequences=2)
    assert plan.embeddings == 100 * loaded.encoder.width * 4  # type: ignore[union-attr]
    assert "embeddings that are kept" in str(plan)


def refused(runner: hal.Runner, tokens: Sequence[int], items: Sequence[Any], match: str) -> None:
    with pytest.raises(BatchError, match=match):
        next(iter(hal.generate(runner, [tokens], hal.SamplingParams(max_new_tokens=1), items=[items])))


def test_items_that_do_not_fit_the_prompt_are_refused(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    draw = random.Random(11)
    told, one = story(draw, model, ["image"]), item(draw, model, size=(1, 4, 4))
    prompt = told.tokens[: told.length]
    with open_runner(path) as runner:
        refused(runner, prompt, [], "placeholders for images or videos from token")
        refused(runner, prompt, [*told.items, one], "no 4 placeholders in a row for image 1")
        refused(runner, text(draw, 5), [one], "no 4 placeholders in a row for image 0")
        refused(runner, [1, *[IMAGE_ID] * 3, 2], [one], "no 4 placeholders in a row")
        refused(runner, [1, *[VIDEO_ID] * 4, 2], [one], "no 4 placeholders in a row")
        refused(runner, [*[IMAGE_ID] * 4, 2], [attrs.evolve(one, values=one.values[:, :5])], "has values")
        refused(runner, [*[IMAGE_ID] * 4, 2], [attrs.evolve(one, grid=(1, 3, 4))], "multiples of 2")
        empty = attrs.evolve(one, kind="video", grid=(0, 4, 4), values=one.values[:0])
        refused(runner, [*[VIDEO_ID] * 4, 2], [empty], r"is a video of \(0, 4, 4\) patches")


def test_a_table_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="no table text_config"):
        find_model("Qwen2_5_VLForConditionalGeneration").from_config({"text_config": []})


def test_a_model_of_text_refuses_items(trained: Path) -> None:
    with open_runner(trained) as runner:
        assert runner.model.encoder is None
        with pytest.raises(ModelError, match="has no encoder"):
            runner.encode([])


def test_experts_as_published_checkpoints_have_them(tmp_path: Path) -> None:
    """Their last dimensions are swapped: inputs before outputs."""
    from safetensors.torch import load_file, save_file

    model, draw = build("Qwen3VLMoe", 1, tmp_path), random.Random(15)
    stories = [story(draw, model, ["image"])]
    tensors = load_file(tmp_path / "model.safetensors")
    experts = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert experts
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in experts}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_runner(tmp_path) as runner:
        check(runner, model, stories)


@thorough(LONG)
def test_the_text_model_of_a_quantized_checkpoint(seeing: tuple[Any, Path], tmp_path: Path) -> None:
    """With activation scales from a calibration text. The tower stays in floating point, and its files are kept."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from hal.quantize.quantize_checkpoint import quantize_checkpoint

    model, path = seeing
    tokenizer = Tokenizer(models.WordLevel({f"w{each}": each for each in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "preprocessor_config.json").write_text("{}")
    words = " ".join(f"w{each}" for each in text(random.Random(13), 400))
    quantize_checkpoint(path, tmp_path / "w8a8", "w8a8", calibration=words)
    assert (tmp_path / "w8a8" / "preprocessor_config.json").exists()
    stories = [story(random.Random(14), model, ["image"])]
    exact = their_logits(model, stories[0])
    with open_runner(tmp_path / "w8a8") as runner:
        (found,) = our_logits(runner, stories)
        assert isinstance(runner.model.visual.blocks[0].attn.qkv, hal.nn.Linear)
    assert 1e-4 < difference([found], [exact]) < 0.2
