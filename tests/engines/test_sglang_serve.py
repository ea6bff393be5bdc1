"""Tests of `sglang serve` with hal: its answers, requests that it must refuse, and a scheduler that is killed.

They need SGLang: `make test-sglang` runs them.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.engine_server import STOP, Server
from helpers.sglang_server import needs_sglang, scheduler, served

import hal

pytestmark = needs_sglang
PROMPTS = ("def main():", "class Stack:\n", "for key in ", "import ", '"""Read', "    try:\n", "x = [", "return ")
NEW = 12
ARGUMENTS = (
    "--dtype",
    "float32",
    "--context-length",
    "512",
    "--max-total-tokens",
    "4096",
    "--chunked-prefill-size",
    "512",
    "--log-level",
    "warning",
)
VOCABULARY, WIDTH = 4096, 192
GREEDY = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    assert (config["vocab_size"], config["hidden_size"]) == (VOCABULARY, WIDTH)
    log = tmp_path_factory.mktemp("served") / "log"
    configured = {"backend": "cpu", "compilation": {"compiler": "graph"}}
    with served(trained, log, configured, *ARGUMENTS, "--enable-streaming-session") as made:
        print(f"the server answered after {made.seconds:.1f} s")  # noqa: T201
        yield made


@pytest.fixture(scope="module")
def texts(trained: Path) -> list[str]:
    """Return hal's continuations of ``PROMPTS``."""
    tokenizer = hal.Checkpoint.open(trained).tokenizer()
    given = [each.ids for each in tokenizer.encode_batch(list(PROMPTS))]
    found: list[list[int]] = [[] for _ in PROMPTS]
    with hal.open({"backend": "cpu", "dtype": "float32"}, activate=False) as backend:
        runner = hal.Runner(hal.load_model(trained, backend), backend)
        for token in hal.generate(runner, given, hal.SamplingParams(max_new_tokens=NEW)):
            found[token.prompt_index].append(token.token_id)
    return [tokenizer.decode(each) for each in found]


def completed(server: Server, prompt: str) -> str:
    asked = {"model": "any", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", asked)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def test_clients_get_the_text_of_generate(server: Server, texts: list[str]) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda row: completed(server, PROMPTS[row % 8]), range(16)))
    assert found == texts * 2


@pytest.mark.shows("streams", "SGLang")
@pytest.mark.shows("a server", "SGLang")
def test_a_client_gets_a_stream(server: Server, texts: list[str]) -> None:
    status, answer = server.post("/generate", {"text": PROMPTS[0], "sampling_params": GREEDY, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert (status, events[-1]) == (200, "[DONE]")
    assert json.loads(events[-2])["text"] == texts[0]


def generated(params: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    return {"input_ids": [9, 10, 11], "sampling_params": {"max_new_tokens": 2, **(params or {})}, **given}


def scored(**given: Any) -> dict[str, Any]:
    return {"model": "any", "query": [9, 10], "items": [[11], [12]], "label_token_ids": [20, 21], **given}


OUTSIDE = [VOCABULARY, -1, 10**6, 2**40]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("/generate", generated(input_ids=[9, token, 11]), f"the prompt has the token id {token}") for token in OUTSIDE),
    ("/generate", generated(input_ids=[[9], [10, 4096]]), "the prompt has the token id 4096"),
    ("/v1/completions", {"model": "any", "prompt": [9, 4096], "max_tokens": 2}, "the prompt has the token id 4096"),
    ("/v1/score", scored(query=[4096]), "the prompt has the token id 4096"),
    ("/v1/score", scored(label_token_ids=[4096]), "4096"),
    ("/generate", {"text": "", "sampling_params": {}}, "the prompt has no tokens"),
    ("/v1/completions", {"model": "any", "prompt": "", "max_tokens": 2}, "Prompt cannot be empty"),
    *(
        ("/generate", generated({"stop_token_ids": [token]}), f"stop_token_ids has the token id {token}")
        for token in OUTSIDE
    ),
    *(("/generate", generated(return_logprob=True, token_ids_logprob=[token]), str(token)) for token in OUTSIDE),
    *(("/generate", generated({"logit_bias": {str(token): 1.0}}), "logit_bias") for token in OUTSIDE),
    *(
        ("/generate", generated({name: value}), f"{name} is ")
        for name, value in (
            ("top_k", 2**31),
            ("temperature", 1e39),
            ("repetition_penalty", 1e-40),
            ("logit_bias", {"5": 1e39}),
        )
    ),
    ("/generate", generated({"stream_interval": "often"}), "invalid type"),
    *(
        ("/generate", generated(return_logprob=True, top_logprobs_num=count), f"top_logprobs_num is {count}")
        for count in (-1, VOCABULARY + 1)
    ),
    ("/generate", generated(session_params={"id": "any", "replace": True}), "replace without rid"),
    ("/generate", {"input_embeds": [[0.0] * WIDTH] * 2, "sampling_params": {}}, "input_embeds"),
    ("/generate", generated(token_indices_to_pool=[1]), "positions to score at"),
    (
        "/v1/score",
        scored(embed_override_token_id=10, query_embed_overrides=[[0.0] * WIDTH]),
        "embeddings in place of tokens",
    ),
]


@pytest.mark.parametrize(("path", "asked", "problem"), REFUSED)
def test_one_request_that_is_refused_ends_no_other(
    server: Server, texts: list[str], path: str, asked: dict[str, Any], problem: str
) -> None:
    status, answer = server.post(path, asked)
    assert status == 400, answer
    assert problem in json.dumps(answer)
    assert completed(server, PROMPTS[0]) == texts[0]


def test_a_scheduler_that_is_killed_ends_the_server(trained: Path, tmp_path: Path) -> None:
    """Each client gets an error or the end of its answer, and no process is left."""
    with served(trained, tmp_path / "log", {"backend": "cpu"}, *ARGUMENTS) as server:
        processes = server.processes()
        asked = {"text": PROMPTS[0], "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}}

        def ended(_: int) -> str:
            try:
                return str(server.post("/generate", asked)[0])
            except OSError as error:
                return type(error).__name__

        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(ended, row) for row in range(8)]
            time.sleep(1)
            scheduler(server).send_signal(signal.SIGKILL)
            killed = time.monotonic()
            found = [each.result(timeout=STOP) for each in answers]
        print(f"{time.monotonic() - killed:.1f} s after the kill all clients had an answer: {found}")  # noqa: T201
        _, left = psutil.wait_procs(processes, timeout=STOP)
        assert not left, "the server ends by itself"
        assert server.process.returncode != 0
