"""Tests of fused collectives and of whole experts on emulated NPUs: values, launches, and the tokens of one NPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.backends.npu.kernels.dispatch import serves
from hal.backends.npu.soc import GENERATIONS
from helpers import rank_programs
from helpers.checkpoints import EXPERTS, random_checkpoint
from helpers.ranks import check_fused, on_npus, started
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

import hal
from hal.cli import explanation
from hal.device.group import forget_group, register_group
from hal.parallel import Group, Mesh

FUSED = ("all_gather_linear", "linear_all_reduce", "linear_reduce_scatter")


@pytest.mark.parametrize(
    ("options", "applied", "skipped"),
    [
        ({"mc2_rows": 4}, 4, {}),
        ({}, 0, {"at most 4 rows: npu_mm_all_reduce_base is for prefill, from 1000 rows on (option mc2_rows)": 4}),
        (
            {"mc2_rows": 0, "nz_weights": True},
            0,
            {"the weight is in FRACTAL_NZ (option nz_weights), and npu_mm_all_reduce_base takes ND": 4},
        ),
    ],
)
def test_where_a_projection_is_fused_with_its_sum(
    trained: Path,
    pair: Group,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    applied: int,
    skipped: dict[str, int],
) -> None:
    """`hal explain` says so for a step of four sequences."""
    settings = {"backend": "npu", "dtype": "float16", "options": options}
    with caplog.at_level("WARNING"), hal.open(settings, mesh=Mesh(tensor=pair)) as backend:
        model = hal.load_model(str(trained), backend)
        step, _ = explanation._lowered(model, backend, 4)
        report = step.report["linear_all_reduce"]
        assert (len(report.matches), dict(report.reasons)) == (applied, skipped)
        rows = {name: why for name, _, _, _, why in explanation._rewrites(step, backend)}
        if applied:
            assert rows["linear_all_reduce"] == "runs npu_mm_all_reduce_base from 4 rows on"
        assert not caplog.messages
    hal.open("cpu")


def test_conditions_of_fused_collectives(npu: Callable[..., hal.Backend], pair: Group) -> None:
    conditions = npu(options={"mc2_rows": 4}).conditions
    assert set(conditions) == {*FUSED, "select_and_attend"}
    x, weight, bias = torch.ones(8, 256).half(), torch.ones(16, 256).half(), torch.ones(16).half()
    three = Group("three", 0, 3, object())
    register_group(three)
    try:
        for name in FUSED:
            assert conditions[name](x, weight, None, pair.name) is None
            assert "takes 2, 4 or 8 ranks, not 3" in str(conditions[name](x, weight, None, three.name))
            wide = conditions[name](x.float(), weight, None, pair.name)
            assert "takes float16 and bfloat16, not float32" in str(wide)
    finally:
        forget_group(three)
    assert conditions["linear_all_reduce"](x.view(2, 4, 256), weight, bias, pair.name) is None
    for name in ("all_gather_linear", "linear_reduce_scatter"):
        assert "takes no bias" in str(conditions[name](x, weight, bias, pair.name))
        narrow = conditions[name](x[:, :255], weight[:, :255], None, pair.name)
        assert narrow is not None
        assert narrow.endswith("takes 256 to 65534 in_features, not 255")
    assert "2 rows: " in str(conditions["linear_all_reduce"](x[:2], weight, None, pair.name))
    assert conditions["all_gather_linear"](x[:2], weight, None, pair.name) is None, "both ranks have two rows"
    assert "0 rows" in str(npu(options={"mc2_rows": 0}).conditions["linear_all_reduce"](x[:0], weight, None, pair.name))


@pytest.mark.parametrize(
    ("prefix", "fused"), [("Ascend910B", FUSED), ("Ascend910_93", FUSED[::2]), ("Ascend310P", ()), ("Ascend950", ())]
)
def test_generations_that_fuse(prefix: str, fused: tuple[str, ...]) -> None:
    from hal.backends.npu.kernels.collectives import FusedCollectives

    (generation,) = (each for each in GENERATIONS if each.prefix == prefix)
    assert set(FusedCollectives(torch.device("npu", 0), generation, 1000, False).kernels) == set(fused)


MC2 = {"backend": "npu", "options": {"emulator": "on", "mc2_rows": 2}}


def test_fused_collectives_of_ranks() -> None:
    """One call has a bias, which only the all-reduce takes."""
    found = on_npus("fused_collectives", 2, tensor=2, dtype="float16", seed=3, on=MC2)
    check_fused(found)
    for name, launches in (
        ("linear_all_reduce", {"MatmulAllReduce": 2}),
        ("all_gather_linear", {"AllGatherMatmulV2": 1, "HcclAllGather": 1}),
        ("linear_reduce_scatter", {"MatmulReduceScatterV2": 1, "HcclReduceScatter": 1}),
    ):
        counted = found[0][name]["launches"]
        assert {launch: counted.get(launch) for launch in launches} == launches


@thorough(PROCESSES)
def test_the_same_tokens_with_fused_collectives(trained: Path) -> None:
    """Decode steps of two and four sequences are fused, those of one are not."""
    arguments: dict[str, Any] = {"checkpoint": str(trained), "dtype": "float16"}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={}, on={"backend": "npu"})["eager"]
    compilers = ["graph", "npugraph_ex", "piecewise"]
    found = on_npus("tokens", 2, **arguments, compilers=compilers, parallel={"tensor": 2}, on=MC2, count=True)
    for compiler in compilers:
        assert [rank[compiler] for rank in found] == [alone] * 2, compiler
        for rank in found:
            launches = rank[f"launches of {compiler}"]["MatmulAllReduce"]
            assert 4 * 16 <= launches < 4 * 31, "of two projections in two layers, in some of the 31 decode steps"


@thorough(PROCESSES)
@thorough(EXHAUSTIVE, r"\[512")
@pytest.mark.parametrize(("width", "native"), [(1024, True), (512, False)])
def test_dispatch_and_combine_of_an_a3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int, native: bool
) -> None:
    """Rows of a documented width take one launch in each direction."""
    monkeypatch.setenv("EMULATED_CANN_OPTIONS", '{"soc": "Ascend910_9391", "devices": 2}')
    found = started("exchange", 2, tmp_path, on={"backend": "npu"}, width=width, tokens=5, seed=3)
    for rank in found:
        assert rank["wrong"] == []
        launched = [name for name in rank["launches"] if "MoeDistribute" in name]
        assert len(launched) == (2 if native else 0), rank["launches"]


@thorough(EXHAUSTIVE)
def test_whole_experts_on_each_rank_of_an_a3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model of a documented width dispatches and combines in one launch each, in every mode."""
    monkeypatch.setenv("EMULATED_CANN_OPTIONS", '{"soc": "Ascend910_9391", "devices": 2}')
    checkpoint = random_checkpoint(tmp_path / "checkpoint", **EXPERTS, hidden_size=1024, head_dim=64, dtype="float16")
    compilers = ["eager", "graph", "piecewise"]
    found = started(
        "tokens",
        2,
        tmp_path,
        checkpoint=str(checkpoint),
        dtype="float16",
        compilers=compilers,
        count=True,
        parallel={"tensor": 2, "experts": "dispatch"},
        on={"backend": "npu"},
    )
    for rank in found:
        for compiler in compilers:
            assert rank[compiler] == found[0][compiler], compiler
            launches = rank[f"launches of {compiler}"]
            assert launches["MoeDistributeDispatchV4"] == launches["MoeDistributeCombineV4"] > 2 * 16, launches


def test_calls_that_dispatch_and_combine_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call beyond the documented limits, or the communicator's buffer, runs the exchange by all_to_all."""
    given = {"tokens": 8, "width": 2048, "top_k": 8, "num_experts": 64, "ranks": 8, "dtype": torch.bfloat16}
    assert serves(**given)
    for name, value in (
        ("tokens", 0),
        ("tokens", 513),
        ("width", 1023),
        ("width", 7169),
        ("top_k", 17),
        ("num_experts", 1024),
        ("ranks", 1),
        ("ranks", 385),
        ("dtype", torch.float32),
        ("tokens", 512),
    ):
        assert not serves(**{**given, name: value}), (name, value)
    monkeypatch.setenv("HCCL_BUFFSIZE", "500")
    assert serves(**{**given, "tokens": 512})
