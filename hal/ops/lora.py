"""Low-rank adapters (LoRA): what the adapters of a batch's tokens add to the output of a projection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op

NO_ADAPTER = -1
"""The slot of tokens without an adapter."""


def _lora_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, slots, rank, width, parts in (
        (1, 1, 4, 64, "0:96"),
        (7, 3, 8, 48, "0:64 1:32 2:32"),
        (19, 8, 16, 128, "0:40 1:24 0:17"),
        (0, 2, 2, 32, "0:16"),
        (5, 4, 3, 33, "0:7 1:5"),
    ):
        runs = part_runs(parts)
        count, out = 1 + max(part for part, _ in runs), sum(size for _, size in runs)
        lora_a = draw.normal(slots, count, rank, width, scale=width**-0.5)
        lora_b = draw.normal(slots, rank, out, scale=rank**-0.5)
        chosen = draw.integers(NO_ADAPTER, slots, tokens, dtype=torch.int32)
        yield draw.normal(tokens, out), draw.normal(tokens, width), lora_a, lora_b, chosen, parts
        if tokens == 19:
            alike = torch.full_like(chosen, slots - 1)  # as a prompt's tokens have
            yield draw.normal(out, tokens).t(), draw.normal(width, tokens).t(), lora_a, lora_b, alike, parts
            none = torch.full_like(chosen, NO_ADAPTER)
            yield draw.normal(tokens, out), draw.normal(tokens, width), lora_a, lora_b, none, parts


@op(
    samples=_lora_samples,
    axes={
        "output": "tokens out_features",
        "x": "tokens in_features",
        "lora_a": "num_adapters num_parts rank in_features",
        "lora_b": "num_adapters rank out_features",
        "slots": "tokens",
        "return": "tokens out_features",
    },
    dtypes={
        "output": FLOATING,
        "x": "output",
        "lora_a": "output",
        "lora_b": "output",
        "slots": torch.int32,
        "return": "output",
    },
    rowwise="tokens",
    tolerance={torch.bfloat16: (1.6e-2, 4e-2), torch.float16: (2e-3, 5e-3)},
)
def add_lora(output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, slots: Tensor, parts: str) -> Tensor:
    """Return ``output + (x @ A.T) @ B`` for each token, with A and B of the token's adapter.

    Accumulated in float32, and rounded once; a kernel may round ``x @ A.T`` and the second product, too. A token of the
    slot -1 keeps its output. Which adapters other tokens have does not matter.

    Several projections of one input that are merged have an A each, and B has their rows side by side.

    Args:
        output: ``[tokens, out_features]``, floating: the projection's.
        x: ``[tokens, in_features]``: the projection's input.
        lora_a: ``[num_adapters, num_parts, rank, in_features]``: A of each slot and part.
        lora_b: ``[num_adapters, rank, out_features]``: B of each slot, transposed, times the adapter's scale.
        slots: ``[tokens]``, int32: each token's slot; -1 for no adapter.
        parts: which part of A each run of ``out_features`` reads, and the run's length, in order, such as
            ``"0:64 1:32"``.

    Returns:
        ``[tokens, out_features]``, of the dtype of ``output``.

    Source: Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, 2021.
    """
    numbers = slot_numbers(lora_a.shape[0], slots.device)
    wide = output.float(), x.float(), lora_a.float(), lora_b.float()
    return compose(*wide, slots, parts, numbers).to(output.dtype)


def slot_numbers(count: int, device: torch.device) -> Tensor:
    """Return the numbers of so many slots, ``[count]``, int32."""
    return torch.arange(count, dtype=torch.int32, device=device)


def compose(
    output: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    slots: Tensor,
    parts: str,
    numbers: Tensor,
) -> Tensor:
    """Compute :func:`add_lora` with two matrix products, in the dtype of ``output``, without copies of A and B.

    The products are with all slots, and with all columns of B for each part; each token keeps its own slot's, and each
    run the columns of its part. So shapes do not depend on values.

    Args:
        numbers: of :func:`slot_numbers`, for all slots.
    """
    count, num_parts, rank, _ = lora_a.shape
    inner = functional.linear(x, lora_a.flatten(0, 2)).view(x.shape[0], count, num_parts, rank)
    others = (slots[:, None] != numbers)[:, :, None, None]
    inner.masked_fill_(others, 0.0)
    b = lora_b.flatten(0, 1)
    if num_parts == 1:
        return torch.addmm(output, inner.flatten(1), b)
    products = (inner.permute(2, 0, 1, 3).reshape(num_parts * x.shape[0], count * rank) @ b).unflatten(
        0, (num_parts, -1)
    )
    pieces, start = [], 0
    for part, size in part_runs(parts):
        pieces.append(products[part, :, start : start + size])
        start += size
    return output + torch.cat(pieces, dim=-1)


@lru_cache(maxsize=256)
def part_runs(parts: str) -> tuple[tuple[int, int], ...]:
    """Return the part and the length of each run of ``parts``; see :func:`add_lora`."""
    runs = [run.partition(":") for run in parts.split()]
    return tuple((int(part), int(size)) for part, _, size in runs)
