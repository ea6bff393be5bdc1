"""Compare a rollout in bfloat16 with a pass in float32 that chooses experts again, or replays those of the rollout.

The differences are those of the log-probabilities of the generated tokens.

    python tools/rollouts/replayed_experts.py checkpoints/tiny-python-moe
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import hal

import torch  # isort: skip  # hal imports torch without vendors' extensions
from torch import Tensor  # isort: skip

PROMPTS = ("import os\n", "class Stack:\n", "def read(path):\n", "for each in ")


def compare(folder: Path, samples: int, new_tokens: int) -> None:
    """Generate texts, score them twice, and print the differences."""
    sampling: dict[str, Any] = {"n": samples, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": new_tokens}
    options: dict[str, Any] = {"backend": "cpu", "compiler": "graph", "config": {"cache": {"num_tokens": 8192}}}
    with hal.LLM(folder, dtype="bfloat16", record=["experts"], **options) as rollout:
        prompts = [rollout.tokenizer.encode(each).ids for each in PROMPTS]
        texts = rollout.generate(prompts, seed=0, logprobs=0, **sampling)
    pairs = [list(each.prompt_token_ids) for each in texts], [list(each.token_ids) for each in texts]
    generated = torch.tensor([token.logprob for text in texts for token in text.logprobs or ()])
    with hal.LLM(folder, dtype="float32", record=["experts"], replay=["experts"], **options) as other:
        own = torch.cat(other.log_probabilities(*pairs))
        replayed = torch.cat(other.log_probabilities(*pairs, choices=[each.choices for each in texts]))
        # What float32 chooses for the same tokens: the choices behind a text that is generated of them.
        whole = [[*prompt, *new] for prompt, new in zip(*pairs, strict=True)]
        chosen = [each.choices["experts"] for each in other.generate(whole, max_new_tokens=1)]
    pieces = [(text.choices["experts"], each[:-1]) for text, each in zip(texts, chosen, strict=True)]
    differ = torch.cat([(one.sort(-1).values != two.sort(-1).values).any(-1).flatten() for one, two in pieces])
    click.echo(f"{len(generated)} tokens; {differ.float().mean():.2%} of the choices in a layer differ")
    click.echo("experts | mean difference | largest difference")
    for name, found in (("chosen again", own), ("replayed", replayed)):
        difference: Tensor = (found - generated).abs()
        click.echo(f"{name} | {difference.mean():.1e} | {difference.max():.1e}")


@click.command(help=__doc__)
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--samples", default=32, help="Texts for each prompt.")
@click.option("--new-tokens", default=96, help="Tokens of a text.")
def main(checkpoint: Path, samples: int, new_tokens: int) -> None:
    compare(checkpoint, samples, new_tokens)


if __name__ == "__main__":
    main()
