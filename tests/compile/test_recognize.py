"""Tests of the recognition of hal's operations in plain torch, without transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.thorough import OPERATION, thorough
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import hal
from hal.compile.recognize import decoder_layers
from hal.compile.recognize.decoder_layers import grouped_experts, routings
from hal.compile.recognize.recognition import empty_parts, masked_assignments
from hal.compile.recognize.rotations import rotations
from hal.compile.rewrite.proof import check_rewrite

REWRITES = (
    decoder_layers.rms_norm,
    decoder_layers.late_rms_norm,
    *rotations,
    decoder_layers.silu_and_mul,
    *decoder_layers.gelu_and_mul,
    decoder_layers.repeated_heads,
    decoder_layers.batched_split,
    *routings,
    *grouped_experts(),
)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def cpu() -> Iterator[hal.Backend]:
    yield hal.open({"backend": "cpu", "dtype": "float32"})
    torch.compiler.reset()


@thorough(OPERATION, r"\[(?!rms_norm|rotary_embedding\]|partial_inter|topk_route\]|experts_of)")
@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda each: each.name)
def test_both_sides_of_a_rewrite_agree(rewrite: hal.compile.rewrite.rewrite.Rewrite) -> None:
    check_rewrite(rewrite, (torch.bfloat16,) if rewrite.name.startswith("experts_of") else DTYPES)


@pytest.mark.parametrize(("start", "removed"), [(8, 1), (4, 0)])
def test_a_concatenation_with_an_empty_part_is_left_out(start: int, removed: int) -> None:
    def half_rotated(x: Tensor) -> Tensor:
        return torch.cat((2 * x[..., :start], x[..., start:]), -1) + 1

    x = torch.arange(24.0).view(3, 8)
    module = make_fx(half_rotated, tracing_mode="fake")(x)
    assert empty_parts(module) == removed
    assert torch.equal(module(x), half_rotated(x))


@pytest.mark.parametrize(("place", "replaced"), [("whole", 1), ("rows", 0), ("one", 0)])
def test_an_assignment_by_a_mask_becomes_a_masked_fill(place: str, replaced: int) -> None:
    def assigned(x: Tensor) -> Tensor:
        places = {"whole": x == 4, "rows": x[:, 0] == 4, "one": x[0].to(torch.int64)}
        filled = x.clone()
        filled[places[place]] = 7
        return filled + 1

    x = torch.arange(24.0).view(6, 4)
    module = make_fx(assigned, tracing_mode="fake")(x)
    assert masked_assignments(module) == replaced
    assert torch.equal(module(x), assigned(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12, False), nn.Linear(8, 12, False), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def test_a_gated_mlp(cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    block = Block()
    compiled = torch.compile(block, backend="hal", fullgraph=True)
    x = torch.randn(3, 5, 8)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), block(x))
    assert "merge_projections: applied at 1 sites" in caplog.text
    assert "linear: applied at 3 sites" in caplog.text
    assert "silu_and_mul: applied at 1 sites" in caplog.text


def test_parts_of_the_recognition_can_be_disabled(cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    block, x = Block(), torch.randn(3, 8)
    options = {"passes": {"merge_projections": False, "linear": True}}
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(block, backend="hal", options=options)(x), block(x))
        assert "merge_projections" not in caplog.text
        torch.compiler.reset()
        caplog.clear()
        options = {"passes": {"linear": False}}
        torch.testing.assert_close(torch.compile(block, backend="hal", options=options)(x), block(x))
        assert "linear" not in caplog.text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dropout_p": 0.5}, "dropout_p is 0.5"),
        ({"attn_mask": torch.zeros(2, 1, 3, 3)}, "mask is float32"),
        ({"attn_mask": torch.ones(2, 4, 3, 3, dtype=torch.bool)}, "mask"),
    ],
)
def test_attention_of_another_form_is_a_near_miss(
    given: dict[str, object], reason: str, cpu: hal.Backend, caplog: pytest.LogCaptureFixture
) -> None:
    def function(q: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, q, q, **given)  # type: ignore[arg-type]

    with torch.inference_mode(), caplog.at_level("WARNING", "hal.compile"):
        torch.compile(function, backend="hal")(torch.randn(2, 4, 3, 8))
    (warning,) = [each for each in caplog.messages if each.startswith("a graph of Dynamo")]
    assert "scaled_dot_product_attention was applied nowhere" in warning
    assert reason in warning


def test_attention_and_embedding(cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(7, 32)

    def function(ids: Tensor, mask: Tensor | None) -> Tensor:
        rows = functional.embedding(ids, weight).unflatten(-1, (4, 8)).transpose(1, 2)
        keys = rows[:, :2, :, None].transpose(2, 3).expand(-1, -1, 2, -1, -1).reshape(rows.shape)
        return functional.scaled_dot_product_attention(rows, keys, keys, mask, is_causal=mask is None)

    ids = torch.randint(7, (3, 5))
    for mask in (None, torch.ones(3, 1, 5, 5, dtype=torch.bool).tril()):
        torch.compiler.reset()
        caplog.clear()
        with torch.inference_mode():
            torch.testing.assert_close(torch.compile(function, backend="hal")(ids, mask), function(ids, mask))
        for name in ("embedding", "scaled_dot_product_attention"):
            assert f"{name}: applied at 1 sites" in caplog.text


def test_gradients_are_kept(cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    block, x = Block(), torch.randn(3, 8)
    with caplog.at_level("WARNING", "hal.compile"):
        torch.compile(block, backend="hal")(x).sum().backward()
    assert "no operation is recognized, because a parameter requires grad" in caplog.text
    found = [each.grad for each in block.parameters()]
    block.zero_grad()
    block(x).sum().backward()
    torch.testing.assert_close(found, [each.grad for each in block.parameters()])


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 4), nn.Linear(8, 6), nn.Linear(8, 2, False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.first(x), self.second(x), self.third(x)


def test_biases_are_merged_too(cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    block, x = Biased(), torch.randn(2, 3, 8)
    with torch.inference_mode():
        compiled = torch.compile(block, backend="hal", dynamic=True)
        for size in (2, 5):
            torch.testing.assert_close(compiled(x[:, :size]), block(x[:, :size]))
    assert "merge_projections: applied at 1 sites" in caplog.text
