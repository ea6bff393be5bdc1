"""(c) Routed experts: the model stacks their weights, and the checkpoint has one tensor per expert and projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import Attention, Concatenated, Consumer, Linear, MergedLinear, RMSNorm, Stacked, Transposed, Weight
from hal.nn.model import LayerState
from hal.ops import FLOATING, Draw, Sample
from hal.step import Batch

from .model import ToyLM

EXPERTS, CHOSEN, INNER = 4, 2, 16


def _samples(draw: Draw) -> Iterator[Sample]:
    for tokens, experts, width, out in ((1, 4, 24, 16), (5, 3, 16, 24), (9, 4, 24, 32)):
        expert = draw.integers(0, experts, tokens, dtype=torch.int64)
        yield draw.normal(tokens, width), draw.normal(experts, out, width, scale=width**-0.5), expert


@ops.op(
    samples=_samples,
    axes={
        "x": "tokens in_features",
        "weight": "experts out_features in_features",
        "expert": "tokens",
        "return": "tokens out_features",
    },
    dtypes={"x": FLOATING, "weight": "x", "expert": torch.int64, "return": "x"},
    rowwise="tokens",
    weights=("weight",),
    namespace="hal_toys",
)
def expert_linear(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Multiply each token by its expert's matrix, in float32."""
    return torch.einsum("toi,ti->to", weight[expert].float(), x.float()).to(x.dtype)


class Experts(nn.Module):
    """The weighted sum of the chosen experts' results, ``[tokens, width]`` to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = Linear(width, EXPERTS)
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, width), requires_grad=False)
        self.down = nn.Parameter(torch.empty(EXPERTS, width, INNER), requires_grad=False)
        consumer = Consumer("expert_linear", "weight")
        self.weights = {
            "gate_up": Weight(
                tuple(f"experts.{index}.{part}.weight" for index in range(EXPERTS) for part in ("gate", "up")),
                "experts rows width",
                "rows",
                Stacked(Concatenated("rows", (INNER, INNER))),
                consumer,
            ),
            "down": Weight(
                tuple(f"experts.{index}.down_transposed" for index in range(EXPERTS)),
                "experts width columns",
                "columns",
                Stacked(Transposed()),
                consumer,
            ),
        }

    def forward(self, hidden: Tensor) -> Tensor:
        # Minus the best share that is not chosen: where rounding chooses another expert, both have weight 0.
        shares, experts = self.router(hidden).softmax(-1).topk(CHOSEN + 1, dim=-1)
        shares = shares - shares[:, CHOSEN:]
        total = torch.zeros_like(hidden)
        for place in range(CHOSEN):
            gate_up = expert_linear(hidden, self.gate_up, experts[:, place])
            made = expert_linear(ops.silu_and_mul(gate_up), self.down, experts[:, place])
            total = total + made * shares[:, place : place + 1]
        return total


class ExpertsLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.attention_norm, self.experts_norm = RMSNorm(width, 1e-6), RMSNorm(width, 1e-6)
        self.qkv, self.out = MergedLinear(width, dict.fromkeys(("q", "k", "v"), width)), Linear(width, width)
        self.mlp = Experts(width)
        self.attention = Attention(heads, self.head_dim)
        self.states = self.attention.states

    def forward(self, hidden: Tensor, batch: Batch, state: LayerState) -> Tensor:
        heads = self.qkv(self.attention_norm(hidden)).view(-1, 3, self.heads, self.head_dim)
        query, key, value = heads.unbind(1)
        hidden = hidden + self.out(self.attention(query, key, value, batch, state))
        output: Tensor = hidden + self.mlp(self.experts_norm(hidden))
        return output


class ExpertsForCausalLM(ToyLM):
    def layer(self, index: int, width: int, heads: int) -> ExpertsLayer:
        return ExpertsLayer(width, heads)
