"""hal's own compilers. What they need is imported when they make a form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal.drivers.compiler import Compiler, Form

if TYPE_CHECKING:
    from hal.execution.context import FormContext


class _Capturing(Compiler):
    """One that needs the backend's graphs."""

    def unsupported(self, backend: Any) -> str | None:
        return None if backend.graphs else "it captures no graphs"


class GraphCompiler(_Capturing):
    """Captures whole steps whose sequences have the same number of queries, one graph for each size."""

    name = "graph"
    reads = frozenset({"passes", "torch_compile_max_bs", "queries"})

    def make(self, context: FormContext) -> Form:
        from hal.execution.capture.full_graph import FullGraphForm, OptimisedGraphs

        return FullGraphForm(context, OptimisedGraphs(context))


class PiecewiseCompiler(_Capturing):
    """Captures the optimised step in pieces, between the operations that cannot be captured."""

    name = "piecewise"
    reads = frozenset({"splitting_ops", "passes"})
    any_shape = True

    def make(self, context: FormContext) -> Form:
        from hal.execution.pieces.piecewise import PiecewiseForm

        return PiecewiseForm(context)


class PiecewiseEagerCompiler(_Capturing):
    """Captures the model's own Python in pieces, between the operations that cannot be captured."""

    name = "piecewise_eager"
    reads = frozenset({"splitting_ops"})
    any_shape = True

    def make(self, context: FormContext) -> Form:
        from hal.execution.pieces.piecewise_eager import PiecewiseEagerForm

        return PiecewiseEagerForm(context)


class InductorCompiler(Compiler):
    """Compiles steps by PyTorch's compiler, for one sequence and for any larger number of them."""

    name = "inductor"
    reads = frozenset({"queries"})

    def unsupported(self, backend: Any) -> str | None:
        return None if backend.inductor is not None else "Inductor makes no code for it that the driver answers for"

    def make(self, context: FormContext) -> Form:
        from hal.execution.inductor import InductorForm

        return InductorForm(context)
