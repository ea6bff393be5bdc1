"""Tests for checkpoints whose tensors have other names than the model's, against what transformers writes and reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import random_checkpoint, write_json
from helpers.comparison import randomize, transformers
from helpers.quantized import DESCRIPTION, DOWN, FORMATS, change_json, change_tensors, load, logits, make_pair
from helpers.replacing import logits as of_runner
from helpers.thorough import MODE, thorough
from helpers.tiny_transformers import SIZES
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor

import hal
from hal.checkpoint.weight_bindings import bindings_of
from hal.errors import CheckpointError
from hal.nn import GroupedLinear
from hal.quantize.quantize_checkpoint import quantize_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
SIZES_HERE = {**SIZES, "vocab_size": 280, "num_hidden_layers": 2}


def made(family: str, **overrides: Any) -> Any:
    """Return a random model of transformers, whose logits depend on every weight."""
    sizes = {**SIZES_HERE, **MOE.get(family, {}), **overrides}
    if family == "Qwen2Moe":
        sizes.pop("head_dim")
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).eval()
    randomize(model, 0)
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def read_by_transformers(folder: Path) -> dict[str, Tensor]:
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    return weights_of(model)


@pytest.mark.parametrize("family", MOE)
def test_experts_in_one_tensor(family: str, tmp_path: Path) -> None:
    model = made(family)
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = set(load_file(tmp_path / "fused" / "model.safetensors"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert torch.equal(logits(load(tmp_path / "fused")), logits(load(tmp_path / "each")))
    with pytest.raises(CheckpointError, match=r"(?s)in one tensor, .*experts.gate_up_proj.*save_original_format=True"):
        quantize_checkpoint(tmp_path / "fused", tmp_path / "int8", "w8a8_dynamic")


def test_experts_in_one_tensor_beside_quantized_layers(tmp_path: Path) -> None:
    """The target is Linear, and the tensor is none, so that nothing needs to ignore it."""
    model = made("Qwen3Moe")
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    quantize_checkpoint(tmp_path / "each", tmp_path / "int8", "w8a16")
    shutil.copytree(tmp_path / "int8", tmp_path / "int8_fused")

    def take_experts(folder: Path) -> Callable[[dict[str, Tensor]], None]:
        def change(found: dict[str, Tensor]) -> None:
            for name in [each for each in found if ".experts." in each]:
                del found[name]
            others = load_file(folder / "model.safetensors").items()
            found.update({name: each for name, each in others if ".experts." in name})

        return change

    def ignore(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"].append("re:.*experts.*")

    change_tensors(tmp_path / "int8", take_experts(tmp_path / "each"))
    change_json(tmp_path / "int8" / "config.json", ignore)
    change_tensors(tmp_path / "int8_fused", take_experts(tmp_path / "fused"))
    assert torch.equal(logits(load(tmp_path / "int8_fused")), logits(load(tmp_path / "int8")))


def test_experts_of_another_form_are_refused(tmp_path: Path) -> None:
    made("Qwen3Moe").save_pretrained(tmp_path, save_original_format=False)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    change_tensors(tmp_path, lambda found: found.update({name: found[name][:, :-2].contiguous()}))
    with pytest.raises(CheckpointError, match=rf"{name} is \[6, 46, 48\], not \[6, 48, 48\]"):
        load(tmp_path)
    change_tensors(tmp_path, lambda found: found.pop(name))
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.experts.0.gate_proj.weight is missing"):
        load(tmp_path)


@pytest.mark.parametrize("among", ["tensor", "expert"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_reads_its_part_of_fused_experts(among: str, ranks: int) -> None:
    """The part is the one of a checkpoint with a tensor for each expert, and nothing else is read."""
    gate, up = torch.randn(6, 12, 8), torch.randn(6, 12, 8)
    stored = {
        f"layer.{index}.{name}.weight": part[index] for index in range(6) for name, part in (("gate", gate), ("up", up))
    } | {"layer.both": torch.cat([gate, up], 1)}

    def part(fused: str | None, rank: int) -> Tensor:
        with torch.device("meta"):
            layer = GroupedLinear(
                6, 8, {"gate": 12, "up": 12}, shard="num_experts" if among == "expert" else "out_features"
            )
        layer.fused = fused
        root, parent = torch.nn.Module(), torch.nn.Module()
        root.add_module("layer", parent)
        parent.add_module("both", layer)
        (binding,) = bindings_of(root)
        found = torch.full(tuple(binding.local_shape(ranks)), torch.nan)
        pieces = binding.pieces(rank, ranks)
        assert sum(piece.numel for piece in pieces) == found.numel()
        for piece in pieces:
            assert tuple(stored[piece.source].shape) == piece.source_shape
            piece.put(found, 0, stored[piece.source][tuple(slice(*each) for each in piece.taken)])
        return found

    for rank in range(ranks):
        assert torch.equal(part("both", rank), part(None, rank))


@pytest.mark.parametrize("family", ["Qwen3", "Llama", *MOE])
def test_a_base_model_without_prefix(family: str, tmp_path: Path) -> None:
    """The tied output projection needs no tensor. One that is not tied is missing, which transformers only warns of."""
    model = made(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "base")
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "base" / "model.safetensors"))
    assert torch.equal(logits(load(tmp_path / "base")), logits(load(tmp_path / "whole")))
    read = read_by_transformers(tmp_path / "base")
    assert all(torch.equal(read[name], each) for name, each in weights_of(model).items())
    change_json(tmp_path / "base" / "config.json", lambda config: config.update(tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=f": {HEAD} is missing"):
        load(tmp_path / "base")


@pytest.mark.parametrize("name", ["embed_tokens.weight", "model.lm_head.weight", "model.model.norm.weight"])
def test_a_prefix_of_some(name: str, tmp_path: Path) -> None:
    model = made("Qwen3")
    model.save_pretrained(tmp_path)
    expected = logits(load(tmp_path))
    (known,) = {EMBEDDING, HEAD, "model.norm.weight"} & {f"model.{name}", name.removeprefix("model.")}
    change_tensors(tmp_path, lambda found: found.update({name: found.pop(known)}))
    assert torch.equal(logits(load(tmp_path)), expected)
    assert torch.equal(read_by_transformers(tmp_path)[known], weights_of(model)[known])
    change_tensors(tmp_path, lambda found: found.update({known: found[name].clone()}))
    with pytest.raises(CheckpointError, match=f"{name} is not in the model"):
        load(tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_base_model_without_prefix(format: Any, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, format, "w8a8", keep=(DOWN,))
    if format == "compressed-tensors":
        ignore = {"ignore": ["lm_head", DOWN]}
        change_json(pair.folder / "config.json", lambda config: config["quantization_config"].update(ignore))
    expected = logits(load(pair.folder))

    def shorter(table: dict[str, Any]) -> None:
        for name in [each for each in table if each.startswith("model.")]:
            table[name.removeprefix("model.")] = table.pop(name)

    change_tensors(pair.folder, shorter)
    if format == "modelslim":
        change_json(pair.folder / DESCRIPTION, shorter)
    else:
        file = pair.folder / "config.json"
        file.write_text(file.read_text().replace('"model.layers', '"layers'))
    assert torch.equal(logits(load(pair.folder)), expected)


@thorough(MODE, "-graph")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_a_tied_tensor_has_either_name(family: str, compiler: str, tmp_path: Path) -> None:
    model = made(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    expected = logits(load(tmp_path), compiler)
    file = tmp_path / "model.safetensors"
    if family == "Qwen3":  # as safetensors' save_model writes, of several names the first
        save_model(model, str(file), metadata={"format": "pt"})
    else:
        change_tensors(tmp_path, lambda found: found.update({HEAD: found.pop(EMBEDDING)}))
    assert HEAD in load_file(file)
    assert EMBEDDING not in load_file(file)
    assert torch.equal(logits(load(tmp_path), compiler), expected)
    assert torch.equal(read_by_transformers(tmp_path)[EMBEDDING], weights_of(model)[EMBEDDING])
    quantize_checkpoint(tmp_path, tmp_path / "int8", "w8a16")
    assert logits(load(tmp_path / "int8")).shape == expected.shape


@pytest.mark.parametrize(
    ("embedding", "head", "computing", "fits"),
    [
        ("float32", "float32", "float32", True),
        ("bfloat16", "bfloat16", "float32", True),
        ("float32", "bfloat16", "float32", False),
        ("bfloat16", "float32", "float32", False),
        ("float32", "bfloat16", "bfloat16", True),
        ("bfloat16", "float32", "bfloat16", True),
    ],
)
def test_both_names_of_a_tied_tensor(embedding: str, head: str, computing: str, fits: bool, tmp_path: Path) -> None:
    """They are compared as the model would compute with them."""
    folder = random_checkpoint(tmp_path, tie_word_embeddings=True)

    def both(found: dict[str, Tensor]) -> None:
        table = found[EMBEDDING]
        found |= {EMBEDDING: table.to(getattr(torch, embedding)), HEAD: table.to(getattr(torch, head), copy=True)}

    change_tensors(folder, both)
    if fits:
        load(folder, dtype=computing)
    else:
        with pytest.raises(CheckpointError, match=rf"(?s){HEAD} in .* differs from {EMBEDDING}.*tie_word_embeddings"):
            load(folder, dtype=computing)


def test_new_weights_by_other_names(tmp_path: Path) -> None:
    """A tied tensor may come by either name, and any by its name without the prefix."""
    first = random_checkpoint(tmp_path / "first", seed=1)
    second = random_checkpoint(tmp_path / "second", seed=2)
    new = load_file(second / "model.safetensors")
    new[HEAD] = new.pop(EMBEDDING)
    runner = in_graphs(first)
    hal.replace_weights(runner, {name.removeprefix("model."): each for name, each in new.items()})
    assert torch.equal(of_runner(runner), of_runner(in_graphs(second)))


def in_graphs(folder: Path) -> hal.Runner:
    backend = hal.open({"backend": "cpu", "compilation": {"compiler": "graph", "capture_sizes": [1, 2]}})
    return hal.Runner(hal.load_model(folder, backend), backend)


def copied(name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / "model.safetensors", folder / name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (copied("consolidated.safetensors"), "remove 'consolidated.safetensors' if model.safetensors has all"),
        (copied("adapter_model.safetensors"), "remove 'adapter_model.safetensors' if model.safetensors"),
        (lambda folder: [copied(f"{name}.safetensors")(folder) for name in range(45)], r"and \d+ more if model.saf"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter .*merge_and_unload"),
        (
            lambda folder: [
                copied("model-1.safetensors")(folder),
                write_json(folder / "model.safetensors.index.json", {"weight_map": {EMBEDDING: "model-1.safetensors"}}),
            ],
            "holds model.safetensors and model.safetensors.index.json, which names other.*remove model.safetensors if",
        ),
    ],
)
def test_files_beside_the_weights(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path)
    load(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load(folder)


def test_a_file_of_another_format_beside_an_index(tmp_path: Path) -> None:
    """Mistral publishes its own format beside the files of the index, and no engine reads it then."""
    folder = random_checkpoint(tmp_path, shards=2)
    save_file({"tok_embeddings.weight": torch.ones(1)}, folder / "consolidated.safetensors")
    load(folder)
