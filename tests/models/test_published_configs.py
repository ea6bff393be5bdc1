"""Config files of published models: all keys are read, and the model has the tensors that transformers gives it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from helpers.published_configs import CONFIGS, OTHERS

import hal
from hal.checkpoint.model_registry import find_model
from hal.errors import ConfigError
from hal.step import ALL

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

UNREAD = {
    "ERNIE-4.5-21B-A3B-PT": ["moe_capacity, moe_gate, moe_use_aux_free"],
    "MiniMax-M2": ["use_mtp"],
    "SmolLM2-135M": ["is_llama_config"],
}
"""Keys of which a warning says that they have no effect, by model."""


def theirs(config: dict[str, Any], *, sees: bool) -> Any:
    """Return the model that transformers makes of a config.json, without values; the text model unless it sees."""
    given = {key: value for key, value in copy.deepcopy(config).items() if key != "architectures"}
    if (given.get("rope_scaling") or {}).get("type") == "su":  # which this version of transformers does not read
        given["rope_scaling"]["type"] = "longrope"
    made = transformers.AutoConfig.for_model(**given)
    text = type(made) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not sees
    with torch.device("meta"):
        maker = transformers.AutoModelForCausalLM if text else transformers.AutoModelForImageTextToText
        return maker.from_config(made)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_read_whole(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = CONFIGS[name]
    with torch.device("meta"), caplog.at_level(logging.WARNING):
        model = find_model(config["architectures"][0]).from_config(config)
    assert [each.rpartition(": ")[2] for each in caplog.messages] == UNREAD.get(name, [])
    whole = theirs(config, sees=model.encoder is not None)
    beside = ("vision_tower", "multi_modal_projector", "embed_vision", "visual.") if model.encoder is None else ()
    expected = sum(each.numel() for key, each in whole.named_parameters() if not any(part in key for part in beside))
    stored = ("score_correction_bias", "layer_scalar")
    expected += sum(each.numel() for key, each in whole.named_buffers() if key.endswith(stored))
    assert sum(each.numel() for each in model.parameters()) == expected


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_it_runs(name: str, cpu: hal.Backend) -> None:
    """A model from transformers' code is also compared with transformers' own model when it is loaded."""
    model = hal.load_model(hal.RandomCheckpoint.of(name, {**CONFIGS, **OTHERS}[name]), cpu)
    runner = hal.Runner(model, cpu)
    slots = {"slots": runner.slots.take(1)} if runner.slots.needed else {}
    logits = runner.step(runner.batch([[5, 6, 7, 8]], [[1]], **slots), ALL).logits
    assert logits.isfinite().all()
    assert (logits.float().std(-1) > 1e-3).all(), "all tokens have the same logit"


KIMI = "Kimi-Linear-48B-A3B-Instruct"
KIMI_TABLE = CONFIGS[KIMI]["linear_attn_config"]
GLM = "GLM-5.3-Flash"
GLM_TEXT = CONFIGS[GLM]["text_config"]
QWEN = "Qwen3.8-Flash-Next"
QWEN_TEXT = CONFIGS[QWEN]["text_config"]
THETAS = [name for name, config in CONFIGS.items() if "rope_theta" in config and not config.get("rope_parameters")]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Phi-4-mini-instruct", {"full_attn_mod": 2}, "full_attn_mod.*known: 1|unknown value 2"),
        ("Phi-3.5-mini-instruct", {"partial_rotary_factor": 0.5}, "factors for 8 pairs, and a head has 4"),
        ("gemma-2-2b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma-3-4b-it", {"text_config": None}, "no table text_config"),
        ("gpt-oss-20b-BF16", {"hidden_act": "gelu"}, "unknown value 'gelu'"),
        ("gpt-oss-20b-BF16", {"num_local_experts": 3}, "4 experts per token of 3"),
        ("GLM-4.6", {"n_group": 3}, "3 groups of 8 experts"),
        ("GLM-4.6", {"n_group": 4, "topk_group": 5}, "chooses 5 groups of 4"),
        ("GLM-4.6", {"n_group": 4, "topk_group": 1}, "4 experts per token of 2"),
        ("MiniMax-M2", {"scoring_func": "softmax"}, "unknown value 'softmax'"),
        ("MiniMax-M2", {"rotary_dim": 64}, "rotary_dim is 64; it must be from 2 to head_dim, 32"),
        ("MiniMax-M2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("MiniMax-M2", {"head_dim": 0}, "head_dim, 0"),
        ("MiniMax-M2", {"rotary_dim": 16, "partial_rotary_factor": 0}, "'partial_rotary_factor' must be > 0"),
        ("Phi-3.5-mini-instruct", {"original_max_position_embeddings": 0}, "must be >= "),
        ("gpt-oss-20b-BF16", {"rope_parameters": [], "rope_scaling": None}, "rope_parameters must be a table"),
        ("DeepSeek-V2-Lite", {"kv_lora_rank": None}, "required key 'kv_lora_rank' is missing"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "unknown value 'noaux_tc'.*topk_method"),
        ("DeepSeek-V2-Lite", {"scoring_func": "sigmoid"}, "unknown value 'sigmoid'.*scoring_func"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "unknown value 'softmax'.*scoring_func"),
        ("DeepSeek-V3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("DeepSeek-V3", {"qk_rope_head_dim": 7}, "head_dim is 7"),
        ("DeepSeek-V3", {"q_lora_rank": 0}, "q_lora_rank"),
        ("DeepSeek-V3.2", {"index_topk": 0}, "'index_topk' must be >= 1"),
        ("DeepSeek-V3.2", {"index_head_dim": 7}, "qk_rope_head_dim is 8; .* up to index_head_dim, 7"),
        ("DeepSeek-V3.2", {"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types"),
        ("DeepSeek-V3.2", {"q_lora_rank": None}, "q_lora_rank"),
        ("GLM-5", {"indexer_types": ["full", "half", "shared"]}, "unknown value 'half'.*indexer_types"),
        ("GLM-5", {"indexer_types": ["full"]}, "indexer_types has 1 entries for 3 layers"),
        ("GLM-5", {"indexer_types": ["shared", "full", "full"]}, "first layer shares a selection"),
        ("GLM-5", {"index_topk_freq": 2, "index_skip_topk_offset": 0}, "first layer shares a selection"),
        ("GLM-5", {"index_topk_freq": 0}, "'index_topk_freq' must be >= 1"),
        ("GLM-5", {"index_topk_pattern": "FFX"}, "index_topk_pattern"),
        ("GLM-5", {"index_topk_pattern": "FF"}, "index_topk_pattern has 2 letters for 3 layers"),
        ("GLM-5.2", {"index_topk_pattern": "FSSS"}, "index_topk_pattern is 'FSSS', and indexer_types says 'FFSS'"),
        (KIMI, {"linear_attn_config": {**KIMI_TABLE, "kda_layers": [1, 2]}}, "each layer from 1 to 4 must be in one"),
        (KIMI, {"linear_attn_config": {**KIMI_TABLE, "kda_layers": [1, 2, 3, 4]}}, "each layer from 1 to 4"),
        (KIMI, {"linear_attn_config": {**KIMI_TABLE, "num_heads": 0}}, "'num_heads' must be >= 1"),
        (KIMI, {"linear_attn_config": {**KIMI_TABLE, "gate_lower_bound": -5.0}}, "unknown key 'gate_lower_bound'"),
        (KIMI, {"linear_attn_config": None, "linear_conv_kernel_dim": 9}, "'linear_conv_kernel_dim' must be <= 4"),
        (KIMI, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        (KIMI, {"layer_types": ["indexed_attention"] * 4}, "layer_types"),
        (KIMI, {"mla_use_nope": False}, "mla_use_nope"),
        (KIMI, {"num_shared_experts": 0}, "'n_shared_experts' must be >= 1"),
        ("MiniMax-M3", {"index_n_heads": 1}, "index_n_heads is 1; it must be num_key_value_heads, 2"),
        ("MiniMax-M3", {"index_topk_blocks": 0}, "'index_topk_blocks' must be >= 1"),
        ("MiniMax-M3", {"index_local_blocks": 3}, "index_local_blocks, 3, exceeds index_topk_blocks, 2"),
        ("MiniMax-M3", {"index_head_dim": 6}, "an index query has 6 elements, less than the 8 rotated ones"),
        ("MiniMax-M3", {"layer_types": ["indexed_attention"] * 3}, "unknown value 'indexed_attention'.*layer_types"),
        ("MiniMax-M3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 3 layers"),
        *(
            (GLM, {"text_config": {**GLM_TEXT, **changes}}, message)
            for changes, message in (
                ({"index_topk": 6}, "index_topk is 6; it must be a multiple of index_kpool, 4"),
                ({"qk_rope_head_dim": 8}, "qk_rope_head_dim"),
                ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
                ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "kda_layers is .* must be .1, 2, 3, 5"),
                ({"linear_attn_config": {"full_attn_layers": [3]}}, "full_attn_layers is .* must be .4"),
                ({"linear_attn_config": {"gate_lower_bound": 1.0}}, "'linear_lower_bound' must be < 0"),
                ({"indexer_types": ["full"] * 3 + ["shared", "full"]}, "the first layer shares a selection"),
                ({"index_topk_pattern": "FF"}, "index_topk_pattern has 2 letters for 5 layers"),
                ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 5 layers"),
                ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
                ({"hc_sinkhorn_iters": 0}, "'hc_sinkhorn_iters' must be >= 1"),
            )
        ),
        *(
            (QWEN, {"text_config": {**QWEN_TEXT, **changes}}, message)
            for changes, message in (
                ({"indexer_budget": 6}, "indexer_budget is 6; it must be a multiple of indexer_compress_ratio, 4"),
                ({"indexer_budget": 0}, "'indexer_budget' must be >= 1"),
                ({"indexer_n_heads": None}, "required key 'indexer_n_heads' is missing"),
                ({"indexer_kv_heads": 2}, "unknown value 2.*indexer_kv_heads"),
                ({"indexer_head_dim": 6}, "an index query has 6 elements, less than the 8 rotated ones"),
                ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
                ({"hc_count": 1}, "'hc_count' must be >= 2"),
                ({"output_gate_type": "gelu"}, "unknown value 'gelu'.*output_gate_type"),
                ({"ple_layer_ids": [2]}, r"ple_layer_ids is .2,.; it may have the recurrent layers, .1, 3"),
                ({"ple_layer_ids": [4]}, r"ple_layer_ids is .4,.; it may have the recurrent layers, .1, 3"),
                ({"ple_embed_dim": 30}, "ple_embed_dim, 30, is no multiple of the 4 tables"),
                ({"eos_token_id": None}, "eos_token_id is None; n-grams end at a token of the vocabulary"),
                ({"eos_token_id": 96}, "eos_token_id is 96"),
                ({"ngram_size": 1}, "'ngram_size' must be >= 2"),
                ({"num_experts_per_tok": 9}, "9 experts per token of 8"),
            )
        ),
        *((name, {"rope_theta": 0}, "'rope_theta' must be > 1") for name in THETAS),
    ],
)
def test_what_hal_cannot_do_is_refused(name: str, changes: dict[str, Any], message: str, cpu: hal.Backend) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        hal.load_model(hal.RandomCheckpoint.of(name, {**CONFIGS[name], **changes}), cpu)
