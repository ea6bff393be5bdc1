"""Times the tower and the prefill of one image at Qwen3-VL-4B's sizes, with few layers, beside transformers.

    python tools/benchmarks/seeing_speed.py
    python tools/benchmarks/seeing_speed.py --pixels 512 --layers 2 --dtype float32

Both sides have random weights and one thread each, and take turns in one process: a row is a median, and the ratio is
that of the medians. For the prefill, transformers' text model gets the embeddings, with the image's in their places.
Needs the package installed with its extra ``test``.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import click
import torch
import transformers
from helpers.seeing import END_ID, IMAGE_ID, START_ID, VIDEO_ID

import hal
from hal.generation.prompt_inputs import PromptInputs
from hal.nn import EncoderItem
from hal.step import LAST


def config_of(layers: int) -> Any:
    """Qwen3-VL-4B's config, with fewer layers and a small vocabulary."""
    text = {
        "vocab_size": 1024,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    }
    vision = {
        "depth": layers,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": list(range(min(3, layers - 1))),
    }
    placeholders = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}
    marks = {"vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **placeholders, **marks)


def alternating(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median seconds of each side, after one call each."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            if repeat:
                found[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in found.items()}


@click.command()
@click.option("--pixels", default=1024, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--repeats", default=5, show_default=True)
def main(pixels: int, layers: int, dtype: str, repeats: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    side = pixels // 16
    count = side * side // 4
    values = torch.randn(side * side, 3 * 2 * 16 * 16)
    item = EncoderItem("image", values, (1, side, side), b"image")
    prompt = [1, START_ID, *[IMAGE_ID] * count, END_ID, 2, 3]
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.Qwen3VLForConditionalGeneration(config_of(layers)).to(getattr(torch, dtype)).eval()
        model.save_pretrained(folder)
        config = {"backend": "cpu", "dtype": dtype, "compilation": {"compiler": "graph", "capture_sizes": [1]}}
        backend = hal.open({**config, "cache": {"num_tokens": 2 * len(prompt)}})
        runner = hal.Runner(hal.load_model(folder, backend), backend)
    grid = torch.tensor([[1, side, side]])
    inputs = PromptInputs.of(runner, prompt, [item])
    assert inputs is not None
    blocks = [list(range(1, 1 + runner.spec.blocks_for(len(prompt))))]

    def tower() -> None:
        runner.forget()
        inputs.give(runner.encode([item]))

    def prefill() -> None:
        fields = inputs.fields(0, len(prompt))
        runner.step(runner.batch([prompt], blocks, **fields), LAST)

    given = values.to(getattr(torch, dtype))
    ids = torch.tensor([prompt])
    types = (ids == IMAGE_ID).int()
    text, head = model.model.language_model, model.lm_head
    with torch.inference_mode():
        seen = model.model.visual(given, grid)
        embedded = text.embed_tokens(ids)
        embedded[types.bool()] = seen.pooler_output
        positions, _ = model.model.get_rope_index(ids, types, image_grid_thw=grid)

    def their_prefill() -> None:
        states = text(
            inputs_embeds=embedded,
            position_ids=positions,
            visual_pos_masks=types.bool(),
            deepstack_visual_embeds=seen.deepstack_features,
        )
        head(states.last_hidden_state[:, -1:])

    with torch.inference_mode():
        rounds = {
            "tower": {"hal": tower, "transformers": lambda: model.model.visual(given, grid)},
            "prefill": {"hal": prefill, "transformers": their_prefill},
        }
        found = {name: alternating(sides, repeats) for name, sides in rounds.items()}
        again = alternating({"hal": lambda: runner.encode([item])}, repeats)
    for name, each in found.items():
        ratio = each["transformers"] / each["hal"]
        click.echo(f"{name}: hal {each['hal']:.2f} s, transformers {each['transformers']:.2f} s, {ratio:.2f} x")
    click.echo(f"the same image again: {again['hal'] * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
