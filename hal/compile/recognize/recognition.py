"""The recognition of hal's operations in a graph of Dynamo, in the order of its passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from hal.compile.fx.alias_analysis import AliasAnalysis
from hal.compile.fx.clean import common_subexpressions
from hal.compile.fx.symbolic_sizes import same_shape, value
from hal.compile.recognize import decoder_layers
from hal.compile.recognize.decoder_layers import grouped_experts, routings
from hal.compile.recognize.merge_projections import MergeProjections
from hal.compile.recognize.rotations import complex_pairs, rotations
from hal.compile.recognize.torch_calls import RECOGNIZED, TorchCalls
from hal.compile.rewrite.rewrite import Rewrite
from hal.compile.rewrite_report import PassReport
from hal.drivers.backend import Backend
from hal.drivers.compiler import pass_name

aten = torch.ops.aten
log = logging.getLogger("hal.compile")


def integer_round_trips(module: fx.GraphModule) -> int:
    """Remove conversions of int32 to int64 and back, between two recognized operations. Return the number removed."""
    count = 0
    for node in list(module.graph.nodes):
        if not _converts(node, torch.int32) or not _converts(node.args[0], torch.int64):
            continue
        source = node.args[0].args[0]
        if value(source).dtype is torch.int32:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
            count += 1
    return count


def empty_parts(module: fx.GraphModule) -> int:
    """Remove concatenations of one tensor with others that have no elements. Return the number removed.

    Families that rotate a part of each head concatenate the rest, which is empty if all of a head is rotated.
    """
    memory, count = AliasAnalysis(module.graph), 0
    for node in list(module.graph.nodes):
        if node.target is not aten.cat.default:
            continue
        kept = [each for each in node.args[0] if not any(type(size) is int and not size for size in value(each).shape)]
        written = any(True for each in kept for _ in memory.writers(each))
        if len(kept) == 1 and value(kept[0]).dtype is value(node).dtype and not written:
            node.replace_all_uses_with(kept[0])
            module.graph.erase_node(node)
            count += 1
    return count


def masked_assignments(module: fx.GraphModule) -> int:
    """Replace ``x[mask] = number`` by a masked fill. Return the number replaced.

    A device may compute the assignment from the indices of the mask's true elements, whose number a capture does not
    know.
    """
    count = 0
    for node in module.graph.nodes:
        if node.target is not aten.index_put_.default or len(node.args) != 3 or len(node.args[1]) != 1:
            continue
        target, (mask,), number = node.args
        whole = value(mask).dtype is torch.bool and same_shape(value(mask).shape, value(target).shape)
        if whole and not value(number).dim():
            node.target, node.args = aten.masked_fill_.Tensor, (target, mask, number)
            count += 1
    return count


def late_views(module: fx.GraphModule) -> int:
    """Move views down to what reads them first. Return the number moved.

    So a query and a key that are rotated one after the other can be rotated together, though the query is transposed
    in between.
    """
    count = 0
    for node in reversed(list(module.graph.nodes)):
        if node.target in MOVED and node.users and (reader := min(node.users)).prev is not node:
            reader.prepend(node)
            count += 1
    return count


def early_views(module: fx.GraphModule) -> int:
    """Move views up to what they are views of, and copies of what is never written. Return the number moved.

    So cosines and sines have their final shape before any layer, and a fused operation can take the place of its parts.
    """
    memory = AliasAnalysis(module.graph)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    count = 0
    for node in list(module.graph.nodes):
        copies = node.target is aten.clone.default and not any(True for _ in memory.writers(node.args[0]))
        if node.target not in MOVED and not copies:
            continue
        last = max([*inputs[-1:], *node.all_input_nodes])
        if node.prev is not last:
            last.append(node)
            count += 1
    return count


MOVED = frozenset(
    {aten.view.default, aten.expand.default, aten.slice.Tensor, aten.transpose.int, aten.unsqueeze.default}
)


def _converts(node: Any, dtype: torch.dtype) -> bool:
    return isinstance(node, fx.Node) and node.target is aten._to_copy.default and dict(node.kwargs) == {"dtype": dtype}


def rewrites_of(backend: Backend) -> tuple[Rewrite, ...]:
    """Return the rewrites to the operations that a backend has kernels for, in order."""
    by_operation: Mapping[str, tuple[Rewrite, ...]] = {
        "rms_norm": (decoder_layers.rms_norm, decoder_layers.late_rms_norm),
        "rotary_embedding": rotations,
        "scaled_dot_product_attention": (decoder_layers.repeated_heads,),
        "topk_route": routings,
        "grouped_linear": grouped_experts(),
        "silu_and_mul": (decoder_layers.silu_and_mul,),
        "gelu_and_mul": decoder_layers.gelu_and_mul,
        "split_qkv_rmsnorm_rope": (decoder_layers.batched_split,),
    }
    return tuple(each for name, rewrites in by_operation.items() if name in backend.kernels for each in rewrites)


def recognition_passes(backend: Backend) -> tuple[Rewrite | Callable[..., Any], ...]:
    """Return the passes that recognize operations in a step of a model in plain torch, in order.

    Its projections and embeddings are hal's layers.
    """
    found = rewrites_of(backend)
    return (
        common_subexpressions,
        complex_pairs,
        empty_parts,
        masked_assignments,
        late_views,
        *(each for each in found if each not in LATE),
        integer_round_trips,
        early_views,
        *(each for each in found if each in LATE),
    )


LATE = (decoder_layers.silu_and_mul, *decoder_layers.gelu_and_mul, decoder_layers.batched_split)
"""The rewrites that read merged projections, or views in their final place."""


def needs_gradients(inputs: Sequence[Any]) -> bool:
    """Return whether a graph of these inputs may need gradients, which hal's operations do not have."""
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs)


class Recognition:
    """The recognition of operations in one graph.

    Args:
        backend: whose kernels decide what is recognized.
        inputs: of the graph, by which parameters are known; without them, no projections are merged.
        passes: by name, False disables a part of the recognition; other names are ignored.

    Attributes:
        names: the names that ``passes`` may have: those of torch's calls, rewrites and merge_projections.
    """

    def __init__(self, backend: Backend, inputs: Sequence[Any], passes: Mapping[str, bool]) -> None:
        self._inputs = inputs
        self._fakes: Sequence[Any] = ()
        self._calls = TorchCalls(backend, [name for name, on in passes.items() if not on])
        if needs_gradients(inputs):
            log.warning(
                "a graph of Dynamo: no operation is recognized, because a parameter requires grad, and hal supports "
                "inference only; call the model under torch.inference_mode() or torch.no_grad()"
            )
            self._calls = TorchCalls(backend, tuple(RECOGNIZED))
        self._merge = MergeProjections(inputs, self._weights)
        every: tuple[Rewrite | Callable[..., Any], ...] = (*rewrites_of(backend), self._merge)
        self.names = frozenset((*RECOGNIZED, *map(pass_name, every)))
        self._passes = [each for each in every if passes.get(pass_name(each), True) and not needs_gradients(inputs)]

    def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in which torch's calls are replaced."""

        def run(*args: Any) -> Any:
            self._fakes = args
            with self._calls:
                return function(*args)

        return run

    @property
    def passes(self) -> Iterator[Rewrite | Callable[..., Any]]:
        """The passes, in order; none if gradients may be needed. The last ones read merged projections."""
        last = [each for each in self._passes if each in LATE]
        if not self._passes:
            return
        yield late_views
        for each in self._passes:
            if each is self._merge:
                yield common_subexpressions  # so that what reads equal views reads one input
            if each not in last:
                yield each
        yield integer_round_trips
        yield early_views
        yield from last

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """The reports of what was recognized during the trace."""
        return self._calls.reports

    def finish(self) -> Callable[[Sequence[Any]], list[Tensor] | None]:
        """Move the weights of merged projections into one storage.

        Returns:
            A function from a call's inputs to those that the passes added, or None if the graph cannot run: weights
            were replaced, and are not in one storage any more.
        """
        self._merge.weights.move(self._inputs)
        return self._merge.weights

    def _weights(self) -> list[int]:
        """Return the indices of the inputs that are parameters, and weights of torch's linear."""
        return [
            index
            for index, (each, fake) in enumerate(zip(self._inputs, self._fakes, strict=False))
            if isinstance(each, nn.Parameter) and id(fake) in self._calls.weights
        ]
