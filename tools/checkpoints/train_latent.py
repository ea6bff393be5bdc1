"""Train checkpoints/tiny-python-latent: latent attention whose tokens attend to what an index selects.

    python tools/checkpoints/train_latent.py                        # writes checkpoints/tiny-python-latent
    python tools/checkpoints/train_latent.py --output DIR --scale 0.05  # a quick trial somewhere else

It runs on one core. Windows get longer from stage to stage. In the last stage, tokens attend to what the index selects.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
from train import END_OF_TEXT, VOCABULARY, encode, log, read_library  # imports torch without vendors' extensions

import torch  # isort: skip
import transformers
from latent_layers import TrainedAttention, make_trained
from lookups import VALUE, Lookups
from muon import Optimizer
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GenerationConfig

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 64,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
"""Latents, rotary rows and index keys have the published sizes, the only ones that some accelerators' operators take.

All layers are dense, so the keys of the experts keep their defaults.
"""
FOLDER = Path(__file__).parents[2] / "checkpoints" / "tiny-python-latent"
TOKENIZER = Path(__file__).parents[2] / "checkpoints" / "tiny-python"
CLIP, DECAY = 1.0, 0.1
WARM_UP, FULL_UNTIL = 50, 0.4  # steps of warm-up; the progress from which the rate falls to zero
EMBEDDED, MATCHED = 0.2, 1.5  # the first size of embeddings, and of weights that compare tokens
LOCAL, LOCAL_PAIRS = 2.5, 8  # the first weights of heads that attend to the token before, and their rotated pairs
DISTANCE, ASKED, EVALUATED = 2000, 8, 4  # tokens between, records of a text, and texts


@attrs.frozen
class Stage:
    """A part of the training.

    Attributes:
        steps: The number of steps.
        rows: Windows of a step.
        window: Tokens of a window.
        share: The most of a window's tokens in records.
        text: The weight of the other tokens in the loss.
        sparse: Whether tokens attend to what the index selects.
    """

    steps: int
    rows: int
    window: int
    share: float = 0.5
    text: float = 1.0
    sparse: bool = False


STAGES = (
    Stage(250, 4, 256),
    Stage(150, 2, 512),
    Stage(120, 1, 1024),
    Stage(80, 1, 2304),
    Stage(160, 1, 2304, sparse=True),
)


def initialize_lookup(model: DeepseekV32ForCausalLM) -> None:
    """Let the first two heads of both layers look up, at first, what followed the last token before.

    An embedding is in the lower half of the elements, and its first element is the same for all. Heads of the first
    layer attend to the token before, and copy it into the upper half. Heads of the second compare that to the token
    itself, and add the tokens that they find to the lower half. Each head has one block of a half.

    Short trials from random weights, of 175 to 425 steps, did not learn this.
    """
    config, attentions = model.config, [layer.self_attn for layer in model.model.layers]
    first, second = attentions
    block, rotary, half = config.v_head_dim, config.qk_rope_head_dim, config.hidden_size // 2
    embedding = model.model.embed_tokens.weight.data
    embedding.mul_(EMBEDDED / config.initializer_range)
    embedding[:, half:] = 0
    embedding[:, 0] = 5 * EMBEDDED
    for attention in attentions:
        attention.q_a_proj.weight.data[:half] = torch.eye(half, config.hidden_size)
        attention.kv_a_proj_with_mqa.weight.data[: config.hidden_size] = torch.eye(config.hidden_size)
    frequencies = model.model.rotary_emb.inv_freq[:LOCAL_PAIRS]
    keys = first.kv_a_proj_with_mqa.weight.data[-rotary:][: 2 * LOCAL_PAIRS]
    keys[:] = 0
    keys[::2, 0] = LOCAL
    # The query is that of the position before: each pair adds the cosine of its frequency and the distance from there.
    turned = torch.stack([frequencies.cos(), -frequencies.sin()], 1).flatten()
    for head in range(half // block):
        lower, upper = slice(head * block, (head + 1) * block), slice(half + head * block, half + (head + 1) * block)
        previous, same = (each.q_b_proj.weight.data.unflatten(0, (-1, each.qk_head_dim))[head] for each in attentions)
        previous[block : block + len(turned), 0] = LOCAL / 2 * turned
        same[:block, lower] = MATCHED * torch.eye(block)
        second.kv_b_proj.weight.data.unflatten(0, (-1, 2, block))[head, 0, :, upper] = MATCHED * torch.eye(block)
        for attention, target, gain in ((first, upper, 0.3), (second, lower, 0.8)):
            attention.kv_b_proj.weight.data.unflatten(0, (-1, 2, block))[head, 1, :, lower] = gain * torch.eye(block)
            attention.o_proj.weight.data[target, lower] = gain * torch.eye(block)


def hidden_states(model: DeepseekV32ForCausalLM, ids: Tensor) -> Tensor:
    """Return the last hidden states. The layers need no mask."""
    masks = {"indexed_attention": None}
    return model.model(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state


@torch.no_grad()
def looked_up(model: DeepseekV32ForCausalLM, lookups: Lookups, stream: np.ndarray, texts: int = EVALUATED) -> float:
    """Return the share of records whose value the model gives whole, DISTANCE tokens of another text later."""
    found = 0
    for number in range(texts):
        tokens, asked = lookups.asked(stream[number * DISTANCE :][:DISTANCE], ASKED)
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits = model.lm_head(hidden_states(model, ids[:, :-1])[0, -asked.size :])
        right = logits.argmax(-1).numpy().reshape(asked.shape)[:, -VALUE:] == asked[:, -VALUE:]
        found += int(right.all(-1).sum())
    return found / (texts * ASKED)


def save(model: DeepseekV32ForCausalLM, output: Path, facts: dict[str, Any]) -> None:
    """Write the checkpoint, in bfloat16, and facts of the training."""
    output.mkdir(parents=True, exist_ok=True)
    made = DeepseekV32ForCausalLM(model.config)
    made.load_state_dict(model.state_dict())
    end = model.config.eos_token_id
    made.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    made.bfloat16().save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (output / name).write_bytes((TOKENIZER / name).read_bytes())
    (output / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


class Training:
    """Trains a model on windows of text with records.

    Args:
        model: The model.
        lookups: Draws the windows.
    """

    def __init__(self, model: DeepseekV32ForCausalLM, lookups: Lookups) -> None:
        self.model, self.lookups = model, lookups
        self.attention: list[TrainedAttention] = make_trained(model)
        self.optimizer = Optimizer(model, DECAY)
        self.sums = torch.zeros(6)
        """Since the last report: nats and count of text, nats, count and hits of asked words, and the index's loss."""

    def step(self, stage: Stage, rate: float) -> None:
        """Update the model once, with a share of the full rates."""
        for layer in self.attention:
            layer.sparse = stage.sparse
        ids, targets, weights = self.lookups.batch(stage.rows, stage.window, stage.share)
        weights = torch.where(weights == 1, stage.text, weights)
        counted = weights > 0
        targets, weights = targets[counted], weights[counted]
        self.optimizer.zero()
        logits = self.model.lm_head(hidden_states(self.model, ids)[counted])
        nats = functional.cross_entropy(logits, targets, reduction="none")
        index = torch.stack([layer.loss for layer in self.attention]).sum()
        ((nats * weights).sum() / weights.sum() + index).backward()
        with torch.no_grad():
            text, asked = weights <= 1, weights > 1
            hits = (logits.argmax(-1) == targets) & asked
            found = [nats[text].sum(), text.sum(), nats[asked].sum(), asked.sum(), hits.sum(), index]
            self.sums += torch.stack([each.float() for each in found])
        self.optimizer.rate.fill_(rate)
        self.optimizer.step(CLIP)

    def evaluate(self, lookups: Lookups, stream: np.ndarray) -> dict[str, float]:
        """Return the share of records that the model looks up in each kind of attention."""
        found = {}
        for name, sparse in (("dense", False), ("sparse", True)):
            for layer in self.attention:
                layer.sparse = sparse
            found[name] = looked_up(self.model, lookups, stream)
        return found

    def report(self, steps: int) -> str:
        """Return the means of the last steps in words."""
        text, count, asked, words, hits, index = self.sums.tolist()
        self.sums.zero_()
        text, asked, hits = text / max(count, 1), asked / max(words, 1), hits / max(words, 1)
        return f"text {text:.3f}  asked {asked:.3f}, right {hits:.3f}  index {index / steps:.3f}"


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--output", type=click.Path(path_type=Path), default=FOLDER, help="The folder to write.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Factor of the steps of all stages.")
@click.option("--minutes", type=float, help="End earlier, with the rate at zero by then.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--every", type=click.IntRange(min=1), default=200, show_default=True, help="Steps between evaluations.")
def main(output: Path, scale: float, minutes: float | None, seed: int, every: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    training_texts, held_out_texts = read_library()
    training, held_out = (
        encode(tokenizer, texts).numpy().astype(np.int32) for texts in (training_texts, held_out_texts)
    )
    (end,) = tokenizer.encode(END_OF_TEXT).ids
    special = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    model = DeepseekV32ForCausalLM(DeepseekV32Config(**special, **SHAPE))
    initialize_lookup(model)
    run = Training(model, Lookups(training, tokenizer, seed))
    plan = [stage for stage in STAGES for _ in range(max(1, round(scale * stage.steps)))]
    log(f"{sum(p.numel() for p in model.parameters())} parameters, {len(training)} tokens, {len(plan)} steps")
    facts: dict[str, Any] = {"seed": seed, "limit": minutes}
    facts |= {"files": len(training_texts), "characters": sum(map(len, training_texts)), "tokens": len(training)}
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    started, done, taken = time.perf_counter(), 0.0, Counter[Stage]()
    while done < 1:
        stage = plan[int(done * len(plan))]
        taken[stage] += 1
        number = taken.total()
        run.step(stage, min(number / WARM_UP, (1 - done) / (1 - FULL_UNTIL), 1.0))
        passed = (time.perf_counter() - started) / 60
        done = max(passed / minutes if minutes else 0.0, number / len(plan))
        if number % 25 == 0:
            log(f"step {number}, {done:.3f} done, window {stage.window}, {passed:.2f} min  {run.report(25)}")
        if number % every == 0 or done >= 1:
            found = run.evaluate(Lookups(held_out, tokenizer, seed + 1), held_out)
            log(f"  looked up {found}")
            stages = [attrs.asdict(attrs.evolve(stage, steps=steps)) for stage, steps in taken.items()]
            facts |= {"stages": stages, "minutes": round(passed, 1), "looked_up": found}
            save(model, output, facts)


if __name__ == "__main__":
    main()
