"""The adapters (LoRA) of a model: room in its projections, and adapters by name, each in a slot of that room."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from hal.checkpoint.adapter_files import LORA_A, LORA_B, AdapterFiles
from hal.checkpoint.tensor_names import renamed
from hal.checkpoint.weight_bindings import Binding, Piece
from hal.config.settings import AdaptersConfig
from hal.device.group import Group
from hal.drivers.backend import Backend
from hal.errors import LISTED, BatchError, CheckpointError, ConfigError, nearest
from hal.nn import CausalLM, Experts, GroupedLinear, Linear
from hal.nn.linear import IN, OUT
from hal.nn.lora import Lora, begin_step, end_step
from hal.ops.declaration.operation import DEFAULT_TOLERANCE
from hal.step.model_batches import adapter_batch

log = logging.getLogger("hal.checkpoint")

Adapted = Linear | GroupedLinear
_RANK = "rank"
_numbers = itertools.count(1)
"""Numbers of adapters in this process, so that two of one name are never taken for one another."""
_TRIED = 8
"""The rows with which an adapter is compared with merged weights."""


@attrs.define(eq=False)
class Adapter:
    """A loaded adapter.

    Attributes:
        name: its name in requests.
        slot: its place in the stacked tensors.
        number: differs from that of every other adapter of this process, also of an earlier one of this name.
        users: the requests that use it.
        named: whether requests can still name it.
        folder: where its files are.
    """

    name: str
    slot: int
    number: int
    _adapters: Adapters
    folder: str | Path
    users: int = 0
    named: bool = True

    def give_back(self) -> None:
        """End a request's use of it."""
        self._adapters.give_back(self)

    def identity(self, token: int) -> int:
        """Return what stands for a sequence's first token in the cache of prefixes, which adapters do not share."""
        digest = hashlib.sha256(f"{self.number} {token}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)


@attrs.frozen(eq=False)
class _Layer:
    """A projection, or that of all experts, with room for adapters.

    Attributes:
        experts: the slots of ``lora`` for each adapter: one for each expert.
        a: the declaration of A of all its parts, as if the checkpoint had it.
        b: likewise of B, whose rows are placed as those of the weight.
    """

    path: str
    module: Adapted
    lora: Lora
    experts: int
    a: tuple[Piece, ...]
    b: tuple[Piece, ...]

    @classmethod
    def of(cls, path: str, module: Adapted, config: AdaptersConfig, ranks: Group, like: Tensor) -> _Layer:
        """Give a projection room for adapters, on a device and in a dtype."""
        assert config.slots is not None
        sizes = {_RANK: config.rank}
        a, b = (
            Binding(path, module, name, weight, torch.empty(weight.shape(weight.sizes or ()), device="meta"))
            for name, weight in (
                (LORA_A, module.declare(LORA_A, f"{_RANK} {IN}", sizes=sizes)),
                (LORA_B, module.declare(LORA_B, f"{OUT} {_RANK}", sizes=sizes)),
            )
        )
        given = a.pieces(ranks.rank, ranks.size), b.pieces(ranks.rank, ranks.size)
        num_parts, rank, in_features = a.local_shape(ranks.size)[-3:]
        out_features = b.local_shape(ranks.size)[-2]
        first = [_module(each) for each in a.sources[:num_parts]]  # those of the first expert
        parts = _runs(first, [piece for piece in given[1] if _module(piece.source) in first], out_features)
        experts = module.num_experts or 1
        sizes_of_a = config.slots * experts, num_parts, rank, in_features
        lora = Lora(*sizes_of_a, parts, out_features, dtype=like.dtype, device=like.device)
        module.lora = lora
        return cls(path, module, lora, experts, *given)

    def _shaped(self, tensor: Tensor) -> Tensor:
        """Return a tensor of ``lora`` with the axes of the declarations, behind that of adapters."""
        return tensor if self.module.num_experts is None else tensor.unflatten(0, (-1, self.experts))

    def write(self, slot: int, values: Mapping[str, Tensor]) -> None:
        """Replace what a slot holds. Projections that the adapter does not change get zeros.

        Args:
            values: the adapter's tensors by the model's names, B scaled.
        """
        held = [self._shaped(each)[slot] for each in (self.lora.lora_a, self.lora.lora_b)]
        a, b = (torch.zeros(each.shape, dtype=each.dtype) for each in held)
        rank = b.shape[-2]
        for piece in self.a:
            if (given := values.get(piece.source)) is not None:
                rows = functional.pad(given, (0, 0, 0, rank - given.shape[0]))
                piece.put(a, 0, rows[_slices(piece)])
        for piece in self.b:
            if (given := values.get(piece.source)) is not None:
                columns = functional.pad(given, (0, rank - given.shape[1]))
                piece.put(b.mT, 0, columns[_slices(piece)])
        for tensor, new in zip(held, (a, b), strict=True):
            tensor.copy_(new)

    def difference(self, slot: int, values: Mapping[str, Tensor]) -> float:
        """Return how much an adapter in a slot differs from its product with A and B merged into the weight.

        Relative to the largest element of the output, for random inputs. Of experts, the first that it changes.
        """
        like = self.lora.lora_a
        x = torch.randn(_TRIED, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like)
        changed = [piece for piece in self.b if piece.source in values]
        if isinstance(self.module, GroupedLinear):
            expert = changed[0].target[0][0]
            changed = [piece for piece in changed if piece.target[0][0] == expert]
            counts = torch.zeros(self.experts, dtype=torch.int64, device=like.device)
            counts[expert] = _TRIED
            output, slot = self.module.product(x, counts), slot * self.experts + expert
        else:
            output = self.module.product(x)
        slots = torch.full((_TRIED,), slot, dtype=torch.int32, device=like.device)
        applied = self.lora(output, x, slots).float().cpu()
        merged, wide = output.float().cpu(), x.float().cpu()
        inputs = {piece.source: piece for piece in self.a}
        for piece in changed:
            source = f"{_module(piece.source)}.{LORA_A}"
            a = values[source][:, slice(*inputs[source].taken[1])]
            update = values[piece.source][slice(*piece.taken[0])] @ a.float()
            merged[:, slice(*piece.target[-2])] += wide @ update.t()
        largest = merged.abs().max().item()
        return (applied - merged).abs().max().item() / (largest or 1.0)


class Adapters:
    """The adapters of a model by name. A captured step uses those that are loaded, changed and removed after it.

    An adapter that is loaded under a known name, or removed, stays in its slot for the requests that use it, and frees
    the slot after the last of them. Threading: any thread may call the methods.

    Args:
        model: loaded on the backend. Its projections get room, and its batches the field ``adapter_slots``.
        config: the room.
    """

    def __init__(self, model: CausalLM, backend: Backend, config: AdaptersConfig, dtype: torch.dtype) -> None:
        self._model, self._backend, self._config = model, backend, config
        self._lock = threading.Lock()
        assert config.slots is not None
        self._free = list(range(config.slots))[::-1]
        self._named: dict[str, Adapter] = {}
        like = torch.empty(0, dtype=dtype, device=backend.device.torch)
        with torch.inference_mode():
            self._layers = [
                _Layer.of(path, module, config, backend.mesh.tensor, like)
                for path, module in _projections(model, experts=config.experts)
            ]
        known = {piece.source: (layer, piece) for layer in self._layers for piece in (*layer.a, *layer.b)}
        self._known = known
        base: Any = model.batch_type
        model.batch_type = adapter_batch(base)
        model.register_forward_pre_hook(begin_step)
        model.register_forward_hook(end_step, always_call=True)

    @property
    def names(self) -> list[str]:
        """The names of the loaded adapters."""
        with self._lock:
            return list(self._named)

    def load(self, name: str, folder: str | Path) -> None:
        """Load an adapter that PEFT saved, also in the place of one of the same name.

        It is compared with merged weights in a layer of each kind; a difference above the tolerance of the dtype is
        logged as a warning.

        Args:
            name: its name in requests.
            folder: with adapter_config.json and adapter_model.safetensors.

        Raises:
            CheckpointError: the files are missing or damaged, do not fit the model, or ask for what hal does not
                compute.
            ConfigError: its rank is above ``adapters.rank``, or no slot is free.
        """
        files = AdapterFiles.open(folder)
        values = self._checked(files)
        with self._lock:
            former = self._named.get(name)
            slot = self._slot(name, former)
            with self._backend.uses, torch.inference_mode():
                token = self._backend.enter()
                try:
                    for layer in self._layers:
                        layer.write(slot, values)
                    self._compare(name, slot, values)
                    self._backend.device.synchronize()
                finally:
                    self._backend.leave(token)
            self._retire(former, kept=slot)
            self._named[name] = Adapter(name, slot, next(_numbers), self, folder)

    def remove(self, name: str) -> None:
        """Remove an adapter. Requests that use it end with it.

        Raises:
            ConfigError: there is none of this name.
        """
        with self._lock:
            self._retire(self._find(name))
            del self._named[name]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all slots."""
        return [each for layer in self._layers for each in layer.lora.buffers()]

    def check_unused(self) -> None:
        """Raise BatchError if a request uses an adapter."""
        with self._lock:
            assert self._config.slots is not None
            if self._config.slots - len(self._free) > sum(not each.users for each in self._named.values()):
                raise BatchError("requests use adapters, whose memory is to be given back", "finish or drop them first")

    def read_again(self) -> None:
        """Read all adapters from their folders into their slots, which may hold anything.

        Raises:
            CheckpointError: as :meth:`load`.
        """
        with self._lock:
            for adapter in self._named.values():
                read = self._checked(AdapterFiles.open(adapter.folder))
                for layer in self._layers:
                    layer.write(adapter.slot, read)
                adapter.number = next(_numbers)  # The files may have changed.

    def take(self, name: str) -> Adapter:
        """Return the adapter of a request, which stays in its slot until :meth:`give_back`.

        Raises:
            ConfigError: there is none of this name.
        """
        with self._lock:
            found = self._find(name)
            found.users += 1
            return found

    def give_back(self, adapter: Adapter) -> None:
        """End a request's use of an adapter."""
        with self._lock:
            adapter.users -= 1
            if not adapter.named and not adapter.users:
                self._free.append(adapter.slot)

    def check(self, name: str) -> None:
        """Raise ConfigError unless there is an adapter of this name."""
        with self._lock:
            self._find(name)

    def _find(self, name: str) -> Adapter:
        if name not in self._named:
            raise ConfigError(f"there is no adapter {name!r:.70}", nearest(name, self._named), key="adapter")
        return self._named[name]

    def _slot(self, name: str, former: Adapter | None) -> int:
        """Return the slot for a new adapter: a free one, or that of the former one if no request uses it."""
        if former is not None and not former.users:
            return former.slot
        if self._free:
            return self._free.pop()
        used = f", of which requests use {name!r:.70}" if former is not None else ""
        raise ConfigError(
            f"all {self._config.slots} slots of adapters are taken{used}",
            "remove one, wait for its requests to end, or raise adapters.slots",
            key="adapters.slots",
        )

    def _retire(self, adapter: Adapter | None, kept: int | None = None) -> None:
        """Forget an adapter's name, and free its slot unless requests use it, or ``kept`` is the slot."""
        if adapter is not None:
            adapter.named = False
            if not adapter.users and adapter.slot != kept:
                self._free.append(adapter.slot)

    def _checked(self, files: AdapterFiles) -> dict[str, Tensor]:
        """Return an adapter's tensors by the model's names, B in float32, times its scale."""
        own = {name: name for name in files.tensors}
        stored = renamed(own, self._model, self._known.keys())
        if unknown := sorted(name for name in stored if name not in self._known):
            modules = list(dict.fromkeys(_module(name) for name in unknown))
            more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            raise CheckpointError(
                f"{files.folder} changes {', '.join(modules[:3])}{more}, which {type(self._model).__name__} lacks, or "
                "which takes no adapters: routed experts take some with adapters.experts, and embeddings, the output "
                "projection, and encoders take none",
                "use an adapter of this model's other projections, or merge it (merge_and_unload in peft)"
                + ", or set adapters.experts to true" * files.changes_experts,
            )
        if files.largest_rank > self._config.rank:
            raise ConfigError(
                f"{files.folder} has the rank {files.largest_rank}, and there is room for {self._config.rank}",
                f"set adapters.rank to {files.largest_rank}",
                key="adapters.rank",
            )
        wrong = []
        for name, old in stored.items():
            _, piece = self._known[name]
            rank, given = files.rank_of(_module(old)), files.tensors[old].shape
            wanted = (rank, piece.source_shape[1]) if name.endswith(LORA_A) else (piece.source_shape[0], rank)
            if given != wanted:
                wrong.append(f"{old} is {list(given)}, not {list(wanted)}")
        if wrong:
            raise CheckpointError(
                f"{files.folder} does not fit {type(self._model).__name__}: {'; '.join(wrong[:LISTED])}",
                "use an adapter that was trained for this model",
            )
        values = files.read()
        scaled = {old: files.scale_of(_module(old)) for old in values if old.endswith(LORA_B)}
        values |= {old: values[old].float() * scale for old, scale in scaled.items()}
        return {name: values[old] for name, old in stored.items()}

    def _compare(self, name: str, slot: int, values: Mapping[str, Tensor]) -> None:
        """Warn if an adapter that is applied differs from a merged one, in a layer of each kind."""
        kinds: dict[tuple[str, ...], _Layer] = {}
        for layer in self._layers:
            if any(piece.source in values for piece in layer.a):
                kinds.setdefault(tuple(layer.path.split(".")[-2:]), layer)
        for layer in kinds.values():
            found, allowed = layer.difference(slot, values), DEFAULT_TOLERANCE[layer.lora.lora_a.dtype][0]
            if not found <= allowed:
                log.warning(
                    "the adapter %s, applied to %s, differs from merged weights by %.2g of the largest output, "
                    "where rounding explains %.2g",
                    name,
                    layer.path,
                    found,
                    allowed,
                )


def make_room(model: CausalLM, backend: Backend, dtype: torch.dtype) -> None:
    """Give a model room for adapters, if the backend's configuration asks for it.

    Raises:
        ConfigError: the model has no projection that takes adapters, or they do not fit the memory.
    """
    config = backend.config.adapters
    if config.slots is None:
        return
    found = [module for _, module in _projections(model, experts=config.experts)]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no projection that takes adapters", "leave adapters.slots out")
    features = sum(
        (max(1, len(each.layers)) * each.in_features + each.out_features) * (each.num_experts or 1) for each in found
    )
    needed = config.slots * config.rank * features * dtype.itemsize // backend.mesh.tensor.size
    if needed > (free := backend.device.memory_stats().free):
        raise ConfigError(
            f"{config.slots} adapters of the rank {config.rank} take {needed >> 20} MiB, and {free >> 20} MiB are free",
            "lower adapters.slots or adapters.rank",
            key="adapters.slots",
        )
    model.adapters = Adapters(model, backend, config, dtype)


def _projections(model: CausalLM, *, experts: bool) -> Iterator[tuple[str, Adapted]]:
    """Yield the projections that take adapters, by path, those of routed experts only with ``experts``."""
    encoder = set() if model.encoder is None else set(model.encoder.modules())
    for path, module in model.named_modules():
        if module in encoder or path == model.output_projection:
            continue
        if isinstance(module, Linear) and module.takes_adapters:
            yield path, module
        elif experts and isinstance(module, Experts):
            _check_whole(module)
            yield f"{path}.gate_up_proj", module.gate_up_proj
            yield f"{path}.down_proj", module.down_proj


def _check_whole(experts: Experts) -> None:
    """Raise ConfigError if ranks hold whole experts, whose tokens' adapters they do not know."""
    if experts.exchange is not None:
        raise ConfigError(
            "adapters.experts is true, and ranks that hold whole experts do not know the adapters of their tokens",
            'set parallel.experts to "split", or adapters.experts to false',
            key="adapters.experts",
        )


def _module(name: str) -> str:
    """Return the projection of a tensor's name."""
    return name.removesuffix(f".{LORA_A}").removesuffix(f".{LORA_B}")


def _slices(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in piece.taken)


def _runs(modules: list[str], pieces: list[Piece], size: int) -> str:
    """Return which part of A each run of an output reads, as :func:`hal.ops.add_lora` takes it."""
    found: list[list[int]] = []
    for piece in sorted(pieces, key=lambda each: each.target[-2]):
        part, (start, end) = modules.index(_module(piece.source)), piece.target[-2]
        if found and found[-1][0] == part:
            found[-1][1] += end - start
        elif end > start:
            found.append([part, end - start])
    missing = size - sum(count for _, count in found)
    if missing:
        found[-1][1] += missing  # padding of the last rank
    return " ".join(f"{part}:{count}" for part, count in found)
