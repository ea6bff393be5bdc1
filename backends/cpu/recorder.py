"""The recorder of a tape, which records each ATen call of a function and the opaque kernels."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hal import ops
from hal.device.host_values import HostValues
from hal.errors import CaptureError
from hal.ops.declaration.operation import Operation
from hal.ops.declaration.torch_library import without_aliases
from hal.ops.kernels.kernel_table import Kernel

from .launch import Launch, storage_of, tensors_of

# Functional operations, in addition to pointwise ones, whose out= variants give the same numbers and never resize.
# Results of others are copied: several out= variants round differently, or write past a given tensor.
_WRITE_WELL = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "cat", "index_select", "gather", "sum", "mean", "amax", "argmax", "topk", "sort")
)
# Operations whose results depend on values, but that torch does not tag accordingly.
_READ_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        "is_nonzero",
        "narrow.Tensor",
        "tensor_split.tensor_indices_or_sections",
        "nonzero_numpy",
        "where",
        "repeat_interleave.Tensor",
        "repeat_interleave.self_Tensor",
    )
)


class Recorder(TorchDispatchMode):
    """A dispatch mode that runs the calls of the capturing thread, and records them between ``start`` and ``stop``.

    Attributes:
        launches: the launches of the current capture; None between captures.
        whole: names of the operations that are recorded as one opaque launch.
        opaque: whether an opaque launch is running, whose own calls are not recorded.
    """

    def __init__(self, whole: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] | None = None
        self.whole = whole
        self.opaque = False
        self._host_values: HostValues | None = None

    def start(self, launches: list[Launch], host_values: HostValues) -> None:
        """Append each call to ``launches`` from now on."""
        self.launches, self._host_values = launches, host_values

    def stop(self) -> None:
        """Stop recording."""
        self.launches = self._host_values = None
        self.opaque = False

    @property
    def records(self) -> bool:
        """Whether calls are recorded at present."""
        return self.launches is not None and not self.opaque

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.records:
            return func(*args, **kwargs)
        if (declared := ops.operation_of_node(func)) is not None:
            # Traced code calls the node; recording it through the operation has the same result as an eager call.
            with self:
                return without_aliases(
                    declared.function(*declared.node_form.pack(args, kwargs)), tensors_of((args, kwargs))
                )
        if _depends_on_values(func, args):
            raise CaptureError(
                f"{func} depends on tensor values, which differ between replays, {_where()}",
                "keep values on the device, or declare them as host values of an operation",
            )
        result = func(*args, **kwargs)
        if any(tensor.is_complex() for tensor in tensors_of(result)):
            raise CaptureError(
                f"{func} returns complex numbers, which tapes do not support, {_where()}",
                "compute with real and imaginary parts",
            )
        self._record(func, args, kwargs, result)
        return result

    def wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        """Return a kernel that records its call as one launch; other kernels are recorded through their ATen calls."""
        outside = operation.name in self.whole
        if not (operation.host or outside):
            return kernel

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not self.records:
                return kernel(*args, **kwargs)
            assert self.launches is not None
            assert self._host_values is not None
            arguments = operation.arguments(args, kwargs)
            chosen = getattr(kernel, "chosen", None)  # so that a replay calls the kernel itself
            run = kernel if chosen is None else chosen(*arguments.values())
            if not (operation.host or operation.mutates or _fills(run)):  # a replay calls torch's kernels without it
                return run(*args, **kwargs)
            for name in operation.host:
                self._host_values.record(name, arguments[name], operation.name)
            self.opaque = True
            try:
                result = tree_map_only(Tensor, Tensor.contiguous, run(*args, **kwargs))
            finally:
                self.opaque = False
            copied = _fresh(result, args, kwargs)
            launch = Launch(operation.qualified_name, run, args, kwargs, copied=copied)
            launch.results = [tensors_of(result)[index] for index in copied]
            if outside and result is not None:
                launch.kwargs, launch.fills = {**kwargs, "out": result}, True
            self.launches.append(launch)
            return result

        return recorded

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        assert self.launches is not None
        if func is torch.ops.aten.lift_fresh.default:
            # A constant such as torch.tensor([1.0]). Each replay restores it, because the function may write to it.
            self.launches.append(Launch(str(func), _cast, (result.clone(), result), {}, []))
            return
        copied = _fresh(result, args, kwargs)
        fresh = [tensors_of(result)[index] for index in copied]
        if not fresh and not func._schema.is_mutable:
            return  # a view or nothing: other launches fill the memory
        launch = Launch(str(func), func, args, kwargs, fresh, copied=copied)
        if fresh and func.overloadpacket is torch.ops.aten.to:
            launch.function, launch.args, launch.kwargs, launch.fills = _cast, (args[0], fresh[0]), {}, True
        elif fresh and _writes_well(func, args) and (out := _out_variant(func, len(fresh))):
            launch.function, names = out
            launch.kwargs, launch.fills = {**kwargs, **dict(zip(names, fresh, strict=True))}, True
        self.launches.append(launch)


@contextmanager
def recording(whole: frozenset[str]) -> Iterator[Recorder]:
    """Enter the modes that record a capture.

    Args:
        whole: names of the operations that are recorded as one opaque launch.
    """
    recorder = Recorder(whole)
    with ops.intercepted(recorder.wrap), _RefuseHostReads(recorder), recorder:
        yield recorder


class _RefuseHostReads(TorchFunctionMode):
    """Refuses calls that copy a tensor's value into Python, where a replay cannot update it."""

    NAMES = frozenset(
        {"tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__dlpack__"}
    )

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        reads = name in self.NAMES and bool(args) and isinstance(args[0], Tensor)
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple)):
            reads = bool(tensors_of(args[0]))
        if reads and self.recorder.records:
            raise CaptureError(
                f"{name} reads a tensor's value during a capture, {_where()}; every replay would see the same value",
                "compute with the tensor instead, or declare it as a host value of an operation",
            )
        return func(*args, **(kwargs or {}))


def _full_name(func: OpOverload) -> str:
    return str(func.name())


def _writes_well(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether the out= variant gives the same numbers and never resizes."""
    if func is torch.ops.aten.linear.default:
        return int(args[0].dim()) == 2  # with more dimensions it adds the bias to a rounded product
    return torch.Tag.pointwise in func.tags or _full_name(func).partition(".")[0] in _WRITE_WELL


def _depends_on_values(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether the result's shape, or its value in Python, depends on tensor values."""
    if _full_name(func) in _READ_VALUES:
        return True
    if func is torch.ops.aten.index.Tensor:  # its tag is correct only for boolean masks
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _fresh(result: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Return the indices of the tensors in ``result`` that share no storage with an argument."""
    old = {storage_of(tensor) for tensor in tensors_of((args, kwargs))}
    return tuple(index for index, tensor in enumerate(tensors_of(result)) if storage_of(tensor) not in old)


@functools.cache
def _fills(kernel: Kernel) -> bool:
    """Return whether a kernel writes its result to a given tensor, ``out``."""
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except ValueError:  # a function of C
        return False
    return any(each.name == "out" or each.kind is each.VAR_KEYWORD for each in parameters)


def _cast(source: Tensor, result: Tensor) -> None:
    result.copy_(source)


def _out_variant(func: OpOverload, fresh: int) -> tuple[OpOverload, list[str]] | None:
    """Return the out= overload of ``func`` and the names of its output arguments; None if it has none."""
    schema = func._schema
    inputs = [(argument.name, str(argument.type)) for argument in schema.arguments]
    if schema.is_mutable or fresh != len(schema.returns) or any(str(each.type) != "Tensor" for each in schema.returns):
        return None
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        given = [(each.name, str(each.type)) for each in variant._schema.arguments if not each.is_out]
        outs = [each.name for each in variant._schema.arguments if each.is_out]
        if len(outs) == fresh and given == inputs:
            return variant, outs
    return None


def _where() -> str:
    """Return the source location in the captured function, for an error message."""
    own = (__file__, torch.__path__[0], ops.__path__[0])
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(own) and not frame.filename.startswith("<"):
            return f"in {frame.name} at {frame.filename}:{frame.lineno}"
    return "in code without a source file"
