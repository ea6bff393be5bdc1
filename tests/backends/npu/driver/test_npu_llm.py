"""Tests of hal.LLM on an asynchronous device: requests of several threads, options of sampling, and closing."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.random_requests import check_together
from helpers.thorough import EXHAUSTIVE, thorough
from helpers.waiting import until
from safetensors.torch import load_file, save_file

import hal

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sparse(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the trained checkpoint with the two largest weights of each row of a matrix, and zeros.

    float32 holds the product of two 16-bit numbers exactly, so a sum of two rounds alike in any order. The order of
    longer sums depends on the batch, and a draw between two tokens that are close, then, too.
    """
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("llm") / "sparse")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            largest = weight.abs().topk(2).indices
            weights[name] = torch.zeros_like(weight).scatter(1, largest, weight.gather(1, largest))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(params=["eager", "graph"])
def llm(request: pytest.FixtureRequest, sparse: Path) -> Iterator[hal.LLM]:
    cache = {"num_tokens": 4096, "reuse_prefixes": False}
    config = {"cache": cache, "compilation": {"capture_sizes": [2, 8]}}
    with hal.LLM(
        sparse, backend="npu", dtype="float16", compiler=request.param, max_sequences=8, config=config
    ) as made:
        yield made
    hal.open("cpu")


@thorough(EXHAUSTIVE, "200")
@pytest.mark.parametrize(("count", "num_threads", "most_tokens"), [(16, 2, 12), (200, 8, 24)])
def test_random_requests_of_threads_give_what_each_gives_alone(
    count: int, num_threads: int, most_tokens: int, llm: hal.LLM
) -> None:
    seed = random.randrange(1 << 30)
    logging.getLogger("tests").info("seed %d", seed)
    free = llm._runner.blocks.num_free
    check_together(llm, random.Random(seed), count, num_threads, most_tokens)
    until(lambda: not llm.occupancy.running)  # The step that ran ahead of a text's end has been read.
    assert llm._runner.blocks.num_free == free
