"""Tests of hal under transformers, on small random models: torch.compile, and hal.engines.transformers."""

from __future__ import annotations

import inspect
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT
from helpers.thorough import AGAIN, DRAW, EXHAUSTIVE, FAMILY, LONG, PROCESSES, thorough
from helpers.tiny_transformers import FAMILIES, counted, generate, model_of, prompts_of
from helpers.transformers_families import model_of as small_model
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal.errors import BackendNotActive, CompileError, ConfigError, OperationError

transformers = pytest.importorskip("transformers", reason="these tests run hal inside transformers")

OURS = {"scaled_dot_product_attention": "paged_attention"}
"""The operation of hal's own models in the place of each that only plain models have."""


@pytest.fixture
def cpu() -> Iterator[hal.Backend]:
    yield hal.open({"backend": "cpu", "dtype": "float32"})
    torch.compiler.reset()


def own_counts(model: Any, folder: Path, backend: hal.Backend, prompt: list[int]) -> dict[str, int]:
    """Return how often a step of hal's own model of a checkpoint calls each operation, compiled by the same backend."""
    model.save_pretrained(folder)
    ours = hal.load_model(folder, backend)
    runner = hal.Runner(ours, backend)
    batch = runner.batch([prompt], [[1]])

    @torch.compile(backend="hal", fullgraph=True)
    def compiled(states: Any) -> torch.Tensor:
        return ours.logits(ours(batch, states))

    with torch.inference_mode():
        compiled(runner.states.layers)
        with counted() as counts:
            compiled(runner.states.layers)
    del counts["store_kv_cache"]  # transformers' cache is plain tensors
    del counts["pointwise"]  # transformers calls torch's cos and sin
    return dict(counts)


@thorough(EXHAUSTIVE, r"\[(Mixtral|Llama)")
@thorough(FAMILY, r"\[(?!Qwen3Moe)")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_model_calls_the_operations_of_hals_own(family: str, cpu: hal.Backend, tmp_path: Path) -> None:
    model, (prompt,) = model_of(family), prompts_of(9)
    compiled = torch.compile(model, backend="hal", fullgraph=True)
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        torch.testing.assert_close(compiled(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        with counted() as counts:
            compiled(tokens, use_cache=False)
    torch.compiler.reset()
    found = {OURS.get(name, name): count for name, count in counts.items()}
    assert found == own_counts(model, tmp_path / "checkpoint", cpu, prompt)


@thorough(AGAIN, r"\[Qwen3Moe")
@thorough(EXHAUSTIVE, r"\[(Mixtral|Llama)")
@thorough(FAMILY, r"\[(?!Qwen3Moe)")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.shows("texts", "transformers")
def test_greedy_tokens_of_a_compiled_model(family: str, cpu: hal.Backend) -> None:
    model, prompts = model_of(family), prompts_of(9, 4, 14)
    expected = generate(model, prompts, 12)
    model.compile(backend="hal", dynamic=True)
    assert generate(model, prompts, 12) == expected


@thorough(EXHAUSTIVE, r"\[Qwen3Moe")
@thorough(LONG)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_a_graph_compiled_with_inductor(family: str, cpu: hal.Backend) -> None:
    """Only the operations that Inductor cannot fuse stay calls; expert_mlp is one for a layer."""
    model, prompts = model_of(family, layers=1), prompts_of(9, 4)
    expected = generate(model, prompts, 6)
    model.compile(backend="hal", dynamic=True, options={"compiler": "inductor"})
    with counted() as counts:
        assert generate(model, prompts, 6) == expected
    assert counts == ({} if family == "Qwen3" else {"expert_mlp": 6})


@pytest.mark.parametrize(
    ("option", "error", "problem"),
    [
        ({"compiler": "graph"}, ConfigError, "the option compiler is 'graph'"),
        ({"compiler": "inductor"}, CompileError, "a parameter requires grad"),
    ],
)
def test_what_inductor_is_refused(option: dict[str, str], error: type, problem: str, cpu: hal.Backend) -> None:
    model = model_of("Llama")
    compiled = torch.compile(model, backend="hal", options=option)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"{error.__name__}: .*{problem}"):
        compiled(torch.ones(1, 3, dtype=torch.int64))


def test_a_write_in_place_is_refused(cpu: hal.Backend) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x[0].add_(1)
        return x * 2

    compiled = torch.compile(write, backend="hal", options={"compiler": "inductor"})
    with torch.inference_mode(), pytest.raises(Exception, match="the graph writes in place"):
        compiled(torch.ones(2, 3))


@thorough(EXHAUSTIVE, r"\[(Qwen3\]|Llama)")
@thorough(FAMILY, r"\[(?!Qwen3Moe)")
@pytest.mark.parametrize("family", FAMILIES)
def test_use(family: str, cpu: hal.Backend) -> None:
    from hal.engines.transformers import use

    model, prompts = model_of(family), prompts_of(9, 4, 14)
    expected = generate(model, prompts, 12)
    with use(model) as usage:
        with counted() as counts:
            assert generate(model, prompts, 12) == expected
        assert usage.replaced == (("attention", "experts") if "Mo" in family or "Mix" in family else ("attention",))
        assert counts["scaled_dot_product_attention"] == 2 * 12
    with counted() as counts:
        assert generate(model, prompts, 12) == expected
    assert not counts


def batched(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy continuations of prompts by continuous batching."""
    greedy = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=24)
    outputs = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=sizes)
    found = {tuple(each.prompt_ids): each.generated_tokens for each in outputs.values()}
    return [found[tuple(each)] for each in prompts]


@pytest.fixture
def paged_calls(cpu: hal.Backend) -> Iterator[list[int]]:
    """Return the numbers of sequences of all calls of paged_attention, which runs in a thread of generate_batch."""
    calls: list[int] = []

    def paged_attention(*args: Any) -> Any:
        calls.append(args[3].shape[0])
        return cpu.kernels["paged_attention"](*args)

    hal.Backend("counting", cpu.device, kernels={**cpu.kernels, "paged_attention": paged_attention}).activate()
    yield calls
    cpu.activate()


@pytest.mark.shows("requests that join running ones", "transformers")
def test_continuous_batching(paged_calls: list[int]) -> None:
    from hal.engines.transformers import use

    model, prompts = model_of("Qwen3"), prompts_of(9, 4, 33, 21)
    expected = [generate(model, [each], 12)[0] for each in prompts]
    with use(model, continuous_batching=True) as usage:
        assert usage.replaced == ("paged attention",)
        assert batched(model, prompts) == expected
    assert set(paged_calls) >= {1, 2, 4}


@thorough(DRAW, r"\[order1")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_models_stop_continuous_batching_in_any_order(order: tuple[int, int], paged_calls: list[int]) -> None:
    from hal.engines.transformers import use

    before = transformers.AttentionInterface()["paged|eager"]
    models, prompts = [model_of("Llama", seed=0), model_of("Llama", seed=1)], prompts_of(9, 4)
    expected = [[generate(model, [each], 12)[0] for each in prompts] for model in models]
    usages = [use(model, continuous_batching=True) for model in models]
    first, second = order
    usages[first].restore()
    usages[first].restore()  # a second time changes nothing
    paged_calls.clear()
    assert batched(models[second], prompts) == expected[second]
    assert paged_calls
    assert transformers.AttentionInterface()["paged|eager"] is not before
    usages[second].restore()
    assert transformers.AttentionInterface()["paged|eager"] is before


class CountedSteps(TorchDispatchMode):
    """Counts the operations of torch in each call of a model, in the thread that calls it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.steps: list[Counter[str]] = []
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        self.steps.append(Counter())
        self.__enter__()

    def _end(self, *_: Any) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.steps[-1][func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@thorough(DRAW, r"\[1\]")
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("layers", [1, 4])
def test_the_layers_of_a_step_prepare_it_once(layers: int) -> None:
    """The operations are those of the lengths, which are copied to the host, and of the table of blocks."""
    from hal.engines.transformers import use

    model = model_of("Llama", layers=layers)
    with use(model, continuous_batching=True):
        counted_steps = CountedSteps(model)
        batched(model, prompts_of(9, 33))
    print(layers, *counted_steps.steps, sep="\n")  # noqa: T201
    assert len(counted_steps.steps) >= 12
    assert {(each["stack"], each["arange"], each["clamp"]) for each in counted_steps.steps} == {(1, 1, 1)}


class ReusedArguments:
    """Hands a model the same tensors, lists and dicts in all steps of equal sizes, with the values of each step."""

    def __init__(self, model: Any) -> None:
        self.kept: dict[Any, Any] = {}
        self.reused = 0
        self.hook = model.register_forward_pre_hook(self._reuse, with_kwargs=True)

    def _reuse(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index")
        given = {name: kwargs[name] for name in names}
        tensors, shape = torch.utils._pytree.tree_flatten(given)
        sizes = tuple(each.shape for each in tensors)
        self.reused += sizes in self.kept
        kept = self.kept.setdefault(
            sizes, torch.utils._pytree.tree_unflatten([each.clone() for each in tensors], shape)
        )
        for one, other in zip(torch.utils._pytree.tree_leaves(kept), tensors, strict=True):
            one.copy_(other)
        return args, {**kwargs, **kept}


def test_a_step_in_the_tensors_of_the_step_before(cpu: hal.Backend) -> None:
    from hal.engines.transformers import use

    model, prompts = model_of("Qwen3"), prompts_of(9, 4, 7)
    expected = [generate(model, [each], 12)[0] for each in prompts]
    reused = ReusedArguments(model)
    with use(model, continuous_batching=True):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert batched(model, [prompt]) == [tokens]
    assert reused.reused > 12


def test_the_tensors_of_a_step_end_with_it(cpu: hal.Backend) -> None:
    from hal.engines.transformers import use

    tables: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def paged_attention(*args: Any) -> Any:
        tables.append(weakref.ref(args[3]))
        alive.append(len({id(each()) for each in tables if each() is not None}))
        return cpu.kernels["paged_attention"](*args)

    hal.Backend("watching", cpu.device, kernels={**cpu.kernels, "paged_attention": paged_attention}).activate()
    model = model_of("Llama")
    with use(model, continuous_batching=True):
        batched(model, prompts_of(9, 33))
    cpu.activate()
    assert len(alive) >= 2 * 12
    assert set(alive) == {1}
    assert all(each() is None for each in tables)


def test_a_call_of_another_model_within_a_step(cpu: hal.Backend) -> None:
    """Between two layers of the first model, the second one generates for the same prompts in another order."""
    from hal.engines.transformers import use

    outer, inner, prompts = model_of("Llama", seed=0), model_of("Llama", seed=1), prompts_of(9, 4)
    expected = [[generate(model, [each], 12)[0] for each in prompts] for model in (outer, inner)]
    found = []
    with use(outer, continuous_batching=True), use(inner, continuous_batching=True):

        def run_inner(*_: Any) -> None:
            if not found:
                found.append(batched(inner, prompts[::-1]))

        outer.model.layers[1].register_forward_pre_hook(run_inner)
        assert batched(outer, prompts) == expected[0]
    assert found == [expected[1][::-1]]


@thorough(FAMILY, r"\[gemma2")
@pytest.mark.parametrize(
    ("family", "options"), [("gemma2", {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1}), ("gpt_oss", {})]
)
def test_softcaps_and_sinks(family: str, options: dict[str, Any], cpu: hal.Backend) -> None:
    from hal.engines.transformers import use

    model = small_model(family, layer_types=["full_attention"] * 2, **options)
    model.set_attn_implementation("eager")
    prompts = prompts_of(9, 4, 21)
    tokens = [generate(model, [each], 12)[0] for each in prompts]
    with torch.inference_mode():
        wanted = [model(torch.tensor([each])).logits for each in prompts]
        with use(model, experts=False):
            for prompt, logits in zip(prompts, wanted, strict=True):
                torch.testing.assert_close(model(torch.tensor([prompt])).logits, logits, rtol=1e-4, atol=1e-4)
    with use(model, experts=False, continuous_batching=True):
        assert batched(model, prompts) == tokens


class TestRefusals:
    def test_without_a_backend(self) -> None:
        from hal.engines.transformers import use

        hal.open({"backend": "cpu", "dtype": "float32"}).close()
        with pytest.raises(BackendNotActive, match=r"hal\.open"):
            use(model_of("Llama"))

    def test_a_step_without_a_paged_cache(self, cpu: hal.Backend) -> None:
        from hal.engines.transformers import use

        model = model_of("Llama")
        with use(model, continuous_batching=True), pytest.raises(OperationError, match="without a paged cache"):
            model(torch.tensor([[5, 6]]), use_cache=False)
        assert model(torch.tensor([[5, 6]])).logits.shape[1] == 2

    def test_nothing_to_replace(self, cpu: hal.Backend) -> None:
        from hal.engines.transformers import use

        with pytest.raises(OperationError, match="nothing to replace"):
            use(model_of("Llama"), attention=False)

    def test_experts_that_transformers_does_not_switch(self, cpu: hal.Backend) -> None:
        """transformers refuses after attention was selected: the model is as before."""
        from hal.engines.transformers import use

        registered = transformers.AttentionInterface()["paged|eager"]
        model = model_of("Qwen3Moe")
        model.config._experts_implementation_internal = "deepgemm_megamoe"
        hooks = [len(each._forward_pre_hooks) for each in model.modules()]
        for paged in (False, True):
            with pytest.raises(RuntimeError, match="Cannot switch experts implementation"):
                use(model, continuous_batching=paged)
            assert model.config._attn_implementation == "sdpa"
            assert [len(each._forward_pre_hooks) for each in model.modules()] == hooks
            assert transformers.AttentionInterface()["paged|eager"] is registered

    def test_attention_that_transformers_does_not_switch(self, cpu: hal.Backend) -> None:
        from hal.engines.transformers import use

        class Refusing(transformers.LlamaForCausalLM):  # type: ignore[name-defined, misc]
            def set_attn_implementation(self, name: str) -> None:
                super().set_attn_implementation(name)
                if name != "sdpa":
                    raise ValueError(f"no {name}")

        registered = transformers.AttentionInterface()["paged|eager"]
        model = Refusing(model_of("Llama").config)
        for paged in (False, True):
            with pytest.raises(ValueError, match="no "):
                use(model, continuous_batching=paged)
            assert model.config._attn_implementation == "sdpa"
            assert not any(each._forward_pre_hooks for each in model.modules())
            assert transformers.AttentionInterface()["paged|eager"] is registered

    def test_a_mask_of_another_form(self, cpu: hal.Backend) -> None:
        from hal.engines.transformers import use

        model = model_of("Llama")
        with use(model), torch.inference_mode(), pytest.raises(OperationError, match="a mask that is not bool"):
            model(torch.ones(1, 3, dtype=torch.int64), attention_mask=torch.zeros(1, 1, 3, 3))


@thorough(PROCESSES)
@pytest.mark.usefixtures("cpu")
def test_the_python_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "how-to" / "use-with-transformers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    torch.manual_seed(0)
    exec(compile("\n".join(blocks), "use-with-transformers.md", "exec"), {})


def test_the_names_that_may_change() -> None:
    """hal.engines.transformers uses these, which transformers does not document; its version is in the message."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator
    from transformers.integrations.moe import ExpertsInterface

    version = f"transformers {transformers.__version__}; hal was tested with 5.24"
    assert "sdpa" in transformers.AttentionMaskInterface(), version
    assert "paged|eager" in transformers.AttentionInterface(), version
    assert "grouped_mm" in ExpertsInterface(), version
    assert FullAttentionCacheAllocator.supports_block_table, version
    assert FullAttentionCacheAllocator.layer_type == "full_attention", version
    assert hasattr(FullAttentionCacheAllocator, "get_cache_for_block_table"), version
    assert "layer_to_allocator" in inspect.getsource(PagedAttentionCache), version
    assert hasattr(torch.ops.transformers, "grouped_mm_fallback"), version
