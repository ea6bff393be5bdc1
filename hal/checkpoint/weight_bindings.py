"""Bindings of a checkpoint's tensor slices to a model's tensors, as declared by its layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.checkpoint.safetensors_files import TensorInfo, TensorSlice
from hal.device.group import SOLO, Group
from hal.errors import ConfigError, ModelError, nearest
from hal.nn.weights.assembly import Interval, Region
from hal.nn.weights.weight import MOST_RANKS, TENSOR, Consumer, Weight, default_weight, source_name, unshared
from hal.parallel.mesh import Mesh


@attrs.frozen
class Piece:
    """A slice of a checkpoint's tensor, and the part of a layer's tensor that it fills.

    Attributes:
        source: the tensor's name in the checkpoint.
        source_shape: the shape of the whole tensor in the checkpoint.
        taken: the slice, by dimensions of the source.
        target: the part, by dimensions of the layer's tensor.
        order: the source dimension of each target dimension; None for a stacked dimension.
    """

    source: str
    source_shape: tuple[int, ...]
    taken: tuple[Interval, ...]
    target: tuple[Interval, ...]
    order: tuple[int | None, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the slice."""
        return torch.Size(stop - start for start, stop in self.taken).numel()

    def slice_of(self, info: TensorInfo) -> TensorSlice:
        """Return the slice of the checkpoint's tensor, which may have a last dimension of size 1 more."""
        more = len(info.shape) - len(self.taken)
        return TensorSlice(self.source, (*self.taken, *[(0, 1)] * more))

    def put(self, tensor: Tensor, start: int, values: Tensor) -> None:
        """Copy rows of the slice into the layer's tensor.

        Args:
            start: the first row, relative to the slice.
        """
        where: list[int | slice] = []
        for (first, stop), dim in zip(self.target, self.order, strict=True):
            if dim is None:
                where.append(first)
            elif dim == 0:
                where.append(slice(first + start, first + start + values.shape[0]))
            else:
                where.append(slice(first, stop))
        tensor[tuple(where)].copy_(values.permute([dim for dim in self.order if dim is not None]))


def rounds(dtype: torch.dtype) -> bool:
    """Return whether a dtype holds unscaled numbers, which are rounded to another dtype. 8-bit numbers have a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


@attrs.frozen(eq=False)
class Binding:
    """A tensor that a layer needs, and its declaration.

    Attributes:
        path: the layer's path in the model.
        name: the tensor's name in the layer.
        tensor: a tensor of its shape and dtype on the meta device, such as the parameter as built.
        pieces_of_whole: the pieces that a single rank reads.

    Raises:
        ModelError: the declaration does not fit the tensor.
    """

    path: str
    module: nn.Module
    name: str
    weight: Weight
    tensor: Tensor
    sizes: Mapping[str, int] = attrs.field(init=False)
    pieces_of_whole: tuple[Piece, ...] = attrs.field(init=False)

    @sizes.default
    def _sizes(self) -> Mapping[str, int]:
        weight, shape = self.weight, tuple(self.tensor.shape)
        if len(weight.names) != len(shape) or (weight.sizes is not None and weight.shape(weight.sizes) != shape):
            sizes = "" if weight.sizes is None else f" of {', '.join(map(str, weight.sizes))} elements"
            raise ModelError(
                f"{self.full_name} is declared with the axes {weight.axes!r}{sizes} and has the shape {[*shape]}",
                "declare one axis per dimension",
            )
        return dict(zip(weight.names, weight.sizes or shape, strict=True))

    @pieces_of_whole.default
    def _pieces_of_whole(self) -> tuple[Piece, ...]:
        return self._pieces(0, 1)

    @property
    def full_name(self) -> str:
        """The tensor's name in the model."""
        return f"{self.path}.{self.name}".lstrip(".")

    def dtype(self, computing: torch.dtype) -> torch.dtype:
        """Return the dtype of the loaded tensor, in a model that computes in ``computing``."""
        return computing if self.weight.dtype is None and rounds(self.tensor.dtype) else self.held

    @property
    def held(self) -> torch.dtype:
        """The declared dtype. A tensor in the dtype of computation may have any dtype that rounds to it."""
        return self.weight.dtype or self.tensor.dtype

    @property
    def sources(self) -> list[str]:
        """The names of its checkpoint tensors."""
        return [source_name(self.path, each) for each in self.weight.sources]

    def pieces(self, rank: int = 0, ranks: int = 1) -> tuple[Piece, ...]:
        """Return the pieces that one of several ranks reads.

        Args:
            ranks: the number of ranks that share the tensor along the axis ``shard``, as ``share`` says. Without
                ``shard``, each rank reads the whole tensor. A rank gets its share of each concatenated part, so that
                the parts keep their order.

        Raises:
            ConfigError: the ranks cannot share the tensor equally, or a cut between them is inside a group.
        """
        whole = ranks == 1 or self.weight.shard is None
        return self.pieces_of_whole if whole else self._pieces(rank, ranks)

    def _pieces(self, rank: int, ranks: int) -> tuple[Piece, ...]:
        weight, sizes = self.weight, self.sizes
        if not weight.sources:  # A quantization scheme computes it.
            return ()
        try:
            regions = list(weight.assemble.regions({axis: (0, size) for axis, size in sizes.items()}, weight.names))
        except ModelError as error:
            raise ModelError(f"{self.full_name}: {error.problem}", error.remedy) from None
        if len(regions) != len(weight.sources):
            raise ModelError(
                f"{self.full_name} is assembled from {len(regions)} tensors, but has {len(weight.sources)} sources",
                "declare one source per tensor, in order",
            )
        self._check_groups(regions, ranks)
        kept = self._kept(rank, ranks)
        return tuple(
            piece
            for source, region in zip(self.sources, regions, strict=True)
            for piece in _pieces(source, region, weight, kept)
        )

    def _kept(self, rank: int, ranks: int) -> list[tuple[Interval, int]]:
        """Return the intervals of the axis ``shard`` that a rank keeps, with their positions in the rank's tensor."""
        axis, kept, start, place = self.weight.shard, list[tuple[Interval, int]](), 0, 0
        if axis is None:
            return kept
        for cut in self.weight.assemble.cuts(axis, self.sizes[axis]):
            try:
                size, (first, last) = self.weight.share.size(cut, ranks), self.weight.share.interval(cut, rank, ranks)
            except ConfigError as error:
                raise error.reworded(f"{self.full_name}, {axis}: {error.problem}", error.remedy) from None
            kept.append(((start + first, start + last), place))
            start, place = start + cut, place + size
        return kept

    def _check_groups(self, regions: Iterable[Region], ranks: int) -> None:
        """Raise ConfigError unless in each rank's tensor, element ``i`` of an axis belongs to group ``i // size``."""
        for axis in (each for each in self.weight.names if self.weight.unit(each) > 1):
            unit = self.weight.unit(axis)
            starts = [region.target[axis][0] for region in regions]
            starts += [region.starts[region.axes.index(axis)] for region in regions if axis in region.axes]
            if inside := [each for each in starts if each % unit]:
                raise ConfigError(
                    f"{self.full_name}: a part starts at element {inside[0]} of {axis}, inside a group of {unit}",
                    "quantize the layer with groups that divide each of the parts that are merged",
                )
            end = 0
            for first, last, place in self._parts(axis, ranks) if axis == self.weight.shard else ():
                alone = axis in self.weight.group_sizes and first // unit == (last - 1) // unit
                if first < last and (place % unit or (first % unit and not alone)):
                    raise ConfigError(
                        f"{self.full_name}: a cut between {ranks} ranks at element {first if first % unit else end} of "
                        f"{axis} is inside a group of {unit}",
                        f"set --tensor-parallel, or {TENSOR}, to a number that cuts between groups",
                        key=TENSOR,
                    )
                end = last

    def _parts(self, axis: str, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first element, the end and the place of each part of an axis that a rank keeps, for all ranks."""
        for rank in range(ranks):
            for (first, last), place in self._kept(rank, ranks):
                yield first, last, place

    def ranks(self, mesh: Mesh) -> Group:
        """Return the ranks of a mesh that share the tensor. A layer that does not know of ranks has the whole one."""
        shared: Group = getattr(mesh, self.weight.group) if hasattr(self.module, "split") else SOLO
        return shared

    def suits(self, ranks: int) -> bool:
        """Return whether so many ranks can share the tensor."""
        try:
            self.local_shape(ranks)
            self.pieces(0, ranks)
        except ConfigError:
            return False
        return True

    def rank_shape(self, mesh: Mesh) -> torch.Size:
        """Return the shape of one rank's tensor."""
        return self.local_shape(self.ranks(mesh).size)

    def local_shape(self, ranks: int) -> torch.Size:
        """Return the shape of one rank's tensor.

        Raises:
            ConfigError: the ranks cannot share the tensor.
        """
        weight, sizes = self.weight, dict(self.sizes)
        if weight.shard is not None and ranks > 1:
            cuts = weight.assemble.cuts(weight.shard, sizes[weight.shard])
            sizes[weight.shard] = sum(weight.share.size(cut, ranks) for cut in cuts)
        return torch.Size(weight.shape(tuple(sizes.values())))


@contextmanager
def naming_counts(bindings: Iterable[Binding]) -> Iterator[None]:
    """Name the numbers of ranks that suit all tensors, in errors about one that does not suit a tensor."""
    try:
        yield
    except ConfigError as error:
        if error.key != TENSOR:
            raise
        counts = list(range(1, MOST_RANKS + 1))
        for each in bindings:
            if each.weight.group == "tensor" and hasattr(each.module, "split"):
                counts = [ranks for ranks in counts if each.suits(ranks)]
        raise unshared(error.problem, "one of the numbers that suit all weights of the model", counts) from None


def set_tensor(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Make ``tensor`` the one of this name of a layer, as a parameter if the former one is."""
    if tensor is not None and name in dict(module.named_parameters(recurse=False)):
        tensor = nn.Parameter(tensor, requires_grad=False)
    setattr(module, name, tensor)


def weight_bytes(bindings: Iterable[Binding], computing: torch.dtype, mesh: Mesh) -> int:
    """Return the bytes of the tensors that one of several ranks holds, in the form of the declarations.

    Args:
        bindings: of the whole model.
        computing: the dtype that the model computes in.
    """
    return sum(each.rank_shape(mesh).numel() * each.dtype(computing).itemsize for each in bindings)


def bindings_of(model: nn.Module, stored: Mapping[str, Mapping[str, Weight]] = MappingProxyType({})) -> list[Binding]:
    """Return the bindings of all tensors that a checkpoint or a scheme fills, in the model's order.

    Args:
        model: without values.
        stored: the tensors to read for quantized layers in place of their own, by path.

    Raises:
        ModelError: a declaration is invalid, or does not fit its layer.
    """
    found = []
    for path, module in model.named_modules():
        sizes: dict[str, int] = {}
        for name, weight, tensor in _tensors(path, module, stored.get(path)):
            binding = Binding(path, module, name, weight, tensor)
            for axis, size in binding.sizes.items():
                if sizes.setdefault(axis, size) != size:
                    raise ModelError(
                        f"the axis {axis} of {binding.full_name} has {size} elements, but {sizes[axis]} elsewhere in "
                        "its layer",
                        "give different axes different names",
                    )
            found.append(binding)
    return found


def sources_of(model: nn.Module) -> set[str]:
    """Return the names of the checkpoint tensors that a model reads.

    Raises:
        ModelError: a declaration is invalid.
    """
    return {
        source_name(path, source)
        for path, module in model.named_modules()
        for _, weight, _ in _tensors(path, module)
        for source in weight.sources
    }


def _tensors(
    path: str, module: nn.Module, stored: Mapping[str, Weight] | None = None
) -> Iterator[tuple[str, Weight, Tensor]]:
    """Yield the names, declarations and tensors of a layer, or those that are stored in place of its own."""
    declared = _declared(path, module)
    held: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    held |= {name: buffer for name, buffer in module.named_buffers(recurse=False) if name in declared}
    if stored is None:
        for name, tensor in held.items():
            yield name, declared.get(name) or default_weight(name, tensor.shape), tensor
        return
    for name, weight in stored.items():
        if weight.sizes is None:
            yield name, weight, held[name]
        else:
            yield name, weight, torch.empty(weight.shape(weight.sizes), dtype=weight.dtype, device="meta")


def _declared(path: str, module: nn.Module) -> Mapping[str, Weight]:
    declared: Any = getattr(module, "weights", None)
    if declared is None or isinstance(declared, nn.Module | Tensor):  # A submodule or parameter may have that name.
        return {}
    what = f"weights of {type(module).__name__} at {path!r}"
    if not isinstance(declared, Mapping) or not all(isinstance(each, Weight) for each in declared.values()):
        raise ModelError(f"{what} is {declared!r:.70}", "make it a mapping from names to hal.nn.Weight")
    # A layer may declare a tensor that it was built without, such as a bias.
    held = {**module._parameters, **module._buffers}
    for name, weight in declared.items():
        if name not in held:
            raise ModelError(f"{what} declares {name!r}, which is no parameter or buffer of it", nearest(name, held))
        for consumer in (weight.consumer, weight.tied_use and weight.tied_use.consumer):
            if consumer is not None:
                _check_consumer(f"{what} says of {name!r}", consumer)
    return declared


def _check_consumer(what: str, consumer: Consumer) -> None:
    known = ops.operation(consumer.operation).weights
    if consumer.argument not in known:
        raise ModelError(
            f"{what} that {consumer.operation} takes it as {consumer.argument!r}, which is none of its weights",
            nearest(consumer.argument, known) if known else f"declare {consumer.operation} with weights=",
        )


def _pieces(source: str, region: Region, weight: Weight, kept: list[tuple[Interval, int]]) -> Iterator[Piece]:
    axes, shard = weight.names, weight.shard
    order = tuple(region.axes.index(axis) if axis in region.axes else None for axis in axes)
    starts = dict(zip(region.axes, region.starts, strict=True))
    targets: list[tuple[Mapping[str, Interval], int]] = [(region.target, 0)]
    if shard is not None:
        targets = []
        for (start, stop), place in kept:
            first, last = max(start, region.target[shard][0]), min(stop, region.target[shard][1])
            if first < last or (start, stop) == region.target[shard]:  # The latter covers parts without elements.
                targets.append(({**region.target, shard: (first, last)}, place - start))
    shape = tuple(-(-size // weight.unit(axis)) for axis, size in zip(region.axes, region.shape, strict=True))
    for target, shift in targets:
        taken = []
        for axis in region.axes:
            begin = starts[axis] + target[axis][0] - region.target[axis][0]
            taken.append(_elements(weight, axis, begin, begin + target[axis][1] - target[axis][0]))
        placed = {**target, shard: (target[shard][0] + shift, target[shard][1] + shift)} if shard else target
        yield Piece(source, shape, tuple(taken), tuple(_elements(weight, axis, *placed[axis]) for axis in axes), order)


def _elements(weight: Weight, axis: str, start: int, stop: int) -> Interval:
    """Return the elements of a tensor that an interval of an axis belongs to."""
    unit = weight.unit(axis)
    return start // unit, -(-stop // unit)
