"""Tests for the options of the emulated machine: what each takes, and what its errors say."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from emulated_cann import InvalidOption, Options
from emulated_cann.autoload import autoload
from emulated_cann.command import command
from emulated_cann.options import COUNT, DEVICES, MEMORY, SECONDS, SWITCH, from_environment, read_options, switch_in

MOST = {"devices": DEVICES, "memory": MEMORY, "streams": COUNT, "tasks": COUNT, "stall": SECONDS, "seed": 2**63 - 1}


@pytest.mark.parametrize("name", MOST)
def test_the_range_of_a_number(name: str) -> None:
    least = 0 if name == "seed" else 1
    for value in (least, MOST[name]):
        assert getattr(read_options({name: value}, "here"), name) == value
    for value, rule in ((least - 1, f"at least {least}"), (MOST[name] + 1, "at most"), (10**5000, "bits")):
        with pytest.raises(InvalidOption, match=f"{name} must be .*{rule}.* @ here"):
            read_options({name: value}, "here")
    for value in (True, 1.0, "1"):
        with pytest.raises(InvalidOption, match=rf"expected int.*, found .* @ here\.{name}"):
            read_options({name: value}, "here")


@pytest.mark.parametrize("name", [name for name in MOST if name != "seed"])
@pytest.mark.parametrize("text", ["0", "-1", "0.5", "many", "", "9" * 400])
def test_a_number_on_the_command_line(name: str, text: str) -> None:
    result = CliRunner().invoke(command, ["run", f"--{name}", text, "--", "no-such-program"])
    refused = result.exception if isinstance(result.exception, InvalidOption) else result.output
    assert name in str(refused)


def test_the_nearest_option_is_named() -> None:
    with pytest.raises(InvalidOption, match=r"unknown key 'device' \(did you mean 'devices'\?\)"):
        read_options({"device": 2}, "here")


def test_options_are_read_as_they_are_written() -> None:
    chosen = Options(devices=3, soc="Ascend950", seed=7)
    assert from_environment({"EMULATED_CANN_OPTIONS": chosen.to_json()}) == chosen
    assert from_environment({}) == Options()


@pytest.mark.parametrize(("text", "told"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_a_variable_that_holds_no_options(text: str, told: str) -> None:
    with pytest.raises(InvalidOption, match=told):
        from_environment({"EMULATED_CANN_OPTIONS": text})


@pytest.mark.parametrize(
    ("texts", "switch"), [(("", "0", "off", "false"), "off"), (("1", "on", "true"), "on"), (("force",), "force")]
)
def test_the_switch(texts: tuple[str, ...], switch: str) -> None:
    assert {switch_in({SWITCH: text}) for text in texts} == {switch}


@pytest.mark.parametrize("text", ["yes", "2", "ON", "[]"])
def test_a_switch_with_another_value(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, Any] = {SWITCH: text}
    with pytest.raises(InvalidOption, match="unknown value"):
        switch_in(environ)
    monkeypatch.setenv(SWITCH, text)
    with pytest.raises(InvalidOption, match="unknown value"):
        autoload()
