"""Small random models of transformers, of families that hal has too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hal import ops

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Llama": {},
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen3Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}
"""By the name of the class without ForCausalLM, what its configuration has beside :data:`SIZES`."""


def model_of(family: str, *, layers: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any) -> Any:
    """Return a random model in evaluation mode, whose logits depend on every weight."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **FAMILIES[family], "num_hidden_layers": layers, **sizes}
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * values if "norm" in name else values * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts without the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def generate(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Return the greedy continuations of prompts, as one batch that is padded on the left."""
    widest = max(map(len, prompts))
    padded = [[0] * (widest - len(each)) + list(each) for each in prompts]
    seen = [[0] * (widest - len(each)) + [1] * len(each) for each in prompts]
    device = next(model.parameters()).device
    with torch.inference_mode():
        made = model.generate(
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor(seen, device=device),
            do_sample=False,
            max_new_tokens=tokens,
        )
    return [row[widest:] for row in made.tolist()]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of hal's operations in the block, by name."""
    counts: Counter[str] = Counter()

    def wrapped(operation: Any, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[operation.name] += 1
            return kernel(*args, **kwargs)

        return call

    with ops.intercepted(wrapped):
        yield counts
