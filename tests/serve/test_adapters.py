"""Adapters in commands: a request's model chooses one, and ``hal generate --adapter`` applies one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import ROOT
from helpers.adapters import adapter_of
from helpers.api_server import ask, served

import hal
from hal.cli import main

CHECKPOINT = ROOT / "checkpoints" / "tiny-python"
JSON = "application/json"
PROMPT = "def add(a, b):"
SAMPLING: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    found = tmp_path_factory.mktemp("adapter")
    adapter_of(AutoModelForCausalLM.from_pretrained(CHECKPOINT), found, alpha=4.0)
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[hal.LLM]:
    with hal.LLM(CHECKPOINT, backend="cpu", adapters={"style": folder}) as made:
        yield made


def test_the_model_of_a_request_chooses_the_adapter(llm: hal.LLM) -> None:
    expected = {
        "style": llm.generate(PROMPT, adapter="style", **SAMPLING)[0].text,
        "tiny": llm.generate(PROMPT, **SAMPLING)[0].text,
    }
    assert expected["style"] != expected["tiny"]

    def body(model: str, **more: Any) -> bytes:
        return json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}).encode()

    with served(llm) as url:
        for name, text in expected.items():
            status, answer, _ = ask(url, "POST", "/v1/completions", body(name), content_type=JSON)
            assert status == 200, answer
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
        logprobs = {}
        for name in expected:
            _, answer, _ = ask(url, "POST", "/v1/completions", body(name, echo=True, logprobs=0), content_type=JSON)
            logprobs[name] = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs["style"][1] != logprobs["tiny"][1]
        _, models, _ = ask(url, "GET", "/v1/models")
        assert [(each["id"], each.get("parent")) for each in models["data"]] == [("tiny", None), ("style", "tiny")]
        assert ask(url, "GET", "/v1/models/style")[1]["id"] == "style"
        status, answer, _ = ask(url, "POST", "/v1/completions", body("other"), content_type=JSON)
        assert status == 404
        assert "this server has tiny, style" in json.dumps(answer)
        embedding = json.dumps({"model": "style", "input": "x"}).encode()
        status, answer, _ = ask(url, "POST", "/v1/embeddings", embedding, content_type=JSON)
        assert status == 400
        assert "adapters embed no texts" in json.dumps(answer)


def test_generate_applies_an_adapter(llm: hal.LLM, folder: Path) -> None:
    arguments = ["generate", str(CHECKPOINT), "--backend", "cpu", "--prompt", PROMPT, "--max-new-tokens", "12"]
    found = CliRunner().invoke(main, [*arguments, "--temperature", "0", "--adapter", str(folder), "--json"])
    assert found.exit_code == 0, found.output
    line = json.loads(found.stdout.splitlines()[0])
    assert line["text"] == llm.generate(PROMPT, adapter="style", **SAMPLING)[0].text


@pytest.mark.parametrize("given", ["style", "=folder", "style=", f"{CHECKPOINT}=folder"])
def test_serve_refuses_adapters_without_a_name_of_their_own(given: str) -> None:
    found = CliRunner().invoke(main, ["serve", str(CHECKPOINT), "--adapter", given])
    assert found.exit_code == 2
    assert "give NAME=PATH" in found.output
