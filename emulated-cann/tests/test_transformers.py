"""Tests of models of transformers on the emulated NPU, unmodified, against the CPU: generation and training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.thorough import DTYPE, FAMILY, thorough

transformers = pytest.importorskip("transformers", reason="the test extra is not installed")

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
FAMILIES = {"Qwen3": {}, "Qwen3Moe": EXPERTS, "Llama": {}}
STEPS = 20


def model_of(family: str, attention: str = "sdpa") -> Any:
    """Return a small model with random weights, the same in each call."""
    torch.manual_seed(0)
    sizes = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], attn_implementation=attention)
    return getattr(transformers, f"{family}ForCausalLM")(sizes)


@thorough(DTYPE, "float16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation(family: str, dtype: torch.dtype) -> None:
    """The first prompt is padded on the left."""
    model = model_of(family).to(dtype).eval()
    tokens = torch.randint(SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0

    def generated(device: str) -> list[list[int]]:
        inputs = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
        found = model.to(device).generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
        return found.tolist()

    assert generated("npu") == generated("cpu")


def losses(device: str, attention: str, **options: Any) -> list[float]:
    """Train on a batch of random tokens; return the loss of each step."""
    model = model_of("Llama", attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    tokens = torch.randint(SIZES["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(2)).to(device)
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@thorough(FAMILY, "eager|fused|one")
@pytest.mark.parametrize(
    ("attention", "options"),
    [
        pytest.param("sdpa", {}, id="sdpa-lists"),
        pytest.param("eager", {"foreach": False}, id="eager-one-by-one"),
        pytest.param("sdpa", {"fused": True}, id="sdpa-fused"),
    ],
)
def test_training(attention: str, options: dict[str, Any]) -> None:
    """The losses are the CPU's, and fall."""
    expected = losses("cpu", attention, **options)
    assert losses("npu", attention, **options) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]
