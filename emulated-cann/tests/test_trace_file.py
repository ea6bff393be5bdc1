"""Tests of the file that ``--trace`` writes: trace events of what two devices ran, and of a replay."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated_cann import InvalidOption, Options
from support.children import emulate

SCRIPT = """
import torch, torch_npu

def step(x, y):
    return (x + 1) @ y

x, y = torch.ones(4, 8, device="npu"), torch.ones(8, 2, device="npu")
step(x, y)
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    step(x, y)
stream = torch.npu.Stream()
stream.wait_stream(torch.npu.current_stream())
with torch.npu.stream(stream):
    graph.replay()
torch.zeros(3, device="npu:1")
torch.npu.synchronize(1)
torch.npu.synchronize()
"""


def test_what_a_program_runs_is_in_the_file(clean: dict[str, str], tmp_path: Path) -> None:
    file, script = tmp_path / "trace.json", tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = emulate("--devices", "2", "--trace", str(file), "--", sys.executable, str(script), environ=clean)
    assert done.returncode == 0, done.stderr
    events = json.loads(file.read_text(encoding="utf-8"))
    names = {(each["name"], each["pid"], each["tid"]): each["args"]["name"] for each in events if each["ph"] == "M"}

    def track(event: dict[str, Any]) -> tuple[str, str]:
        process = names["process_name", event["pid"], 0].partition(" of process")[0]
        return process, names["thread_name", event["pid"], event["tid"]]

    ran = [each for each in events if each["ph"] == "X"]
    products = [each for each in ran if each["name"] == "Matmul"]
    assert [each["args"]["phase"] for each in products] == ["eager", "replay"]
    for product in products:
        arguments = product["args"]
        assert [each["shape"] for each in arguments["operands"]] == [[4, 8], [8, 2], [4, 2]]
        assert {each["dtype"] for each in arguments["operands"]} == {"float32"}
        assert (arguments["bytes"], arguments["flops"]) == (4 * (32 + 16 + 8), 2 * 4 * 8 * 2)
        assert arguments["python"][0] == f"{script}:5 in step"
    (replay,) = [each for each in ran if each["cat"] == "graph"]
    inside = products[1]
    assert replay["name"] == f"Graph{inside['args']['graph']}"
    assert track(replay) == track(inside) != track(products[0])
    assert replay["ts"] <= inside["ts"]
    assert inside["ts"] + inside["dur"] <= replay["ts"] + replay["dur"]
    assert {track(each)[0] for each in ran if each["name"] == "InplaceZero"} == {"device 1"}


@pytest.mark.parametrize("path", ['a"b', "a\\b", "é"])
def test_a_path_that_cannot_be_passed_on(path: str) -> None:
    with pytest.raises(InvalidOption, match="plain ASCII"):
        Options(trace=path)


def test_a_file_that_cannot_be_written(clean: dict[str, str], tmp_path: Path) -> None:
    done = emulate("--trace", str(tmp_path / "nowhere" / "trace.json"), "--", "true", environ=clean)
    assert done.returncode != 0
    assert "cannot be written: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr
