"""Layers that predict further tokens, against a decoder layer of Hugging Face transformers on random checkpoints."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.models.qwen3_mtp import HybridMTP
from helpers.comparison import TOLERANCE, difference, randomize, their_hidden
from helpers.random_hybrids import build
from helpers.thorough import FAMILY, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hal
from hal.checkpoint.model_registry import find_model
from hal.errors import BatchError, ModelError
from hal.step import ALL

FAMILIES = {"Qwen3NextMTP": "Qwen3Next", "Qwen3_5MTP": "Qwen3_5Text", "Qwen3_5MoeMTP": "Qwen3_5MoeText"}
SLACK = 3 * TOLERANCE
LENGTHS = (13, 1, 6)
STEPS = 4


class Reference(nn.Module):
    """The predictor in plain torch, of a decoder layer and norms of the target's classes."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        config, norm = target.config, type(target.model.norm)
        width = config.hidden_size
        self.layers = nn.ModuleList([type(target.model.layers[0])(config, config.layer_types.index("full_attention"))])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            norm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * width, width, bias=False)

    def forward(self, target: Any, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        base, count = target.model, len(tokens)
        embedding = base.embed_tokens(torch.tensor(tokens))
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))[None]
        x = self.layers[0](
            x,
            position_embeddings=base.rotary_emb(x, torch.arange(count)[None]),
            attention_mask=torch.full((count, count), -math.inf).triu(1)[None, None],
        )
        x = self.norm(x[0])
        return x, target.lm_head(x)


def saved(folder: Path, architecture: str) -> tuple[Any, Reference]:
    """Write a checkpoint of a target and its predictor, and return both in transformers' classes."""
    sparse: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []} if "Next" in architecture else {}
    target = build(folder, FAMILIES[architecture], 1, **sparse)
    reference = Reference(target).eval()
    randomize(reference, 2)
    path = folder / "model.safetensors"
    tensors = load_file(path) | {f"mtp.{name}": each.clone() for name, each in reference.state_dict().items()}
    if architecture == "Qwen3_5MoeMTP":  # as in the published models, which also read images
        tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
        tensors["model.visual.blocks.0.norm.weight"] = torch.ones(4)
        text = json.loads((folder / "config.json").read_text())
        keys = {"architectures": ["Qwen3_5MoeForCausalLM"], "text_config": text}
        (folder / "config.json").write_text(json.dumps(keys))
    save_file(tensors, path)
    return target, reference


@thorough(FAMILY, "Qwen3_5M")
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_drafts_of_steps_that_change(tmp_path: Path, architecture: str, mode: str) -> None:
    """Prompts, then steps with the target's hidden states, and in the end one with the predictor's own."""
    theirs, reference = saved(tmp_path, architecture)
    compilation = {"compiler": mode} | ({} if mode == "eager" else {"capture_sizes": [1, 2, 4]})
    backend = hal.open({"backend": "cpu", "dtype": "float32", "compilation": compilation, "cache": {"num_tokens": 256}})
    target = hal.load_model(tmp_path, backend)
    model_class = find_model(architecture)
    assert issubclass(model_class, HybridMTP)
    draft = hal.load_model(tmp_path, backend, model_class=model_class)
    assert isinstance(draft, HybridMTP)
    table = weakref.ref(draft.mtp.embed_tokens.weight)
    draft.share(target)
    gc.collect()
    assert table() is None, "the draft's own table stays in memory"
    names = {name for name, each in draft.named_parameters() if any(each is other for other in target.parameters())}
    assert names == {"mtp.embed_tokens.weight"} | ({"lm_head.weight"} if not draft.tied else set())

    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(61, (length + STEPS,), generator=generator).tolist() for length in LENGTHS]
    with hal.Runner(target, backend) as runner:
        batch = runner.batch([text[:-1] for text in texts], [[1, 2], [3], [4]], slots=runner.slots.take(3))
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
