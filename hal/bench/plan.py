"""What a benchmark is to measure. Everything that can be refused is refused here, before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import torch

import hal
from hal.bench.bench_errors import BenchmarkError, need
from hal.bench.contenders.random_weights import RandomCheckpoint
from hal.bench.contenders.shapes import SHAPES
from hal.checkpoint.loading import build_model
from hal.config import environment_mapping, read
from hal.drivers.compiler_registry import EAGER
from hal.drivers.registry import driver_names
from hal.errors import ConfigError, nearest
from hal.nn import CausalLM
from hal.step import StateSpec

Workload = Literal["decode", "prefill"]
FEWEST_REPEATS = 15
"""Fewer make a figure that nobody should quote; the report says so."""
RIVALS = ("transformers",)


@attrs.frozen(kw_only=True)
class Plan:
    """What to measure, as the command's options say it.

    Attributes:
        workload: one decode step, or the prefill of whole prompts.
        checkpoint: a checkpoint's folder; or else
        shapes: a name in :data:`hal.bench.contenders.shapes.SHAPES`, whose weights are random.
        backend: a driver's name, or ``auto``; None leaves it to the environment.
        dtype: as in :class:`hal.Config`; None leaves it to the environment.
        batch_sizes: each is measured by itself.
        length: per sequence, tokens in the cache (decode) or tokens of the prompt (prefill).
        compilers: our modes; empty takes all of the backend's for decode, and ``eager`` for prefill.
        against: who else is measured, of :data:`RIVALS`.
        repeats: timed steps of each contender.
        threads: that torch computes with; None leaves it as it is.
        trace: also count the kernels that a step launches.
        memory: also run each contender in a process of its own, for its peak memory.
        options: of the driver, over what the environment says.
        compilation: keys of :class:`hal.CompilationConfig` for every mode, but for those that are measured.
    """

    workload: Workload
    checkpoint: str | None = None
    shapes: str | None = None
    backend: str | None = None
    dtype: str | None = None
    batch_sizes: tuple[int, ...] = (1,)
    length: int = 512
    compilers: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    repeats: int = FEWEST_REPEATS
    threads: int | None = None
    trace: bool = False
    memory: bool = False
    options: dict[str, Any] = attrs.field(factory=dict)
    compilation: dict[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if (self.checkpoint is None) == (self.shapes is None):
            given = (
                "neither a checkpoint nor shapes were" if self.shapes is None else "both a checkpoint and shapes were"
            )
            raise ConfigError(
                f"{given} given", f"give a checkpoint's folder, or --shapes with one of {', '.join(SHAPES)}"
            )
        if self.shapes is not None and self.shapes not in SHAPES:
            raise ConfigError(f"there are no shapes {self.shapes!r}", nearest(self.shapes, SHAPES))
        for name in self.against:
            if name not in RIVALS:
                raise ConfigError(f"hal cannot be measured against {name!r}", nearest(name, RIVALS))
        numbers = [("batch size", each) for each in self.batch_sizes]
        numbers += [("length", self.length), ("number of threads", 1 if self.threads is None else self.threads)]
        for what, number in numbers:
            if number < 1:
                raise ConfigError(f"the {what} is {number}", "give 1 or more")
        if measured := sorted({"compiler", "capture_sizes", "decode", "prefill"} & set(self.compilation)):
            raise ConfigError(
                f"the compilation config has {', '.join(measured)}, which the benchmark sets itself",
                "leave it out; compilers and batch sizes are options of their own",
            )
        if self.repeats < 3:
            raise ConfigError(
                f"{self.repeats} repeats have no spread", f"give at least 3; {FEWEST_REPEATS} to quote it"
            )

    @property
    def name(self) -> str:
        """The shapes' name or the checkpoint's folder."""
        return self.shapes or self.checkpoint or ""


@attrs.frozen(eq=False)
class Setting:
    """A plan that was checked, and what was opened for that; weights were not read.

    Attributes:
        plan: the plan.
        backend: opened and active; configured but for cache and compilation.
        checkpoint: what both sides read their weights from.
        meta: our model without values.
        dtype: of weights and caches.
        modes: our compilers.
    """

    plan: Plan
    backend: hal.Backend
    checkpoint: hal.Checkpoint
    meta: CausalLM
    dtype: torch.dtype
    modes: Sequence[str]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, a tied one counted once."""
        parameters = sum(each.numel() for each in self.meta.parameters()) * self.dtype.itemsize
        return parameters + sum(each.nbytes for each in self.meta.buffers())  # quantised weights, with their scales


def settle(plan: Plan) -> Setting:
    """Open what ``plan`` names and check it against that.

    Raises:
        HalError: of the kind that the backend, the checkpoint or the configuration gives; :class:`BenchmarkError` where
            a rival is not installed, or memory does not suffice.
    """
    settings = environment_mapping(driver_names=driver_names())
    options = {"backend": plan.backend, "dtype": plan.dtype}
    settings |= {key: value for key, value in options.items() if value is not None}
    settings["options"] = {**settings.get("options", {}), **plan.options}
    settings.pop("compilation", None)  # it is what is measured
    backend = hal.open(read(hal.Config, settings, "configuration"))
    served, where, modes = backend.compilers, "", plan.compilers or backend.compilers
    if plan.workload == "prefill":
        # Its steps are eager with the others, so that another name would stand over the same figures.
        served, where = (
            tuple(each for each in served if each == EAGER or backend.compiler(each).any_shape),
            " for prefill",
        )
        modes = plan.compilers or ("eager",)
    for mode in modes:
        if mode not in served:
            raise ConfigError(f"the backend {backend.name} has no compiler {mode!r}{where}", nearest(mode, served))
    if plan.trace:
        with backend.counting_launches():
            pass  # which a backend that cannot tell refuses
    for rival in plan.against:
        need(rival, f"--against {rival}")
    if plan.shapes is not None:
        checkpoint: hal.Checkpoint = RandomCheckpoint.of(plan.shapes, SHAPES[plan.shapes])
    else:
        checkpoint = hal.Checkpoint.open(plan.name)
    meta = build_model(checkpoint)
    longest = plan.length + (plan.workload == "decode")
    if longest > meta.max_length:
        raise ConfigError(f"sequences of {longest} tokens; the model takes {meta.max_length}", "ask for shorter ones")
    asked = backend.config.dtype
    dtype = checkpoint.dtype if asked == "auto" else getattr(torch, asked)
    backend.check_dtype(dtype)
    setting = Setting(plan, backend, checkpoint, meta, dtype, tuple(dict.fromkeys(modes)))
    _check_memory(setting)
    return setting


def _check_memory(setting: Setting) -> None:
    """All contenders are there at once, so that they can take turns: each side's weights, and a cache for each mode."""
    plan, meta, free = setting.plan, setting.meta, setting.backend.device.memory_stats().free
    weights = setting.weight_bytes * (1 + len(plan.against))
    token = StateSpec(tuple(meta.states), setting.dtype, num_blocks=2, block_size=1).token_bytes
    modes = len(setting.modes) + (2 if plan.workload == "decode" else 1) * len(plan.against)
    caches = token * plan.length * max(plan.batch_sizes) * modes
    if weights + caches > free:
        raise BenchmarkError(
            f"the weights of all contenders take {weights >> 20} MiB and their caches {caches >> 20} MiB, and "
            f"{free >> 20} MiB are free",
            "free memory, or take smaller shapes, batches or lengths, or fewer compilers",
        )
