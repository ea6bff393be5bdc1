"""Adapters of PEFT: applied, they give what merged weights give, alone and together, and while they change."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers import transformers_families
from helpers.adapters import ALL, ATTENTION, adapter_of, merged
from helpers.checkpoints import random_checkpoint
from helpers.ranks import in_ranks
from helpers.thorough import FAMILY, MODE, thorough
from helpers.tiny_transformers import generate, model_of, prompts_of
from helpers.waiting import until
from safetensors.torch import load_file, save_file

import hal
from hal.checkpoint.adapters import make_room
from hal.errors import AsleepError, BatchError, CheckpointError, ConfigError
from hal.nn import Experts
from hal.quantize.quantize_checkpoint import quantize_checkpoint

NEW = 8
PROMPTS = prompts_of(9, 5, 21, 3)
CONFIG: dict[str, Any] = {"cache": {"num_tokens": 2048, "block_size": 8}}


@attrs.frozen
class Adapted:
    """A checkpoint, folders of adapters by name, and the tokens of :data:`PROMPTS` with each merged; None for none."""

    base: Path
    folders: dict[str, Path]
    tokens: dict[str | None, list[list[int]]]

    def open(self, *names: str, compiler: str = "graph", **given: Any) -> hal.LLM:
        chosen = {name: self.folders[name] for name in names or self.folders}
        return hal.LLM(
            self.base,
            backend="cpu",
            dtype="float32",
            compiler=compiler,
            adapters=chosen,
            config=CONFIG | given.pop("config", {}),
            **given,
        )


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapted")
    model = model_of("Qwen3")
    model.save_pretrained(folder / "base")
    tokens: dict[str | None, list[list[int]]] = {None: _generated(model)}
    kinds: list[dict[str, Any]] = [
        {"targets": ALL, "rank": 8},
        {"targets": ("q_proj", "v_proj"), "rank": 4, "rooted": True},
        {"targets": ("down_proj",), "rank": 1, "alpha": 2},
        {"targets": ATTENTION, "rank": 2, "rank_pattern": {"k_proj": 5}, "alpha_pattern": {"q_proj": 3}},
    ]
    folders = {}
    for seed in range(8):
        name = f"adapter-{seed}"
        folders[name] = folder / name
        with merged(model, adapter_of(model, folders[name], seed=seed, **kinds[seed % 4])):
            tokens[name] = _generated(model)
    return Adapted(folder / "base", folders, tokens)


@pytest.fixture(scope="module")
def routed(trained_experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """Adapters of routed experts, whose merged weights are those of other checkpoints."""
    folder = tmp_path_factory.mktemp("routed")
    weights = {name: each.float() for name, each in load_file(trained_experts / "model.safetensors").items()}
    tokens: dict[str | None, list[list[int]]] = {}
    folders: dict[str, Path] = {}
    for seed, targets in enumerate(((), ALL, ("gate_proj", "down_proj"), ("up_proj",), ATTENTION)):
        name, changed = f"adapter-{seed}", dict[str, torch.Tensor]()
        if targets:
            folders[name] = folder / name
            changed = adapter_of(weights, folders[name], targets, rank=1 + seed, seed=seed)
        whole = shutil.copytree(trained_experts, folder / "merged" / name)
        merged_weights = {f"{module}.weight": weights[f"{module}.weight"] + each for module, each in changed.items()}
        save_file(weights | merged_weights, whole / "model.safetensors")
        with hal.LLM(whole, backend="cpu", dtype="float32", config=CONFIG) as llm:
            tokens[name if targets else None] = _tokens(llm, None)
    assert len({str(each) for each in tokens.values()}) == 5
    return Adapted(folder / "merged" / "adapter-0", folders, tokens)


def _generated(model: Any) -> list[list[int]]:
    return [found[-NEW:] for found in generate(model, PROMPTS, NEW)]


def _tokens(llm: hal.LLM, adapter: str | None, prompts: Any = PROMPTS) -> list[list[int]]:
    found = llm.generate(prompts, adapter=adapter, max_new_tokens=NEW, temperature=0, ignore_eos=True)
    return [list(each.token_ids) for each in found]


@thorough(MODE, r"eager|piecewise")
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
def test_applied_equals_merged_alone_and_together(adapted: Adapted, compiler: str) -> None:
    """The prefixes of earlier adapters stay in the cache, and eight adapters share the batches of the threads."""
    with adapted.open(compiler=compiler) as llm:
        assert llm.adapters == list(adapted.folders)
        for name in (None, *adapted.folders, None):
            assert _tokens(llm, name) == adapted.tokens[name], name
        with ThreadPoolExecutor(18) as pool:
            jobs = [
                (name, place, pool.submit(_tokens, llm, name, [PROMPTS[place]]))
                for place in range(len(PROMPTS))
                for name in (None, *adapted.folders)
            ]
            for name, place, job in jobs:
                assert job.result() == [adapted.tokens[name][place]], (name, place)


def test_adapters_are_loaded_anew_and_removed_at_run_time(adapted: Adapted) -> None:
    names = list(adapted.folders)
    with adapted.open(names[0], config={"adapters": {"slots": 2, "rank": 8}}) as llm:
        for folder in names[1:]:
            llm.load_adapter("style", adapted.folders[folder])
            assert _tokens(llm, "style") == adapted.tokens[folder]
            assert _tokens(llm, names[0]) == adapted.tokens[names[0]]
        with pytest.raises(ConfigError, match="all 2 slots of adapters are taken"):
            llm.load_adapter("third", adapted.folders[names[2]])
        llm.remove_adapter("style")
        assert llm.adapters == [names[0]]
        with pytest.raises(ConfigError, match="no adapter 'style'"):
            _tokens(llm, "style")
        llm.load_adapter("third", adapted.folders[names[2]])
        assert _tokens(llm, "third") == adapted.tokens[names[2]]
        assert _tokens(llm, None) == adapted.tokens[None]


@pytest.mark.parametrize("weights", ["host", "files", "none"])
def test_adapters_sleep_with_the_model(adapted: Adapted, weights: Any) -> None:
    """Those that give back their memory are read from their folders again."""
    first, second = list(adapted.folders)[:2]
    with adapted.open(first) as llm:
        adapters = llm._runner.model.adapters
        user = adapters.take(first)
        with pytest.raises(BatchError, match="requests use adapters") if weights != "host" else nullcontext():
            llm.sleep(weights=weights)
        llm.wake()
        user.give_back()
        llm.sleep(weights=weights)
        with pytest.raises(AsleepError):
            llm.load_adapter("style", adapted.folders[second])
        if weights != "host":
            with torch.inference_mode():
                for each in adapters.tensors:
                    each.fill_(7)
        llm.wake()
        if weights == "none":
            llm.replace_weights(adapted.base)
        assert _tokens(llm, first) == adapted.tokens[first]
        llm.load_adapter("style", adapted.folders[second])
        assert _tokens(llm, "style") == adapted.tokens[second]


def test_running_requests_keep_their_adapter(adapted: Adapted) -> None:
    first, second = list(adapted.folders)[:2]
    long: dict[str, Any] = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    with adapted.open(first) as llm, ThreadPoolExecutor(1) as pool:
        expected = llm.generate([PROMPTS[0]], adapter=first, **long)[0].token_ids
        running = pool.submit(llm.generate, [PROMPTS[0]], adapter=first, **long)
        until(lambda: llm.occupancy.running > 0)
        llm.load_adapter(first, adapted.folders[second])
        assert not running.done()
        assert _tokens(llm, first) == adapted.tokens[second]
        assert running.result()[0].token_ids == expected
        llm.load_adapter(first, adapted.folders[first])  # Its former slot is free again.
        assert _tokens(llm, first) == adapted.tokens[first]


def test_scores_are_those_of_merged_weights(adapted: Adapted) -> None:
    name = next(iter(adapted.folders))
    with adapted.open(name) as llm:
        whole = [*PROMPTS[0], *adapted.tokens[name][0]]
        [score] = llm.score([PROMPTS[0]], [adapted.tokens[name][0]], adapter=name)
        [completion] = llm.generate([whole], adapter=name, prompt_logprobs=0, max_new_tokens=1, temperature=0)
        [plain] = llm.score([PROMPTS[0]], [adapted.tokens[name][0]])
        assert completion.prompt_logprobs is not None
        scores = torch.tensor([each.logprob for each in score.tokens])
        torch.testing.assert_close(
            scores, torch.tensor([each.logprob for each in completion.prompt_logprobs[-NEW:]]), rtol=0, atol=1e-5
        )
        assert score.logprob - plain.logprob > 1


def test_generate_of_a_runner_takes_adapters(adapted: Adapted) -> None:
    names = list(adapted.folders)[:3]
    config = hal.Config(backend="cpu", dtype="float32", adapters=hal.AdaptersConfig(slots=3, rank=8))
    params = hal.SamplingParams(max_new_tokens=NEW)
    with hal.open(config, activate=False) as backend:
        model = hal.load_model(adapted.base, backend)
        for name in names:
            model.adapters.load(name, adapted.folders[name])
        with hal.Runner(model, backend) as runner:
            each: list[str | None] = [None, *names]
            found: dict[int, list[int]] = {}
            for token in hal.generate(runner, PROMPTS, params, adapters=each):
                found.setdefault(token.prompt_index, []).append(token.token_id)
            assert found == {index: adapted.tokens[name][index] for index, name in enumerate(each)}


@thorough(MODE, "eager")
@pytest.mark.parametrize("compiler", ["graph", "eager"])
def test_routed_experts_take_adapters(routed: Adapted, compiler: str) -> None:
    with routed.open(compiler=compiler) as llm, ThreadPoolExecutor(5) as pool:
        names = [None, *routed.folders]
        for name, found in zip(names, pool.map(lambda name: _tokens(llm, name), names), strict=True):
            assert found == routed.tokens[name], name
        llm.load_adapter("adapter-1", routed.folders["adapter-2"])
        assert _tokens(llm, "adapter-1") == routed.tokens["adapter-2"]


def test_experts_without_room_name_the_key(routed: Adapted) -> None:
    with pytest.raises(CheckpointError, match=r"experts take some with adapters\.experts") as error:
        routed.open("adapter-1", config={"adapters": {"experts": False}})
    assert "or set adapters.experts to true" in error.value.remedy


def test_experts_that_ranks_hold_whole_take_no_adapters(trained_experts: Path) -> None:
    with hal.open({"backend": "cpu", "dtype": "float32"}, activate=False) as backend:
        model = hal.load_model(trained_experts, backend)
        for each in model.modules():
            if isinstance(each, Experts):
                each.distribute("all_gather", backend.mesh)
        room = hal.AdaptersConfig(slots=1, experts=True)
        backend.configure(attrs.evolve(backend.config, adapters=room))
        with pytest.raises(ConfigError, match="ranks that hold whole experts do not know the adapters") as error:
            make_room(model, backend, torch.float32)
        assert error.value.key == "adapters.experts"


@thorough(MODE, "eager|adapted")
@pytest.mark.parametrize("compiler", ["graph", "eager"])
@pytest.mark.parametrize("model", ["adapted", "routed"])
def test_two_ranks_split_adapters(request: pytest.FixtureRequest, model: str, compiler: str) -> None:
    adapted: Adapted = request.getfixturevalue(model)
    on = {"backend": "cpu", "dtype": "float32", "compilation": {"compiler": compiler}}
    given = {name: str(adapted.folders[name]) for name in list(adapted.folders)[:4]}
    arguments: dict[str, Any] = {"folders": given, "prompts": PROMPTS, "new": NEW, "on": on}
    found, other = in_ranks("adapted_texts", 2, base=str(adapted.base), **arguments)
    assert other == {}
    assert {name: found[name] for name in given} == {name: adapted.tokens[name] for name in given}
    assert found["none"] == adapted.tokens[None]
    first, second, *others = given
    assert found["changed"] == found["after"] == adapted.tokens[second]
    assert found["refused"]
    assert found["names"] == [first, *others]


def test_drafts_change_no_text(adapted: Adapted) -> None:
    with adapted.open(draft="ngram") as llm, ThreadPoolExecutor(4) as pool:
        names = [None, *list(adapted.folders)[:3]]
        for name, found in zip(names, pool.map(lambda name: _tokens(llm, name), names), strict=True):
            assert found == adapted.tokens[name], name


@thorough(MODE, "w8a8_dynamic|fp8")
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8_dynamic", "fp8"])
def test_quantized_projections_take_adapters(scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An adapter adds to a quantized projection what it adds to one whose weight was dequantized."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    plain = random_checkpoint(tmp_path / "plain", **sizes)
    groups = {"group_size": 32} if scheme == "w4a16" else {}
    quantized = quantize_checkpoint(plain, tmp_path / "quantized", scheme, **groups).path
    adapter_of(load_file(plain / "model.safetensors"), tmp_path / "adapter")

    def scores(weights: str, adapter: str | None) -> torch.Tensor:
        config = CONFIG | {"quantized_weights": weights}
        folders = {"style": tmp_path / "adapter"}
        with hal.LLM(quantized, backend="cpu", dtype="float32", adapters=folders, config=config) as llm:
            return llm.log_probabilities([PROMPTS[2][:1]], [PROMPTS[2][1:]], adapter=adapter)[0]

    adapted = scores("kept", "style")
    tolerance = 1e-3 if scheme == "w4a16" else 0.5  # The others round inputs, too.
    torch.testing.assert_close(adapted, scores("dequantized", "style"), rtol=0, atol=tolerance)
    assert (adapted - scores("kept", None)).abs().max() > 2 * tolerance
    assert "differs from merged weights" not in caplog.text


def test_a_slot_that_holds_something_else_is_warned_of(adapted: Adapted, caplog: pytest.LogCaptureFixture) -> None:
    wrong = hal.Config(backend="cpu", dtype="float32", adapters=hal.AdaptersConfig(slots=1, rank=8))
    with hal.open(wrong, activate=False) as backend:
        model = hal.load_model(adapted.base, backend)
        projection = model.get_submodule("model.layers.0.self_attn.qkv_proj")
        projection.lora.parts = "1:64 0:32 2:32"  # as if queries read the factors of keys
        model.adapters.load("style", adapted.folders["adapter-0"])
        assert "applied to model.layers.0.self_attn.qkv_proj, differs from merged weights by" in caplog.text
        assert caplog.text.count("differs from merged") == 1


def test_room_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    wide = random_checkpoint(tmp_path, intermediate_size=1 << 16)
    config = {"adapters": {"slots": 4096, "rank": 4096}}  # terabytes
    with pytest.raises(ConfigError, match="4096 adapters of the rank 4096 take"):
        hal.LLM(wide, backend="cpu", config=config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("some_later_key", True),
        ("r", 0),
        ("r", 3),
        ("rank_pattern", {"q_proj": "2"}),
        ("target_modules", ["q_proj", "embed_tokens"]),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(adapted: Adapted, tmp_path: Path, key: str, value: Any) -> None:
    source = adapted.folders["adapter-1"]
    config = json.loads((source / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    (tmp_path / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    with adapted.open("adapter-1") as llm:
        with pytest.raises(CheckpointError, match="rank 4" if value == 3 else key):
            llm.load_adapter("other", tmp_path)
        assert llm.adapters == ["adapter-1"]
        assert _tokens(llm, "adapter-1") == adapted.tokens["adapter-1"]


def test_tensors_that_do_not_fit_are_refused(adapted: Adapted, tmp_path: Path) -> None:
    source = adapted.folders["adapter-1"]
    tensors = load_file(source / "adapter_model.safetensors")
    name = next(each for each in tensors if each.endswith("q_proj.lora_B.weight"))

    def written(**changed: torch.Tensor) -> Path:
        (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
        save_file(tensors | changed, tmp_path / "adapter_model.safetensors")
        return tmp_path

    head = {
        "base_model.model.lm_head.lora_A.weight": torch.ones(4, 48),
        "base_model.model.lm_head.lora_B.weight": torch.ones(101, 4),
    }
    with adapted.open("adapter-1") as llm:
        for changed, problem in (
            ({name: tensors[name][:-1].contiguous()}, r"q_proj.lora_B.weight is \[63, 4\], not \[64, 4\]"),
            ({name: tensors[name] * float("nan")}, "not finite"),
            (head, "lm_head, which Qwen3ForCausalLM lacks, or which takes no adapters"),
            ({name.replace("lora_B", "lora_magnitude"): torch.ones(4, 4)}, "no lora_A.weight or lora_B.weight"),
        ):
            with pytest.raises(CheckpointError, match=problem):
                llm.load_adapter("other", written(**changed))
        with pytest.raises(ConfigError, match="rank 8, and there is room for 4"):
            llm.load_adapter("other", adapted.folders["adapter-0"])
        with pytest.raises(CheckpointError, match="is no adapter: it has no adapter_config"):
            llm.load_adapter("other", adapted.base)


def test_a_model_without_room_names_the_key(adapted: Adapted) -> None:
    with hal.LLM(adapted.base, backend="cpu", config=CONFIG) as llm:
        with pytest.raises(ConfigError, match="without room for adapters") as error:
            llm.generate(PROMPTS, adapter="style")
        assert error.value.key == "adapters.slots"
        assert llm.adapters == []


FAMILIES = {
    "llama": ALL,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "gemma3_text": ALL,
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
"""Projections that adapters change, by family: merged ones, ones whose rows are in another order, transposed ones."""


@thorough(FAMILY, r"\[(?!phi3)")
@pytest.mark.parametrize("kind", FAMILIES)
def test_five_random_adapters_of_a_family(kind: str, tmp_path: Path) -> None:
    model = transformers_families.model_of(kind)
    model.save_pretrained(tmp_path / "base")
    draw, expected, folders = random.Random(kind), {}, {}
    prompt = [draw.randrange(1, 101) for _ in range(17)]
    for number in range(5):
        name = f"adapter-{number}"
        folders[name] = tmp_path / name
        targets = draw.sample(FAMILIES[kind], draw.randint(1, len(FAMILIES[kind])))
        pattern = {targets[0]: 3} if draw.random() < 0.5 else {}
        drawn: dict[str, Any] = {"rank": draw.choice([1, 2, 4, 8]), "alpha": draw.choice([1, 8, 12.5])}
        drawn |= {"rooted": draw.random() < 0.5, "rank_pattern": pattern, "seed": draw.randrange(1 << 32)}
        with merged(model, adapter_of(model, folders[name], targets, **drawn)), torch.no_grad():
            expected[name] = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with hal.LLM(tmp_path / "base", backend="cpu", dtype="float32", adapters=folders, config=CONFIG) as llm:
        for name, logprobs in expected.items():
            [score] = llm.score([prompt[:1]], [prompt[1:]], adapter=name)
            found = torch.tensor([each.logprob for each in score.tokens])
            wanted = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
