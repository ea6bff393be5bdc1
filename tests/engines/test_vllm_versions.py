"""Tests of which versions of vLLM hal runs in, and of what it imports of them."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import re

from helpers import ROOT
from helpers.vllm_programs import needs_vllm, run
from packaging.requirements import Requirement

ADAPTER = ROOT / "hal" / "engines" / "vllm"
PROGRAM = """
import importlib, json, sys
missing = []
for module, name in json.loads(sys.argv[1]):
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing.append([module, name, str(error)])
print("missing: " + json.dumps(missing))
"""

BY_HAL = {
    "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs",
    "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words_token_ids",
}  # fmt: skip
"""Sampling parameters that the adapter reads."""
BY_VLLM = {
    "by the scheduler and the output": {
        "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "detokenize", "skip_special_tokens",
        "stream_interval", "spaces_between_special_tokens", "include_stop_str_in_output",
        "output_kind", "output_text_buffer_length",
        "flat_logprobs", "skip_clone", "skip_reading_prefix_cache", "repetition_detection", "bad_words",
        "_bad_words_token_ids", "_eos_token_id", "_all_stop_token_ids", "_watermarking_skipped",
    },
    "by what the adapter gives them to": {
        "min_tokens", "min_p", "logit_bias", "extra_args", "structured_outputs", "thinking_token_budget",
    },
    "with an option that hal or vLLM refuses": {
        "watermarking", "prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start",
        "trace_decode_token_ids",
    },
}  # fmt: skip
"""Sampling parameters that the adapter need not read: who does."""


def imported() -> dict[tuple[str, str], str]:
    """Return the modules and names that the adapter imports of vLLM, each with a file that imports it."""
    found = {}
    for path in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {(str(node.module), each.name): path.name for each in node.names}
    return dict(sorted(found.items()))


def test_the_page_names_the_versions_that_are_installed() -> None:
    page = (ROOT / "docs" / "how-to" / "serve-with-vllm.md").read_text(encoding="utf-8")
    tested = re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    (extra,) = config["options.extras_require"]["vllm"].split()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert tested
    assert list(Requirement(extra).specifier.filter(tested)) == tested
    assert set(re.findall(r"^VLLM \?= (\S+)$", makefile, re.MULTILINE)) <= set(tested)


@needs_vllm
def test_vllm_has_what_the_adapter_imports() -> None:
    names = imported()
    result = run(PROGRAM, json.dumps(list(names)))
    found = re.search(r"^missing: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    print(*(f"{file}: {module}.{name}" for (module, name), file in names.items()), sep="\n")  # noqa: T201
    missing = [f"{names[module, name]} imports {name}: {error}" for module, name, error in json.loads(found[1])]
    assert missing == [], f"vLLM {importlib.metadata.version('vllm')} lacks some of the names"


@needs_vllm
def test_every_sampling_parameter_is_read() -> None:
    """A version with a new one fails: somebody must find out whether a worker has to read it."""
    result = run("from vllm import SamplingParams; print('fields:', *SamplingParams.__struct_fields__)")
    found = re.search(r"^fields: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    unknown = {*found[1].split()} - BY_HAL.union(*BY_VLLM.values())
    assert unknown == set(), f"vLLM {importlib.metadata.version('vllm')} has new sampling parameters"


def test_the_adapter_reads_the_sampling_parameters_that_are_its_own() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in ADAPTER.glob("*.py"))
    read = {name for name in BY_HAL if re.search(rf"\.{name}\b", text) or f'"{name}"' in text}
    assert read == BY_HAL
