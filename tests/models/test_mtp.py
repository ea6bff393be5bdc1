"""Layers that predict further tokens, against a decoder layer of Hugging Face transformers on random checkpoints."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from helpers.comparison import TOLERANCE, difference, their_hidden
from helpers.random_predictors import FAMILIES, saved
from helpers.thorough import FAMILY, thorough
from torch import Tensor

import hal
from hal.checkpoint.model_registry import find_model
from hal.errors import BatchError, ModelError
from hal.nn import DraftLM
from hal.step import ALL, fields_of

SLACK = 3 * TOLERANCE
LENGTHS = (13, 1, 6)
STEPS = 4


@thorough(FAMILY, "Qwen3_5M|Glm4")
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_drafts_of_steps_that_change(tmp_path: Path, architecture: str, mode: str) -> None:
    """Prompts, then steps with the target's hidden states, and in the end one with the predictor's own."""
    theirs, reference = saved(tmp_path, architecture)
    compilation = {"compiler": mode} | ({} if mode == "eager" else {"capture_sizes": [1, 2, 4]})
    backend = hal.open({"backend": "cpu", "dtype": "float32", "compilation": compilation, "cache": {"num_tokens": 256}})
    target = hal.load_model(tmp_path, backend)
    model_class = find_model(architecture)
    assert issubclass(model_class, DraftLM)
    draft = hal.load_model(tmp_path, backend, model_class=model_class)
    assert isinstance(draft, DraftLM)
    table = weakref.ref(draft.base.embed_tokens.weight)
    draft.share(target)
    gc.collect()
    assert table() is None, "the draft's own table stays in memory"
    names = {name for name, each in draft.named_parameters() if any(each is other for other in target.parameters())}
    assert names == {"mtp.embed_tokens.weight"} | ({"lm_head.weight"} if not draft.tied else set())

    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(61, (length + STEPS,), generator=generator).tolist() for length in LENGTHS]
    with hal.Runner(target, backend) as runner:
        slots = {"slots": runner.slots.take(3)} if "slots" in fields_of(target.batch_type) else {}
        batch = runner.batch([text[:-1] for text in texts], [[1, 2], [3], [4]], **slots)
        hidden = list(runner.step(batch, ALL).hidden_states.clone().split([len(text) - 1 for text in texts]))
    assert difference(hidden, [their_hidden(theirs, text[:-1]) for text in texts]) <= SLACK

    runner, own = hal.Runner(draft, backend), torch.empty(0)
    found: list[list[Tensor]] = [[] for _ in texts]
    lengths = [0] * len(texts)
    for step in range(STEPS + 1):
        new = [len(text) - STEPS if step == 0 else 1 for text in texts]
        following = [text[at + 1 : at + 1 + count] or [7] for text, at, count in zip(texts, lengths, new, strict=True)]
        read = [each[at : at + count] for each, at, count in zip(hidden, lengths, new, strict=True)]
        if step == STEPS:
            read = [own]
        batch = runner.batch(following, [[1, 2], [3], [4]], cached=lengths, hidden_states=torch.cat(read))
        output = runner.step(batch, ALL)
        for rows, part in zip(found, output.logits.clone().split(new), strict=True):
            rows.append(part)
        own = output.hidden_states.clone()
        lengths = [at + count for at, count in zip(lengths, new, strict=True)]
        if step == STEPS - 1:
            kept = own
    for text, rows, exact, last in zip(texts, found, hidden, kept, strict=True):
        with torch.inference_mode():
            _, logits = reference(theirs, [*text[1:], 7], torch.cat([exact, last[None]]))
        assert difference([torch.cat(rows)], [logits]) <= SLACK


def test_a_batch_without_hidden_states_is_refused(tmp_path: Path, cpu: hal.Backend) -> None:
    saved(tmp_path, "Qwen3_5MTP")
    runner = hal.Runner(hal.load_model(tmp_path, cpu, model_class=find_model("Qwen3_5MTP")), cpu)
    with pytest.raises(BatchError, match="the field hidden_states of DraftBatch is missing"):
        runner.batch([[1, 2]], [[1]])


def test_an_embedding_of_its_own_is_refused(tmp_path: Path, cpu: hal.Backend) -> None:
    saved(tmp_path, "Qwen3_5MTP")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_use_dedicated_embeddings": True}), encoding="utf-8")
    with pytest.raises(ModelError, match="only the target's embedding is supported"):
        hal.load_model(tmp_path, cpu, model_class=find_model("Qwen3_5MTP"))
