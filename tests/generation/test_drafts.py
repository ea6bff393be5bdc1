"""Speculative decoding: the texts, log-probabilities and ends are those without drafts, whatever drafts them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_configs
from helpers.comparison import their_hidden
from helpers.random_hybrids import build
from helpers.random_predictors import FAMILIES, saved, saved_eagle
from helpers.thorough import EXHAUSTIVE, FAMILY, MODE, spread, thorough
from safetensors.torch import load_file, save_file

import hal
from hal.errors import ConfigError
from hal.generation.drafting.draft_length import AGAIN, DraftLength
from hal.generation.drafting.draft_model import UNDRAFTED, ModelDrafter
from hal.generation.drafting.drafter import Drafts
from hal.generation.drafting.ngram import NgramOptions, TextIndex

SEED = random.randrange(1 << 30)
CHECKPOINTS = Path("checkpoints")
DENSE, HYBRID, SPARSE, LATENT = (CHECKPOINTS / f"tiny-python{kind}" for kind in ("", "-hybrid", "-moe", "-latent"))
TEXTS = (
    "def read_lines(path):",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport os\nimport",
    "for i in range(10):\n    print(i)\nfor i in",
    "x = [1, 2, 3, 1, 2, 3, 1, 2",
)
SELF: dict[str, Any] = {"method": "model", "model": str(DENSE), "tokens": 3, "adapt": False}
EAGLE: dict[str, Any] = {"method": "eagle3", "model": str(CHECKPOINTS / "tiny-python-eagle3"), "adapt": False}
MTP: dict[str, Any] = {"method": "mtp", "tokens": 3, "adapt": False}
NGRAM: dict[str, Any] = {"method": "ngram", "tokens": 5, "adapt": False}
PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "seed": 11, "logprobs": 3},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 1},
    {"presence_penalty": 1.0, "logprobs": 0},
    {"stop": ["\n\n", "return"], "min_new_tokens": 9},
    {"bad_words": ["self", "import"], "temperature": 0.5, "seed": 2},
    {"logit_bias": {40: 2.5, 41: -100.0}, "min_new_tokens": 20},
)


def answers(
    checkpoint: Path, draft: Mapping[str, Any] | None, compiler: str = "eager", **config: Any
) -> tuple[list[tuple[Any, ...]], hal.LLM]:
    """Return what requests with all kinds of parameters get, together, and the LLM, which is closed."""
    with hal.LLM(
        checkpoint,
        backend="cpu",
        dtype="float32",
        compiler=compiler,
        max_sequences=16,
        max_length=256,
        draft=draft,
        config=config,
    ) as llm:
        found = []
        asked = [{"temperature": 0, "max_new_tokens": 30, **PARAMETERS[index % len(PARAMETERS)]} for index in range(10)]
        with ThreadPoolExecutor(10) as pool:
            made = pool.map(lambda index: llm.generate(TEXTS[index % len(TEXTS)], **asked[index])[0], range(10))
        for each in made:
            likely = None if each.logprobs is None else [one.logprob for one in each.logprobs]
            found.append((each.token_ids, each.text, each.finish_reason, likely))
        return found, llm


def assert_same(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    for is_, of in zip(found, expected, strict=True):
        assert is_[:3] == of[:3]
        assert is_[3] == (of[3] if of[3] is None else pytest.approx(of[3], abs=1e-4))


@cache
def undrafted(checkpoint: Path, compiler: str) -> list[tuple[Any, ...]]:
    return answers(checkpoint, None, compiler)[0]


@thorough(MODE, "graph|piecewise|moe|latent|hybrid-eagle3")
@spread
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
@pytest.mark.parametrize(
    ("checkpoint", "draft"),
    [
        (DENSE, NGRAM),
        (DENSE, SELF),
        (DENSE, EAGLE),
        (HYBRID, NGRAM),
        (HYBRID, SELF),
        (HYBRID, MTP),
        (HYBRID, EAGLE | {"model": f"{HYBRID}-eagle3"}),
        (SPARSE, NGRAM),
        (LATENT, NGRAM),
    ],
    ids=lambda each: each.name if isinstance(each, Path) else each["method"],
)
def test_texts_are_those_without_drafts(checkpoint: Path, draft: dict[str, Any], compiler: str) -> None:
    found, llm = answers(checkpoint, draft, compiler)
    assert_same(found, undrafted(checkpoint, compiler))
    assert llm.acceptance is not None
    assert sum(llm.acceptance.accepted) > 40, llm.acceptance


@pytest.mark.parametrize("checkpoint", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_graphs_hold_the_steps_that_verify(checkpoint: Path) -> None:
    with hal.LLM(checkpoint, backend="cpu", compiler="graph", max_length=64, max_sequences=2, draft=NGRAM) as llm:
        assert llm._runner.captured_queries == (1, 1 + NGRAM["tokens"])


def test_a_head_lets_go_of_a_text_without_drafts() -> None:
    """It would need all hidden states of the text. The next text gets drafts."""
    held: list[int] = []
    with hal.LLM(DENSE, backend="cpu", dtype="float32", max_length=256, draft=EAGLE | {"examine": False}) as llm:
        assert llm._speculation is not None
        drafter, length = llm._speculation.drafter, llm._speculation._length
        assert isinstance(drafter, ModelDrafter)
        ran, choose = drafter.ran, length.choose

        def noted(*args: Any) -> None:
            ran(*args)
            held.append(len(drafter._rows))

        drafter.ran, length.choose = noted, lambda texts: 0  # type: ignore[method-assign]
        llm.generate(TEXTS[0], max_new_tokens=UNDRAFTED + 9, ignore_eos=True)
        length.choose = choose  # type: ignore[method-assign]
        llm.generate(TEXTS[0], max_new_tokens=9, ignore_eos=True)
        assert llm.acceptance is not None
        assert sum(llm.acceptance.drafted) > 0
    assert held[0] == held[UNDRAFTED - 1] == 1
    assert held[UNDRAFTED + 1] == 0


PREDICTORS = (*(each for each in FAMILIES if "Qwen3_5Moe" not in each), "eagle3", "eagle3 of all tokens")


@thorough(FAMILY, "Qwen3_5|Glm4|V3MTP|all")
@spread
@pytest.mark.parametrize("architecture", PREDICTORS)
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_drafts_of_a_layer_that_reads_hidden_states(tmp_path: Path, architecture: str, compiler: str) -> None:
    """Random weights agree on nothing, so the drafts of each step are compared with those of a layer in plain torch."""
    path, draft = tmp_path, dict[str, Any]({"method": "mtp", "tokens": 3, "adapt": False, "examine": False})
    target: Any
    reference: Any
    if "eagle3" in architecture:
        target, reference = saved_eagle(tmp_path, whole="all" in architecture)
        path, draft = tmp_path / "target", draft | {"method": "eagle3", "model": str(tmp_path / "head")}
    else:
        target, reference = saved(tmp_path, architecture)
    prompts = [[5, 9, 3, 7, 11], [4], list(range(2, 40))]
    texts, proposed = [], list[tuple[list[int], list[int]]]()
    for each in (None, draft):
        with hal.LLM(path, backend="cpu", dtype="float32", compiler=compiler, max_length=64, draft=each) as llm:
            if llm._speculation is not None:
                propose = llm._speculation.drafter.propose

                def noted(requests: Any, most: int, propose: Any = propose) -> Any:
                    found = propose(requests, most).on_host()
                    proposed.extend(zip([list(each.tokens) for each in requests], found.tokens, strict=True))
                    return found

                llm._speculation.drafter.propose = noted  # type: ignore[method-assign]
            texts.append([each.token_ids for each in llm.generate(prompts, max_new_tokens=20, temperature=0)])
    assert texts[0] == texts[1]
    assert len(proposed) > 30
    for tokens, drafts in proposed[::5]:
        read = getattr(reference, "start", their_hidden)
        with torch.no_grad():
            hidden = read(target, tokens[:-1])
            for count, drafted in enumerate(drafts):
                states, logits = reference(target, [*tokens[1:], *drafts[:count]], hidden)
                assert logits[-1].max() - logits[-1, drafted] < 1e-3, (tokens, drafts, count)
                hidden = torch.cat([hidden, states[-1:]])


@thorough(EXHAUSTIVE, "graph-[GQ]")
@thorough(FAMILY, "graph-D|eager-[GQ]")
@pytest.mark.parametrize("family", ["GLM-5.3-Flash", "DeepSeek-V4-Flash", "Qwen3.8-Flash-Next"])
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_states_of_groups_and_n_grams_are_rolled_back(tmp_path: Path, family: str, compiler: str) -> None:
    """Rejected drafts have written the rows of an incomplete group, completed groups, and the tokens of n-grams."""
    path, draw = published_configs.write(tmp_path / "model", family), random.Random(SEED)
    print(f"seed {SEED}")  # noqa: T201 - pytest prints it with a failure
    prompts = [[5, 9, 3, 7, 11], [4], list(range(2, 40)), [8, 1, 8, 2]]
    given = {"backend": "cpu", "dtype": "float32", "compiler": compiler, "max_length": 128}
    params = hal.SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)
    with hal.LLM(path, **given) as llm:
        expected = [each.token_ids for each in llm.generate(prompts, params)]
    texts = [(*prompt, *made) for prompt, made in zip(prompts, expected, strict=True)]

    def partly_right(requests: Any, most: int) -> Drafts:
        """Propose the text's next tokens, of which one may be wrong."""
        tokens = []
        for each in requests:
            own = tuple(each.tokens)
            text = next((each for each in texts if each[: len(own)] == own), own)
            right = list(text[len(own) : len(own) + draw.randint(0, most)])
            if right:
                at = draw.randrange(len(right))
                right[at] = (right[at] + draw.randint(0, 1)) % 40
            tokens.append(right)
        return Drafts(list(map(len, tokens)), tokens)

    with hal.LLM(path, draft=NGRAM, **given) as llm:
        assert llm._speculation is not None
        llm._speculation.drafter.propose = partly_right  # type: ignore[method-assign]
        assert [each.token_ids for each in llm.generate(prompts, params)] == expected
        assert llm.acceptance is not None
        assert 40 < sum(llm.acceptance.accepted) < sum(llm.acceptance.drafted)


def test_prefixes_and_few_blocks() -> None:
    """Prompts that share prefixes, more than fit the cache at once, get the tokens of one after another."""
    cache = {"num_tokens": 320, "reuse_prefixes": True}
    common = "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"
    prompts = [f"{common}\n    def {name}(self):" for name in ("read", "close", "open", "read", "write", "lines")]
    for checkpoint, draft, more in ((DENSE, SELF, {}), (DENSE, NGRAM, {}), (HYBRID, NGRAM, {"saved_states": 4})):
        given = {"backend": "cpu", "dtype": "float32", "config": {"cache": {**cache, **more}}, "max_length": 128}
        found = []
        for each in (None, draft):
            with hal.LLM(checkpoint, draft=each, **given) as llm:
                for _ in range(2):
                    found.append([one.token_ids for one in llm.generate(prompts, max_new_tokens=40, temperature=0)])
        assert found[0] == found[1] == found[2] == found[3], (checkpoint, draft)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize("draft", [NGRAM, SELF], ids=["ngram", "model"])
def test_texts_follow_their_grammar(draft: dict[str, Any]) -> None:
    texts = []
    for each in (None, draft):
        with hal.LLM(DENSE, backend="cpu", dtype="float32", max_length=256, draft=each) as llm:
            params = {"json_schema": SCHEMA, "max_new_tokens": 60, "temperature": 1.0, "seed": 7, "n": 8}
            made = llm.generate(["x =", "{"], **params) + llm.generate(["x ="], regex="(ab|cd)+e", max_new_tokens=40)
            texts.append([(one.token_ids, one.text) for one in made])
    assert texts[0] == texts[1]


def test_a_mask_of_the_caller_sees_no_drafts() -> None:
    """It may count its calls, so that it is called once for each token."""
    seen: list[list[int]] = []

    def mask(generated: Any) -> torch.Tensor:
        seen.append(list(generated))
        return allowed

    with hal.LLM(DENSE, backend="cpu", dtype="float32", draft=NGRAM, max_length=128) as llm:
        words = -(-llm._runner.model.vocab_size // 32)
        allowed = torch.full((words,), -1, dtype=torch.int32)
        params = hal.SamplingParams(max_new_tokens=30, mask=mask)
        made = llm.generate(TEXTS[2], params)[0].token_ids
    assert seen == [list(made[:count]) for count in range(30)]


@pytest.mark.parametrize(
    ("draft", "error"),
    [
        ({"method": "model", "model": str(CHECKPOINTS / "tiny-pictures")}, "another vocabulary"),
        ({"method": "model", "model": str(HYBRID)}, "keeps .* per sequence"),
        ({"method": "model"}, "draft.model is not set"),
        ({"method": "eagle3"}, "draft.model is not set"),
        ({"method": "eagle3", "model": str(DENSE)}, "is of Qwen3ForCausalLM, which is no head of EAGLE-3"),
        ({"method": "mtp"}, "no layer that predicts further tokens for Qwen3ForCausalLM"),
        ({"method": "ngram", "model": "x"}, "ngram reads no model"),
        ({"method": "ngram", "options": {"shortest": 6}}, "shortest is 6, and longest 5"),
        ({"method": "ngram", "tokens": 0}, "tokens must be"),
        ({"method": "ngram", "tokens": 33}, "tokens must be"),
        ({"method": "ngrams"}, "ngram"),
        ({"method": "ngram", "token": 3}, "tokens"),
    ],
)
def test_what_is_refused(draft: dict[str, Any], error: str) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    with pytest.raises(ConfigError, match=error):
        hal.LLM(DENSE, backend="cpu", draft=draft, progress=never)


def test_a_checkpoint_without_its_layer(tmp_path: Path) -> None:
    build(tmp_path, "Qwen3Next", 1)
    with pytest.raises(ConfigError, match=r"has no tensors of a layer .* \(mtp\.fc\.weight\)"):
        hal.LLM(tmp_path, backend="cpu", draft="mtp")


@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_an_index_finds_what_a_search_finds(seed: int) -> None:
    draw, options = random.Random(seed), NgramOptions(2, 4)
    index, tokens = TextIndex(options), [draw.randrange(4) for _ in range(3)]
    for _ in range(200):
        tokens += [draw.randrange(4) for _ in range(draw.choice((1, 1, 3)))]
        expected: list[int] = []
        for size in (4, 3, 2):
            ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
            if ends:
                whole = list(tokens)
                for place in range(6):
                    whole.append(whole[ends[-1] + place])
                expected = whole[len(tokens) :]
                break
        assert index.following(tokens, 6) == expected, f"seed {seed}"


def planted(folder: Path, fault: str) -> Path:
    """Write the dense checkpoint with a fault of its wiring."""
    shutil.copytree(DENSE, folder)
    weights = load_file(folder / "model.safetensors")
    if fault == "random":
        draw = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(each.shape, generator=draw).to(each.dtype) for name, each in weights.items()}
    elif fault == "embedding":
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, 0)
    else:
        one, other = {"norms": ("input_layernorm", "post_attention_layernorm"), "layers": (".0.", ".1.")}[fault]
        swapped = {name.replace(one, other): each for name, each in weights.items() if one in name}
        swapped |= {name.replace(other, one): each for name, each in weights.items() if other in name}
        weights |= {name: each.clone() for name, each in swapped.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("fault", ["", "random", "embedding", "norms", "layers"])
def test_a_drafter_that_does_not_fit(fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Texts do not show it: the model corrects each draft."""
    model = planted(tmp_path / "drafter", fault) if fault else DENSE
    with hal.LLM(DENSE, backend="cpu", dtype="float32", max_length=128, max_sequences=1, draft=str(model)):
        pass
    assert ("the drafter does not fit the model" in caplog.text) == bool(fault)


def test_acceptance_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    """Less than half of what was stated is a warning, once."""
    with hal.LLM(DENSE, backend="cpu", dtype="float32", max_length=256, draft=NGRAM) as llm:
        assert llm._speculation is not None
        llm._speculation._expected = 0.99
        llm.generate(["x = [1, 2, 3,"] * 16, max_new_tokens=150, temperature=1.1, seed=1)
        rate = llm.acceptance.rate if llm.acceptance else 1.0
    assert caplog.text.count("were to be expected") == (rate < 0.99 / 2) == 1


class TestDraftLength:
    def played(self, accepts: float, costs: float, *, texts: int = 1, steps: int = 400) -> tuple[list[int], float]:
        """Return the lengths of steps that take 1, and ``costs`` for each drafted token; and tokens a unit of time."""
        draw, chosen = random.Random(1), []
        length, time, tokens = DraftLength(range(1, 6), adapt=True), 0.0, 0
        for _ in range(steps):
            count = length.choose(texts)
            right = next((place for place in range(count) if draw.random() >= accepts), count)
            length.counted(count, right)
            length.measured(texts, count, 1 + costs * count)
            chosen.append(count)
            time, tokens = time + 1 + costs * count, tokens + 1 + right
        return chosen, tokens / time

    def test_cheap_and_right_drafts_are_long(self) -> None:
        chosen, rate = self.played(0.95, 0.02)
        assert chosen[-1] == 5
        assert rate > 3.5

    @pytest.mark.parametrize(("accepts", "costs"), [(0.0, 0.1), (0.1, 0.5), (0.0, 2.0)])
    def test_drafts_that_do_not_pay_end(self, accepts: float, costs: float) -> None:
        chosen, rate = self.played(accepts, costs)
        assert chosen.count(0) > 390
        assert rate > 0.98

    def test_the_length_between(self) -> None:
        """At 0.6 and 0.25, one to three tokens give most: 1.28, 1.31, 1.24 a unit of time."""
        chosen, _ = self.played(0.6, 0.25)
        assert set(chosen[3 * AGAIN :]) & {1, 2, 3}
        assert max(chosen[3 * AGAIN :]) <= 3


@pytest.mark.parametrize(
    ("keys", "tensors", "error"),
    [
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}},
            {},
            "reads the input of layer 4, ",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}}, {}, "needs them in ascending order"),
        (
            {"target_hidden_size": 64},
            {"fc.weight": torch.ones(192, 192)},
            "reads states of 64 features",
        ),
        ({"num_hidden_layers": 2}, {}, "has one layer"),
        ({"draft_vocab_size": 5000}, {}, "draft_vocab_size, 5000, exceeds vocab_size, 4096"),
        ({"norm_output": True}, {}, "norm_output"),
        ({"vocab_size": 5000}, {}, "another vocabulary"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state"),
        ({}, {"embed_tokens.weight": torch.ones(4096, 192)}, "another embedding"),
        ({}, {"d2t": torch.zeros(2048, dtype=torch.long) - 1}, "with a token twice, or outside"),
        ({}, {"d2t": torch.zeros(7, dtype=torch.long)}, r"d2t of \[7\], and drafts 2048 tokens"),
    ],
)
def test_heads_that_do_not_fit(tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], error: str) -> None:
    shutil.copytree(EAGLE["model"], tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8")) | keys
    (tmp_path / "head" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path = tmp_path / "head" / "model.safetensors"
    save_file(load_file(path) | tensors, path)
    with pytest.raises(hal.errors.HalError, match=error):
        hal.LLM(DENSE, backend="cpu", draft=EAGLE | {"model": str(tmp_path / "head")})
