"""Tests of hal.LLM in several ranks: the first one takes the calls, and the others run the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import model_on_ranks
from helpers.rank_processes import run, succeeded
from helpers.thorough import PROCESSES, thorough

import hal
from hal.errors import ConfigError

ENVIRON = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.shows("tensor parallelism", "hal.LLM")
def test_ranks_give_what_one_gives(trained: Path) -> None:
    with model_on_ranks.opened(str(trained), 1) as llm:
        alone = model_on_ranks.used(llm)
    found, refused = succeeded(run(model_on_ranks.shared, 2, str(trained), environ=ENVIRON, timeout=200))
    assert found["texts"] == alone["texts"]
    assert found["scores"] == pytest.approx(alone["scores"], rel=1e-4)
    for one, other in zip(found["embeddings"], alone["embeddings"], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    assert refused.startswith("this is not the first rank")


@thorough(PROCESSES)
@pytest.mark.parametrize("whose", [0, 1])
def test_an_error_of_one_rank_ends_all(whose: int, trained: Path) -> None:
    first, second = succeeded(run(model_on_ranks.failing, 2, str(trained), whose, environ=ENVIRON, timeout=200))
    own, others = ["BatchError"], ["CommunicationError"]
    assert (first, second) == ((own if whose == 0 else others) * 3, others if whose == 0 else own)


def test_copies_of_a_model_are_refused(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.data is 2, and hal\.LLM has one copy"):
        hal.LLM(trained, backend="cpu", config={"parallel": {"data": 2}})
