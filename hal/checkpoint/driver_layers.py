"""Replacement of ``hal.nn`` layers in a model by a driver's subclasses."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hal.drivers.backend import Backend, LayerMaker
from hal.errors import DriverIncompatible
from hal.nn import CausalLM
from hal.nn.weights.weight import EQUALLY, Share, Weight

log = logging.getLogger("hal.checkpoint")

Sharing = tuple[str | None, Share, bool, str]
"""How ranks share a tensor: the fields ``shard``, ``share``, ``once`` and ``among`` of its declaration."""
WHOLE: Sharing = (None, EQUALLY, False, "tensor")
"""Of a tensor without a declaration, which is whole on each rank."""


def put_layers(model: CausalLM, backend: Backend) -> bool:
    """Replace the layers of a model without values by the backend's. Return whether any was replaced.

    Inner layers are replaced first, so that the replacement of an outer layer contains them.

    Raises:
        DriverIncompatible: a replacement is no subclass of the layer, has other tensors, or declares that several ranks
            share them in another way.
    """
    made: dict[nn.Module, nn.Module] = {}
    counts: Counter[str] = Counter()
    with torch.device("meta"):
        for path, layer in reversed(list(model.named_modules(remove_duplicate=False))):
            make = backend.layers.get(type(layer))  # A subclass computes something else, and stays.
            if make is None or getattr(layer, "quantized", False):  # It multiplies by numbers of another form.
                continue
            if layer not in made:
                made[layer] = _made(layer, make, backend.name, ranks=backend.mesh.size)
            if made[layer] is not layer:
                model.set_submodule(path, made[layer])
                counts[f"{type(made[layer]).__name__} for {type(layer).__name__}"] += 1
    if counts:
        log.info(
            "layers of %s in %s: %s",
            backend.name,
            type(model).__name__,
            ", ".join(f"{which} ({times} times)" for which, times in counts.items()),
        )
    return bool(counts)


def replaced(model: nn.Module, plain: nn.Module) -> Iterator[tuple[type, type]]:
    """Yield, for each replaced layer of ``model``, its type in ``plain`` and its type in ``model``."""
    layers = dict(model.named_modules())
    for path, layer in plain.named_modules():
        if path in layers and type(layers[path]) is not type(layer):
            yield type(layer), type(layers[path])


def _made(layer: nn.Module, make: LayerMaker, driver: str, ranks: int) -> nn.Module:
    wanted, shared = _tensors(layer), _sharing(layer)  # The driver may take the layer apart.
    new, name = make(layer), type(layer).__name__
    if not isinstance(new, type(layer)):
        raise DriverIncompatible(
            f"the driver {driver} replaces {name} by {type(new).__name__}, which is no subclass of it",
            f"derive it from {name}, so that models can call it alike",
        )
    if wrong := sorted(wanted.items() ^ _tensors(new).items()):
        raise DriverIncompatible(
            f"the driver {driver} replaces {name} by a {type(new).__name__} with other parameters: {wrong[0][0]}",
            f"give it the parameters of {name}, by name, shape, dtype, function and offset: a checkpoint fills them",
        )
    if ranks > 1 and (other := sorted(each for each, how in _sharing(new).items() if how != shared.get(each, WHOLE))):
        raise DriverIncompatible(
            f"the driver {driver} replaces {name} by a {type(new).__name__} whose {other[0]} is declared to be "
            f"shared in another way by {ranks} ranks",
            f"pass the arguments `shard` and `share` of {name} on, and keep its `weights`",
        )
    return new


def _tensors(layer: nn.Module) -> dict[str, tuple[tuple[int, ...], str, str, float]]:
    changed = {name: (getattr(each.function, "__qualname__", ""), each.offset) for name, each in _declared(layer)}
    held = layer.state_dict().items()
    return {name: (tuple(each.shape), str(each.dtype), *changed.get(name, ("", 0.0))) for name, each in held}


def _sharing(layer: nn.Module) -> dict[str, Sharing]:
    found = dict.fromkeys(layer.state_dict(), WHOLE)
    for name, each in _declared(layer):
        if name in found:
            found[name] = (each.shard, each.share, each.first_rank_only, each.group)
    return found


def _declared(layer: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Yield the full names and declarations of the tensors of a layer and those in it."""
    for path, module in layer.named_modules():
        declared = getattr(module, "weights", None)
        for name, each in declared.items() if isinstance(declared, Mapping) else ():
            yield f"{path}.{name}".lstrip("."), each
