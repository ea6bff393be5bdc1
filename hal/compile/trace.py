"""Tracing of a model's step into one graph: some operations stay nodes, the others are traced through.

The trace runs the model once on fake tensors. It does not functionalize, so mutations stay and a cache is written in
place. The graph's inputs are the batch's tensors, the weights and the states.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import attrs
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves

from hal import ops
from hal.compile.fx.make_graph import make_graph
from hal.compile.recognize.rotations import polar
from hal.compile.repeated_layers import ChangesItself, RepeatedLayers
from hal.drivers.compiler import Outputs
from hal.errors import CompileError
from hal.nn import CausalLM, Encoder
from hal.nn.model import flat_outputs
from hal.ops.declaration.operation import Operation
from hal.ops.forms import FLOAT
from hal.ops.kernels.kernel_table import Kernel, Resolver
from hal.step.fields import Field, FieldAxis, fields_of
from hal.step.rows import ALL, NONE, Rows
from hal.step.shape import StepShape
from hal.step.state import StateMemory


def copy_model(model: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Return a copy of a model's modules with other parameters and buffers.

    The copy preserves the sharing of modules and tensors. Containers of modules and bound methods of modules are copied
    and refer to the copies. All other attribute values are shared with the model.

    Args:
        model: the model to copy.
        tensors: the replacement of each parameter and buffer, by the id of the original.
    """
    modules = {id(module) for module in model.modules()}

    def is_copied(value: Any) -> bool:
        return id(value.__self__ if isinstance(value, MethodType) else value) in modules

    # A copy of a tensor would be an operation of the trace, and a lock or a handle cannot be copied.
    values = tree_leaves([vars(module) for module in model.modules()])
    shared = {id(value): value for value in values if not is_copied(value)}
    return copy.deepcopy(model, {**shared, **tensors})


Size = int | torch.SymInt
M = TypeVar("M", bound=nn.Module)


@attrs.frozen
class StepSizes:
    """The sizes of the axes that a step is traced for.

    The number of block table columns is always symbolic. A symbol stands for any number from two on, whatever the size
    in the example. The example of tokens or sequences is the most that the graph will run, so that conditions of
    kernels can depend on it.

    Attributes:
        sequences: for steps whose sequences all have ``queries`` new tokens; None for steps of any shape.
        queries: new tokens of each sequence.
        any_size: whether the number of sequences is symbolic. One sequence is always traced as the number 1.
        tokens: for steps of any shape, the most tokens of a step that the graph will run, if known.
    """

    sequences: int | None
    queries: int = 1
    any_size: bool = True
    tokens: int = 0

    def of_axes(self, shapes: ShapeEnv) -> dict[str, Size]:
        """Return a number or a symbol of ``shapes`` for each axis."""
        blocks = _symbol(shapes, "blocks", 7)
        if self.sequences is None:
            hints = _HINTS | {"tokens": max(self.tokens, _HINTS["tokens"])}
            return {"blocks": blocks} | {name: _symbol(shapes, name, hint) for name, hint in hints.items()}
        opens = self.any_size and self.sequences > 1
        sequences = _symbol(shapes, "sequences", self.sequences) if opens else self.sequences
        return {"blocks": blocks, "sequences": sequences, "tokens": sequences * self.queries}


_HINTS = {"tokens": 11, "sequences": 3}


def _symbol(shapes: ShapeEnv, name: str, hint: int) -> Size:
    source = ConstantSource(name)
    symbol = shapes.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    made: Size = shapes.create_symintnode(symbol, hint=hint, source=source)
    return made


@attrs.frozen
class TracedStep:
    """A traced step.

    Attributes:
        graph: takes the batch's tensors, in the order of its fields, then the fixed ones; returns hidden states, the
            model's ``extra`` tensors, and logits if the trace includes them.
        fixed: weights, buffers and states: the same tensors at every call.
        sizes: a number or a symbol for each axis.
        queries: new tokens of each sequence; 0 for steps of any shape.
        fields: the batch's fields, in order.
        mode: the mode of the inputs' fake tensors.
        recognize: whether the model computes in plain torch what hal has operations for.
    """

    graph: fx.GraphModule
    fixed: list[Tensor]
    sizes: Mapping[str, Size]
    queries: int
    fields: Mapping[str, Field]
    mode: FakeTensorMode
    recognize: bool = False

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes that the step returns."""
        (returned,) = next(node for node in self.graph.graph.nodes if node.op == "output").args
        return list(returned)

    @property
    def fakes(self) -> list[Tensor]:
        """The fake tensors of the inputs."""
        return [node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder"]

    @property
    def conditions(self) -> list[str]:
        """The conditions on sizes, such as ``s0 <= 2``, that held while the model's Python code was traced."""
        return [str(guard.expr) for guard in self._guards]

    def check_any_size(self, model: object) -> None:
        """Raise CompileError if a condition holds for some sizes from two on, but not for all."""
        more = {
            symbol: sympy.Symbol(f"more_{symbol}", integer=True, nonnegative=True) + 2 for symbol in self._symbols()
        }
        asked = [guard.expr for guard in self._guards if guard.expr.subs(more) != sympy.true]
        if asked:
            raise CompileError(
                f"{type(model).__name__} depends on sizes: {', '.join(map(str, asked))} holds for some only",
                "remove Python code that depends on sizes, or set compilation.on_capture_error to eager, with which "
                "such steps run the model's Python",
            )

    @property
    def specialized_axes(self) -> list[str]:
        """The axes that the trace specialized to the example's size, such as ``blocks = 7``."""
        shapes: Any = self.mode.shape_env
        return [
            f"{name} = {known}"
            for name, size in self.sizes.items()
            if not isinstance(size, int) and (known := shapes.replace(size.node.expr)).is_number
        ]

    def serves(self, shape: StepShape) -> bool:
        """Return whether the graph is valid for a step of equal query lengths."""
        size: Any = self.sizes["sequences"]
        sequences = shape.sequences
        if shape.queries != self.queries or isinstance(size, int):
            return shape.queries == self.queries and bool(size == sequences)
        known = {size.node._expr: sequences}
        # Conditions on block table columns alone hold for any number: it is symbolic in all traces.
        return sequences >= 2 and all(
            guard.expr.subs(known) == sympy.true for guard in self._guards if size.node._expr in guard.expr.free_symbols
        )

    @property
    def _guards(self) -> list[Any]:
        shapes: Any = self.mode.shape_env
        return list(shapes.guards)

    def _symbols(self) -> set[Any]:
        # Guards use the original symbol; ``expr`` may have replaced it by a number.
        return {
            symbol
            for size in self.sizes.values()
            if not isinstance(size, int)
            for symbol in size.node._expr.free_symbols
        }


def trace_step(
    model: CausalLM,
    states: StateMemory,
    sizes: StepSizes,
    *,
    whole: Collection[str],
    decompose: bool = True,
    rows: Rows = NONE,
) -> TracedStep:
    """Trace ``model(batch, states)``. Other threads can run the model meanwhile, but only one thread traces at a time.

    Args:
        model: its weights become inputs.
        states: the states that it writes; they become inputs.
        sizes: the sizes to trace for.
        whole: names of the operations that stay nodes, and call the backend's kernel; the bodies of the others are
            traced.
        decompose: whether overloads are decomposed into those that Inductor supports.
        rows: the rows of logits that the step computes, too.

    Raises:
        CompileError: the model cannot be traced, for instance because it reads a tensor's value.
    """
    kept_states = dict(states.tensors())
    fields = fields_of(model.batch_type)
    mode = _fake_mode()
    of_axes = sizes.of_axes(mode.shape_env)  # type: ignore[arg-type]
    device = next(iter((*model.parameters(), *kept_states.values()))).device
    with mode:
        fakes = [
            torch.empty(each.shape(of_axes), dtype=each.dtype, device="cpu" if each.twin_of else device)
            for each in fields.values()
        ]

    def step(copied: CausalLM, given: Sequence[Tensor], kept: Iterator[Tensor]) -> Outputs:
        layers = [dict(zip(layer, kept, strict=False)) for layer in states.layers]
        batch = model.batch_type(**dict(zip(fields, given, strict=True)))
        found = flat_outputs(model, copied(batch, layers))
        if rows is NONE:
            return found
        return (*found, copied.logits(found[0] if rows is ALL else found[0][batch.query_start_loc[1:] - 1]))

    graph, fixed = _trace(model, dict(zip(fields, fakes, strict=True)), kept_states, step, mode, whole, decompose)
    queries = sizes.queries if sizes.sequences else 0
    return TracedStep(graph, fixed, of_axes, queries, fields, mode, model.recognize)


def trace_logits(model: CausalLM, hidden: Tensor, *, whole: Collection[str], decompose: bool = True) -> TracedStep:
    """Trace ``model.logits(hidden)`` for any number of rows.

    Args:
        model: its weights become inputs.
        hidden: its width and dtype are those of hidden states.
        whole: as for :func:`trace_step`.
        decompose: as for :func:`trace_step`.

    Raises:
        CompileError: as :func:`trace_step`.
    """
    mode = _fake_mode()
    rows = _symbol(mode.shape_env, "rows", 5)  # type: ignore[arg-type]
    with mode:
        fake = torch.empty((rows, hidden.shape[-1]), dtype=hidden.dtype, device=hidden.device)

    def step(copied: CausalLM, given: Sequence[Tensor], kept: Iterator[Tensor]) -> Outputs:
        return (copied.logits(*given),)

    graph, fixed = _trace(model, {"hidden": fake}, {}, step, mode, whole, decompose)
    return TracedStep(graph, fixed, {"rows": rows}, 0, {"hidden": _HIDDEN}, mode)


def trace_encoder(encoder: Encoder, *, whole: Collection[str], decompose: bool = True) -> TracedStep:
    """Trace ``encoder(batch)`` for any number of tokens and sequences.

    Args:
        encoder: its weights become inputs.
        whole: as for :func:`trace_step`.
        decompose: as for :func:`trace_step`.

    Raises:
        CompileError: as :func:`trace_step`.
    """
    fields, mode = fields_of(encoder.batch_type), _fake_mode()
    # A symbol stands for two or more, and a step may have one sequence.
    rows, starts = (_symbol(mode.shape_env, name, hint) for name, hint in (("rows", 9), ("starts", 4)))  # type: ignore[arg-type]
    sizes = {"tokens": rows * encoder.row_tokens, "sequences": starts - 1}
    device = next(encoder.parameters()).device
    with mode:
        fakes = {
            name: torch.empty(each.shape(sizes), dtype=each.dtype, device="cpu" if each.twin_of else device)
            for name, each in fields.items()
        }

    def step(copied: Encoder, given: Sequence[Tensor], kept: Iterator[Tensor]) -> Outputs:
        return (copied(encoder.batch_type(**dict(zip(fields, given, strict=True)))),)

    graph, fixed = _trace(encoder, fakes, {}, step, mode, whole, decompose)
    return TracedStep(graph, fixed, sizes, 0, fields, mode)


_HIDDEN = Field("hidden", (FieldAxis("rows"), FieldAxis(None)), torch.float32, 0, False, None, None)


def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def _trace(
    model: M,
    inputs: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    step: Callable[[M, Sequence[Tensor], Iterator[Tensor]], Outputs],
    mode: FakeTensorMode,
    whole: Collection[str],
    decompose: bool,
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Trace ``step(copy of the model, inputs, states)``, and return its graph and fixed tensors."""
    weights: dict[str, Tensor] = dict((*model.named_parameters(), *model.named_buffers()))
    fakes = [*inputs.values(), *(mode.from_tensor(tensor, static_shapes=True) for tensor in weights.values())]
    with torch.inference_mode(False), mode:  # The trace writes to the states, and runs outside inference mode.
        fakes += [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
            for each in states.values()
        ]

    def run(arrange: Callable[[M], None], *flat: Tensor) -> Outputs:
        rest = iter(flat[len(inputs) :])
        replaced = {id(weight): each for weight, each in zip(weights.values(), rest, strict=False)}
        copied: M = copy_model(model, replaced)  # type: ignore[assignment]
        arrange(copied)
        return step(copied, flat[: len(inputs)], rest)

    def kept(operation: Operation) -> Kernel:
        return kept_or_traced(operation, whole, kept)

    table = {**(select_decomp_table() if decompose else {}), torch.ops.aten.polar.default: polar}
    try:
        with ops.intercepted(lambda each, _: kept(each)):
            try:
                layers = RepeatedLayers(mode, table)
                graph = make_graph(partial(run, layers.replace), fakes, mode, table)
                layers.expand(graph.graph)
            except ChangesItself:
                graph = make_graph(partial(run, lambda copied: None), fakes, mode, table)
    except Exception as error:
        raise CompileError(
            f"{type(model).__name__} cannot be traced{_where(error)}: {str(error).partition(chr(10))[0]}",
            "remove Python code that depends on a tensor's value, or use the compiler eager",
        ) from error
    _name_inputs(graph.graph, [*inputs, *weights, *(f"state_{name}" for name in states)])
    return graph, [*weights.values(), *states.values()]


def kept_or_traced(operation: Operation, whole: Collection[str], meaning: Resolver) -> Kernel:
    """Return the node of an operation that stays one in a graph for Inductor, or its body, rebound by ``meaning``.

    Weights in another form than floating-point numbers are never traced through: the driver has prepared them.
    """
    if operation.name in whole:
        return operation.node
    body = operation.rebound(meaning)
    if not operation.takes_forms:
        return body
    return lambda *arguments: (body if arguments[-1] == FLOAT else operation.node)(*arguments)


def _name_inputs(graph: fx.Graph, names: list[str]) -> None:
    """Rename the placeholders, to make the graph's code readable."""
    for node, name in zip([each for each in graph.nodes if each.op == "placeholder"], names, strict=True):
        node._rename(re.sub(r"\W", "_", name))


def _where(error: BaseException) -> str:
    """Return the line of the model's code that raised, for errors."""
    others = (str(Path(torch.__file__).parent), str(Path(ops.__file__).parent), __file__, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f", in {frame.name} at {frame.filename}:{frame.lineno}"
    return ""
