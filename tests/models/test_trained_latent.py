"""The trained checkpoint with latent attention and an index: against transformers, and with wrong selections."""

from __future__ import annotations

import pytest
import torch
from helpers import lookups
from helpers.lookups import FOLDER, RIGHT, WRONG, Selection, Text
from helpers.thorough import DTYPE, MODE, thorough

import hal

transformers = pytest.importorskip("transformers", reason="transformers is the reference")


@pytest.fixture(scope="module")
def asked() -> Text:
    return Text.of(hal.Checkpoint.open(FOLDER))


def open_runner(dtype: str, compiler: str) -> hal.Runner:
    compilation = {"compiler": compiler} | ({} if compiler == "eager" else {"capture_sizes": [1]})
    config = {"backend": "cpu", "dtype": dtype, "compilation": compilation, "max_prefill_tokens": 2560}
    backend = hal.open({**config, "cache": {"num_tokens": 2560, "block_size": 16}})
    return hal.Runner(hal.load_model(FOLDER, backend), backend)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def theirs(request: pytest.FixtureRequest, asked: Text) -> tuple[str, list[list[int]]]:
    """Return a dtype and the greedy answers of transformers in it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=getattr(torch, request.param)).eval()
    cache = transformers.DynamicCache(config=model.config)

    @torch.inference_mode()
    def read(tokens: list[int]) -> int:
        made = model(torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
        return int(made.logits[0, -1].argmax())

    read(asked.text)
    made = []
    for question, answer in zip(asked.questions, asked.answers, strict=True):
        made.append([read(question)])
        made[-1].extend(read(made[-1][-1:]) for _ in answer[1:])
        read(made[-1][-1:])
    return request.param, made


@thorough(MODE, r"\[\w+-graph-None")
@thorough(DTYPE, r"\[bfloat16-\w+-None")
@pytest.mark.parametrize("chunk", [None, 500])
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_answers_2000_tokens_later(
    theirs: tuple[str, list[list[int]]], asked: Text, compiler: str, chunk: int | None
) -> None:
    """They are those of transformers, of a text read whole or in chunks, and right."""
    dtype, wanted = theirs
    made = lookups.answered(open_runner(dtype, compiler), asked, chunk)
    assert made == wanted
    assert lookups.share(made, asked) >= RIGHT


@pytest.mark.parametrize("selection", Selection)
def test_wrong_selections_give_wrong_answers(asked: Text, selection: Selection) -> None:
    with lookups.selecting(selection):
        found = lookups.share(lookups.answered(open_runner("float32", "eager"), asked), asked)
    assert found >= RIGHT if selection is Selection.BEST else found <= WRONG, f"{selection.value}: {found:.0%} right"
