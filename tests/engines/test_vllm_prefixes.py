"""Tests of prompts that one vLLM instance computes and another continues. `make test-vllm` runs the first ones."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from helpers import random_hybrids
from helpers.checkpoints import random_checkpoint
from helpers.distributions import installed
from helpers.vllm_programs import found_by, needs_vllm, run

import hal
from hal.engines.vllm.prefix_folder import PrefixFolder
from hal.engines.vllm.vllm_config import CONNECTOR, check_connector, check_replaceable
from hal.errors import HalError
from hal.execution.prefix_transfer import CachedPrefix, PrefixForm

BLOCK = 16


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """Return a folder in shared memory, where the machine has some."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def run_instances(
    tmp_path: Path, checkpoint: Path, folder: Path, *instances: tuple[str, str], runner: int
) -> dict[str, Any]:
    """Run instances with a role and a backend each. Blocks of the NPU are larger."""
    crossed = any(backend == "npu" for _, backend in instances)
    return found_by(
        "vllm_prefixes.main",
        tmp_path,
        checkpoint,
        runner=runner,
        instances=instances,
        folder=str(folder),
        hal={"cache": {"block_size": 128 if crossed else BLOCK}, "compilation": {"compiler": "graph"}},
        dtype="float16" if crossed else "float32",
        blocks=10 if crossed else 20,
        longest=400 if crossed else 200,
        requests=40,
        seed=1,
    )


def check_continued(found: dict[str, Any], first: dict[str, Any], second: dict[str, Any], block: int = BLOCK) -> None:
    """Check that the second instance read all that the first one wrote, and what that took."""
    shared = sum((each - 1) // block * block for each in found["prompts"])
    assert (first["read"], second["written"]) == (0, 0)
    assert second["read"] >= shared > 1000  # more if a preempted request reads again
    print(f"{first['written'] / shared:.0f} bytes were moved for a token of {first['bytes of a token']} bytes")  # noqa: T201
    assert first["written"] >= shared * first["bytes of a token"]


@needs_vllm
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize(("producer", "consumer"), [("cpu", "cpu"), ("cpu", "npu"), ("npu", "cpu")])
def test_an_instance_continues_what_another_has_computed(
    trained: Path, tmp_path: Path, shared_memory: Path, producer: str, consumer: str, runner: int
) -> None:
    if "npu" in (producer, consumer) and not installed("torch-npu"):
        pytest.skip("torch_npu is not installed")
    instances = ("kv_producer", producer), ("kv_consumer", consumer)
    found = run_instances(tmp_path, trained, shared_memory, *instances, runner=runner)
    first, second = found["found"]
    check_continued(found, first, second, BLOCK if producer == consumer else 128)
    assert first["resumed"]
    assert second["resumed"]
    if producer == consumer:
        assert second["tokens"] == first["tokens"], "seed 1"
    assert found["differ"] == [], "seed 1"


@needs_vllm
def test_an_instance_in_another_process_continues(trained: Path, tmp_path: Path, shared_memory: Path) -> None:
    """One changed bit in each file, and all is computed."""
    found = run_instances(tmp_path, trained, shared_memory, ("kv_producer", "cpu"), runner=1)
    (first,) = found["found"]
    (second,) = run_instances(tmp_path, trained, shared_memory, ("kv_consumer", "cpu"), runner=1)["found"]
    check_continued(found, first, second)
    assert second["tokens"] == first["tokens"], "seed 1"
    for file in shared_memory.iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    (third,) = run_instances(tmp_path, trained, shared_memory, ("kv_consumer", "cpu"), runner=1)["found"]
    assert (third["tokens"], third["read"]) == (first["tokens"], 0)


@needs_vllm
@pytest.mark.skipif(not installed("torch-npu"), reason="torch_npu is not installed")
def test_blocks_in_a_layout_of_a_driver_are_refused(trained: Path, shared_memory: Path) -> None:
    configuration = {"backend": "npu", "options": {"nz_cache": True}}
    connector = {
        "kv_connector": "HalConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(shared_memory)},
    }
    asked = f"max_model_len=64, dtype='float16', num_gpu_blocks_override=8, kv_transfer_config={connector}"
    result = run(f"from vllm import LLM; LLM({str(trained)!r}, additional_config={{'hal': {configuration}}}, {asked})")
    assert result.returncode != 0
    assert "keeps states in the layout fractal_nz" in result.stdout + result.stderr


def folder_of(path: Path, **changed: Any) -> PrefixFolder:
    form = PrefixForm("model", {"0.key": (torch.float32, (2, 4), 1)})
    return PrefixFolder(path, attrs.evolve(form, **changed), 4, most=4000)


def prefix_of(tokens: list[int], dtype: torch.dtype = torch.float32, model: str = "model") -> CachedPrefix:
    return CachedPrefix(model, tuple(tokens), {"0.key": torch.ones(len(tokens), 2, 4, dtype=dtype)})


def test_the_longest_prefix_is_found(tmp_path: Path) -> None:
    folder, tokens = folder_of(tmp_path / "new"), list(range(12))
    assert folder.shared(tokens) == tokens[:8]
    for count in (4, 8):
        assert not folder.has(tokens[:count])
        assert folder.keep(prefix_of(tokens[:count])) > 32 * count
    found = folder.find([*tokens, 3], 0)
    assert found is not None
    assert found.tokens == tuple(tokens[:8])
    assert folder.find(tokens[:8], 0).tokens == tuple(tokens[:4])  # type: ignore[union-attr] - the last token is computed
    assert folder.find([*tokens, 3], 8) is None
    assert folder.find([9, *tokens], 0) is None
    others: list[dict[str, Any]] = [{"model": "other"}, {"states": {"0.key": (torch.int8, (2, 4), 1)}}]
    assert [folder_of(tmp_path / "new", **each).find([*tokens, 3], 0) for each in others] == [None, None]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (prefix_of([0, 1, 2, 3], model="other"), "computed by another model"),
        (prefix_of([0, 1, 2, 3], torch.int8), "is torch.int8 .4, 2, 4., and here it is torch.float32"),
        (prefix_of([0, 1, 2, 4]), "is of other tokens"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: CachedPrefix, why: str
) -> None:
    folder = folder_of(tmp_path)
    folder.keep(prefix_of([0, 1, 2, 3]))
    (file,) = tmp_path.iterdir()
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    for data, problem in ((written.to_bytes(), why), (bytes(changed), "their checksum is wrong")):
        file.write_bytes(data)
        caplog.clear()
        assert folder.find([0, 1, 2, 3, 4], 0) is None
        assert re.search(problem, caplog.text)


def test_the_oldest_prefixes_give_way(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    written = [[first, 1, 2, 3] for first in range(20)]
    for tokens in written:
        folder.keep(prefix_of(tokens))
    there = [folder.has(tokens) for tokens in written]
    assert there == sorted(there)
    assert there[-1]
    assert 2000 < sum(each.stat().st_size for each in tmp_path.iterdir()) <= 4000


def connected(ranks: int = 1, drafts: Any = None) -> SimpleNamespace:
    """Return what hal reads of vLLM's configuration with its connector."""
    extra = {"folder": "prefixes"}
    connector = SimpleNamespace(kv_connector=CONNECTOR, kv_connector_module_path=None, kv_connector_extra_config=extra)
    parallel = SimpleNamespace(world_size=ranks, data_parallel_size=1)
    return SimpleNamespace(kv_transfer_config=connector, parallel_config=parallel, speculative_config=drafts)


def built(folder: Path) -> Path:
    random_hybrids.build(folder, "Qwen3_5Text", 0)
    return folder


def folder_of_model(checkpoint: Path) -> PrefixFolder:
    with hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 256}}) as backend:
        return PrefixFolder.of(hal.Runner(hal.load_model(checkpoint, backend), backend), {"folder": checkpoint})


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (
            lambda path: folder_of_model(random_checkpoint(path / "made", **WINDOWS)),
            "layers with windows or with states per sequence",
        ),
        (lambda path: folder_of_model(built(path / "made")), "layers with windows or with states per sequence"),
        (lambda _: check_connector(connected(ranks=2)), "does not support several ranks"),
        (lambda _: check_connector(connected(drafts="ngram")), "does not support speculative decoding"),
        (lambda _: check_replaceable(connected()), "prefixes of replaced weights do not travel"),
    ],
)
def test_what_the_connector_refuses(ask: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    check_connector(connected())
    assert folder_of_model(random_checkpoint(tmp_path / "plain")).most == 1 << 30
    with pytest.raises(HalError, match=problem):
        ask(tmp_path)
