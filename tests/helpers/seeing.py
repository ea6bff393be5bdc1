"""Random models that read images, items for them, and their logits in transformers and in hal."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import hal
from hal.generation.prompt_inputs import joined_fields
from hal.nn import EncoderItem
from hal.step import ALL
from helpers.comparison import randomize

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 90, 91, 92, 93
VOCABULARY = 97
HYBRIDS = ("Qwen3_5", "Qwen3_5Moe")
"""Families with recurrent layers."""
STEPS = 16
"""The tokens behind each prompt, which are decoded."""


def vision(draw: random.Random, family: str, hidden: int) -> dict[str, Any]:
    """Draw a table ``vision_config``."""
    heads, depth = draw.choice((1, 2, 3)), draw.randint(2, 4)
    found: dict[str, Any] = {
        "depth": depth,
        "num_heads": heads,
        "hidden_size": heads * draw.choice((8, 12, 24, 72)),
        "intermediate_size": draw.choice((20, 52)),
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
    }
    if family == "Qwen2_5_VL":
        full = draw.sample(range(depth), draw.randint(0, depth))
        return found | {"window_size": 16, "fullatt_block_indexes": sorted(full), "tokens_per_second": 3}
    levels = draw.sample(range(depth), draw.randint(0, 2))
    if family in HYBRIDS:
        return found | {"num_position_embeddings": draw.choice((16, 25, 64))}
    return found | {"num_position_embeddings": draw.choice((16, 25, 64)), "deepstack_visual_indexes": levels}


def config_of(family: str, seed: int) -> Any:
    """Draw a configuration of a family, by the name of its class in transformers without ForConditionalGeneration."""
    draw = random.Random(seed)
    head_dim, kv_heads = draw.choice((16, 32)), draw.choice((1, 2))
    heads = kv_heads * draw.choice((1, 2))
    pairs = head_dim // 2
    high, wide = draw.randint(1, pairs // 3), draw.randint(1, pairs // 3)
    hidden = heads * head_dim if family == "Qwen2_5_VL" else draw.choice((48, 80))
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": draw.choice((56, 72)),
        "num_hidden_layers": draw.randint(2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw.choice((100.0, 1e4, 5e6)),
            "mrope_section": [pairs - high - wide, high, wide],
        },
        "tie_word_embeddings": False,
    }
    if family != "Qwen2_5_VL":
        text |= {"head_dim": head_dim}
        text["rope_parameters"]["mrope_interleaved"] = True
    if family == "Qwen3VLMoe":
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": draw.choice(([], [0]))}
    if family in HYBRIDS:
        text |= recurrent(draw, text)
    if family == "Qwen3_5Moe":
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        text |= {"shared_expert_intermediate_size": 16}
    return getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=vision(draw, family, hidden),
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=START_ID,
        vision_end_token_id=END_ID,
        tie_word_embeddings=draw.random() < 0.5,
        attn_implementation="eager",
    )


def recurrent(draw: random.Random, text: dict[str, Any]) -> dict[str, Any]:
    """Draw the keys of a text model with recurrent layers; every third has the published sections of the axes."""
    published = draw.randrange(3) == 0
    head_dim, factor = (256, 0.25) if published else (draw.choice((16, 32)), draw.choice((0.5, 1.0)))
    pairs = int(head_dim * factor) // 2
    high, wide = (11, 10) if published else (draw.randint(1, pairs // 3), draw.randint(1, pairs // 3))
    types = ["full_attention", "linear_attention", draw.choice(("full_attention", "linear_attention"))]
    types = types[: text["num_hidden_layers"]]
    draw.shuffle(types)
    key_heads = draw.choice((1, 2))
    rope = {"mrope_section": [pairs - high - wide, high, wide], "partial_rotary_factor": factor}
    return {
        "head_dim": head_dim,
        "layer_types": types,
        "rope_parameters": {**text["rope_parameters"], **rope},
        "linear_conv_kernel_dim": draw.choice((2, 4)),
        "linear_key_head_dim": draw.choice((8, 16)),
        "linear_value_head_dim": draw.choice((8, 20)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice((1, 2)),
    }


def item(draw: random.Random, model: Any, *, kind: str = "image", size: tuple[int, int, int] | None = None) -> Any:
    """Draw an item: an image of 2 to 12 patches a side, or a video of several frames."""
    config = model.config.vision_config
    grid = size or (1 if kind == "image" else draw.randint(2, 3), 2 * draw.randint(1, 6), 2 * draw.randint(1, 6))
    features = config.in_channels * config.temporal_patch_size * config.patch_size**2
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    values = torch.randn(grid[0] * grid[1] * grid[2], features, generator=generator)
    seconds = draw.choice((0.5, 2.0)) if kind == "video" else None
    return EncoderItem(kind, values, grid, hashlib.sha256(values.numpy().tobytes()).digest(), seconds)


@attrs.frozen
class Story:
    """A prompt with items, and the text that follows it."""

    tokens: list[int]
    items: list[EncoderItem]
    length: int  # of the prompt


def story(draw: random.Random, model: Any, kinds: Sequence[str]) -> Story:
    """Draw a prompt with an item of each kind, and text between and behind them."""
    per_frame = type(model).__name__.startswith("Qwen3")
    tokens, items = text(draw, draw.randint(1, 6)), []
    for kind in kinds:
        each = item(draw, model, kind=kind)
        count = each.grid[1] * each.grid[2] // 4
        placeholder = IMAGE_ID if kind == "image" else VIDEO_ID
        times = each.grid[0] if per_frame else 1
        for _ in range(times):
            tokens += [*text(draw, draw.randint(0, 2)), START_ID]
            tokens += [placeholder] * (count if per_frame else count * each.grid[0])
            tokens += [END_ID]
        items.append(each)
    tokens += text(draw, draw.randint(1, 6))
    return Story(tokens + text(draw, STEPS), items, len(tokens))


def text(draw: random.Random, count: int) -> list[int]:
    """Draw tokens of text."""
    return [draw.randrange(90) for _ in range(count)]


def build(family: str, seed: int, path: Path) -> Any:
    """Write a random checkpoint, and return its model in transformers."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config_of(family, seed)).eval()
    randomize(model, seed)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # some heads remember for long, others hardly
            parameter.data.copy_(torch.linspace(-4, 2, parameter.numel()))
    model.save_pretrained(path)
    return model


def their_logits(model: Any, told: Story) -> Tensor:
    """Return the logits ``[tokens, vocab_size]`` of a story: a forward of the prompt, and one of the text behind it."""
    given: dict[str, Any] = {}
    types = torch.tensor([[1 if each == IMAGE_ID else 2 if each == VIDEO_ID else 0 for each in told.tokens]])
    for kind, values, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        if own := [each for each in told.items if each.kind == kind]:
            given[values] = torch.cat([each.values for each in own])
            given[grid] = torch.tensor([each.grid for each in own])
    videos = [each.seconds for each in told.items if each.kind == "video"]
    if videos and not type(model).__name__.startswith("Qwen3"):
        given["second_per_grid_ts"] = torch.tensor(videos)
    with torch.inference_mode():
        model.model.rope_deltas = None
        prompt, rest = (torch.tensor([each]) for each in (told.tokens[: told.length], told.tokens[told.length :]))
        first = model(input_ids=prompt, mm_token_type_ids=types[:, : told.length], use_cache=True, **given)
        if not rest.numel():
            return first.logits[0]
        return torch.cat((first.logits, model(input_ids=rest, cache=first.cache).logits), 1)[0]


def our_logits(runner: hal.Runner, stories: Sequence[Story], cuts: Sequence[int] | None = None) -> list[Tensor]:
    """Return our logits of some stories: a prefill up to ``cuts`` and from there on, then decode steps, together."""
    from hal.generation.prompt_inputs import PromptInputs

    size, device = runner.spec.block_size, runner.backend.device.torch
    inputs = [PromptInputs.of(runner, each.tokens[: each.length], each.items) for each in stories]
    for each in inputs:
        if each is not None:
            each.give(runner.encode(each.needed(0, each.placement.rows.shape[0])))
    blocks, first = [], 1
    for each in stories:
        count = runner.spec.blocks_for(len(each.tokens))
        blocks.append(list(range(first, first + count)))
        first += count
    found: list[list[Tensor]] = [[] for _ in stories]
    slots = runner.slots.take(len(stories)) if runner.slots.needed else None

    def run(starts: Sequence[int], stops: Sequence[int]) -> None:
        rows = [row for row in range(len(stories)) if starts[row] < stops[row]]
        begins, counts = [starts[row] for row in rows], [stops[row] - starts[row] for row in rows]
        parts = [{} if (own := inputs[row]) is None else own.fields(starts[row], stops[row]) for row in rows]
        with torch.inference_mode():
            fields = joined_fields(runner.model.batch_type, parts, counts, begins, block_size=size, device=device)
            if slots is not None:
                fields["slots"] = [slots[row] for row in rows]
            new = [stories[row].tokens[starts[row] : stops[row]] for row in rows]
            batch = runner.batch(new, [blocks[row] for row in rows], cached=begins, **fields)
            logits = runner.step(batch, ALL).logits.float().clone().cpu()
        for row, part in zip(rows, logits.split(counts), strict=True):
            found[row].append(part)

    ends, starts = [each.length for each in stories], [0] * len(stories)
    if cuts is not None:
        run(starts, cuts)
        starts = list(cuts)
    run(starts, ends)
    for step in range(len(stories[0].tokens) - stories[0].length):
        run([end + step for end in ends], [end + step + 1 for end in ends])
    if slots is not None:
        runner.slots.give_back(slots)
    return [torch.cat(parts) for parts in found]


def rewrite(path: Path, change: Any) -> None:
    """Rewrite a checkpoint's config.json."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
