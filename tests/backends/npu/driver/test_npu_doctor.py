"""Tests for ``hal doctor`` on emulated NPUs, in fresh processes."""

from __future__ import annotations

import json
import time

from helpers.npu import processes
from helpers.thorough import PROCESSES, thorough

OPTIONS = '{"devices": 2}'


def test_each_emulated_npu_is_examined() -> None:
    start = time.perf_counter()
    result = processes.hal("doctor", "--backend", "npu", "--emulate", "--json", HAL_NPU_EMULATOR_OPTIONS=OPTIONS)
    took = time.perf_counter() - start
    document = json.loads(result.stdout)
    (npu,) = document["drivers"]
    assert npu["status"] == "works"
    assert [device["device"] for device in npu["devices"]] == ["npu:0", "npu:1"]
    for device in npu["devices"]:
        assert "emulated" in device["name"]
        assert {each["outcome"] for each in device["checks"]} == {"passed"}
        assert "graph" in [each["name"] for each in device["checks"]]
        assert device["measures"]["launch_us"] > 0
    assert all(each["fits"] for each in document["packages"] if each["required_by"] == "npu")
    assert took < 60  # about 10 s on two idle cores


@thorough(PROCESSES)
def test_a_device_that_the_options_name_is_the_only_one() -> None:
    options = {"HAL_NPU_EMULATOR_OPTIONS": OPTIONS, "HAL_NPU_DEVICE": "1"}
    result = processes.hal("doctor", "--backend", "npu", "--emulate", "--json", **options)
    (npu,) = json.loads(result.stdout)["drivers"]
    assert [device["device"] for device in npu["devices"]] == ["npu:1"]


@thorough(PROCESSES)
def test_without_an_npu_the_probe_says_what_to_do() -> None:
    result = processes.hal("doctor", "--backend", "npu", code=1)
    assert "no CANN" in result.stdout
    assert "--emulate" in result.stdout
