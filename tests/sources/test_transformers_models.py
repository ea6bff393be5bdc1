"""Tests of models from transformers' own code: their logits, where they come from, and what is refused."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from hal.models.llama import LlamaForCausalLM
from helpers import ROOT
from helpers.checkpoints import random_checkpoint
from helpers.family_steps import config_for, differences, own_logits, tokens_for
from helpers.pages import lay_out
from helpers.ranks import in_ranks
from helpers.thorough import EXHAUSTIVE, FAMILY, LONG, PROCESSES, thorough
from helpers.transformers_families import config_of, kinds, layer_keys, model_of
from torch import Tensor, nn

import hal
from hal.checkpoint.loading import build_model, check_shared
from hal.checkpoint.model_registry import serves
from hal.config import ParallelConfig
from hal.errors import CheckpointError, ConfigError

pytest.importorskip("transformers", reason="these tests run models of transformers")

FAMILIES = (
    "qwen3",  # norms of query and key
    "gemma2",  # softcaps, windows in some layers, scaled embeddings, norms of 1 + w
    "gemma3n_text",  # layers that share keys and values
    "gpt_oss",  # sinks, and experts with biases, a clipped gate and transposed weights
    "deepseek_v3",  # latent attention with values narrower than keys, and a router with sigmoid, bias and groups
    "mixtral",  # another name for the experts in the checkpoint
    "glm4",  # interleaved rotation of a part of a head, and a merged projection
    "cohere",  # layer norms without bias, and a factor of the logits
    "stablelm",  # layer norms with bias, and rotation of a part of a head
    "olmo2",  # norms over the whole width
    "gpt2",  # learned positions, and transposed weights
    "opt",  # a model that calls a part of its base model
    "roberta",  # positions from the padding token on
    "llama4_text",  # chunks, and a temperature of attention by position
    "falcon",  # attention in the class, with one key head
    "bloom",  # position biases, in the class
    "mpt",  # likewise, and a mask of bools
    "gpt_neo",  # windows in some layers, as tables of positions
    "dbrx",  # a loop over experts, whose weights are one below the other
    "longcat_flash",  # a loop over experts, of which some return their input, and two attentions of a layer
)
OPTIONS: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
        "attn_scale": 0.5,
        "interleave_moe_layer_step": 1,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
}
"""What switches on more of a family than the small configurations do."""
RECOGNIZED = {
    "gemma2": ("gelu_tanh_and_mul", "rotary_embedding"),
    "gemma3n_text": ("untransposed_rotary_embedding",),
    "glm4": ("interleaved_rotary_embedding", "silu_and_mul"),
}
"""Rewrites of a graph of two layers that recognize what is left of a family's code in each."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a family's small model, and returns its folder, tokens and logits."""
    made: dict[str, Any] = {}

    def save(family: str) -> Any:
        if family not in made:
            model, folder = model_of(family, **OPTIONS.get(family, {})), tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            rows = tokens_for(model.config.get_text_config().vocab_size)
            made[family] = folder, rows, own_logits(model, rows)
        return made[family]

    return save


@thorough(LONG, r"\[graph-gemma2")
@thorough(EXHAUSTIVE, r"\[graph-(mixtral|stablelm|olmo2|qwen3|opt|gpt_oss|roberta|falcon|mpt|gemma3n|cohere|dbrx)")
@thorough(FAMILY, r"\[(?!eager-(gemma2|gpt_oss|deepseek_v3|glm4|gpt2|roberta|llama4|bloom)|graph-(gemma2|gpt_neo))")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_logits_are_those_of_transformers(
    compiler: str, family: str, saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, rows, wanted = saved(family)
    with hal.open(config_for(compiler)) as backend:
        model = hal.load_model(folder, backend)
        with hal.Runner(model, backend) as runner:
            assert max(differences(runner, rows, wanted).values()) < 1e-4
    assert "was applied nowhere" not in caplog.text
    for name in RECOGNIZED.get(family, ()) if compiler == "graph" else ():
        assert f"\n{name}: applied at 2 sites" in caplog.text


def test_another_family_is_found_by_itself(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _, _ = saved("gpt2")
    assert "GPT2LMHeadModel" not in hal.architectures()
    with hal.open({"backend": "cpu", "dtype": "float32"}) as backend:
        model = hal.load_model(folder, backend)
    assert type(model).__mro__[1].__name__ == "TransformersLM"
    lines = [each for each in caplog.messages if "model_source" in each]
    assert lines == ["hal has no model GPT2LMHeadModel; it runs the code of transformers (model_source)"]


@pytest.mark.parametrize(
    ("family", "architecture"), [("exaone", "LlamaForCausalLM"), ("sarvam_moe", "Glm4MoeForCausalLM")]
)
def test_a_family_that_has_the_architecture_of_another(
    family: str, architecture: str, saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tensors have other names than those that hal reads."""
    folder, rows, wanted = saved(family)
    with hal.open(config_for("eager", model_source="auto")) as backend:
        model = hal.load_model(folder, backend)
        with hal.Runner(model, backend) as runner:
            assert max(differences(runner, rows, wanted).values()) < 1e-4
    wanted_line = f"hal has no model {architecture} for model_type {family!r}; it runs the code of transformers"
    assert [each for each in caplog.messages if "model_source" in each] == [f"{wanted_line} (model_source)"]


def test_which_families_have_the_architecture_of_another(tmp_path: Path) -> None:
    """hal's class is for those whose tensors it reads, and no other family has an architecture of hal."""
    by_architecture: dict[str, list[str]] = {}
    for family, architecture in kinds().items():
        by_architecture.setdefault(architecture, []).append(family)
    shared = {name: each for name, each in by_architecture.items() if name in hal.architectures() and len(each) > 1}
    assert {"LlamaForCausalLM", "Glm4MoeForCausalLM"} <= {*shared}
    for architecture, families in shared.items():
        for family in families:
            model_of(family).save_pretrained(tmp_path / family)
            checkpoint = hal.Checkpoint.open(tmp_path / family)
            with nullcontext() if serves(architecture, checkpoint.config) else pytest.raises(CheckpointError):
                build_model(checkpoint, source="hal")


def test_a_family_that_no_source_has_is_what_its_architecture_says(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "llama", architectures=["LlamaForCausalLM"], model_type="acme")
    with hal.open({"backend": "cpu", "dtype": "float32"}) as backend:
        assert type(hal.load_model(folder, backend)) is LlamaForCausalLM


def test_the_source_is_chosen(tmp_path: Path) -> None:
    folder, tokens = random_checkpoint(tmp_path / "qwen3"), {}
    for source in ("auto", "hal", "transformers"):
        with hal.LLM(folder, backend="cpu", dtype="float32", model_source=source) as llm:
            (completion,) = llm.generate(["the cat"], temperature=0.0, max_new_tokens=12, ignore_eos=True)
            tokens[source] = completion.token_ids
    assert len(tokens["hal"]) == 12
    assert tokens["auto"] == tokens["hal"] == tokens["transformers"]


def test_the_source_hal_has_no_other_family(saved: Any) -> None:
    folder, _, _ = saved("gpt2")
    backend = hal.open({"backend": "cpu", "model_source": "hal"})
    with pytest.raises(CheckpointError, match="no model 'GPT2LMHeadModel' is installed"):
        hal.load_model(folder, backend)


def test_an_unknown_source_names_the_others(saved: Any) -> None:
    folder, _, _ = saved("gpt2")
    backend = hal.open({"backend": "cpu", "model_source": "transformer"})
    with pytest.raises(ConfigError, match="model_source has the value 'transformer'") as caught:
        hal.load_model(folder, backend)
    assert "did you mean 'transformers'? known: auto, hal, transformers" in caught.value.remedy


def adapt(config: dict[str, Any]) -> Any:
    from hal.sources.transformers.model import TransformersLM

    with torch.device("meta"):
        return TransformersLM.from_config(config)


@pytest.mark.parametrize(
    ("family", "more", "problem"),
    [
        ("mamba", {}, "another state than keys and values|does not call attention"),
        ("openai-gpt", {}, "calls no attention by transformers' interface, and stores no keys and values"),
        ("jetmoe", {}, "JetMoeTopKGating chooses what it computes by the values of tensors, such as which experts"),
        (
            "xmod",
            {},
            "XmodOutput chooses what it computes by the values of tensors, such as which experts or languages",
        ),
        ("deepseek_v4", {}, "keeps another state than keys and values"),
    ],
)
def test_what_hal_cannot_run_is_refused_by_name(family: str, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        adapt(config_of(family, **more).to_dict())
    assert "docs/how-to/add-a-model-family.md" in caught.value.remedy


def test_the_text_of_a_config_with_images() -> None:
    config = config_of("emu3").get_text_config()
    assert config.model_type == "emu3_text_model"
    assert adapt(config.to_dict()).of.__name__ == "Emu3ForCausalLM"


def test_configs_that_transformers_does_not_have() -> None:
    with pytest.raises(ConfigError, match="transformers has no model_type 'acme'"):
        adapt({"model_type": "acme"})
    with pytest.raises(ConfigError, match="no causal language model for model_type 'vit'"):
        adapt({"model_type": "vit"})


@pytest.mark.parametrize("wrong", ["a weight of another layer", "another epsilon", "a factor that is missing"])
def test_the_comparison_sees_a_wrong_layer(wrong: str, saved: Any) -> None:
    """transformers' forward over hal's layers computes the same as hal's steps: only its own model differs."""
    from hal.sources.transformers.check import _own_forward, check_logits

    folder, rows, _ = saved("gemma2")
    checkpoint = hal.Checkpoint.open(folder)
    backend = hal.open(config_for("eager", check_model=False))
    with torch.inference_mode(), backend:
        model: Any = hal.load_model(checkpoint, backend)
        token = backend.enter()
        try:
            check_logits(model, backend, checkpoint)
            first, second = model.model.layers
            if wrong == "a weight of another layer":
                first.mlp.down_proj.weight.copy_(second.mlp.down_proj.weight)
            elif wrong == "another epsilon":
                first.post_attention_layernorm.eps = 0.5
            else:
                embeddings = model.model.embed_tokens
                embeddings._multipliers = dict.fromkeys(embeddings._multipliers, 1.0)
            assert not torch.allclose(_own_forward(model, torch.tensor([rows[0]])), saved("gemma2")[2][0])
            with pytest.raises(ConfigError, match="gives other logits over hal's cache than by itself") as caught:
                check_logits(model, backend, checkpoint)
        finally:
            backend.leave(token)
    assert "check_model" in caught.value.remedy


def test_what_is_too_large_to_load_twice_is_compared_with_itself(
    saved: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hal.sources.transformers import check

    monkeypatch.setattr(check, "MOST_BYTES", 1000)
    folder, rows, wanted = saved("gemma2")
    with caplog.at_level("INFO"), hal.open(config_for("eager")) as backend:
        model = hal.load_model(folder, backend)
        with hal.Runner(model, backend) as runner:
            assert max(differences(runner, rows, wanted).values()) < 1e-4
    assert "it is compared with transformers' forward over hal's layers" in caplog.text


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_are_chosen_once(kind: str, tmp_path: Path) -> None:
    """transformers chooses them in each step by the longest sequence. With all sequences long, it chooses the same."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [float(n) for n in range(1, 9)]}
        rope |= {"original_max_position_embeddings": 4}
    model = model_of("llama", rope_parameters=rope)
    model.save_pretrained(tmp_path)
    rows = tokens_for(101)
    wanted = own_logits(model, rows)
    with hal.open(config_for("eager")) as backend:
        loaded = hal.load_model(tmp_path, backend)
        with hal.Runner(loaded, backend) as runner:
            assert max(differences(runner, rows, wanted).values()) < 1e-4


@pytest.mark.parametrize("family", ["gpt_oss", "minimax_m2", "ernie4_5_moe", "longcat_flash"])
def test_a_router_is_found_wherever_its_tensors_are(family: str) -> None:
    """They have a bias, a correction as an argument or in a submodule, and a projection of their own."""
    model = adapt(config_of(family).to_dict())
    assert model.replaced["Router"] >= 1
    assert {type(each).__module__.split(".")[0] for each in model.modules() if "Router" in type(each).__name__} == {
        "hal"
    }


def weights_of_experts(model: Any, run: Callable[[], Any]) -> set[torch.dtype]:
    """Return the dtypes of the weights that the experts of a model are given."""
    found = set()

    def note(_: Any, args: tuple[Any, ...]) -> None:
        found.update(each.dtype for each in args[1:] if each.is_floating_point())

    hooks = [
        each.register_forward_pre_hook(note) for each in model.modules() if type(each).__name__.endswith("Experts")
    ]
    run()
    for each in hooks:
        each.remove()
    return found


@thorough(FAMILY, r"\[(glm4|qwen3)_moe")
@pytest.mark.parametrize(
    ("family", "source", "dtype"),
    [
        ("minimax_m2", "transformers", torch.float32),  # from scores in bfloat16
        ("minimax_m2", "hal", torch.float32),
        ("glm4_moe", "transformers", torch.float32),  # from scores in float32
        ("glm4_moe", "hal", torch.float32),
        ("ernie4_5_moe", "transformers", torch.bfloat16),
        ("ernie4_5_moe", "hal", torch.bfloat16),
        ("qwen3_moe", "transformers", torch.bfloat16),
        ("qwen3_moe", "hal", torch.bfloat16),
    ],
)
def test_weights_of_experts_have_the_dtype_of_transformers(
    family: str, source: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = model_of(family).bfloat16()
    model.save_pretrained(tmp_path)
    rows = tokens_for(101)
    assert weights_of_experts(model, lambda: own_logits(model, rows[:1])) == {dtype}
    config = config_for("eager", check_model=False, dtype="bfloat16", model_source=source)
    with hal.open(config) as backend:
        made = hal.load_model(tmp_path, backend)
        with hal.Runner(made, backend) as runner:
            assert weights_of_experts(made, lambda: runner.step(runner.batch(rows[:1], [[1, 2]]))) == {dtype}


def test_layers_are_replaced_by_what_they_compute() -> None:
    model = adapt(config_of("deepseek_v3", first_k_dense_replace=1, n_routed_experts=8, n_group=2).to_dict())
    assert model.replaced["Router"] == 1
    assert model.replaced["RoutedExperts"] == 1
    router = model.get_submodule("model.layers.1.mlp.gate")
    assert router._options["sigmoid"]
    assert router._options["num_groups"] == 2
    assert router._options["group_best"] == 2
    assert not [each for each in model.modules() if "Norm" in type(each).__name__ and "Deepseek" in type(each).__name__]
    gemma = adapt(config_of("gemma2").to_dict())
    assert gemma.model.norm.offset == 1.0
    cohere = adapt(config_of("cohere").to_dict())
    assert type(cohere.model.norm) is hal.nn.LayerNorm
    assert cohere.model.norm.bias is None


def test_norms_without_a_weight_are_replaced() -> None:
    """Their width is that of what they get."""
    gemma = adapt(config_of("gemma4_text").to_dict())
    norms = [layer.self_attn.v_norm for layer in gemma.model.layers if hasattr(layer.self_attn, "v_norm")]
    assert norms
    assert {(type(each), each.learned) for each in norms} == {(hal.nn.RMSNorm, False)}
    assert {each.width for each in norms} == {layer.self_attn.head_dim for layer in gemma.model.layers}


@pytest.mark.parametrize("wrong", ["nothing", "another epsilon", "no root", "a width that varies"])
def test_other_layers_without_tensors_stay(wrong: str) -> None:
    from hal.sources.transformers.layers import Inputs, norm_of

    class Norm(nn.Module):
        eps = 1e-6

        def forward(self, x: Tensor) -> Tensor:
            eps, power = (1e-3 if wrong == "another epsilon" else self.eps), (-1.0 if wrong == "no root" else -0.5)
            return x * (x.square().mean(-1, keepdim=True) + eps).pow(power)

    model = nn.Sequential(Norm(), nn.Linear(32, 16 if wrong == "a width that varies" else 32, device="meta"))
    model.append(model[0])
    inputs = Inputs(model)
    model(torch.empty(2, 32, device="meta"))
    found = norm_of(model[0], inputs.widths().get("0"))
    assert type(found) is (hal.nn.RMSNorm if wrong == "nothing" else NoneType)


@thorough(FAMILY, r"\[(?!gemma3n|bart)")
@pytest.mark.parametrize("family", ["bart", "trocr", "gpt_neo", "gemma2", "gemma3n_text", "gemma4_text"])
def test_a_small_model_of_one_layer_runs(family: str) -> None:
    """`make families` counts the launches of one more layer."""
    model = model_of(family, **layer_keys(family, 1))
    assert len(adapt(model.config.to_dict()).hal_attention) == 1
    assert own_logits(model, tokens_for(101)[:1])[0].isfinite().all()


def test_random_weights_of_another_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(config_of("stablelm", architectures=["StableLmForCausalLM"]).to_dict())
    )
    with hal.open({"backend": "cpu", "dtype": "float32"}) as backend:
        model = hal.load_model(hal.RandomCheckpoint.open(tmp_path), backend)
        with hal.Runner(model, backend) as runner:
            assert runner.step(runner.batch([[5, 6]], [[1]])).logits.isfinite().all()


def test_new_weights_replace_the_old(saved: Any) -> None:
    folder, rows, _ = saved("qwen3")
    other = model_of("qwen3", seed=1)
    with hal.open(config_for("graph")) as backend, hal.Runner(hal.load_model(folder, backend), backend) as runner:
        hal.replace_weights(runner, other.state_dict())
        assert max(differences(runner, rows, own_logits(other, rows)).values()) < 1e-4


@thorough(EXHAUSTIVE, r"\[(mixtral|qwen3|glm4|deepseek_v2|deepseek_v3|aria_text|olmo2)")
@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "qwen3",
        "aria_text",  # one tensor for all experts
        "olmo2",  # attention of all heads on each rank, whose projections are gathered
        "glm4",  # a merged projection that is gathered
        "granite_swa",  # sinks
        "deepseek_v2",  # latent attention whose heads are split
        "deepseek_v3",  # latent attention that is not split
    ],
)
@thorough(PROCESSES)
def test_ranks_split_a_model_by_the_plan(family: str, saved: Any) -> None:
    folder, _, _ = saved(family)
    found = in_ranks("family_difference", 2, folder=str(folder), family=family, compiler="graph", tensor=2)
    assert max(found) < 1e-4


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("gpt2", "transformers has no plan that splits its projections"),
        ("hrm_text", r"the checkpoint has the tensors of model\.\w+\.layers\.0\.self_attn\.q_proj in a form that"),
    ],
)
def test_ranks_do_not_split_what_they_cannot(family: str, problem: str, saved: Any) -> None:
    folder, _, _ = saved(family)
    with pytest.raises(ConfigError, match=problem):
        check_shared(hal.Checkpoint.open(folder), ParallelConfig(2), "transformers")


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    script = lay_out(ROOT / "docs" / "how-to" / "run-other-models.md", tmp_path)
    assert runpy.run_path(str(script))["logits"].shape == (1, 100)
