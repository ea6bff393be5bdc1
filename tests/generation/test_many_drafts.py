"""Many prompts with and without drafts: the same tokens, and JSON that is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import held_out
from helpers.thorough import EXHAUSTIVE, thorough

import hal

CHECKPOINTS = Path("checkpoints")
DENSE, HYBRID, SPARSE, LATENT = (CHECKPOINTS / f"tiny-python{kind}" for kind in ("", "-hybrid", "-moe", "-latent"))
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "model": {"method": "model", "model": str(DENSE)},
    "mtp": {"method": "mtp", "tokens": 3},
    "eagle3": {"method": "eagle3", "model": str(CHECKPOINTS / "tiny-python-eagle3")},
}
PAIRS = [
    *((DENSE, each) for each in ("ngram", "model", "eagle3")),
    *((HYBRID, each) for each in ("ngram", "model", "mtp")),
    (SPARSE, "ngram"),
    (LATENT, "ngram"),
]
PROMPTS = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def opened(checkpoint: Path, draft: dict[str, Any] | None, compiler: str) -> hal.LLM:
    return hal.LLM(
        checkpoint,
        backend="cpu",
        dtype="float32",
        compiler=compiler,
        max_sequences=16,
        max_length=256,
        draft=draft and draft | {"adapt": False},
    )


@thorough(EXHAUSTIVE)
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
@pytest.mark.parametrize(("checkpoint", "drafter"), PAIRS, ids=lambda each: getattr(each, "name", each))
def test_256_prompts(checkpoint: Path, drafter: str, compiler: str) -> None:
    texts = [text[start : start + 150] for text in held_out.texts()[1] for start in range(0, len(text) - 150, 211)]
    texts = texts[:: len(texts) // PROMPTS][:PROMPTS]
    found: list[list[tuple[int, ...]]] = []
    for draft in (None, DRAFTERS[drafter]):
        with opened(checkpoint, draft, compiler) as llm:
            made = []
            for how in ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 17}):
                for first in range(0, PROMPTS, 16):
                    made += llm.generate(texts[first : first + 16], max_new_tokens=48, ignore_eos=True, **how)
            found.append([each.token_ids for each in made])
            acceptance = llm.acceptance
    assert len(found[0]) == 2 * PROMPTS
    assert acceptance is not None
    assert sum(acceptance.accepted) > PROMPTS
    assert [index for index, pair in enumerate(zip(*found, strict=True)) if pair[0] != pair[1]] == []


@thorough(EXHAUSTIVE, "500")
@pytest.mark.parametrize(("drafter", "count"), [("eagle3", 60), ("ngram", 500), ("model", 500), ("eagle3", 500)])
def test_texts_of_json(drafter: str, count: int) -> None:
    with opened(DENSE, DRAFTERS[drafter], "graph") as llm:
        made = llm.generate(["x = "] * 4, json_schema=SCHEMA, max_new_tokens=200, temperature=1.0, seed=3, n=count // 4)
        assert llm.acceptance is not None
        assert sum(llm.acceptance.accepted) > count
    assert len(made) == count
    for each in made:
        values = json.loads(each.text)
        assert list(values) == ["name", "age", "tags"]
        assert len(values["name"]) <= 8
        assert 0 <= values["age"] <= 999
        assert set(values["tags"]) <= {"red", "green", "blue"}
