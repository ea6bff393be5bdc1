"""Tests for the options of an operation: one object for models and kernels, numbers in graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from helpers.catalogue import forgetting_operations
from helpers.rewriting import trace
from helpers.thorough import MODE, thorough
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import hal
from hal import ops
from hal.compile.fx.make_graph import make_graph
from hal.compile.lower import lower, source_of
from hal.compile.rewrite.proof import check_rewrite
from hal.compile.rewrite.rewrite import of_operation
from hal.errors import MissingKernel, OperationError
from hal.ops import FLOATING, Draw, GatedActivation, Sample
from hal.ops.forms import Form
from hal.ops.kernels.partial_kernel import plain
from hal.vendor import FormKernels, PartialKernel

ATTENTION = ops.operation("paged_attention")


@attrs.frozen
class Scaling:
    """Options of a toy operation."""

    by: float
    plus: float = 0.0
    limit: int | None = None


def samples(draw: Draw) -> Iterator[Sample]:
    yield draw.normal(2, 4), None, Scaling(2.0)
    yield draw.normal(3, 5), draw.normal(5), Scaling(0.5, 1.0, 1)


DECLARED: dict[str, Any] = {
    "samples": samples,
    "axes": {"x": "rows width", "more": "width", "return": "rows width"},
    "dtypes": {"x": FLOATING, "more": "x", "return": "x"},
    "rowwise": "rows",
    "namespace": "haltest",
}


def scaled(x: Tensor, more: Tensor | None, options: Scaling) -> Tensor:
    """Scale, add and limit."""
    result = x * options.by + options.plus + (0 if more is None else more)
    return result if options.limit is None else result.clamp(max=options.limit)


@pytest.fixture(scope="module")
def once() -> Iterator[ops.Operation]:
    """torch.library registers a name once."""
    with forgetting_operations():
        yield ops.operation(ops.op(**DECLARED)(scaled))


@pytest.fixture
def declared(once: ops.Operation, cpu: hal.Backend) -> ops.Operation:
    return once


class TestNodes:
    def test_a_node_takes_the_fields(self, declared: ops.Operation) -> None:
        assert declared.schema == (
            "haltest::scaled(Tensor x, Tensor? more, float by, float plus=0., SymInt? limit=None) -> Tensor"
        )
        node = torch.ops.haltest.scaled
        x, more = torch.randn(2, 4), torch.randn(4)
        torch.testing.assert_close(node(x, None, 2.0), x * 2)
        torch.testing.assert_close(node(x, more=more, limit=1, by=3.0), scaled(x, more, Scaling(3.0, limit=1)))
        torch.testing.assert_close(declared.node(x, more, Scaling(3.0, 1.0)), scaled(x, more, Scaling(3.0, 1.0)))

    def test_kernels_take_the_object(self, declared: ops.Operation, cpu: hal.Backend) -> None:
        seen: list[Any] = []

        def kernel(x: Tensor, more: Tensor | None, options: Scaling) -> Tensor:
            seen.append(options)
            return x

        backend = hal.Backend("seeing", cpu.device, kernels={"scaled": kernel})
        backend.activate()
        x, options = torch.randn(2, 4), Scaling(2.0)
        declared.function(x, None, options)
        for _ in range(2):
            torch.ops.haltest.scaled(x, None, 2.0)
        assert seen == [options] * 3
        assert seen[0] is options
        assert seen[1] is seen[2], "equal fields must not make an object for each call"
        cpu.activate()

    def test_one_and_true_are_different_options(self, declared: ops.Operation) -> None:
        made = [declared.node_form.pack((None, None, 1.0, each), {})[-1].plus for each in (1, True, 1.0)]
        assert list(map(type, made)) == [int, bool, float]

    def test_a_node_as_arguments(self, declared: ops.Operation) -> None:
        found = declared.node_arguments((1, None), {"by": 2.0, "limit": 3})
        assert found == {"x": 1, "more": None, "options": Scaling(2.0, 0.0, 3)}

    def test_a_lowered_graph_makes_no_objects(self, declared: ops.Operation, cpu: hal.Backend) -> None:
        options, other = Scaling(2.0, 1.0), Scaling(2.0, 1.0, 4)

        def twice(x: Tensor) -> tuple[Tensor]:
            first = declared.function(declared.function(x, None, options), None, options)
            return (declared.function(first, x[0], other),)

        mode = FakeTensorMode()
        with torch.no_grad(), ops.intercepted(lambda operation, _: operation.node):
            graph = make_graph(twice, [mode.from_tensor(torch.randn(2, 4))], mode)
        assert "None, 2.0, 1.0)" in graph.code
        run = lower(graph.graph)
        code = source_of(graph.graph)
        assert "Scaling" not in code
        assert code.count("self.options_0") == 2
        assert code.count("self.options_1") == 1
        x = torch.randn(2, 4)
        torch.testing.assert_close(run(x), twice(x))

    @thorough(MODE, "inductor")
    @pytest.mark.parametrize("compiler", [{}, {"compiler": "inductor"}], ids=["hal", "inductor"])
    def test_options_that_change(self, declared: ops.Operation, cpu: hal.Backend, compiler: dict[str, str]) -> None:
        """Dynamo makes a number symbolic that has changed once."""

        def call(x: Tensor, by: float, limit: int) -> Tensor:
            return declared.function(x, None, Scaling(by, limit=limit)) + 1

        compiled: Any = torch.compile(call, backend="hal", options=compiler)
        x = torch.randn(2, 4)
        with torch.no_grad():
            for by, limit in ((2.0, 3), (3.0, 4), (3.5, 2), (0.5, 7)):
                torch.testing.assert_close(compiled(x, by, limit), call(x, by, limit))
        torch.compiler.reset()


class TestDeclarations:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (attrs.make_class("Changing", {"by": attrs.field(type=float)}), "of the class Changing, which can change"),
            (attrs.make_class("Tensors", {"by": attrs.field(type=Tensor)}, frozen=True), "whose field by is not a"),
            (attrs.make_class("Named", {"by": attrs.field(type=float, kw_only=True)}, frozen=True), "field by is not"),
            (attrs.make_class("Twice", {"more": attrs.field(type=float)}, frozen=True), "an argument 'more', and so"),
        ],
        ids=lambda given: getattr(given, "__name__", ""),
    )
    def test_what_a_schema_cannot_hold_is_refused(self, options: type, problem: str) -> None:
        def body(x: Tensor, more: Tensor | None, options: Any) -> Tensor:
            return x

        body.__annotations__["options"] = options
        with pytest.raises(OperationError, match=problem):
            ops.op(**DECLARED)(body)

    def test_options_come_last(self) -> None:
        def body(x: Tensor, options: Scaling, more: Tensor | None) -> Tensor:
            return x

        with pytest.raises(OperationError, match=r"options: Scaling, before its argument 'more'"):
            ops.op(**DECLARED)(body)


class TestPartialKernels:
    """A kernel runs the calls whose options it supports; others run another kernel or the body."""

    @staticmethod
    def kernel(x: Tensor, more: Tensor | None, options: Scaling) -> Tensor:
        assert more is None
        assert options.limit is None
        return scaled(x, None, options) + 100

    def test_the_other_kernel(self, declared: ops.Operation, cpu: hal.Backend) -> None:
        def other(x: Tensor, more: Tensor | None, options: Scaling) -> Tensor:
            return x * 0

        partial = PartialKernel("scaled", self.kernel, supports=("plus",), otherwise=other)
        backend = hal.Backend("partial", cpu.device, kernels={"scaled": partial})
        x, more = torch.randn(2, 4), torch.randn(4)
        for run in (backend.ops.scaled, partial):
            torch.testing.assert_close(run(x, None, Scaling(2.0, 1.0)), x * 2 + 101)
            assert not run(x, more, Scaling(2.0)).any()
            assert not run(x, None, Scaling(2.0, limit=3)).any()
        assert partial.lacks == ("more", "limit")
        assert backend.resolve(declared).chosen(x, more, Scaling(2.0)) is other  # type: ignore[attr-defined]

    def test_the_body(self, declared: ops.Operation, cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
        partial = PartialKernel("scaled", self.kernel, supports=())
        backend = hal.Backend("partial", cpu.device, kernels={"scaled": partial})
        x, wanted = torch.randn(2, 4), Scaling(2.0, limit=1)
        with caplog.at_level(logging.INFO, logger="hal.drivers"):
            for _ in range(2):
                torch.testing.assert_close(backend.ops.scaled(x, None, wanted), scaled(x, None, wanted))
                torch.testing.assert_close(backend.ops.scaled(x, None, Scaling(2.0, 1.0)), x * 2 + 1)
                torch.testing.assert_close(backend.ops.scaled(x, None, Scaling(2.0)), x * 2 + 100)
        assert caplog.text.count("no kernel for scaled with other options than the defaults") == 1

    def test_strict(self, declared: ops.Operation, cpu: hal.Backend) -> None:
        partial = PartialKernel("scaled", self.kernel, supports=("plus",))
        backend = hal.Backend("partial", cpu.device, kernels={"scaled": partial})
        backend.configure(hal.Config(backend="partial", strict=True))
        x = torch.randn(2, 4)
        torch.testing.assert_close(backend.ops.scaled(x, None, Scaling(1.0)), x + 100)
        with pytest.raises(MissingKernel, match="no kernel for scaled with other options than plus"):
            backend.ops.scaled(x, None, Scaling(1.0, limit=2))

    def test_wrong_names(self, declared: ops.Operation, cpu: hal.Backend) -> None:
        with pytest.raises(OperationError, match=r"supports 'softcap', which is not an option of it"):
            PartialKernel("scaled", self.kernel, supports=("softcap",))
        partial = PartialKernel("scaled", self.kernel, supports=())
        with pytest.raises(OperationError, match="the kernel of wrong for rms_norm is one for scaled"):
            hal.Backend("wrong", cpu.device, kernels={"rms_norm": partial})
        with pytest.raises(OperationError, match="cannot take the operation's 3 arguments"):
            hal.Backend("wrong", cpu.device, kernels={"scaled": PartialKernel("scaled", lambda x: x, supports=())})

    def test_every_option_of_attention(self) -> None:
        """A kernel that names none gets plain calls only; a new option must come with a sample."""
        partial = PartialKernel("paged_attention", ATTENTION.reference, supports=())
        assert set(partial.lacks) == {"sinks", "window", "softcap", "causal", "chunk", "alibi"}
        seen = set()
        for sample in ATTENTION.samples(Draw()):
            options = attrs.astuple(sample[-1])
            names = list(ATTENTION.node_form.signature.parameters)
            seen |= set(partial.unsupported(dict(zip(names, (*sample[:-1], *options), strict=True))))
        assert seen == set(partial.lacks)


class TestFormKernels:
    """A kernel runs the calls whose weight has a form that it takes; others run another kernel or the body."""

    def test_the_kernel_of_a_form(self, cpu: hal.Backend) -> None:
        def ones(ids: Tensor, weight: Tensor, *given: Any) -> Tensor:
            return torch.ones(len(ids), weight.shape[1])

        ids, weight, scale = torch.tensor([1]), torch.full((2, 4), 3, dtype=torch.int8), torch.full((2, 1), 2.0)
        forms = Form("int8"), Form("int8", columns=2)
        for otherwise in (None, lambda *given: ones(*given) * 7):
            chooses = FormKernels("embedding", [(plain, ones), (forms[0].__eq__, ones)], otherwise)
            backend = hal.Backend("forms", cpu.device, kernels={"embedding": chooses})
            for run in (backend.ops.embedding, chooses):
                found = [run(ids, weight, scale, None, torch.float32, form) for form in forms]
                assert [each.unique().tolist() for each in found] == [[1], [6 if otherwise is None else 7]]
            chosen = backend.resolve(ops.operation("embedding")).chosen  # type: ignore[attr-defined]
            assert chosen(ids, weight, scale, None, None, forms[0]) is ones
            of_node = [attrs.asdict(form) for form in forms]
            assert [chooses.unsupported(each) for each in of_node] == [(), ("int8 in groups of 2",)]
        with pytest.raises(OperationError, match="rms_norm, which takes none"):
            FormKernels("rms_norm", [])


def test_a_rewrite_finds_a_fused_operation_with_options(declared: ops.Operation, cpu: hal.Backend) -> None:
    """The pattern has the options' values as numbers, which differ between matches."""

    def fused(x: Tensor, more: Tensor | None, options: Scaling) -> Tensor:
        """Scale and activate."""
        return ops.silu_and_mul(declared_function(x, more, options))

    def drawn(draw: Draw) -> Iterator[Sample]:
        yield draw.normal(2, 4), None, Scaling(2.0)
        yield draw.normal(3, 6), draw.normal(6), Scaling(0.5, 1.0, 1)

    declared_function = declared.function
    declaration = {"axes": {**DECLARED["axes"], "return": "rows width//2"}, "samples": drawn}
    with forgetting_operations():
        operation = ops.operation(ops.fused_op(**DECLARED | declaration)(fused))
        rewrite = of_operation(operation)
        check_rewrite(rewrite)
        x = torch.randn(3, 6)
        traced = trace(lambda x: fused(fused(x, None, Scaling(3.0)).repeat(1, 2), x[0], Scaling(5.0, 0.5, 2)), x)
        traced.apply(rewrite)
        assert traced.calls()["scaled"] == 0
        calls = [node.args[1:] for node in traced.graph.graph.nodes if node.target is operation.overload]
        assert [given[1:] for given in calls] == [(3.0, 0.0, None), (5.0, 0.5, 2)]
        traced.check()


@pytest.mark.parametrize(
    "given",
    [{"alpha": 1.0}, {"limit": 7.0}, {"interleaved": True}, {"approximate": "tanh", "alpha": 1.0, "limit": 7.0}],
    ids=lambda given: " ".join(given),
)
def test_contradicting_choices_of_an_activation_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OperationError, match=r"is not an activation\n.*set approximate, or alpha and"):
        GatedActivation(**given)
