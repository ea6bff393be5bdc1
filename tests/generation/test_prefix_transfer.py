"""Prefixes that are computed by one LLM and continued by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import held_out

import hal
from hal.errors import AsleepError, ConfigError

CHECKPOINTS = Path("checkpoints")
DENSE, HYBRID, LATENT = (CHECKPOINTS / f"tiny-python{kind}" for kind in ("", "-hybrid", "-latent"))
TEXT = held_out.texts()[1][0][:1500]


def opened(checkpoint: Path, dtype: str = "float32", *, cache_dtype: str = "model", **cache: Any) -> hal.LLM:
    config = {"cache": {"reuse_prefixes": True, "block_size": 128, "dtype": cache_dtype, **cache}}
    return hal.LLM(checkpoint, backend="cpu", dtype=dtype, max_length=1024, max_sequences=4, config=config)


@pytest.mark.parametrize("checkpoint", [DENSE, LATENT, HYBRID], ids=lambda each: each.name)
def test_another_continues_with_the_same_tokens(checkpoint: Path) -> None:
    saved = {"saved_states": 2} if checkpoint == HYBRID else {}
    with opened(checkpoint, **saved) as first, opened(checkpoint, **saved) as second:
        wanted = first.generate(TEXT, temperature=0, max_new_tokens=24)[0]
        data = first.export_prefix(TEXT)
        kept = second.import_prefix(data)
        assert kept >= 256
        assert kept % 128 == 0
        assert second.export_prefix(TEXT) == data  # the same states, from another memory
        found = second.generate(TEXT, temperature=0, max_new_tokens=24)[0]
        assert found.token_ids == wanted.token_ids


def test_what_does_not_fit_is_refused() -> None:
    with opened(DENSE) as llm:
        with pytest.raises(ConfigError, match="no prefix of the"):
            llm.export_prefix(TEXT)
        llm.generate(TEXT, temperature=0, max_new_tokens=1)
        data = llm.export_prefix(TEXT)
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        with pytest.raises(ConfigError, match="their checksum is wrong"):
            llm.import_prefix(bytes(changed))
        llm.sleep()
        with pytest.raises(AsleepError):
            llm.import_prefix(data)
    others = [
        (opened(LATENT), "computed by another model"),
        (opened(DENSE, "bfloat16"), r"float32 .* torch\.bfloat16"),
        (opened(DENSE, cache_dtype="int8"), "differ in the states"),
        (opened(DENSE, reuse_prefixes=False), "keeps no prefixes"),
        (opened(DENSE, block_size=512), "less than a block of 512"),
    ]
    for other, why in others:
        with other, pytest.raises(ConfigError, match=why):
            other.import_prefix(data)


def test_blocks_of_another_size_and_of_eight_bits() -> None:
    with opened(DENSE, cache_dtype="int8") as first, opened(DENSE, cache_dtype="int8", block_size=16) as second:
        wanted = first.generate(TEXT, temperature=0, max_new_tokens=16)[0].token_ids
        kept = second.import_prefix(first.export_prefix(TEXT))
        assert kept >= 256
        assert second.generate(TEXT, temperature=0, max_new_tokens=16)[0].token_ids == wanted
