"""Tests that what a model's layers choose is recorded and replayed: experts, and positions to attend to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_configs, transformers_families
from helpers.checkpoints import EXPERTS, random_checkpoint
from helpers.ranks import in_ranks
from helpers.thorough import EXHAUSTIVE, FAMILY, MODE, PROCESSES, thorough
from torch import Tensor
from transformers import AutoModelForCausalLM

import hal
from hal.errors import BatchError, ConfigError, ModelError
from hal.generation.llm.completion import Completion
from hal.nn import CausalLM, Choice, chosen, keep_choices
from hal.step import ALL

MIXTURE = Path("checkpoints/tiny-python-moe")
SPARSE = "DeepSeek-V3.2"
KEPT = {
    "Qwen3-MoE": ("experts",),
    SPARSE: ("experts", "positions"),
    "GLM-5.2": ("experts", "positions"),
    "DeepSeek-V4-Flash": ("experts",),
    "GLM-5.3-Flash": ("experts", "positions"),
    "MiniMax-M3": ("experts", "positions"),
    "Qwen3.8-Flash-Next": ("experts", "positions"),
}
"""What the layers of a random model choose, by the model's name."""
PROMPTS = [list(range(3, 45)), list(range(60, 30, -1)), [7, 8, 9]]
SAMPLING: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True, "logprobs": 0}


def checkpoint_of(name: str, folder: Path) -> Path:
    if name == "Qwen3-MoE":
        return random_checkpoint(folder / name, **EXPERTS)
    changes = {"index_topk": 8} if name in (SPARSE, "GLM-5.2") else {}
    return published_configs.write(folder / name, name, **changes)


def opened(folder: Path, compiler: str, dtype: str = "float32", **options: Any) -> hal.LLM:
    cache = {"block_size": 16, "num_tokens": 1024, "num_sequences": 10}
    config = {"cache": cache, **options.pop("config", {})}
    return hal.LLM(folder, backend="cpu", dtype=dtype, compiler=compiler, max_sequences=4, config=config, **options)


def both(texts: Sequence[Completion]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts and the new tokens of texts."""
    return [list(each.prompt_token_ids) for each in texts], [list(each.token_ids) for each in texts]


def largest(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max((one - two).abs().max().item() for one, two in zip(first, second, strict=True))


def altered(name: str, choices: Tensor, experts: int) -> Tensor:
    """Return other choices: the experts with the next numbers, or only the token's own position."""
    if name == "experts":
        return (choices.int() + 1) % experts
    own = torch.arange(len(choices)).view(-1, *[1] * (choices.dim() - 2))
    changed = torch.full_like(choices, -1)
    changed[..., 0] = own.expand(choices.shape[:-1])
    return changed


@thorough(FAMILY, r"-(GLM|DeepSeek-V4|MiniMax|Qwen3\.8)")
@thorough(MODE, r"\[(eager|piecewise)-(Qwen3-MoE|DeepSeek-V3\.2)")
@thorough(EXHAUSTIVE, r"\[(eager|piecewise)-(GLM|DeepSeek-V4|MiniMax|Qwen3\.8)")
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("compiler", ["graph", "eager", "piecewise"])
def test_own_choices_replayed_give_the_same_bits(compiler: str, name: str, tmp_path: Path) -> None:
    """Also of prompts in chunks. Each kind of choice that is altered changes the result."""
    kept, folder = KEPT[name], checkpoint_of(name, tmp_path)
    with opened(folder, compiler, record=kept, replay=kept, config={"max_prefill_tokens": 24}) as llm:
        texts = llm.generate(PROMPTS, **SAMPLING)
        pairs = both(texts)
        for text in texts:
            assert text.choices.keys() == set(kept)
            for tensor in text.choices.values():
                assert len(tensor) == len(text.prompt_token_ids) + len(text.token_ids) - 1
        plain = llm.log_probabilities(*pairs)
        choices = [each.choices for each in texts]
        assert all(map(torch.equal, llm.log_probabilities(*pairs, choices=choices), plain))
        generated = [torch.tensor([each.logprob for each in text.logprobs or ()]) for text in texts]
        assert largest(plain, generated) < 1e-4
        model = llm._runner.model
        assert model.choices is not None
        for kind in kept:
            bound = model.choices.kinds[kind].bound or 0
            others = [{kind: altered(kind, each[kind], bound)} for each in choices]
            assert largest(llm.log_probabilities(*pairs, choices=others), plain) > 1e-3
        # Tokens without given choices make their own.
        part = [{kind: each[kind][:5] for kind in kept} for each in choices]
        assert all(map(torch.equal, llm.log_probabilities(*pairs, choices=part), plain))


@pytest.mark.parametrize("name", [SPARSE])
def test_choices_do_not_depend_on_how_a_text_is_computed(name: str, tmp_path: Path) -> None:
    """A cached prefix, texts of one prompt, drafted tokens and chunks of a prompt: with equal bits, equal choices."""
    kept, folder, numerics = KEPT[name], checkpoint_of(name, tmp_path), {"numerics": {"invariant": True}}
    repeated = [[5, 6, 7, 8, 9, 10] * 7, PROMPTS[1]]
    found = []
    for options in (
        {"config": {**numerics, "cache": {"num_tokens": 1024, "reuse_prefixes": False}}},
        {"config": {**numerics, "max_prefill_tokens": 24}},
        {"config": numerics, "draft": {"method": "ngram", "tokens": 3, "adapt": False}},
    ):
        with opened(folder, "graph", record=kept, **options) as llm:
            for _ in range(2):  # The second time, prompts are cached if the configuration allows it.
                found.append(llm.generate(repeated, n=2, **{**SAMPLING, "temperature": 0.0}))
    for texts in found[1:]:
        for first, second in zip(found[0], texts, strict=True):
            assert first.token_ids == second.token_ids
            for kind in kept:
                assert torch.equal(first.choices[kind], second.choices[kind])


def test_positions_are_those_before_a_token(tmp_path: Path) -> None:
    """All that there are, or as many as the index selects, ascending; -1 follows."""
    with opened(checkpoint_of(SPARSE, tmp_path), "graph", record=["positions"]) as llm:
        (text,) = llm.generate(PROMPTS[:1], **SAMPLING)
    positions = text.choices["positions"]
    assert positions.shape[1:] == (3, 8)
    assert positions.dtype == torch.int32  # 163840 positions
    for token, layers in enumerate(positions.tolist()):
        for selected in layers:
            count = min(token + 1, 8)
            assert selected[count:] == [-1] * (8 - count)
            assert selected[:count] == sorted(set(selected[:count]))
            assert 0 <= selected[0] <= selected[count - 1] <= token


def test_experts_are_those_of_transformers(tmp_path: Path) -> None:
    folder = checkpoint_of("Qwen3-MoE", tmp_path)
    with opened(folder, "graph", record=["experts"]) as llm:
        (text,) = llm.generate(PROMPTS[:1], **SAMPLING)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = [*text.prompt_token_ids, *text.token_ids][:-1]
    with torch.no_grad():
        routed = reference(torch.tensor([tokens]), output_router_logits=True).router_logits
    wanted = torch.stack([each.topk(2).indices for each in routed], 1)
    assert text.choices["experts"].dtype == torch.uint8
    assert torch.equal(text.choices["experts"].long(), wanted)


def test_choices_of_a_rollout_in_bfloat16(tmp_path: Path) -> None:
    """A float32 pass with the experts of the rollout is closer to it than one that chooses again."""
    with opened(MIXTURE, "graph", "bfloat16", record=["experts"]) as rollout:
        prompts = [rollout.tokenizer.encode(each).ids for each in ("import os\n", "class Stack:\n", "for each in ")]
        texts = rollout.generate(prompts, **{**SAMPLING, "max_new_tokens": 64}, n=16)
    pairs, choices = both(texts), [each.choices for each in texts]
    generated = torch.tensor([token.logprob for text in texts for token in text.logprobs or ()])
    with opened(MIXTURE, "graph", record=["experts"], replay=["experts"]) as trainer:
        own, replayed = (
            (torch.cat(each) - generated).abs()
            for each in (trainer.log_probabilities(*pairs), trainer.log_probabilities(*pairs, choices=choices))
        )
    assert replayed.mean() < own.mean()
    assert replayed.max() < own.max()


def test_what_a_step_returns_and_takes(tmp_path: Path) -> None:
    """As an engine uses it, which owns the runner; and nothing without it."""
    folder = checkpoint_of("Qwen3-MoE", tmp_path)
    tokens = list(range(5, 25))
    with hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 512}}) as backend:
        plain = hal.Runner(hal.load_model(folder, backend), backend)
        before = plain.step(plain.batch([tokens], [[1, 2]]), ALL)
        assert not before.extra
        assert plain.choices is None
        logits = before.logits.clone()
        model = hal.load_model(folder, backend)
        keep_choices(model, record=["experts"], replay=["experts"])
        runner = hal.Runner(model, backend)
        output = runner.step(runner.batch([tokens], [[1, 2]]), ALL)
        experts = output.extra["experts"].clone()
        assert experts.shape == (20, 2, 2)
        assert torch.equal(output.logits, logits)
        assert runner.choices is not None
        assert torch.equal(runner.choices.read([1, 2], 20)["experts"].int(), experts)
        given = experts.roll(1, 0)
        output = runner.step(runner.batch([tokens], [[3, 4]], given_experts=given.flatten(1)), ALL)
        assert torch.equal(output.extra["experts"], given)
        assert not torch.equal(output.logits, logits)


@thorough(PROCESSES)
def test_two_ranks_choose_alike(tmp_path: Path) -> None:
    folder = checkpoint_of("Qwen3-MoE", tmp_path)
    one, two = in_ranks("chosen", 2, folder=str(folder))
    for name, tensor in one.items():
        assert torch.equal(two[name], tensor), name
    with hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 512}}) as backend:
        model = hal.load_model(folder, backend)
        keep_choices(model, record=["experts"], replay=["experts"])
        runner = hal.Runner(model, backend)
        step = runner.step(runner.batch([list(range(5, 25))], [[1, 2]]), ALL)
        assert torch.equal(one["own"], step.extra["experts"])
        assert torch.equal(one["given"], one["own"].roll(1, 0))
        assert not torch.allclose(one["logits"], one["other logits"])
    found, other = in_ranks("replayed_texts", 2, folder=str(folder), prompt=PROMPTS[0], text=PROMPTS[1])
    assert other is None
    assert torch.equal(found["own"], found["plain"])
    assert largest([found["altered"]], [found["plain"]]) > 1e-3
    with opened(folder, "eager", replay=["experts"]) as llm:
        (alone,) = llm.log_probabilities([PROMPTS[0]], [PROMPTS[1]], choices=[{"experts": found["experts"].flip(0)}])
    assert largest([alone], [found["altered"]]) < 1e-4


@thorough(FAMILY, "glm4_moe")
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_layers_of_transformers_record_and_replay(family: str, tmp_path: Path) -> None:
    """Where hal's router computes what theirs does."""
    transformers_families.model_of(family).save_pretrained(tmp_path)
    kept: dict[str, Any] = {"record": ["experts"], "replay": ["experts"]}
    found = []
    for source in ("hal", "transformers"):
        with opened(tmp_path, "graph", config={"model_source": source}, **kept) as llm:
            texts = llm.generate([[3, 5, 8, 13, 21]], **{**SAMPLING, "temperature": 0.0})
            pairs, choices = both(texts), [each.choices for each in texts]
            plain = llm.log_probabilities(*pairs)
            assert all(map(torch.equal, llm.log_probabilities(*pairs, choices=choices), plain))
            bound = llm._runner.model.choices.kinds["experts"].bound  # type: ignore[union-attr]
            others = [{"experts": altered("experts", each["experts"], bound or 0)} for each in choices]
            found.append((*pairs, choices[0]["experts"], llm.log_probabilities(*pairs, choices=others)))
            assert largest(found[-1][3], plain) > 1e-3
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])
    assert largest(found[0][3], found[1][3]) < 1e-4


@thorough(FAMILY)
def test_a_router_that_hal_does_not_compute_is_refused(tmp_path: Path) -> None:
    transformers_families.model_of("phimoe").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"record is \['experts'\]; .* choose nothing that hal computes"):
        opened(tmp_path, "eager", record=["experts"])


def test_what_is_refused(tmp_path: Path) -> None:
    dense, folder = random_checkpoint(tmp_path / "dense"), checkpoint_of(SPARSE, tmp_path)
    for given, why in (
        ({"record": ["experts"]}, r"record is \['experts'\]; layers of Qwen3ForCausalLM choose nothing"),
        ({"replay": "experts"}, "replay is 'experts'"),
    ):
        with pytest.raises(ConfigError, match=why):
            opened(dense, "eager", **given)
    with pytest.raises(ConfigError, match=r"'words'\]; layers of .* choose experts, positions"):
        opened(folder, "eager", record=["words"])
    with opened(folder, "eager", record=["experts"], replay=["experts", "positions"]) as llm:
        (text,) = llm.generate(PROMPTS[2:], **SAMPLING)
        pairs, experts = both([text]), text.choices["experts"]
        positions = torch.full((4, 3, 8), -1)
        positions[..., 0] = torch.tensor([0, 1, 3, 0])[:, None]
        repeated = experts.clone()
        repeated[2, 1, 3] = repeated[2, 1, 4]
        for choices, why in (
            ([], "for 1 sequences"),
            ([{"experts": experts[:, :1]}], r"uint8 \[14, 1, 8\]\n.*\['tokens', 2, 8\]"),
            ([{"experts": experts.float()}], r"float32 \[14, 2, 8\]"),
            ([{"experts": torch.cat([experts, experts])}], "for 28 tokens, and the sequence has 15"),
            ([{"experts": experts.int() + 16}], "experts of token 0 in layer 0 .*\n.*from 0 to 15, each once"),
            ([{"experts": repeated}], "experts of token 2 in layer 1"),
            ([{"positions": positions}], r"positions of token 2 in layer 0 are \[3, -1"),
            ([{"positions": positions[:2] * 0 - 1}], "positions of token 0"),
        ):
            with pytest.raises(BatchError, match=why):
                llm.log_probabilities(*pairs, choices=choices)  # type: ignore[arg-type]
        twice = [[*each, *each] for each in pairs]
        with pytest.raises(BatchError, match="not all for each sequence"):
            llm.log_probabilities(*twice, choices=[{"experts": experts}, {}])
        with pytest.raises(ConfigError, match="a prefix that travels does not have it"):
            llm.export_prefix(PROMPTS[0])
    refused = pytest.raises(ConfigError, match=r"replays nothing\n.*replay=\['experts'\]")
    with opened(folder, "eager", record=["experts"]) as llm, refused:
        llm.log_probabilities(*pairs, choices=[{"experts": experts}])


class Layer(torch.nn.Module):
    chooses = Choice("experts", (2,), 8)


class Forgetful(CausalLM):
    """A model of two layers, some of which say what they choose."""

    max_length = 64

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.layers, self.calls = torch.nn.ModuleList([Layer(), Layer()]), calls

    @classmethod
    def from_config(cls, config: Any) -> Any:
        raise NotImplementedError

    def forward(self, batch: Any, states: Any) -> Tensor:
        for layer in self.layers[: self.calls]:
            chosen(layer, torch.zeros(3, 2, dtype=torch.int32))
        return torch.zeros(3, 4)


def test_a_layer_that_does_not_say_what_it_chooses() -> None:
    right, wrong = (Forgetful(calls) for calls in (2, 1))
    for each in (right, wrong):
        keep_choices(each, record=["experts"])
    hidden, experts = right(None, ())
    assert (hidden.shape, experts.shape) == ((3, 4), (3, 2, 2))
    with pytest.raises(ModelError, match="1 of 2 layers of Forgetful did not use the experts"):
        wrong(None, ())
    assert chosen(right.layers[0], experts) is experts  # Outside of a step, nothing is kept.
