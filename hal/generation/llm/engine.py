"""The backend and the runner of a model by name, with a cache that fits the memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import Progress, load_model
from hal.config import Config, read
from hal.config.bounds import SEQUENCES, check_count
from hal.drivers.backend import Backend
from hal.drivers.registry import open_backend, read_config
from hal.errors import ConfigError
from hal.execution.memory_plan import plan_memory
from hal.execution.runner import Runner
from hal.execution.state_spec import longest_sequence, spec_of, states_per_sequence
from hal.nn import CausalLM
from hal.step.dummies import DUMMY_BLOCK

SHARE = 0.9
"""The fraction of a device's memory that is used."""
HOST_SHARE = 0.25
"""The fraction of the host's free memory that the cache takes there, beside other programs."""

log = logging.getLogger("hal.generation")


def open_engine(
    checkpoint: Checkpoint,
    options: Mapping[str, str | None],
    config: Mapping[str, Any] | None,
    stack: ExitStack,
    *,
    max_length: int | None,
    max_sequences: int,
    progress: Progress | None,
) -> tuple[Runner, int]:
    """Open a backend, load a model, and return its runner, and the most tokens of a sequence.

    Args:
        checkpoint: the checkpoint.
        options: backend, dtype, model_source and compiler; ``auto`` and None leave the configuration's.
        config: keys of the configuration; see :func:`hal.open`.
        stack: closes what was opened.
        max_length: the most tokens of a sequence; None for what fits.
        max_sequences: the most sequences of a step.
        progress: called as weights are loaded.

    Raises:
        ConfigError: the configuration is invalid, or several devices are asked for, or nothing fits.
    """
    check_count(max_sequences, SEQUENCES, "max_sequences must be")
    settings = settings_of(options, config)
    cache = settings.setdefault("cache", {})
    sized = "num_tokens" in cache
    if (ranks := read(Config, settings, "configuration").parallel.size) > 1:
        raise ConfigError(
            f"parallel asks for {ranks} ranks, and hal.LLM runs in one process",
            "use hal.generate in each rank, or `hal generate` with --tensor-parallel or --data-parallel",
        )
    backend = stack.enter_context(open_backend(settings, activate=False))
    model = load_model(checkpoint, backend, progress=progress)
    if "reuse_prefixes" not in cache and not states_per_sequence(model):
        cache["reuse_prefixes"] = True
        backend.configure(read(Config, settings, "configuration"))
    num_blocks = None if sized else _num_blocks(model, backend, max_sequences, max_length)
    asked = longest_sequence(model, max_length)
    runner = stack.enter_context(
        Runner(model, backend, max_sequences=max_sequences, num_blocks=num_blocks, max_length=max_length)
    )
    longest = min(asked, runner.spec.num_tokens)
    if longest < asked:
        log.warning("a text may have %d tokens, not %d: the cache holds no more", longest, asked)
    return runner, longest


def settings_of(options: Mapping[str, str | None], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a configuration: of the environment, overridden by ``config``, overridden by ``options``.

    Raises:
        ConfigError: the configuration is invalid.
    """
    settings = read_config()
    for key, value in ({} if config is None else read_config(config)).items():
        both = isinstance(value, dict) and isinstance(settings.get(key), dict)
        settings[key] = {**settings[key], **value} if both else value
    for name in ("backend", "dtype", "model_source"):
        if options.get(name) not in (None, "auto"):
            settings[name] = options[name]
    if options.get("compiler") is not None:
        settings["compilation"] = {**settings.get("compilation", {}), "compiler": options["compiler"]}
    return settings


def _num_blocks(model: CausalLM, backend: Backend, max_sequences: int, max_length: int | None) -> int:
    """Return how many blocks fit the memory, at most as many as all sequences need.

    On a host, which other programs share, the cache takes a quarter of the free memory, and nothing is measured: a step
    of a large model would take minutes.
    """
    spec = spec_of(model, backend, DUMMY_BLOCK + 2)
    on_host = backend.device.torch.type == "cpu"
    available = int(backend.device.memory_stats().free * (HOST_SHARE if on_host else SHARE))
    longest = longest_sequence(model, max_length)
    most = max(spec.block_size, available // max(spec.token_bytes, 1))
    if max_length is None:
        longest = min(longest, most)
    wanted = DUMMY_BLOCK + 1 + max_sequences * spec.blocks_for(longest)
    if on_host:
        fits = most // spec.block_size
    else:
        plan = plan_memory(model, backend, max_sequences=max_sequences, max_length=longest, share=SHARE)
        log.info("%s", plan)
        fits = plan.num_blocks if plan.block_bytes else wanted
    if fits < DUMMY_BLOCK + 2:
        raise ConfigError(
            "the memory beside the model holds no block of the cache",
            "use a smaller model, a smaller dtype, or a device with more memory",
        )
    return min(fits, wanted)
