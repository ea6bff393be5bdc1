"""Tests for declarations of weights: the parts that each rank reads, their positions, and errors."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import EXPERTS, random_checkpoint, write_json
from safetensors.torch import save_file
from torch import Tensor, nn

import hal
from hal.checkpoint import safetensors_files
from hal.checkpoint.safetensors_files import TensorSlice
from hal.checkpoint.weight_bindings import Binding, Piece, bindings_of
from hal.errors import CheckpointError, ConfigError, HalError, ModelError
from hal.nn import (
    Assembly,
    CausalLM,
    Concatenated,
    Consumer,
    Embedding,
    GroupedLinear,
    Linear,
    Merged,
    MergedLinear,
    Slice,
    Stacked,
    Transposed,
    Weight,
    Whole,
)
from hal.nn.weights.assembly import MergedTransposed
from hal.nn.weights.weight import source_name
from hal.quantize.quantize_checkpoint import quantize_checkpoint


def layer_of(weight: Weight, shape: Sequence[int]) -> nn.Module:
    made: Any = nn.Module()
    made.weight = nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)
    made.weights = {"weight": weight}
    model = nn.Module()
    model.add_module("layer", made)
    return model


def binding_of(weight: Weight, shape: Sequence[int]) -> Binding:
    (binding,) = bindings_of(layer_of(weight, shape))
    return binding


def assembled(binding: Binding, stored: dict[str, Tensor], rank: int = 0, ranks: int = 1) -> Tensor:
    """Return a rank's tensor, assembled from pieces of one row each; NaN where nothing was written."""
    pieces = binding.pieces(rank, ranks)
    held = torch.full([max(piece.target[dim][1] for piece in pieces) for dim in range(binding.tensor.dim())], torch.nan)
    for piece in pieces:
        values = stored[piece.source]
        assert tuple(values.shape) == piece.source_shape
        taken = values[tuple(slice(*each) for each in piece.taken)]
        assert piece.numel == taken.numel()
        for row in range(taken.shape[0]):
            piece.put(held, row, taken[row : row + 1])
    return held


def drawn(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).float() + 1000 * len(shape)


A, B, C = drawn(4, 6), drawn(2, 6) + 100, drawn(8, 6) + 200
WIDE = drawn(6, 14)
PARTS = {"layer.a": A, "layer.b": B, "layer.c": C, "layer.wide": WIDE, "layer.stack": drawn(2, 6, 4)}


TWO, BY_EXPERT = "rows columns", "experts rows columns"


def declared(sources: str, shard: str | None, assemble: Assembly, axes: str = TWO) -> Weight:
    return Weight(tuple(sources.split()), axes, shard, assemble)


STACK, BOTH, ALL = PARTS["layer.stack"].transpose(1, 2), Concatenated("rows", (4, 2)), torch.cat([A, B, C])
CASES: dict[str, tuple[Weight, Tensor]] = {
    "whole": (declared("a", "rows", Whole()), A),
    "whole, by columns": (declared("a", "columns", Whole()), A),
    "transposed": (declared("a", "rows", Transposed()), A.t()),
    "transposed, by columns": (declared("a", "columns", Transposed()), A.t()),
    "a stacked one, transposed": (declared("stack", "rows", Transposed(), BY_EXPERT), STACK),
    "transposed and merged already": (declared("stack", "rows", MergedTransposed("rows", (2, 2)), BY_EXPERT), STACK),
    "a slice": (declared("wide", "columns", Slice("columns", 4, 14)), WIDE[:, 4:12]),
    "a transposed slice": (declared("wide", "rows", Slice("rows", 4, 14, Transposed())), WIDE.t()[4:12]),
    "concatenated": (declared("a b c", "rows", Concatenated("rows", (4, 2, 8))), ALL),
    "concatenated, by columns": (declared("a b c", "columns", Concatenated("rows", (4, 2, 8))), ALL),
    "concatenated columns": (
        declared("a b", None, Concatenated("columns", (4, 2), Transposed())),
        torch.cat([A.t(), B.t()], 1),
    ),
    "merged already": (declared("c", "rows", Merged("rows", (2, 6))), C),
    "merged already, by columns": (declared("c", "columns", Merged("rows", (2, 6))), C),
    "stacked": (declared("a a", "experts", Stacked(), BY_EXPERT), torch.stack([A, A])),
    "stacked, each concatenated": (
        declared("a b a b", "rows", Stacked(BOTH), BY_EXPERT),
        torch.stack([torch.cat([A, B])] * 2),
    ),
    "stacked, each transposed": (
        declared("a a", "columns", Stacked(Transposed()), BY_EXPERT),
        torch.stack([A.t()] * 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_assembled(name: str) -> None:
    weight, expected = CASES[name]
    assert torch.equal(assembled(binding_of(weight, expected.shape), PARTS), expected)


@pytest.mark.parametrize("name", [name for name, (weight, _) in CASES.items() if weight.shard])
def test_ranks_hold_their_shares(name: str) -> None:
    """Each rank reads its share of each concatenated part; together the shares form the whole."""
    weight, expected = CASES[name]
    shard = weight.shard
    assert shard is not None
    dim = weight.axes.split().index(shard)
    binding = binding_of(weight, expected.shape)
    shares = [assembled(binding, PARTS, rank, 2) for rank in range(2)]
    cuts = weight.assemble.cuts(shard, expected.shape[dim])
    assert sum(cuts) == expected.shape[dim]
    by_part = zip(*(share.split([cut // 2 for cut in cuts], dim) for share in shares), strict=True)
    assert torch.equal(torch.cat([share for part in by_part for share in part], dim), expected)
    assert sum(piece.numel for piece in binding.pieces(1, 2)) == expected.numel() // 2, "nothing else must be read"


def test_merged_parts_are_cut_one_by_one() -> None:
    model = nn.Module()
    with torch.device("meta"):
        model.add_module("qkv", MergedLinear(6, {"q": 4, "k": 2, "v": 8}, bias=True))
    weight, bias = bindings_of(model)
    pieces = weight.pieces(1, 2)
    assert [(each.source, each.taken[0], each.target[0]) for each in pieces] == [
        ("q.weight", (2, 4), (0, 2)),
        ("k.weight", (1, 2), (2, 3)),
        ("v.weight", (4, 8), (3, 7)),
    ]
    assert [(each.source, each.taken, each.target) for each in bias.pieces(0, 2)] == [
        ("q.bias", ((0, 2),), ((0, 2),)),
        ("k.bias", ((0, 1),), ((2, 3),)),
        ("v.bias", ((0, 4),), ((3, 7),)),
    ]
    with pytest.raises(ConfigError, match=r"qkv.weight, out_features: 4 ranks cannot share 2 elements equally"):
        weight.pieces(0, 4)


def test_what_is_not_cut_is_every_ranks() -> None:
    with torch.device("meta"):
        weight, bias = bindings_of(Linear(6, 4, bias=True, shard="in_features"))
    assert weight.pieces(1, 3)[0].taken == ((0, 4), (2, 4))
    assert bias.pieces(1, 3) == bias.pieces()


def test_parameters_without_a_declaration_are_their_own() -> None:
    model: Any = nn.Module()
    model.scale = nn.Parameter(torch.empty(3, 2), requires_grad=False)
    model.weights = nn.ModuleList([Linear(2, 2)])  # A submodule with that name declares no weights.
    found = {binding.full_name: binding.weight for binding in bindings_of(model)}
    assert set(found) == {"scale", "weights.0.weight"}
    assert (found["scale"].sources, found["scale"].consumer, found["scale"].shard) == (("scale",), None, None)
    assert found["weights.0.weight"].consumer == Consumer("linear", "weight")


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [("a.b", "w", "a.b.w"), ("a.b", ".q.w", "a.q.w"), ("a.b", "..w", "w"), ("", "w", "w"), ("a", "x.3.w", "a.x.3.w")],
)
def test_names_are_relative(path: str, source: str, name: str) -> None:
    assert source_name(path, source) == name


def grouped(weight: Weight) -> Binding:
    assert weight.sizes is not None
    return Binding("layer", nn.Module(), "weight", weight, torch.empty(weight.shape(weight.sizes), device="meta"))


def test_groups_and_packed_numbers_are_counted_in_elements() -> None:
    """Parts of 64 and 32 rows, of which each rank gets half; scales of 16 x 32; eight columns in a number."""
    parts = Concatenated("rows", (64, 32))
    given: dict[str, Any] = {"shard": "rows", "assemble": parts, "sizes": (96, 80)}
    scale = grouped(Weight(("a", "b"), "rows columns", **given, group_sizes={"rows": 16, "columns": 32}))
    assert [each.source_shape for each in scale.pieces()] == [(4, 3), (2, 3)]
    assert scale.local_shape(2) == (3, 3)
    taken = [(each.taken, each.target) for each in scale.pieces(1, 2)]
    assert taken == [(((2, 4), (0, 3)), ((0, 2), (0, 3))), (((1, 2), (0, 3)), ((2, 3), (0, 3)))]
    packed = grouped(Weight(("a", "b"), "rows columns", **given, packing={"columns": 8}))
    assert packed.pieces(1, 2)[1].taken == ((16, 32), (0, 10))


def test_blocks_of_fused_experts() -> None:
    """MXFP4 of one tensor for all experts: 16 bytes for each 32 inputs, and a scale."""
    with torch.device("meta"):
        layer = GroupedLinear(4, 64, {"gate": 8, "up": 8}, shard="out_features")
    axes, groups = "out_features in_features", {"in_features": 32}
    blocks = layer.declare(
        "blocks", f"{axes} bytes", fused="gate_up_blocks", group_sizes=groups, sizes={"bytes": 16}, dtype=torch.uint8
    )
    scales = layer.declare("scales", axes, fused="gate_up_scales", group_sizes=groups, dtype=torch.uint8)
    assert [grouped(each).pieces()[0].source_shape for each in (blocks, scales)] == [(4, 16, 2, 16), (4, 16, 2)]
    assert [piece.taken[1] for piece in grouped(blocks).pieces(1, 2)] == [(4, 8), (12, 16)]
    layer.shard = "num_experts"
    scales = layer.declare("scales", axes, fused="gate_up_scales", group_sizes=groups, dtype=torch.uint8)
    assert grouped(scales).pieces(1, 2)[0].taken == ((2, 4), (0, 16), (0, 2))


def test_ranks_within_one_group_read_its_scale() -> None:
    scale = grouped(Weight(("a",), "rows columns", "columns", sizes=(4, 64), group_sizes={"columns": 64}))
    assert scale.local_shape(2) == (4, 1)
    assert [scale.pieces(rank, 2)[0].taken for rank in range(2)] == [((0, 4), (0, 1))] * 2


def test_the_pieces_of_a_tensor_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a load: validation, reading and the record for replacing take the same."""
    folder = quantize_checkpoint(random_checkpoint(tmp_path / "plain", **EXPERTS), tmp_path / "int8", "w8a16").path
    computed, compute = Counter[str](), Binding._pieces

    def counted(self: Binding, rank: int, ranks: int) -> tuple[Piece, ...]:
        computed[self.full_name] += 1
        return compute(self, rank, ranks)

    monkeypatch.setattr(Binding, "_pieces", counted)
    model = hal.load_model(folder, hal.open("cpu"))
    assert len(computed) >= len(list(model.parameters()))
    assert set(computed.values()) == {1}


def cut(shard: str, sizes: tuple[int, int], **given: Any) -> None:
    grouped(Weight(("a",), TWO, shard, sizes=sizes, **given)).pieces(0, 2)


def bound(weight: Weight, *shape: int) -> Callable[[], Binding]:
    return lambda: binding_of(weight, shape)


def consumed(operation: str, argument: str) -> Weight:
    return Weight(("a",), TWO, consumer=Consumer(operation, argument))


HALVES: dict[str, Any] = {"sizes": (32,), "group_sizes": {"rows": 16}}
OF_EXPERTS = Stacked(Concatenated("experts", (1,)))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "groups without sizes": (
        lambda: Weight(("a",), TWO, group_sizes={"rows": 2}),
        r"is declared with group_sizes=\{'rows': 2\}, packing=\{\} and sizes=None",
    ),
    "packing of no axis": (lambda: Weight(("a",), TWO, sizes=(4, 6), packing={"row": 2}), r"packing=\{'row': 2\}"),
    "sizes of other axes": (lambda: Weight(("a",), TWO, sizes=(4,)), r"declared with sizes=\(4,\)"),
    "another shape": (
        bound(Weight(("a",), TWO, sizes=(4, 6)), 4, 5),
        r"with the axes 'rows columns' of 4, 6 elements and has the shape \[4, 5\]",
    ),
    "a cut inside a group": (
        lambda: cut("columns", (4, 96), group_sizes={"columns": 32}),
        "layer.weight: a cut between 2 ranks at element 48 of columns is inside a group of 32",
    ),
    "a cut inside a packed number": (
        lambda: cut("rows", (8, 4), packing={"rows": 8}),
        "a cut between 2 ranks at element 4 of rows is inside a group of 8",
    ),
    "a part inside a group": (
        lambda: grouped(Weight(("a", "b"), "rows", None, Concatenated("rows", (24, 8)), **HALVES)),
        "layer.weight: a part starts at element 24 of rows, inside a group of 16",
    ),
    "a shard that is no axis": (lambda: Weight(("a",), TWO, "row"), "shard='row', which is not one of its"),
    "axes of one name": (lambda: Weight(("a",), "rows rows"), "declared with axes='rows rows'"),
    "axes that are no names": (lambda: Weight(("a",), "rows 3"), "declared with axes='rows 3'"),
    "too few axes": (bound(Weight(("a",), "rows"), 4, 6), r"axes 'rows' and has the shape \[4, 6\]"),
    "too few sources": (bound(declared("a", None, BOTH), 6, 6), "is assembled from 2 tensors, but has 1 sources"),
    "parts that do not add up": (
        bound(declared("a b", None, Concatenated("rows", (4, 3))), 6, 6),
        "layer.weight: parts of 4, 3 rows do not add up to 6",
    ),
    "a slice beyond the source": (bound(declared("a", None, Slice("rows", 3, 8)), 6, 6), "a slice of 6 rows from 3"),
    "an axis that sources do not have": (
        bound(declared("a a", None, OF_EXPERTS, BY_EXPERT), 2, 4, 6),
        "assembled along 'experts', but its sources have the axes rows, columns",
    ),
    "a vector transposed": (bound(declared("a", None, Transposed(), "rows"), 4), "has 1 dimensions"),
    "a name above the model": (lambda: source_name("a", "..w"), "is outside the model"),
    "no operation": (bound(consumed("liner", "weight"), 4, 6), "liner"),
    "an argument that is no weight": (
        bound(consumed("linear", "x"), 4, 6),
        "says of 'weight' that linear takes it as 'x', which is none of its weights",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(HalError, match=message) as caught:
        make()
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"wait": Weight(("a",), "rows columns")}, "declares 'wait', which is no parameter or buffer of it"),
        ({"weight": "a"}, "make it a mapping from names to hal.nn.Weight"),
        ("weight", "make it a mapping"),
    ],
)
def test_declarations_that_are_none(weights: Any, message: str) -> None:
    model: Any = nn.Module()
    model.weight, model.weights = nn.Parameter(torch.empty(4, 6), requires_grad=False), weights
    with pytest.raises(ModelError, match=message):
        bindings_of(model)


def test_one_axis_has_one_size() -> None:
    model: Any = nn.Module()
    model.a = nn.Parameter(torch.empty(4, 6), requires_grad=False)
    model.b = nn.Parameter(torch.empty(5), requires_grad=False)
    model.weights = {"a": Weight(("a",), "rows columns"), "b": Weight(("b",), "rows")}
    with pytest.raises(ModelError, match="the axis rows of b has 5 elements, but 4 elsewhere in its layer"):
        bindings_of(model)


def test_a_tied_table_is_bound_once() -> None:
    (table,) = bindings_of(Embedding(8, 4))
    assert table.weight.consumer is None
    assert table.weight.tied_use is not None
    assert table.weight.tied_use.consumer == Consumer("linear", "weight")


# Reading.


def test_slices_are_read_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read any tensors, in order within a file, and at most as much at a time as is mapped."""
    monkeypatch.setattr(safetensors_files, "REMAP_BYTES", 120)
    stored = {"wide": WIDE, "a": A, "scalar": torch.tensor(3.0), "none": torch.empty(0, 6), "cube": drawn(2, 6, 4)}
    save_file(stored, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"architectures": ["None"]})
    checkpoint = hal.Checkpoint.open(tmp_path)
    wanted = [
        TensorSlice("wide", ((1, 6), (3, 7))),
        TensorSlice("a", ((0, 4), (0, 6))),
        TensorSlice("scalar", ()),
        TensorSlice("none", ((0, 0), (0, 6))),
        TensorSlice("cube", ((1, 2), (0, 6), (2, 4))),
    ]
    found: dict[int, list[Tensor]] = {}
    starts: dict[int, list[int]] = {}
    for place, start, values in checkpoint.read_slices(wanted):
        found.setdefault(place, []).append(values.clone())
        starts.setdefault(place, []).append(start)
    for place, each in enumerate(wanted):
        expected = stored[each.name][tuple(slice(*taken) for taken in each.taken)]
        assert torch.equal(torch.cat(found[place]) if each.taken else found[place][0], expected), each.name
    assert starts[0] == [0, 2, 4], "two rows of 56 bytes fit"


class Narrow(CausalLM):
    """A model with an 8-bit matrix, which a layer would scale."""

    vocab_size, max_length, states = 7, 32, ()

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(7, 4)
        self.register_buffer("scaled", torch.empty(4, 4, dtype=torch.float8_e4m3fn))
        self.weights = {"scaled": Weight(("scaled",), "rows columns")}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Narrow:
        return cls()


def narrow_checkpoint(folder: Path, embed: torch.dtype, scaled: torch.dtype) -> dict[str, Tensor]:
    stored = {"embed.weight": drawn(7, 4).to(embed), "scaled": drawn(4, 4).div(1009).to(scaled)}
    save_file(stored, folder / "model.safetensors")
    write_json(folder / "config.json", {"architectures": ["Narrow"], "torch_dtype": "float32"})
    return stored


def test_numbers_of_8_bits_stay_as_they_are(tmp_path: Path) -> None:
    stored = narrow_checkpoint(tmp_path, torch.bfloat16, torch.float8_e4m3fn)
    model = hal.load_model(tmp_path, hal.open("cpu"), model_class=Narrow)
    assert torch.equal(model.scaled.view(torch.uint8), stored["scaled"].view(torch.uint8))
    assert model.embed.weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("embed", "scaled", "message"),
    [
        (torch.float32, torch.bfloat16, "scaled is BF16, expected float8_e4m3fn"),
        (torch.float32, torch.float8_e5m2, "scaled is F8_E5M2, expected float8_e4m3fn"),
        (
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            r"embed\.weight is F8_E4M3, expected a floating-point dtype.*\n.*the float8_e4m3fn weights",
        ),
    ],
)
def test_8_bits_are_never_converted(tmp_path: Path, embed: torch.dtype, scaled: torch.dtype, message: str) -> None:
    narrow_checkpoint(tmp_path, embed, scaled)
    with pytest.raises(CheckpointError, match=message):
        hal.load_model(tmp_path, hal.open("cpu"), model_class=Narrow)


PROGRAM = """
import sys, torch
from pathlib import Path
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.safetensors_files import TensorSlice

checkpoint = Checkpoint.open(sys.argv[1])
def resident():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return int(dict(line.split(": ") for line in lines)["Rss"].split()[0]) // 1024

before, most, rows = resident(), 0, 0
for _, start, values in checkpoint.read_slices([TensorSlice("large", ((500, 756), (0, 1 << 16)))]):
    assert values[:, 0].tolist() == [500 + start + row for row in range(values.shape[0])]
    assert values.sum(1)[0] > 0
    rows += values.shape[0]
    most = max(most, resident() - before)
assert rows == 256
print(most)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc/self/smaps_rollup")
def test_only_the_slice_is_read(tmp_path: Path) -> None:
    """Reading a slice of 64 MiB of a tensor of 256 MiB takes a few MiB: the file is mapped anew after each 1/64."""
    values = torch.arange(1024.0)[:, None].expand(1024, 1 << 16).contiguous()
    save_file({"large": values}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"architectures": ["None"]})
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 <= int(result.stdout) < 24
