"""A two-layer transformer on an NPU: decoding over a paged KV cache, eager, in an NPUGraph, and through npugraph_ex.

    python decoder.py [float16 | bfloat16]

Each mode decodes the same steps; the CPU does them in float32, from the same weights. Prints one line a mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch_npu
from torch import Tensor, nn
from torch.nn import functional

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 2, 128, 4, 2, 32, 256, 97
BATCH, BLOCK, BLOCKS_EACH = 3, 128, 3
LIMIT = BLOCK * BLOCKS_EACH
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

Lengths = list[int]


class Layer(nn.Module):
    """Attention and a gated MLP, with a norm before each."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.Parameter(torch.rand(HIDDEN) + 0.5), nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        cache = torch.randn(2, BATCH * BLOCKS_EACH, BLOCK, KV_HEADS * HEAD_DIM)  # stands for the result of a prefill
        self.register_buffer("key_cache", cache[0].contiguous())
        self.register_buffer("value_cache", cache[1].contiguous())

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, block_table: Tensor, lengths: Lengths
    ) -> Tensor:
        normed = torch_npu.npu_rms_norm(hidden, self.input_norm, 1e-6)[0]
        q, k, v = self.qkv(normed).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=-1)
        q = torch_npu.npu_rotary_mul(q.reshape(-1, 1, HEADS, HEAD_DIM), cos, sin).reshape(-1, 1, HEADS * HEAD_DIM)
        k = torch_npu.npu_rotary_mul(k.reshape(-1, 1, KV_HEADS, HEAD_DIM), cos, sin).reshape(-1, KV_HEADS * HEAD_DIM)
        torch_npu.npu_scatter_nd_update_(self.key_cache.view(-1, KV_HEADS * HEAD_DIM), slots, k)
        torch_npu.npu_scatter_nd_update_(self.value_cache.view(-1, KV_HEADS * HEAD_DIM), slots, v)
        attended = torch_npu.npu_fused_infer_attention_score(
            q,
            self.key_cache,
            self.value_cache,
            actual_seq_lengths_kv=lengths,
            block_table=block_table,
            num_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            scale=HEAD_DIM**-0.5,
            input_layout="BSH",
            block_size=BLOCK,
        )[0]
        hidden = hidden + self.out(attended.reshape(-1, HEADS * HEAD_DIM))
        normed = torch_npu.npu_rms_norm(hidden, self.post_norm, 1e-6)[0]
        return hidden + self.down(torch_npu.npu_swiglu(self.gate_up(normed)))

    def on_cpu(self, hidden: Tensor, position: int, row: int) -> Tensor:
        """Compute the layer for one sequence in float32 with plain torch operations on its pages of the cache."""
        pages = slice(row * BLOCKS_EACH, (row + 1) * BLOCKS_EACH)
        keys, values = (each[pages].reshape(LIMIT, KV_HEADS, HEAD_DIM) for each in (self.key_cache, self.value_cache))
        normed = functional.rms_norm(hidden, (HIDDEN,), self.input_norm, 1e-6)
        q, k, v = self.qkv(normed).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
        cos, sin = (table[position] for table in rope_tables())
        keys[position] = rotate(k.view(KV_HEADS, HEAD_DIM), cos, sin)
        values[position] = v.view(KV_HEADS, HEAD_DIM)
        attended = functional.scaled_dot_product_attention(
            rotate(q.view(HEADS, 1, HEAD_DIM), cos, sin),
            keys[: position + 1].transpose(0, 1),
            values[: position + 1].transpose(0, 1),
            enable_gqa=True,
        )
        hidden = hidden + self.out(attended.reshape(-1))
        gate, up = self.gate_up(functional.rms_norm(hidden, (HIDDEN,), self.post_norm, 1e-6)).chunk(2)
        return hidden + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):
    """One decode step: one token per sequence in, logits out. It writes the caches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for name, table in zip(("cos", "sin"), rope_tables(), strict=True):
            self.register_buffer(name, table)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, lengths: Lengths
    ) -> Tensor:
        hidden = self.embedding(tokens)
        cos, sin = (table[positions].view(-1, 1, 1, HEAD_DIM) for table in (self.cos, self.sin))
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, slots, block_table, lengths)
        return self.head(hidden)

    def on_cpu(self, tokens: Tensor, lengths: Lengths) -> Tensor:
        rows = []
        for row, (token, length) in enumerate(zip(tokens, lengths, strict=True)):
            hidden = self.embedding(token)
            for layer in self.layers:
                hidden = layer.on_cpu(hidden, length - 1, row)
            rows.append(self.head(hidden))
        return torch.stack(rows)


def rope_tables() -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(LIMIT)[:, None] * torch.cat((frequencies, frequencies))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Inputs:
    """The inputs of a step on the device, at fixed addresses."""

    def __init__(self) -> None:
        self.tokens = torch.zeros(BATCH, dtype=torch.int64, device="npu")
        self.positions = torch.zeros(BATCH, dtype=torch.int64, device="npu")
        self.slots = torch.zeros(BATCH, 1, dtype=torch.int64, device="npu")
        pages = torch.arange(BATCH * BLOCKS_EACH, dtype=torch.int32).view(BATCH, BLOCKS_EACH)
        self.block_table = pages.npu()

    def fill(self, tokens: Tensor, lengths: Lengths) -> None:
        positions = torch.tensor(lengths) - 1
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.slots.copy_((torch.arange(BATCH) * LIMIT + positions)[:, None])

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.positions, self.slots, self.block_table


def steps(count: int, seed: int = 0) -> Iterator[tuple[Tensor, Lengths]]:
    """Return tokens and lengths.

    Lengths differ between sequences and jump between steps, so stale ones are detected.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = (torch.randperm(LIMIT - 2, generator=generator)[:BATCH] + 2).tolist()
        yield torch.randint(VOCAB, (BATCH,), generator=generator), lengths


def models(dtype: torch.dtype, seed: int = 0) -> tuple[Decoder, Decoder]:
    """Return two copies of a model: in float32 on the CPU and in ``dtype`` on the NPU.

    ``dtype`` holds the weights exactly.
    """
    torch.manual_seed(seed)
    on_cpu = Decoder().to(dtype).float().requires_grad_(False)
    on_npu = Decoder().requires_grad_(False)
    on_npu.load_state_dict(on_cpu.state_dict())
    return on_cpu, on_npu.to(dtype).npu()


Step = Callable[[Tensor, Lengths], Tensor]


def eager(model: Decoder, inputs: Inputs) -> Step:
    def step(tokens: Tensor, lengths: Lengths) -> Tensor:
        inputs.fill(tokens, lengths)
        return model(*inputs.all(), lengths)

    return step


class Graph:
    """A graph captured once. Each replay gets new lengths, before it starts or while it runs."""

    def __init__(self, model: Decoder, inputs: Inputs, update_first: bool) -> None:
        self.inputs, self.update_first = inputs, update_first
        lengths = [2] * BATCH
        inputs.fill(torch.zeros(BATCH, dtype=torch.int64), lengths)
        caches = {name: buffer.clone() for name, buffer in model.named_buffers() if "cache" in name}
        model(*inputs.all(), lengths)  # warm-up
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph, auto_dispatch_capture=True):
            self.logits = model(*inputs.all(), lengths)
        for name, buffer in caches.items():
            model.get_buffer(name).copy_(buffer)

    def __call__(self, tokens: Tensor, lengths: Lengths) -> Tensor:
        self.inputs.fill(tokens, lengths)
        if self.update_first:
            self.update(lengths)
            self.graph.replay()
        else:
            self.graph.replay()
            self.update(lengths)
        return self.logits.clone()

    def update(self, lengths: Lengths) -> None:
        self.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])


def compiled(model: Decoder, inputs: Inputs) -> Step:
    step_of = torch.compile(model, backend="npugraph_ex", dynamic=True, fullgraph=True)

    def step(tokens: Tensor, lengths: Lengths) -> Tensor:
        inputs.fill(tokens, lengths)
        return step_of(*inputs.all(), lengths).clone()

    return step


MODES: dict[str, Callable[[Decoder, Inputs], Step]] = {
    "eager": eager,
    "graph, updated before its replay": lambda model, inputs: Graph(model, inputs, update_first=True),
    "graph, updated after its replay": lambda model, inputs: Graph(model, inputs, update_first=False),
    "npugraph_ex": compiled,
}


@torch.inference_mode()
def worst_error(mode: str, dtype: torch.dtype, count: int = 5, seed: int = 0) -> float:
    """Decode some steps in a mode; return the largest difference from the CPU relative to the largest logit."""
    reference, model = models(dtype, seed)
    step = MODES[mode](model, Inputs())
    worst = 0.0
    for tokens, lengths in steps(count, seed):
        expected = reference.on_cpu(tokens, lengths)
        result = step(tokens, lengths).float().cpu()
        worst = max(worst, ((result - expected).abs().max() / expected.abs().max()).item())
    return worst


def main() -> None:
    dtype = getattr(torch, sys.argv[1]) if len(sys.argv) > 1 else torch.float16
    errors = {mode: worst_error(mode, dtype) for mode in MODES}
    for mode, error in errors.items():
        print(f"{mode}: {error:.1e}")  # noqa: T201
    assert max(errors.values()) < TOLERANCE[dtype], errors


if __name__ == "__main__":
    main()
