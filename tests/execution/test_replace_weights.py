"""Tests of weights that are replaced under a runner: results equal those of a model loaded from the new weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import replacing
from helpers.ranks import in_ranks
from helpers.replacing import generated, logits, tensors
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal.checkpoint.weight_replacement import replace_tensors
from hal.device.group import Group
from hal.errors import CheckpointError, ModelError
from hal.nn import CausalLM
from hal.parallel import Mesh

Pairs = Callable[[str], tuple[Path, Path]]


def opened(compiler: str = "eager", **cache: Any) -> hal.Backend:
    compilation = {"compiler": compiler} | ({} if compiler == "eager" else {"capture_sizes": [1, 2, 4], "debug": True})
    if compiler == "inductor":
        compilation.pop("debug")
    return hal.open(
        {
            "backend": "cpu",
            "dtype": "float32",
            "compilation": compilation,
            "cache": {"num_tokens": 1024, "block_size": 16, **cache},
        }
    )


def runner_of(folder: Path, backend: hal.Backend) -> hal.Runner:
    return hal.Runner(hal.load_model(folder, backend), backend)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Return a function that returns two checkpoints of a kind, made once."""
    return cache(lambda kind: replacing.two_checkpoints(tmp_path_factory.mktemp("two"), kind))


def held(model: CausalLM) -> dict[str, Tensor]:
    return {name: each.to_dense().clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


@thorough(EXHAUSTIVE, "inductor")
@thorough(MODE, "piecewise|w8a8_dynamic")
@pytest.mark.parametrize(
    ("kind", "compiler"),
    [
        ("tied", "eager"),
        ("tied", "graph"),
        ("experts", "eager"),
        ("biased", "eager"),
        ("compressed-tensors/w8a8", "graph"),
        ("modelslim/w8a8", "eager"),
        ("tied", "piecewise"),
        ("compressed-tensors/w8a16", "piecewise"),
        ("modelslim/w8a8_dynamic", "piecewise"),
        ("modelslim/w8a8_dynamic/experts", "graph"),
        ("tied", "inductor"),
    ],
)
def test_results_are_those_of_a_fresh_load(two_checkpoints: Pairs, kind: str, compiler: str) -> None:
    first, second = two_checkpoints(kind)
    fresh = runner_of(second, opened(compiler))
    expected, wanted = logits(fresh), generated(fresh)
    runner = runner_of(first, opened(compiler))
    before, former = logits(runner), held(runner.model)
    assert not torch.allclose(before, expected, atol=0.1)
    places = [each.data_ptr() for each in runner.model.parameters() if not each.is_mkldnn]
    hal.replace_weights(runner, tensors(second))
    assert torch.equal(logits(runner), expected)
    assert generated(runner) == wanted
    assert [each.data_ptr() for each in runner.model.parameters() if not each.is_mkldnn] == places
    hal.replace_weights(runner, tensors(first))  # and back
    assert torch.equal(logits(runner), before)
    assert all(torch.equal(each, former[name]) for name, each in held(runner.model).items())


def test_packed_weights_of_any_thread_count(tmp_path: Path) -> None:
    """A projection of this size may be packed, and so may the table that is also the output projection."""
    first, second = replacing.two_checkpoints(tmp_path, "tied", hidden_size=256, intermediate_size=512)
    expected = logits(runner_of(second, opened("graph")))
    runner = runner_of(first, opened("graph"))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)  # The layouts that pay are measured again.
    try:
        hal.replace_weights(runner, tensors(second))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(logits(runner), expected, rtol=1e-5, atol=1e-5)


def test_some_of_the_tensors(two_checkpoints: Pairs, tmp_path: Path) -> None:
    first, second = two_checkpoints("tied")
    new = {name: each for name, each in tensors(second).items() if "layers.1." in name or name == "model.norm.weight"}
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (mixed / name).write_bytes((first / name).read_bytes())
    from safetensors.torch import save_file

    save_file({**tensors(first), **new}, mixed / "model.safetensors")
    expected = logits(runner_of(mixed, opened()))
    runner = runner_of(first, opened("graph"))
    hal.replace_weights(runner, {name: each.double().requires_grad_() for name, each in new.items()})
    assert torch.equal(logits(runner), expected)


Change = Callable[[dict[str, Tensor]], object]
QUERY, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("tied", lambda given: given.update(nonsense=torch.ones(1)), r"nonsense is not in the model \(.*known"),
        ("tied", lambda given: given.update({QUERY: torch.ones(3, 4)}), rf"{QUERY} is \[3, 4\], not \[64, 32\]"),
        ("tied", lambda given: given.update({QUERY: given[QUERY].int()}), f"{QUERY} is I32, expected a floating"),
        (
            "tied",
            lambda given: given.update({QUERY: given[QUERY].bool()}),
            f"{QUERY} is BOOL, expected a floating",
        ),
        ("tied", lambda given: given.pop(QUERY), f"{QUERY} is missing, which .*qkv_proj.weight holds together with"),
        ("tied", lambda given: given.update({"lm_head.weight": given[EMBEDDING] + 1}), "but their values differ"),
        ("compressed-tensors/w8a8", lambda given: given.pop(QUERY + "_scale"), f"{QUERY}_scale is missing"),
        ("compressed-tensors/w8a8", lambda given: given.pop(QUERY), f"{QUERY} is missing"),
        ("compressed-tensors/w8a8", lambda given: given[QUERY + "_scale"].fill_(torch.nan), "are negative or not fin"),
        (
            "compressed-tensors/w8a8",
            lambda given: [each.zero_() for name, each in given.items() if name.endswith("input_zero_point")],
            "none in place of its bias",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(two_checkpoints: Pairs, kind: str, change: Change, problem: str) -> None:
    first, second = two_checkpoints(kind)
    runner = runner_of(first, opened())
    before, given = held(runner.model), tensors(second)
    change(given)
    with pytest.raises(CheckpointError, match=problem):
        hal.replace_weights(runner, given)
    assert all(torch.equal(each, before[name]) for name, each in held(runner.model).items())
    hal.replace_weights(runner, tensors(second))  # nothing is left of the failure
    assert torch.equal(logits(runner), logits(runner_of(second, opened())))


def streamed(given: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and overwrite each before the next. Only the last one may be held meanwhile."""
    alive: list[weakref.ref[Tensor]] = []
    for name in list(given):
        values = given[name].clone()
        alive.append(weakref.ref(values))
        yield name, values
        values.fill_(77)
        del values
        assert sum(each() is not None for each in alive) <= 1


@thorough(MODE, r"\[(experts|compressed-tensors/w8a8)-reversed|modelslim.*-as stored")
@pytest.mark.parametrize("order", ["as stored", "reversed"])
@pytest.mark.parametrize("kind", ["tied", "experts", "compressed-tensors/w8a8", "modelslim/w8a8_dynamic/experts"])
def test_a_stream_is_copied_tensor_by_tensor(two_checkpoints: Pairs, kind: str, order: str) -> None:
    first, second = two_checkpoints(kind)
    runner, expected = runner_of(first, opened()), logits(runner_of(second, opened()))
    given = tensors(second)
    if kind == "tied":
        given["lm_head.weight"] = given[EMBEDDING]
    if order == "reversed":
        given = dict(reversed(given.items()))
    hal.replace_weights(runner, streamed(given))
    assert torch.equal(logits(runner), expected)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda given: given.append(("nonsense", torch.ones(1))), "nonsense is not in the model"),
        (lambda given: given.append((QUERY, torch.ones(3, 4))), rf"{QUERY} is \[3, 4\], not .*{QUERY} is given twice"),
        (lambda given: given.append(("lm_head.weight", dict(given)[EMBEDDING] + 1)), "but their values differ"),
        (lambda given: given.remove(next(each for each in given if each[0] == QUERY)), f"{QUERY} is missing, which"),
    ],
)
def test_a_wrong_stream(
    two_checkpoints: Pairs, change: Callable[[list[tuple[str, Tensor]]], object], problem: str
) -> None:
    first, second = two_checkpoints("tied")
    runner, given = runner_of(first, opened()), list(tensors(second).items())
    change(given)
    with pytest.raises(CheckpointError, match=f"(?s){problem}.*may be partly replaced.*load the model again"):
        hal.replace_weights(runner, iter(given))
    hal.replace_weights(runner, tensors(second))  # nothing is left of the failure
    assert torch.equal(logits(runner), logits(runner_of(second, opened())))


@pytest.mark.parametrize("kind", ["experts", "compressed-tensors/w8a8/experts"])
@pytest.mark.parametrize("experts", ["split", "all_gather"])
def test_a_rank_keeps_its_part(two_checkpoints: Pairs, kind: str, experts: str) -> None:
    """All tensors are given to each rank, also those of experts that only other ranks hold."""
    first, second = two_checkpoints(kind)
    group = Group("pair", 1, 2, object())
    mesh = Mesh(tensor=group) if experts == "split" else Mesh(tensor=group, expert=group)
    shared = {} if experts == "split" else {"parallel": {"tensor": 2, "experts": experts}}
    config = {"backend": "cpu", "dtype": "float32", **shared}
    with hal.open(config, mesh=mesh) as backend, torch.inference_mode():
        model, expected = hal.load_model(first, backend), held(hal.load_model(second, backend))
        replace_tensors(model, backend, tensors(second))
        assert all(torch.equal(each, expected[name]) for name, each in held(model).items())
        replace_tensors(model, backend, iter(tensors(first).items()))
        wanted = held(hal.load_model(first, backend))
        assert all(torch.equal(each, wanted[name]) for name, each in held(model).items())


def test_a_model_that_was_not_loaded(cpu: hal.Backend, two_checkpoints: Pairs) -> None:
    runner = runner_of(two_checkpoints("tied")[0], cpu)
    runner.model.loaded = None
    with pytest.raises(ModelError, match=r"was not loaded by hal\.load_model"):
        hal.replace_weights(runner, {})


def test_prefixes_of_the_former_weights_are_dropped(two_checkpoints: Pairs) -> None:
    first, second = two_checkpoints("tied")
    wanted = generated(runner_of(second, opened(reuse_prefixes=True)))
    backend = opened(reuse_prefixes=True)
    runner = runner_of(first, backend)
    other = hal.Runner(runner.model, backend)
    for each in (runner, other):
        assert generated(each) != wanted
    running = hal.generate(runner, [[9] * 40], hal.SamplingParams(max_new_tokens=30))
    next(running)
    hal.replace_weights(runner, tensors(second))
    list(running)  # a sequence that began with the former weights is not recorded either
    assert [generated(each) for each in (runner, other)] == [wanted, wanted]
    assert generated(runner) == wanted  # with its own prefixes
    list(hal.generate(runner, [[9] * 60], hal.SamplingParams(max_new_tokens=1)))
    for each in (runner, other):
        assert each.prefixes is not None
        assert len(each.prefixes.take(each.spec.num_blocks - 1) or ()) == each.spec.num_blocks - 1  # none was lost


@thorough(EXHAUSTIVE, r"\[(tied|comp)")  # A rank alone keeps its part of these, above.
@pytest.mark.thorough("two ranks")
@pytest.mark.parametrize("kind", ["tied", "experts", "compressed-tensors/w8a8"])
def test_each_rank_keeps_its_part(two_checkpoints: Pairs, kind: str) -> None:
    first, second = two_checkpoints(kind)
    found = in_ranks("replaced", 2, first=str(first), second=str(second), parallel={"tensor": 2})
    for rank in found:
        assert torch.equal(rank["replaced"], rank["fresh"])
        assert not torch.allclose(rank["before"], rank["fresh"], atol=0.1)
