"""Tests of operations that compute and communicate in one launch (MC2), against the operations that they fuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from emulated_cann import control, faults, tracing
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough
from support.children import on_soc
from support.device_ranks import two_ranks
from support.refusals import check_refused
from torch import Tensor

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import hccl  # noqa: E402

HALF, BF16, FLOAT, INT8, INT32 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32
NZ = 29

Call = Callable[..., Any]


def on_all(call: Call, inputs: list[dict[str, Any]]) -> list[Any]:
    """Call a function on each device, one after the other, with its inputs; wait for all; return results on the CPU."""
    results = []
    for device, arguments in enumerate(inputs):
        with torch.npu.device(device):
            results.append(call(**{name: to(value, device) for name, value in arguments.items()}))
    for device in range(len(inputs)):
        torch.npu.synchronize(device)
    return [to(each, "cpu") for each in results]


def to(value: Any, device: int | str) -> Any:
    if isinstance(value, tuple):
        return tuple(to(each, device) for each in value)
    if not isinstance(value, Tensor):
        return value
    return value.to(device if device == "cpu" else f"npu:{device}")  # keeps the strides of a transpose


def fails(call: Call, inputs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Call a function on each device; return the device error of each."""
    for device, arguments in enumerate(inputs):
        with torch.npu.device(device):
            call(**{name: to(value, device) for name, value in arguments.items()})
    errors = []
    for device in range(len(inputs)):
        with pytest.raises(RuntimeError) as error:
            torch.npu.synchronize(device)
        errors.append(str(error.value))
    text = capfd.readouterr().err
    return [each + text for each in errors]


def draw(rank: int, *shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if dtype == INT8:
        return torch.randint(-9, 10, shape, generator=generator).to(INT8)
    return torch.randn(*shape, generator=generator).to(dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in float32, rounded once, as torch's operation on the NPU computes it."""
    wide = x.float() @ weight.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def total(parts: list[Tensor]) -> Tensor:
    """The all-reduce of the ranks' tensors: in their order, in float32, rounded once."""
    wide = parts[0].float()
    for each in parts[1:]:
        wide = wide + each.float()
    return wide.to(parts[0].dtype)


def same(found: Tensor, due: Tensor) -> None:
    assert found.dtype == due.dtype
    torch.testing.assert_close(found, due, rtol=2e-3 if due.dtype == HALF else 1.6e-2, atol=1e-2)


def ranks_of(make: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [make(rank) for rank in range(2)]


def turned(made: dict[str, Any], options: str) -> dict[str, Any]:
    """Make x2 the transpose of a contiguous matrix, if the options ask for it."""
    return made | ({"x2": made["x2"].t().contiguous().t()} if options == "transposed" else {})


def plus(part: Tensor, made: dict[str, Any]) -> Tensor:
    return (part.float() + made["x3"].float()).to(part.dtype) if "x3" in made else part


def check_sum(
    pair: list[hccl.Communicator],
    make: Callable[[int], dict[str, Any]],
    part: Call,
    call: Call | None = None,
    **more: Any,
) -> None:
    """Check that an all-reduce gives all ranks the sum of the part that each makes of its inputs."""
    all_inputs, function = ranks_of(make), call or torch_npu.npu_mm_all_reduce_base
    found = on_all(lambda **a: function(hcom=pair[0].name, **a, **more), all_inputs)
    due = total([plus(part(made), made) for made in all_inputs])
    for each in found:
        same(each, due)
    assert torch.equal(found[0], found[1])


class TestAllReduce:
    @pytest.mark.parametrize("dtype", [HALF, BF16])
    @pytest.mark.parametrize("options", ["plain", "bias", "x3", "transposed", "three dimensions", "comm_mode", "k=0"])
    def test_equals_the_operations_that_it_fuses(
        self, pair: list[hccl.Communicator], dtype: torch.dtype, options: str
    ) -> None:
        k = 0 if options == "k=0" else 48

        def inputs(rank: int) -> dict[str, Any]:
            shape = (2, 3, k) if options == "three dimensions" else (6, k)
            made = {"x1": draw(rank, *shape, dtype=dtype), "x2": draw(rank, k, 20, dtype=dtype, seed=1)}
            if options in ("bias", "x3", "k=0"):
                made["bias"] = draw(rank, 20, dtype=dtype, seed=2)
            if options == "x3":
                made["x3"] = draw(rank, 6, 20, dtype=dtype, seed=3)
            return turned(made, options)

        extra = {"comm_mode": "ai_cpu"} if options == "comm_mode" else {}
        check_sum(pair, inputs, lambda made: product(made["x1"], made["x2"], made.get("bias")), **extra)

    def test_gives_the_bits_of_matmul_and_all_reduce(self, pair: list[hccl.Communicator]) -> None:
        """A large product, whose all-reduce HCCL shares among the ranks."""
        size = (300, 64, 200)
        all_inputs = ranks_of(lambda rank: {"x": draw(rank, *size[:2]), "w": draw(rank, *size[1:], seed=1)})
        fused = on_all(lambda x, w: torch_npu.npu_mm_all_reduce_base(x, w, pair[0].name), all_inputs)
        buffers = [torch.empty(0)] * 2

        def apart(x: Tensor, w: Tensor) -> Tensor:
            result = x @ w
            torch.npu.synchronize()
            rank = result.device.index
            buffers[rank] = result
            stream = torch.npu.current_stream().npu_stream
            arguments = result.data_ptr(), result.data_ptr(), hccl.number(result.numel()), hccl.TYPES["float16"], 0
            hccl.cann.HcclAllReduce(
                *map(hccl.ctypes.c_void_p, arguments[:2]),
                *arguments[2:],
                pair[rank].handle,
                hccl.ctypes.c_void_p(stream),
            )
            return result

        for found, due in zip(fused, on_all(apart, all_inputs), strict=True):
            assert torch.equal(found, due)

    @pytest.mark.parametrize("shape", [(0, 16, 8), (4, 16, 0)])
    def test_of_nothing_is_no_launch(self, pair: list[hccl.Communicator], shape: tuple[int, int, int]) -> None:
        m, k, n = shape
        with tracing.trace() as trace:  # on one rank, so it must not wait for the other
            (found,) = on_all(
                lambda x, w: torch_npu.npu_mm_all_reduce_base(x, w, pair[0].name),
                [{"x": draw(0, m, k), "w": draw(0, k, n)}],
            )
        assert found.shape == (m, n)
        assert "MatmulAllReduce" not in trace.counts()

    @pytest.mark.parametrize("options", ["packed", "token", "bfloat16", "transposed", "x3", "fractal_nz"])
    @pytest.mark.usefixtures("internal_formats")
    def test_of_int8(self, pair: list[hccl.Communicator], options: str) -> None:
        m, k, n = 5, 64, 32
        dtype = BF16 if options == "bfloat16" else HALF
        scales = draw(7, n, dtype=FLOAT).abs() / 50

        def inputs(rank: int) -> dict[str, Any]:
            made: dict[str, Any] = {"x1": draw(rank, m, k, dtype=INT8), "x2": draw(rank, k, n, dtype=INT8, seed=1)}
            made["bias"] = draw(rank, n, dtype=INT8).to(INT32)
            made["dequant_scale"] = scales.bfloat16() if options == "bfloat16" else scales
            if options == "token":
                made["pertoken_scale"] = draw(rank, m, dtype=FLOAT, seed=3).abs()
            if options == "x3":
                made["x3"] = draw(rank, m, n, seed=4)
            return turned(made, options)

        def call(**arguments: Any) -> Tensor:
            if options not in ("token", "bfloat16"):
                arguments["dequant_scale"] = torch_npu.npu_trans_quant_param(arguments["dequant_scale"])
            if options == "fractal_nz":
                arguments["x2"] = torch_npu.npu_format_cast(arguments["x2"].contiguous(), NZ)
            return torch_npu.npu_mm_all_reduce_base(**arguments)

        def part(made: dict[str, Any]) -> Tensor:
            sums = (made["x1"].int() @ made["x2"].int() + made["bias"]).float() * made["dequant_scale"].float()
            return (sums * made.get("pertoken_scale", torch.ones(m)).unsqueeze(1)).to(dtype)

        check_sum(pair, inputs, part, call)

    @pytest.mark.parametrize(
        ("options", "group_size"), [("tensor", 0), ("channel", 0), ("offset", 0), ("group", 32), ("transposed", 0)]
    )
    def test_of_int8_weights(self, pair: list[hccl.Communicator], options: str, group_size: int) -> None:
        m, k, n = 5, 80, 24

        def inputs(rank: int) -> dict[str, Any]:
            made: dict[str, Any] = {"x1": draw(rank, m, k), "x2": draw(rank, k, n, dtype=INT8, seed=1)}
            shape = {"tensor": (1,), "group": (3, n)}.get(options, (n,))
            made["antiquant_scale"] = draw(rank, *shape, seed=2).abs() / 8
            if options in ("offset", "group"):
                made["antiquant_offset"] = draw(rank, *shape, seed=3)
            return turned(made, options)

        def part(made: dict[str, Any]) -> Tensor:
            factors = [made["antiquant_scale"].float(), made.get("antiquant_offset", torch.zeros(1)).float()]
            if group_size:
                factors = [each.repeat_interleave(group_size, 0)[:k] for each in factors]
            return (made["x1"].float() @ ((made["x2"].float() + factors[1]) * factors[0])).half()

        check_sum(pair, inputs, part, antiquant_group_size=group_size)


def int8_inputs(rows: int) -> Callable[[int], dict[str, Any]]:
    """Return what draws a rank's int8 inputs with that number of rows, and their scales."""
    return lambda rank: {
        "input": draw(rank, rows, 256, dtype=INT8),
        "x2": draw(rank, 256, 16, dtype=INT8, seed=1),
        "x1_scale": draw(rank, rows, 1, dtype=FLOAT).abs(),
        "x2_scale": draw(rank, 1, 16, dtype=FLOAT).abs() / 99,
    }


def dequantized(x: Tensor, x_scale: Tensor, made: dict[str, Any]) -> Tensor:
    return (x.int() @ made["x2"].int()).float() * x_scale * made["x2_scale"]


class TestAllGather:
    @pytest.mark.parametrize("options", ["plain", "transposed", "no output", "aiv", "zero bias", "n=0"])
    def test_equals_the_operations_that_it_fuses(self, pair: list[hccl.Communicator], options: str) -> None:
        n = 0 if options == "n=0" else 24

        def inputs(rank: int) -> dict[str, Any]:
            made = {"input": draw(rank, 3, 256), "x2": draw(rank, 256, n, seed=1)}
            return turned(made | ({"bias": torch.zeros(n, dtype=HALF)} if options == "zero bias" else {}), options)

        all_inputs = ranks_of(inputs)
        extra = {"aiv": {"comm_mode": "aiv"}, "no output": {"gather_output": False}}.get(options, {})
        extra |= {"hcom": pair[0].name, "world_size": 2}
        found = on_all(lambda **a: torch_npu.npu_all_gather_base_mm(**a, **extra), all_inputs)
        whole = torch.cat([made["input"] for made in all_inputs])
        for (output, gathered), made in zip(found, all_inputs, strict=True):
            same(output, product(whole, made["x2"]))
            assert torch.equal(gathered, whole[:0, 0] if options == "no output" else whole)

    @pytest.mark.parametrize("packed", [False, True])
    def test_of_int8(self, pair: list[hccl.Communicator], packed: bool) -> None:
        def call(x2_scale: Tensor, **arguments: Any) -> Any:
            scale = torch_npu.npu_trans_quant_param(x2_scale) if packed else x2_scale
            group = {"hcom": pair[0].name, "world_size": 2, "comm_mode": "aiv"}
            return torch_npu.npu_all_gather_base_mm(x2_scale=scale, **group, **arguments)

        all_inputs = ranks_of(int8_inputs(3))
        whole, scales = (torch.cat([made[name] for made in all_inputs]) for name in ("input", "x1_scale"))
        for (output, gathered), made in zip(on_all(call, all_inputs), all_inputs, strict=True):
            same(output, dequantized(whole, scales, made).to(HALF if packed else BF16))
            assert torch.equal(gathered, whole)


class TestReduceScatter:
    def check(
        self, pair: list[hccl.Communicator], inputs: Callable[[int], dict[str, Any]], part: Call, **more: Any
    ) -> None:
        all_inputs, group = ranks_of(inputs), {"hcom": pair[0].name, "world_size": 2}
        found = on_all(lambda **a: torch_npu.npu_mm_reduce_scatter_base(**group, **a, **more), all_inputs)
        for each, due in zip(found, total([part(made) for made in all_inputs]).chunk(2), strict=True):
            same(each, due)

    @pytest.mark.parametrize("options", ["plain", "transposed", "aiv", "aiv bias", "zero bias"])
    def test_equals_the_operations_that_it_fuses(self, pair: list[hccl.Communicator], options: str) -> None:
        def inputs(rank: int) -> dict[str, Any]:
            made = {"input": draw(rank, 6, 256), "x2": draw(rank, 256, 24, seed=1)}
            if "bias" in options:
                made["bias"] = draw(rank, 24, seed=2) * (options != "zero bias")
            return turned(made, options)

        extra = {"comm_mode": "aiv"} if "aiv" in options else {}
        self.check(pair, inputs, lambda made: product(made["input"], made["x2"], made.get("bias")), **extra)

    def test_of_int8(self, pair: list[hccl.Communicator]) -> None:
        def part(made: dict[str, Any]) -> Tensor:
            return dequantized(made["input"], made["x1_scale"], made).half()

        self.check(pair, int8_inputs(4), part, comm_mode="aiv", output_dtype=HALF)


CALLS: dict[str, Callable[[Tensor, Tensor, str], Any]] = {
    "MatmulAllReduce": torch_npu.npu_mm_all_reduce_base,
    "AllGatherMatmul": lambda x, w, name: torch_npu.npu_all_gather_base_mm(x, w, name, 2)[0],
    "MatmulReduceScatter": lambda x, w, name: torch_npu.npu_mm_reduce_scatter_base(x, w, name, 2),
}


def due_of(name: str, xs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
    if name == "AllGatherMatmul":
        return [product(torch.cat(xs), w) for w in ws]
    whole = total([product(x, w) for x, w in zip(xs, ws, strict=True)])
    return list(whole.chunk(2)) if name == "MatmulReduceScatter" else [whole] * 2


@pytest.mark.parametrize("name", CALLS)
def test_in_graphs_with_other_values(pair: list[hccl.Communicator], name: str) -> None:
    xs, ws = [draw(rank, 4, 256) for rank in range(2)], [draw(rank, 256, 8, seed=1) for rank in range(2)]
    held: list[tuple[Tensor, Tensor, Any]] = []
    for device in range(2):
        with torch.npu.device(device):
            x, w, graph = to(xs[device], device), to(ws[device], device), torch.npu.NPUGraph()
            with torch.npu.graph(graph, stream=torch.npu.Stream(device)):
                out = CALLS[name](x, w, pair[0].name)
            held.append((x, out, graph))
    for seed in (5, 6):
        changed = [draw(rank, 4, 256, seed=seed) for rank in range(2)]
        for device, (x, _, graph) in enumerate(held):
            with torch.npu.device(device):
                x.copy_(changed[device])
                graph.replay()
        for (_, out, _), due in zip(held, due_of(name, changed, ws), strict=True):
            same(out.cpu(), due)


@thorough(EXHAUSTIVE, r"\[[1-5]")
@pytest.mark.parametrize("seed", range(6))
def test_any_schedule(pair: list[hccl.Communicator], seed: int) -> None:
    xs, ws = [draw(rank, 4, 256, seed=seed) for rank in range(2)], [draw(rank, 256, 8, seed=1) for rank in range(2)]
    all_inputs = [{"x": x, "w": w} for x, w in zip(xs, ws, strict=True)]
    with control.schedule(seed):
        for name, call in CALLS.items():
            found = on_all(lambda x, w, call=call: call(x, w, pair[0].name), all_inputs)
            for each, due in zip(found, due_of(name, xs, ws), strict=True):
                same(each, due)


@pytest.mark.parametrize("name", CALLS)
def test_the_trace(pair: list[hccl.Communicator], name: str) -> None:
    all_inputs = ranks_of(lambda rank: {"x": draw(rank, 4, 256), "w": draw(rank, 256, 8)})
    with tracing.trace() as trace:
        on_all(lambda x, w: CALLS[name](x, w, pair[0].name), all_inputs)
    found = [each for each in trace.ran() if each.name == name]
    assert sorted((each.device, each.rank, each.ranks, each.communicator) for each in found) == [
        (each.device, each.rank, 2, each.name) for each in pair
    ]
    assert {each.flops for each in found} == {2 * 4 * 256 * 8 * (2 if name == "AllGatherMatmul" else 1)}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("reduce", {"hcom": "nobody"}, "HCCL has no communicator nobody on the current device, 0"),
    ("reduce", {"hcom": ""}, "the name of the group must have 1 to 127 characters, but has 0"),
    ("reduce", {"reduce_op": "max"}, "reduce_op must be sum, but is max"),
    ("reduce", {"comm_turn": 1}, "comm_turn must be 0, but is 1"),
    ("reduce", {"comm_mode": "ccu"}, "comm_mode must be ai_cpu, on Ascend 950 ai_cpu or ccu, but is ccu"),
    ("reduce", {"x2": draw(0, 256, 8, dtype=BF16)}, "x2 and the output must have the dtype of x1, Half"),
    ("reduce", {"x1": draw(0, 256, 4).t()}, "x1 must be contiguous; only x2 may be transposed"),
    ("reduce", {"x2": lambda: draw(0, 256, 16).npu()[:, :8]}, "x2 must be contiguous, or the transpose of"),
    ("reduce", {"bias": draw(0, 9)}, r"bias must have shape \[8\], but has \[9\]"),
    ("reduce", {"bias": draw(0, 8, dtype=FLOAT)}, "bias must have the dtype of x1, Half"),
    ("gather", {"gather_index": 1}, "gather_index must be 0, but is 1"),
    ("gather", {"world_size": 4}, r"the output must have shape \[8, 8\], but has \[16, 8\]"),
    ("gather", {"input": draw(0, 4, 255), "x2": draw(0, 255, 8)}, "at least 256 and less than 65535, but is 255"),
    ("gather", {"input": draw(0, 256, 4).t()}, "x1 must not be transposed; only x2 may be"),
    ("gather", {"input": draw(0, 4, 256, dtype=FLOAT), "x2": draw(0, 256, 8, dtype=FLOAT)}, "x1 must be one of Half"),
    ("gather", {"comm_mode": "ccu"}, "comm_mode must be aiv, on Ascend 950 ai_cpu or ccu, but is ccu"),
    ("gather", {"comm_mode": "aiv", "gather_output": False}, "comm_mode aiv requires gather_output"),
    ("scatter", {"world_size": 4}, r"the output must have shape \[2, 8\], but has \[1, 8\]"),
    ("scatter", {"reduce_op": "max"}, "reduce_op must be sum, but is max"),
    ("scatter", {"comm_turn": 2}, "comm_turn must be 0, but is 2"),
]


def test_changed_calls_are_refused(pair: list[hccl.Communicator]) -> None:
    functions = {
        "reduce": ("x1", torch_npu.npu_mm_all_reduce_base),
        "gather": ("input", torch_npu.npu_all_gather_base_mm),
        "scatter": ("input", torch_npu.npu_mm_reduce_scatter_base),
    }

    def call(name: str, changes: dict[str, Any]) -> None:
        x, function = functions[name]
        arguments = {x: draw(0, 4, 256), "x2": draw(0, 256, 8), "hcom": pair[0].name}
        arguments |= {} if name == "reduce" else {"world_size": 2}
        on_all(function, [arguments | {key: value() if callable(value) else value for key, value in changes.items()}])

    check_refused((call, {"name": name, "changes": changes}, reason) for name, changes, reason in REFUSED)


def test_an_unknown_group_is_an_error_of_the_tiling(pair: list[hccl.Communicator]) -> None:
    with pytest.raises(RuntimeError, match="561002"):
        on_all(
            lambda x, w: torch_npu.npu_mm_all_reduce_base(x, w, "nobody"), [{"x": draw(0, 4, 8), "w": draw(0, 8, 8)}]
        )


DIFFERENT: dict[str, tuple[list[tuple[int, int]], Callable[[int, Tensor, Tensor, str], Any], str]] = {
    "counts": (
        [(4, 8), (6, 8)],
        lambda rank, *given: CALLS["MatmulAllReduce"](*given),
        "rank 0 calls MatmulAllReduce of 32 float16, sum, and rank 1 MatmulAllReduce of 48 float16, sum",
    ),
    "shapes": (
        [(4, 8), (8, 4)],
        lambda rank, *given: CALLS["MatmulAllReduce"](*given),
        "the number of columns of x2 must be the same on all ranks, but is 8 on rank 0 and 4 on rank 1",
    ),
    "operations": (
        [(4, 8), (4, 8)],
        lambda rank, x, w, name: CALLS["AllGatherMatmul" if rank else "MatmulAllReduce"](x, w, name),
        "rank 0 calls MatmulAllReduce of 32 float16, sum, and rank 1 AllGatherMatmul of 1024 float16",
    ),
    "bias": (
        [(4, 8), (4, 8)],
        lambda rank, x, w, name: torch_npu.npu_all_gather_base_mm(x, w, name, 2, bias=x[0, :8].contiguous() * rank),
        "bias must be zero in this version",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_difference_is_an_error_on_every_rank(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    shapes, call, reason = DIFFERENT[case]
    ranks = two_ranks()
    all_inputs = [{"x": draw(rank, m, 256), "w": draw(rank, 256, n)} for rank, (m, n) in enumerate(shapes)]
    errors = fails(lambda x, w: call(x.device.index, x, w, ranks[0].name), all_inputs, capfd)
    assert all(reason in each for each in errors), errors
    for each in ranks:
        each.destroy()


def test_an_injected_fault_reaches_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = two_ranks()
    all_inputs = ranks_of(lambda rank: {"x": draw(rank, 4, 256), "w": draw(rank, 256, 8)})
    with faults.execution("MatmulAllReduce"):
        errors = fails(lambda x, w: CALLS["MatmulAllReduce"](x, w, ranks[0].name), all_inputs, capfd)
    assert all("MatmulAllReduce: fault injected by emulated_cann.faults" in each for each in errors), errors
    for each in ranks:
        each.destroy()


SOCS = r"""
import re
import sys
import torch, torch_npu
sys.path.insert(0, sys.argv[1])
import hccl

x, w = torch.ones(4, 256, dtype=torch.float16), torch.ones(256, 8, dtype=torch.float16)
torch.npu.set_device(0)
ranks = hccl.of_devices([0, 1])
hccl.cann.aclrtSetDevice(0)
CALLS = {
    "reduce": lambda x, w, name: torch_npu.npu_mm_all_reduce_base(x, w, name),
    "reduce ccu": lambda x, w, name: torch_npu.npu_mm_all_reduce_base(x, w, name, comm_mode="ccu"),
    "gather": lambda x, w, name: torch_npu.npu_all_gather_base_mm(x, w, name, 2),
    "gather aiv": lambda x, w, name: torch_npu.npu_all_gather_base_mm(x, w, name, 2, comm_mode="aiv"),
    "scatter": lambda x, w, name: torch_npu.npu_mm_reduce_scatter_base(x, w, name, 2),
    "scatter ccu": lambda x, w, name: torch_npu.npu_mm_reduce_scatter_base(x, w, name, 2, comm_mode="ccu"),
}
for name, call in CALLS.items():
    try:
        for device in range(2):
            with torch.npu.device(device):
                call(x.npu(), w.npu(), ranks[0].name)
        torch.npu.synchronize(0), torch.npu.synchronize(1)
    except RuntimeError as error:
        reason = re.search(r"is not for \w+|comm_mode must be", str(error))
        if reason is None:
            raise
        print(f"{name}: {reason[0]}")
"""
NO_MODE = "comm_mode must be"
REFUSED_BY_SOC = {
    "Ascend910B3": {"reduce ccu": NO_MODE, "scatter ccu": NO_MODE},
    "Ascend910_9391": {"reduce": None, "reduce ccu": None, "scatter ccu": NO_MODE},
    "Ascend950PR_9599": {"gather aiv": NO_MODE},
    "Ascend310P3": dict.fromkeys(("reduce", "reduce ccu", "gather", "gather aiv", "scatter", "scatter ccu")),
}
"""The refused calls of a generation, with the reason: a mode, or None for the whole operation."""


@thorough(PROCESSES)
@pytest.mark.parametrize("soc", REFUSED_BY_SOC)
def test_what_a_generation_takes(clean: dict[str, str], soc: str) -> None:
    found = dict(line.split(": ") for line in on_soc(soc, SOCS, clean, str(SCRIPTS), devices=2).splitlines())
    assert found == {name: reason or f"is not for {soc}" for name, reason in REFUSED_BY_SOC[soc].items()}
