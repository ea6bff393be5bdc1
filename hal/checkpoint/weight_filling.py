"""The tensors of a model's layers while they are assembled, piece by piece, then finished and prepared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hal.checkpoint.quantized_layers import QuantizedLayer
from hal.checkpoint.weight_bindings import Binding, Piece, rounds, set_tensor
from hal.device.host_memory import CHUNK, SharedChunks, host_empty
from hal.drivers.backend import Backend
from hal.errors import CheckpointError
from hal.nn import WeightUse
from hal.ops.forms import FLOAT
from hal.parallel.mesh import Mesh
from hal.quantization.stored_layer import Tensors


class WeightBuffers:
    """Allocates the tensors in which weights are assembled before a backend converts them.

    Successive weights of a dtype reuse one buffer.

    Args:
        backend: converts them.
        sizes: the numbers of elements of the weights, by dtype.
        most: the bytes of a large weight. Larger ones get separate memory, which they give back.
    """

    def __init__(self, backend: Backend, sizes: Mapping[torch.dtype, Iterable[int]], most: int) -> None:
        self._device = backend.device.torch
        self._prepares = type(backend).prepare_weights is not Backend.prepare_weights
        self._on_host, self._kept = self._prepares and self._device.type == "cpu", SharedChunks()
        self._elements = {
            dtype: max((size for size in each if size * dtype.itemsize <= most), default=0)
            for dtype, each in sizes.items()
        }
        self._free: dict[torch.dtype, Tensor] = {}
        self._taken: dict[int, Tensor] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory for a weight."""
        if not self._prepares or shape.numel() > self._elements[dtype]:
            return self._allocated(shape, dtype)
        memory = self._free.pop(dtype, None)
        if memory is None:
            memory = self._allocated(torch.Size([self._elements[dtype]]), dtype)
        self._taken[memory.data_ptr()] = memory
        return memory[: shape.numel()].view(shape)

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a tensor to keep: the given one, or a copy.

        A tensor that shares the memory of a weight that was taken is copied. On the host, all small ones are, so that
        they lie side by side in huge pages.
        """
        # A tensor that is not strided, such as oneDNN's packed weights, has no storage and is no view.
        if tensor.layout is not torch.strided:
            return tensor
        place = tensor.untyped_storage().data_ptr()
        shared = any(memory.untyped_storage().data_ptr() == place for memory in self._taken.values())
        if self._on_host and tensor.is_contiguous() and (shared or tensor.nbytes <= CHUNK // 4):
            return self._kept.copy(tensor)
        return tensor.clone() if shared else tensor

    def give_back(self, weight: Tensor) -> None:
        """Reuse a weight's memory for the next one, if :meth:`take` returned it from a buffer."""
        memory = self._taken.pop(weight.data_ptr(), None)
        if memory is not None:
            self._free[memory.dtype] = memory

    def _allocated(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return host_empty(shape, dtype) if self._on_host else torch.empty(shape, dtype=dtype, device=self._device)


log = logging.getLogger("hal.checkpoint")


class Filling:
    """A tensor that is assembled piece by piece.

    Args:
        mesh: the ranks. The tensor is this rank's part.
        present: the names of the checkpoint's tensors.
        on_device: whether it is assembled on the backend's device.
    """

    def __init__(
        self, binding: Binding, computing: torch.dtype, mesh: Mesh, present: Collection[str], *, on_device: bool
    ) -> None:
        ranks = binding.ranks(mesh)
        pieces, optional = binding.pieces(ranks.rank, ranks.size), binding.weight.optional
        self.pieces = tuple(each for each in pieces if not optional or each.source in present)
        self.name, self.consumer = binding.name, binding.weight.consumer
        self.shape, self.dtype = binding.local_shape(ranks.size), binding.dtype(computing)
        self.nbytes = self.shape.numel() * self.dtype.itemsize
        self.checks, self.on_device, self.tensor = binding.weight.checks, on_device, Tensor()
        self._function, self._offset = binding.weight.function, binding.weight.offset
        self._first_rank_only = binding.weight.first_rank_only and ranks.rank > 0
        self._elements = self._left = sum(piece.numel for piece in self.pieces)
        self._zeros = self._elements < self.shape.numel()  # an optional piece is missing, or ranks fill up rows
        self._started = False

    @property
    def complete(self) -> bool:
        """Whether all pieces have been copied."""
        return self._started and not self._left

    @property
    def prepared(self) -> bool:
        """Whether the backend may convert it to another format."""
        return self.on_device and self.consumer is not None

    def put(self, piece: Piece, start: int, values: Tensor, allocate: Callable[[Filling], Tensor]) -> None:
        """Copy rows of a piece. The first call allocates the tensor."""
        if not self._started:
            self.tensor, self._started, self._left = allocate(self), True, self._elements
            if self._zeros:
                self.tensor.zero_()
        piece.put(self.tensor, start, values.reshape(values.shape[: len(piece.taken)]))
        self._left -= values.numel()
        if not self._left and self._function is not None:
            self.tensor.copy_(self._function(self.tensor))
        if not self._left and self._offset:
            self.tensor += self._offset
        if not self._left and self._first_rank_only:
            self.tensor.zero_()

    def release(self) -> None:
        """Forget the tensor."""
        self.tensor, self._started = Tensor(), False


class LayerFilling:
    """What a layer gets at once: one tensor, or all those of a quantized layer.

    Args:
        present: the names of the checkpoint's tensors.
        tied: the sources of tied tensors.

    Attributes:
        fillings: the tensors to read, the largest last, so that the layer is complete soon after it is allocated.
        pieces: what each checkpoint tensor that this rank reads fills, by the tensor's name.
        dropped: whether the values were given up, and new ones are to come.
        inputs: the scales and offsets of inputs that were read.
    """

    def __init__(
        self,
        bindings: Sequence[Binding],
        computing: torch.dtype,
        mesh: Mesh,
        present: Collection[str],
        tied: Collection[str],
        quantized: QuantizedLayer | None = None,
    ) -> None:
        self.module, self.path, self.bindings = bindings[0].module, bindings[0].path, tuple(bindings)
        self.dropped, self.inputs = False, dict[str, Tensor]()
        self._declared = {each.name: each.weight for each in bindings} if quantized is None else quantized.declared
        # What a reader computes with is on the CPU.
        own = {each for each in bindings if quantized is None or quantized.holds(each.name, each.weight)}
        made = [Filling(each, computing, mesh, present, on_device=each in own) for each in bindings]
        self.fillings = sorted((each for each in made if each.pieces), key=lambda each: each.nbytes)
        self.pieces: dict[str, list[tuple[Filling, Piece]]] = {}
        for each in self.fillings:
            for piece in each.pieces:
                self.pieces.setdefault(piece.source, []).append((each, piece))
        self._computing, self._mesh, self.quantized = computing, mesh, quantized
        self._tied_use = None if self.pieces.keys().isdisjoint(tied) else bindings[0].weight.tied_use

    @property
    def complete(self) -> bool:
        """Whether all tensors are assembled."""
        return all(each.complete for each in self.fillings)

    def load(self, backend: Backend, buffers: WeightBuffers) -> bool:
        """Make the complete tensors the layer's. Return whether the backend changes the format of any."""
        self._keep_inputs()
        changed, finished = False, self._finished()
        for name in finished.keys() | ({"weight_zero_point"} if self.quantized is not None else set()):
            if finished.get(name) is None and hasattr(self.module, name):
                set_tensor(self.module, name, None)
        for use, names in self._together(finished):
            moved = {each: self._moved(names[each], finished, backend) for each in names}
            prepared = moved if use is None else backend.prepare_weights(moved, use)
            for argument, value in prepared.items():
                changed |= value is not moved.get(argument)
                set_tensor(self.module, names.get(argument, argument), buffers.kept(value))
        for each in self.fillings:
            buffers.give_back(each.tensor)
        self.release()
        return self._prepare_tied(backend) or changed

    def put(self, name: str, values: Tensor, backend: Backend) -> None:
        """Copy what new values of a checkpoint tensor give the layer: into its own memory, or to be finished first."""

        def allocate(filling: Filling) -> Tensor:
            if self.quantized is None and not filling.prepared:
                held: Tensor = getattr(self.module, filling.name)
                return held
            device = backend.device.torch if filling.on_device else "cpu"
            return torch.empty(filling.shape, dtype=filling.dtype, device=device)

        for filling, piece in self.pieces[name]:
            filling.put(piece, 0, values[tuple(slice(*each) for each in piece.taken)], allocate)

    def finish(self) -> Tensors:
        """Return the layer's new tensors, and forget what was put.

        Raises:
            CheckpointError: a number is invalid, or the layer has a tensor more or less than it was loaded with.
        """
        try:
            finished = self._finished()
        finally:
            self.release()
        for name, value in finished.items():
            if (value is None) != (getattr(self.module, name) is None):
                new, old = ("none", "one") if value is None else ("one", "none")
                raise CheckpointError(
                    f"the new tensors give {self.path} {new} in place of its {name}, and it was loaded with {old}",
                    "load the new weights with hal.load_model, for another runner",
                )
        return finished

    def tensors(self) -> Iterator[Tensor]:
        """Yield the layer's own tensors, all of which :meth:`replace` writes."""
        names = {each.name for each in self.fillings} if self.quantized is None else {*self._declared}
        names |= {"weight_zero_point"} if self.quantized is not None else set()  # perhaps one that the backend added
        names |= set() if self._tied_use is None else {self._tied_use.attribute}
        yield from (each for name in sorted(names) if isinstance(each := getattr(self.module, name, None), Tensor))

    def release(self) -> None:
        """Forget what was put."""
        for filling in self.fillings:
            filling.release()

    def replace(self, backend: Backend) -> None:
        """Write the complete tensors into the layer's memory."""
        self._keep_inputs()
        finished, self.dropped = self.finish(), False
        for use, names in self._together(finished):
            if all(finished[name] is getattr(self.module, name) for name in names.values()):
                continue
            moved = {each: self._moved(name, finished, backend) for each, name in names.items()}
            if use is None:
                for argument, value in moved.items():
                    getattr(self.module, names[argument]).copy_(value)
                continue
            held = {each: getattr(self.module, name) for each, name in names.items()}
            if use.form != FLOAT and self.module.weight_zero_point is not None:  # perhaps one that the backend added
                held["weight_zero_point"] = self.module.weight_zero_point
            backend.replace_weights(held, moved, use)
        tied = self._tied_use
        if tied is not None and (prepared := getattr(self.module, tied.attribute)) is not None:
            use, argument = WeightUse(tied.consumer.operation, self._computing, shared=True), tied.consumer.argument
            new = getattr(self.module, self.fillings[0].name)
            backend.replace_weights({argument: prepared}, {argument: new}, use)

    def _keep_inputs(self) -> None:
        kept = () if self.quantized is None else self.quantized.stored_as.reader.of_inputs
        self.inputs = {each.name: each.tensor.clone() for each in self.fillings if each.name in kept}

    def _finished(self) -> Tensors:
        tensors = {each.name: each.tensor for each in self.fillings}
        return tensors if self.quantized is None else self.quantized.finish(tensors, self._mesh)

    def _dtype(self, name: str, value: Tensor) -> torch.dtype:
        """Return the dtype of a finished tensor: that of computation, if the layer declares none for weights."""
        return self._computing if self._declared[name].dtype is None and rounds(value.dtype) else value.dtype

    def _moved(self, name: str, finished: Tensors, backend: Backend) -> Tensor:
        value = finished[name]
        assert value is not None
        return value.to(backend.device.torch, self._dtype(name, value))

    def _together(self, finished: Tensors) -> Iterator[tuple[WeightUse | None, dict[str, str]]]:
        """Yield each use with the tensors that a backend prepares together: their names by argument."""
        form, whole = getattr(self.module, "form", FLOAT), dict[str, str]()
        for name, value in finished.items():
            if value is None:
                continue
            consumer = self._declared[name].consumer
            if consumer is None:
                yield None, {name: name}
            elif form != FLOAT:
                whole[consumer.argument] = name
            else:
                yield WeightUse(consumer.operation, self._computing), {consumer.argument: name}
        if whole:
            yield WeightUse(self.module.operation, self._computing, form), whole  # type: ignore[arg-type]

    def _prepare_tied(self, backend: Backend) -> bool:
        """Prepare a tied weight for its second use, as a copy. Return whether the backend changed its format."""
        use = self._tied_use
        if use is None:
            return False
        tensor = getattr(self.module, self.fillings[0].name).data
        told = WeightUse(use.consumer.operation, self._computing, shared=True)
        prepared = backend.prepare_weights({use.consumer.argument: tensor}, told)[use.consumer.argument]
        if prepared is tensor:
            return False
        setattr(self.module, use.attribute, prepared)
        log.info(
            "%s is held twice, as it is and prepared for %s: %d MiB more",
            self.bindings[0].full_name,
            use.consumer.operation,
            prepared.numel() * prepared.element_size() >> 20,
        )
        return True


def layer_fillings(
    bindings: Sequence[Binding],
    quantized: Mapping[str, QuantizedLayer],
    computing: torch.dtype,
    mesh: Mesh,
    present: Collection[str],
    tied: Collection[str],
) -> list[LayerFilling]:
    """Return what is filled at once, in the model's order; for the arguments, see :class:`LayerFilling`.

    Args:
        quantized: the quantized layers by path.
    """
    together: dict[object, list[Binding]] = {}
    for each in bindings:
        if each.weight.sources:
            together.setdefault(each.path if each.path in quantized else each, []).append(each)
    return [
        LayerFilling(each, computing, mesh, present, tied, quantized.get(each[0].path)) for each in together.values()
    ]
