"""Where a checkpoint has each tensor of a model: transformers' load-time conversions as declarations of hal's.

transformers converts checkpoints when it loads them, and back when it saves. Here it converts the coordinates of each
element back. The result says which part of which tensor a checkpoint's tensor is, whatever the conversions are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from hal.errors import ConfigError
from hal.nn import Assembly, Weight
from hal.nn.weights.assembly import Region

REMEDY = "convert the checkpoint with transformers before: save_pretrained(..., save_original_format=False)"
Found = tuple[str, Region]
"""A tensor of the checkpoint, and the region of the model's tensor that it fills. Axes are ``axis0``, ``axis1``, ..."""


@attrs.frozen
class Regions(Assembly):
    """Sources whose regions are known.

    Attributes:
        parts: the region of each source, in their order.
    """

    parts: tuple[Region, ...]

    def regions(self, box: Mapping[str, tuple[int, int]], inner: tuple[str, ...]) -> Iterator[Region]:
        """Yield the regions."""
        yield from self.parts


@attrs.frozen
class Conversions:
    """How the tensors of a model lie in its checkpoint.

    Attributes:
        names: the model's spelling of a part of tensor names, by the checkpoint's.
        assembled: what fills a tensor that is no whole tensor of the checkpoint, by its name in the model.
    """

    names: dict[str, str]
    assembled: Mapping[str, Sequence[Found]]

    def weight(self, name: str, **options: Any) -> Weight | None:
        """Return the declaration of an assembled tensor, or None if the checkpoint has it whole.

        Args:
            options: further attributes of :class:`Weight`.
        """
        found = self.assembled.get(name)
        if found is None:
            return None
        path, _, last = name.rpartition(".")
        up = "." * (path.count(".") + 1 if path else 0)
        parts = tuple(_with_axes(region, last) for _, region in found)
        axes = " ".join(f"{last}_{dim}" for dim in range(len(parts[0].target)))
        return Weight(tuple(up + source for source, _ in found), axes, assemble=Regions(parts), **options)


def whole_weight(name: str, shape: Sequence[int]) -> Weight:
    """Return the declaration of a layer's tensor that the checkpoint has whole, with axes that may be put in any order.

    Args:
        name: its name in the layer, and in the checkpoint.
        shape: its shape in the checkpoint.
    """
    axes = tuple(f"{name}_{dim}" for dim in range(len(shape)))
    region = Region(
        {axis: (0, size) for axis, size in zip(axes, shape, strict=True)}, axes, tuple(shape), (0,) * len(axes)
    )
    return Weight((name,), " ".join(axes), assemble=Regions((region,)))


def conversions_of(model: Any) -> Conversions:
    """Return how the tensors of a model on the meta device lie in its checkpoint.

    Raises:
        ConfigError: a conversion is more than cutting, stacking, transposing and renaming.
    """
    own = {name: each for name, each in model.state_dict().items() if name not in model.all_tied_weights_keys}
    with torch.device("cpu"):
        index = {name: torch.tensor(float(place)) for place, name in enumerate(own)}
        which = _reverted(model, {name: index[name].expand(each.shape) for name, each in own.items()})
        where = [
            _reverted(model, {name: _coordinates(each.shape, dim) for name, each in own.items()})
            for dim in range(max(each.dim() for each in own.values()))
        ]
    names, found = list(own), dict[str, list[Found]]()
    for source, owners in which.items():
        # What is only cut, transposed or unstacked is one number still, without memory of its own.
        single = not any(stride and size > 1 for stride, size in zip(owners.stride(), owners.shape, strict=True))
        if not owners.numel():
            continue
        for owner in [owners[(0,) * owners.dim()].item()] if single else owners.unique().tolist():
            name = names[int(owner)]
            box = tuple(slice(0, size) for size in owners.shape) if single else _box(owners == owner, source)
            region = _region(source, owners.shape, box, own[name].dim(), [each[source][box] for each in where])
            found.setdefault(name, []).append((source, region))
    spelled: dict[str, str] = {}
    assembled = {}
    for name, parts in found.items():
        if len(parts) == 1 and _is_whole(parts[0][1], own[name].shape):
            spelled |= spelling(parts[0][0], name)
        else:
            assembled[name] = parts
    return Conversions(spelled, assembled)


class _Uncopied(Tensor):
    """A tensor that is never copied to be contiguous: coordinates take no memory of their own."""

    def contiguous(self, *_: Any, **__: Any) -> _Uncopied:
        return self


def _reverted(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = revert_weight_conversion(
        model, {name: each.as_subclass(_Uncopied) for name, each in tensors.items()}
    )
    return {name: each.as_subclass(Tensor) for name, each in found.items()}


def _coordinates(shape: Sequence[int], dim: int) -> Tensor:
    if dim >= len(shape):
        return torch.zeros((), dtype=torch.int64).expand(shape)
    return torch.arange(shape[dim]).view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)


def _is_whole(region: Region, shape: Sequence[int]) -> bool:
    axes = tuple(f"axis{dim}" for dim in range(len(shape)))
    return region.axes == axes and region.shape == tuple(shape)


def spelling(stored: str, name: str) -> dict[str, str]:
    """Return the differing middle of two names, by the checkpoint's."""
    if stored == name:
        return {}
    theirs, ours = stored.split("."), name.split(".")
    while theirs and ours and theirs[-1] == ours[-1] and len(theirs) > 1 and len(ours) > 1:
        theirs, ours = theirs[:-1], ours[:-1]
    while len(theirs) > 1 and len(ours) > 1 and theirs[0] == ours[0]:
        theirs, ours = theirs[1:], ours[1:]
    return {".".join(theirs): ".".join(ours)}


def _box(inside: Tensor, source: str) -> tuple[slice, ...]:
    spots = inside.nonzero()
    box = tuple(slice(int(low), int(high) + 1) for low, high in zip(spots.amin(0), spots.amax(0), strict=True))
    if not bool(inside[box].all()):
        raise ConfigError(f"{source} mixes several tensors of transformers' model otherwise than in blocks", REMEDY)
    return box


def _region(source: str, shape: Sequence[int], box: tuple[slice, ...], dims: int, where: Sequence[Tensor]) -> Region:
    """Return the region of a model's tensor from the coordinates, in it, of a block of a checkpoint's tensor."""
    target: dict[str, tuple[int, int]] = {}
    axes = [""] * len(shape)
    for dim in range(dims):
        grid = where[dim]
        varies = [axis for axis in range(grid.dim()) if grid.stride(axis) and grid.shape[axis] > 1]
        if len(varies) > 1:  # It was copied, so its strides say nothing.
            varies = [axis for axis in varies if bool((grid.diff(dim=axis) != 0).any())]
        line = grid[tuple(slice(None) if axis in varies[:1] else 0 for axis in range(grid.dim()))].flatten()
        low, high = int(line[0]), int(line[-1]) + 1
        if len(varies) > 1 or not torch.equal(line, torch.arange(low, high, dtype=line.dtype, device="cpu")):
            raise ConfigError(f"{source} is permuted by transformers when it is loaded", REMEDY)
        target[f"axis{dim}"] = (low, high)
        if varies:
            axes[varies[0]] = f"axis{dim}"
    # Axes of size 1 may be any dimension of size 1. Those left over are stacked.
    free = [axis for axis in target if axis not in axes and target[axis][1] - target[axis][0] == 1]
    for axis in reversed(range(len(shape))):
        if not axes[axis]:
            axes[axis] = free.pop(-1)
    return Region(target, tuple(axes), tuple(shape), tuple(each.start for each in box))


def _with_axes(region: Region, name: str) -> Region:
    """Return a region with axes named after its tensor, because those of two tensors of a layer may differ."""

    def of(axis: str) -> str:
        return f"{name}_{axis.removeprefix('axis')}"

    target = {of(axis): each for axis, each in region.target.items()}
    return attrs.evolve(region, target=target, axes=tuple(map(of, region.axes)))
