"""Families that :mod:`hal.nn` assembles, against Hugging Face transformers, on random checkpoints.

Those of :data:`OUTSIDE` are no part of hal.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from helpers import assembled, comparison
from helpers.comparison import (
    ROPES,
    STEPS,
    TOLERANCE,
    Case,
    difference,
    draw_rope,
    our_outputs,
    their_hidden,
    their_logits,
)
from helpers.thorough import DRAW, EXHAUSTIVE, MODE, thorough

import hal

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

SEEDS = range(1, 5)  # test_the_configurations_cover_what_they_should checks them.
MORE_SEEDS = range(5, 17)


def sizes(draw: random.Random) -> dict[str, Any]:
    kv_heads = draw.choice((1, 2))
    return {
        "vocab_size": draw.choice((97, 256)),
        "hidden_size": draw.choice((48, 96)),
        "intermediate_size": draw.choice((56, 128)),
        "num_hidden_layers": draw.randint(2, 4),
        "num_attention_heads": kv_heads * draw.choice((1, 2, 4)),
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "tie_word_embeddings": draw.random() < 0.5,
        "attn_implementation": "eager",
    }


def llama(draw: random.Random) -> Any:
    given, rope = sizes(draw), draw_rope(draw, draw.choice(ROPES))
    biases = {name: draw.random() < 0.5 for name in ("attention_bias", "mlp_bias")}
    return transformers.LlamaConfig(**given, **biases, head_dim=draw.choice((None, 16, 64)), rope_parameters=rope)


def mistral(draw: random.Random) -> Any:
    window, rope = draw.choice((None, 5, 13)), draw_rope(draw, draw.choice(ROPES))
    return transformers.MistralConfig(
        **sizes(draw), head_dim=draw.choice((None, 16, 32)), sliding_window=window, rope_parameters=rope
    )


def qwen3(draw: random.Random) -> Any:
    given = sizes(draw)
    if draw.random() < 0.7:
        given |= {"use_sliding_window": True, **windows(draw, given["num_hidden_layers"])}
    return transformers.Qwen3Config(
        **given, **rotated(draw), head_dim=draw.choice((32, 128)), attention_bias=draw.random() < 0.5
    )


def sparse(draw: random.Random, layers: int) -> dict[str, Any]:
    """Return the experts of Qwen's families, and which layers have them."""
    return {
        **experts(draw, "num_experts"),
        "moe_intermediate_size": draw.choice((16, 24)),
        "norm_topk_prob": draw.random() < 0.5,
        "decoder_sparse_step": draw.choice((1, 2)),
        "mlp_only_layers": [layer for layer in range(layers) if draw.random() < 0.25],
    }


def qwen3_moe(draw: random.Random) -> Any:
    given = {**sizes(draw), **rotated(draw), "head_dim": draw.choice((16, 32)), "attention_bias": draw.random() < 0.5}
    layers = sparse(draw, given["num_hidden_layers"])
    window = {"use_sliding_window": True, "sliding_window": draw.randint(5, 20)} if draw.random() < 0.5 else {}
    return transformers.Qwen3MoeConfig(**given, **layers, **window)


def qwen2_moe(draw: random.Random) -> Any:
    given = {**heads(draw), **rotated(draw)}
    shared = {"shared_expert_intermediate_size": draw.choice((24, 64)), "qkv_bias": draw.random() < 0.5}
    if draw.random() < 0.5:
        given |= {"use_sliding_window": True, "sliding_window": draw.randint(5, 20)}
        given["max_window_layers"] = draw.randint(1, 2)
    return transformers.Qwen2MoeConfig(**given, **shared, **sparse(draw, given["num_hidden_layers"]))


def mixtral(draw: random.Random) -> Any:
    window = draw.choice((None, 5, 13))
    return transformers.MixtralConfig(
        **sizes(draw), **rotated(draw), **experts(draw), head_dim=draw.choice((16, 32)), sliding_window=window
    )


def qwen2(draw: random.Random) -> Any:
    given = sizes(draw)
    given["hidden_size"] = given["num_attention_heads"] * draw.choice((16, 32))
    if draw.random() < 0.6:
        given |= {"use_sliding_window": True, "sliding_window": draw.randint(5, 20)}
        given["max_window_layers"] = draw.randrange(given["num_hidden_layers"])
    rope = draw_rope(draw, draw.choice(("default", "yarn")))
    return transformers.Qwen2Config(**given, rms_norm_eps=draw.choice((1e-6, 1e-3)), rope_parameters=rope)


def gemma3(draw: random.Random) -> Any:
    given = sizes(draw)
    given["num_hidden_layers"] = draw.randint(2, 6)
    given["hidden_size"] = given["num_attention_heads"] * draw.choice((16, 24))
    given["layer_types"] = [draw.choice(("full_attention", "sliding_attention")) for _ in range(draw.randint(2, 4))]
    given["num_hidden_layers"] = len(given["layer_types"])
    ropes = {
        "full_attention": draw_rope(draw, draw.choice(("default", "linear"))),
        "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4))},
    }
    return transformers.Gemma3TextConfig(
        **given,
        head_dim=draw.choice((16, 32)),
        query_pre_attn_scalar=draw.choice((16, 24)),
        sliding_window=draw.randint(5, 20),
        final_logit_softcapping=draw.choice((None, 3.0)),
        rope_parameters=ropes,
    )


def rotated(draw: random.Random, *, part: float | None = None) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4))}
    return {"rope_parameters": rope if part is None else {**rope, "partial_rotary_factor": part}}


def heads(draw: random.Random) -> dict[str, Any]:
    """Return sizes in which the heads together are as wide as hidden_size."""
    given = sizes(draw)
    given["hidden_size"] = given["num_attention_heads"] * draw.choice((16, 32))
    return given


def cohere(draw: random.Random) -> Any:
    scale = draw.choice((0.0625, 0.5))
    return transformers.CohereConfig(
        **heads(draw), **rotated(draw), logit_scale=scale, attention_bias=draw.random() < 0.5
    )


def phi(draw: random.Random) -> Any:
    part = rotated(draw, part=draw.choice((0.25, 0.5)))
    return transformers.PhiConfig(
        **{**heads(draw), "tie_word_embeddings": False}, **part, qk_layernorm=draw.random() < 0.5
    )


def windows(draw: random.Random, layers: int) -> dict[str, Any]:
    """Return a window, and types of layers of which one has it."""
    types = [draw.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    types[draw.randrange(layers)] = "sliding_attention"
    return {"sliding_window": draw.randint(5, 20), "layer_types": types}


def olmo2(draw: random.Random) -> Any:
    return transformers.Olmo2Config(**heads(draw), **rotated(draw), rms_norm_eps=draw.choice((1e-6, 1e-3)))


def olmo3(draw: random.Random) -> Any:
    given = heads(draw)
    ropes = {
        "full_attention": {**draw_rope(draw, "yarn"), "truncate": True},  # transformers reads it in a flat table only
        "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice((100.0, 5e5))},
    }
    biased, windowed = draw.random() < 0.5, windows(draw, given["num_hidden_layers"])
    return transformers.Olmo3Config(**given, **windowed, rope_parameters=ropes, attention_bias=biased)


def multipliers(draw: random.Random) -> dict[str, float]:
    return {
        "embedding_multiplier": draw.choice((1.0, 12.0)),
        "logits_scaling": draw.choice((3.0, 8.0)),
        "residual_multiplier": draw.choice((0.22, 1.0)),
        "attention_multiplier": draw.choice((0.015625, 0.3)),
    }


def granite(draw: random.Random) -> Any:
    factors = multipliers(draw)
    return transformers.GraniteConfig(**heads(draw), **rotated(draw), **factors, mlp_bias=draw.random() < 0.5)


def experts(
    draw: random.Random, count: str = "num_local_experts", taken: str = "num_experts_per_tok"
) -> dict[str, Any]:
    """Return the number of experts, and that of a token's, under these names."""
    number = draw.choice((4, 8, 16))
    return {count: number, taken: draw.randint(1, min(6, number))}


def granitemoe(draw: random.Random) -> Any:
    return transformers.GraniteMoeConfig(**heads(draw), **rotated(draw), **multipliers(draw), **experts(draw))


def phi3(draw: random.Random) -> Any:
    given, part = heads(draw), draw.choice((0.5, 1.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    pairs = int(given["hidden_size"] // given["num_attention_heads"] * part) // 2
    original = draw.choice((None, 16, 256))  # shorter than every sequence, and longer
    if original is not None:
        short, long = ([draw.uniform(1, most) for _ in range(pairs)] for most in (2, 8))
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if draw.random() < 0.3:
            rope["attention_factor"] = 1.1
    return transformers.Phi3Config(
        **given,
        rope_parameters=rope,
        original_max_position_embeddings=original or 4096,
        sliding_window=draw.choice((None, 7, 15)),
        pad_token_id=0,
    )


def gemma2(draw: random.Random) -> Any:
    given = sizes(draw)
    given["hidden_size"] = given["num_attention_heads"] * draw.choice((16, 24))
    return transformers.Gemma2Config(
        **given,
        **rotated(draw),
        **windows(draw, given["num_hidden_layers"]),
        head_dim=draw.choice((16, 32)),
        query_pre_attn_scalar=draw.choice((16, 24)),
        final_logit_softcapping=draw.choice((None, 3.0)),
        attn_logit_softcapping=None if draw.random() < 0.4 else 2.0,
    )


def gemma3_images(draw: random.Random) -> Any:
    """Return the configuration of a model that also reads images; its vision model is small."""
    text = gemma3(draw).to_dict() | {"final_logit_softcapping": None}  # which transformers applies to texts only
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=text["tie_word_embeddings"],
        attn_implementation="eager",
    )


def gemma4(draw: random.Random) -> Any:
    given = sizes(draw)
    given["num_hidden_layers"] = draw.choice((4, 5))
    windowed = windows(draw, given["num_hidden_layers"])
    windowed["layer_types"][:2], windowed["layer_types"][-1] = ["sliding_attention", "full_attention"], "full_attention"
    sparse = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
    equal, embedded = draw.random() < 0.5, draw.random() < 0.7
    return transformers.Gemma4TextConfig(
        **given,
        **windowed,
        **(sparse if draw.random() < 0.5 else {}),
        head_dim=draw.choice((16, 32)),
        global_head_dim=draw.choice((16, 64)),
        attention_k_eq_v=equal,
        num_global_key_value_heads=given["num_key_value_heads"] if equal else None,
        num_kv_shared_layers=draw.choice((0, 2)) if embedded else 0,  # which transformers computes with both only
        use_double_wide_mlp=draw.random() < 0.5,
        hidden_size_per_layer_input=16 if embedded else 0,
        vocab_size_per_layer_input=given["vocab_size"],
        final_logit_softcapping=draw.choice((None, 3.0)),
    )


def gpt_oss(draw: random.Random) -> Any:
    given = {**sizes(draw), "head_dim": draw.choice((16, 32)), **experts(draw)}
    return transformers.GptOssConfig(
        **given,
        **windows(draw, given["num_hidden_layers"]),
        rope_parameters={**draw_rope(draw, "yarn"), "truncate": False},
        swiglu_limit=draw.choice((0.5, 2.0, 7.0)),
        attention_bias=draw.random() < 0.5,
    )


def ernie(draw: random.Random) -> Any:
    given = {**sizes(draw), "head_dim": draw.choice((16, 32))}
    return transformers.Ernie4_5Config(**given, **rotated(draw), use_bias=draw.random() < 0.5)


def ernie_moe(draw: random.Random) -> Any:
    given = {**heads(draw), **experts(draw, "moe_num_experts", "moe_k")}
    return transformers.Ernie4_5_MoeConfig(
        **given,
        **rotated(draw),
        moe_intermediate_size=draw.choice((16, 24)),
        moe_num_shared_experts=draw.choice((0, 2)),
        moe_layer_start_index=draw.choice((0, 1)),
        moe_layer_interval=draw.choice((1, 2, 3)),
        use_bias=draw.random() < 0.5,  # also of an output projection that is the table of embeddings
    )


def glm4_moe(draw: random.Random) -> Any:
    given = {**heads(draw), **experts(draw, "n_routed_experts")}
    groups = draw.choice((1, 2))
    given["num_experts_per_tok"] = min(given["num_experts_per_tok"], given["n_routed_experts"] // groups)
    return transformers.Glm4MoeConfig(
        **given,
        **rotated(draw, part=draw.choice((0.5, 1.0))),
        attention_bias=draw.random() < 0.5,
        use_qk_norm=draw.random() < 0.5,
        moe_intermediate_size=draw.choice((16, 24)),
        first_k_dense_replace=draw.choice((0, 1)),
        n_group=groups,
        norm_topk_prob=draw.random() < 0.5,
        routed_scaling_factor=draw.choice((1.0, 2.5)),
    )


def latent(draw: random.Random) -> dict[str, Any]:
    """Return the sizes of latent attention, and of experts."""
    given = {**sizes(draw), **experts(draw, "n_routed_experts")}
    given["hidden_size"] = given["num_attention_heads"] * draw.choice((16, 24))
    rope = draw_rope(draw, draw.choice(("default", "yarn")))
    if rope["rope_type"] == "yarn":
        rope |= {"truncate": True, "mscale": draw.choice((0.7, 1.0)), "mscale_all_dim": draw.choice((0.0, 0.7))}
    return {
        **given,
        "num_key_value_heads": given["num_attention_heads"],
        "rope_parameters": rope,
        "q_lora_rank": draw.choice((None, 24)),
        "kv_lora_rank": draw.choice((16, 32)),
        "qk_nope_head_dim": draw.choice((16, 24)),
        "qk_rope_head_dim": draw.choice((8, 16)),
        "v_head_dim": draw.choice((16, 40)),
        "attention_bias": draw.random() < 0.3,
        "moe_intermediate_size": draw.choice((16, 24)),
        "n_shared_experts": draw.choice((1, 2)),
        "first_k_dense_replace": draw.choice((0, 1)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
    }


def deepseek_v2(draw: random.Random) -> Any:
    given = latent(draw)
    groups = draw.choice((1, 2, 4)) if given["n_routed_experts"] >= 8 else 1
    taken = draw.randint(1, groups)
    most = given["n_routed_experts"] // groups * taken
    given["num_experts_per_tok"] = min(given["num_experts_per_tok"], most)
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return transformers.DeepseekV2Config(**given, topk_method=method, n_group=groups, topk_group=taken)


def deepseek_v3(draw: random.Random) -> Any:
    given = latent(draw)
    groups = draw.choice((1, 2))
    given["num_experts_per_tok"] = min(given["num_experts_per_tok"], given["n_routed_experts"] // groups)
    return transformers.DeepseekV3Config(
        **given,
        n_group=groups,
        topk_group=1,
        norm_topk_prob=draw.random() < 0.5,
        rope_interleave=draw.random() < 0.5,
        num_mtp_layers=draw.choice((0, 1)),
    )


def selected(draw: random.Random, **others: Any) -> dict[str, Any]:
    """Return the sizes of latent attention with an index, whose budget is less than most contexts, or more than all."""
    return {
        **latent(draw),
        "q_lora_rank": draw.choice((16, 24)),
        "attention_bias": False,
        "index_topk": draw.choice((1, 5, 16, 100)),
        "index_n_heads": draw.choice((24, 32)),  # of fewer, all may be negative, so that scores of 0 tie
        "index_head_dim": draw.choice((16, 32)),
        **others,
    }


def deepseek_v32(draw: random.Random) -> Any:
    return transformers.DeepseekV32Config(**selected(draw, n_group=2, topk_group=1, num_experts_per_tok=2))


def glm_moe_dsa(draw: random.Random) -> Any:
    """Return a configuration of GLM-5, or of GLM-5.2, whose layers share selections, by one of three keys."""
    given = selected(draw)
    others = [draw.choice(("full", "shared")) for _ in range(given["num_hidden_layers"] - 2)]
    types = ["full", *others, "shared"]
    shared = {
        "none": {},
        "types": {"indexer_types": types},
        "pattern": {"index_topk_pattern": "".join(each[0].upper() for each in types)},
        "frequency": {"index_topk_freq": draw.choice((2, 3)), "index_skip_topk_offset": draw.choice((1, 2, 3))},
    }[draw.choice(("none", "types", "pattern", "frequency"))]
    return transformers.GlmMoeDsaConfig(**given, **shared, rms_norm_eps=draw.choice((1e-5, 1e-3)))


def minimax_m2(draw: random.Random) -> Any:
    given = {**sizes(draw), "head_dim": draw.choice((16, 32)), **experts(draw)}
    return transformers.MiniMaxM2Config(**given, **rotated(draw, part=draw.choice((0.5, 1.0))))


def minimax_m3(draw: random.Random) -> Any:
    """Return a configuration that says twice what is rotated: transformers ignores ``rotary_dim`` alone."""
    given = {**sizes(draw), "head_dim": draw.choice((16, 32)), **experts(draw)}
    layers = given["num_hidden_layers"]
    types = [draw.choice(("full_attention", "minimax_m3_sparse")) for _ in range(layers)]
    types[draw.randrange(layers)] = "minimax_m3_sparse"
    top, rotary = draw.choice((1, 2, 4, 30)), draw.choice((8, 16))
    return transformers.MiniMaxM3VLTextConfig(
        **given,
        **rotated(draw, part=rotary / given["head_dim"]),
        layer_types=types,
        mlp_layer_types=[draw.choice(("dense", "sparse")) for _ in range(layers)],
        rotary_dim=rotary,
        dense_intermediate_size=draw.choice((40, 64)),
        shared_intermediate_size=draw.choice((16, 24)),
        routed_scaling_factor=draw.choice((1.0, 2.0)),
        swiglu_limit=draw.choice((0.5, 7.0)),
        index_n_heads=given["num_key_value_heads"],
        index_head_dim=draw.choice((16, 32)),
        index_block_size=draw.choice((3, 4, 16)),
        index_topk_blocks=top,
        index_local_blocks=draw.randint(0, min(top, 2)),
    )


def smollm3(draw: random.Random) -> Any:
    given = heads(draw)
    without = [draw.choice((0, 1)) for _ in range(given["num_hidden_layers"])]
    return transformers.SmolLM3Config(**given, **rotated(draw), no_rope_layers=without, pad_token_id=0)


def nemotron(draw: random.Random) -> Any:
    given = heads(draw) | {"head_dim": draw.choice((16, 32))}
    return transformers.NemotronConfig(**given, **rotated(draw, part=0.5), norm_eps=draw.choice((1e-5, 1e-3)))


FAMILIES = {
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
    "deepseek-v32": deepseek_v32,
    "glm-moe-dsa": glm_moe_dsa,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2-moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3-moe": qwen3_moe,
    "gemma3": gemma3,
    "cohere": cohere,
    "phi": phi,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "granite": granite,
    "granitemoe": granitemoe,
    "phi3": phi3,
    "gemma2": gemma2,
    "gemma3-images": gemma3_images,
    "gemma4": gemma4,
    "gpt-oss": gpt_oss,
    "ernie": ernie,
    "ernie-moe": ernie_moe,
    "glm4-moe": glm4_moe,
    "minimax-m2": minimax_m2,
    "minimax-m3": minimax_m3,
    "smollm3": smollm3,
    "nemotron": nemotron,
}
OUTSIDE: dict[str, type[hal.nn.CausalLM]] = {
    "cohere": assembled.CohereForCausalLM,
    "phi": assembled.PhiForCausalLM,
    "smollm3": assembled.SmolLM3ForCausalLM,
    "nemotron": assembled.NemotronForCausalLM,
}
"""Families that no entry point registers."""


COVERED = {
    "deepseek-v2": ("topk_method", "q_lora_rank", "attention_bias", "first_k_dense_replace"),
    "deepseek-v3": ("n_group", "q_lora_rank", "rope_interleave", "norm_topk_prob", "v_head_dim"),
    "deepseek-v32": ("index_topk", "index_n_heads", "index_head_dim"),
    "glm-moe-dsa": ("index_topk", "index_n_heads", "index_head_dim"),
    "llama": ("attention_bias", "mlp_bias", "tie_word_embeddings"),
    "mistral": ("sliding_window", "tie_word_embeddings"),
    "mixtral": ("num_experts_per_tok", "sliding_window"),
    "qwen2": ("use_sliding_window",),
    "qwen2-moe": ("norm_topk_prob", "decoder_sparse_step", "qkv_bias", "use_sliding_window"),
    "qwen3": ("attention_bias", "use_sliding_window", "head_dim"),
    "qwen3-moe": ("norm_topk_prob", "decoder_sparse_step", "attention_bias", "use_sliding_window"),
    "gemma3": ("final_logit_softcapping",),
    "cohere": ("attention_bias", "tie_word_embeddings"),
    "phi": ("qk_layernorm",),
    "granite": ("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    "olmo3": ("attention_bias", "sliding_window"),
    "granitemoe": ("num_experts_per_tok",),
    "phi3": ("sliding_window",),
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma4": ("attention_k_eq_v", "num_kv_shared_layers", "hidden_size_per_layer_input", "enable_moe_block"),
    "gpt-oss": ("attention_bias", "swiglu_limit", "num_experts_per_tok"),
    "ernie": ("use_bias",),
    "ernie-moe": ("moe_num_shared_experts", "moe_layer_interval", "use_bias"),
    "glm4-moe": ("use_qk_norm", "n_group", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace"),
    "minimax-m2": ("num_experts_per_tok", "head_dim"),
    "minimax-m3": ("index_block_size", "index_topk_blocks", "index_local_blocks", "num_key_value_heads"),
}
"""Keys that have two values or more among the configurations of a family."""


def draw_config(family: str, seed: int) -> Any:
    return FAMILIES[family](random.Random(f"{family} {seed}"))


RESPELLED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2-moe",
    "qwen3-moe",
    "gemma3",
    "granite",
    "granitemoe",
    "phi3",
    "glm4-moe",
    "deepseek-v2",
    "deepseek-v3",
    "glm-moe-dsa",
)
"""Families whose config.json half of the cases write as older checkpoints have it."""


def older(config: dict[str, Any], draw: random.Random) -> None:
    """Rewrite a config.json as older checkpoints have it, without values that follow from others."""
    ropes = config["rope_parameters"]
    if "full_attention" in ropes:
        config["rope_parameters"] = ropes["full_attention"]
        config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    else:
        config.pop("layer_types", None)
        if "index_topk_pattern" in config or "index_topk_freq" in config:
            del config["indexer_types"]
    if config["model_type"] in ("llama", "mistral"):
        if config["head_dim"] == config["hidden_size"] // config["num_attention_heads"]:
            del config["head_dim"]
        if config["num_key_value_heads"] == config["num_attention_heads"]:
            config["num_key_value_heads"] = None
    comparison.spell_as_before_version_5(config, draw)


CASES = [(family, seed) for family in FAMILIES for seed in (*SEEDS, *([] if family in OUTSIDE else MORE_SEEDS))]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "{},seed={}".format(*case))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, seed = request.param
    respelled = older if family in RESPELLED else None
    case = comparison.build(draw_config(family, seed), seed, tmp_path_factory.mktemp(family), respelled)
    return attrs.evolve(case, model_class=OUTSIDE.get(family))


def check(case: Case, compiler: str, cuts: Sequence[int] | None = None) -> None:
    """Compare the logits and hidden states of all tokens, from prefills that continue after ``cuts`` if given."""
    logits, hidden = our_outputs(case.runner(compiler), case, cuts=cuts)
    for ours, run in ((logits, their_logits), (hidden, their_hidden)):
        theirs = [run(case.model, sequence) for sequence in case.sequences]
        if difference(ours, theirs) > TOLERANCE:
            # The layers magnify rounding. Ours may then be as far from float64 as transformers' float32.
            wide = copy.deepcopy(case.model).double()
            exact = [run(wide, sequence) for sequence in case.sequences]
            assert difference(ours, exact) <= difference(theirs, exact)


@thorough(DRAW, r"seed=2\b")
@thorough(EXHAUSTIVE, r"seed=([3-9]|\d\d)\b")
def test_logits(request: pytest.FixtureRequest, case: Case) -> None:
    """Of four seeds one is captured, and two continue after a cached prefix."""
    seed = int(request.node.callspec.id.rpartition("=")[2])
    check(case, "graph" if seed % 4 == 2 else "eager", case.cuts if seed % 4 < 2 else None)


PIECEWISE = ("deepseek-v3", "gemma3", "glm-moe-dsa", "gpt-oss", "minimax-m3", "phi3", "qwen3-moe", "smollm3")
INDUCTOR = ("gemma4", "qwen3-moe")
COMPILED = [(compiler, family) for compiler in ("piecewise", "inductor") for family in FAMILIES]


@thorough(MODE, r"inductor|piecewise-(?!deepseek-v3)")
@thorough(EXHAUSTIVE, rf"piecewise-(?!({'|'.join(PIECEWISE)}),)|inductor-(?!({'|'.join(INDUCTOR)}),)")
@pytest.mark.parametrize(
    ("compiler", "case"),
    [pytest.param(compiler, (family, 1), id=f"{compiler}-{family},seed=1") for compiler, family in COMPILED],
    indirect=["case"],
)
def test_logits_of_other_compilers(case: Case, compiler: str) -> None:
    check(case, compiler)


LATENT = ("deepseek-v2", "deepseek-v3", "deepseek-v32", "glm-moe-dsa", "minimax-m3")
BY_SEED = ("graph", "eager", "piecewise", "inductor")
JOINED = [(BY_SEED[seed % 4], (family, seed)) for family in LATENT for seed in (*SEEDS, *MORE_SEEDS)]


@thorough(MODE, r"seed=(?!4\b)")
@thorough(EXHAUSTIVE, r"seed=(?![245]\b)")
@pytest.mark.parametrize(
    ("compiler", "case"),
    [pytest.param(mode, each, id="{}-{},seed={}".format(mode, *each)) for mode, each in JOINED],
    indirect=["case"],
)
def test_tokens_in_changing_batches(case: Case, compiler: str) -> None:
    """Prompts start when others end. Each of up to 32 new tokens is the likeliest by transformers."""
    runner, prompts = case.runner(compiler), [each[:-STEPS] for each in case.sequences]
    counts = [8 + 12 * (index % 3) for index in range(len(prompts))]
    found: list[list[int]] = [[] for _ in prompts]
    together = set()
    for token in hal.generate(runner, prompts, [hal.SamplingParams(max_new_tokens=each) for each in counts]):
        found[token.prompt_index].append(token.token_id)
        together.add(sum(0 < len(new) < count for new, count in zip(found, counts, strict=True)))
    assert len(together) > 1
    for prompt, new, count in zip(prompts, found, counts, strict=True):
        logits = their_logits(case.model, [*prompt, *new])[len(prompt) - 1 : -1]
        assert len(new) == count
        chosen = logits[range(count), new]
        assert (logits.amax(-1) - chosen).max() <= TOLERANCE * logits.abs().max()


def test_the_configurations_cover_what_they_should() -> None:
    def drawn(family: str, key: str) -> set[str]:
        return {str(getattr(draw_config(family, seed), key)) for seed in SEEDS}

    for family, keys in COVERED.items():
        for key in keys:
            assert len(drawn(family, key)) >= 2, f"{family}: {key}"
    scaled = [
        draw_config(family, seed).rope_parameters["rope_type"] for family in ("llama", "mistral") for seed in SEEDS
    ]
    assert {"linear", "llama3", "yarn"} <= set(scaled)
    ropes = [draw_config("phi3", seed) for seed in SEEDS]
    assert {each.rope_parameters["rope_type"] for each in ropes} == {"default", "longrope"}
    assert {16, 256} <= {each.original_max_position_embeddings for each in ropes}, "longer and shorter than the model"
    assert any({0, 1} == set(draw_config("smollm3", seed).no_rope_layers) for seed in SEEDS)
