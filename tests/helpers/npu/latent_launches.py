"""Counts the launches of a decode layer with latent attention, and prints the table of docs/reference/npu-launches.md.

    python tests/helpers/npu/latent_launches.py

The models have the published heads, latents and indices, other sizes small, and dense MLPs. Needs the
package installed with its extra ``test``, and no NPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu is imported after its CANN is loaded.

import click  # noqa: E402
import torch  # noqa: E402

import hal  # noqa: E402
from helpers import published_configs  # noqa: E402

BATCH = 8
LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
INDEX = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 64}
GLM = {"qk_nope_head_dim": 192, "v_head_dim": 256, "qk_head_dim": 256, "head_dim": 64, "q_lora_rank": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {"num_attention_heads": 16},
    "DeepSeek-V3": {"num_attention_heads": 128, "q_lora_rank": 1536},
    "DeepSeek-V3.2": {"num_attention_heads": 128, "q_lora_rank": 1536, **INDEX},
    "GLM-5.2": {"num_attention_heads": 64, **INDEX, **GLM, "index_n_heads": 32},
    "Kimi-Linear-48B-A3B-Instruct": {"num_attention_heads": 32},
}
"""By the name of a published config: what differs from its small sizes."""


def _kimi(layers: int, full: range) -> dict[str, Any]:
    kinds = {"full_attn_layers": [*full], "kda_layers": sorted({*range(1, layers + 1)} - {*full})}
    return {"linear_attn_config": {**kinds, "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}}


ROWS: dict[str, tuple[str, Callable[[int], dict[str, Any]], str]] = {
    "DeepSeek-V2-Lite": ("DeepSeek-V2-Lite", lambda layers: {}, ""),
    "DeepSeek-V3": ("DeepSeek-V3", lambda layers: {}, "about 10"),
    "DeepSeek-V3.2": ("DeepSeek-V3.2", lambda layers: {}, "17"),
    "GLM-5.2 with an index": ("GLM-5.2", lambda layers: {"indexer_types": ["full"] * layers}, "17"),
    "GLM-5.2 without an index": (
        "GLM-5.2",
        lambda layers: {"indexer_types": ["full"] + ["shared"] * (layers - 1)},
        "9",
    ),
    "Kimi-Linear, latents": (
        "Kimi-Linear-48B-A3B-Instruct",
        lambda layers: _kimi(layers, range(1, layers + 1)),
        "",
    ),
    "Kimi-Linear, recurrent": ("Kimi-Linear-48B-A3B-Instruct", lambda layers: _kimi(layers, range(1, 2)), ""),
}
"""By the name of a row: the config, what differs with so many layers, and the launches of vllm-ascend's attention."""
OTHERS = 5
"""The launches of a layer in a graph without its attention: two norms with additions, and three of a dense MLP."""
HOST = "FusedInferAttentionScore"
"""The kernels that read lengths on the host, which a replay of a graph replaces, begin so."""


def runner(folder: Path, name: str, backend: str, compiler: str, dtype: str, layers: int, **changes: Any) -> hal.Runner:
    """Return a runner of a model with the published sizes of attention, by default with dense MLPs only."""
    given = {**LATENTS, **MODELS[name], "num_hidden_layers": layers, "first_k_dense_replace": layers, **changes}
    given["num_key_value_heads"] = given["num_attention_heads"]
    path = published_configs.write(folder / f"{name}-{layers}", name, **given)
    config = {"backend": backend, "dtype": dtype, "cache": {"num_tokens": 128 * (BATCH + 1), "num_sequences": BATCH}}
    opened = hal.open({**config, "compilation": {"compiler": compiler, "capture_sizes": [BATCH]}})
    return hal.Runner(hal.load_model(path, opened), opened)


def launches(running: hal.Runner, cached: int = 90) -> Counter[str]:
    """Return the launches of a decode step, by kernel."""
    slots = {"slots": [1 + row for row in range(BATCH)]} if running.states.spec.num_slots else {}
    batch = running.batch(
        [[5 + row] for row in range(BATCH)], [[1 + row] for row in range(BATCH)], cached=[cached] * BATCH, **slots
    )
    running.step(batch)
    with running.backend.counting_launches() as found:
        running.step(batch)
    return Counter(found)


def layer(folder: Path, label: str, compiler: str) -> Counter[str]:
    """Return the launches that a third layer adds, by kernel."""
    name, differing, _ = ROWS[label]
    two, three = (
        launches(runner(folder, name, "npu", compiler, "bfloat16", layers, **differing(layers))) for layers in (2, 3)
    )
    three.subtract(two)
    return Counter({kernel: count for kernel, count in three.items() if count})


def row(folder: Path, label: str) -> str:
    """Return a row in Markdown.

    It has a model, the launches of a layer in eager mode, in a graph, and of its attention, the launches that read
    lengths on the host, and vllm-ascend's.
    """
    eager, graph = (layer(folder / mode, label, mode) for mode in ("eager", "graph"))
    host = sum(count for kernel, count in graph.items() if kernel.startswith(HOST))
    counts = eager.total(), graph.total(), graph.total() - OTHERS, host
    return f"| {label} | {' | '.join(map(str, counts))} | {ROWS[label][2]} |".replace("|  |", "| |")


@click.command(help=str(__doc__).split("\n", maxsplit=1)[0])
@click.argument("names", nargs=-1, type=click.Choice([*ROWS]))
def main(names: tuple[str, ...]) -> None:
    import emulated_cann

    emulated_cann.activate()
    torch.set_num_threads(1)
    for name in names or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            click.echo(row(Path(folder), name))


if __name__ == "__main__":
    main()
