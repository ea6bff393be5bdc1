"""Tests for unusual values under every key of a checkpoint's config.json and of hal's configuration.

Each either loads and computes finite, varied logits, or raises a typed error. The keys are read from the configuration
classes, so new keys of models, drivers and hal are tested automatically.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import attrs
import pytest
import torch
from helpers.checkpoints import CONFIG, random_checkpoint, trained_tokenizer, write_json, write_weights
from helpers.limited import limited
from helpers.thorough import AGAIN, EXHAUSTIVE, FAMILY, MODE, thorough

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.model_registry import GROUP, find_model, make_model
from hal.checkpoint.weight_bindings import bindings_of
from hal.config import Config, read
from hal.config.reading import INERT_MODEL_KEYS
from hal.config.text import kind_of
from hal.drivers.registry import driver_names, load_driver
from hal.errors import CheckpointError, ConfigError, HalError, ModelError
from hal.nn import DecoderConfig
from hal.nn.rope_parameters import KEYS_BESIDE, ROPE_TYPES
from hal.quantization.checkpoint_format import config_keys
from hal.step import ALL

VALUES: dict[str, Any] = {
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "NaN": float("nan"),
    "1e308": 1e308,
    "-1e308": -1e308,
    "1e30": 1e30,
    "5e-324": 5e-324,
    "-0.0": -0.0,
    "2**31": 2**31,
    "2**62": 2**62,
    "2**63": 2**63,
    "-2**63": -(2**63),
    "10**400": 10**400,
    "0": 0,
    "-1": -1,
    "an empty text": "",
    "true": True,
    "null": None,
    "[]": [],
    "{}": {},
}
NOT_FINITE = ("Infinity", "-Infinity", "NaN")
FURTHER = ("-Infinity", "-1e308", "-0.0", "-2**63")
"""Values left to the exhaustive run: Infinity and NaN, 1e308, 0 and -1 end alike."""
every_value = pytest.mark.parametrize(
    "values",
    [{name: VALUES[name] for name in VALUES if (name in FURTHER) == further} for further in (False, True)],
    ids=["values", "further values"],
)
REGISTERED = [
    each.name for each in importlib.metadata.entry_points(group=GROUP) if each.value.startswith("hal.models.")
]
HEAD = "Eagle3LlamaForCausalLM"
"""It drafts for other models, and generates nothing alone."""
ARCHITECTURES = sorted(each for each in REGISTERED if each.endswith("ForCausalLM") and each != HEAD)
"""Without those that read the keys of another one in a table of config.json."""
CONFIGS = {"Qwen3NextForCausalLM": "HybridMoeConfig", "Qwen35ForCausalLM": "HybridConfig"}
"""Classes of configs that several families share."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The keys of the number of experts, of which a few suffice."""
LATENT = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("moe_intermediate_size", "index_head_dim", "index_n_heads", "index_topk"), 16),
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": CONFIG["num_attention_heads"],
}
"""The sizes of families with latent attention, which have no defaults."""
COMPRESSED = {
    **dict.fromkeys(("index_head_dim", "index_n_heads", "index_topk", "moe_intermediate_size", "q_lora_rank"), 16),
    "qk_rope_head_dim": 8,
    "num_key_value_heads": 1,
    "o_groups": 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "num_hash_layers": 0,  # random weights are no table of experts
}
"""The sizes of attention to compressed entries, whose defaults are large."""
GROUPED = {
    **dict.fromkeys(("indexer_n_heads", "indexer_head_dim", "hc_lowrank", "ple_embed_dim"), 16),
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 20,
}
"""The sizes of attention to groups, and of n-grams, which have no defaults or large ones."""
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
"""The keys of sizes that are large by default."""
LLAMA = "LlamaForCausalLM"
ROPE = {
    "rope_theta": 1e4,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.5] * (CONFIG["head_dim"] // 2),
    "long_factor": [2.0] * (CONFIG["head_dim"] // 2),
}


def declared(architecture: str) -> set[str]:
    """Return the keys that the model's configuration and its base classes declare."""
    found = find_model(architecture)
    name = CONFIGS.get(found.__name__) or re.sub(r"For\w+$", "Config", found.__name__)
    return {field.name for field in attrs.fields(getattr(sys.modules[found.__module__], name))}


def config_of(architecture: str) -> dict[str, Any]:
    size = trained_tokenizer().get_vocab_size()
    sizes = {key: size for key in VOCABULARIES if key in declared(architecture)}
    config = {**CONFIG, **sizes, "tie_word_embeddings": False, "architectures": [architecture]}
    del config["rope_parameters"]
    experts = {key: 8 for key in EXPERTS if key in declared(architecture)}
    latent = LATENT if "kv_lora_rank" in declared(architecture) else {}
    config |= {key: value for key, value in latent.items() if key in declared(architecture)}
    if "compress_rates" in declared(architecture):
        config |= COMPRESSED
    elif "indexer_budget" in declared(architecture):
        config |= GROUPED
    elif not latent and "index_n_heads" in declared(architecture):
        config["index_n_heads"] = CONFIG["num_key_value_heads"]
    return config | experts | ({"num_experts_per_tok": 2} if experts else {})


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of each architecture, with random weights."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = make_model(find_model(request.param), config_of(request.param))
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for piece in (piece for binding in bindings_of(model) for piece in binding.pieces()):
        shape = piece.source_shape
        noise = torch.randn(shape, generator=generator)
        weights[piece.source] = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5
    write_weights(folder, weights)
    write_json(folder / "sound.json", config_of(request.param))
    return folder


def computes(folder: Path, backend: hal.Backend) -> None:
    """Load the checkpoint, and check that its logits are meaningful."""
    opened = Checkpoint.open(folder)
    assert all(type(each) is int for each in opened.stop_token_ids)
    runner = hal.Runner(hal.load_model(opened, backend), backend)
    fields = {"slots": torch.tensor(runner.slots.take(1), dtype=torch.int32)} if runner.slots.needed else {}
    logits = runner.step(runner.batch([[5, 6, 7, 8, 9]], [[1]], **fields), ALL).logits.float()
    assert logits.isfinite().all()
    assert (logits.std(-1) > 1e-3).all(), "all tokens have the same logit"
    assert len(set(logits[:, 0].tolist())) == 5, "all positions are alike"


def tried(folder: Path, config: dict[str, Any], key: str, name: str, backend: hal.Backend) -> str:
    """Return the problem with a config.json, or an empty string if it computed or raised a typed error."""
    write_json(folder / "config.json", config)
    try:
        with limited():
            computes(folder, backend)
    except (ConfigError, CheckpointError, ModelError) as error:
        told = error.problem if error.problem and error.remedy else "nothing"
        if name in NOT_FINITE and key not in told:
            return f"{name} was refused without naming {key}: {told}"
        return "" if len(told) < 1000 else f"{name} was refused with {len(told)} characters"
    except (Exception, pytest.fail.Exception) as error:
        return f"{name} ended in {error!r}"
    return f"{name} was taken" if name in NOT_FINITE else ""


def test_what_is_tried_is_what_there_is(checkpoint: Path, cpu: hal.Backend) -> None:
    write_json(checkpoint / "config.json", json.loads((checkpoint / "sound.json").read_text()))
    computes(checkpoint, cpu)


ROPE_KEYS = [
    (rope_type, key)
    for rope_type, cls in ROPE_TYPES.items()
    for key in (*(field.name for field in attrs.fields(cls)), "rope_type", "type")
]


OF_ALL = {field.name for field in attrs.fields(DecoderConfig)} | {"rope_parameters", "rope_scaling", "rope_theta"}
"""Keys that one class reads for all families; they are tried with Llama's."""
OF_HYBRIDS = (
    "linear_",
    "full_attention_interval",
    "mamba_",
    "mtp_",
    "layer_types",
    "attn_output",
    "use_sliding",
    "sizes",
)
"""Keys that one class reads for the families with recurrent layers; they are tried with Qwen3.5's."""
OF_SPARSE = ("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers")
"""Those of these families' experts; they are tried with Qwen3-Next's."""
LIKE_OTHERS = (
    "DeepseekV2",
    "DeepseekV32",
    "KimiLinear",
    "GlmMoeDsa",
    "MiniMaxM2",
    "Qwen2Moe",
    "Gemma2",
    "Phi3",
    "Qwen2",
)
"""Families whose keys configure what other families have, too."""
MODEL_KEYS = [(LLAMA, key) for key in sorted(OF_ALL)]
MODEL_KEYS += [(each, key) for each in ARCHITECTURES for key in sorted(declared(each) - OF_ALL)]


@thorough(FAMILY, r"\[(?!Llama)")
@thorough(
    EXHAUSTIVE, rf"\[Qwen3(_5Moe|Next)ForCausalLM-({'|'.join(OF_HYBRIDS)})|\[Qwen3_5Moe\w+-({'|'.join(OF_SPARSE)})"
)
@thorough(EXHAUSTIVE, rf"further values|\[({'|'.join(LIKE_OTHERS)})For")
@every_value
@pytest.mark.parametrize(("checkpoint", "key"), MODEL_KEYS, indirect=["checkpoint"])
def test_keys_of_models(values: dict[str, Any], key: str, checkpoint: Path, cpu: hal.Backend) -> None:
    config = json.loads((checkpoint / "sound.json").read_text())
    found = [tried(checkpoint, {**config, key: value}, key, name, cpu) for name, value in values.items()]
    assert not any(found), "\n".join(filter(None, found))


@thorough(FAMILY)
@thorough(EXHAUSTIVE, "further values")
@every_value
@pytest.mark.parametrize("checkpoint", [LLAMA], indirect=True)
@pytest.mark.parametrize("key", sorted({*INERT_MODEL_KEYS, *KEYS_BESIDE, *config_keys(), "a_key_of_nobody"}))
def test_keys_that_no_model_reads(values: dict[str, Any], key: str, checkpoint: Path, cpu: hal.Backend) -> None:
    config = json.loads((checkpoint / "sound.json").read_text())
    found = [tried(checkpoint, {**config, key: value}, key, name, cpu) for name, value in values.items()]
    found += [
        tried(checkpoint, {**config, key: [{"a": VALUES[name]}]}, key, name, cpu)
        for name in NOT_FINITE
        if name in values
    ]
    assert not any(found), "\n".join(filter(None, found))


@thorough(FAMILY, r"\[(?!yarn)")
@thorough(EXHAUSTIVE, "further values")
@every_value
@pytest.mark.parametrize("checkpoint", [LLAMA], indirect=True)
@pytest.mark.parametrize(("rope_type", "key"), ROPE_KEYS)
def test_keys_of_positions(
    values: dict[str, Any], rope_type: str, key: str, checkpoint: Path, cpu: hal.Backend
) -> None:
    config = json.loads((checkpoint / "sound.json").read_text())
    known = {field.name for field in attrs.fields(ROPE_TYPES[rope_type])}
    rope = {"rope_type": rope_type, **{name: value for name, value in ROPE.items() if name in known}}
    write_json(checkpoint / "config.json", {**config, "rope_parameters": rope})
    computes(checkpoint, cpu)
    found = [
        tried(checkpoint, {**config, "rope_parameters": {**rope, key: value}}, key, name, cpu)
        for name, value in values.items()
    ]
    assert not any(found), "\n".join(filter(None, found))


@thorough(FAMILY, r"\[(?!Llama)")
@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_that_are_made_without_a_file(architecture: str, name: str) -> None:
    """A config given as a Python dict instead of a JSON file."""
    model, config = find_model(architecture), config_of(architecture)
    for key in [*sorted(declared(architecture) - {"rope"}), "rope_theta"]:
        with pytest.raises(ConfigError, match=key):
            make_model(model, {**config, key: VALUES[name]})


@pytest.mark.parametrize("value", [10**5000, [10**5000], {"a": 10**5000}], ids=lambda value: type(value).__name__)
def test_numbers_that_python_does_not_write(value: Any) -> None:
    assert kind_of(value).split()[0] in ("int", "list", "dict")
    for given in (value, {"cache": value}, {"cache": {"num_tokens": value}}, {"backend": value}, {"dtype": value}):
        with pytest.raises(ConfigError):
            read(Config, given)


def paths(cls: type, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of a configuration, with its tables."""
    for field in attrs.fields(cls):
        kind: Any = get_type_hints(cls)[field.name]
        yield (*above, field.name)
        if attrs.has(kind):
            yield from paths(kind, (*above, field.name))


def options_of(driver: str) -> list[type]:
    module = sys.modules[type(load_driver(driver)).__module__]
    return [each for name, each in vars(module).items() if name.endswith("Options") and attrs.has(each)]


CPU_OPTIONS = [("options", *path) for each in options_of("cpu") for path in paths(each)]


def with_key(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**config, first: with_key(config.get(first, {}), tuple(rest), value) if rest else value}


def runs(config: dict[str, Any], folder: Path) -> str:
    """Return the problem with a configuration, or an empty string if it ran or raised a typed error."""
    try:
        with limited():
            backend = hal.open(config)
            runner = hal.Runner(hal.load_model(folder, backend), backend)
            tokens = list(hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=2)))
    except HalError as error:
        return "" if error.problem and error.remedy and len(error.problem) < 1000 else "refused without words"
    except (Exception, pytest.fail.Exception) as error:
        return f"ended in {error!r}"
    return "" if tokens else "gave no token"


@thorough(AGAIN, r"\[cache\.(block_size|num_tokens)")
@thorough(MODE, r"\[compilation\.(decode|prefill|encoder|queries|passes|splitting)|\[compilation\.(torch|debug|cache)")
@thorough(MODE, r"\[(strict|check_model|cache\.(num|saved)\w+|parallel\.(data|timeout)|options\.instructions)-")
@thorough(EXHAUSTIVE, "further values")
@every_value
@pytest.mark.parametrize("path", [*paths(Config), *CPU_OPTIONS], ids=".".join)
def test_keys_of_the_configuration(values: dict[str, Any], path: tuple[str, ...], checkpoint_of_one: Path) -> None:
    bases: list[dict[str, Any]] = [{"backend": "cpu", "cache": {"num_tokens": 256}}]
    if path[0] in ("compilation", "cache"):
        bases.append({**bases[0], "compilation": {"compiler": "graph", "max_capture_size": 2}})
    found = []
    for base in bases:
        for name, value in values.items():
            for given in (value, [value], {"add_rms_norm": value}):
                if problem := runs(with_key(base, path, given), checkpoint_of_one):
                    found.append(f"{name}, as {type(given).__name__}: {problem}")
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def checkpoint_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint for repeated reads."""
    return random_checkpoint(tmp_path_factory.mktemp("one"), num_hidden_layers=1)


@pytest.mark.parametrize("driver", driver_names())
def test_options_of_drivers(driver: str) -> None:
    """Only parsing is tested; whether a device supports them is for the driver's tests."""
    for cls in options_of(driver):
        for path in paths(cls):
            for name, value in VALUES.items():
                for given in (value, [value], {"a": value}):
                    if name in NOT_FINITE and not isinstance(given, dict):  # a table may have keys of the vendor
                        with pytest.raises(ConfigError):
                            read(cls, with_key({}, path, given))
                        continue
                    with suppress(ConfigError):
                        read(cls, with_key({}, path, given))
