"""How many kernels a step launches, per layer and outside the layers, on a backend that counts them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from hal.bench.bench_errors import BenchmarkError
from hal.bench.contenders.ours import Ours
from hal.bench.contenders.random_weights import RandomCheckpoint, meta_model
from hal.bench.contenders.workload import Inputs
from hal.bench.plan import Setting
from hal.checkpoint.checkpoint import Checkpoint

PEERS: Mapping[str, int] = {"SGLang 0.5.23, Qwen3, graph mode": 10}
"""Kernels that others launch per decode layer, in bfloat16, read in their sources.

SGLang: two norms with their additions, four projections, split with norms and rope, the cache write, attention, swiglu.
"""


@attrs.frozen
class Launches:
    """What one step launches.

    Attributes:
        contender: the mode, as in the table of times.
        batch_size: sequences.
        layer: by kernel, how often a layer launches it: what a second layer adds to a model of one.
        outside: by kernel, the rest: inputs, embedding, last norm, logits, and what the first layer does otherwise.
    """

    contender: str
    batch_size: int
    layer: Counter[str]
    outside: Counter[str]

    @property
    def per_layer(self) -> int:
        """Launches of a layer."""
        return self.layer.total()


def count(setting: Setting, say: Callable[[str], None]) -> list[Launches]:
    """Count the launches of a step of models of one and of two layers: the first ones, if there is a checkpoint.

    Raises:
        ConfigError: the backend counts no launches.
        BenchmarkError: the model's config does not say ``num_hidden_layers``.
    """
    steps: list[dict[tuple[int, str], Counter[str]]] = []
    for layers in (1, 2):
        say(f"counting the launches of {layers} {'layer' if layers == 1 else 'layers'}")
        steps.append(_steps(_cut(setting, layers)))
    found = []
    for (size, contender), one in steps[0].items():
        layer = _difference(steps[1][size, contender], one)
        found.append(Launches(contender, size, layer, _difference(one, layer)))
    return found


def _difference(more: Counter[str], less: Counter[str]) -> Counter[str]:
    result = more.copy()
    result.subtract(less)  # not -, which drops what is negative: a kernel that only the first layer launches, say
    return Counter({name: number for name, number in result.items() if number})


def _steps(setting: Setting) -> dict[tuple[int, str], Counter[str]]:
    side, found = Ours(setting), {}
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


def _cut(setting: Setting, layers: int) -> Setting:
    config: dict[str, Any] = {**setting.checkpoint.config, "num_hidden_layers": layers}
    if types := config.get("layer_types"):
        config["layer_types"] = [types[min(index, len(types) - 1)] for index in range(layers)]
    meta = meta_model({name: value for name, value in config.items() if name in setting.checkpoint.model_config})
    if len(meta.states) != layers:
        raise BenchmarkError(
            f"--trace asked for a model of {layers} layers, and num_hidden_layers gives one of {len(meta.states)}",
            "leave --trace out",
        )
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
