"""From a graph's nodes to a function: straight-line Python that calls kernels, with nothing of a dispatcher between.

A node of an operation becomes the operation's function, which goes to the active backend's kernel; torch's own become
methods of tensors, which cost a third of an overload's call. Weights and caches are looked up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from hal import ops

aten = torch.ops.aten

METHODS = frozenset({
    "abs", "add", "argmax", "clone", "cos", "div", "expand", "float", "gather", "index_select", "mean", "mm", "mul",
    "neg", "permute", "pow", "reciprocal", "rsqrt", "sigmoid", "sin", "squeeze", "sub", "sum", "t", "transpose",
    "unsqueeze",
})  # fmt: skip
"""Overloads of ATen that are called as methods of the same name, where they are given nothing by keyword."""
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


def lower(graph: fx.Graph, fixed: Mapping[fx.Node, Tensor] | None = None) -> Callable[..., Any]:
    """Make a function of a graph.

    Args:
        graph: of overloads; changed in place.
        fixed: placeholders that are the same tensor at every call, and that tensor. They are no arguments.

    Returns:
        A function of the other placeholders, in order, that gives what the graph's output says.
    """
    root = SimpleNamespace()
    for node, tensor in (fixed or {}).items():
        setattr(root, node.name, tensor)
        with graph.inserting_before(node):
            attribute = graph.create_node("get_attr", node.name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "get_attr" and not hasattr(root, node.target):
            setattr(root, node.target, getattr(graph.owning_module, node.target))
        if node.op == "call_function":
            _lower_node(node)
    return _function(graph, root)


def source_of(graph: fx.Graph) -> str:
    """The code of a graph, as readable text."""
    return graph.python_code("self").src


def _lower_node(node: fx.Node) -> None:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return
    operation = ops.operation_of_node(target)
    if operation is not None:
        node.target = operation.function
    elif target in RESHAPES:
        # A kernel may give strides other than its node's, which a view would refuse.
        node.target = Tensor.reshape
    elif target is aten.sym_size.int:
        node.target = Tensor.size
    elif target is aten.slice.Tensor and _is_narrow(node.args):
        source, dim, start, end = node.args[:4]
        node.target, node.args = torch.narrow, (source, dim, start, end - start)  # type: ignore[operator]
    elif target is aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        node.target, node.args, node.kwargs = Tensor.to, (node.args[0], node.kwargs["dtype"]), {}
    elif target.namespace == "aten" and _plain_name(target) in METHODS and not node.kwargs and _has_self(target):
        node.target = getattr(Tensor, _plain_name(target))


def _plain_name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.partition("::")[2]


def _has_self(target: torch._ops.OpOverload) -> bool:
    return str(target._schema.arguments[0].type) == "Tensor"


def _is_narrow(arguments: Sequence[Any]) -> bool:
    """Whether a slice has both ends, as numbers, and takes every element."""
    return len(arguments) >= 4 and all(type(each) is int for each in arguments[1:]) and arguments[4:] in ((), (1,))


def _function(graph: fx.Graph, root: SimpleNamespace) -> Callable[..., Any]:
    code = graph.python_code("self")
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<hal.compile>", "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward.__get__(root)  # type: ignore[no-any-return]
