"""SGLang's view of hal's cache: a pool that counts tokens and holds none, and attention that hal computes."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class HalTokenPool(MHATokenToKVPool):
    """Has as many slots as SGLang decided. hal's runner keeps what they hold."""

    def _create_buffers(self) -> None:
        self.k_buffer: list[Any] = []
        self.v_buffer: list[Any] = []

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Return the bytes of keys and of values that the pool keeps itself: none."""
        return 0, 0


class HalAttention(AttentionBackend):
    """Makes hal's runner, now that SGLang has decided the number of slots. The runner computes attention."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        model_runner.model.steps.start(model_runner)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Do nothing: hal's batch has all that attention needs."""
