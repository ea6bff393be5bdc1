"""Tests for a driver's ``open``: it returns a valid backend, or the error names the driver."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributions import install
from helpers.thorough import DRAW, thorough
from torch import Tensor

import hal
from hal import ops
from hal.drivers.registry import load_driver
from hal.errors import (
    ConfigError,
    DeviceOutOfMemory,
    DriverError,
    DriverIncompatible,
    DriverUnavailable,
    HalError,
    OperationError,
)
from hal.ops import FLOATING, Draw, Sample, op

MODULE = """
import hal

class Acme(hal.vendor.Driver):
    name = "acme"
    api_version = (4, 0)
    priority = 100

    def probe(self):
        return hal.vendor.Probe(True)

    def open(self, options):
        return Acme.make(self.name)
"""


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("it has no repr")


VALUES: dict[str, Any] = {
    "None": None,
    "a text": "x",
    "an empty text": "",
    "a number": 3,
    "zero": 0,
    "NaN": float("nan"),
    "true": True,
    "bytes": b"x",
    "a class": int,
    "an object": object(),
    "without a repr": Unprintable(),
    "an iterator": iter("x"),
    "numbers": [1, 2],
    "texts and a number": ["x", 1],
    "names of nothing": ["x"],
    "a table of numbers": {1: 2},
    "a table of nothing": {"x": 1},
    "a table of texts": {"x": "y"},
    "a tensor": torch.ones(2),
    "a number of torch": torch.tensor(1),
    "a device of torch": torch.device("cpu"),
    "the class Device": hal.vendor.Device,
    "a Device of a text": hal.vendor.Device("cpu"),
    "a layer": torch.nn.Linear(1, 1),
    "the class Limits": hal.vendor.Limits,  # type: ignore[arg-type]
}
ARGUMENTS = tuple(inspect.signature(hal.Backend).parameters)
TAKEN = {
    "capabilities": {"names of nothing"},
    "limits": {"None"},
    "inductor": {"None"},
    "distributed": {"None", "a text"},
    "native_names": {"a table of texts"},
    "sources": {"a table of texts"},
}
"""Values that have the right type."""


@pytest.fixture
def opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[str], Any]], None]]:
    """Install the driver acme, which ``auto`` prefers, with a given ``open``."""
    install(tmp_path, "acme", "[hal.drivers]\nacme = acme_that_opens:Acme\n")
    (tmp_path / "acme_that_opens.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    driver: Any = type(load_driver("acme"))
    before = hal.active_backend()

    def decide(make: Callable[[str], Any]) -> None:
        driver.make = staticmethod(make)

    yield decide
    del sys.modules["acme_that_opens"]
    if before is not None:
        before.activate()


Opens = Callable[[Callable[[str], Any]], None]


def refused(opens: Opens, make: Callable[[str], Any], *messages: str) -> None:
    """Check the error for the driver by name, chosen by ``auto``, and with a compiler that it does not allow."""
    opens(make)
    before = hal.active_backend()
    for config in ("acme", {}, {"backend": "acme", "compilation": {"compiler": "graph"}}):
        with pytest.raises(HalError) as caught:
            hal.open(config)
        assert isinstance(caught.value, DriverError | OperationError), repr(caught.value)
        assert re.search(r"\bacme\b", caught.value.problem), caught.value.problem
        assert caught.value.remedy
        assert len(str(caught.value)) < 1000
        for message in messages:
            assert message in str(caught.value)
        assert hal.active_backend() is before


@thorough(DRAW, r"\[(a number|zero|NaN|true|bytes|numbers|an object|a table of nothing|a tensor|a layer|a text)-")
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("value", VALUES)
def test_arguments_of_other_types(argument: str, value: str, opens: Opens) -> None:
    given: dict[str, Any] = {"name": "acme", "device": hal.vendor.HostDevice(), "kernels": {}, argument: VALUES[value]}
    if value in TAKEN.get(argument, ()):
        opens(lambda name: hal.Backend(**given))
        assert hal.open("acme").ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6).shape == (1, 4)
    else:
        refused(opens, lambda name: hal.Backend(**given))


def test_limits_of_wrong_values(opens: Opens) -> None:
    """The error that Limits raises does not know the driver."""
    sizes: Any = 64
    refused(
        opens,
        lambda name: hal.vendor.Limits(head_dims=sizes),
        "the driver acme: the limits of a backend have head_dims=64",
    )


@pytest.mark.parametrize(
    "value",
    [None, "acme", 3, hal.Backend, hal.vendor.HostDevice(), Unprintable(), "x" * 10**6],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_backend(value: Any, opens: Opens) -> None:
    refused(opens, lambda name: value, "opening the driver acme returned ", "not a hal.Backend")


class Bare(hal.Backend):
    def __init__(self, name: str) -> None:
        pass


class Half(hal.Backend):
    def __init__(self, name: str) -> None:
        self.name, self.device = name, hal.vendor.HostDevice()


class Whole(hal.Backend):
    def __init__(self, name: str) -> None:
        super().__init__(name, hal.vendor.HostDevice(), kernels={})


@pytest.mark.parametrize("cls", [Bare, Half])
def test_a_subclass_that_does_not_call_the_constructor(cls: type[hal.Backend], opens: Opens) -> None:
    refused(opens, cls, f"returned a {cls.__name__} without the attribute", "call super().__init__")


@pytest.mark.parametrize("attribute", sorted({*ARGUMENTS} - {"inductor", "distributed"}))
def test_a_subclass_that_spoils_what_it_was_made_with(attribute: str, opens: Opens) -> None:
    class Spoilt(Whole):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            setattr(self, attribute, None)

    refused(opens, Spoilt, f"{attribute} = None")


def test_a_refused_backend_resolves_no_new_operation(opens: Opens, forget_operations: None) -> None:
    """The refused backend is part of a reference cycle, so it exists until the next garbage collection."""

    class Spoilt(Whole):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.kernels = None  # type: ignore[assignment]

    def samples(draw: Draw) -> Iterator[Sample]:
        yield (draw.normal(2, 4),)

    gc.disable()
    try:
        refused(opens, Spoilt, "kernels = None")

        @op(
            samples=samples,
            namespace="haltest",
            rowwise=None,
            axes={"x": "rows width", "return": "rows width"},
            dtypes={"x": FLOATING, "return": "x"},
        )
        def declared_after_a_refusal(x: torch.Tensor) -> torch.Tensor:
            return x * 2
    finally:
        gc.enable()
    assert torch.equal(declared_after_a_refusal(torch.ones(2, 4)), torch.full((2, 4), 2.0))


@pytest.mark.parametrize("hook", ["open", "configure"])
def test_a_device_whose_memory_others_use(hook: str, opens: Opens) -> None:
    full = torch.OutOfMemoryError("card 0 is full\nof other things")

    class Full(hal.Backend):
        def configure(self, settings: Any) -> None:
            raise full

    def make(name: str) -> hal.Backend:
        if hook == "open":
            raise full
        return Full("acme", hal.vendor.HostDevice(), kernels={})

    opens(make)
    with pytest.raises(DeviceOutOfMemory, match=r"acme: the device has no memory left: card 0 is full\n") as caught:
        hal.open("acme")
    assert "choose another device" in caught.value.remedy


def test_a_subclass_whose_configuring_raises(opens: Opens) -> None:
    class Raising(Whole):
        def configure(self, config: hal.Config) -> None:
            raise KeyError("card")

    refused(opens, Raising, "configuring the backend of the driver acme raised KeyError: 'card'")


@pytest.mark.parametrize(
    "error", [AttributeError("x"), DriverError("it broke", "mend it"), RuntimeError(), AssertionError(), SystemExit(3)]
)
def test_exceptions_become_errors_that_name_the_driver(error: BaseException, opens: Opens) -> None:
    def raising(name: str) -> None:
        raise error

    refused(opens, raising)


def test_errors_keep_their_kind_and_cause(opens: Opens) -> None:
    def unavailable(name: str) -> None:
        try:
            raise OSError("libacme.so")
        except OSError as error:
            raise DriverUnavailable("the firmware is too old", "update it") from error

    def unreadable(name: str) -> None:
        raise ConfigError("cards is -1", "make it 1 or more")

    opens(unavailable)
    with pytest.raises(DriverUnavailable, match="the driver acme: the firmware is too old") as caught:
        hal.open("acme")
    assert isinstance(caught.value.__cause__, OSError)
    opens(unreadable)
    with pytest.raises(ConfigError, match=r"^cards is -1"):
        hal.open({})


def test_an_error_of_the_drivers_own_class_stays_as_it_is(opens: Opens) -> None:
    class Gone(DriverError):
        def __init__(self, card: int) -> None:
            super().__init__(f"card {card} is gone", "plug it in")

    def raising(name: str) -> None:
        raise Gone(3)

    opens(raising)
    with pytest.raises(Gone, match="card 3 is gone"):
        hal.open("acme")


class Returning(hal.Backend):
    """A backend whose overridden method returns a given value."""

    def __init__(self, value: Any) -> None:
        self.value = value
        super().__init__("acme", hal.vendor.HostDevice(), kernels={}, graphs=True)


def returning(hook: str, value: Any) -> hal.Backend:
    """Return a backend whose override of the method ``hook`` returns ``value``."""
    overrides: dict[str, Any] = {hook: lambda self, *given: self.value}
    if hook != "graph":
        overrides["graph"] = lambda self: None
    return type("Acme", (Returning,), overrides)(value)


SPEC = hal.step.StateSpec.key_value(2, 1, 8, torch.float32, 4, 16)
USE = hal.nn.WeightUse("linear", torch.float32)
CALLS: dict[str, tuple[Any, ...]] = {
    "graph": (),
    "allocate": (SPEC,),
    "prepare_weights": ({"weight": torch.ones(4, 4)}, USE),
    "describe_kernel": (torch.ones(4, 4), USE),
    "plain_weight": (torch.ones(4, 4),),
    "explain": (RuntimeError(),),
    "counting_launches": (),
    "capturing": (),
    "resolve": (ops.operation("rms_norm"),),
}
WRONG: dict[str, Any] = {
    "None": None,
    "a text": "x",
    "a number": 3,
    "a tensor": torch.ones(2),
    "an exception": RuntimeError("x"),
    "the class": hal.step.StateMemory,
    "a canonical state of fewer layers": hal.step.StateMemory(SPEC, ({},)),
    "states that are texts": hal.step.StateMemory(SPEC, ({"key": "x", "value": "y"},) * 2),  # type: ignore[dict-item]
}


MAY_RETURN = {("explain", "None"), ("resolve", "the class"), ("describe_kernel", "a text")}


@pytest.mark.parametrize(("hook", "value"), sorted({(hook, value) for hook in CALLS for value in WRONG} - MAY_RETURN))
def test_a_method_that_returns_what_it_must_not(hook: str, value: str) -> None:
    problem = f"^{hook} of the driver acme returned .*\n.*Acme.{hook} return "
    with pytest.raises(DriverIncompatible, match=problem) as error:
        getattr(returning(hook, WRONG[value]), hook)(*CALLS[hook])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_method_without_self(kind: Any) -> None:
    def prepare_weights(*given: Any) -> Any:
        return given[kind is classmethod]

    backend = type("Acme", (Returning,), {"graph": lambda self: None, "prepare_weights": kind(prepare_weights)})(None)
    weights = {"weight": torch.ones(4, 4)}
    assert backend.prepare_weights(weights, USE) is weights


def test_a_method_that_is_called_by_keywords() -> None:
    def prepare_weights(
        self: hal.Backend, weights: Mapping[str, Tensor], use: hal.nn.WeightUse
    ) -> Mapping[str, Tensor]:
        return weights

    backend = type("Acme", (Returning,), {"graph": lambda self: None, "prepare_weights": prepare_weights})(None)
    weights = {"weight": torch.ones(4, 4)}
    assert backend.prepare_weights(use=USE, weights=weights) is weights
