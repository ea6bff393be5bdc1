"""Tests of models with latent attention, beside the comparison with transformers in test_assembled.py."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import torch
from hal.models.deepseek import DeepseekV3Config, DeepseekV3ForCausalLM
from helpers import published_configs
from helpers.checkpoints import write_json
from helpers.low_bits import Format
from helpers.reference import open_runner
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.errors import CheckpointError, ConfigError
from hal.nn import AbsorbedLinear, MergedLinear
from hal.step import ALL

NAME, SELECTING, SHARING, POOLING = "DeepSeek-V3", "DeepSeek-V3.2", "GLM-5.2", "GLM-5.3-Flash"


def logits(runner: hal.Runner) -> Tensor:
    return runner.step(runner.batch([[5, 6, 7, 8]], [[1]]), ALL).logits


@pytest.mark.parametrize("name", [NAME, SELECTING])
def test_float8_in_blocks_that_latents_do_not_fill(name: str, tmp_path: Path) -> None:
    """The projection to keys and values is widened; the blocks have 16 rows, and the latents 24 and 40.

    As published, ``weights_proj`` of an index is not quantized.
    """
    plain, draw = published_configs.write(tmp_path / "plain", name), torch.Generator().manual_seed(3)
    wide, narrow = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for key, tensor in wide.items():
        layer, _, _ = key.rpartition(".")
        if not layer.endswith(("_proj", "_mqa", "wq_b", "wk")) or layer.endswith("weights_proj"):
            narrow[key] = tensor
            continue
        found, wide[key] = Format("fp8", group=16).quantized(tensor, draw)
        narrow |= {f"{layer}.{part}": value.contiguous() for part, value in found.items()}
    save_file(wide, plain / "model.safetensors")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((plain / "config.json").read_text())
    write_json(quantized / "config.json", {**config, "quantization_config": Format("fp8", group=16).section()})
    save_file(narrow, quantized / "model.safetensors")

    runner = open_runner(quantized)
    forms = {type(each): each.form.numbers for each in runner.model.modules() if isinstance(each, hal.nn.Projection)}
    assert (forms[AbsorbedLinear], forms[MergedLinear]) == ("float", "float8")
    torch.testing.assert_close(logits(runner), logits(open_runner(plain)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "indexed"), [(NAME, 0), (SELECTING, 3), (SHARING, 2)])
def test_a_token_takes_one_latent_one_rotary_row_and_one_index_key(name: str, indexed: int, tmp_path: Path) -> None:
    config = published_configs.CONFIGS[name]
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    numbers = config["num_hidden_layers"] * row + indexed * config.get("index_head_dim", 0)
    runner = open_runner(published_configs.write(tmp_path / "model", name))
    assert runner.spec.token_bytes == numbers * torch.float32.itemsize


def test_an_index_key_of_a_group_counts_as_a_part_of_one_for_each_token(tmp_path: Path) -> None:
    config = published_configs.CONFIGS[POOLING]["text_config"]
    runner = open_runner(published_configs.write(tmp_path / "model", POOLING))
    numbers = config["kv_lora_rank"] + config["index_head_dim"] // config["index_kpool"]  # in one layer of five
    assert runner.spec.token_bytes == numbers * torch.float32.itemsize


def test_blocks_that_groups_do_not_fill_are_refused(tmp_path: Path) -> None:
    path = published_configs.write(tmp_path / "model", POOLING)
    with pytest.raises(ConfigError, match=r"its index for groups of 4 tokens, and a block has 6\n.*a multiple of 4"):
        open_runner(path, block_size=6)


def test_a_checkpoint_without_index_weights_is_refused(tmp_path: Path) -> None:
    path = published_configs.write(tmp_path / "model", SELECTING)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.indexer.wk.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.indexer\.wk"):
        open_runner(path)


def test_kimi_k2_has_the_same_architecture(tmp_path: Path) -> None:
    changes = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    given = hal.RandomCheckpoint.of("kimi", {**published_configs.CONFIGS[NAME], **changes})
    backend = hal.open({"backend": "cpu", "dtype": "float32"})
    assert logits(hal.Runner(hal.load_model(given, backend), backend)).isfinite().all()


@attrs.frozen(kw_only=True)
class UnrotatedConfig(DeepseekV3Config):
    """The keys of V3, without the rotary embedding, as the attention of Kimi Linear is."""

    def rotary(self) -> None:
        return None


class UnrotatedForCausalLM(DeepseekV3ForCausalLM):
    config_type = UnrotatedConfig


def test_without_a_rotary_embedding_positions_make_no_difference(tmp_path: Path) -> None:
    """As where the rotary embedding turns by next to nothing; heads still share a part of their keys."""
    path = published_configs.write(tmp_path / "model", NAME)
    config = json.loads((path / "config.json").read_text())
    found = logits(open_runner(path, model_class=UnrotatedForCausalLM))
    assert not torch.allclose(found, logits(open_runner(path)), atol=1e-2)
    config |= {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0**40, "rope_theta": 1e4}}
    del config["rope_scaling"]
    write_json(path / "config.json", config)
    turned, unrotated = open_runner(path), open_runner(path, model_class=UnrotatedForCausalLM)
    torch.testing.assert_close(logits(unrotated), logits(turned), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
def test_heads_may_share_no_part_of_their_keys(compiler: str, tmp_path: Path) -> None:
    """A prompt in chunks gives the logits of the whole prompt, and a token takes one latent."""
    config = published_configs.CONFIGS[NAME] | {"qk_rope_head_dim": 0, "qk_head_dim": None, "head_dim": None}
    given = hal.RandomCheckpoint.of("model", {key: value for key, value in config.items() if value is not None})
    backend = hal.open({"backend": "cpu", "dtype": "float32", "compilation": {"compiler": compiler}})
    runner = hal.Runner(hal.load_model(given, backend), backend)
    assert runner.spec.token_bytes == config["num_hidden_layers"] * config["kv_lora_rank"] * torch.float32.itemsize
    whole, blocks = logits(runner), [[2]]
    runner.step(runner.batch([[5, 6, 7]], blocks))
    last = runner.step(runner.batch([[8]], blocks, cached=[3]), ALL).logits
    torch.testing.assert_close(last, whole[-1:], rtol=1e-4, atol=1e-5)
