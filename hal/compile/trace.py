"""A model's step as one graph: of operations that stay whole, and of what the others are made of.

The trace runs the model once on fake tensors. Mutations stay where they are, so a cache is written in place: there is
no functionalisation that could copy it. The graph's inputs are the batch's tensors, the weights and the caches.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import attrs
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hal import ops
from hal.batch import Batch
from hal.compile.make_graph import make_graph
from hal.compile.stand_in import stand_in
from hal.errors import CompileError
from hal.ops.declaration import Kernel, Operation

Caches = Sequence[tuple[Tensor, Tensor]]


@attrs.frozen
class TracedStep:
    """A traced step.

    Attributes:
        graph: takes the tensors of the batch, in the order of its fields, then the fixed ones; returns ``(logits,)``.
        fixed: weights, buffers and caches: the same tensors at every call.
        fakes: the fake tensors that it was traced with, one for each input.
        mode: whose fake tensors they are.
    """

    graph: fx.GraphModule
    fixed: list[Tensor]
    fakes: list[Tensor]
    mode: FakeTensorMode

    @property
    def conditions(self) -> list[str]:
        """What the model's Python asked of the sizes, such as ``s0 <= 2``: the graph is that of their answers."""
        shapes: Any = self.mode.shape_env
        return [str(guard.expr) for guard in shapes.guards]

    def demand_any_size(self, model: nn.Module, sequences: int | None = None) -> None:
        """Raise CompileError if what was asked of the sizes is true of some of those that will run, and not of others.

        Args:
            model: that was traced.
            sequences: of the example, if it was a decode step's, and any number from two on will run; None if steps of
                any shape will.
        """
        asked: Sequence[Any] = [guard.expr for guard in self.mode.shape_env.guards]  # type: ignore[union-attr]
        if sequences is not None:
            more = sympy.Symbol("more", integer=True, nonnegative=True)
            open_sizes: list[Any] = [size for fake in self.fakes for size in fake.shape if not isinstance(size, int)]
            known = {
                size.node._expr: more + 2 + size.node.hint - sequences
                for size in open_sizes if size.node.hint in (sequences, sequences + 1)
            }  # fmt: skip
            asked = [each for each in asked if each.subs(known) != sympy.true]
        if asked:
            raise CompileError(
                f"{type(model).__name__} does not do the same for all sizes: it asks for {', '.join(map(str, asked))}",
                'write it without Python that depends on sizes, or use the compiler "graph", which compiles for each',
            )

    @property
    def pinned(self) -> list[str]:
        """Open sizes that something in the trace fixed to the example's, such as ``block_table.shape[1] = 5``."""
        shapes: Any = self.mode.shape_env
        found = []
        for name, fake in zip(_DTYPES, self.fakes, strict=False):
            shape: Sequence[Any] = fake.shape
            for dim, size in enumerate(shape):
                if not isinstance(size, int) and (known := shapes.replace(size.node.expr)).is_number:
                    found.append(f"{name}.shape[{dim}] = {known}")
        return found

    def serves(self, batch: Batch) -> bool:
        """Whether the graph is what the model does for a batch of these sizes."""
        sizes: dict[Any, int] = {}
        for fake, tensor in zip(self.fakes, batch_tensors(batch), strict=False):
            shape: Sequence[Any] = fake.shape
            for size, actual in zip(shape, tensor.shape, strict=True):
                if isinstance(size, int):
                    if size != actual:
                        return False
                # The symbol itself, as guards have it: what is known to be a number is that number in ``expr``.
                elif sizes.setdefault(size.node._expr, actual) != actual or actual < 2:
                    return False
        shapes: Any = self.mode.shape_env
        return all(guard.expr.subs(sizes) == sympy.true for guard in shapes.guards)  # and none is left undecided


def trace_step(
    model: nn.Module,
    batch: Batch,
    caches: Caches,
    *,
    whole: Collection[str],
    any_size: bool,
    decompose: bool = True,
) -> TracedStep:
    """Trace ``model(batch, caches)``. Other threads may run the model meanwhile; one that traces, too, waits.

    Args:
        model: takes a batch and the caches; its weights become inputs.
        batch: an example; of at least two sequences if ``any_size``.
        caches: per layer, key and value cache.
        whole: names of the operations that stay nodes, calling whatever the backend runs for them; the others are
            replaced by their bodies.
        any_size: whether batches of other sizes will run, or only of this one. Block tables may differ in their columns
            in either case; the example has at least two, and not as many as it has of anything else.
        decompose: whether torch's operations become the smaller ones that Inductor knows.

    Raises:
        CompileError: the model cannot be traced, for instance because it reads a tensor's value.
    """
    weights: dict[str, Tensor] = dict((*model.named_parameters(), *model.named_buffers()))
    fixed = [*weights.values(), *(tensor for cache in caches for tensor in cache)]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = batch_tensors(batch)
    # How many blocks a sequence may have is open in any case.
    open_dims = [(0, 1) if any_size else (1,) if name == "block_table" else () for name in _DTYPES]
    fakes = [_fake(tensor, mode, dims) for tensor, dims in zip(inputs, open_dims, strict=True)]
    fakes += [_fake(tensor, mode, ()) for tensor in fixed]

    def step(*flat: Tensor) -> tuple[Tensor]:
        rest = iter(flat[len(inputs) :])
        replaced = {id(weight): each for weight, each in zip(weights.values(), rest, strict=False)}
        pairs = [(key, value) for key, value in zip(rest, rest, strict=True)]
        again = attrs.evolve(batch, **dict(zip(_DTYPES, flat[: len(inputs)], strict=True)))
        logits: Tensor = stand_in(model, replaced)(again, pairs)
        return (logits,)

    def kept(operation: Operation) -> Kernel:
        return operation.overload if operation.name in whole else operation.rebound(kept)

    try:
        with ops.intercepted(lambda each, _: kept(each)):
            graph = make_graph(step, fakes, mode, select_decomp_table() if decompose else None)
    except Exception as error:
        raise CompileError(
            f"{type(model).__name__} cannot be traced{_where(error)}: {str(error).partition(chr(10))[0]}",
            "write the model without Python that depends on a tensor's value, or use the compiler eager",
        ) from error
    _name_inputs(
        graph.graph,
        [*_DTYPES, *weights, *(f"{kind}_cache_{n}" for n in range(len(caches)) for kind in ("key", "value"))],
    )
    return TracedStep(graph, fixed, fakes, mode)


def _name_inputs(graph: fx.Graph, names: list[str]) -> None:
    """So that the graph's code can be read."""
    for node, name in zip([each for each in graph.nodes if each.op == "placeholder"], names, strict=True):
        node._rename(re.sub(r"\W", "_", name))


def _where(error: BaseException) -> str:
    """The place in the model's own code, for an error message."""
    others = (str(Path(torch.__file__).parent), str(Path(ops.__file__).parent), __file__, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f", in {frame.name} at {frame.filename}:{frame.lineno}"
    return ""


def example_batch(tokens: int, sequences: int, rows: int, *, columns: int, device: torch.device) -> Batch:
    """A batch to trace with: of given sizes, and empty in every other way.

    Sizes that are equal here are one size in the trace. Let those differ that may, and none be less than 2.
    """
    sizes = {
        "token_ids": (tokens,), "positions": (tokens,), "slot_mapping": (tokens,), "block_table": (sequences, columns),
        "query_start_loc": (sequences + 1,), "kv_lens": (sequences,), "logits_indices": (rows,),
        "query_start_loc_host": (sequences + 1,), "kv_lens_host": (sequences,),
    }  # fmt: skip
    return Batch(**{
        name: torch.zeros(size, dtype=_DTYPES[name], device="cpu" if name.endswith("_host") else device)
        for name, size in sizes.items()
    })  # fmt: skip


def batch_tensors(batch: Batch) -> list[Tensor]:
    """A batch as the first inputs of a traced step: contiguous, and of the dtypes that it declares."""
    return [getattr(batch, name).to(dtype).contiguous() for name, dtype in _DTYPES.items()]


_LONG = ("token_ids", "positions", "logits_indices")
_DTYPES = {each.name: torch.int64 if each.name in _LONG else torch.int32 for each in attrs.fields(Batch)}


def _fake(tensor: Tensor, mode: FakeTensorMode, open_dims: Collection[int]) -> Tensor:
    sizes = [DimDynamic.DUCK if dim in open_dims else DimDynamic.STATIC for dim in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
