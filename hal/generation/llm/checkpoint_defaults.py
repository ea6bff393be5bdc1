"""The sampling parameters that a checkpoint recommends, in generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from hal.checkpoint.checkpoint import Checkpoint
from hal.config.bounds import NO_SEED
from hal.errors import CheckpointError, ConfigError, UnknownKey, nearest
from hal.generation.sampling_params import RECOMMENDED, SamplingParams

FILE = "generation_config.json"
NOT_READ: Mapping[str, Any] = {
    "num_beams": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "sequence_bias": {},
    "forced_bos_token_id": None,
    "stop_strings": [],
}
"""Other keys that change texts in transformers, and the values that ask for nothing. Others log a warning."""

log = logging.getLogger("hal.generation")


def recommended(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling parameters in generation_config.json, and log them.

    ``do_sample: false`` means temperature 0. ``do_sample: true`` without a temperature means temperature 1. Without a
    temperature and ``do_sample``, the text is greedy. The stop tokens are :attr:`hal.Checkpoint.stop_token_ids`.

    Raises:
        CheckpointError: the file is damaged, or a value is out of its range.
    """
    file, given = checkpoint.path / FILE, checkpoint.files.json(FILE)
    found = {name: given[name] for name in RECOMMENDED if given.get(name) is not None}
    if isinstance(top_k := found.get("top_k"), float) and top_k.is_integer():
        found["top_k"] = int(top_k)
    sampled = given.get("do_sample")
    if sampled is False:
        found["temperature"] = 0.0
    elif sampled is True:
        found.setdefault("temperature", 1.0)
    try:
        SamplingParams(**found)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error.problem}", f"correct the file: {error.remedy}") from None
    ignored = [name for name, neutral in NOT_READ.items() if given.get(name) not in (None, neutral)]
    if ignored:
        log.warning(
            "%s says %s, which hal does not follow: give sampling parameters in its place",
            file,
            ", ".join(f"{name} {given[name]!r:.60}" for name in ignored),
        )
    if found:
        log.info("%s recommends %s", file, ", ".join(f"{name} {value}" for name, value in sorted(found.items())))
    return found


def merged(
    defaults: Mapping[str, Any], stop_token_ids: Iterable[int], given: Mapping[str, Any], *, seed: int
) -> SamplingParams:
    """Return the sampling parameters that a caller gave, with the checkpoint's for the others.

    Args:
        defaults: those of :func:`recommended`.
        stop_token_ids: the checkpoint's stop tokens, which are added unless ``ignore_eos`` is given.
        seed: the seed, if none is given, or -1.

    Raises:
        ConfigError: there is no parameter of a name, or a value is out of its range.
    """
    known = {each.name for each in attrs.fields(SamplingParams)}
    for name in given:
        if name not in known:
            raise UnknownKey(f"there is no sampling parameter {name!r}", nearest(name, known), key=name)
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("seed") == NO_SEED:
        del chosen["seed"]
    values = {"seed": seed, **defaults, **chosen}
    return with_stops(SamplingParams(**values), stop_token_ids)


def with_stops(params: SamplingParams, stop_token_ids: Iterable[int]) -> SamplingParams:
    """Return the parameters with the checkpoint's stop tokens, unless ``ignore_eos`` is set."""
    if params.ignore_eos:
        return params
    return attrs.evolve(params, stop_token_ids=params.stop_token_ids | frozenset(stop_token_ids))
