"""Train a model by policy gradient: transformers trains, and hal generates.

Each round generates texts with hal, and compares the log-probabilities of their tokens: those of the generating steps,
those that hal computes of the whole texts, and those of transformers, which the gradient needs. Then hal sleeps, the
weights take a step, and hal wakes with them.

    python tools/rollouts/policy_gradient.py checkpoints/tiny-python --rounds 8
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import hal
from hal.bench.transformers_side import only_imported_extensions  # hal imports torch without vendors' extensions

import torch  # isort: skip
from torch import Tensor  # isort: skip

with only_imported_extensions():
    from transformers import AutoModelForCausalLM

PROMPTS = ("import os\n", "class Stack:\n", "def read(path):\n", "for each in ")
COLUMNS = ("round", "reward", "generated - whole text", "generated - transformers", "MiB given back")


def reward(text: str) -> float:
    """Return the share of lower-case letters in a text."""
    return sum(each.islower() for each in text) / max(1, len(text))


def log_probabilities(model: Any, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
    """Return the log-probabilities of new tokens by transformers, ``[tokens]``, with a gradient."""
    logits = model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0]


def train(folder: Path, rounds: int, samples: int, new_tokens: int, rate: float) -> None:
    """Train, and print a line of the table for each round."""
    torch.manual_seed(0)
    with only_imported_extensions():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # no dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    sampling: dict[str, Any] = {"n": samples, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": new_tokens}
    # The bits of a token's logits do not depend on what else runs, or on how a text is cut into steps.
    config = {"cache": {"num_tokens": 8192}, "numerics": {"invariant": True}}
    with hal.LLM(folder, backend="cpu", dtype="float32", compiler="graph", config=config) as llm:
        prompts = [llm.tokenizer.encode(each).ids for each in PROMPTS]
        click.echo(" | ".join(COLUMNS))
        for number in range(rounds):
            texts = llm.generate(prompts, seed=number, logprobs=0, **sampling)
            pairs = [(list(each.prompt_token_ids), list(each.token_ids)) for each in texts]
            generated = [torch.tensor([token.logprob for token in each.logprobs or ()]) for each in texts]
            whole = llm.log_probabilities(*map(list, zip(*pairs, strict=True)))
            slept = llm.sleep(weights="none")
            rewards = torch.tensor([reward(each.text) for each in texts])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            other = []
            optimizer.zero_grad()
            for (prompt, new), advantage in zip(pairs, advantages, strict=True):
                found = log_probabilities(model, prompt, new)
                (-advantage * found.sum() / len(pairs)).backward()
                other.append(found.detach())
            optimizer.step()
            llm.wake("weights")
            llm.replace_weights(model.state_dict())
            llm.wake("caches")
            first, second = (largest_difference(generated, each) for each in (whole, other))
            given = slept.weights + slept.caches >> 20
            click.echo(f"{number} | {rewards.mean():.3f} | {first:.1e} | {second:.1e} | {given}")


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the largest difference of log-probabilities."""
    return max((one - two).abs().max().item() for one, two in zip(first, second, strict=True))


@click.command(help=__doc__)
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=8)
@click.option("--samples", default=8, help="Texts for each prompt.")
@click.option("--new-tokens", default=24, help="Tokens of a text.")
@click.option("--rate", default=1e-4, help="The learning rate.")
def main(checkpoint: Path, rounds: int, samples: int, new_tokens: int, rate: float) -> None:
    train(checkpoint, rounds, samples, new_tokens, rate)


if __name__ == "__main__":
    main()
