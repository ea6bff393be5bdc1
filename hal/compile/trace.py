"""A model's step as one graph: of operations that stay whole, and of what the others are made of.

The trace runs the model once on fake tensors. Mutations stay where they are, so a cache is written in place: there is
no functionalisation that could copy it. The graph's inputs are the batch's tensors, the weights and the caches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import torch
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hal import ops
from hal.batch import Batch
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


def trace_step(
    model: nn.Module,
    batch: Batch,
    caches: Caches,
    *,
    whole: Collection[str],
    any_size: bool,
    decompose: bool = True,
) -> TracedStep:
    """Trace ``model(batch, caches)``.

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
        replaced = dict(zip(weights, rest, strict=False))
        pairs = [(key, value) for key, value in zip(rest, rest, strict=True)]
        again = attrs.evolve(batch, **dict(zip(_DTYPES, flat[: len(inputs)], strict=True)))
        logits: Tensor = torch.func.functional_call(model, replaced, (again, pairs))
        return (logits,)

    def kept(operation: Operation) -> Kernel:
        return operation.overload if operation.name in whole else operation.rebound(kept)

    try:
        with torch.inference_mode(False), torch.no_grad(), ops.intercepted(lambda each, _: kept(each)), mode:
            table = select_decomp_table() if decompose else None
            graph = make_fx(step, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    except Exception as error:
        raise CompileError(
            f"{type(model).__name__} cannot be traced: {error}",
            "write the model without Python that depends on a tensor's value, or use another compiler",
        ) from error
    return TracedStep(graph, fixed, fakes, mode)


def batch_tensors(batch: Batch) -> list[Tensor]:
    """A batch as the first inputs of a traced step: contiguous, and of the dtypes that it declares."""
    return [getattr(batch, name).to(dtype).contiguous() for name, dtype in _DTYPES.items()]


_LONG = ("token_ids", "positions", "logits_indices")
_DTYPES = {each.name: torch.int64 if each.name in _LONG else torch.int32 for each in attrs.fields(Batch)}


def _fake(tensor: Tensor, mode: FakeTensorMode, open_dims: Collection[int]) -> Tensor:
    sizes = [DimDynamic.DYNAMIC if dim in open_dims else DimDynamic.STATIC for dim in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
