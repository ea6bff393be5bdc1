"""Compares a family's logits with those of Hugging Face transformers, on random checkpoints.

Tests of a family draw configurations and share the rest: weights, files in every spelling, sequences, and batches.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import hal
from hal.step import ALL
from helpers.reference import open_runner
from helpers.toys import poison_of

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

TOLERANCE = 1e-4
"""Maximum difference of float32 logits, relative to the largest logit."""
STEPS = 16
ROPES = ("default", "linear", "llama3", "yarn")
"""The types that :func:`draw_rope` draws. ``longrope`` has a number for each pair."""
COMPILERS = ("eager", "graph", "inductor")
"""The modes of the CPU whose logits are compared."""


@attrs.frozen
class Case:
    """A random checkpoint, its model in transformers, and sequences to run: the last STEPS tokens of each are decoded.

    ``blocks`` are each sequence's blocks, ``cuts`` the tokens that are cached before a prefill that continues, and
    ``model_class`` our class, if it is not the registered one.
    """

    path: Path
    model: Any
    sequences: list[list[int]]
    block_size: int
    blocks: list[list[int]]
    cuts: list[int]
    model_class: type[hal.nn.CausalLM] | None = None

    def runner(self, compiler: str = "eager", path: Path | None = None) -> hal.Runner:
        """Return a runner whose cache has exactly the needed blocks, filled with NaN to detect reads before writes."""
        num_tokens = sum(map(len, self.blocks)) * self.block_size
        runner = open_runner(
            path or self.path,
            compiler,
            num_tokens=num_tokens,
            block_size=self.block_size,
            model_class=self.model_class,
        )
        empty(runner)
        return runner

    def difference(
        self, compiler: str = "eager", *, path: Path | None = None, cuts: Sequence[int] | None = None
    ) -> float:
        """Return the largest difference of our logits from those of transformers, which run each sequence alone."""
        theirs = [their_logits(self.model, sequence) for sequence in self.sequences]
        return difference(our_logits(self.runner(compiler, path), self, cuts=cuts), theirs)

    def rewritten(self, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
        """Return a copy of the checkpoint in a folder, with another config.json."""
        return rewritten(self.path, folder, change)


def rewritten(path: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a copy of a checkpoint in a folder, with another config.json."""
    shutil.copytree(path, folder / "wrong")
    config = json.loads((path / "config.json").read_text())
    change(config)
    (folder / "wrong" / "config.json").write_text(json.dumps(config))
    return folder / "wrong"


def empty(runner: hal.Runner) -> None:
    """Fill the cache with NaN, and with numbers of no token."""
    with torch.inference_mode():
        for _, cache in runner.states.tensors():
            cache[1:] = poison_of(cache)


def draw_rope(draw: random.Random, rope_type: str) -> dict[str, Any]:
    """Draw rope parameters of a type, such that each affects sequences of a few dozen tokens."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": draw.choice((100.0, 1e4, 5e5))}
    if rope_type != "default":
        rope["factor"] = draw.choice((1.0, 2.0, 2.5, 8.0, 40.0))
    if rope_type in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw.choice((16, 32, 64))
    if rope_type == "llama3":
        rope["low_freq_factor"], rope["high_freq_factor"] = draw.choice((0.5, 1.0)), draw.choice((2.0, 4.0))
    if rope_type == "yarn":
        optional: dict[str, tuple[Any, ...]] = {
            "attention_factor": (0.9, 1.2),
            "beta_fast": (8.0, 32, None),
            "beta_slow": (0.5, 1, None),
            "truncate": (True, False),
            "mscale": (0.7, 1.0),
            "mscale_all_dim": (0.0, 0.5),
        }
        rope |= {key: draw.choice(values) for key, values in optional.items() if draw.random() < 0.5}
    return rope


def randomize(model: Any, seed: int) -> None:
    """Initialize every parameter so that a misplaced, misread or omitted one is detected."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.4 * values
        elif name.endswith("bias"):
            values *= 0.5
        elif "embed" in name:
            values *= 0.1  # Small, so that the first norms depend on epsilon.
        elif parameter.dim() > 1:
            values *= parameter.shape[1] ** -0.5
        parameter.data.copy_(values)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("tid2eid"):  # distinct experts for each token
            experts = model.get_submodule(name.rpartition(".")[0]).num_experts
            order = torch.rand(len(buffer), experts, generator=generator).argsort(1)
            buffer.copy_(order[:, : buffer.shape[1]])
        elif name.endswith("layer_scalar"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def spell_as_before_version_5(config: dict[str, Any], draw: random.Random) -> None:
    """Rewrite a config.json as older checkpoints have it, without the keys that newer versions of transformers add."""
    rope = config.pop("rope_parameters")
    config["rope_theta"], rope_type = rope.pop("rope_theta"), rope.pop("rope_type")
    if (part := rope.pop("partial_rotary_factor", None)) is not None:
        config["partial_rotary_factor"] = part
    config["rope_scaling"] = None
    if rope_type != "default":
        config["rope_scaling"] = {draw.choice(("type", "rope_type")): rope_type, **rope}
    config["torch_dtype"] = config.pop("dtype")


def their_model(config: Any) -> Any:
    """Return the model of a configuration in transformers; Glm5Next has none for texts alone."""
    images = config.model_type == "glm5_next"
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    return auto.from_config(config).eval()


def build(
    config: Any, seed: int, path: Path, older: Callable[[dict[str, Any], random.Random], None] | None = None
) -> Case:
    """Write a random checkpoint of ``config`` to ``path``, sharded half of the time.

    ``older``, if given, rewrites its config.json half of the time, in the spelling of older checkpoints.
    """
    draw = random.Random(1000 + seed)
    model = their_model(config)
    randomize(model, seed)
    sharded = draw.random() < 0.5
    model.save_pretrained(path, max_shard_size="20KB" if sharded else "1GB")
    assert (path / "model.safetensors.index.json").exists() == sharded
    if older is not None and draw.random() < 0.5:
        keys = json.loads((path / "config.json").read_text())
        older(keys, draw)
        (path / "config.json").write_text(json.dumps(keys))

    count, block_size = draw.choice((3, 5, 6, 7)), draw.choice((1, 4, 7, 16))  # not a bucket
    text = config.get_text_config()
    if any(hasattr(text, key) for key in ("compress_rates", "index_kpool", "indexer_compress_ratio")):
        block_size = 16  # a multiple of the tokens of a group
    lengths = [draw.randint(1, 45) for _ in range(count)]
    lengths[-1] = 45  # longer than every window
    sequences = [[draw.randrange(text.vocab_size) for _ in range(length + STEPS)] for length in lengths]
    cuts = [draw.randrange(length) for length in lengths]
    needed = [math.ceil(len(sequence) / block_size) for sequence in sequences]
    # Half of the sequences have adjacent blocks, half have random ones.
    free = list(range(1, sum(needed) + 1))
    blocks = [[free.pop(0) for _ in range(number)] for number in needed[: count // 2]]
    draw.shuffle(free)
    blocks += [[free.pop() for _ in range(number)] for number in needed[count // 2 :]]
    return Case(path, model, sequences, block_size, blocks, cuts)


def their_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits ``[tokens, vocab_size]`` of one sequence, run alone in one forward."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def their_hidden(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the hidden states ``[tokens, width]`` of one sequence, of which its logits are computed."""
    with torch.inference_mode():
        hidden: Tensor = model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return hidden


def our_logits(runner: hal.Runner, case: Case, *, cuts: Sequence[int] | None = None) -> list[Tensor]:
    """Return our logits of every sequence of ``case``; see :func:`our_outputs`."""
    return our_outputs(runner, case, cuts=cuts)[0]


def our_outputs(
    runner: hal.Runner, case: Case, *, cuts: Sequence[int] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return our logits and hidden states of every sequence, batched: prefill, from ``cuts`` on if given, then decode.

    Each sequence starts to decode one step after the previous one, so that batches of all sizes occur and rows move.
    Every second step asks for its rows of logits in a random order, and for one of them twice.
    """
    orders, steps = torch.Generator().manual_seed(7), itertools.count()
    count = len(case.sequences)
    ends = [len(sequence) - STEPS for sequence in case.sequences]
    logits: list[list[Tensor]] = [[] for _ in range(count)]
    hidden: list[list[Tensor]] = [[] for _ in range(count)]
    slots = runner.slots.take(count) if runner.slots.needed else None

    def run(starts: Sequence[int], stops: Sequence[int]) -> None:
        rows = [row for row in range(count) if starts[row] < stops[row]]
        new = [case.sequences[row][starts[row] : stops[row]] for row in rows]
        in_slots = {} if slots is None else {"slots": [slots[row] for row in rows]}
        batch = runner.batch(new, [case.blocks[row] for row in rows], cached=[starts[row] for row in rows], **in_slots)
        if next(steps) % 2:
            output = runner.step(batch, ALL)
            found = output.logits
        else:
            order = torch.randperm(batch.num_tokens, generator=orders)
            output = runner.step(batch, torch.cat((order, order[:1])))
            assert output.logits.shape[0] == batch.num_tokens + 1
            found = output.logits[order.argsort()]
            torch.testing.assert_close(output.logits[-1], output.logits[0])
        for parts, tensor in ((logits, found), (hidden, output.hidden_states)):
            # A copy: those of a replay are valid until the next one.
            for row, part in zip(rows, tensor.clone().split([len(tokens) for tokens in new]), strict=True):
                parts[row].append(part)

    starts = [0] * count
    if cuts is not None:
        run(starts, cuts)
        starts = list(cuts)
    run(starts, ends)
    for step in range(STEPS + count - 1):
        decoding = [0 <= step - row < STEPS for row in range(count)]
        starts = [end + step - row for row, end in enumerate(ends)]
        run(starts, [start + new for start, new in zip(starts, decoding, strict=True)])
    runner.slots.give_back(slots or ())
    return [torch.cat(part) for part in logits], [torch.cat(part) for part in hidden]


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference relative to the sequence's largest logit; NaN counts as infinite."""
    return max(
        float(((a - b).abs().amax() / b.abs().amax()).nan_to_num(math.inf)) for a, b in zip(ours, theirs, strict=True)
    )
