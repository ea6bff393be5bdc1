"""Prefixes that are computed on the CPU and continued on the emulated NPU, and the reverse."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import held_out

import hal

TEXT = held_out.texts()[1][0][:900]


@pytest.mark.parametrize("dtype", ["model", "int8"])
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_a_prefix_travels_both_ways(compiler: str, dtype: str) -> None:
    llms = {
        backend: hal.LLM(
            Path("checkpoints/tiny-python"),
            backend=backend,
            dtype="float16",
            compiler=compiler,
            max_length=512,
            max_sequences=2,
            config={"cache": {"reuse_prefixes": True, "block_size": 128, "dtype": dtype}},
        )
        for backend in ("cpu", "npu")
    }
    texts = {name: llm.generate(TEXT, temperature=0, max_new_tokens=12)[0].token_ids for name, llm in llms.items()}
    exported = {name: llm.export_prefix(TEXT) for name, llm in llms.items()}
    for here, there in (("cpu", "npu"), ("npu", "cpu")):
        other = TEXT + "\n"  # whose prefix is forgotten, so that the imported one is read
        llms[there].replace_weights(Path("checkpoints/tiny-python"))
        assert llms[there].import_prefix(exported[here]) >= 128
        assert llms[there].export_prefix(other) == exported[here]
        found = llms[there].generate(TEXT, temperature=0, max_new_tokens=12)[0].token_ids
        assert found in texts.values()
    for each in llms.values():
        each.close()
