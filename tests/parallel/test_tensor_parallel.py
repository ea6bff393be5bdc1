"""Tests of models that ranks split: the same tokens and logits as one rank's, and no more memory than a share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import large_checkpoint, rank_programs
from helpers.checkpoints import random_checkpoint
from helpers.low_bits import DENSE
from helpers.ranks import in_ranks, started
from helpers.thorough import AGAIN, EXHAUSTIVE, LONG, MODE, thorough

import hal
from hal.quantize.quantize_checkpoint import quantize_checkpoint

COMPILERS = ["eager", "graph"]


@pytest.fixture(scope="module")
def checkpoints(
    repository: Path, trained: Path, trained_experts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return a dense checkpoint and one with experts, as trained and in W8A8."""
    folder = tmp_path_factory.mktemp("quantized")
    found = {"tiny-python": trained, "tiny-python-moe": trained_experts}
    text = (repository / "README.md").read_text(encoding="utf-8")
    for name, path in list(found.items()):
        for scheme, format_ in (("w8a8", "modelslim"), ("w8a8_dynamic", "compressed-tensors")):
            found[f"{name}-{scheme}"] = folder / f"{name}-{scheme}"
            given = {"calibration": text} if scheme == "w8a8" else {}
            quantize_checkpoint(path, found[f"{name}-{scheme}"], scheme, format=format_, **given)
    return found


@thorough(EXHAUSTIVE, r"\[tiny-python-float32-4")
@thorough(EXHAUSTIVE, r"\[tiny-python-(moe-)?w8a8_dynamic")
@thorough(MODE, r"\[(?!tiny-python-float32-2)")
@thorough(EXHAUSTIVE, r"\[tiny-python-(bfloat16-4|(moe|(moe-)?w8a8|w8a8_dynamic)-float32-2|moe-w8a8-float32-4)")
@pytest.mark.parametrize(
    ("name", "dtype", "ranks", "compilers"),
    [
        ("tiny-python", "float32", 2, ["graph"]),
        ("tiny-python", "float32", 4, [*COMPILERS, "piecewise", "inductor"]),
        ("tiny-python", "bfloat16", 2, ["piecewise"]),
        ("tiny-python", "bfloat16", 4, [*COMPILERS, "piecewise"]),
        ("tiny-python-moe", "float32", 2, COMPILERS),
        ("tiny-python-moe", "float32", 4, ["eager", "piecewise"]),
        ("tiny-python-w8a8", "float32", 2, COMPILERS),
        ("tiny-python-w8a8", "float32", 4, ["graph"]),
        ("tiny-python-w8a8_dynamic", "float32", 2, COMPILERS),
        ("tiny-python-moe-w8a8", "float32", 2, COMPILERS),
        ("tiny-python-moe-w8a8", "float32", 4, COMPILERS),
        ("tiny-python-moe-w8a8_dynamic", "float32", 4, COMPILERS),
    ],
)
def test_the_same_tokens(checkpoints: dict[str, Path], name: str, dtype: str, ranks: int, compilers: list[str]) -> None:
    arguments: dict[str, Any] = {"checkpoint": str(checkpoints[name]), "dtype": dtype}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={})["eager"]
    found = in_ranks("tokens", ranks, **arguments, compilers=compilers, parallel={"tensor": ranks})
    for compiler in compilers:
        assert [rank[compiler] for rank in found] == [alone] * ranks, compiler


@thorough(AGAIN, r"\[tiny-python-2")
@pytest.mark.parametrize(("name", "ranks"), [("tiny-python", 2), ("tiny-python-moe", 4)])
def test_logits_and_memory(checkpoints: dict[str, Path], name: str, ranks: int) -> None:
    arguments: dict[str, Any] = {"checkpoint": str(checkpoints[name]), "dtype": "float32"}
    alone = rank_programs.logits(**arguments, parallel={})
    found = in_ranks("logits", ranks, **arguments, parallel={"tensor": ranks})
    for rank in found:
        torch.testing.assert_close(rank["logits"], alone["logits"], rtol=1e-4, atol=1e-4)
        # The norms, the router and key heads that ranks repeat are whole on each rank.
        assert rank["held"] <= 1.1 * alone["held"] / ranks
        assert rank["read"] <= 1.1 * alone["read"] / ranks
    assert all(torch.equal(rank["logits"], found[0]["logits"]) for rank in found)


@thorough(MODE)
def test_quantized_tables_and_output_projections(tmp_path: Path) -> None:
    """Their rows, of which the last rank has fewer, are cut, also where lookups read them, as of a tied GGUF file."""
    pytest.importorskip("gguf", reason="gguf writes the file")
    from helpers.gguf_writing import write_gguf

    folder = random_checkpoint(tmp_path / "plain", **{**DENSE, "attention_bias": False}, vocab_size=301)
    file = write_gguf(folder, tmp_path / "model.gguf", kind="Q4_1")
    made = quantize_checkpoint(folder, tmp_path / "int8", "w8a16", head=True).path
    for checkpoint in (file, made):
        arguments: dict[str, Any] = {"checkpoint": str(checkpoint), "dtype": "float32", "weights": "kept"}
        alone = rank_programs.logits(**arguments, parallel={})["logits"]
        for rank in in_ranks("logits", 2, **arguments, parallel={"tensor": 2}):
            torch.testing.assert_close(rank["logits"], alone, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """Return a checkpoint whose largest weight is small to it, one with a layer only, and the bytes of the first."""
    folder = tmp_path_factory.mktemp("large")
    size = large_checkpoint.write(folder / "large", torch.bfloat16, num_hidden_layers=26, vocab_size=4000)
    large_checkpoint.write(folder / "small", torch.bfloat16, num_hidden_layers=1, vocab_size=4000)
    return folder / "large", folder / "small", size


@thorough(LONG)
@thorough(EXHAUSTIVE, r"\[(4-|2-plain)")  # A plain weight is read as one that is packed then.
@pytest.mark.parametrize("form", ["packed", "plain"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_peak_memory_of_loading(large: tuple[Path, Path, int], tmp_path: Path, ranks: int, form: str) -> None:
    checkpoint, small, size = large
    on = {"backend": "cpu", "options": {"pack_weights": form == "packed"}}
    arguments = {"checkpoint": str(checkpoint), "warm": str(small), "dtype": "bfloat16"}
    for found in started("peak", ranks, tmp_path, **arguments, tensor=ranks, on=on):
        assert found["read"] <= found["held"] <= 1.05 * size / ranks
        assert found["peak"] <= 1.1 * size / ranks, found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "ranks", "counts"),
    [(12, 2, 40, 3, "1, 2, 4"), (12, 2, 40, 6, "1, 2, 4"), (8, 8, 45, 8, "1")],
)
def test_the_remedy_names_the_numbers_of_ranks_that_suit_all_weights(
    heads: int, kv_heads: int, inner: int, ranks: int, counts: str, tmp_path: Path
) -> None:
    """4 ranks repeat 2 key heads; 6 and 12 do not divide the width of the MLP."""
    from hal.checkpoint.loading import check_shared
    from hal.config.settings import ParallelConfig

    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner, "head_dim": 8}
    folder = random_checkpoint(tmp_path / "model", **{**DENSE, **sizes})
    with pytest.raises(
        hal.HalError, match=rf"{ranks} ranks cannot share .*\n.* suit all weights of the model: {counts}$"
    ):
        check_shared(hal.Checkpoint.open(folder), ParallelConfig(ranks))


def test_a_number_of_ranks_that_does_not_divide(checkpoints: dict[str, Path]) -> None:
    from hal.checkpoint.loading import build_model, split_model
    from hal.parallel import Group

    model = build_model(hal.Checkpoint.open(checkpoints["tiny-python"]))
    with pytest.raises(hal.HalError, match="qkv_proj: 3 ranks cannot share 4 heads of 128 elements equally"):
        split_model(model, Group("three", 0, 3, object()))
