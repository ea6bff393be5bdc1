"""Tests for every operation of the catalogue: registration, documentation, reference, and dispatch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import attrs
import pytest
import torch
from helpers.thorough import OPERATION, thorough
from torch import Tensor
from torch.utils._pytree import tree_leaves

import hal
from hal import ops
from hal.errors import MissingKernel, OperationError
from hal.ops import FLOATING, Draw, Operation, Sample
from hal.ops.declaration.torch_library import fake_of

OPERATIONS = list(ops.catalogue().values())


def each_operation() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)


def node_arguments(operation: Operation, arguments: list[Any]) -> tuple[Any, ...]:
    """Return the arguments of the operation's node, which takes the fields of options one by one."""
    if operation.node_form.options is None:
        return tuple(arguments)
    return (*arguments[:-1], *attrs.astuple(arguments[-1]))


def copied(sample: Sample) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in sample]


@thorough(
    OPERATION, r"\[(?!rms_norm|paged_attention|store_kv|sample|split_qkv_rmsnorm_rope\]|topk_route|linear\]|expert_mlp)"
)
@each_operation()
def test_opcheck(operation: Operation) -> None:
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for index, sample in enumerate(operation.samples(Draw())):
        # Compiling takes most of the time, and depends only on the samples' sizes.
        compiled = [] if index else ["test_aot_dispatch_dynamic"]
        torch.library.opcheck(
            operation.overload, node_arguments(operation, copied(sample)), test_utils=[*checks, *compiled]
        )


@each_operation()
def test_host_arguments_repeat_their_device_twins(operation: Operation) -> None:
    for sample in operation.samples(Draw()):
        named = dict(zip(operation.signature.parameters, sample, strict=True))
        for name in operation.host:
            assert torch.equal(named[name], named[name.removesuffix("_host")].cpu())


@each_operation()
def test_documentation_says_what_goes_in_and_out(operation: Operation) -> None:
    text = operation.function.__doc__ or ""
    for parameter in operation.signature.parameters:
        described = re.search(rf"^ +(\w+, )*{parameter}(, \w+)*: ", text, re.MULTILINE)
        assert described, f"{operation.name} does not document {parameter}"
    assert operation.signature.return_annotation in (None, "None") or "Returns:" in text


@each_operation()
def test_the_declaration_says_what_a_trace_gets(operation: Operation) -> None:
    """Unless it leaves a size open: then the reference computes the fake result."""
    derived = 0
    for sample in operation.samples(Draw()):
        found = operation.constraints.derived_results(sample)
        if found is not None:
            results = tree_leaves(operation.reference(*copied(sample)))
            assert found == [(tuple(each.shape), each.dtype) for each in results if each is not None]
            derived += 1
    assert derived or operation.name in OPEN


OPEN = (
    *("all_gather", "all_gather_rows", "all_gather_linear", "reduce_scatter", "linear_reduce_scatter"),
    *("expert_dispatch", "embedding"),
)
"""Operations whose declaration leaves a size of the results open: what all ranks hold, or send, or a form packs."""


def test_a_trace_runs_no_reference_of_what_is_declared() -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("the reference ran")

    norm, gather = ops.operation("add_rms_norm"), ops.operation("all_gather")
    x, weight = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    found = fake_of(norm.constraints, norm.host, refuse)(x, x, weight, 1e-6)
    assert [(tuple(each.shape), each.dtype) for each in found] == [((3, 8), torch.bfloat16)] * 2
    with pytest.raises(AssertionError, match="the reference ran"):  # a size is open
        fake_of(gather.constraints, gather.host, refuse)(x, "ranks")
    with pytest.raises(AssertionError, match="the reference ran"):  # it says what is wrong
        fake_of(norm.constraints, norm.host, refuse)(x, x, weight[:4], 1e-6)


def test_a_function_imported_by_name_follows_the_active_backend(cpu: hal.Backend) -> None:
    from hal.ops import rms_norm

    x, weight = torch.randn(2, 8), torch.ones(8)
    right = rms_norm(x, weight, 1e-6)
    other = hal.Backend("other", hal.vendor.HostDevice(), kernels={"rms_norm": lambda x, weight, eps: x + 1})
    other.activate()
    assert torch.equal(rms_norm(x, weight, 1e-6), x + 1)
    assert torch.equal(cpu.ops.rms_norm(x, eps=1e-6, weight=weight), right)
    assert torch.equal(cpu.ops.linear(x, torch.eye(8)), x), "defaults must be those of the declaration"
    cpu.activate()
    assert torch.equal(rms_norm(x, weight, 1e-6), right)


@each_operation()
def test_no_reference_reaches_a_kernel(cpu: hal.Backend, operation: Operation) -> None:
    """However the body spells its calls: any call of an operation would raise here."""

    def refuse(called: Operation, kernel: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"the reference of {operation.name} calls {called.name}")

        return run

    with ops.intercepted(refuse):
        for sample in operation.samples(Draw()):
            operation.reference(*copied(sample))


def test_a_backends_own_functions_stay_its_own(cpu: hal.Backend) -> None:
    """Fetched while the backend is active or not; a capture records their calls."""
    other = hal.Backend("other", hal.vendor.HostDevice(), kernels={"rms_norm": lambda x, weight, eps: x * 0 + 7})
    arguments = torch.ones(1, 4), torch.ones(4), 1e-6
    mine, theirs, fused = cpu.ops.rms_norm, other.ops.rms_norm, other.ops.add_rms_norm
    for active in (cpu, other):
        active.activate()
        assert (mine(*arguments) < 2).all()
        assert (theirs(*arguments) == 7).all()
        assert (fused(arguments[0], *arguments)[0] == 7).all()
        seen: list[str] = []

        def noted(operation: Operation, kernel: Any, seen: list[str] = seen) -> Any:
            return lambda *args: (seen.append(operation.name), kernel(*args))[1]

        with ops.intercepted(noted):
            mine(*arguments), theirs(*arguments)
        assert seen == ["rms_norm", "rms_norm"]
    cpu.activate()


class TestInterception:
    ARGUMENTS = torch.ones(2, 4), torch.ones(4), 1e-6

    def counting(self, seen: list[str], name: str) -> Any:
        def wrap(operation: Operation, kernel: Any) -> Any:
            return lambda *args: (seen.append(name), kernel(*args))[1]

        return wrap

    def test_they_nest_and_end_in_any_order(self, cpu: hal.Backend) -> None:
        seen: list[str] = []
        with ExitStack() as outer, ExitStack() as inner:
            outer.enter_context(ops.intercepted(self.counting(seen, "outer")))
            inner.enter_context(ops.intercepted(self.counting(seen, "inner")))
            ops.rms_norm(*self.ARGUMENTS)
            assert seen == ["inner", "outer"]
            outer.close()
            seen.clear()
            ops.rms_norm(*self.ARGUMENTS)
            assert seen == ["inner"]
        assert ops.operation("rms_norm").kernel is cpu.kernels["rms_norm"]
        ops.rms_norm(*self.ARGUMENTS)
        assert seen == ["inner"]

    def test_another_thread_notices_nothing(self, cpu: hal.Backend) -> None:
        """By call or by node, with or without its own interceptions."""
        seen: list[str] = []
        with ThreadPoolExecutor(1) as threads:

            def elsewhere(function: Any) -> Tensor:
                return threads.submit(function, *self.ARGUMENTS).result()

            expected = elsewhere(ops.rms_norm)
            with ops.intercepted(lambda operation, _: lambda *args: None):
                assert torch.equal(elsewhere(ops.rms_norm), expected)
                assert torch.equal(elsewhere(torch.ops.hal.rms_norm), expected)
                its_own = ops.intercepted(self.counting(seen, "its own"))
                threads.submit(its_own.__enter__).result()
                assert torch.equal(elsewhere(ops.rms_norm), expected)
                assert ops.rms_norm(*self.ARGUMENTS) is None
                assert seen == ["its own"]
            threads.submit(its_own.__exit__, None, None, None).result()
        assert ops.operation("rms_norm").kernel is cpu.kernels["rms_norm"]

    def test_a_backend_activated_inside_stays(self, cpu: hal.Backend) -> None:
        other = hal.Backend("other", hal.vendor.HostDevice(), kernels={"rms_norm": lambda x, weight, eps: x * 0 + 7})
        seen: list[str] = []
        with ops.intercepted(self.counting(seen, "seen")):
            other.activate()
            assert (ops.rms_norm(*self.ARGUMENTS) == 7).all()
        assert seen == ["seen"]
        assert hal.active_backend() is other
        assert (ops.rms_norm(*self.ARGUMENTS) == 7).all()
        assert seen == ["seen"]
        cpu.activate()

    def test_calls_may_run_the_node_behind_another_interception(self, cpu: hal.Backend) -> None:
        """Around or inside the interception that returns the node: none wraps the node's kernel twice."""
        seen: list[str] = []
        expected = ops.rms_norm(*self.ARGUMENTS)
        with (
            ops.intercepted(self.counting(seen, "outer")),
            ops.intercepted(lambda operation, _: operation.node),
            ops.intercepted(self.counting(seen, "inner")),
        ):
            torch.testing.assert_close(ops.rms_norm(*self.ARGUMENTS), expected, rtol=0, atol=0)
            assert seen == ["inner"]
            torch.testing.assert_close(torch.ops.hal.rms_norm(*self.ARGUMENTS), expected, rtol=0, atol=0)
        assert seen == ["inner"]

    def test_a_node_is_seen_where_the_operation_is(self, cpu: hal.Backend) -> None:
        seen: list[str] = []
        with ops.intercepted(self.counting(seen, "seen")):
            torch.ops.hal.rms_norm(*self.ARGUMENTS)
        assert seen == ["seen"]

    def test_a_wrapper_that_raises_leaves_nothing(self, cpu: hal.Backend) -> None:
        def wrap(operation: Operation, kernel: Any) -> Any:
            raise ZeroDivisionError(operation.name)

        for _ in range(2):
            with pytest.raises(ZeroDivisionError), ops.intercepted(wrap):
                raise AssertionError("it was entered")
        assert ops.operation("rms_norm").kernel is cpu.kernels["rms_norm"]


def test_strict_refuses_to_run_a_reference() -> None:
    torchs = {"native": False}  # only C++ has a kernel for it
    backend = hal.open({"backend": "cpu", "strict": True, "options": torchs})
    sample = next(iter(ops.operation("quantize").samples(Draw())))
    with pytest.raises(MissingKernel, match="no kernel for quantize"):
        ops.quantize(*sample)
    backend.ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
    cpu = hal.open({"backend": "cpu", "options": torchs})
    ops.quantize(*sample)  # binds its body
    cpu.configure(hal.Config(backend="cpu", strict=True, options=torchs))
    with pytest.raises(MissingKernel):
        ops.quantize(*sample)
    hal.open("cpu")


def test_a_stand_in_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = hal.Backend("bare", hal.vendor.HostDevice(), kernels={})
    backend.activate()
    with caplog.at_level("INFO", "hal.drivers"):
        for _ in range(3):
            ops.silu_and_mul(torch.ones(1, 4))
    assert [record.getMessage() for record in caplog.records] == [
        "bare has no kernel for silu_and_mul; its reference implementation runs"
    ]
    hal.open("cpu")


def test_a_kernel_under_an_unknown_name_is_refused() -> None:
    with pytest.raises(OperationError, match=r"did you mean 'rms_norm'"):
        hal.Backend("typo", hal.vendor.HostDevice(), kernels={"rms_nrom": lambda: None})
    with pytest.raises(OperationError, match="the kernel of none for rms_norm is None"):
        hal.Backend("none", hal.vendor.HostDevice(), kernels={"rms_norm": None})  # type: ignore[dict-item]
    assert not hasattr(hal.open("cpu").ops, "rms_nrom")


@pytest.mark.usefixtures("forget_operations")
class TestDeclaration:
    declared: ClassVar[dict[str, Any]] = {
        "axes": {"x": "...", "return": "..."},
        "dtypes": {"x": FLOATING, "return": "x"},
        "rowwise": None,
    }

    @staticmethod
    def no_samples(draw: Draw) -> Iterator[Sample]:
        yield (draw.normal(2),)

    def test_bodies_may_name_operations_in_every_way(self, cpu: hal.Backend) -> None:
        """As a module's attribute, in a helper, in a closure, and in a comprehension."""
        norm = ops.rms_norm

        def helper(x: Tensor) -> Tensor:
            return ops.rms_norm(x, torch.ones(4), 1e-6)

        @ops.fused_op(samples=self.no_samples, namespace="haltest", **self.declared)
        def thrice_normed(x: Tensor) -> Tensor:
            parts = [hal.ops.rms_norm(part, torch.ones(4), 1e-6) for part in (x,)]
            return norm(helper(parts[0]), torch.ones(4), 1e-6)

        seen = []

        def meaning(operation: Operation) -> Any:
            seen.append(operation.name)
            return lambda x, weight, eps: x + 1

        assert (ops.operation("thrice_normed").rebound(meaning)(torch.zeros(1, 4)) == 3).all()
        assert set(seen) == {"rms_norm"}

    def test_bodies_may_keep_operations_in_containers(self, cpu: hal.Backend) -> None:
        table, bound = {"norm": [ops.rms_norm]}, partial(ops.rms_norm, eps=1e-6)

        def helper(x: Tensor, *, norm: Any = ops.rms_norm) -> Tensor:
            return norm(x, torch.ones(4), 1e-6)

        @ops.fused_op(samples=self.no_samples, namespace="haltest", **self.declared)
        def normed_from_tables(x: Tensor) -> Tensor:
            return table["norm"][0](helper(bound(x, torch.ones(4))), torch.ones(4), 1e-6)

        rebound = ops.operation("normed_from_tables").rebound(lambda operation: lambda x, weight, eps: x + 1)
        assert (rebound(torch.zeros(1, 4)) == 3).all()

    def test_an_attribute_of_the_same_name_is_left_alone(self) -> None:
        linear = ops.operation("linear")
        torch.testing.assert_close(linear.reference(torch.ones(1, 2), torch.ones(3, 2), None), torch.full((1, 3), 2.0))

    def test_names_are_unique_and_arguments_exist(self) -> None:
        with pytest.raises(OperationError, match="already declared"):
            ops.op(samples=self.no_samples, **self.declared)(ops.operation("rms_norm").body)

        def body(x: Tensor) -> Tensor:
            return x + 1

        with pytest.raises(OperationError, match="'y'"):
            ops.op(samples=self.no_samples, mutates=("y",), namespace="haltest", **self.declared)(body)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"mutates": "x"}, r"mutates='x'.*\n.*mutates=\('x',\)"),
            ({"host": "x"}, r"host='x'.*\n.*host=\('x',\)"),
            ({"host": ("y",)}, "'y' in "),
            ({"state": "x"}, r"state='x'.*\n.*state=\('x',\)"),
            ({"state": ("y",)}, "'y' in "),
            ({"buffers": ("y",)}, "'y' in "),
            (
                {"tolerance": {"float32": (0.5, 0.5)}},
                r"the tolerance 'float32': \(0\.5, 0\.5\)\n.*torch\.float32: \(1e-5",
            ),
            ({"tolerance": {torch.float32: 1e-3}}, "the tolerance torch.float32: 0.001"),
            ({"tolerance": {torch.float32: (1e-3,)}}, "the tolerance torch.float32"),
            ({"tolerance": {torch.float32: (1e-3, -1.0)}}, "the tolerance torch.float32"),
            ({"tolerance": {torch.float32: (1e-3, math.inf)}}, "the tolerance torch.float32"),
            ({"off_by_one": {"float32": 0.1}}, "off_by_one 'float32': 0.1"),
            ({"off_by_one": {torch.float32: 2}}, "off_by_one torch.float32: 2"),
        ],
    )
    def test_what_tests_and_captures_would_not_read(self, given: dict[str, Any], message: str) -> None:
        def unread(x: Tensor) -> Tensor:
            return x

        with pytest.raises(OperationError, match=f"unread declares {message}"):
            ops.op(samples=self.no_samples, namespace="haltest", **self.declared | given)(unread)

    def test_arguments_that_a_node_cannot_take(self) -> None:
        for given, returned, message in (
            ("x: Tensor, *, eps: float = 1.0", "Tensor", "takes 'eps' as a keyword-only argument"),
            ("x: Tensor, /", "Tensor", "takes 'x' as a positional-only argument"),
            ("*x: Tensor", "Tensor", r"takes '\*x' as a variadic positional argument"),
            (
                "x: bytes",
                "Tensor",
                r"annotates its argument 'x' as bytes\n.* Tensor, int, float, bool, str, torch\.",
            ),
            ("x: list[int]", "Tensor", r"annotates its argument 'x' as list\[int\]"),
            ("x: int | float", "Tensor", r"annotates its argument 'x' as int \| float"),
            ("x: list[Tensor]", "Tensor", r"annotates its argument 'x' as list\[torch\.Tensor\]"),
            ("x", "Tensor", "does not annotate its argument 'x'"),
            ("x: Tensor", "", "declared_so does not annotate its return type"),
            ("x: Tensor", "list[Tensor]", r"returns list\[torch\.Tensor\]\n.* a tuple of Tensors"),
            ("x: Tensor", "tuple[Tensor, ...]", r"returns tuple\[torch\.Tensor, \.\.\.\]"),
            (
                "x: 'Tensors'",
                "Tensor",
                "an annotation of declared_so cannot be evaluated: name 'Tensors' is not defined",
            ),
        ):
            made: dict[str, Any] = {"Tensor": Tensor}
            exec(f"def declared_so({given}){returned and ' -> ' + returned}:\n    return x", made)
            with pytest.raises(OperationError, match=message):
                ops.op(samples=self.no_samples, namespace="haltest", **self.declared)(made["declared_so"])
            assert "declared_so" not in ops.catalogue()

    def test_outputs_of_a_node_alias_nothing(self, cpu: hal.Backend) -> None:
        sample = next(iter(ops.operation("split_qkv_rmsnorm_rope").samples(Draw())))
        by_call, by_node = ops.split_qkv_rmsnorm_rope(*sample)[2], torch.ops.hal.split_qkv_rmsnorm_rope(*sample)[2]
        assert by_call.untyped_storage().data_ptr() == sample[0].untyped_storage().data_ptr()
        assert by_node.untyped_storage().data_ptr() != sample[0].untyped_storage().data_ptr()
        assert torch.equal(by_call, by_node)

    def test_declared_after_a_backend_was_opened(self, cpu: hal.Backend) -> None:
        @ops.fused_op(samples=self.no_samples, namespace="haltest", **self.declared)
        def late(x: Tensor) -> Tensor:
            return ops.rms_norm(x, torch.ones(4), 1e-6)

        torch.testing.assert_close(late(torch.ones(1, 4)), torch.ones(1, 4), rtol=1e-5, atol=1e-5)


def slopes_of(heads: int) -> list[float]:
    """Return the slopes of ALiBi as its authors define them: those of 2 ** n heads, then every other one of twice."""
    closest = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * power / closest) for power in range(1, closest + 1)]
    return slopes if closest == heads else slopes + slopes_of(2 * closest)[0::2][: heads - closest]


class TestAttention:
    """The reference against attention written out for one query at a time."""

    @pytest.mark.parametrize("seed", range(3))
    def test_reference_against_one_query_at_a_time(self, seed: int) -> None:
        for sample in ops.operation("paged_attention").samples(Draw(seed=seed)):
            query, keys, values, table, starts, lens, _, _, sinks, options = sample
            found = ops.operation("paged_attention").reference(*sample)
            heads, kv_heads, block = query.shape[1], keys.shape[2], keys.shape[1]
            for row in range(lens.shape[0]):
                first, last, length = int(starts[row]), int(starts[row + 1]), int(lens[row])
                for token in range(first, last):
                    position = length - last + token
                    expected = torch.zeros_like(query[token])
                    seen = [
                        slot
                        for slot in range(length)
                        if (not options.causal or slot <= position)
                        and (options.window is None or abs(slot - position) < options.window)
                        and (options.chunk is None or slot // options.chunk == position // options.chunk)
                    ]
                    for head in range(heads) if seen else ():
                        rows = [
                            (int(table[row, slot // block]), slot % block, head * kv_heads // heads) for slot in seen
                        ]
                        scores = torch.stack([query[token, head] @ keys[at] * options.scale for at in rows])
                        if options.softcap is not None:
                            scores = (scores / options.softcap).tanh() * options.softcap
                        if options.alibi is not None:
                            distances = torch.tensor([slot - position for slot in seen])
                            scores += options.alibi * slopes_of(heads)[head] * distances
                        total = scores.exp().sum() + (0 if sinks is None else sinks[head].exp())
                        weights = scores.exp() / total
                        expected[head] = sum(weight * values[at] for weight, at in zip(weights, rows, strict=True))
                    torch.testing.assert_close(found[token], expected, rtol=1e-5, atol=1e-5)


class TestSampling:
    def arguments(self, logits: Tensor, **given: float) -> list[Tensor]:
        batch = logits.shape[0]
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
        kinds = {"top_k": torch.int32}
        columns = [torch.full((batch,), value, dtype=kinds.get(name, torch.float32)) for name, value in values.items()]
        return [logits, *columns]

    def draw_many(self, logits: Tensor, count: int, **given: float) -> Tensor:
        many = logits.expand(count, -1)
        return ops.sample(*self.arguments(many, **given), torch.full((count,), 123), torch.arange(count))

    def test_frequencies_are_the_probabilities(self) -> None:
        logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
        count = 40000
        for temperature in (0.5, 1.0, 2.0):
            found = torch.bincount(self.draw_many(logits, count, temperature=temperature), minlength=5) / count
            expected = (logits[0] / temperature).softmax(-1)
            # Five standard deviations of a frequency.
            assert ((found - expected).abs() < 5 * (expected / count).sqrt()).all()

    @pytest.mark.parametrize(
        ("given", "allowed"),
        [
            ({"top_k": 2}, {1, 2}),
            ({"top_p": 0.6}, {2}),
            ({"top_p": 0.7}, {1, 2}),
            ({"min_p": 0.3}, {1, 2}),
            ({"top_k": 3, "top_p": 0.999, "min_p": 0.0}, {0, 1, 2}),
            ({"temperature": 0.0}, {2}),
        ],
    )
    def test_what_is_left_out_never_comes(self, given: dict[str, float], allowed: set[int]) -> None:
        logits = torch.tensor([[0.5, 1.0, 2.0, -3.0]])  # 0.139, 0.229, 0.623, 0.004... by softmax, rounded
        assert set(self.draw_many(logits, 3000, **given).tolist()) == allowed

    def test_seed_and_step_both_matter(self) -> None:
        logits = torch.zeros(64, 1000)
        zero, up = torch.zeros(64, dtype=torch.int64), torch.arange(64)
        assert len(set(ops.sample(*self.arguments(logits), up, zero).tolist())) > 50
        assert len(set(ops.sample(*self.arguments(logits), zero, up).tolist())) > 50
        assert len(set(ops.sample(*self.arguments(logits), up << 32, zero).tolist())) > 50
