"""Tests of models of transformers on the emulated NPU, unmodified, against the CPU: generation and training.

Also the smallest examples of accelerate and peft, where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
IMAGE = 97
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


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


def test_generation_from_an_image(tmp_path: Path) -> None:
    """Qwen3-VL, loaded onto the device by ``device_map``."""
    torch.manual_seed(0)
    sizes = transformers.Qwen3VLConfig(
        text_config={**SIZES, "rope_parameters": ROTARY}, vision_config=VISION, image_token_id=IMAGE
    )
    transformers.Qwen3VLForConditionalGeneration(sizes).save_pretrained(tmp_path)
    tokens = torch.tensor([[5, 6, *[IMAGE] * 4, 9, 10]])
    inputs = {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": torch.randn(16, 96, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }

    def generated(device: str) -> list[list[int]]:
        model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, device_map=device)
        given = {name: value.to(device) for name, value in inputs.items()}
        return model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0).tolist()

    assert generated("npu") == generated("cpu")


def losses(device: str, model: Any, **options: Any) -> list[float]:
    """Train on a batch of random tokens; return the loss of each step."""
    model = model.to(device)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options))


def train(
    model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
) -> list[float]:
    tokens = torch.randint(SIZES["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(2)).to(model.device)
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
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
    expected = losses("cpu", model_of("Llama", attention), **options)
    assert losses("npu", model_of("Llama", attention), **options) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]


def test_accelerate() -> None:
    """Accelerate finds the NPU, moves the model to it and trains there."""
    accelerator = pytest.importorskip("accelerate", reason="accelerate is not installed").Accelerator()
    model = model_of("Qwen3")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert model.device == torch.device("npu:0")
    assert train(model, optimizer, accelerator.backward) == pytest.approx(losses("cpu", model_of("Qwen3")), rel=1e-3)


def test_peft(tmp_path: Path) -> None:
    """An adapter trains, is saved, and is merged after it was loaded."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted() -> Any:
        return peft.get_peft_model(model_of("Qwen3"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    model = adapted()
    expected = losses("cpu", adapted())
    assert losses("npu", model) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]
    model.save_pretrained(tmp_path)
    tokens = torch.arange(9, device="npu")[None]
    with torch.no_grad():
        wanted = model.eval()(input_ids=tokens).logits
        merged = peft.PeftModel.from_pretrained(model_of("Qwen3").npu(), tmp_path).merge_and_unload().eval()
        torch.testing.assert_close(merged(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-4)
