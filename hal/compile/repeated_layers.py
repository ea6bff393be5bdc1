"""Tracing of equal layers once: the first of a kind is traced, and its nodes are copied for each of the others.

A trace spends some milliseconds on each node, and a copy takes microseconds. Two layers are of one kind if all that
their code can read is equal but for the tensors, which have the same shapes, dtypes and sharing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import attrs
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from hal.compile.fx.make_graph import make_graph
from hal.nn import DecoderLayer
from hal.nn.choices import RUNNING
from hal.nn.lora import STEP_SLOTS

_library = torch.library.Library("hal_compile", "DEF")
_library.define("layer(Tensor[] inputs, int kind) -> Tensor")

torch.library.register_fake("hal_compile::layer", lambda inputs, kind: torch.empty_like(inputs[0]), lib=_library)
LAYER = torch.ops.hal_compile.layer.default
"""Stands for a layer's nodes while the layers around it are traced. The first input and the result are its hidden
states; the others are the tensors that it reads."""


class ChangesItself(Exception):
    """A layer's forward changes what the layer holds, so that a trace of one layer does not say what the next does."""


class RepeatedLayers:
    """The kinds of layers in one trace.

    Args:
        mode: the mode of the trace's fake tensors.
        decompositions: of overloads, as for the trace around the layers.
    """

    def __init__(self, mode: FakeTensorMode, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        self._mode, self._decompositions = mode, decompositions
        self._numbers: dict[Hashable, int | None] = {}
        self._graphs: list[fx.Graph] = []

    def replace(self, model: nn.Module) -> None:
        """Let each layer of a copied model be traced once for each kind."""
        for layer in [each for each in model.modules() if isinstance(each, DecoderLayer)]:
            layer.forward = partial(self._call, layer, layer.forward)  # type: ignore[method-assign]

    def _call(self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, *args: Any, **options: Any) -> Any:
        # A layer may leave its choices, or tensors for the next layer in what follows angles, batch and states.
        if options or RUNNING.get() is not None or not all(map(_is_fixed, args[3:])):
            return forward(hidden, *args, **options)
        described, values = _Description(), [hidden, layer, args, STEP_SLOTS.get()]
        kind = described.of(values)
        if kind not in self._numbers:
            self._numbers[kind] = self._trace(partial(forward, hidden, *args), described.tensors)
            if _Description().of(values) != kind:
                raise ChangesItself
        number = self._numbers[kind]
        return forward(hidden, *args) if number is None else LAYER(described.tensors, number)

    def _trace(self, forward: Callable[[], Any], tensors: Sequence[Tensor]) -> int | None:
        """Return the number of a new kind; None if the layer does more than to map hidden states to such."""
        with disable_proxy_modes_tracing():
            graph = make_graph(lambda *_: forward(), tensors, self._mode, self._decompositions).graph
        returned = graph.output_node().args[0]
        found = returned.meta.get("val") if isinstance(returned, fx.Node) else None
        described = _Description()
        same = isinstance(found, Tensor) and described.form(found) == described.form(tensors[0])
        if not same or any(node.op == "get_attr" for node in graph.nodes):
            return None
        self._graphs.append(graph)
        return len(self._graphs) - 1

    def expand(self, graph: fx.Graph) -> None:
        """Put the nodes of each layer in its place."""
        for node in graph.find_nodes(op="call_function", target=LAYER):
            inputs, number = node.args
            layer = self._graphs[number]
            placed = dict(zip(layer.find_nodes(op="placeholder"), inputs, strict=True))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph_copy(layer, placed))
            graph.erase_node(node)


def _is_fixed(value: Any) -> bool:
    """Return whether a layer cannot leave anything in an argument but by writing into tensors."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, Tensor | int | float | str)


class _Description:
    """A description of values, equal for those that the same code treats alike.

    Attributes:
        tensors: those found in the values, in order.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._found: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is that of one value only while the value exists

    def of(self, value: Any) -> Hashable:
        if isinstance(value, bool | int | float | complex | str | bytes | type | enum.Enum) or value is None:
            return type(value), value
        if isinstance(value, torch.dtype | torch.device | torch.SymInt):
            return type(value), str(value)
        if (place := self._found.get(id(value))) is not None:
            return "again", place
        self._found[id(value)] = len(self._found)
        self._kept.append(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return self.form(value)
        if isinstance(value, Mapping):
            return type(value), tuple((self.of(key), self.of(each)) for key, each in value.items())
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self.of, value))
        if isinstance(value, set | frozenset):
            return type(value), frozenset(value)
        if isinstance(value, partial):
            return partial, self.of([value.func, value.args, value.keywords])
        if isinstance(value, MethodType):
            return MethodType, value.__func__, self.of(value.__self__)
        if isinstance(value, nn.Module):
            return type(value), self.of(vars(value))
        if attrs.has(type(value)):
            return type(value), self.of([getattr(value, each.name) for each in attrs.fields(type(value))])
        return type(value), id(value)

    def form(self, tensor: Tensor) -> Hashable:
        """Return all that a trace knows of a tensor but its identity."""
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        return type(tensor), tensor.dim(), tuple(map(str, sizes)), tensor.dtype, tensor.device, tensor.is_conj()
