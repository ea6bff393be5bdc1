"""Compares vllm-ascend's tokens on NPUs with a file's: python vllm_tokens.py CHECKPOINT FILE.

The file is what hal_tokens.py prints. `vllm_ascend.sh` calls both.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from compare import compare


def main() -> None:
    """Generate, compare, and print a line."""
    from vllm import LLM, SamplingParams

    checkpoint, file = sys.argv[1:]
    expected = json.loads(Path(file).read_text(encoding="utf-8"))
    started = time.monotonic()
    llm = LLM(
        checkpoint,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,
    )
    sampling = [SamplingParams(temperature=0, max_tokens=len(row), ignore_eos=True) for row in expected["allowed"]]
    found = llm.generate([{"prompt_token_ids": ids} for ids in expected["prompts"]], sampling, use_tqdm=False)
    seconds = time.monotonic() - started
    texts = [list(each.outputs[0].token_ids) for each in found]
    compare("eager", texts, expected["allowed"], seconds)


if __name__ == "__main__":
    main()
