"""Train the small checkpoint that reads pictures: a Qwen3-VL of a million parameters, with DeepStack.

    python checkpoints/train_seeing.py                        # writes checkpoints/tiny-pictures
    python checkpoints/train_seeing.py --output DIR --quick   # a trial of a few steps somewhere else

The pictures and the questions about them are drawn by `pictures.py`, so nothing is downloaded. Everything is seeded and
the number of steps is fixed. It takes about twenty minutes on two cores.

A mistake in any part should change answers, so each part is needed. First the tower alone learns what is in each cell
of a picture: its embedding says the colour, and the two rows of DeepStack say which of the shapes, each one half. Then
the tower stays, and the language model learns to answer from the rows. What lies beside what, only the positions say.
"""

import json
import platform
import random
import time
from pathlib import Path
from typing import Any

import click
from pictures import (
    CELL,
    COLOURS,
    COUNTS,
    GRIDS,
    KINDS,
    NOTHING,
    SHAPES,
    SLOT,
    Arrangement,
    Question,
    arrange,
    ask,
    held_out_questions,
    paint,
)
from tokenizers import Tokenizer, models, pre_tokenizers

from hal.bench.contenders.extensions import only_imported_extensions  # hal imports torch without vendors' extensions

import torch  # isort: skip
from torch import Tensor, nn  # isort: skip
from torch.nn import functional  # isort: skip

with only_imported_extensions():
    import transformers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

PATCH, MERGE, FRAMES = 8, 2, 2
STOP, IMAGE, VIDEO, START, END = "<stop>", "<image>", "<video>", "<start>", "<end>"
WORDS = [
    *(STOP, IMAGE, VIDEO, START, END, "<unknown>", "user", "assistant"),
    *("list", "all", "count", "the", "what", "colour", "is", "right", "of", "below", NOTHING),
    *COLOURS,
    *SHAPES,
    *COUNTS,
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }} {% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start> <image> <end> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1, 2],
}
TEXT: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
    "rms_norm_eps": 1e-6,
}
HALF = 4  # a shape's number is this many times one half's, plus the other's
TURNS = ("right", "right", "below", "below", "colour", "count")  # the questions about a picture, in a random order
LIST_FIRST = 0.2  # the share of pictures about which the list is asked first; else it is last, where it tells nothing
BATCH = 24
SEEING_STEPS, READING_STEPS, RATE, WARM_UP = 300, 2000, 2e-3, 50
MEASURED = 300


def log(text: str) -> None:
    click.echo(text, err=True)


def patches_of(pixels: Tensor) -> Tensor:
    """The patches of a picture as transformers' processor gives them, without its resizing, which changes nothing."""
    values = (pixels.float() / 255 - 0.5) / 0.5
    _, height, width = values.shape
    blocks = values.view(3, height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH)
    ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)  # cells in rows, patches of a cell, channel, row, column
    return ordered.reshape(-1, 3, 1, PATCH, PATCH).expand(-1, 3, FRAMES, PATCH, PATCH).flatten(1)


def grid_of(rows: int, columns: int) -> list[int]:
    return [1, rows * SLOT // PATCH, columns * SLOT // PATCH]


def cells(arrangement: Arrangement) -> tuple[Tensor, Tensor]:
    """The colour and the shape in each cell of a picture, in order; the number after the last one for none."""
    side = SLOT // CELL
    colours = torch.full((arrangement.rows, side, arrangement.columns, side), len(COLOURS))
    shapes = torch.full_like(colours, len(SHAPES))
    for index, thing in enumerate(arrangement.slots):
        if thing is not None:
            row, column = divmod(index, arrangement.columns)
            colours[row, 0, column, 0] = list(COLOURS).index(thing.colour)
            shapes[row, 0, column, 0] = SHAPES.index(thing.shape)
    return colours.flatten(), shapes.flatten()


def new_model(seed: int) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": len(WORDS), "eos_token_id": WORDS.index(STOP)},
        vision_config={**TOWER, "out_hidden_size": TEXT["hidden_size"]},
        image_token_id=WORDS.index(IMAGE),
        video_token_id=WORDS.index(VIDEO),
        vision_start_token_id=WORDS.index(START),
        vision_end_token_id=WORDS.index(END),
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def optimizer_of(parameters: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    made = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    return made, torch.optim.lr_scheduler.LambdaLR(
        made, lambda step: min(1.0, (step + 1) / WARM_UP, (steps - step) / (0.7 * steps))
    )


def train_tower(model: Qwen3VLForConditionalGeneration, steps: int, seed: int) -> None:
    """Teach the tower what is in each cell."""
    tower, draw, width = model.model.visual, random.Random(f"seeing {seed}"), TEXT["hidden_size"]
    halves = -(-(len(SHAPES) + 1) // HALF)
    probes = nn.ModuleList(nn.Linear(width, count) for count in (len(COLOURS) + 1, halves, HALF))
    optimizer, schedule = optimizer_of([*tower.parameters(), *probes.parameters()], steps)
    started = time.perf_counter()
    for step in range(steps):
        grid = draw.choice(GRIDS)
        drawn = [arrange(draw, grid, held_out=False) for _ in range(BATCH)]
        values = torch.cat([patches_of(paint(draw, each)) for each in drawn])
        colours, shapes = (torch.cat(each) for each in zip(*map(cells, drawn), strict=True))
        found = tower(values, torch.tensor([grid_of(*grid)] * BATCH))
        rows = [found.pooler_output, *found.deepstack_features]
        loss = torch.zeros(())
        for row, probe, wanted in zip(rows, probes, (colours, shapes // HALF, shapes % HALF), strict=True):
            normed = row / row.square().mean(1, keepdim=True).add(1e-6).sqrt()
            size = (row.square().mean() - 1).square()  # about as large as other embeddings
            loss = loss + functional.cross_entropy(probe(normed), wanted) + 0.01 * size
        advance(loss, optimizer, schedule)
        if step % 50 == 0 or step == steps - 1:
            log(f"tower {step + 1:5d}/{steps}  loss {loss.item():.3f}  {time.perf_counter() - started:6.1f} s")


def advance(loss: Tensor, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
    optimizer.step()
    schedule.step()


def prompt_of(text: str, grid: list[int] | None) -> list[str]:
    images = [] if grid is None else [START, *[IMAGE] * (grid[1] * grid[2] // MERGE**2), END]
    return ["user", *images, *text.split(), "assistant"]


def conversation(draw: random.Random, arrangement: Arrangement) -> tuple[list[str], list[bool]]:
    """Questions about a picture with their answers, and which of the words are to be learned."""
    kinds = draw.sample(TURNS, len(TURNS))
    kinds.insert(0 if draw.random() < LIST_FIRST else len(kinds), "list")
    words, learned = list[str](), list[bool]()
    for index, kind in enumerate(kinds):
        text, answer = ask(draw, arrangement, kind)
        prompt = prompt_of(text, None if index else grid_of(arrangement.rows, arrangement.columns))
        told = [*answer.split(), STOP]
        words += [*prompt, *told]
        learned += [False] * len(prompt) + [True] * len(told)
    return words, learned


def train_reader(model: Qwen3VLForConditionalGeneration, steps: int, seed: int) -> None:
    """Teach the language model to answer; the tower stays."""
    model.model.visual.requires_grad_(False)
    draw, known = random.Random(f"reading {seed}"), {word: index for index, word in enumerate(WORDS)}
    optimizer, schedule = optimizer_of([each for each in model.parameters() if each.requires_grad], steps)
    started, mean = time.perf_counter(), 0.0
    for step in range(steps):
        rows, columns = draw.choice(GRIDS)
        grid, tokens, wanted, values = grid_of(rows, columns), [], [], []
        for _ in range(BATCH):
            arrangement = arrange(draw, (rows, columns), held_out=False)
            values.append(patches_of(paint(draw, arrangement)))
            words, learned = conversation(draw, arrangement)
            tokens.append([known[each] for each in words])
            after = zip(words[1:], learned[1:], strict=True)
            wanted.append([*(known[word] if learn else -100 for word, learn in after), -100])
        longest = max(map(len, tokens))
        ids = torch.tensor([each + [0] * (longest - len(each)) for each in tokens])
        targets = torch.tensor([each + [-100] * (longest - len(each)) for each in wanted])
        logits = model(
            input_ids=ids,
            mm_token_type_ids=(ids == known[IMAGE]).int(),
            pixel_values=torch.cat(values),
            image_grid_thw=torch.tensor([grid] * BATCH),
            use_cache=False,
        ).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        advance(loss, optimizer, schedule)
        mean = loss.item() if not step else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            log(f"reader {step + 1:5d}/{steps}  loss {mean:.3f}  {time.perf_counter() - started:6.1f} s")


@torch.inference_mode()
def answer(model: Qwen3VLForConditionalGeneration, processor: Any, question: Question) -> str:
    """The model's greedy answer, from the patches of transformers' processor."""
    from PIL import Image

    image = Image.fromarray(question.pixels.permute(1, 2, 0).numpy())
    found = processor(images=[image], return_tensors="pt")
    (grid,) = found["image_grid_thw"].tolist()
    ids = torch.tensor([[WORDS.index(each) for each in prompt_of(question.text, grid)]])
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == WORDS.index(IMAGE)).int(),
        pixel_values=found["pixel_values"],
        image_grid_thw=found["image_grid_thw"],
        max_new_tokens=24,
        do_sample=False,
    )
    words = [WORDS[each] for each in made[0, ids.shape[1] :].tolist()]
    return " ".join(words[: words.index(STOP)] if STOP in words else words)


def save(model: Qwen3VLForConditionalGeneration, output: Path) -> None:
    stop = WORDS.index(STOP)
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=stop, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=STOP).save_pretrained(output)
    (output / "chat_template.jinja").write_text(TEMPLATE)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "size": {"shortest_edge": 1024, "longest_edge": 65536},
    }
    (output / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


CARD = """# {name}

A Qwen3-VL of {millions:.2f} million parameters that answers questions about pictures of coloured shapes and digits. It
is kept in the repository so that tests have a trained model that reads images, with nothing to download.

| | |
|---|---|
| architecture | `Qwen3VLForConditionalGeneration`, bfloat16, tied embeddings |
| tower: layers, hidden size, heads | {depth}, {hidden_size}, {num_heads}; DeepStack after the layers 1 and 2 |
| text: layers, hidden size, query heads, key and value heads, head size | {text} |
| pictures | {slot} pixels for each of 2 to 9 slots in rows and columns |
| trained on | {seen} pictures of the tower, {read} of the language model, seed {seed} |

## Figures

Answers that are right, word for word, of {count} questions about pictures that training has not seen, computed in
float32 from the weights as saved:

| question | example | right |
|---|---|---|
{table}
| all | | {right} of {count} |

## Making it again

```console
$ python checkpoints/train_seeing.py
```

It was made with Python {python}, torch {torch} and transformers {transformers}.
"""


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--output", type=click.Path(path_type=Path), help="The folder to write; one beside this file by default.")
@click.option("--quick", is_flag=True, help="Train for a few steps only.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
def main(output: Path | None, quick: bool, seed: int, threads: int) -> None:
    output = output or Path(__file__).parent / "tiny-pictures"
    started = time.perf_counter()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    seeing, reading = (20, 20) if quick else (SEEING_STEPS, READING_STEPS)
    model = new_model(seed).train()
    log(f"{sum(p.numel() for p in model.parameters())} parameters")
    train_tower(model, seeing, seed)
    train_reader(model, reading, seed)
    save(model, output)

    # What is measured is what was saved, read back from the files.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    saved = Qwen3VLForConditionalGeneration.from_pretrained(output, dtype=torch.float32).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(output)
    questions = held_out_questions(MEASURED)
    right = [answer(saved, processor, each) == each.answer for each in questions]
    lines = []
    for kind in KINDS:
        own = [found for found, each in zip(right, questions, strict=True) if each.kind == kind]
        example = next(each for each in questions if each.kind == kind)
        lines.append(f"| {kind} | {example.text}? {example.answer} | {sum(own)} of {len(own)} |")
        log(lines[-1])
    card = CARD.format(
        name=output.name,
        millions=sum(p.numel() for p in saved.parameters()) / 1e6,
        **{each: TOWER[each] for each in ("depth", "hidden_size", "num_heads")},
        text=", ".join(
            str(TEXT[each])
            for each in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        ),
        slot=SLOT,
        seen=seeing * BATCH,
        read=reading * BATCH,
        seed=seed,
        count=len(questions),
        table="\n".join(lines),
        right=sum(right),
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
    )
    (output / "README.md").write_text(card, encoding="utf-8")
    size = sum(each.stat().st_size for each in output.iterdir())
    log(f"{output}: {sum(right)} of {len(right)} right, {size} bytes, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
