"""Tests of `vllm serve` with images: its answers are those of hal alone.

They need vLLM: `make test-vllm` runs them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.distributions import installed
from helpers.pictures import CHECKPOINT, Image, questions
from helpers.vllm_programs import needs_vllm
from helpers.vllm_server import Server, served

import hal

pytestmark = needs_vllm
CLIENTS, PICTURES, NEW = 64, 20, 20
LIMIT = 120.0
# Blocks for some requests only, and steps that cut through pictures, which have up to 36 embeddings.
ARGUMENTS = ("--max-model-len", "128", "--max-num-seqs", "16", "--max-num-batched-tokens", "48")


def messages(client: int) -> list[dict[str, Any]]:
    """Return a question: about a picture, which other clients show too, about two, or about none."""
    asked = questions(PICTURES)
    shown = [asked[client % PICTURES]]
    if client % 8 == 7:
        shown.append(asked[client % 3])
    parts = [{"type": "image_url", "image_url": {"url": url(each.pixels)}} for each in shown]
    text = {"type": "text", "text": asked[(client + client // PICTURES) % PICTURES].text}
    return [{"role": "user", "content": [*parts, text] if client % 5 else [text]}]


def url(pixels: Any) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def answered(server: Server, asked: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Return the status of an answer, and its text."""
    given = {"model": str(CHECKPOINT), "messages": asked, "max_tokens": NEW, "temperature": 0}
    status, found = server.post("/v1/chat/completions", given, LIMIT)
    return status, found["choices"][0]["message"]["content"] if status == 200 else str(found)


def answers(server: Server, clients: int) -> list[str]:
    asked = [*map(messages, range(clients))]
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda each: answered(server, each), asked))
    assert {status for status, _ in found} == {200}, found
    return [text.strip() for _, text in found]


def wanted(clients: int, **config: Any) -> list[str]:
    with hal.LLM(CHECKPOINT, max_length=128, **config) as llm:
        found = llm.chat([*map(messages, range(clients))], max_new_tokens=NEW, temperature=0.0)
    return [each.text.strip() for each in found]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    configured = {"backend": "cpu", "compilation": {"compiler": "graph"}}
    blocks = ("--block-size", "16", "--num-gpu-blocks-override", "60")
    log = tmp_path_factory.mktemp("served") / "log"
    with served(CHECKPOINT, log, configured, "--dtype", "float32", *blocks, *ARGUMENTS) as made:
        yield made


@pytest.mark.shows("images", "vLLM")
def test_64_clients_show_pictures_at_once(server: Server) -> None:
    found = answers(server, CLIENTS)
    assert found == wanted(CLIENTS, backend="cpu", dtype="float32")
    alone = [client for client in range(PICTURES) if client % 5 and client % 8 != 7]
    assert sum(found[client] == questions(PICTURES)[client].answer for client in alone) >= 0.9 * len(alone)


def test_a_wrong_picture_is_an_error_and_others_go_on(server: Server) -> None:
    asked = messages(1)
    more = [{**asked[0], "content": [*asked[0]["content"], {"type": "text", "text": "<image>"}]}]
    status, text = answered(server, more)
    assert (status, "placeholders" in text) == (400, True), text
    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    assert answered(server, [{"role": "user", "content": broken}])[0] == 400
    largest = max((each.pixels for each in questions(PICTURES)), key=lambda each: each.numel())
    for wide in (largest.repeat(1, 1, 2), largest[:, :1].repeat(1, 1, 20)):  # above a step's tokens; too flat
        shown = [{"type": "image_url", "image_url": {"url": url(wide)}}]
        assert answered(server, [{"role": "user", "content": shown}])[0] == 400
    assert answered(server, asked)[0] == 200


@pytest.mark.skipif(not installed("torch-npu"), reason="torch_npu is not installed")
def test_an_emulated_npu_reads_pictures(tmp_path_factory: pytest.TempPathFactory) -> None:
    configured = {"backend": "npu", "compilation": {"compiler": "graph", "capture_sizes": [1, 4, 16]}}
    log = tmp_path_factory.mktemp("served") / "log"
    with served(
        CHECKPOINT, log, configured, "--dtype", "float16", "--num-gpu-blocks-override", "64", *ARGUMENTS
    ) as made:
        assert answers(made, 16) == wanted(16, backend="cpu", dtype="float32")
