"""Tests for hal.LLM: each request gives what it gives alone, whoever else asks, and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.checkpoints import random_checkpoint, write_json
from helpers.random_requests import check_together
from helpers.reference import TEXTS
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from helpers.waiting import until
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hal
from hal.errors import BatchError, CheckpointError, ClosedError, ConfigError
from hal.generation.llm.piece_stream import PieceStream
from hal.generation.request import Request

CONFIG: dict[str, Any] = {
    "cache": {"block_size": 16, "num_tokens": 2048},
    "compilation": {"capture_sizes": [1, 2, 4, 8]},
}


def opened(folder: Path, compiler: str = "graph", **options: Any) -> hal.LLM:
    return hal.LLM(folder, backend="cpu", dtype="float32", compiler=compiler, max_sequences=8, config=CONFIG, **options)


def idle_blocks(llm: hal.LLM) -> int:
    """Return the free blocks, with those that only the prefix cache keeps."""
    prefixes = llm._runner.prefixes
    kept = [] if prefixes is None else [each for each in prefixes._contents if not prefixes._owners[each]]
    return llm._runner.blocks.num_free + len(kept)


@pytest.fixture(scope="module")
def llm(trained: Path) -> Iterator[hal.LLM]:
    with opened(trained) as made:
        yield made


@pytest.fixture(scope="module")
def reference(trained: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()


@pytest.mark.shows("texts", "hal.LLM")
@pytest.mark.shows("requests that join running ones", "hal.LLM")
@thorough(EXHAUSTIVE, "many")
@pytest.mark.parametrize(("count", "num_threads"), [(24, 4), (200, 8)], ids=["few", "many"])
def test_random_requests_of_threads_give_what_each_gives_alone(count: int, num_threads: int, trained: Path) -> None:
    seed = random.randrange(1 << 30)
    logging.getLogger("tests").info("seed %d", seed)
    with opened(trained) as llm:
        llm.generate("x", max_new_tokens=1)
        before = idle_blocks(llm)
        check_together(llm, random.Random(seed), count, num_threads)
        until(lambda: not (llm.occupancy.running or llm.occupancy.waiting))
        assert idle_blocks(llm) == before
        assert not llm._loop._live


def test_text_ids_and_reasons(llm: hal.LLM) -> None:
    one, two = llm.generate(["import os\n", llm.tokenizer.encode("import os\n").ids], max_new_tokens=5)
    assert one == attrs.evolve(two, prompt_index=0)
    assert two.prompt_index == 1
    assert one.text == llm.tokenizer.decode(list(one.token_ids))
    assert (one.finish_reason, one.stop, len(one.token_ids)) == ("length", None, 5)
    assert list(one.prompt_token_ids) == llm.tokenizer.encode("import os\n").ids
    assert llm.generate([]) == []


@pytest.mark.shows("stop texts", "hal.LLM")
def test_a_stop_text_cuts_the_text_and_ends_it(llm: hal.LLM) -> None:
    whole = llm.generate(TEXTS[2], max_new_tokens=40)[0]
    stop = whole.text[12:15]
    (cut,) = llm.generate(TEXTS[2], max_new_tokens=40, stop=[stop, "never"])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop) == ("stop", stop)
    assert len(cut.token_ids) < 40
    pieces = list(llm.stream(TEXTS[2], max_new_tokens=40, stop=stop))
    assert "".join(pieces) == cut.text
    (late,) = llm.generate(TEXTS[2], max_new_tokens=40, stop=stop, min_new_tokens=len(cut.token_ids) + 1)
    assert late.text.startswith(whole.text[: whole.text.index(stop) + len(stop)])


@pytest.mark.shows("several samples of a prompt", "hal.LLM")
def test_samples_of_a_prompt_share_its_prefix(llm: hal.LLM) -> None:
    prompt = " ".join(TEXTS) * 2
    tokens: list[int] = []
    step = llm._runner.step

    def noted(batch: hal.step.Batch, *args: Any, **kwargs: Any) -> hal.StepOutput:
        tokens.append(batch.num_tokens)
        return step(batch, *args, **kwargs)

    llm._runner.step = noted  # type: ignore[method-assign]
    try:
        found = llm.generate(prompt, n=4, temperature=1.0, seed=3, max_new_tokens=6)
    finally:
        del llm._runner.step  # type: ignore[method-assign]
    length = len(found[0].prompt_token_ids)
    assert [each.sample_index for each in found] == [0, 1, 2, 3]
    assert len({each.text for each in found}) > 1
    assert sum(tokens) < length + 4 * (16 + 6)
    assert found[2].text == llm.generate(prompt, temperature=1.0, seed=5, max_new_tokens=6)[0].text


def test_seeds_are_integers_of_64_bits_and_minus_one_is_none(llm: hal.LLM) -> None:
    def made(**seed: int) -> str:
        return llm.generate(TEXTS[0], temperature=1.5, max_new_tokens=12, **seed)[0].text

    assert made(seed=-2) == made(seed=-2) != made(seed=2)
    assert llm.generate(TEXTS[0], temperature=1.5, max_new_tokens=12, seed=-(2**63), n=2)[1].text == made(seed=1)
    assert made(seed=-1) != made(seed=-1)
    fixed = hal.SamplingParams(temperature=1.5, max_new_tokens=12, seed=-1, top_k=-1)
    assert llm.generate(TEXTS[0], fixed)[0].text == llm.generate(TEXTS[0], attrs.evolve(fixed, top_k=0))[0].text


@pytest.mark.shows("streams", "hal.LLM")
def test_streams_end_with_their_reader(llm: hal.LLM) -> None:
    before = idle_blocks(llm)

    async def read(limit: int) -> str:
        found = ""
        pieces = llm.astream(TEXTS[1], max_new_tokens=30)
        async for piece in pieces:
            found += piece
            if len(found) >= limit:
                break
        await pieces.aclose()  # type: ignore[attr-defined]
        return found

    async def several() -> list[str]:
        return list(await asyncio.gather(read(1 << 20), read(3), read(1 << 20)))

    first, cut, third = asyncio.run(several())
    assert first == third == llm.generate(TEXTS[1], max_new_tokens=30)[0].text
    assert first.startswith(cut)
    assert len(cut) < len(first)
    llm.generate("x", max_new_tokens=1)
    assert idle_blocks(llm) == before


@pytest.mark.parametrize("read", [0, 1, 4])
def test_the_rest_of_a_stream_is_read_at_once(read: int, llm: hal.LLM) -> None:
    async def texts(stream: PieceStream) -> tuple[list[str], int]:
        pieces, reads = [], 0
        for _ in range(read):
            pieces += await stream.read()
        while found := await stream.rest():
            pieces, reads = pieces + found, reads + 1
        joined = ["".join(each.text for each in pieces if each.prompt_index == index) for index in (0, 1)]
        return joined, reads

    for seed in (1, 2):  # asyncio.run makes a new event loop for each
        prompts, sampling = TEXTS[:2], {"max_new_tokens": 12, "seed": seed, "ignore_eos": True}
        found, reads = asyncio.run(texts(llm.apieces(prompts, **sampling)))
        assert found == [each.text for each in llm.generate(prompts, **sampling)]
        assert reads == 1


def test_the_rest_of_a_stream_that_is_closed(trained: Path) -> None:
    async def closed(llm: hal.LLM) -> None:
        stream = llm.apieces(TEXTS[0], max_new_tokens=140, ignore_eos=True)
        await stream.read()
        rest = asyncio.create_task(stream.rest())
        await asyncio.sleep(0)
        await asyncio.to_thread(llm.close)
        with pytest.raises(ClosedError):
            await rest

    asyncio.run(closed(opened(trained)))


@pytest.mark.shows("log-probabilities", "hal.LLM")
def test_logprobs_are_those_of_transformers(llm: hal.LLM, reference: Any) -> None:
    (made,) = llm.generate(TEXTS[3], max_new_tokens=6, logprobs=3, prompt_logprobs=2)
    tokens = torch.tensor([[*made.prompt_token_ids, *made.token_ids]])
    with torch.no_grad():
        expected = reference(tokens).logits[0].log_softmax(-1)
    every = (*(made.prompt_logprobs or ()), *(made.logprobs or ()))
    assert [each.token_id for each in every] == tokens[0, 1:].tolist()
    for place, each in enumerate(every):
        torch.testing.assert_close(each.logprob, expected[place, each.token_id].item(), atol=2e-4, rtol=0)
        top = expected[place].topk(len(each.top))
        torch.testing.assert_close(torch.tensor([value for _, value in each.top]), top.values, atol=2e-4, rtol=0)
    assert {len(each.top) for each in made.logprobs or ()} == {3}
    assert {len(each.top) for each in made.prompt_logprobs or ()} == {2}


@pytest.mark.shows("scores of continuations", "hal.LLM")
def test_scores_are_those_of_transformers(llm: hal.LLM, reference: Any) -> None:
    continuations = [" sys\n", " os, sys", "x" * 30]
    scores = llm.score("import", continuations)
    for text, score in zip(continuations, scores, strict=True):
        tokens = torch.tensor([llm.tokenizer.encode("import" + text).ids])
        with torch.no_grad():
            expected = reference(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        assert [each.token_id for each in score.tokens] == tokens[0, 1:].tolist()
        torch.testing.assert_close(score.logprob, expected.sum().item(), atol=2e-3, rtol=0)
    with pytest.raises(BatchError, match="2 prompts and 3 continuations"):
        llm.score(["a", "b"], continuations)


def test_long_prompts_are_scored_and_embedded_in_chunks(trained: Path, reference: Any) -> None:
    """With chunks of 40 tokens, several prompts share a step, and a long one takes several."""
    with opened(trained) as llm:
        llm._runner.backend.configure(attrs.evolve(llm._runner.backend.config, max_prefill_tokens=40))
        texts = [*TEXTS, TEXTS[-1] * 3]
        ids = [llm.tokenizer.encode(text).ids for text in texts]
        vectors = llm.embed(texts)
        scores = llm.score([each[:1] for each in ids], [each[1:] for each in ids if len(each) > 1] or ids)
        for tokens, vector, score in zip(ids, vectors, scores, strict=True):
            with torch.no_grad():
                found = reference(torch.tensor([tokens]), output_hidden_states=True)
            torch.testing.assert_close(vector, found.hidden_states[-1][0, -1], atol=2e-4, rtol=1e-3)
            chosen = found.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
            torch.testing.assert_close(score.logprob, chosen.sum().item(), atol=5e-3, rtol=0)


def linked(source: Path, folder: Path) -> Path:
    """Return a folder with the files of a checkpoint."""
    folder.mkdir()
    for each in source.iterdir():
        (folder / each.name).symlink_to(each.resolve())
    return folder


@thorough(MODE, r"\[(cls|max)_")
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token", "max_tokens"])
@pytest.mark.shows("embeddings", "hal.LLM")
def test_embeddings_follow_modules_json(mode: str, trained: Path, tmp_path: Path, reference: Any) -> None:
    folder = linked(trained, tmp_path / "model")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {f"pooling_mode_{mode}": True, "pooling_mode_weighted": False})
    (folder / "2_Dense").mkdir()
    weight = torch.randn(12, reference.config.hidden_size)
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    write_json(folder / "2_Dense" / "config.json", {"activation_function": "torch.nn.modules.activation.Tanh"})
    with opened(folder, "eager") as llm:
        tokens = llm.tokenizer.encode(TEXTS[2]).ids
        (found,) = llm.embed(TEXTS[2])
    with torch.no_grad():
        hidden = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    pooled = {
        "lasttoken": hidden[-1],
        "mean_tokens": hidden.mean(0),
        "cls_token": hidden[0],
        "max_tokens": hidden.amax(0),
    }
    expected = torch.nn.functional.normalize((weight @ pooled[mode]).tanh(), dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_an_embedding_model_without_a_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as Qwen3-Embedding, whose tensors have the names of the base model."""
    whole = random_checkpoint(tmp_path / "whole", tie_word_embeddings=False)
    folder = linked(whole, tmp_path / "base")
    (folder / "model.safetensors").unlink()
    tensors = load_file(whole / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        opened(folder, "eager")
    write_json(folder / "modules.json", [])
    found = []
    for each in (whole, folder):
        with opened(each, "eager") as llm:
            found.append(llm.embed([[5, 9, 2], [7]]))
    torch.testing.assert_close(*found)
    assert "has no lm_head.weight: texts that it generates mean nothing" in caplog.text


@pytest.mark.shows("sampling as the checkpoint recommends", "hal.LLM")
def test_defaults_are_those_of_the_checkpoint(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = linked(trained, tmp_path / "model")
    (folder / "generation_config.json").unlink()
    recommended = {"do_sample": True, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "eos_token_id": 0}
    write_json(folder / "generation_config.json", recommended)
    with opened(folder, "eager") as llm:
        assert llm.defaults == {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2}
        assert "recommends repetition_penalty 1.2, temperature 1.0, top_k 5, top_p 0.9" in caplog.text
        explicit = hal.SamplingParams(
            temperature=1.0, top_k=5, top_p=0.9, repetition_penalty=1.2, seed=4, max_new_tokens=9
        )
        by_name = llm.generate(TEXTS[0], seed=4, max_new_tokens=9)[0]
        assert by_name.text == llm.generate(TEXTS[0], explicit)[0].text
        assert by_name.text != llm.generate(TEXTS[0], seed=4, max_new_tokens=9, temperature=0)[0].text
    assert "does not follow" not in caplog.text
    others = {"num_beams": 1, "suppress_tokens": [], "no_repeat_ngram_size": 3, "stop_strings": None}
    write_json(folder / "generation_config.json", {"do_sample": False, "temperature": 0.7, **others})
    with opened(folder, "eager") as llm:
        assert llm.defaults == {"temperature": 0.0}
    assert "says no_repeat_ngram_size 3, which hal does not follow" in caplog.text
    write_json(folder / "generation_config.json", {"temperature": -1})
    with pytest.raises(CheckpointError, match=r"generation_config.json: temperature is -1, out of its range"):
        opened(folder, "eager")


@thorough(EXHAUSTIVE, r"\[1000")
@pytest.mark.parametrize("rounds", [30, 1000])
def test_requests_leave_nothing_behind(rounds: int, trained: Path) -> None:
    config = {**CONFIG, "cache": {**CONFIG["cache"], "reuse_prefixes": False}}
    with hal.LLM(trained, backend="cpu", dtype="float32", compiler="eager", config=config) as llm:

        def ask(count: int) -> int:
            for number in range(count):
                sampling = {"max_new_tokens": 3, "temperature": 0.5, "presence_penalty": 0.5, "logit_bias": {5: 1.0}}
                llm.generate(TEXTS[number % len(TEXTS)], stop="zz", logprobs=1, **sampling)
                pieces = llm.stream(TEXTS[0], **sampling)
                next(pieces)
                pieces.close()  # type: ignore[attr-defined]
            llm.embed("x")
            llm.score("x", "y")
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = ask(max(20, rounds // 4))  # Until then, Python and torch keep objects for later.
            after = ask(rounds)
        finally:
            tracemalloc.stop()
        assert after - before < 40_000, "bytes after twice as many more requests"
        assert not [each for each in gc.get_objects() if type(each) is Request]
        assert llm._runner.blocks.num_free == llm._runner.spec.num_blocks - 1


def test_mistakes_are_named(llm: hal.LLM) -> None:
    with pytest.raises(ConfigError, match=r"no sampling parameter 'temprature'\n.*did you mean 'temperature'"):
        llm.generate("x", temprature=1)
    with pytest.raises(ConfigError, match="params is"):
        llm.generate("x", hal.SamplingParams(), temperature=1)
    with pytest.raises(BatchError, match="prompt 1 is empty"):
        llm.generate(["x", ""])
    with pytest.raises(BatchError, match="prompts is 3"):
        llm.generate(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stream has text only"):
        llm.stream("x", n=2)
    with pytest.raises(ConfigError, match=r"parallel asks for 2 ranks"):
        hal.LLM(llm.checkpoint, config={"parallel": {"tensor": 2}})


def test_a_failing_mask_ends_its_request_and_not_the_llm(llm: hal.LLM) -> None:
    def fail(generated: Any) -> torch.Tensor:
        raise ZeroDivisionError("oops")

    others, before = llm.stream(TEXTS[2], max_new_tokens=30), idle_blocks(llm)
    text = next(others)
    with pytest.raises(BatchError, match="ZeroDivisionError: oops"):
        llm.generate("x", mask=fail)
    text += "".join(others)
    assert text == llm.generate(TEXTS[2], max_new_tokens=30)[0].text, "requests beside it go on"
    assert idle_blocks(llm) == before


def test_operations_keep_their_backend(trained: Path) -> None:
    active = hal.open("cpu")
    with opened(trained, "eager") as llm:
        llm.generate("x", max_new_tokens=2, temperature=0.5)
        assert hal.active_backend() is active
    assert hal.ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6).shape == (1, 4)


def test_closing_ends_what_runs(trained: Path) -> None:
    llm = opened(trained, "eager")
    pieces = llm.stream(TEXTS[0], max_new_tokens=900)
    next(pieces)
    llm.close()
    with pytest.raises(ClosedError, match=r"hal.LLM is closed"):
        list(pieces)
    with pytest.raises(ClosedError):
        llm.generate("x")
    llm.close()
