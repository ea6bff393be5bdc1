"""Train the small checkpoint that reads pictures: a Qwen3-VL of two million parameters, with DeepStack.

    python tools/checkpoints/train_seeing.py                                   # writes checkpoints/tiny-pictures
    python tools/checkpoints/train_seeing.py --device cpu --batch 32 --minutes 1 --output DIR   # a trial on a CPU

The pictures and the questions about them are drawn by `pictures.py`, so nothing is downloaded. It trains for a number
of minutes, during which the rate falls to zero; a GPU is needed for right answers within the minutes given.

A mistake in any part should change answers, so each part is needed. First the tower alone learns what is in each cell
of a picture: its embedding says the colour, and the two rows of DeepStack say which of the shapes, each one half. Then
the tower stays, and the language model learns to answer from the rows. What lies beside what, only the positions say.
"""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from picture_batches import batches, cell_labels, patches_of
from pictures import COLOURS, KINDS, SHAPES, SLOT, Painter, held_out_questions
from seeing import TEXT, TOWER, Trained, answers, new_model, save
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

SIZE = 0.5  # of the elements of an embedding
HALF = 4  # a shape's number is this many times one half's, plus the other's
SEEING = 0.1  # share of the time for the tower
WARM_UP, DECAY = 0.03, 0.7  # shares of a phase over which the rate rises, and falls to zero
MEASURED = 300


def log(text: str) -> None:
    click.echo(text, err=True)


Drawn = tuple[dict[str, Tensor], Tensor, Tensor]


def copy_into(inputs: Drawn, drawn: Drawn) -> None:
    """Copy a batch to the tensors that a graph reads."""
    for name, value in drawn[0].items():
        inputs[0][name].copy_(value)
    for into, value in zip(inputs[1:], drawn[1:], strict=True):
        into.copy_(value)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a CUDA graph of a step. Without one, the processor that launches kernels is slower than the GPU."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread pins the batches
            step()
    except RuntimeError as error:
        log(f"not captured: {error}")
        return step
    log("captured")
    return graph.replay


class Training:
    """Steps on drawn batches, at a rate that depends on the time."""

    def __init__(
        self,
        model: Qwen3VLForConditionalGeneration,
        device: torch.device,
        rate: float,
        seed: int,
        output: Path,
        graph: bool,
    ) -> None:
        self.trained = Trained(model).to(device)
        self.painter = Painter(device, seed)
        self.device, self.rate, self.output, self.graph = device, rate, output, graph
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
        )  # a graph keeps no casts of weights

    def drawn(self, batch: dict[str, Tensor]) -> Drawn:
        """Return a batch on the device, the patches of its pictures, and the places of their cells."""
        batch = {name: value.to(self.device, non_blocking=True).long() for name, value in batch.items()}
        order = self.trained.order[batch["grid"]]
        with torch.no_grad():
            return batch, patches_of(self.painter(batch["numbers"]), order.clamp(min=0)), order

    def run(
        self,
        name: str,
        loss_of: Callable[..., Tensor],
        parameters: Sequence[Tensor],
        supply: Iterator[Any],
        minutes: float,
    ) -> int:
        """Take steps for some minutes, and return how many. Nothing waits for the device but a line of the log."""
        decayed = [each for each in parameters if each.dim() > 1]
        groups = [
            {"params": decayed, "weight_decay": 0.01},
            {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
        ]
        rate = torch.zeros((), device=self.device)
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True, capturable=self.graph)
        for group in optimizer.param_groups:
            group["lr"] = rate  # the tensor itself, which a graph reads
        inputs, mean = self.drawn(next(supply)), torch.zeros((), device=self.device)

        def step() -> None:
            """Take a step on the tensors of `inputs`."""
            optimizer.zero_grad(set_to_none=True)
            with self.autocast:
                loss = loss_of(*inputs)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            mean.lerp_(loss.detach(), 0.02)

        rate.fill_(0.01 * self.rate)
        take = captured(step) if self.graph else step
        steps, started, told, saved = 0, time.perf_counter(), 0.0, 0.0
        while True:
            spent = time.perf_counter() - started
            share = spent / (60 * minutes)
            if share >= 1:
                return steps
            rate.fill_(self.rate * min(1.0, share / WARM_UP + 0.01, (1 - share) / DECAY))
            copy_into(inputs, self.drawn(next(supply)))
            take()
            steps += 1
            if spent - told > 5:
                loss = mean.item() / (1 - 0.98**steps)
                log(f"{name} step {steps:6d}  loss {loss:.4f}  {spent:6.1f} s")
                if loss != loss:
                    raise click.ClickException("the loss is no number: try a lower --rate")
                told = spent
            if spent - saved > 60:
                save(copy.deepcopy(self.trained.model), self.output)
                saved = spent

    def seeing(self, supply: Iterator[Any], minutes: float) -> int:
        """Teach the tower what is in each cell."""
        width, tower = TEXT["hidden_size"], self.trained.tower
        counts = (len(COLOURS) + 1, -(-(len(SHAPES) + 1) // HALF), HALF)
        probes = nn.ModuleList(nn.Linear(width, count) for count in counts).to(self.device)

        def answered(batch: dict[str, Tensor], patches: Tensor, order: Tensor) -> Iterator[tuple[Tensor, ...]]:
            colours, shapes = cell_labels(batch["numbers"], order)
            halves = (shapes.div(HALF, rounding_mode="floor"), shapes % HALF)
            wanted = (colours, *(half.where(shapes >= 0, -100) for half in halves))
            rows = self.trained.see(patches, batch["grid"])
            for row, probe, labels in zip(rows, probes, wanted, strict=True):
                normed = row / row.square().mean(2, keepdim=True).add(1e-6).sqrt()
                yield row, probe(normed), labels

        def loss_of(*drawn: Any) -> Tensor:
            found = []
            for row, logits, labels in answered(*drawn):
                size = (row.float().square().mean() - SIZE**2).square()
                found.append(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * size)
            return torch.stack(found).sum()

        steps = self.run("tower", loss_of, [*tower.parameters(), *probes.parameters()], supply, minutes)
        with torch.no_grad(), self.autocast:
            for _, logits, labels in answered(*self.drawn(next(supply))):
                right = (logits.argmax(2) == labels)[labels >= 0].float().mean().item()
                log(f"tower: right in {right:.5f} of the cells")
        return steps

    def reading(self, supply: Iterator[Any], minutes: float) -> int:
        """Teach the language model to answer; the tower stays."""
        self.trained.tower.requires_grad_(False)

        def loss_of(batch: dict[str, Tensor], patches: Tensor, _: Tensor) -> Tensor:
            with torch.no_grad():
                rows = self.trained.see(patches, batch["grid"])
            logits = self.trained.read(rows, batch)
            return functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())

        own = [each for each in self.trained.model.parameters() if each.requires_grad]
        return self.run("reader", loss_of, own, supply, minutes)


CARD = """# {name}

A Qwen3-VL of {millions:.2f} million parameters that answers questions about pictures of coloured shapes and digits. It
is kept in the repository so that tests have a trained model that reads images, with nothing to download.

| | |
|---|---|
| architecture | `Qwen3VLForConditionalGeneration`, bfloat16, tied embeddings |
| tower: layers, hidden size, heads | {depth}, {hidden_size}, {num_heads}; DeepStack after the layers 1 and 2 |
| text: layers, hidden size, query heads, key and value heads, head size | {text} |
| pictures | {slot} pixels for each of 2 to 9 slots in rows and columns |
| trained on | {seen:,} pictures of the tower, {read:,} of the language model, with about 8 questions each |
| time | {minutes:g} minutes on {where}; seed {seed}, rate {rate:g} |

## Figures

Answers that are right, word for word, of {count} questions about pictures that training has not seen, computed in
float32 from the weights as saved:

| question | example | right |
|---|---|---|
{table}
| all | | {right} of {count} |

## Making it again

```console
$ python tools/checkpoints/train_seeing.py --minutes {minutes:g} --batch {batch} --rate {rate:g} --seed {seed}
```

The number of steps depends on the speed of the device, so another run gives other weights. It was made with Python
{python}, torch {torch} and transformers {transformers}.
"""


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--output", type=click.Path(path_type=Path), help="The folder to write; one beside this file by default.")
@click.option("--minutes", type=float, default=5.0, show_default=True, help="Time to train, without the measurement.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--batch", type=int, default=256, show_default=True)
@click.option("--rate", type=float, default=2e-3, show_default=True)
@click.option("--workers", type=int, default=5, show_default=True, help="Processes that draw; 0 draws in this one.")
@click.option("--graph/--no-graph", default=True, help="Capture a step as a CUDA graph.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(
    output: Path | None, minutes: float, device: str, batch: int, rate: float, workers: int, graph: bool, seed: int
) -> None:
    output = output or Path(__file__).parents[2] / "checkpoints" / "tiny-pictures"
    torch.set_float32_matmul_precision("high")
    if device != "cpu":
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = new_model(seed).train()
    log(f"{sum(p.numel() for p in model.parameters())} parameters")
    training = Training(model, torch.device(device), rate, seed, output, graph and device != "cpu")
    supply = iter(batches(batch, seed, workers, pinned=device != "cpu"))
    seen = training.seeing(supply, SEEING * minutes)
    read = training.reading(supply, (1 - SEEING) * minutes)
    del supply
    save(model, output)

    # What is measured is what was saved, read back from the files.
    saved = Qwen3VLForConditionalGeneration.from_pretrained(output, dtype=torch.float32).eval().to(device)
    torch.set_float32_matmul_precision("highest")
    questions = held_out_questions(MEASURED)
    given = answers(saved, questions)
    right = [each.answer == answer for each, answer in zip(questions, given, strict=True)]
    lines = []
    for kind in KINDS:
        own = [found for found, each in zip(right, questions, strict=True) if each.kind == kind]
        example = next(each for each in questions if each.kind == kind)
        lines.append(f"| {kind} | {example.text}? {example.answer} | {sum(own)} of {len(own)} |")
        log(lines[-1])
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    card = CARD.format(
        name="tiny-pictures",
        millions=sum(p.numel() for p in saved.parameters()) / 1e6,
        **{each: TOWER[each] for each in ("depth", "hidden_size", "num_heads")},
        text=", ".join(str(TEXT[each]) for each in shape),
        slot=SLOT,
        seen=seen * batch,
        read=read * batch,
        minutes=minutes,
        where="a CPU" if device == "cpu" else f"one {torch.cuda.get_device_name()}",
        seed=seed,
        rate=rate,
        batch=batch,
        count=len(questions),
        table="\n".join(lines),
        right=sum(right),
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
    )
    (output / "README.md").write_text(card, encoding="utf-8")
    size = sum(each.stat().st_size for each in output.iterdir())
    log(f"{output}: {sum(right)} of {len(right)} right, {size} bytes, {seen} + {read} steps")


if __name__ == "__main__":
    main()
