"""Lowering of a graph to a function: straight-line Python that calls kernels without the dispatcher.

An operation's node becomes a call of the operation's function, which calls the active backend's kernel. Overloads of
ATen become tensor methods, which take a third of an overload's time. Slices that partition a tensor become one split.
Weights and caches are attributes. The preparation of kernel arguments becomes separate nodes, so that calls share it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hal import ops
from hal.compile.fx.make_graph import make_graph
from hal.compile.fx.normalize import RESHAPES
from hal.compile.fx.symbolic_sizes import same_size, value
from hal.drivers.backend import Backend
from hal.ops.declaration.node_form import is_options
from hal.ops.kernels.prepared_arguments import PreparingKernel

aten = torch.ops.aten

METHODS = frozenset(
    {
        "abs",
        "add",
        "argmax",
        "clone",
        "cos",
        "div",
        "expand",
        "gather",
        "index_select",
        "mean",
        "mm",
        "mul",
        "neg",
        "permute",
        "pow",
        "reciprocal",
        "repeat",
        "rsqrt",
        "sigmoid",
        "sin",
        "squeeze",
        "sub",
        "sum",
        "t",
        "transpose",
        "unsqueeze",
    }
)
"""Overloads of ATen that become methods of the same name if they have no keyword arguments."""


def lower(graph: fx.Graph, fixed: Mapping[fx.Node, Tensor] | None = None) -> Callable[..., Any]:
    """Turn a graph into a function.

    Args:
        graph: a graph of overloads; changed in place.
        fixed: placeholders that are the same tensor at every call, with the tensor. They become attributes.

    Returns:
        A function of the other placeholders, in order, that returns the graph's output.
    """
    root = SimpleNamespace()
    for node in graph.nodes:
        if node.op == "get_attr":  # A node's name is unique, its target need not be.
            setattr(root, node.name, operator.attrgetter(node.target)(graph.owning_module))
            node.target = node.name
    for node, tensor in (fixed or {}).items():
        setattr(root, node.name, tensor)
        with graph.inserting_before(node):
            attribute = graph.create_node("get_attr", node.name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    for node in list(graph.nodes):
        _split(graph, node)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _lower_node(node)
            node.args = tuple(_attribute(node, root, each) if is_options(type(each)) else each for each in node.args)
    return _function(graph, root)


def source_of(graph: fx.Graph) -> str:
    """Return the code of a graph as text."""
    return graph.python_code("self").src


def _lower_node(node: fx.Node) -> None:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return
    operation = ops.operation_of_node(target)
    if operation is not None and operation.node_form.has_variable_options(node.args):
        return  # the node makes an object of the options at each call
    if operation is not None:
        node.target = operation.function
        node.args, node.kwargs = tuple(operation.node_form.pack(node.args, node.kwargs)), {}
    elif target in RESHAPES:
        source, sizes = node.args
        # A kernel may return other strides than its node's, for which a view that joins dimensions would fail.
        _call(node, "view" if _only_splits(source, node) else "reshape", source, tuple(sizes))  # type: ignore[arg-type]
    elif target is aten.sym_size.int:
        _call(node, "size", *node.args)
    elif target is aten.slice.Tensor and _is_narrow(node):
        source, dim, start, end = node.args[:4]
        _call(node, "narrow", source, dim, start, end - start)  # type: ignore[operator]
    elif target is aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        # non_blocking is False and copy True: without a copy, ``to`` may return the tensor itself.
        _call(node, "to", node.args[0], node.kwargs["dtype"], False, True)
    elif target.namespace == "aten" and _plain_name(target) in METHODS and not node.kwargs and _has_self(target):
        _call(node, _plain_name(target), *node.args)


def _attribute(node: fx.Node, root: SimpleNamespace, options: Any) -> fx.Node:
    """Return a node before ``node`` for options, which become an attribute."""
    known = (name for name, each in vars(root).items() if each is options)
    name = next(known, None) or f"options_{len(vars(root))}"
    setattr(root, name, options)
    with node.graph.inserting_before(node):
        return node.graph.create_node("get_attr", name)


def _call(node: fx.Node, method: str, *args: Any) -> None:
    """Turn a node into a call of a tensor method."""
    node.op, node.target, node.kwargs = "call_method", method, {}
    node.args = tuple(tuple(each) if isinstance(each, list) else each for each in args)  # Tuples are constants.


def _only_splits(source: fx.Node, node: fx.Node) -> bool:
    """Return whether each dimension of a view is one of its source or part of one: it then exists for any strides."""
    old, new = value(source), value(node)
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return False
    left = list(new.shape)
    for size in old.shape:
        while left and not same_size(size, left[0]):
            first = left.pop(0)
            if type(first) is not int or type(size) is not int or not first or size % first:
                return False
            size //= first
        if not left:
            return False
        left.pop(0)
    return all(same_size(size, 1) for size in left)


def _split(graph: fx.Graph, source: fx.Node) -> None:
    """Replace slices that partition a tensor by the parts of one split, which costs little more than one slice."""
    slices = [user for user in source.users if user.target is aten.slice.Tensor and _is_narrow(user)]
    slices.sort(key=lambda each: each.args[2])  # type: ignore[arg-type, return-value]
    if len(slices) < 2 or not isinstance(value(source), Tensor):
        return
    dim: Any = slices[0].args[1]
    ends = [0, *(each.args[3] for each in slices)]
    if [each.args[2] for each in slices] != ends[:-1] or {each.args[1] for each in slices} != {dim}:
        return
    if not same_size(value(source).shape[dim], ends[-1]):
        return
    with graph.inserting_before(min(slices)):
        sizes = tuple(end - start for start, end in itertools.pairwise(ends))  # type: ignore[operator]
        parts = graph.call_method("split_with_sizes", (source, sizes, dim))
        taken = [graph.call_function(operator.getitem, (parts, index)) for index in range(len(slices))]
    for each, part in zip(slices, taken, strict=True):
        part.meta = dict(each.meta)
        each.replace_all_uses_with(part)
        graph.erase_node(each)


def _plain_name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.partition("::")[2]


def _has_self(target: torch._ops.OpOverload) -> bool:
    return str(target._schema.arguments[0].type) == "Tensor"


def _is_narrow(node: fx.Node) -> bool:
    """Return whether a slice has step 1 and constant ends inside a dimension of known size."""
    arguments: Any = node.args
    if len(arguments) < 4 or any(type(each) is not int for each in arguments[1:]) or arguments[4:] not in ((), (1,)):
        return False
    source, dim, start, end = arguments[:4]
    size = value(source).shape[dim] if isinstance(value(source), Tensor) else None
    return type(size) is int and 0 <= start <= end <= size


def _function(graph: fx.Graph, root: SimpleNamespace) -> Callable[..., Any]:
    code = graph.python_code("self")
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<hal.compile>", "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward.__get__(root)  # type: ignore[no-any-return]


def hoist_preparations(graph: fx.Graph, backend: Backend, mode: FakeTensorMode, *, keep: Collection[str] = ()) -> int:
    """Insert the argument preparation of each :class:`~hal.vendor.PreparingKernel` as nodes.

    The operations' nodes then call the kernel without its preparation. Equal preparations of one tensor are left to
    :func:`hal.compile.fx.clean.common_subexpressions`.

    Args:
        graph: of a rewritten step.
        backend: owns the kernels.
        mode: the mode of the nodes' fake tensors.
        keep: names of operations to skip.
    """
    count = 0
    for node in list(graph.nodes):
        operation = ops.operation_of_node(node.target)
        kernel = None if operation is None else backend.kernels.get(operation.name)
        if operation is None or operation.name in keep or not isinstance(kernel, PreparingKernel):
            continue
        arguments = list(operation.node_arguments(node.args, node.kwargs).values())
        given = tuple(arguments)
        for place, prepare, sources in kernel.places:
            if arguments[place] is None:
                continue
            traced = make_graph(prepare, [value(given[source]) for source in sources], mode)
            inputs = (each for each in traced.graph.nodes if each.op == "placeholder")
            with graph.inserting_before(node):
                known = dict(zip(inputs, (given[source] for source in sources), strict=True))
                known |= _constants(traced, graph)
                result = graph.graph_copy(traced.graph, known)
            assert isinstance(result, fx.Node)
            arguments[place] = result
            count += 1
        names = enumerate(operation.signature.parameters)
        node.meta["written"] = tuple(place for place, name in names if name in operation.mutates)
        node.target, node.args, node.kwargs = kernel.kernel, tuple(arguments), {}
    return count


def _constants(traced: fx.GraphModule, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the tensors that a preparation holds, as attributes of the graph's module, one per tensor."""
    owner: Any = graph.owning_module
    names = {id(tensor): name for name, tensor in owner.named_buffers()}
    places = {}
    for node in traced.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = operator.attrgetter(node.target)(traced)
        name = names.get(id(tensor))
        if name is None:
            name = next(each for index in itertools.count() if not hasattr(owner, each := f"prepared_by_{index}"))
            owner.register_buffer(name, tensor, persistent=False)
        places[node] = graph.get_attr(name)
        places[node].meta = dict(node.meta)
    return places
