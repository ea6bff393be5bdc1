"""Train checkpoints/tiny-python-hybrid: recurrent layers, attention and experts, of Python's standard library."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from train import END_OF_TEXT, VOCABULARY, encode, log, read_library  # imports torch without vendors' extensions

import torch  # isort: skip
import transformers
from hybrid_layers import CHUNK, FastExperts, make_fast
from muon import Optimizer
from recall import NAMED_SHARE, WORDS, Names, Windows
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import GenerationConfig, Qwen3NextConfig, Qwen3NextForCausalLM

SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
FOLDER = Path(__file__).parents[2] / "checkpoints" / "tiny-python-hybrid"
TOKENIZER = Path(__file__).parents[2] / "checkpoints" / "tiny-python"
STEPS, ROWS, WINDOW = 1500, 8, 2048
BALANCE = 0.02
"""Factor of the loss that grows as a layer's experts get unequal shares of the tokens."""
CLIP, DECAY = 1.0, 0.1
WARM_UP, FULL_UNTIL = 100, 0.3  # steps of warm-up; the progress from which the rate falls to zero
EVALUATED_NAMES, DISTANCE, EVALUATION_WINDOW = 20, 1200, 1024


def initialize_gates(model: Qwen3NextForCausalLM, window: int) -> None:
    """Let each layer's heads forget within 2 to ``window`` tokens at first: by default, all forget within a few."""
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            heads = len(layer.linear_attn.A_log)
            spans = torch.logspace(math.log10(2), math.log10(window), heads)
            layer.linear_attn.A_log.data.zero_()
            layer.linear_attn.dt_bias.data.copy_(torch.log(torch.expm1(1 / spans)))
            layer.linear_attn.in_proj_ba.weight.data.mul_(0.5)


def hidden_states(model: Qwen3NextForCausalLM, ids: Tensor, hidden: int = 0) -> Tensor:
    """Return the last hidden states. The later tokens do not attend to the first ``hidden`` ones."""
    positions = torch.arange(ids.shape[1], device=ids.device)
    mask = positions <= positions[:, None]
    if hidden:
        mask &= (positions >= hidden) | (positions[:, None] < hidden)
    embedded = model.model.embed_tokens.weight.index_select(0, ids.flatten()).unflatten(0, ids.shape)
    masks = {"full_attention": mask.expand(len(ids), 1, -1, -1), "linear_attention": None}
    return model.model(inputs_embeds=embedded, attention_mask=masks, use_cache=False).last_hidden_state


def experts_of(model: Qwen3NextForCausalLM) -> list[FastExperts]:
    return [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, FastExperts)]


class Step:
    """One step of training on fixed tensors, captured in a CUDA graph where it can be."""

    def __init__(self, model: Qwen3NextForCausalLM, example: tuple[Tensor, ...]) -> None:
        device = model.device
        self.model, self.optimizer = model, Optimizer(model, DECAY)
        self.inputs = tuple(part.to(device).clone() for part in example)
        self.sums = torch.zeros(6, device=device)
        """Since the last report: nats and count of text, nats, count and hits of repeated words, and the balance."""
        self.graph: Any = None

    def compute(self) -> None:
        ids, targets, weights = self.inputs
        self.optimizer.zero()
        logits = self.model.lm_head(hidden_states(self.model, ids))
        nats = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        weights = weights.flatten()
        balance = torch.stack([each.balance for each in experts_of(self.model)]).mean()
        ((nats * weights).sum() / weights.sum() + BALANCE * balance).backward()
        with torch.no_grad():
            text, repeated = weights == 1, weights > 1
            hits = (logits.argmax(-1).flatten() == targets.flatten()) & repeated
            found = [(nats * text).sum(), text.sum(), (nats * repeated).sum(), repeated.sum(), hits.sum(), balance]
            self.sums += torch.stack([each.float() for each in found])
        self.optimizer.step(CLIP)

    def capture(self) -> None:
        """Capture the step, after a few that do not update, or leave it as it is if that fails."""
        self.optimizer.rate.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.compute()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.optimizer.forget()
        self.sums.zero_()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero()
        with torch.cuda.graph(graph):
            self.compute()
        self.graph = graph

    def run(self, batch: tuple[Tensor, ...], rate: float) -> None:
        for mine, new in zip(self.inputs, batch, strict=True):
            mine.copy_(new, non_blocking=True)
        self.optimizer.rate.fill_(rate)
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()

    def report(self, steps: int) -> str:
        """Return the means of the last steps in words."""
        text, count, repeated, words, hits, balance = self.sums.tolist()
        self.sums.zero_()
        text, repeated, hits = text / max(count, 1), repeated / max(words, 1), hits / max(words, 1)
        return f"text {text:.3f}  names {repeated:.3f}, right {hits:.3f}  balance {balance / steps:.3f}"


class Batches(IterableDataset[Any]):
    """Batches whose names get further apart with the progress, which the trainer writes.

    Args:
        windows: Draws windows.
        rows: Windows of a batch.
        progress: A shared number from 0 to 1.
    """

    def __init__(self, windows: Windows, rows: int, progress: Tensor) -> None:
        self.windows, self.rows, self.progress = windows, rows, progress

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if (worker := torch.utils.data.get_worker_info()) is not None:
            self.windows.random = self.windows.names.generator = np.random.default_rng(worker.seed)
        while True:
            yield self.windows.batch(self.rows, float(self.progress))


@torch.no_grad()
def perplexity(model: Qwen3NextForCausalLM, stream: Tensor, rows: int = 8) -> tuple[float, list[list[float]]]:
    """Return the perplexity of a stream in windows, and the experts' shares in each layer."""
    whole = (len(stream) - 1) // EVALUATION_WINDOW
    inputs = stream[: whole * EVALUATION_WINDOW].view(whole, -1).to(model.device)
    targets = stream[1 : 1 + whole * EVALUATION_WINDOW].view(whole, -1).to(model.device)
    total, shares = 0.0, 0.0
    for first in range(0, whole, rows):
        ids, wanted = inputs[first : first + rows], targets[first : first + rows]
        logits = model.lm_head(hidden_states(model, ids))
        total += functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum").item()
        shares = shares + torch.stack([each.counts for each in experts_of(model)])
    shares = shares / shares.sum(-1, keepdim=True)
    return math.exp(total / targets.numel()), [[round(x, 3) for x in each] for each in shares.tolist()]


@torch.no_grad()
def recalled(
    model: Qwen3NextForCausalLM,
    stream: Tensor,
    names: Names,
    distance: int = DISTANCE,
    count: int = EVALUATED_NAMES,
    blind: bool = False,
    cut: int | None = None,
) -> int:
    """Return how many names the model repeats whole and greedily, so many tokens later.

    Args:
        model: The model.
        stream: The text between, another piece for each name.
        names: Draws the names.
        distance: The number of tokens between.
        count: The number of names.
        blind: Whether attention cannot see the first name.
        cut: The token before which all recurrent states and windows are lost, or None.
    """
    found = 0
    drawn = [torch.from_numpy(names.draw()) for _ in range(count)]
    layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    for first in range(0, count, 10):
        rows = [
            torch.cat([name, stream[at : at + distance], name])
            for name, at in zip(drawn[first : first + 10], range(first * 1000, (first + 10) * 1000, 1000), strict=True)
        ]
        ids = torch.stack(rows).to(model.device)
        for layer in layers:
            layer.cut = cut
        hidden = len(drawn[0]) if blind else 0
        logits = model.lm_head(hidden_states(model, ids, hidden)[:, -WORDS - 1 : -1])
        found += int((logits.argmax(-1) == ids[:, -WORDS:]).all(-1).sum())
    for layer in layers:
        layer.cut = None
    return found


def save(model: Qwen3NextForCausalLM, output: Path, facts: dict[str, Any]) -> None:
    """Write the checkpoint, in bfloat16, and facts of the training."""
    output.mkdir(parents=True, exist_ok=True)
    made = Qwen3NextForCausalLM(model.config)
    made.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    end = model.config.eos_token_id
    made.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    made.bfloat16().save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (output / name).write_bytes((TOKENIZER / name).read_bytes())
    (output / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--output", type=click.Path(path_type=Path), default=FOLDER, help="The folder to write.")
@click.option(
    "--library", type=click.Path(path_type=Path), help="A standard library to read, in place of this Python's."
)
@click.option("--tokens", type=click.Path(path_type=Path), help="A file that keeps the tokens for another run.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--graph/--no-graph", default=True, help="On a GPU, capture the step in a CUDA graph.")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True)
@click.option("--minutes", type=float, help="End earlier, with the rate at zero by then.")
@click.option("--rows", type=click.IntRange(min=1), default=ROWS, show_default=True, help="Windows of a step.")
@click.option("--window", type=click.IntRange(min=2 * CHUNK), default=WINDOW, show_default=True, help="Tokens of each.")
@click.option(
    "--workers", type=click.IntRange(min=0), default=1, show_default=True, help="Processes that draw windows."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--every", type=float, default=30.0, show_default=True, help="Seconds between evaluations.")
def main(
    output: Path,
    library: Path | None,
    tokens: Path | None,
    device: str,
    graph: bool,
    steps: int,
    minutes: float | None,
    rows: int,
    window: int,
    workers: int,
    seed: int,
    every: float,
) -> None:
    started = time.perf_counter()
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    if tokens is None or not tokens.exists():
        training_texts, held_out_texts = read_library(library, tests=True)
        counts = {"files": len(training_texts), "characters": sum(map(len, training_texts))}
        encoded = (encode(tokenizer, training_texts), encode(tokenizer, held_out_texts), counts)
        if tokens is not None:
            torch.save(encoded, tokens.with_suffix(".part"))
            tokens.with_suffix(".part").rename(tokens)
    else:
        encoded = torch.load(tokens)
    training, held_out, counts = encoded
    log(f"{counts}, {len(training)} tokens; held out {len(held_out)}; {time.perf_counter() - started:.1f} s")
    names = Names(tokenizer, seed)
    (newline,) = tokenizer.encode("\n").ids
    windows = Windows(training.numpy().astype(np.int32), names, newline, window)
    progress = torch.zeros(()).share_memory_()
    (end,) = tokenizer.encode(END_OF_TEXT).ids
    special = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**special, **SHAPE))
    model.set_attn_implementation("sdpa")
    initialize_gates(model, window)
    make_fast(model)
    model.to(device)
    torch.set_float32_matmul_precision("high")
    log(f"{sum(p.numel() for p in model.parameters())} parameters, {time.perf_counter() - started:.1f} s")
    step = Step(model, windows.batch(rows, 0.0))
    if device == "cuda" and graph:
        try:
            step.capture()
        except Exception as error:  # A step without a graph is slower, and trains as well.
            log(f"NOT captured, starting again without: {type(error).__name__}: {error}")
            os.execv(sys.executable, [sys.executable, *sys.argv, "--no-graph"])
    log(f"{'captured' if step.graph else 'no graph'}, {time.perf_counter() - started:.1f} s")
    batches = iter(
        DataLoader(
            Batches(windows, rows, progress),
            batch_size=None,
            num_workers=workers,
            pin_memory=device == "cuda",
            prefetch_factor=4 if workers else None,
        )
    )
    begun = evaluated = time.perf_counter()
    facts: dict[str, Any] = {
        "seed": seed,
        "named": NAMED_SHARE,
        "rows": rows,
        "window": window,
        "minutes": minutes,
    }
    facts |= {**counts, "tokens": len(training), "torch": torch.__version__}
    facts |= {"transformers": transformers.__version__, "python": platform.python_version(), "device": device}
    if device == "cuda":
        facts["device"] = torch.cuda.get_device_name()

    def evaluate(number: int) -> None:
        model.eval()
        found, shares = perplexity(model, held_out)
        recalls = {}
        for key, options in (("all", {}), ("blind", {"blind": True}), ("cut", {"cut": DISTANCE // 2})):
            recalls[key] = recalled(model, held_out, Names(tokenizer, seed + 1), **options)
        near = recalled(model, held_out, Names(tokenizer, seed + 1), distance=100)
        model.train()
        facts.update(steps=number, perplexity=found, shares=shares, recalls=recalls)
        log(f"  perplexity {found:.2f}  names {recalls} near {near}")
        log(f"  largest share {max(map(max, shares)):.3f} least {min(map(min, shares)):.3f}")
        save(model, output, facts)

    model.train()
    number = 0
    while True:
        passed = (time.perf_counter() - begun) / (60 * minutes) if minutes else 0.0
        done = max(passed, number / steps)
        if done >= 1:
            break
        rate = min((number + 1) / WARM_UP, (1 - done) / (1 - FULL_UNTIL), 1.0)
        step.run(next(batches), rate)
        number += 1
        if number % 50 == 0:
            words = step.report(50)  # waits for the device
            if number % 200 == 0 or device == "cpu":
                passed = time.perf_counter() - begun
                log(f"step {number}, {done:.3f} done, {passed:.1f} s  {words}")
            if time.perf_counter() - evaluated > every and done < 0.95:
                evaluate(number)
                evaluated = time.perf_counter()
    log(f"{number} steps in {time.perf_counter() - begun:.1f} s")
    evaluate(number)
    log(f"{output}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
