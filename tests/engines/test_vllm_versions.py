"""Tests of which versions of vLLM hal runs in, and of what it imports of them."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

from helpers import ROOT
from helpers.vllm_programs import needs_vllm, run, vllm_version
from packaging.requirements import Requirement
from packaging.version import Version

from hal.engines.vllm.vllm_config import PARTS, REFUSED

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

SINCE = {"vllm.v1.worker.gpu.sample.logits_processor": "0.31"}
"""The first version of modules that the adapter imports only where they are."""
READERS = tomllib.loads(Path(__file__).with_name("vllm_options.toml").read_text(encoding="utf-8"))
"""Who reads each sampling parameter, and each option of the configuration."""
BY_HAL = set(READERS["sampling_params"]["by_hal"])
BY_VLLM = {name for names in READERS["sampling_params"]["by_vllm"].values() for name in names}
CONFIG_BY_HAL, CONFIG_BY_VLLM = READERS["config"]["by_hal"], READERS["config"]["by_vllm"]
OPTIONS = """
import dataclasses, json, sys
from vllm import EngineArgs
from vllm.config import KVTransferConfig
connector = KVTransferConfig("HalConnector", kv_role="kv_both", kv_connector_extra_config={"folder": "prefixes"})
asked = {"enable_lora": True, "kv_transfer_config": connector}
config = EngineArgs(model=sys.argv[1], max_model_len=64, **asked).create_engine_config()
parts = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
print("options: " + json.dumps({
    name: [each.name for each in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
    for name, part in parts.items()
}))
"""


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
    names = {
        (module, name): file
        for (module, name), file in imported().items()
        if not any(module.startswith(each) and vllm_version() < Version(since) for each, since in SINCE.items())
    }
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
    unknown = {*found[1].split()} - BY_HAL - BY_VLLM
    assert unknown == set(), f"vLLM {importlib.metadata.version('vllm')} has new sampling parameters"


@needs_vllm
def test_every_option_is_read_or_refused(trained: Path) -> None:
    """A version with a new one fails, as above."""
    result = run(OPTIONS, str(trained))
    found = re.search(r"^options: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    unknown = []
    for part, names in json.loads(found[1]).items():
        if part in PARTS or part in REFUSED:
            continue
        if part not in CONFIG_BY_HAL and part not in CONFIG_BY_VLLM:
            unknown.append(part)
        known = {*CONFIG_BY_HAL.get(part, ()), *CONFIG_BY_VLLM.get(part, ())}
        unknown += [f"{part}.{name}" for name in names if name not in known and f"{part}.{name}" not in REFUSED]
    assert unknown == [], f"vLLM {importlib.metadata.version('vllm')} has new options"


def test_the_adapter_reads_what_is_its_own() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in ADAPTER.glob("*.py"))
    own = BY_HAL.union(CONFIG_BY_HAL, *CONFIG_BY_HAL.values())
    read = {name for name in own if re.search(rf"\.{name}\b", text) or f'"{name}"' in text}
    assert read == own
