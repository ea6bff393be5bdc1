"""Random requests to a hal.LLM from several threads, which arrive while others run, and are cancelled at random."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import attrs

import hal
from helpers.reference import TEXTS

HOW = ("generate", "stream", "leave", "stream", "cancel")


@attrs.frozen
class Job:
    """A request.

    Attributes:
        prompt: its prompt.
        sampling: its sampling parameters.
        how: ``generate``, ``stream``, ``leave`` after some pieces, or ``cancel`` after some time, as in :data:`HOW`.
        most: the pieces until it is left.
        seconds: the time until it is cancelled.
        pause: the seconds before it arrives.
    """

    prompt: str
    sampling: dict[str, Any]
    how: str
    most: int
    seconds: float
    pause: float

    @property
    def ends(self) -> bool:
        """Whether its text is read to the end."""
        return self.how in ("generate", "stream")


def drawn_jobs(draw: random.Random, count: int, most_tokens: int) -> list[Job]:
    """Return random requests."""
    return [
        Job(
            draw.choice(TEXTS),
            {
                "max_new_tokens": draw.randrange(1, most_tokens),
                "temperature": draw.choice([0.0, 0.8]),
                "seed": number,
                "repetition_penalty": draw.choice([1.0, 1.3]),
                "frequency_penalty": draw.choice([0.0, 0.5]),
                "logit_bias": draw.choice([{}, {5: 2.0}]),
                "stop": draw.choice([(), ("\n\n",), ("self",)]),
                "logprobs": draw.choice([None, 2]),
            },
            HOW[number % len(HOW)],
            most=draw.randrange(5),
            seconds=draw.random() * 0.1,
            pause=draw.choice([0.0, 0.0, draw.random() * 0.02]),
        )
        for number in range(count)
    ]


def read(llm: hal.LLM, job: Job) -> str:
    """Return the text that arrives before the request is ended."""
    if job.how == "generate":
        return llm.generate(job.prompt, **job.sampling)[0].text
    if job.how == "cancel":
        return asyncio.run(_read_for(llm, job))
    pieces: Any = llm.stream(job.prompt, **job.sampling)
    if job.how == "stream":
        return "".join(pieces)
    text = "".join(piece for piece, _ in zip(pieces, range(job.most), strict=False))
    pieces.close()
    return text


async def _read_for(llm: hal.LLM, job: Job) -> str:
    text = ""

    async def add() -> None:
        nonlocal text
        async for piece in llm.astream(job.prompt, **job.sampling):
            text += piece

    with suppress(TimeoutError):
        await asyncio.wait_for(add(), job.seconds)
    return text


def read_in_threads(llm: hal.LLM, jobs: Sequence[Job], num_threads: int) -> list[str]:
    """Return the texts of all requests, made by so many threads. An error of one is raised."""
    found = [""] * len(jobs)
    problems: list[BaseException] = []

    def work(share: range) -> None:
        try:
            for number in share:
                time.sleep(jobs[number].pause)
                found[number] = read(llm, jobs[number])
        except BaseException as error:
            problems.append(error)

    threads = [
        threading.Thread(target=work, args=(range(first, len(jobs), num_threads),)) for first in range(num_threads)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if problems:
        raise problems[0]
    return found


def check_together(llm: hal.LLM, draw: random.Random, count: int, num_threads: int, most_tokens: int = 24) -> None:
    """Compare the texts of random requests that run together with what each gives alone."""
    jobs = drawn_jobs(draw, count, most_tokens)
    alone = [llm.generate(each.prompt, **each.sampling)[0].text for each in jobs]
    together = read_in_threads(llm, jobs, num_threads)
    for job, text, expected in zip(jobs, together, alone, strict=True):
        assert text == expected if job.ends else expected.startswith(text), job
