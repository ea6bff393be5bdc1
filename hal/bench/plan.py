"""The plan of a benchmark, validated before any weight is read, and the error of benchmarks."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib.resources import files
from operator import or_
from typing import Any, Literal

import attrs
import torch

import hal
from hal.checkpoint.loading import build_for
from hal.checkpoint.random_weights import RandomCheckpoint
from hal.config import bounds, read
from hal.config.optional_libraries import need
from hal.device.host_capacity import check_threads
from hal.drivers.compiler import EAGER
from hal.drivers.registry import read_config
from hal.errors import ConfigError, HalError, nearest
from hal.nn import CausalLM
from hal.parallel import Mesh
from hal.step import StateSpec


def _shapes() -> dict[str, dict[str, Any]]:
    read = tomllib.loads((files(__package__) / "shapes.toml").read_text(encoding="utf-8"))
    return {
        name: reduce(or_, (read["families"][each] for each in shapes.pop("of")), dict.fromkeys(shapes.pop("null", ())))
        | shapes
        for name, shapes in read["shapes"].items()
    }


SHAPES: Mapping[str, Mapping[str, Any]] = _shapes()
"""config.json of models that are often measured, by name. :class:`RandomCheckpoint` generates their weights."""


class BenchmarkError(HalError):
    """The benchmark cannot run here, or its results would be meaningless."""


Workload = Literal["decode", "prefill"]
FEWEST_REPEATS = 15
"""Smallest number of repeats for a figure that can be quoted; the report warns below it."""
RIVALS: Mapping[str, tuple[str, str | None]] = {
    "transformers": ("transformers", "bench"),
    "llama.cpp": ("llama_cpp", None),
}
"""The modules that other implementations need, by their names, with the extra that requires each, if one does."""


@attrs.frozen(kw_only=True)
class Plan:
    """The options of ``hal bench``.

    Attributes:
        workload: ``decode`` for one decode step, or ``prefill`` for whole prompts.
        checkpoint: folder of a checkpoint; exclusive with ``shapes``.
        shapes: key of :data:`SHAPES`; the weights are random.
        backend: name of a driver, or ``auto``; None uses the environment's.
        dtype: as in :class:`hal.Config`; None uses the environment's. So is ``model_source``.
        batch_sizes: batch sizes, measured separately.
        length: tokens per sequence in the cache (decode) or in the prompt (prefill).
        compilers: hal's compilers to measure; empty selects all of the backend's for decode, and ``eager`` for prefill.
        against: other implementations to measure, from :data:`RIVALS`.
        repeats: timed steps per contender.
        threads: number of torch's threads; None keeps it.
        trace: also count the kernels that a step launches.
        memory: also run each contender in a separate process to measure its peak memory.
        tensor_parallel: ranks that split the model, each of which runs the plan; None uses the environment's.
        options: options of the driver; they override the environment's.
        compilation: keys of :class:`hal.CompilationConfig` for every compiler, except those that the benchmark sets.
    """

    workload: Workload
    checkpoint: str | None = None
    shapes: str | None = None
    backend: str | None = None
    dtype: str | None = None
    model_source: str | None = None
    batch_sizes: tuple[int, ...] = (1,)
    length: int = 512
    compilers: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    repeats: int = FEWEST_REPEATS
    threads: int | None = None
    trace: bool = False
    memory: bool = False
    tensor_parallel: int | None = None
    options: dict[str, Any] = attrs.field(factory=dict)
    compilation: dict[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if (self.checkpoint is None) == (self.shapes is None):
            problem = "no checkpoint and no shapes" if self.shapes is None else "both a checkpoint and shapes"
            raise ConfigError(
                f"{problem} given", f"give a checkpoint's folder, or --shapes with one of {', '.join(SHAPES)}"
            )
        if self.shapes is not None and self.shapes not in SHAPES:
            raise ConfigError(f"unknown shapes {self.shapes!r}", nearest(self.shapes, SHAPES))
        for name in self.against:
            if name not in RIVALS:
                raise ConfigError(f"cannot measure against {name!r}", nearest(name, RIVALS))
        counts = [("batch size", each, bounds.SEQUENCES) for each in self.batch_sizes]
        counts += [("length", self.length, bounds.TOKENS), ("number of repeats", self.repeats, bounds.REPEATS)]
        if self.tensor_parallel is not None:
            counts.append(("number of ranks", self.tensor_parallel, bounds.RANKS))
        for what, number, most in counts:
            bounds.check_count(number, most, f"the {what} must be")
        if self.threads is not None:
            check_threads(self.threads)
        if measured := sorted({"compiler", "capture_sizes", "decode", "prefill"} & set(self.compilation)):
            raise ConfigError(
                f"the compilation config sets {', '.join(measured)}, which the benchmark sets itself",
                "remove it; use --compiler and --batch-size",
            )
        if self.memory and (others := set(self.against) - {"transformers"}):
            raise ConfigError(f"--memory cannot be used with --against {min(others)}", "omit one of them")
        if self.repeats < 3:
            raise ConfigError(
                f"{self.repeats} repeats are too few to measure a spread",
                f"use --repeats with at least 3; {FEWEST_REPEATS} or more for a figure to quote",
            )

    @property
    def name(self) -> str:
        """Return the name of the shapes or the checkpoint's folder."""
        return self.shapes or self.checkpoint or ""


@attrs.frozen(eq=False)
class Setting:
    """A validated plan with its opened backend and checkpoint; no weights are loaded.

    Attributes:
        backend: opened and active; cache and compilation are not configured yet.
        checkpoint: source of all contenders' weights.
        meta: hal's model on the meta device; this rank's part, if ranks split it.
        dtype: dtype of weights and caches.
        modes: compilers to measure.
    """

    plan: Plan
    backend: hal.Backend
    checkpoint: hal.Checkpoint
    meta: CausalLM
    dtype: torch.dtype
    modes: Sequence[str]

    @property
    def weight_bytes(self) -> int:
        """Return the size of all weights in bytes; tied weights count once."""
        parameters = sum(each.numel() for each in self.meta.parameters()) * self.dtype.itemsize
        return parameters + sum(each.nbytes for each in self.meta.buffers())  # quantized weights, with their scales


def prepare(plan: Plan, mesh: Mesh | None = None) -> Setting:
    """Open the plan's backend and checkpoint, and validate the plan against them.

    Args:
        mesh: the ranks to work with, such as planned ones, which split each expert; None joins those that the plan asks
            for.

    Raises:
        HalError: the backend, the checkpoint or the configuration is invalid.
        BenchmarkError: memory does not suffice.
    """
    settings = read_config()
    options = {"backend": plan.backend, "dtype": plan.dtype, "model_source": plan.model_source}
    settings |= {key: value for key, value in options.items() if value is not None}
    settings["options"] = {**settings.get("options", {}), **plan.options}
    settings.pop("compilation", None)  # the benchmark sets it
    if mesh is not None:
        settings["parallel"] = {"tensor": mesh.tensor.size, "data": mesh.data.size}
    elif plan.tensor_parallel is not None:
        settings["parallel"] = {**settings.get("parallel", {}), "tensor": plan.tensor_parallel}
    backend = hal.open(read(hal.Config, settings, "configuration"), mesh=mesh)
    modes = plan.compilers or (backend.compilers if plan.workload == "decode" else (EAGER,))
    for mode in modes:
        if mode not in backend.compilers:
            raise ConfigError(f"the backend {backend.name} has no compiler {mode!r}", nearest(mode, backend.compilers))
    if plan.trace:
        with backend.counting_launches():
            pass  # raises if the backend cannot count launches
    if backend.mesh.size > 1 and (plan.against or plan.memory):
        option = "--against" if plan.against else "--memory"
        raise ConfigError(f"{option} cannot be used with several ranks, which only hal's model uses", f"omit {option}")
    for rival in plan.against:
        need(*RIVALS[rival], f"--against {rival}")
    checkpoint = checkpoint_of(plan)
    meta = build_for(backend, checkpoint, backend.mesh.tensor)
    longest = plan.length + (plan.workload == "decode")
    if longest > meta.max_length:
        raise ConfigError(
            f"sequences of {longest} tokens exceed the model's maximum of {meta.max_length}",
            "use a smaller --context or --tokens",
        )
    asked = backend.config.dtype
    dtype = checkpoint.dtype if asked == "auto" else getattr(torch, asked)
    backend.check_dtype(dtype)
    setting = Setting(plan, backend, checkpoint, meta, dtype, tuple(dict.fromkeys(modes)))
    _check_memory(setting)
    return setting


def checkpoint_of(plan: Plan) -> hal.Checkpoint:
    """Return the plan's checkpoint, whose weights are not read yet.

    Raises:
        HalError: the checkpoint is missing or damaged.
    """
    if plan.shapes is not None:
        return RandomCheckpoint.of(plan.shapes, SHAPES[plan.shapes])
    return hal.Checkpoint.open(plan.name)


def _check_memory(setting: Setting) -> None:
    """Raise BenchmarkError unless the weights of each implementation and a cache per mode fit in memory together."""
    plan, meta, free = setting.plan, setting.meta, setting.backend.device.memory_stats().free
    weights = setting.weight_bytes * (1 + len(plan.against))
    spec = StateSpec(tuple(meta.states), setting.dtype, 0, setting.backend.block_size, num_slots=1)
    sequence = spec.nbytes + spec.token_bytes * plan.length
    modes = len(setting.modes) + (2 if plan.workload == "decode" else 1) * len(plan.against)
    caches = sequence * max(plan.batch_sizes) * modes
    logits = meta.vocab_size * setting.dtype.itemsize * max(plan.batch_sizes) * modes
    if weights + caches + logits > free:
        raise BenchmarkError(
            f"the weights of all contenders take {weights >> 20} MiB and their caches {caches >> 20} MiB, with "
            f"{logits >> 20} MiB of logits, but only {free >> 20} MiB are free",
            "free memory, or use smaller shapes, batch sizes or lengths, or fewer compilers",
        )
