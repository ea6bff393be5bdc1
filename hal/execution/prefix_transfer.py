"""Prefixes that travel: the cached states of a text's beginning, in a layout that every backend can read.

A prefix is computed on one backend, and continued on another, or later. Its bytes say what they are: the model, the
tokens, the form of each state, and a checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import attrs
import safetensors.torch
import torch
from torch import Tensor

from hal.errors import ConfigError
from hal.execution.runner import Runner
from hal.step.state import TOKEN, State

VERSION = 1
CHECKSUM = 32
"""The bytes of the SHA-256 that come first."""


@attrs.frozen(eq=False)
class CachedPrefix:
    """The states of a prefix.

    Attributes:
        model: what identifies the checkpoint; see :func:`model_digest`.
        tokens: the tokens.
        states: by layer and name, such as ``0.key``: per token ``[tokens / group, ...]``, in the order of tokens; per
            sequence ``[...]``, after the last token. On the CPU.
    """

    model: str
    tokens: tuple[int, ...]
    states: Mapping[str, Tensor]

    def to_bytes(self) -> bytes:
        """Return it as a checksum and a safetensors file."""
        about = {"version": VERSION, "model": self.model, "tokens": self.tokens}
        body = safetensors.torch.save(dict(self.states), {"prefix": json.dumps(about)})
        return hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what :meth:`to_bytes` returned.

        Raises:
            ConfigError: a bit was changed, or another version of hal wrote it.
        """
        body = data[CHECKSUM:]
        if hashlib.sha256(body).digest() != data[:CHECKSUM]:
            raise ConfigError(
                f"the {len(data)} bytes are no prefix: their checksum is wrong",
                "transfer what the export returned again",
            )
        length = int.from_bytes(body[:8], "little")
        about: dict[str, Any] = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["prefix"])
        if about["version"] != VERSION:
            raise ConfigError(
                f"the prefix has version {about['version']}, and this hal reads {VERSION}",
                "export it with the same version of hal",
            )
        return cls(about["model"], tuple(about["tokens"]), safetensors.torch.load(body))


def model_digest(runner: Runner) -> str:
    """Return a digest of the config and of the names, shapes and vectors of the checkpoint that a runner's model has.

    Raises:
        ConfigError: its weights are not those of a checkpoint.
    """
    loaded = runner.model.loaded
    if loaded is None or loaded.checkpoint is None:
        raise ConfigError(
            "the weights of the model are not those of a checkpoint, so that nobody can tell whose prefixes fit",
            "load a checkpoint with hal.load_model, and do not replace its weights",
        )
    checkpoint, digest = loaded.checkpoint, hashlib.sha256()
    digest.update(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {list(info.shape)} {info.dtype}\n".encode())
    vectors = sorted(name for name, info in checkpoint.tensors.items() if len(info.shape) == 1)
    values = {name: hashlib.sha256(_bits(value)).digest() for name, value in checkpoint.read(vectors)}
    for name in vectors:
        digest.update(values[name])
    return digest.hexdigest()


@attrs.frozen
class PrefixForm:
    """What a runner's prefixes are: of which model, and in which forms.

    Attributes:
        model: as in :class:`CachedPrefix`.
        states: by name, the dtype of a state, its shape per group of tokens or per sequence, and the tokens of a group;
            None for a state per sequence.
    """

    model: str
    states: Mapping[str, tuple[torch.dtype, tuple[int, ...], int | None]]

    @classmethod
    def of(cls, runner: Runner) -> Self:
        """Return the form of a runner's prefixes.

        Raises:
            ConfigError: the runner shares the model with other ranks, its driver keeps states in another layout, or as
                :func:`model_digest`.
            AsleepError: the runner sleeps.
        """
        _check_travels(runner)
        states = {
            name: (memory.dtype, state.shape, state.group if state.per is TOKEN else None)
            for name, state, memory in _states(runner)
        }
        return cls(model_digest(runner), states)

    def check(self, prefix: CachedPrefix) -> None:
        """Raise ConfigError if a prefix is another model's, or its states have other forms."""
        if prefix.model != self.model:
            raise ConfigError(
                "the prefix was computed by another model", "import it where the same checkpoint is loaded"
            )
        if self.states.keys() != prefix.states.keys():
            other = sorted(self.states.keys() ^ prefix.states.keys())
            raise ConfigError(
                f"the prefix and the model differ in the states {', '.join(other[:3])}",
                "set cache.dtype as where the prefix was computed",
            )
        for name, (dtype, own, group) in self.states.items():
            given, shape = prefix.states[name], own if group is None else (len(prefix.tokens) // group, *own)
            if given.dtype is not dtype or given.shape != shape:
                raise ConfigError(
                    f"the state {name} of the prefix is {given.dtype} {list(given.shape)}, and here it is {dtype} "
                    f"{list(shape)}",
                    "set dtype and cache.dtype as where the prefix was computed",
                )


def read_states(runner: Runner, blocks: Sequence[int], slot: int | None = None) -> dict[str, Tensor]:
    """Return the states of :class:`CachedPrefix` in some blocks, and in the slot of a sequence, on the CPU."""
    states = dict[str, Tensor]()
    with torch.inference_mode():
        for name, state, memory in _states(runner):
            index = torch.tensor(blocks if state.per is TOKEN else [slot], device=memory.device)
            found = memory[index]
            states[name] = (found.flatten(0, 1) if state.per is TOKEN else found[0]).cpu().contiguous()
    return states


def write_states(
    runner: Runner, prefix: CachedPrefix, blocks: Sequence[int], slot: int | None = None, *, start: int = 0
) -> None:
    """Write the states of a prefix, whose form was checked, into blocks, and into the slot of a sequence.

    Args:
        start: the first token whose states come into the blocks, which may hold fewer than the prefix has.
    """
    end = start + len(blocks) * runner.spec.block_size
    with torch.inference_mode():
        for name, state, memory in _states(runner):
            given = prefix.states[name].to(memory.device)
            if state.per is TOKEN:
                rows = given[start // state.group : end // state.group].unflatten(0, (len(blocks), -1))
                memory[torch.tensor(blocks, device=memory.device)] = rows
            elif slot is not None:
                memory[slot] = given


def export_prefix(runner: Runner, tokens: Sequence[int]) -> CachedPrefix:
    """Return the states of the longest cached prefix of some tokens, in whole blocks.

    Raises:
        ConfigError: the runner keeps no prefixes, keeps none of these tokens, or shares the model with other ranks; its
            driver keeps states in another layout; or as :func:`model_digest`.
        AsleepError: the runner sleeps.
    """
    prefixes, spec = _checked(runner), runner.spec
    blocks = prefixes.reuse(tokens)
    try:
        count = len(blocks) * spec.block_size
        if not count:
            raise ConfigError(
                f"no prefix of the {len(tokens)} tokens is cached",
                f"generate from them first; {spec.block_size} tokens or more are kept",
            )
        slot = runner.slots.take(1) if runner.slots.needed else None
        try:
            if slot is not None:
                with torch.inference_mode():
                    prefixes.load_states(tokens[:count], slot[0])
            states = read_states(runner, blocks, None if slot is None else slot[0])
        finally:
            runner.slots.give_back(slot or ())
        return CachedPrefix(model_digest(runner), tuple(tokens[:count]), states)
    finally:
        prefixes.give_back(blocks)


def import_prefix(runner: Runner, prefix: CachedPrefix) -> int:
    """Keep a prefix, so that prompts which begin with it do not compute it.

    Returns:
        The number of tokens that are kept, from the first on, in whole blocks of this runner.

    Raises:
        ConfigError: the prefix is another model's, its states have other forms, or there is no room; or as
            :func:`export_prefix`.
    """
    prefixes, spec = _checked(runner), runner.spec
    PrefixForm.of(runner).check(prefix)
    count = len(prefix.tokens) // spec.block_size * spec.block_size
    if not count:
        raise ConfigError(
            f"the prefix has {len(prefix.tokens)} tokens, less than a block of {spec.block_size}",
            "set a smaller cache.block_size",
        )
    if runner.slots.needed and (count != len(prefix.tokens) or not prefixes.places(count - 1, count)):
        raise ConfigError(
            f"the states after {len(prefix.tokens)} tokens are not kept here, in blocks of {spec.block_size}",
            "set cache.block_size and cache.saved_states_interval as where the prefix was computed",
        )
    blocks = prefixes.take(count // spec.block_size)
    if blocks is None:
        raise ConfigError(f"there is no room for a prefix of {count} tokens", "set a larger cache.num_tokens")
    slot = runner.slots.take(1) if runner.slots.needed else None
    try:
        write_states(runner, prefix, blocks, None if slot is None else slot[0])
        prefixes.remember(blocks, prefix.tokens[:count])
        if slot is not None:
            prefixes.save_states(blocks, prefix.tokens[:count], slot[0])
    finally:
        runner.slots.give_back(slot or ())
        prefixes.give_back(blocks)
    return count


def _checked(runner: Runner) -> Any:
    """Return the runner's prefixes, or raise ConfigError if they cannot travel."""
    _check_travels(runner)
    if runner.prefixes is None:
        raise ConfigError("the runner keeps no prefixes", "set cache.reuse_prefixes")
    return runner.prefixes


def _check_travels(runner: Runner) -> None:
    backend = runner.backend
    runner.check_awake()
    if runner.choices is not None:
        raise ConfigError(
            "the model records what its layers choose, and a prefix that travels does not have it",
            "load it without `record`, or compute the prefix here",
        )
    if backend.mesh.size > 1:
        raise ConfigError(f"{backend.mesh.size} ranks share the model, each with a part of a prefix", "use one rank")
    if backend.state_layout != "canonical":
        raise ConfigError(
            f"the backend {backend.name} keeps states in the layout {backend.state_layout}",
            "open it without that option, so that its states are canonical",
        )


def _states(runner: Runner) -> Iterator[tuple[str, State, Tensor]]:
    for index, name, state in runner.spec.states():
        yield f"{index}.{name}", state, runner.states.layers[index][name]


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).tolist())
