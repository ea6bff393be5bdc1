"""hal as a contender: one model, and a runner per compiler, as an engine uses them; and a step's kernel launches."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import hal
from hal import ops
from hal.bench.plan import BenchmarkError, Setting
from hal.bench.routing import Routing, expert_projections, recorded
from hal.bench.workload import STORED, Contender, Inputs, Side, prefill, rows_of, stored_by
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import shrink
from hal.checkpoint.random_weights import RandomCheckpoint, meta_model
from hal.checkpoint.safetensors_files import TensorInfo
from hal.config import read
from hal.drivers.compiler import EAGER
from hal.step import SEQUENCE


class HalSide:
    """hal's model with its weights, shared by all compilers.

    Raises:
        HalError: the model cannot be loaded.
    """

    def __init__(self, setting: Setting) -> None:
        self.modes = tuple(setting.modes)
        self._plan, self._backend, self._compilation = setting.plan, setting.backend, setting.plan.compilation
        # Before loading: a driver that prepares weights by batch size must know the batch sizes.
        self._configure("eager", setting.plan.batch_sizes)
        self.model = hal.load_model(setting.checkpoint, self._backend)

    def contender(self, mode: str, inputs: Inputs) -> Contender:
        """Create a runner whose cache and graphs have exactly the measured size."""
        backend, size = self._backend, inputs.batch_size
        length = inputs.length + (inputs.workload == "decode")
        per_sequence = -(-length // backend.block_size)
        prompts = size * inputs.length if inputs.workload == "prefill" else None
        self._configure(mode, (size,), size * per_sequence * backend.block_size, prompts)
        start = time.perf_counter()
        runner = hal.Runner(self.model, backend)
        made = time.perf_counter() - start
        blocks = [list(range(1 + row * per_sequence, 1 + (row + 1) * per_sequence)) for row in range(size)]
        tokens = inputs.tokens.tolist()
        slots = runner.slots.take(size) or [] if runner.slots.needed else []
        fields = {"slots": slots} if slots else {}
        if inputs.workload == "decode":
            _fill(runner, inputs, blocks, slots)
            batch = runner.batch(tokens, blocks, cached=[inputs.length] * size, **fields)
        else:
            batch = runner.batch(tokens, blocks, **fields)
        reset = _restoring(runner, slots)
        start = time.perf_counter()
        runner.step(batch)
        backend.device.synchronize()
        setup = made + time.perf_counter() - start
        # Every step writes the same keys and values, which need no reset.
        return Contender(f"hal {mode}", lambda: runner.step(batch).logits, reset, setup, runner.close)

    def prefilled(self, batch_size: int) -> Sequence[Mapping[str, Tensor]]:
        """Return what the layers keep of a prefill, for decode steps; nothing for random weights."""
        if self._plan.workload == "prefill" or self._plan.shapes is not None:
            return ()
        self._configure(EAGER, (1,), self._plan.length)
        with hal.Runner(self.model, self._backend) as runner:
            return prefill(runner, batch_size, self._plan.length)

    def _configure(
        self, compiler: str, sizes: tuple[int, ...], num_tokens: int = 1, prompts: int | None = None
    ) -> None:
        """Configure the backend; ``prompts`` is the total number of prompt tokens of a prefill."""
        config = self._backend.config
        measured: dict[str, Any] = {"compiler": compiler, "capture_sizes": list(sizes)}
        if prompts is not None and compiler != EAGER and self._backend.compiler(compiler).any_shape:
            measured["prefill"] = {"capture_sizes": [min(prompts, config.max_prefill_tokens)]}
        given = {} if compiler == "eager" else self._compilation  # eager refuses compilers' keys
        compilation = read(hal.CompilationConfig, {**given, **measured}, "compilation")
        cache = attrs.evolve(config.cache, num_tokens=num_tokens, num_sequences=max(sizes))
        self._backend.configure(attrs.evolve(config, compilation=compilation, cache=cache))


def _restoring(runner: hal.Runner, slots: list[int]) -> Callable[[], None]:
    """Return a function that restores the states per sequence in slots, which every step changes."""
    states = [runner.states.layers[index][name] for index, name, each in runner.spec.states() if each.per is SEQUENCE]
    saved = [(state, state[slots].clone()) for state in states]

    def restore() -> None:
        with torch.inference_mode():
            for state, values in saved:
                state[slots] = values

    return restore


def _fill(runner: hal.Runner, inputs: Inputs, blocks: list[list[int]], in_slots: list[int]) -> None:
    """Write the random cache with the operation that knows the backend's layout, and random states per sequence."""
    nobody = [[0] * inputs.length] * inputs.batch_size
    slots = runner.batch(nobody, blocks, **({"slots": in_slots} if in_slots else {})).slot_mapping
    with torch.inference_mode():
        for layer, state in enumerate(runner.states.layers):
            held, declared = inputs.cached(layer), runner.spec.layers[layer]
            for name in (name for name, each in declared.items() if each.per is SEQUENCE):
                state[name][in_slots] = held[name]
            for name in rows_of(declared):
                group = declared[name].group
                last = slots.view(inputs.batch_size, -1)[:, group - 1 :: group].flatten()
                ops.store_index_cache(held[name].flatten(0, 1), state[name], last // group)
            for operation in stored_by(declared):
                names, first = STORED[operation], STORED[operation][0]
                none = held[first].flatten(0, 1)[..., :0], state[first][..., :0]  # A latent may have no rotated part.
                rows = [held[name].flatten(0, 1) if name in held else none[0] for name in names]
                caches = [state[name] if name in state else none[1] for name in names]
                if "key_scale" in state:
                    scales = state["key_scale"], state["value_scale"]
                    ops.store_quantized_kv_cache(rows[0], rows[1], None, None, caches[0], caches[1], *scales, slots)
                else:
                    getattr(ops, operation)(*rows, *caches, slots)


def routings(hal_side: Side, inputs: Inputs) -> list[Routing]:
    """Return the experts that the inputs choose in each sparse layer, from an eager step; empty for a dense model."""
    if not expert_projections(inputs.setting.meta):
        return []
    contender = hal_side.contender(EAGER, inputs)
    try:
        with recorded() as found:
            contender.step()
    finally:
        contender.close()
    return found


PEERS: Mapping[str, int] = {"SGLang 0.5.23, Qwen3, graph mode": 10}
"""Kernels that other implementations launch per decode layer in bfloat16, according to their sources.

SGLang: two norms with their additions, four projections, split with norms and rope, the cache write, attention, swiglu.
"""


@attrs.frozen
class Launches:
    """The kernel launches of one step.

    Attributes:
        contender: name, as in the table of times.
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


def count_launches(setting: Setting, say: Callable[[str], None]) -> list[Launches]:
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


PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
"""Keys of config.json with an entry for each layer."""


def config_of_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a config.json for the first layers of a model, or of its text model."""
    if isinstance(text := config.get("text_config"), Mapping):
        return {**config, "text_config": config_of_layers(text, layers)}
    cut: dict[str, Any] = {**config, "num_hidden_layers": layers}
    for key in PER_LAYER:
        if types := cut.get(key):
            cut[key] = [types[min(index, len(types) - 1)] for index in range(layers)]
    if isinstance(table := cut.get("linear_attn_config"), Mapping):  # It may list layers by numbers from 1 on.
        cut["linear_attn_config"] = {
            key: [number for number in value if number <= layers] if isinstance(value, list) else value
            for key, value in table.items()
        }
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
        cut = attrs.evolve(checkpoint, config=config, tensors=_tensors_of_layers(checkpoint, layers))
    return attrs.evolve(setting, checkpoint=cut, meta=meta)


def _tensors_of_layers(checkpoint: Checkpoint, layers: int) -> dict[str, TensorInfo]:
    """Return the tensors of the first layers. A model of fewer has its last one again in place of the others."""
    last = max(map(_layer_of, checkpoint.tensors))
    kept = {name: info for name, info in checkpoint.tensors.items() if _layer_of(name) < layers}
    for name, info in [*kept.items()]:
        if _layer_of(name) == last:
            for layer in range(last + 1, layers):
                again = name.replace(f".layers.{last}.", f".layers.{layer}.", 1)
                kept[again] = attrs.evolve(info, stored=info.stored or name)
    return kept


def _layer_of(name: str) -> int:
    found = re.search(r"\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])
