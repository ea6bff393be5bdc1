"""Layers for models, built on ``hal.ops``.

Parameters have the names of Hugging Face checkpoints, so loading needs no per-model table.
For type checkers and editors, each layer's ``__call__`` is its ``forward``: ``torch.nn.Module`` types it as ``Any``.
"""

from hal.nn.attention import Attention, Norm, SelfAttention
from hal.nn.block_attention import BlockAttention, ChoosingAttention
from hal.nn.choices import Choice, Choices, chosen
from hal.nn.decoder import (
    LAYER_INPUTS,
    POST_NORMS,
    PRE_NORMS,
    SANDWICH_NORMS,
    SHARED_NORM,
    Decoder,
    DecoderLayer,
    DecoderLM,
    LayerNorms,
)
from hal.nn.decoder_config import (
    FULL,
    SLIDING,
    AlternatingConfig,
    DecoderConfig,
    LayerType,
    WindowConfig,
    check_layer_types,
    check_window,
    text_config,
    vision_config,
)
from hal.nn.draft_lm import DraftLM, DraftVocabulary
from hal.nn.embedding import Embedding, QuantizedEmbedding
from hal.nn.encoder import AxisPlacement, Block, Encoder, EncoderItem, Placement, check_items, frames, place_blocks
from hal.nn.experts import Experts, GroupedLinear
from hal.nn.gated_delta_net import (
    RECURRENT,
    DeltaNetConfig,
    GateActivation,
    GatedDeltaNet,
    GatedRMSNorm,
    HybridLayerType,
    ShortConvolution,
)
from hal.nn.group_attention import GroupAttention
from hal.nn.hyper_connection import GatedConnection, HyperConnection, HyperDecoderLayer
from hal.nn.keep_choices import keep_choices
from hal.nn.kimi_delta_attention import KimiDeltaAttention
from hal.nn.latent_attention import AbsorbedLinear, LatentAttention, LatentConfig
from hal.nn.linear import Linear, MergedLinear, Projection
from hal.nn.mlp import MLP, ActivationName, GatedMLP, limited_silu_and_mul
from hal.nn.model import Angles, CausalLM, LayerState, Mixer
from hal.nn.norm import LayerNorm, RMSNorm
from hal.nn.rope_parameters import RopeParameters
from hal.nn.rotary import AxisRotaryEmbedding, AxisSections, RotaryEmbedding
from hal.nn.router import Gate, Router, SparseMLP, expert_weights, used_experts
from hal.nn.streams import GatedMean, StreamHead, StreamMean, StreamNorm
from hal.nn.weights.assembly import Assembly, Concatenated, Cut, Merged, Slice, Stacked, Transposed, Whole
from hal.nn.weights.weight import Consumer, Share, TiedUse, ValueCheck, Weight, WeightUse

__all__ = [
    "FULL",
    "LAYER_INPUTS",
    "MLP",
    "POST_NORMS",
    "PRE_NORMS",
    "RECURRENT",
    "SANDWICH_NORMS",
    "SHARED_NORM",
    "SLIDING",
    "AbsorbedLinear",
    "ActivationName",
    "AlternatingConfig",
    "Angles",
    "Assembly",
    "Attention",
    "AxisPlacement",
    "AxisRotaryEmbedding",
    "AxisSections",
    "Block",
    "BlockAttention",
    "CausalLM",
    "Choice",
    "Choices",
    "ChoosingAttention",
    "Concatenated",
    "Consumer",
    "Cut",
    "Decoder",
    "DecoderConfig",
    "DecoderLM",
    "DecoderLayer",
    "DeltaNetConfig",
    "DraftLM",
    "DraftVocabulary",
    "Embedding",
    "Encoder",
    "EncoderItem",
    "Experts",
    "Gate",
    "GateActivation",
    "GatedConnection",
    "GatedDeltaNet",
    "GatedMLP",
    "GatedMean",
    "GatedRMSNorm",
    "GroupAttention",
    "GroupedLinear",
    "HybridLayerType",
    "HyperConnection",
    "HyperDecoderLayer",
    "KimiDeltaAttention",
    "LatentAttention",
    "LatentConfig",
    "LayerNorm",
    "LayerNorms",
    "LayerState",
    "LayerType",
    "Linear",
    "Merged",
    "MergedLinear",
    "Mixer",
    "Norm",
    "Placement",
    "Projection",
    "QuantizedEmbedding",
    "RMSNorm",
    "RopeParameters",
    "RotaryEmbedding",
    "Router",
    "SelfAttention",
    "Share",
    "ShortConvolution",
    "Slice",
    "SparseMLP",
    "Stacked",
    "StreamHead",
    "StreamMean",
    "StreamNorm",
    "TiedUse",
    "Transposed",
    "ValueCheck",
    "Weight",
    "WeightUse",
    "Whole",
    "WindowConfig",
    "check_items",
    "check_layer_types",
    "check_window",
    "chosen",
    "expert_weights",
    "frames",
    "keep_choices",
    "limited_silu_and_mul",
    "place_blocks",
    "text_config",
    "used_experts",
    "vision_config",
]
