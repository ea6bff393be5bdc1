"""Train what drafts for a small checkpoint: a head of EAGLE-3 in a folder beside it, or an MTP layer inside it.

    python tools/checkpoints/train_drafter.py eagle3 tiny-python          # writes checkpoints/tiny-python-eagle3
    python tools/checkpoints/train_drafter.py eagle3 tiny-python-hybrid
    python tools/checkpoints/train_drafter.py mtp tiny-python-hybrid      # adds mtp.* to the model's tensors

The model stays as it is. The drafter learns the model's own distributions on the text that the model was trained on,
unrolled over several steps, as it drafts. This takes about a quarter of an hour on two idle cores.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import click
from train import Batches, encode, log, read_library  # imports torch without vendors' extensions

import torch  # isort: skip
import transformers
from drafter_layers import EagleHead, PredictingLayer, Predictor
from muon import Optimizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
STEPS, ROWS, WINDOW, UNROLLED = 700, 8, 256, 3
FADING = 0.8
"""The weight of a step of the chain, relative to the step before."""
CLIP, DECAY, WARM_UP, FULL_UNTIL = 1.0, 0.05, 20, 0.4
DRAFT_VOCABULARY = 2048
"""The tokens that a head of EAGLE-3 can draft: the most frequent ones."""
READ_LAYERS = (1, 2, 3)
"""The layers whose inputs a head of EAGLE-3 reads."""
EVALUATED = 64
"""Windows of held-out text for the figures."""

CARD = """# {title}

{what}: [Draft tokens](../../docs/how-to/draft-tokens.md). It is kept in the
repository so that tests and measurements have drafts that a model often agrees with.

| | |
|---|---|
| parameters | {millions:.2f} million, bfloat16 |
| tokens that it can draft | {vocabulary} |
| trained on | {tokens:.2f} million tokens of the model's training text ({steps} steps), seed {seed} |

On {count} tokens of text that neither has seen, the model's most likely token is the drafter's, at the first,
second and third token of a chain behind right ones: {shares}.

## Making it again

```console
$ python tools/checkpoints/train_drafter.py {command}
```

It was made with Python {python}, torch {torch} and transformers {transformers}.
"""


class Task:
    """A model, what drafts for it, and the losses.

    Args:
        kind: ``eagle3`` or ``mtp``.
        model: the model in transformers' class, in float32.
        frequent: the tokens that a head of EAGLE-3 drafts, ascending.
    """

    def __init__(self, kind: str, model: Any, frequent: Tensor) -> None:
        self.kind, self.model, config = kind, model, model.config
        self.table = model.get_input_embeddings().weight.detach()
        self.head = model.get_output_embeddings().weight.detach()
        self.frequent = frequent
        if kind == "mtp":
            self.drafter: Predictor = PredictingLayer(config)
        else:
            self.drafter = EagleHead(config, len(READ_LAYERS), len(frequent))
            self.drafter.lm_head.weight.data.copy_(self.head[frequent])

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states that the drafter reads, and the model's logits."""
        found = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        # The last of them is behind the model's last norm.
        hidden = found.hidden_states
        return hidden[-1] if self.kind == "mtp" else torch.cat([hidden[each] for each in READ_LAYERS], -1), found.logits

    def unrolled(self, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the drafter's logits of each step, and the model's, at ``[rows, places, vocabulary]``.

        Step ``s`` at place ``p`` predicts what the model says at ``p + 1``.
        """
        hidden, logits = self.read(ids)
        embeddings = functional.embedding(ids[:, 1:], self.table)
        found = self.drafter.unrolled(embeddings, hidden[:, :-1], UNROLLED)
        project = self.head if self.kind == "mtp" else self.drafter.lm_head.weight
        return [functional.linear(each, project) for each in found], logits[:, 1:]

    def loss(self, ids: Tensor) -> Tensor:
        """Return the cross-entropy of the drafter's distributions with the model's."""
        found, wanted = self.unrolled(ids)
        wanted = wanted if self.kind == "mtp" else wanted[..., self.frequent]
        wanted = wanted.softmax(-1)
        total = torch.zeros(())
        for step, logits in enumerate(found):
            nats = -(wanted * logits.log_softmax(-1)).sum(-1)[:, step:]
            total = total + FADING**step * nats.mean()
        return total / sum(FADING**step for step in range(len(found)))

    @torch.no_grad()
    def agreement(self, rows: Tensor) -> list[float]:
        """Return the share of greedy tokens that the drafter predicts, by step, on texts that it did not see."""
        hits, counts = [0] * UNROLLED, [0] * UNROLLED
        for ids in rows.split(ROWS):
            found, wanted = self.unrolled(ids)
            right = wanted.argmax(-1)
            for step, logits in enumerate(found):
                best = logits.argmax(-1)
                best = best if self.kind == "mtp" else self.frequent[best]
                hits[step] += int((best == right)[:, step:].sum())
                counts[step] += right[:, step:].numel()
        return [hit / count for hit, count in zip(hits, counts, strict=True)]


def rate(step: int, steps: int) -> float:
    """Return the share of the full rate: warm up, stay, and fall to zero."""
    return min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps * (1 - FULL_UNTIL)))


def write_eagle(folder: Path, task: Task) -> None:
    """Write a head of EAGLE-3 in the layout of published ones."""
    config = task.model.config
    drafts = torch.zeros(config.vocab_size, dtype=torch.bool)
    drafts[task.frequent] = True
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in task.drafter.state_dict().items()}
    tensors |= {"d2t": task.frequent - torch.arange(len(task.frequent)), "t2d": drafts}
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size")
    written = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16"}
    written |= {key: getattr(config, key) for key in keys}
    written |= {"num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False}
    written |= {"attention_bias": False, "draft_vocab_size": len(task.frequent)}
    written |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(READ_LAYERS)}}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def write_layer(folder: Path, output: Path, task: Task) -> None:
    """Add an MTP layer to the model's tensors."""
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if "mtp." not in name}
    own = {f"mtp.{name}": each.detach().bfloat16().contiguous() for name, each in task.drafter.state_dict().items()}
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors | own, output / "model.safetensors", {"format": "pt"})


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.argument("kind", type=click.Choice(["eagle3", "mtp"]))
@click.argument("name")
@click.option("--output", type=click.Path(path_type=Path), help="The folder to write; by default, as said above.")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
def main(kind: str, name: str, output: Path | None, steps: int, seed: int, threads: int) -> None:
    folder = CHECKPOINTS / name
    output = output or (folder if kind == "mtp" else folder.with_name(f"{name}-eagle3"))
    started = time.perf_counter()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    training, held_out = (encode(tokenizer, texts) for texts in read_library())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    frequent = torch.bincount(training, minlength=model.config.vocab_size).argsort(descending=True, stable=True)
    task = Task(kind, model, frequent[:DRAFT_VOCABULARY].sort().values)
    optimizer = Optimizer(task.drafter, DECAY)
    log(f"{sum(p.numel() for p in task.drafter.parameters())} parameters")
    batches = Batches(training, seed)
    windows = held_out[: EVALUATED * WINDOW].view(EVALUATED, WINDOW)
    total = 0.0
    for step in range(steps):
        ids, _ = batches.take(WINDOW)
        optimizer.zero()
        loss = task.loss(ids[:ROWS])
        loss.backward()
        optimizer.rate.fill_(rate(step, steps))
        optimizer.step(CLIP)
        total += loss.item()
        if (step + 1) % 25 == 0:
            log(f"step {step + 1:5d}/{steps}  loss {total / 25:.3f}  {time.perf_counter() - started:6.1f} s")
            total = 0.0
        if (step + 1) % 100 == 0 or step == steps - 1:
            found = task.agreement(windows)
            log(f"held out: {', '.join(f'{each:.3f}' for each in found)}")
    if kind == "mtp":
        write_layer(folder, output, task)
    else:
        write_eagle(output, task)
    card = CARD.format(
        title=output.name if kind == "eagle3" else f"The MTP layer of {name}",
        what=f"A head of EAGLE-3 that drafts for `{name}`" if kind == "eagle3" else f"`mtp.*` drafts for `{name}`",
        millions=sum(p.numel() for p in task.drafter.parameters()) / 1e6,
        vocabulary=len(task.frequent) if kind == "eagle3" else model.config.vocab_size,
        tokens=steps * ROWS * WINDOW / 1e6,
        steps=steps,
        seed=seed,
        count=windows.numel(),
        shares=", ".join(f"{each:.3f}" for each in found),
        command=f"{kind} {name}" + (f" --steps {steps}" if steps != STEPS else ""),
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
    )
    (output / ("README.md" if kind == "eagle3" else "MTP.md")).write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
