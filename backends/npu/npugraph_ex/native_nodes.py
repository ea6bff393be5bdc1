"""Lowering of an optimized step to a graph of torch_npu's and torch's operations, which npugraph_ex compiles.

The step and the backend's kernels run on fake tensors of one batch size. The lengths that kernels read on the host
become separate inputs: a symbolic integer for each sequence, and a tensor for kernels that take one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx
from torch._dynamo import mark_static_address
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from hal.compile.fx.make_graph import make_graph
from hal.drivers.compiler import Outputs
from hal.errors import CompileError
from hal.step import Batch, StaticBatch, StepShape, fields_of

from ..failures import first_line

LENGTHS, STARTS = "kv_lens_host", "query_start_loc_host"
FIRST_HINT = 5
"""Hint of the first symbolic length. 0 and 1 would be specialized to constants, and equal hints could be merged."""


@attrs.frozen
class NativeStep:
    """A lowered step of one batch size.

    Attributes:
        graph: takes the batch's tensors on the device, the fixed tensors, the tensor of lengths, and each length as an
            integer; returns what the step returns. Caches are written in place.
        examples: a fake tensor or symbolic integer for each input. Tensors are marked as having static addresses.
        fixed: the tensors that are the same at every call: weights, buffers, caches, and constants of kernels.
        mode: the mode of the fake tensors.
        readers: the nodes that read lengths on the host.
    """

    graph: fx.GraphModule
    examples: list[Any]
    fixed: list[Tensor]
    mode: FakeTensorMode
    readers: list[fx.Node]

    def arguments(self, batch: Batch) -> list[Tensor]:
        """Return all inputs except the lengths, for a batch on static memory."""
        return [*on_device(batch), *self.fixed]


class _Starts:
    """The constant ``query_start_loc_host`` of sequences with equally many queries, in place of a tensor."""

    def __init__(self, shape: StepShape) -> None:
        self._starts = list(range(0, shape.tokens + 1, shape.queries))

    def tolist(self) -> list[int]:
        return self._starts


class _Lengths:
    """The lengths, in place of ``kv_lens_host``: ``tolist`` returns symbolic integers, ``clone`` a traced tensor."""

    def __init__(self, tensor: Tensor, integers: Sequence[Any]) -> None:
        self._tensor, self._integers = tensor, list(integers)

    def tolist(self) -> list[Any]:
        return self._integers

    def clone(self) -> Tensor:
        return self._tensor  # CompiledGraph.run clones it for every step


def on_device(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that the device reads, in the order of its fields."""
    return [getattr(batch, name) for name, each in fields_of(type(batch)).items() if each.twin_of is None]


def native_step(step: Callable[..., Outputs], fixed: Sequence[Tensor], static: StaticBatch) -> NativeStep:
    """Lower a step for batches of one size.

    Args:
        step: the optimized step, which calls the active backend's kernels. It takes the tensors of a batch, in the
            order of its fields, then the fixed tensors.
        fixed: weights, buffers and caches.
        static: a batch of that size, on the static memory of all batches.

    Raises:
        CompileError: a kernel or the model reads a tensor's value, or computes with a length.
    """
    batch, shape = static.batch, static.shape
    names, sequences, device = list(fields_of(type(batch))), shape.sequences, on_device(batch)
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    tensors = [_fake(mode, tensor) for tensor in (*device, *fixed, batch.kv_lens_host)]
    lengths = [_symbol(shapes, number) for number in range(sequences)]

    def run(*inputs: Any) -> Outputs:
        given, last = iter(inputs), len(tensors) - 1
        host = {STARTS: _Starts(shape), LENGTHS: _Lengths(inputs[last], inputs[last + 1 :])}
        first: list[Any] = [host[name] if name in host else next(given) for name in names]
        return step(*first, *inputs[len(device) : last])

    try:
        graph = make_graph(run, [*tensors, *lengths], mode)
    except Exception as error:
        raise CompileError(
            f"the step for a batch of {sequences} cannot be lowered to torch_npu's operations: {first_line(error)}",
            'use the compiler "graph", which captures the kernels without npugraph_ex',
        ) from error
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    held = _hold(graph, mode, before=places[len(tensors) - 1])
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    for example in examples:
        if isinstance(example, Tensor):
            mark_static_address(example)  # avoids a copy and a check at each call
    readers = _users(places[len(tensors) - 1 :])
    return NativeStep(graph, examples, [*fixed, *held], mode, readers)


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor. For an inference tensor, such as a state, it is writable outside inference mode."""
    if not tensor.is_inference():
        return mode.from_tensor(tensor, static_shapes=True)
    with torch.inference_mode(False), mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _symbol(shapes: ShapeEnv, number: int) -> Any:
    source, hint = ConstantSource(f"length_{number}"), FIRST_HINT + number
    symbol = shapes.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=hint, source=source)


def _hold(module: fx.GraphModule, mode: FakeTensorMode, before: fx.Node) -> list[Tensor]:
    """Turn the graph's constant tensors into inputs; otherwise the compiler would copy them into its code."""
    inputs: dict[int, fx.Node] = {}
    held: list[Tensor] = []
    for node in [each for each in module.graph.nodes if each.op == "get_attr"]:
        tensor: Tensor = getattr(module, str(node.target))
        if id(tensor) not in inputs:
            with module.graph.inserting_before(before):
                inputs[id(tensor)] = place = module.graph.placeholder(f"held_{len(held)}")
            place.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
            held.append(tensor)
        node.replace_all_uses_with(inputs[id(tensor)])
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return held


def _users(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(user for node in nodes for user in node.users))
