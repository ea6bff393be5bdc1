"""Tests for ``hal serve`` under load, and for its end: no wrong token, nothing left over."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.api_server import ask, command, metric
from helpers.reference import TEXTS
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough
from helpers.waiting import until
from openai import AsyncOpenAI, OpenAI

import hal
from hal.errors import ConfigError
from hal.serve.application import bound_socket

ARGUMENTS = ("--backend", "cpu", "--dtype", "float32", "--compiler", "graph", "--served-name", "tiny")
CONFIG: dict[str, Any] = {"cache": {"block_size": 16, "num_tokens": 8192}, "compilation": {"capture_sizes": [1, 4, 16]}}
ENVIRONMENT = {
    "HAL_CACHE": json.dumps(CONFIG["cache"]),
    "HAL_COMPILATION__CAPTURE_SIZES": json.dumps(CONFIG["compilation"]["capture_sizes"]),
}
Job = tuple[str, dict[str, Any], bool]
"""A prompt, its sampling parameters, and whether the client goes away."""
BAD = (b"{", b"", b'{"model": "tiny"}', b'{"model": "tiny", "prompt": "x", "n": -1}', b"\xff\xfe", b"[" * 9999)


def drawn_jobs(draw: random.Random, count: int) -> list[Job]:
    """Return prompts, their sampling parameters, and whether the client goes away."""
    return [
        (
            draw.choice(TEXTS),
            {
                "max_tokens": draw.randrange(1, 30),
                "temperature": draw.choice([0.0, 0.8]),
                "seed": number,
                "presence_penalty": draw.choice([0.0, 0.5]),
                "stop": draw.choice([None, ["\n\n"], ["self"]]),
            },
            draw.random() < 1 / 3,
        )
        for number in range(count)
    ]


def expected_texts(checkpoint: Path, jobs: list[Job]) -> list[str]:
    """Return the text of each request, beside some others. Tests of hal.LLM show that it is what it gives alone."""

    def text(job: Job) -> str:
        sampling = {**job[1], "max_new_tokens": job[1]["max_tokens"]}
        del sampling["max_tokens"]
        return llm.generate(job[0], **sampling)[0].text

    with (
        hal.LLM(checkpoint, backend="cpu", dtype="float32", compiler="graph", config=CONFIG) as llm,
        ThreadPoolExecutor(16) as pool,
    ):
        return list(pool.map(text, jobs))


async def load(
    url: str, jobs: list[Job], seed: int, stop: Callable[[], None] | None = None
) -> dict[int, tuple[str, bool]]:
    """Send all requests at once, with bad bodies between them. Return each text, and whether it is whole.

    Args:
        url: the server's address.
        jobs: the requests.
        seed: decides when clients go away.
        stop: ends the server when half of the requests have an answer. The others get an error.
    """
    found: dict[int, tuple[str, bool]] = {}
    draw = random.Random(seed)

    async def one(client: AsyncOpenAI, number: int) -> None:
        text, sampling, gone = jobs[number]
        made, whole, most = "", False, draw.randrange(0, 5)
        try:
            events = await client.completions.create(model="tiny", prompt=text, stream=True, **sampling)
            async for event in events:
                made += event.choices[0].text
                whole = event.choices[0].finish_reason is not None
                if gone and (most := most - 1) < 0:
                    await events.close()
                    break
        except Exception:  # Where a stream breaks, it is one of the HTTP library.
            if stop is None:
                raise
        found[number] = made, whole
        if stop is not None and len(found) == len(jobs) // 2:
            stop()

    async def bad() -> None:
        body = draw.choice(BAD)
        status, _, _ = await asyncio.to_thread(
            ask, url, "POST", "/v1/completions", body, Content_Type="application/json"
        )
        assert status == 400

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        others = [] if stop is not None else [bad() for _ in range(40)]
        await asyncio.gather(*(one(client, number) for number in range(len(jobs))), *others)
    return found


def check_texts(found: dict[int, tuple[str, bool]], jobs: list[Job], expected: list[str]) -> None:
    assert len(found) == len(jobs)
    for number, (text, whole) in found.items():
        assert text == expected[number] if whole else expected[number].startswith(text), jobs[number]


@thorough(EXHAUSTIVE)
@pytest.mark.parametrize("count", [256])
def test_many_clients(count: int, trained: Path, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    logging.getLogger("tests").info("seed %d", seed)
    jobs = drawn_jobs(random.Random(seed), count)
    expected = expected_texts(trained, jobs)
    with command(trained, tmp_path / "killed.log", *ARGUMENTS, **ENVIRONMENT) as server:
        found = asyncio.run(load(server.url, jobs, seed, stop=server.process.kill))
        check_texts(found, jobs, expected)
        assert sum(not whole for _, whole in found.values()) > count // 4
    with command(trained, tmp_path / "log", *ARGUMENTS, **ENVIRONMENT) as server:
        found = asyncio.run(load(server.url, jobs, seed + 1))
        check_texts(found, jobs, expected)
        assert count // 8 < sum(not whole for _, whole in found.values()) < count // 2
        until(
            lambda: all(
                metric(server.url, f"hal_{name}") == 0 for name in ("texts_running", "texts_waiting", "cache_blocks")
            )
        )
        assert "Traceback" not in server.written()


RANKS = ("--tensor-parallel", "2")


@thorough(PROCESSES)
def test_ranks_serve_the_texts_of_one_until_one_is_killed(trained: Path, tmp_path: Path) -> None:
    jobs = drawn_jobs(random.Random(3), 24)
    with command(trained, tmp_path / "log", *ARGUMENTS, *RANKS, **ENVIRONMENT) as server:
        found = asyncio.run(load(server.url, jobs, 3))
        check_texts(found, jobs, expected_texts(trained, jobs))
        until(lambda: metric(server.url, "hal_texts_running") == 0)
        last = max(server.process.children(), key=lambda each: each.environ().get("RANK", ""))
        last.kill()
        assert server.process.wait(timeout=60) == 128 + signal.SIGKILL
        assert server.written().count("error: rank 1 of 2 was ended by SIGKILL; when last seen") == 1
        assert server.written().count("error: ") == 1


@thorough(PROCESSES)
@pytest.mark.parametrize("ranks", [(), RANKS], ids=["one", "two ranks"])
def test_the_end_of_a_server(ranks: tuple[str, ...], trained: Path, tmp_path: Path) -> None:
    given = (*ARGUMENTS, "--shutdown-timeout", "60", *ranks)
    with command(trained, tmp_path / "log", *given, **ENVIRONMENT) as server:
        assert f"tiny is served at {server.url}/v1" in server.written()
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            events = client.completions.create(
                model="tiny", prompt="import ", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            made = [next(iter(events))]
            server.process.send_signal(signal.SIGTERM)
            made += events
            assert len(made) > 100
            assert made[-1].choices[0].finish_reason == "length", "running requests end"
        assert server.process.wait(timeout=30) == 0
        assert "Traceback" not in server.written()


def test_an_address_that_is_taken(trained: Path) -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot have the address 127.0.0.1, port {port}"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot have the address no\.such\.host\.invalid"):
        bound_socket("no.such.host.invalid", 0)
