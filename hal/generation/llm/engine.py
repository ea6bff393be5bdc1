"""The backend and the runner of a model by name, with a cache that fits the memory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from hal.checkpoint.adapter_files import AdapterFiles
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import Progress, load_model
from hal.config import Config, read
from hal.config.bounds import SEQUENCES, check_count
from hal.drivers.backend import Backend
from hal.drivers.registry import open_backend
from hal.errors import ConfigError
from hal.execution.memory_plan import plan_memory
from hal.execution.runner import Runner
from hal.execution.state_spec import longest_sequence, spec_of, states_per_sequence
from hal.generation.drafting.drafter import DraftConfig, plan_drafter
from hal.generation.drafting.expectation import examine
from hal.generation.drafting.speculation import Speculation, capture_drafts, keep_states
from hal.nn import CausalLM, keep_choices
from hal.parallel.launch import gathered
from hal.step.fields import DUMMY_BLOCK
from hal.step.state import StateSpec

SHARE = 0.9
"""The fraction of a device's memory that is used."""
HOST_SHARE = 0.25
"""The fraction of the host's free memory that the cache takes there, beside other programs."""

log = logging.getLogger("hal.generation")


@attrs.frozen
class Engine:
    """What runs the texts of a model.

    Attributes:
        max_length: the most tokens of a sequence, the same on all ranks.
        speculation: drafts tokens; None without a drafter.
    """

    runner: Runner
    max_length: int
    speculation: Speculation | None = None


def open_engine(
    checkpoint: Checkpoint,
    settings: Mapping[str, Any],
    stack: ExitStack,
    *,
    max_length: int | None,
    max_sequences: int,
    progress: Progress | None,
    lengths: Sequence[int] | None = None,
    draft: DraftConfig | None = None,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
    record: Collection[str] = (),
    replay: Collection[str] = (),
) -> Engine:
    """Open a backend, load a model and what drafts for it, and make their runners.

    Args:
        settings: keys of the configuration, with those of the environment.
        stack: closes what was opened.
        max_length: the most tokens of a sequence; None for what fits.
        max_sequences: the most sequences of a step.
        progress: called as weights are loaded.
        lengths: the most tokens of each text, if they are known, and ``parallel.data`` is allowed.
        draft: how tokens are drafted; None for no drafts.
        adapters: folders of adapters by name. Unless the settings say otherwise, there is room for one more, so that
            one can be loaded anew while requests use it.
        record: as of :func:`hal.nn.keep_choices`.
        replay: likewise.

    Raises:
        CheckpointError: an adapter is damaged, or does not fit the model.
        ConfigError: the configuration is invalid, nothing fits, or the drafter does not fit the model.
    """
    if adapters:
        files = [AdapterFiles.open(each) for each in adapters.values()]
        ranks, experts = zip(*((each.largest_rank, each.changes_experts) for each in files), strict=True)
        room = {"slots": len(adapters) + 1, "rank": max(ranks), "experts": any(experts)}
        settings = {**settings, "adapters": {**room, **settings.get("adapters", {})}}
    check_count(max_sequences, SEQUENCES, "max_sequences must be")
    config = read(Config, settings, "configuration")
    if lengths is None and config.parallel.data > 1:
        raise ConfigError(
            f"parallel.data is {config.parallel.data}, and hal.LLM has one copy of the model",
            "use parallel.tensor, or hal.generate in each rank",
        )
    cache = settings.get("cache", {})
    backend = stack.enter_context(open_backend(config, activate=False))
    shown = progress if backend.mesh.first else None
    plan = None if draft is None else plan_drafter(draft, checkpoint, backend)
    model = load_model(checkpoint, backend, progress=shown)
    for name, folder in adapters.items():
        model.adapters.load(name, folder)
    beside = None if plan is None else plan.load(model, backend, shown)
    spare = 0 if draft is None else draft.tokens
    if draft is not None:
        keep_states(model, 1 + spare)
        if "queries" not in settings.get("compilation", {}):
            capture_drafts(backend, 1 + spare)
    if record or replay:
        keep_choices(model, record=record, replay=replay)
    if "reuse_prefixes" not in cache and not states_per_sequence(model):
        known = backend.config
        backend.configure(attrs.evolve(known, cache=attrs.evolve(known.cache, reuse_prefixes=True)))
    num_blocks = None
    if "num_tokens" not in cache:
        fitting = _num_blocks(model, backend, max_sequences, max_length, lengths, spare, beside)
        num_blocks = min(gathered(fitting, backend.mesh))
    asked = longest_sequence(model, max_length)
    longest = max_length and min(max_length + spare, model.max_length)
    runner = stack.enter_context(
        Runner(model, backend, max_sequences=max_sequences, num_blocks=num_blocks, max_length=longest)
    )
    longest = min(asked, runner.spec.num_tokens - spare)
    if longest < asked and lengths is None:
        log.warning("a text may have %d tokens, not %d: the cache holds no more", longest, asked)
    if plan is None or draft is None:
        return Engine(runner, longest)
    drafter = plan.open(runner, stack, max_sequences, longest)
    expected = None
    if draft.examine and drafter.predicts and checkpoint.has_tokenizer:
        expected = examine(runner, drafter, checkpoint.tokenizer(), max_sequences, longest).acceptance.rate
        runner.forget()
    return Engine(runner, longest, Speculation(runner, drafter, adapt=draft.adapt, expected=expected))


def _num_blocks(
    model: CausalLM,
    backend: Backend,
    max_sequences: int,
    max_length: int | None,
    lengths: Sequence[int] | None,
    spare: int,
    beside: StateSpec | None,
) -> int:
    """Return how many blocks fit the memory, at most as many as all sequences need.

    On a host, which other programs share, the cache takes a quarter of the free memory, and nothing is measured: a step
    of a large model would take minutes. Nor is it for texts of known lengths that take no more.

    Args:
        spare: the tokens of each sequence that the cache holds beside.
        beside: the states of a drafter, whose cache has as many blocks; None for none.
    """
    spec = spec_of(model, backend, DUMMY_BLOCK + 2)
    on_host = backend.device.torch.type == "cpu"
    free = backend.device.memory_stats().free // (backend.mesh.size if on_host else 1)
    own, further = spec.token_bytes, 0 if beside is None else beside.token_bytes
    most, few = (max(spec.block_size, int(free * share) // max(own + further, 1)) for share in (SHARE, HOST_SHARE))
    most = few if on_host else most
    longest = longest_sequence(model, max_length)
    if known := lengths is not None:
        lengths = [min(each, longest) for each in lengths]
    else:
        lengths = [min(longest, most) if max_length is None else longest] * max_sequences
    wanted = DUMMY_BLOCK + 1 + sum(spec.blocks_for(each + spare) for each in lengths)
    if on_host:
        fits = most // spec.block_size
    elif known and wanted * spec.block_size <= few:
        fits = wanted
    else:
        plan = plan_memory(model, backend, max_sequences=max_sequences, max_length=max(lengths), share=SHARE)
        log.info("%s", plan)
        fits = plan.num_blocks * own // max(own + further, 1) if plan.block_bytes else wanted
    if fits < DUMMY_BLOCK + 2:
        raise ConfigError(
            "the memory beside the model holds no block of the cache",
            "use a smaller model, a smaller dtype, or a device with more memory",
        )
    return min(fits, wanted)
