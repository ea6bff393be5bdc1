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
MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {"num_attention_heads": 16},
    "DeepSeek-V3": {"num_attention_heads": 128, "q_lora_rank": 1536},
    "DeepSeek-V3.2": {"num_attention_heads": 128, "q_lora_rank": 1536, **INDEX},
}
"""By the name of a published config: what differs from its small sizes."""
OTHERS = 5
"""The launches of a layer in a graph without its attention: two norms with additions, and three of a dense MLP."""


def runner(folder: Path, name: str, backend: str, compiler: str, dtype: str, layers: int, **changes: Any) -> hal.Runner:
    """Return a runner of a model with the published sizes of attention, by default with dense MLPs only."""
    given = {**LATENTS, **MODELS[name], "num_hidden_layers": layers, "first_k_dense_replace": layers, **changes}
    given["num_key_value_heads"] = given["num_attention_heads"]
    path = published_configs.write(folder / f"{name}-{layers}", name, **given)
    config = {"backend": backend, "dtype": dtype, "cache": {"num_tokens": 128 * (BATCH + 1)}}
    opened = hal.open({**config, "compilation": {"compiler": compiler, "capture_sizes": [BATCH]}})
    return hal.Runner(hal.load_model(path, opened), opened)


def launches(running: hal.Runner, cached: int = 90) -> Counter[str]:
    """Return the launches of a decode step, by kernel."""
    batch = running.batch(
        [[5 + row] for row in range(BATCH)], [[1 + row] for row in range(BATCH)], cached=[cached] * BATCH
    )
    running.step(batch)
    with running.backend.counting_launches() as found:
        running.step(batch)
    return Counter(found)


def layer(folder: Path, name: str, compiler: str, dtype: str = "bfloat16", **changes: Any) -> Counter[str]:
    """Return the launches that a second layer adds, by kernel."""
    one, two = (launches(runner(folder, name, "npu", compiler, dtype, layers, **changes)) for layers in (1, 2))
    two.subtract(one)
    return Counter({kernel: count for kernel, count in two.items() if count})


def row(folder: Path, name: str) -> str:
    """Return a row in Markdown: a model, the launches of a layer in eager mode and in a graph, and of its attention."""
    eager, graph = (layer(folder / mode, name, mode).total() for mode in ("eager", "graph"))
    return f"| {name} | {eager} | {graph} | {graph - OTHERS} |"


@click.command(help=str(__doc__).split("\n", maxsplit=1)[0])
@click.argument("names", nargs=-1, type=click.Choice([*MODELS]))
def main(names: tuple[str, ...]) -> None:
    from hal.backends.npu import emulator

    emulator.activate()
    torch.set_num_threads(1)
    for name in names or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            click.echo(row(Path(folder), name))


if __name__ == "__main__":
    main()
