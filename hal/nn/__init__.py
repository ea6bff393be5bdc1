"""Layers that models share, each made of ``hal.ops``.

Their parameters carry the names of Hugging Face checkpoints, so that loading needs no table per model.
"""

from hal.nn.attention import Attention
from hal.nn.decoder import Decoder, DecoderConfig, DecoderLayer, DecoderLM, GatedMLP, SelfAttention, check_window
from hal.nn.embedding import Embedding
from hal.nn.linear import Linear, MergedLinear
from hal.nn.model import CausalLM
from hal.nn.norm import RMSNorm
from hal.nn.quantized import DynamicQuantizedLinear, QuantizedLinear, StaticQuantizedLinear
from hal.nn.rotary import ROPE_TYPES, RopeParameters, RotaryEmbedding
from hal.step.batch import Batch

__all__ = [
    "ROPE_TYPES",
    "Attention",
    "Batch",
    "CausalLM",
    "Decoder",
    "DecoderConfig",
    "DecoderLM",
    "DecoderLayer",
    "DynamicQuantizedLinear",
    "Embedding",
    "GatedMLP",
    "Linear",
    "MergedLinear",
    "QuantizedLinear",
    "RMSNorm",
    "RopeParameters",
    "RotaryEmbedding",
    "SelfAttention",
    "StaticQuantizedLinear",
    "check_window",
]
