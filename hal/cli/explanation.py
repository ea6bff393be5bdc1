"""The reports of ``hal explain`` on the kernels of a model's weights, and on its decode step, for each compiler."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hal.cli.console import print_table
from hal.cli.stdout import echo

if TYPE_CHECKING:
    from torch import Tensor

    from hal.compile.optimize import OptimizedStep, Stage
    from hal.compile.split import SplitStep
    from hal.config import CompilationConfig
    from hal.drivers.backend import Backend
    from hal.execution.context import FormContext, Phase
    from hal.nn import CausalLM
    from hal.ops.forms import Form
    from hal.step import StateSpec

MOST_REASONS = 3
"""Number of reasons printed per rewrite, the most frequent first."""
UNTRACED = "the model's Python code is"
NO_REWRITES = "no rewrite is applied"


def explain_step(model: CausalLM, on: Backend, size: int) -> tuple[Sequence[Stage], SplitStep | None]:
    """Print how the backend's compiler processes a decode step of ``size`` sequences.

    Returns:
        The graphs of the stages, if any; and the split of the last one, if it is captured in pieces.

    Raises:
        HalError: what a runner would raise, or log as a warning if ``on_capture_error`` is ``eager``.
    """
    config = on.config.compilation.of("decode")
    echo(f"{_prefill_line(on.config.compilation)}\n")
    if captures_python(config, size):
        limit = config.torch_compile_max_bs
        echo(f"{UNTRACED} captured without compiling, because torch_compile_max_bs is {limit}; {NO_REWRITES}")
    elif config.compiler == "eager":
        echo(f"{UNTRACED} run eagerly; {NO_REWRITES}")
    elif config.compiler == "piecewise_eager":
        _at_markers(model, on, size)
    elif config.compiler == "inductor":
        return _for_inductor(model, on, size), None
    else:
        return _rewritten(model, on, size)
    return (), None


def _prefill_line(config: CompilationConfig) -> str:
    """Return how prefill steps run."""
    compiler = config.of("prefill").compiler
    if compiler != "eager":
        return f"prefill steps have the compiler {compiler}"
    if config.of("decode").compiler == "eager" or config.prefill.compiler == "eager":
        return f"prefill steps: {UNTRACED} run eagerly"
    return "prefill steps are traced once for all sizes, rewritten, and run uncaptured"


def captures_python(config: CompilationConfig, size: int) -> bool:
    """Return whether the compiler ``graph`` captures decode steps of ``size`` without compiling."""
    limit = config.torch_compile_max_bs
    return config.compiler == "graph" and limit is not None and size > limit


def _at_markers(model: CausalLM, on: Backend, size: int) -> None:
    form = _form(model, on, size)
    pieces, at = form.num_graphs, sorted(form.at)
    echo(
        f"{UNTRACED} captured in {pieces} pieces; the {pieces - 1} calls between them, of {', '.join(at)}, run "
        f"eagerly; {NO_REWRITES}"
    )


def _for_inductor(model: CausalLM, on: Backend, size: int) -> Sequence[Stage]:
    """Print the step that Inductor receives."""
    from hal.compile.optimize import stage_of
    from hal.compile.trace import StepSizes, trace_step

    began = time.perf_counter()
    kept = sorted(on.inductor or ())
    states = on.allocate(spec_of_blocks(model, on, 2))
    traced = stage_of("trace", trace_step(model, states, StepSizes(size), whole=kept), began)
    print_stages((traced,))
    echo(
        f"\nInductor compiles the traced graph; {NO_REWRITES}; it calls the driver's kernels of "
        f"{', '.join(kept) or 'no operation'}"
    )
    return (traced,)


def _rewritten(model: CausalLM, on: Backend, size: int) -> tuple[Sequence[Stage], SplitStep | None]:
    """Print the rewritten step, and how it is split or lowered, or which stages another compiler reports."""
    from hal.step import StepShape

    compiler = on.config.compilation.of("decode").compiler
    split, after = None, None
    if compiler == "piecewise":
        pieces = _form(model, on, size)
        step, split = pieces.optimized, pieces.split
        assert split is not None  # it would have raised otherwise
    else:
        step, seconds = _lowered(model, on, size)
        after = "lower", "", f"{seconds:.3f}"
    own = compiler in ("graph", "piecewise")
    later = () if own else _form(model, on, size).stages(StepShape.uniform(size))
    if not own and not later:
        echo(f"the compiler {compiler} does not report its stages; if it uses hal's rewrites, it receives this\n")
    print_stages(step.stages, after, later)
    echo()
    print_rewrites(step, on)
    if absent := _without_kernel(on):
        echo(f"\nnot listed, because {on.name} has no kernel for them (see `hal ops`): {', '.join(absent)}")
    _print_unsupported(step.unsupported, on)
    if split is not None:
        pieces = [each for each in split.segments if each.captured]
        between = [each for each in split.segments if not each.captured]
        names = sorted({name for each in between for name in each.operations})
        echo(
            f"\n{len(pieces)} pieces are captured; {len(between)} parts between them run eagerly, at "
            f"{', '.join(names)} and where lengths are read; logits are computed after them"
        )
    return (*step.stages, *later), split


def _print_unsupported(calls: Mapping[tuple[str, tuple[str, ...]], int], on: Backend) -> None:
    """Print the calls with options that the driver's kernel does not support."""
    for (name, lacks), count in calls.items():
        otherwise = "another kernel" if getattr(on.kernels[name], "otherwise", None) else "the reference"
        echo(f"\n{count} calls of {name} run {otherwise}: the driver's kernel does not support {', '.join(lacks)}")


def _lowered(model: CausalLM, on: Backend, size: int) -> tuple[OptimizedStep, float]:
    """Return the rewritten step, and the seconds after the rewrites."""
    from hal.execution.optimized_model import OptimizedModel
    from hal.step import StepShape

    began, shape = time.perf_counter(), StepShape.uniform(size)
    decoder = OptimizedModel(context_of(model, on, 2))
    decoder.prepare(shape)
    step = decoder.optimized[shape]
    return step, time.perf_counter() - began - sum(each.seconds for each in step.stages)


def context_of(model: CausalLM, on: Backend, num_blocks: int, phase: Phase = "decode") -> FormContext:
    """Return the context of a phase, with states of so many blocks."""
    from hal.execution.context import FormContext

    states = on.allocate(spec_of_blocks(model, on, num_blocks))
    longest = min(model.max_length, states.spec.num_tokens)
    return FormContext(model, on, states, on.config.compilation.of(phase), phase, None, longest)


def _form(model: CausalLM, on: Backend, size: int) -> Any:
    """Return the form that the backend's compiler gives decode steps, which captures those of ``size`` sequences."""
    with _capturing_only(on, size):
        return on.compiler(on.config.compilation.of("decode").compiler).make(context_of(model, on, size + 1))


@contextmanager
def _capturing_only(on: Backend, size: int) -> Iterator[None]:
    """Configure the backend to capture a single batch size, and to raise capture errors, inside the block."""
    import attrs

    config = on.config
    decode = attrs.evolve(config.compilation.decode, capture_sizes=None, max_capture_size=None)
    alone = attrs.evolve(
        config.compilation, capture_sizes=(size,), max_capture_size=None, decode=decode, on_capture_error="raise"
    )
    on.configure(attrs.evolve(config, compilation=alone))
    try:
        yield
    finally:
        on.configure(config)


def spec_of_blocks(model: CausalLM, on: Backend, num_blocks: int) -> StateSpec:
    """Return the spec of states of so many blocks."""
    from hal.execution.state_spec import block_size_for
    from hal.step import StateSpec

    dtype = next(model.parameters()).dtype
    return StateSpec(tuple(model.states), dtype, num_blocks, block_size_for(model, on), num_slots=num_blocks)


def print_rewrites(step: OptimizedStep, on: Backend) -> None:
    """Print what each pass did."""
    print_table(("rewrite", "applied", "skipped", "ms", "reasons"), _rewrites(step, on))


def print_stages(
    stages: Sequence[Stage], after: tuple[str, str, str] | None = None, later: Sequence[Stage] = ()
) -> None:
    """Print the calls and seconds of each stage.

    Args:
        stages: the stages up to the rewrites.
        after: the row of the stage after them, if any.
        later: further stages.
    """
    rows = [(stage.name, str(stage.nodes), f"{stage.seconds:.3f}") for stage in (*stages, *later)]
    if after is not None:
        rows.insert(len(stages), after)
    print_table(("stage", "calls", "seconds"), rows)


def _without_kernel(on: Backend) -> list[str]:
    """Return the fused operations that the backend has no rewrite for, because it has no kernel for them."""
    from hal import ops
    from hal.compile.optimize import all_passes
    from hal.drivers.compiler import pass_name

    listed = set(map(pass_name, all_passes(on)))
    return sorted(each.name for each in ops.catalogue().values() if each.fused and each.name not in listed)


def _rewrites(step: OptimizedStep, on: Backend) -> list[tuple[str, ...]]:
    """Return a row per pass. A function has no match counts, and may not report its number of changes."""
    from hal.compile.optimize import all_passes
    from hal.compile.rewrite.rewrite import Rewrite

    rewrites = {each.name for each in all_passes(on) if isinstance(each, Rewrite)}
    rows: list[tuple[str, ...]] = []
    for each in step.report.passes:
        counts = "" if each.changes is None else str(each.changes), ""
        if each.name in rewrites:
            counts = str(len(each.matches)), str(len(each.near_misses))
        reasons = [f"{times} x {reason}" for reason, times in each.reasons.most_common(MOST_REASONS)]
        if each.matches and each.name in on.sources:
            reasons.append(f"runs {on.sources[each.name]}")
        rows.append((each.name, *counts, f"{each.seconds * 1e3:.1f}", "; ".join(reasons)))
    return rows


def explain_kernels(model: CausalLM, on: Backend) -> None:
    """Print what computes with each weight of a projection or an embedding; equal ones of several layers once."""
    from hal.nn import WeightUse
    from hal.ops.forms import FLOAT

    computing = next(model.parameters()).dtype
    rows = Counter[tuple[str, ...]]()
    for path, operation, weight, form in _weights(model):
        floats = form == FLOAT
        width, kind = (weight.shape[-1], weight.dtype) if floats else (form.width(weight), form)
        use = WeightUse(operation, weight.dtype if floats else computing, form)
        shape = " x ".join(map(str, (*weight.shape[:-1], width)))
        described = f"{shape} {str(kind).removeprefix('torch.')}"
        rows[without_numbers(path), operation, described, on.describe_kernel(weight, use)] += 1
    table = [(path, str(times), *others) for (path, *others), times in rows.items()]
    print_table(("layer", "times", "operation", "weight", "computed by"), table)
    echo()


def _weights(model: CausalLM) -> Iterator[tuple[str, str, Tensor, Form]]:
    """Yield the layer's path, the operation, the weight and its form."""
    from hal.nn import Embedding, Projection, QuantizedEmbedding
    from hal.ops.forms import FLOAT

    for path, layer in model.named_modules():
        if isinstance(layer, Projection) and hasattr(layer, "weight"):  # A driver's layer may hold other tensors.
            yield path, layer.operation, layer.weight, layer.form
        elif isinstance(layer, QuantizedEmbedding):
            yield path, "embedding", layer.table.weight, layer.table.form
        elif isinstance(layer, Embedding):
            yield path, "embedding", layer.weight, FLOAT
            if f"{path}.weight" in model.tied.values():
                yield path, "linear", layer.weight if layer.projection is None else layer.projection, FLOAT


def without_numbers(path: str) -> str:
    """Return a layer's path with ``*`` in place of numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
