"""Tests of whole experts on each rank: the exchange of rows, layers, models, and the collectives that they take.

Functions that start with an underscore run on the ranks, which are processes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rank_programs
from helpers.checkpoints import EXPERTS, random_checkpoint
from helpers.quantized import change_tensors, kept_layers
from helpers.rank_processes import run, succeeded
from helpers.stepping import states_of
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor, nn

import hal
from hal import ops
from hal.checkpoint.loading import build_model, distribute_experts
from hal.compile.trace import StepSizes, trace_step
from hal.nn import Experts
from hal.ops import Draw
from hal.ops.experts.routing import routing
from hal.ops.tolerance import assert_agree
from hal.parallel import Group, Mesh
from hal.quantize.quantize_checkpoint import quantize_checkpoint

MODES = ("all_gather", "all_to_all", "dispatch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _open(tensor: int, data: int, mode: str, **options: Any) -> hal.Backend:
    torch.set_num_threads(1)
    parallel = {"tensor": tensor, "data": data, "experts": mode}
    return hal.open({"backend": "cpu", "parallel": parallel, "options": options})


def _routings(draw: Draw, ranks: int) -> list[tuple[str, int, list[Tensor]]]:
    """Return loads of the experts, by name: the number of experts, and each rank's choices."""
    local = 8 // ranks
    return [
        ("random", 8, [routing(draw, 7, 8, 3) for _ in range(ranks)]),
        ("more choices than a rank has experts", 8, [routing(draw, 5, 8, 6) for _ in range(ranks)]),
        ("all tokens to one expert", 8, [torch.full((6, 1), 5, dtype=torch.int32) for _ in range(ranks)]),
        ("every rank to itself", 8, [routing(draw, 4, local, min(2, local)) + rank * local for rank in range(ranks)]),
        ("all to the last rank", 8, [routing(draw, 4, local, local) + 8 - local for _ in range(ranks)]),
        ("experts without rows", 16, [2 * routing(draw, 9, 8, 2) for _ in range(ranks)]),
        ("one token", 8, [routing(draw, 1, 8, 2) for _ in range(ranks)]),
        ("no tokens", 8, [torch.zeros(0, 2, dtype=torch.int32)] * ranks),
    ]


def _exchange(rank: int, ranks: int, seed: int, native: bool) -> int:
    """Dispatch, compute and combine, with NaN in unspecified rows."""
    dispatch, combine, cases = ops.operation("expert_dispatch"), ops.operation("expert_combine"), 0
    with _open(ranks, 1, "dispatch", native=native) as backend:
        group = backend.mesh.expert.name
        assert backend.mesh.expert is backend.mesh.tensor
        for dtype in DTYPES:
            draw = Draw(dtype, seed=seed)
            for name, num_experts, choices in _routings(draw, ranks):
                shards = [(draw.normal(each.shape[0], 6), each, num_experts, group) for each in choices]
                weights = draw.normal(*choices[rank].shape)
                rows, counts, sent, received = ops.expert_dispatch(*shards[rank])
                expected = dispatch.over_shards(shards)[rank]
                used = int(counts.sum())
                assert rows.shape == expected[0].shape, name
                assert torch.equal(counts, expected[1]), name
                assert torch.equal(rows[:used], expected[0][:used]), name
                rows[used:] = float("nan")
                owners = torch.repeat_interleave(torch.arange(counts.shape[0]), counts) + rank * counts.shape[0]
                rows[:used] *= (owners.unsqueeze(-1) / 8).to(dtype)
                result = ops.expert_combine(rows, choices[rank], weights, sent, received, num_experts, group)
                scaled = shards[rank][0].unsqueeze(1) * (choices[rank].unsqueeze(-1) / 8).to(dtype)
                summed = (scaled.float() * weights.unsqueeze(-1).float()).sum(1).to(dtype)
                assert_agree(combine, dtype, result, summed)
                cases += 1
    return cases


@thorough(MODE)
@pytest.mark.parametrize(
    ("ranks", "seed", "native"),
    [(2, 0, True), (2, 1, False), (4, 2, True)],
)
def test_uneven_loads(ranks: int, seed: int, native: bool) -> None:
    assert succeeded(run(_exchange, ranks, ranks, seed, native)) == [24] * ranks


def _filled(layer: Experts, draw: Draw) -> Experts:
    for projection in (layer.gate_up_proj, layer.down_proj):
        projection.weight = nn.Parameter(draw.normal(*projection.weight.shape, scale=0.2), requires_grad=False)
    return layer


def _cut(layer: Experts, whole: Experts, mesh: Mesh) -> None:
    """Give a layer this rank's experts of another."""
    local = whole.num_experts // mesh.expert.size
    own = slice(mesh.expert.rank * local, (mesh.expert.rank + 1) * local)
    for name in ("gate_up_proj", "down_proj"):
        getattr(layer, name).weight = nn.Parameter(getattr(whole, name).weight[own], requires_grad=False)


def _layers(rank: int, tensor: int, data: int, seed: int) -> list[str]:
    """Compare layers in every mode with one that has all experts."""
    found = []
    for mode in MODES:
        with _open(tensor, data, mode) as backend, torch.inference_mode():
            mesh = backend.mesh
            assert mesh.size == mesh.expert.size == tensor * data
            assert mesh.expert.rank == mesh.data.rank * tensor + mesh.tensor.rank
            for dtype in DTYPES[:2]:
                draw = Draw(dtype, seed=seed)
                whole, layer = _filled(Experts(8, 32, 48), draw), Experts(8, 32, 48)
                layer.distribute(mode, mesh)
                layer.split(mesh.tensor)
                _cut(layer, whole, mesh)
                for tokens, top_k in ((5, 2), (1, 3), (8, 8), (0, 2), (6, 1)):
                    hiddens = [draw.normal(tokens, 32) for _ in range(data)]
                    weights = [draw.normal(tokens, top_k).abs() for _ in range(data)]
                    if top_k == 2:  # from a router in float32
                        weights = [each.float() * (1 + 2**-10) for each in weights]
                    experts = [routing(draw, tokens, 8, top_k) for _ in range(data)]
                    given = hiddens[mesh.data.rank], weights[mesh.data.rank], experts[mesh.data.rank]
                    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
                    torch.testing.assert_close(layer(*given), whole(*given), **tolerance)
                    found.append(f"{mode} {tokens}")
    return found


@thorough(MODE, r"\[(?!2-2)")
@pytest.mark.parametrize(("tensor", "data"), [(2, 2), (2, 1), (1, 2)])
def test_layers_are_those_of_one_device(tensor: int, data: int) -> None:
    results = succeeded(run(_layers, tensor * data, tensor, data, 11))
    assert len(results[0]) == 2 * 5 * len(MODES)


COLLECTIVES = {
    ("all_gather", 4, 1): {"all_reduce": 1},
    ("all_gather", 1, 4): {"all_gather_rows": 1, "reduce_scatter": 1},
    ("all_gather", 2, 2): {"all_gather_rows": 1, "reduce_scatter": 1, "all_reduce": 1},
    ("all_to_all", 1, 4): {"all_to_all": 2},
    ("all_to_all", 4, 1): {"all_to_all": 2, "all_gather_rows": 1},
    ("dispatch", 1, 4): {"expert_dispatch": 1, "expert_combine": 1},
    ("dispatch", 2, 2): {"expert_dispatch": 1, "expert_combine": 1, "all_gather_rows": 1},
}
"""The collectives of a layer's experts, by mode, tensor and data."""


@thorough(MODE, r"\[.*-all_to_all-(4-1|1-4)|\[sequences=[18]")
@thorough(EXHAUSTIVE, r"\[sequences=(8|1-\w+-(4-1|1-4))")
@pytest.mark.parametrize(("mode", "tensor", "data"), list(COLLECTIVES), ids=str)
@pytest.mark.parametrize("sequences", [None, 1, 8], ids="sequences={}".format)
def test_a_layers_collectives(trained_experts: Path, sequences: int | None, mode: str, tensor: int, data: int) -> None:
    """A trace needs no other rank, so the groups have none. The exchange specializes no size."""
    from hal.device.group import forget_group, register_group

    sizes = {"tensor": tensor, "data": data, "expert": tensor * data}
    groups = {
        name: Group(name, size - 1, size, object()) if size > 1 else hal.parallel.SOLO for name, size in sizes.items()
    }
    with hal.open({"backend": "cpu", "dtype": "float32"}) as backend:
        model = hal.load_model(trained_experts, backend)
    layers = [each for each in model.modules() if isinstance(each, Experts)]
    distribute_experts(model, mode, Mesh(**groups))
    for each in layers:
        _cut(each, each, Mesh(**groups))
    made = [each for each in groups.values() if each.size > 1]
    try:
        for each in made:
            register_group(each)
        states = states_of(model)
        step = trace_step(model, states, StepSizes(sequences), whole=ops.catalogue(), decompose=False)
        assert not step.conditions
        assert not step.specialized_axes
    finally:
        for each in made:
            forget_group(each)
    found = Counter[str]()
    for node in step.graph.graph.nodes:
        operation = ops.operation_of_node(node.target)
        if operation is not None and operation.collective:
            found[operation.name] += 1
    assert found == {name: count * len(layers) for name, count in COLLECTIVES[mode, tensor, data].items()}


COMPILERS = ["eager", "graph", "piecewise"]


@pytest.fixture(scope="module")
def checkpoints(trained_experts: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint with experts, as trained and in W8A8."""
    found = {"trained": trained_experts}
    text = (repository / "README.md").read_text(encoding="utf-8")
    for scheme, format_ in (("w8a8", "modelslim"), ("w8a8_dynamic", "compressed-tensors")):
        found[scheme] = tmp_path_factory.mktemp("quantized") / scheme
        given = {"calibration": text} if scheme == "w8a8" else {}
        quantize_checkpoint(trained_experts, found[scheme], scheme, format=format_, **given)
    return found


def _tokens(rank: int, parallel: list[dict[str, Any]], arguments: dict[str, Any], compilers: list[str]) -> list[Any]:
    torch.set_num_threads(1)
    pairs = zip(parallel, compilers, strict=True)
    return [rank_programs.tokens(**arguments, parallel=each, compilers=[name])[name] for each, name in pairs]


@thorough(EXHAUSTIVE, r"\[(trained-bfloat16-2-1|w8a8-float32-2-2)")
@thorough(EXHAUSTIVE, r"\[.*-4-1-modes[14]")
@thorough(MODE)
@pytest.mark.parametrize(
    ("name", "dtype", "tensor", "data", "modes", "compilers"),
    [
        ("trained", "float32", 2, 1, MODES, COMPILERS),
        ("trained", "float32", 4, 1, MODES, ["graph"] * 3),
        ("trained", "bfloat16", 2, 1, MODES, ["graph"] * 3),
        ("w8a8", "float32", 2, 2, ["all_to_all"], ["graph"]),
        ("w8a8_dynamic", "float32", 4, 1, ["all_gather"], ["piecewise"]),
    ],
)
def test_the_same_tokens(
    checkpoints: dict[str, Path], name: str, dtype: str, tensor: int, data: int, modes: list[str], compilers: list[str]
) -> None:
    """Each mode with one of the compilers; test_data_parallel.py has data ranks that share experts."""
    arguments: dict[str, Any] = {"checkpoint": str(checkpoints[name]), "dtype": dtype}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={})["eager"]
    parallel = [{"tensor": tensor, "data": data, "experts": mode} for mode in modes]
    results = succeeded(run(_tokens, tensor * data, parallel, arguments, compilers, timeout=900.0))
    for rank, found in enumerate(results):
        for mode, texts in zip(modes, found, strict=True):
            assert texts == alone, f"rank {rank}, {mode}"


def _memory(rank: int, checkpoint: str, parallel: dict[str, Any]) -> dict[str, Any]:
    found = rank_programs.logits(checkpoint, "float32", parallel)
    return {**found, "logits": found["logits"].tolist()}  # A tensor's memory would end with the rank.


@thorough(MODE, r"\[w8a8")
@pytest.mark.parametrize("name", ["trained", "w8a8"])
def test_a_rank_reads_and_holds_its_experts_only(checkpoints: dict[str, Path], name: str) -> None:
    path = checkpoints[name]
    alone = _memory(0, str(path), {})
    tensors = hal.Checkpoint.open(path).tensors
    # Each rank reads the scale and offset of the input of all experts.
    own = {key: each for key, each in tensors.items() if ".experts." in key and ".input_" not in key}
    of_experts = sum(each.nbytes for each in own.values())
    assert of_experts > 0.2 * alone["read"]
    results = succeeded(run(_memory, 2, str(path), {"data": 2, "experts": "all_gather"}))
    for rank in results:
        torch.testing.assert_close(torch.tensor(rank["logits"]), torch.tensor(alone["logits"]), rtol=1e-4, atol=1e-4)
        assert rank["read"] == alone["read"] - of_experts // 2
        # The scale of an input is for all experts.
        assert 0 < rank["experts"] <= 0.51 * alone["experts"]
        assert rank["held"] - rank["experts"] == alone["held"] - alone["experts"]


def _spread(tensors: dict[str, Tensor]) -> None:
    """Give each expert another scale of its input, the last the largest."""
    for name in tensors:
        if ".experts." in name and name.endswith("input_scale"):
            tensors[name] = tensors[name] * (1 + int(name.split(".experts.")[1].partition(".")[0]) / 8)


def _input_scales(rank: int, checkpoint: str, parallel: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    with hal.open({"backend": "cpu", "dtype": "float32", "parallel": parallel}) as backend:
        layers = kept_layers(hal.load_model(checkpoint, backend)).values()
        scales = [float(each.input_scale.amax()) for each in layers if each.num_experts is not None]
    return scales, _memory(rank, checkpoint, parallel)


@thorough(MODE)
@pytest.mark.parametrize("format_", ["compressed-tensors", "modelslim"])
def test_a_scale_for_each_expert(tmp_path: Path, format_: str) -> None:
    """All experts take the largest scale, also on ranks that do not hold its expert."""
    plain, path = random_checkpoint(tmp_path / "plain", **EXPERTS), tmp_path / "static"
    quantize_checkpoint(plain, path, "w8a8", format=format_, calibration="the cat sat on the mat\n" * 20)
    change_tensors(path, _spread)
    alone = _input_scales(0, str(path), {})
    ranks = succeeded(run(_input_scales, 2, str(path), {"tensor": 2, "experts": "all_gather"}))
    assert [scales for scales, _ in ranks] == [alone[0]] * 2
    for _, found in ranks:
        torch.testing.assert_close(
            torch.tensor(found["logits"]), torch.tensor(alone[1]["logits"]), rtol=1e-4, atol=1e-4
        )


def test_what_cannot_be_shared(trained: Path, trained_experts: Path) -> None:
    three = Mesh(expert=Group("three", 0, 3, object()))
    experts, dense = (build_model(hal.Checkpoint.open(path)) for path in (trained_experts, trained))
    with pytest.raises(hal.HalError, match=r"experts: 3 ranks cannot hold \d+ experts in equal numbers\n.*divides"):
        distribute_experts(experts, "dispatch", three)
    with pytest.raises(hal.HalError, match="'dispatch', and Qwen3ForCausalLM has no layers of experts"):
        distribute_experts(dense, "dispatch", three)
    with hal.open("cpu", mesh=Mesh(data=Group("pair", 0, 2, object()))) as backend:
        parallel = hal.ParallelConfig(data=2, experts="all_to_all")
        with pytest.raises(hal.errors.ConfigError, match="the mesh has no group of all ranks"):
            backend.configure(hal.Config(backend="cpu", parallel=parallel))
