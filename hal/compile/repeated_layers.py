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
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils._pytree import tree_leaves, tree_map

from hal.compile.fx.make_graph import make_graph
from hal.nn import DecoderLayer
from hal.nn.choices import RUNNING
from hal.nn.lora import STEP_SLOTS


def layer_of_kind(inputs: Sequence[Tensor], kind: int) -> Sequence[Tensor]:
    """Stand for a layer's nodes while the layers around it are traced: it maps what the layer reads to its results."""
    raise AssertionError("the layers of a trace are put in the places of their calls")


class ChangesItself(Exception):
    """A layer's forward changes what the layer holds, so that a trace of one layer does not say what the next does."""


@attrs.frozen
class _Kind:
    """The trace of a layer.

    Attributes:
        number: of the kind.
        graph: from what the layer reads to its results.
        results: fake tensors: the hidden states, and what the layer leaves for others.
        left: what it leaves in each of the further arguments that are dicts, by key.
    """

    number: int
    graph: fx.Graph
    results: list[Tensor]
    left: list[dict[Any, Any]]


class RepeatedLayers:
    """The kinds of layers in one trace.

    Args:
        mode: the mode of the trace's fake tensors.
        decompositions: of overloads, as for the trace around the layers.
    """

    def __init__(self, mode: FakeTensorMode, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        self._mode, self._decompositions = mode, decompositions
        self._found: dict[Hashable, _Kind | None] = {}

    def replace(self, model: nn.Module) -> None:
        """Let each layer of a copied model be traced once for each kind."""
        for layer in [each for each in model.modules() if isinstance(each, DecoderLayer)]:
            layer.forward = partial(self._call, layer, layer.forward)  # type: ignore[method-assign]

    def _call(self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, *args: Any, **options: Any) -> Any:
        # What follows angles, batch and states may be dicts, in which a layer leaves tensors for the next ones.
        further = args[3:]
        if options or RUNNING.get() is not None or not all(map(_is_known, further)):
            return forward(hidden, *args, **options)
        described, values = _Description(), [hidden, layer, args, STEP_SLOTS.get()]
        key = described.of(values)
        dicts = [each for each in further if isinstance(each, dict)]
        if key not in self._found:
            self._found[key] = self._trace(partial(forward, hidden, *args), described.tensors, dicts)
            if _Description().of(values) != key:
                raise ChangesItself
        kind = self._found[key]
        return forward(hidden, *args) if kind is None else self._stand_in(kind, described.tensors, dicts)

    def _trace(
        self, forward: Callable[[], Any], tensors: Sequence[Tensor], dicts: Sequence[dict[Any, Any]]
    ) -> _Kind | None:
        """Return a new kind; None if the layer returns more than hidden states, or reads what is no argument."""
        before, left = [dict(each) for each in dicts], list[dict[Any, Any]]()

        def run(*_: Tensor) -> list[Any]:
            hidden = forward()
            for now, old in zip(dicts, before, strict=True):
                left.append({key: each for key, each in now.items() if key not in old or each is not old[key]})
                if old.keys() <= now.keys():  # else the dict stays, and shows that the layer took something out
                    now.clear()
                    now.update(old)
            return [hidden, *(each for each in tree_leaves(left) if isinstance(each, Tensor))]

        with disable_proxy_modes_tracing():
            graph = make_graph(run, tensors, self._mode, self._decompositions).graph
        returned: Any = graph.output_node().args[0]
        results: list[Any] = [each.meta.get("val") if isinstance(each, fx.Node) else each for each in returned]
        if any(node.op == "get_attr" for node in graph.nodes) or not all(isinstance(each, Tensor) for each in results):
            return None
        return _Kind(len(self._found), graph, results, left)

    def _stand_in(self, kind: _Kind, tensors: Sequence[Tensor], dicts: Sequence[dict[Any, Any]]) -> Tensor:
        """Add a call of :func:`layer_of_kind` to the trace. Return its hidden states, and leave the others."""
        mode: Any = get_proxy_mode()
        proxies = [mode.tracer.unwrap_proxy(each) for each in tensors]
        call = mode.tracer.create_proxy("call_function", layer_of_kind, (proxies, kind.number), {})
        with disable_proxy_modes_tracing():
            results = [
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
                for each in kind.results
            ]
        track_tensor_tree(results, call, constant=None, tracer=mode.tracer)
        hidden, *others = results
        rest = iter(others)
        for each, left in zip(dicts, kind.left, strict=True):
            each.update(tree_map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, left))
        return hidden

    def expand(self, graph: fx.Graph) -> None:
        """Put the nodes of each layer in its place."""
        kinds = {each.number: each.graph for each in self._found.values() if each is not None}
        for node in graph.find_nodes(op="call_function", target=layer_of_kind):
            inputs, number = node.args
            placed = dict(zip(kinds[number].find_nodes(op="placeholder"), inputs, strict=True))
            with graph.inserting_before(node):
                results: Any = graph.graph_copy(kinds[number], placed)
            for item in list(node.users):
                item.replace_all_uses_with(results[item.args[1]])
                graph.erase_node(item)
            graph.erase_node(node)


def _is_known(value: Any) -> bool:
    """Return whether a layer can leave nothing in an argument but tensors, in a dict or by writing into them."""
    if isinstance(value, tuple | dict):
        return all(map(_is_known, value.values() if isinstance(value, dict) else value))
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
