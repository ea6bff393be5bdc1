"""hal's compilers. Each imports its implementation when it creates a form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal.drivers.compiler import Compiler, PhaseForm

if TYPE_CHECKING:
    from hal.execution.context import FormContext


class _Capturing(Compiler):
    """A compiler that needs the backend's graphs."""

    invariant = True

    def unsupported(self, backend: Any) -> str | None:
        return None if backend.graphs else "it cannot capture graphs"


class GraphCompiler(_Capturing):
    """Captures whole steps of equal query lengths, one graph per batch size."""

    name = "graph"
    reads = frozenset({"passes", "torch_compile_max_bs", "queries"})

    def make(self, context: FormContext) -> PhaseForm:
        from hal.execution.capture.full_graph import FullGraphForm, OptimizedGraphs

        return FullGraphForm(context, OptimizedGraphs(context))


class PiecewiseCompiler(_Capturing):
    """Captures the optimized step in pieces, between the splitting operations."""

    name = "piecewise"
    reads = frozenset({"splitting_ops", "passes"})
    any_shape = True

    def make(self, context: FormContext) -> PhaseForm:
        from hal.execution.pieces.piecewise import PiecewiseForm

        return PiecewiseForm(context)


class PiecewiseEagerCompiler(_Capturing):
    """Captures the model's Python code in pieces, between the splitting operations."""

    name = "piecewise_eager"
    reads = frozenset({"splitting_ops", "passes"})
    any_shape = True
    traces = False

    def make(self, context: FormContext) -> PhaseForm:
        from hal.execution.pieces.piecewise_eager import PiecewiseEagerForm

        return PiecewiseEagerForm(context)


class InductorCompiler(Compiler):
    """Compiles steps with Inductor, once for one sequence and once for any larger number."""

    name = "inductor"
    reads = frozenset({"passes", "queries"})

    def unsupported(self, backend: Any) -> str | None:
        return None if backend.inductor is not None else "the driver does not support code from Inductor"

    def make(self, context: FormContext) -> PhaseForm:
        from hal.execution.inductor import InductorForm

        return InductorForm(context)
