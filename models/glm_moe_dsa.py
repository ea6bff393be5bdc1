"""GLM-5 and GLM-5.2: DeepSeek-V3.2, where in GLM-5.2 several layers share the selection of one.

Source: GLM-5 Team, *GLM-5: from Vibe Coding to Agentic Engineering*, 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
from attrs.validators import ge, le, matches_re

from hal.nn import check_layer_types

from .deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM


@attrs.frozen(kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """The keys of DeepSeek-V3.2, with the defaults of GLM-5, and those that select the layers with an index.

    Attributes:
        indexer_types: the type of each layer; ``full`` layers have an index.
        index_topk_pattern: the same with a letter for each layer, if there are no ``indexer_types``.
        index_topk_freq: without both, each so many layers have one index; see ``index_skip_topk_offset``.
        index_skip_topk_offset: the number of first layers that have an index in any case.
    """

    n_group: int = 1
    topk_group: int = 1
    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])
    indexer_rope_interleave: bool = True
    indexer_types: tuple[Literal["full", "shared"], ...] | None = attrs.field(default=None, validator=check_layer_types)
    index_topk_pattern: str = attrs.field(default="", validator=matches_re("[FS]*"))
    index_topk_freq: int = attrs.field(default=1, validator=ge(1))
    index_skip_topk_offset: int = attrs.field(default=2, validator=ge(0))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        given, letters = self.index_topk_pattern, "".join(each[0].upper() for each in self.indexer_types or ())
        if given and letters and given != letters:
            raise ValueError(f"index_topk_pattern is {given!r}, and indexer_types says {letters!r}")
        if len(self.indexed) != self.num_hidden_layers:
            raise ValueError(f"index_topk_pattern has {len(given)} letters for {self.num_hidden_layers} layers")
        if self.attending and not self.indexed[self.attending[0]]:
            raise ValueError("the first layer shares a selection, and no layer before it has an index")

    @property
    def attending(self) -> Sequence[int]:
        """The layers with attention."""
        return range(self.num_hidden_layers)

    @property
    def indexed(self) -> Sequence[bool]:
        if self.indexer_types or self.index_topk_pattern:
            return [each in "full" for each in self.indexer_types or self.index_topk_pattern.lower()]
        layers, first = range(self.num_hidden_layers), self.index_skip_topk_offset - 1
        return [max(layer - first, 0) % self.index_topk_freq == 0 for layer in layers]


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    config_type = GlmMoeDsaConfig
