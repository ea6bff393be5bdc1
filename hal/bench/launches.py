"""The number of kernels that a step launches, per layer and outside the layers, on a backend that counts them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from hal.bench.bench_errors import BenchmarkError
from hal.bench.hal_side import HalSide
from hal.bench.plan import Setting
from hal.bench.workload import Inputs
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import shrink
from hal.checkpoint.random_weights import RandomCheckpoint, meta_model

PEERS: Mapping[str, int] = {"SGLang 0.5.23, Qwen3, graph mode": 10}
"""Kernels that other implementations launch per decode layer in bfloat16, according to their sources.

SGLang: two norms with their additions, four projections, split with norms and rope, the cache write, attention, swiglu.
"""


@attrs.frozen
class Launches:
    """The kernel launches of one step.

    Attributes:
        contender: name, as in the table of times.
        batch_size: number of sequences.
        layer: launches per layer by kernel: those that a second layer adds to a model of one.
        outside: other launches by kernel: inputs, embedding, final norm, logits, peculiarities of the first layer.
    """

    contender: str
    batch_size: int
    layer: Counter[str]
    outside: Counter[str]

    @property
    def per_layer(self) -> int:
        """Return the number of launches per layer."""
        return self.layer.total()


def count(setting: Setting, say: Callable[[str], None]) -> list[Launches]:
    """Count the launches of a step, with models of one and of two layers (the checkpoint's first ones).

    Raises:
        ConfigError: the backend cannot count launches.
        BenchmarkError: ``num_hidden_layers`` does not set the model's number of layers.
    """
    steps: list[dict[tuple[int, str], Counter[str]]] = []
    for layers in (1, 2):
        say(f"counting the launches of a model of {layers} {'layer' if layers == 1 else 'layers'}")
        steps.append(_steps(_cut(setting, layers)))
    found = []
    for (size, contender), one in steps[0].items():
        layer = _difference(steps[1][size, contender], one)
        found.append(Launches(contender, size, layer, _difference(one, layer)))
    return found


def _difference(more: Counter[str], less: Counter[str]) -> Counter[str]:
    result = more.copy()
    result.subtract(less)  # `-` drops negative counts, such as a kernel that only the first layer launches
    return Counter({name: number for name, number in result.items() if number})


def _steps(setting: Setting) -> dict[tuple[int, str], Counter[str]]:
    side, found = HalSide(setting), {}
    for size in dict.fromkeys(setting.plan.batch_sizes):
        for mode in side.modes:
            contender = side.contender(mode, Inputs(setting, size))
            contender.reset()
            contender.step()
            contender.reset()
            setting.backend.device.synchronize()
            with setting.backend.counting_launches() as launches:
                contender.step()
            contender.close()
            found[size, contender.name] = Counter(launches)
    return found


def config_of_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a config.json for the first layers of a model, or of its text model."""
    if isinstance(text := config.get("text_config"), Mapping):
        return {**config, "text_config": config_of_layers(text, layers)}
    cut: dict[str, Any] = {**config, "num_hidden_layers": layers}
    if types := cut.get("layer_types"):
        cut["layer_types"] = [types[min(index, len(types) - 1)] for index in range(layers)]
    return cut


def _cut(setting: Setting, layers: int) -> Setting:
    config = config_of_layers(setting.checkpoint.config, layers)
    kept = {name: value for name, value in config.items() if name in setting.checkpoint.model_config}
    meta = meta_model(kept, setting.backend.config.model_source)
    if len(meta.states) != layers:
        raise BenchmarkError(
            f"--trace needs a model of {layers} layers, but num_hidden_layers={layers} gives {len(meta.states)}",
            "omit --trace",
        )
    if (mesh := setting.backend.mesh).size > 1:
        shrink(meta, mesh)
    checkpoint = setting.checkpoint
    if isinstance(checkpoint, RandomCheckpoint):
        cut: Checkpoint = RandomCheckpoint.of(Path(setting.plan.name).name, config)
    else:
        kept = {name: info for name, info in checkpoint.tensors.items() if _layer_of(name) < layers}
        cut = attrs.evolve(checkpoint, config=config, tensors=kept)
    return attrs.evolve(setting, checkpoint=cut, meta=meta)


def _layer_of(name: str) -> int:
    found = re.search(r"\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])
