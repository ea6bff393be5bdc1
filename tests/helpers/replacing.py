"""Two checkpoints of one architecture with other weights, and what a runner generates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hal
from helpers import quantized
from helpers.checkpoints import EXPERTS, random_checkpoint

KINDS: Mapping[str, dict[str, Any]] = {
    "tied": {},
    "biased": {"tie_word_embeddings": False, "attention_bias": True},
    "experts": EXPERTS,
}
PROMPTS = ([5, 6, 7], list(range(40, 80)), [9] * 17)


def two_checkpoints(folder: Path, kind: str, **overrides: Any) -> tuple[Path, Path]:
    """Return two checkpoints of a kind: a key of :data:`KINDS`, or the format and the scheme of a quantization."""
    made = []
    for seed in (1, 2):
        if kind in KINDS:
            made.append(random_checkpoint(folder / str(seed), seed=seed, **{**KINDS[kind], **overrides}))
            continue
        form, scheme, *experts = kind.split("/")
        given = {**(EXPERTS if experts else {}), **overrides}
        pair = quantized.make_pair(folder / str(seed), form, scheme, offset=-7 * seed, seed=seed, **given)  # type: ignore[arg-type]
        made.append(pair.folder)
    return made[0], made[1]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint."""
    return quantized.all_tensors(folder)


def generated(runner: hal.Runner, new: int = 6) -> list[list[int]]:
    """Return the tokens after each prompt."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    for token in hal.generate(runner, [list(each) for each in PROMPTS], hal.SamplingParams(max_new_tokens=new)):
        found[token.prompt_index].append(token.token_id)
    return found


def logits(runner: hal.Runner) -> Tensor:
    """Return the logits of two prompts, and of a decode step after them."""
    needed = [runner.blocks.take(runner.spec.blocks_for(64)) or [] for _ in range(2)]
    rows = [runner.step(runner.batch([[5, 6, 7], list(range(40, 60))], needed)).logits.clone()]
    rows.append(runner.step(runner.batch([[8], [9]], needed, cached=[3, 20])).logits.clone())
    for blocks in needed:
        runner.blocks.give_back(blocks)
    return torch.cat(rows).float().cpu()
