"""Measures a compiled step against a hand-written function that calls the same kernels. Prints a JSON object.

A Qwen3 of 28 narrow layers runs one decode step of one sequence on the CPU, so that most of the time is Python. Times
are medians in microseconds over rounds in which the three variants alternate. ``hand_us`` is the hand-written function,
``compiled_us`` the lowered one, and ``model_us`` the model's own Python code; ``operations`` is the number of kernels
and views in the hand-written one.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from hal.backends.cpu.driver import CpuBackend
from helpers.large_checkpoint import write
from torch import Tensor

import hal

LAYERS, ROUNDS, ROWS = 28, 150, 2


def hand_written(model: Any, backend: CpuBackend, caches: Any) -> Callable[[hal.step.Batch], Tensor]:
    """Return a hand-written step for this model and these kernels, without lookups at run time."""
    kernels: Any = backend.kernels
    embedding, linear, rms_norm = kernels["embedding"], kernels["linear"], kernels["rms_norm"]
    add_rms_norm, silu_and_mul = kernels["add_rms_norm"], kernels["silu_and_mul"]
    rotary_embedding, store_kv_cache = kernels["rotary_embedding"], kernels["store_kv_cache"]
    paged_attention = kernels["paged_attention"]
    decoder, layers = model.model, model.model.layers
    first = layers[0].self_attn
    kv_heads, head_dim = first.attention.num_kv_heads, first.head_dim
    heads = first.o_proj.in_features // head_dim
    queries, keys = heads * head_dim, kv_heads * head_dim
    both, scale, eps = queries + keys, head_dim**-0.5, layers[0].input_layernorm.eps
    inv_freq = decoder.rotary.rope.inv_freq(head_dim, torch.device("cpu"))
    table, final = decoder.embed_tokens.weight, decoder.norm.weight
    projection = table if decoder.embed_tokens.projection is None else decoder.embed_tokens.projection
    weights = [
        (
            each.input_layernorm.weight,
            each.self_attn.qkv_proj.weight,
            each.self_attn.q_norm.weight,
            each.self_attn.k_norm.weight,
            each.self_attn.o_proj.weight,
            each.post_attention_layernorm.weight,
            each.mlp.gate_up_proj.weight,
            each.mlp.down_proj.weight,
            cache["key"],
            cache["value"],
        )
        for each, cache in zip(layers, caches, strict=True)
    ]
    weights = [
        (*each, following) for each, following in zip(weights, [*(w[0] for w in weights[1:]), final], strict=True)
    ]

    options = hal.ops.AttentionOptions(scale)

    def step(batch: hal.step.Batch) -> Tensor:
        slots, table_of_blocks, starts = batch.slot_mapping, batch.block_table, batch.query_start_loc
        lens, starts_host, lens_host = batch.kv_lens, batch.query_start_loc_host, batch.kv_lens_host
        hidden = embedding(batch.token_ids, table)
        angles = (batch.positions.float().view(-1, 1) * inv_freq).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        normed = rms_norm(hidden, weights[0][0], eps)
        for _, qkv, q_norm, k_norm, out, post, gate_up, down, key_cache, value_cache, following in weights:
            projected = linear(normed, qkv, None)
            query = rms_norm(projected.narrow(1, 0, queries).view(-1, heads, head_dim), q_norm, eps)
            key = rms_norm(projected.narrow(1, queries, keys).view(-1, kv_heads, head_dim), k_norm, eps)
            query, key = rotary_embedding(query, key, cos, sin)
            value = projected.narrow(1, both, keys).view(-1, kv_heads, head_dim)
            store_kv_cache(key, value, key_cache, value_cache, slots)
            attended = paged_attention(
                query, key_cache, value_cache, table_of_blocks, starts, lens, starts_host, lens_host, None, options
            )
            normed, hidden = add_rms_norm(linear(attended.view(-1, queries), out, None), hidden, post, eps)
            normed, hidden = add_rms_norm(
                linear(silu_and_mul(linear(normed, gate_up, None)), down, None), hidden, following, eps
            )
        return normed, linear(normed, projection, None)

    return step


def elapsed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


@torch.inference_mode()
def main() -> None:
    from hal.execution.context import FormContext
    from hal.execution.optimized_model import OptimizedModel
    from hal.step import StepShape

    torch.set_num_threads(1)
    backend = hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 256}})
    assert isinstance(backend, CpuBackend)
    with tempfile.TemporaryDirectory() as folder:
        write(
            Path(folder),
            num_hidden_layers=LAYERS,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=256,
            dtype=torch.float32,
        )
        model = hal.load_model(folder, backend)
    runner = hal.Runner(model, backend)
    caches = runner.states.layers
    blocks = [[1 + row] for row in range(ROWS)]
    runner.step(runner.batch([[5] * 20] * ROWS, blocks))
    batch = runner.batch([[7]] * ROWS, blocks, cached=[20] * ROWS)
    optimized = OptimizedModel(
        FormContext(model, backend, runner.states, backend.config.compilation, "decode", None, model.max_length)
    )
    lowered, tensors = optimized.prepare(StepShape.uniform(ROWS)), batch.tensors()
    hand = hand_written(model, backend, caches)
    ways: dict[str, Callable[[], object]] = {
        "hand_us": lambda: hand(batch),
        "compiled_us": lambda: lowered(*tensors),
        "model_us": lambda: model(batch, caches),
    }
    (found,) = lowered(*tensors)
    difference = float((found - hand(batch)).abs().max() / found.abs().max())
    figures: dict[str, list[float]] = {name: [] for name in ways}
    draw = random.Random(0)
    for _ in range(ROUNDS):
        for name in draw.sample(sorted(ways), len(ways)):
            figures[name].append(elapsed(ways[name]))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratios = [one / other for one, other in zip(figures["compiled_us"], figures["hand_us"], strict=True)]
    operations = 4 + LAYERS * 17 + 4
    sys.stdout.write(
        json.dumps(
            {
                **medians,
                "compiled_over_hand": statistics.median(ratios),
                "operations": operations,
                "difference": difference,
            }
        )
    )


if __name__ == "__main__":
    main()
