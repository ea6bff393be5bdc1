"""Tests that races are found where an order is left out, and nowhere else."""

from __future__ import annotations

import json
import sys
from typing import Any

import emulated_cann
import pytest
from helpers.thorough import PROCESSES, thorough
from support import TESTS
from support.children import emulate, python

SCRIPT = TESTS / "scripts" / "planted_races.py"
sys.path.insert(0, str(SCRIPT.parent))

import planted_races  # noqa: E402

IN_THIS_PROCESS = ("write_after_read", "columns", "branches_of_a_graph", "memory_is_freed_while_it_is_used")
PAIRS = {
    "two_streams_write": ("InplaceAdds", "InplaceMuls"),
    "read_before_write": ("InplaceAdds", "Adds"),
    "write_after_read": ("Adds", "InplaceZero"),
    "event_recorded_too_early": ("InplaceAdds", "Adds"),
    "event_waited_for_before_it_is_recorded": ("InplaceAdds", "Adds"),
    "the_host_waits_for_another_stream": ("InplaceAdds", "Adds"),
    "copy_to_the_device_on_another_stream": ("MemcpyHostToDevice", "Adds"),
    "pinned_memory_is_copied_from_and_to": ("MemcpyDeviceToHost", "MemcpyHostToDevice"),
    "the_host_copies_what_is_not_computed": ("InplaceAdds", "MemcpyDeviceToHost"),
    "columns": ("InplaceAdds", "InplaceMuls"),
    "rows_of_a_transposed_view": ("InplaceAdds", "InplaceMuls"),
    "an_input_is_written_while_a_graph_replays": ("Adds", "InplaceFillScalar"),
    "branches_of_a_graph": ("InplaceAdds", "Adds"),
    "two_graphs_share_a_pool": ("Adds", "Adds"),
    "a_graph_replays_on_two_streams": ("InplaceAdds", "InplaceAdds"),
    "memory_is_freed_while_it_is_used": ("Memset", "aclrtFree"),
    "memory_is_reused_while_another_stream_uses_it": ("Adds", "InplaceOne"),
    "a_collective_is_not_waited_for": ("HcclAllReduce", "Adds"),
    "a_copy_between_devices": ("InplaceAdds", "MemcpyDeviceToDevice"),
}
"""The launches of the race in each program, in either order; it may have others too."""


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_a_race_is_found_in_a_block(name: str) -> None:
    for ordered in (True, False, False):  # found again by a second block
        with emulated_cann.races() as found:
            planted_races.PROGRAMS[name](ordered)
        assert bool(found) != ordered, found
    assert {found[0].first, found[0].second} == set(PAIRS[name])


def test_nothing_is_reported_outside_of_a_block() -> None:
    with emulated_cann.races() as found:
        pass
    planted_races.PROGRAMS["two_streams_write"](False)
    assert not found


@pytest.fixture(scope="module")
def results() -> dict[str, list[list[dict[str, str]]]]:
    """Run all programs without torch_npu's queue, so that all launches have Python stacks."""
    done = python(str(SCRIPT), TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) == set(PAIRS)
    return result


@thorough(PROCESSES)
@pytest.mark.parametrize("name", PAIRS)
def test_a_race_is_found_only_without_the_order(name: str, results: dict[str, list[list[dict[str, str]]]]) -> None:
    with_order, without = results[name]
    assert not with_order, with_order[0]["text"]
    assert set(PAIRS[name]) in [{each["first"], each["second"]} for each in without]
    stacks = without[0]["text"].split("without an order after:")
    for stack in stacks:
        if "aclrtFree" not in stack:  # has a stack only if the thread holds Python's lock
            assert f"{SCRIPT}:" in stack, stack
            assert name in stack or "captured" in stack, stack


@thorough(PROCESSES)
@pytest.mark.parametrize("wait", [True, False])
def test_the_command(wait: bool, clean: dict[str, str]) -> None:
    script = f"""
import torch, torch_npu
x, stream = torch.zeros(4, device="npu"), torch.npu.Stream()
torch.npu.synchronize()
with torch.npu.stream(stream):
    x += 1
if {wait}:
    torch.npu.current_stream().wait_stream(stream)
print((x * 2).tolist())
"""
    done = emulate("--races", "--", sys.executable, "-c", script, environ=clean)
    assert done.returncode == (0 if wait else 66), done.stderr
    assert done.stdout in (["[2.0, 2.0, 2.0, 2.0]\n"] if wait else ["[2.0, 2.0, 2.0, 2.0]\n", "[0.0, 0.0, 0.0, 0.0]\n"])
    assert ("emulated-cann: races: 1" in done.stderr) != wait
    assert done.stderr.count("<string>:") == (0 if wait else 2)
