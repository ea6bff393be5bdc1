"""Tests of vLLM's speculative decoding with hal's drafters. `make test-vllm` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.vllm_programs import found_by, needs_vllm

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def check_drafted(tmp_path: Path, checkpoint: Path, drafts: dict[str, Any], requests: int, **asked: Any) -> None:
    """Check that random requests get the tokens of hal.generate, and that vLLM counts the drafts that hal counts."""
    found = found_by(
        "vllm_requests.main",
        tmp_path,
        checkpoint,
        dtype="float32",
        block=16,
        seed=1,
        requests=requests,
        **{**asked, "vllm": {"speculative_config": drafts, **asked.get("vllm", {})}},
    )
    assert found["wrong"] == []
    counts, seen = found["counts"], found["vllm"]
    assert counts["mixed"]
    assert counts["decode"]
    assert counts["accepted"] == seen["by place"]
    assert 0 < sum(counts["accepted"]) == seen["accepted"]
    # vLLM counts what it pads to a number of drafts, too.
    assert sum(counts["drafted"]) <= seen["drafted"]


@needs_vllm
@pytest.mark.parametrize("compiler", ["eager", "graph"])
@pytest.mark.shows("texts", "vLLM")
def test_requests_with_drafts_get_the_tokens_of_generate(trained: Path, tmp_path: Path, compiler: str) -> None:
    """Greedy, and with seeds, penalties, log-probabilities and grammars; in chunks, resumed, and with prefixes."""
    check_drafted(tmp_path, trained, NGRAM, 200, hal={"backend": "cpu", "compilation": {"compiler": compiler}})
