"""Tests of `vllm serve` with hal under load: many clients, clients that hang up, and a process that is killed.

They need vLLM: `make test-vllm` runs them.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from helpers.distributions import installed
from helpers.engine_server import STOP
from helpers.vllm_programs import needs_vllm
from helpers.vllm_server import Server, served

import hal

pytestmark = needs_vllm
CLIENTS, NEW = 64, 24
PROMPTS = ("def main():", "class Stack:\n", "for key in ", "import ", '"""Read', "    try:\n", "x = [", "return ")
LIMIT = 120.0
"""Seconds within which each client has an answer or an error."""
ARGUMENTS = ("--max-model-len", "512", "--max-num-seqs", "16")
ON_CPU = {"backend": "cpu", "compilation": {"compiler": "graph"}}
CPU_ARGUMENTS = ("--dtype", "float32", "--num-gpu-blocks-override", "400", *ARGUMENTS)
RANKS = "--tensor-parallel-size"


@pytest.fixture(scope="module", params=["1", "2"], ids=["one-rank", "two-ranks"])
def server(request: pytest.FixtureRequest, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("served") / "log"
    with served(trained, log, ON_CPU, *CPU_ARGUMENTS, RANKS, request.param) as made:
        print(f"the server answered after {made.seconds:.1f} s")  # noqa: T201
        yield made


@functools.lru_cache(1)
def client(server: Server) -> Any:
    """Return a client, which threads may share. Making one for each takes more time than their requests."""
    import openai

    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=LIMIT)


def streamed(
    server: Server,
    model: Path,
    prompt: str,
    new: int = NEW,
    hang_up_after: int | None = None,
    began: Event | None = None,
) -> str:
    """Return the text that a client receives, piece by piece. It may close the connection after some pieces."""
    text, pieces = "", 0
    stream = client(server).completions.create(
        model=str(model), prompt=prompt, max_tokens=new, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    with stream:
        for event in stream:
            text += event.choices[0].text
            pieces += 1
            if began is not None:
                began.set()
            if pieces == hang_up_after:
                return text
    return text


def eventually(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.1)
    return holds()


def expected(checkpoint: Path, prompts: tuple[str, ...], **config: Any) -> list[str]:
    tokenizer = hal.Checkpoint.open(checkpoint).tokenizer()
    given = [each.ids for each in tokenizer.encode_batch(list(prompts))]
    found: list[list[int]] = [[] for _ in prompts]
    with hal.open(config, activate=False) as backend:
        runner = hal.Runner(hal.load_model(checkpoint, backend), backend)
        for token in hal.generate(runner, given, hal.SamplingParams(max_new_tokens=NEW)):
            found[token.prompt_index].append(token.token_id)
    return [tokenizer.decode(each) for each in found]


@pytest.mark.shows("streams", "vLLM")
@pytest.mark.shows("a server", "vLLM")
def test_64_clients_stream_at_once(server: Server, trained: Path) -> None:
    wanted = expected(trained, PROMPTS, backend="cpu", dtype="float32")
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(streamed, server, trained, PROMPTS[row % len(PROMPTS)]) for row in range(CLIENTS)]
        texts = [each.result(timeout=LIMIT) for each in answers]
    assert texts == [wanted[row % len(PROMPTS)] for row in range(CLIENTS)]
    assert eventually(lambda: server.metric("num_requests_running") == 0, 10)


def test_clients_that_hang_up_leave_nothing(server: Server, trained: Path) -> None:
    began = server.metric("generation_tokens_total")
    with ThreadPoolExecutor(CLIENTS) as pool:
        left = [pool.submit(streamed, server, trained, PROMPTS[row % 8], 480, 3) for row in range(CLIENTS // 2)]
        stayed = [pool.submit(streamed, server, trained, PROMPTS[row % 8]) for row in range(CLIENTS // 2)]
        assert all(each.result(timeout=LIMIT) for each in (*left, *stayed))
    assert eventually(
        lambda: not any(server.metric(f"num_requests_{state}") for state in ("running", "waiting")), 20
    ), server.get("/metrics")
    assert server.metric("kv_cache_usage_perc") == 0.0
    made = server.metric("generation_tokens_total") - began
    assert made < CLIENTS // 2 * (480 + NEW) / 2, "requests without a client went on"


def test_a_request_that_is_wrong_is_an_error_and_others_go_on(server: Server, trained: Path) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="512"):
        streamed(server, trained, "x = " * 2000)
    assert streamed(server, trained, PROMPTS[0])


@pytest.mark.parametrize(("ranks", "victim"), [("1", "EngineCore"), ("2", "EngineCore"), ("2", "Worker")])
def test_a_process_that_is_killed_ends_every_request(trained: Path, tmp_path: Path, ranks: str, victim: str) -> None:
    """Each client gets an error, or the end of its stream; the server ends, and leaves no process."""
    import openai

    with served(trained, tmp_path / "log", ON_CPU, *CPU_ARGUMENTS, RANKS, ranks) as server:
        processes, began = server.processes(), Event()

        def asked(row: int) -> str:
            try:
                streamed(server, trained, PROMPTS[row % 8], 480, began=began)
            except openai.APIError as error:
                return type(error).__name__
            return "finished"

        with ThreadPoolExecutor(32) as pool:
            answers = [pool.submit(asked, row) for row in range(32)]
            assert began.wait(LIMIT)  # The first piece, not a metric: the server answers late under load.
            server.named(victim).send_signal(signal.SIGKILL)
            killed = time.monotonic()
            found = [each.result(timeout=LIMIT) for each in answers]
        took = time.monotonic() - killed
        print(f"{took:.1f} s after the kill all 32 clients had an answer: {sorted(set(found))}")  # noqa: T201
        assert took < 30
        assert sum(each != "finished" for each in found) > 16
        with pytest.raises(openai.APIError):
            streamed(server, trained, PROMPTS[0])
        _, left = psutil.wait_procs(processes, timeout=STOP)
        assert not left, "the server ends by itself"


def test_sigterm_ends_the_server_after_its_streams(trained: Path, tmp_path: Path) -> None:
    """vLLM's default of --shutdown-timeout leaves them without an end, and waits for them without a limit."""
    with served(trained, tmp_path / "log", ON_CPU, *CPU_ARGUMENTS) as server:
        processes, began = server.processes(), [Event() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(streamed, server, trained, PROMPTS[0], 200, None, each) for each in began]
            assert all(each.wait(LIMIT) for each in began)
            server.process.send_signal(signal.SIGTERM)
            assert all(each.result(timeout=LIMIT) for each in answers)
        _, left = psutil.wait_procs(processes, timeout=STOP)
        assert not left, "the server ends by itself"


@pytest.mark.skipif(not installed("torch-npu"), reason="torch_npu is not installed")
def test_an_emulated_npu_serves(trained: Path, tmp_path: Path) -> None:
    configured = {"backend": "npu", "compilation": {"compiler": "graph", "capture_sizes": [1, 2, 4, 8, 16]}}
    with served(
        trained, tmp_path / "log", configured, "--dtype", "float16", "--num-gpu-blocks-override", "64", *ARGUMENTS
    ) as server:
        print(f"the server answered after {server.seconds:.1f} s")  # noqa: T201
        with ThreadPoolExecutor(16) as pool:
            texts = list(pool.map(lambda row: streamed(server, trained, PROMPTS[row % 8], 8), range(16)))
        assert all(texts)
        assert texts[:8] == texts[8:]
