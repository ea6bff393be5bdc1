"""The options of the emulated machine, and the environment variables that hold them."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_type_hints

import attrs

from .errors import InvalidOption

SWITCH = "EMULATED_CANN"
OPTIONS = "EMULATED_CANN_OPTIONS"

Switch = Literal["off", "on", "force"]
"""Whether to emulate; ``force`` does so even if a real CANN is installed."""

DEVICES, MEMORY = 64, 1 << 37
"""The most NPUs, and bytes of one, that the emulated runtime has addresses for."""
COUNT = 2**31 - 1
"""The most streams and tasks."""
SECONDS = 30 * 24 * 3600
"""The longest time limit: 30 days."""


def _in_range(least: int, most: int) -> Callable[[Any, attrs.Attribute[Any], int | None], None]:
    def validate(instance: Any, attribute: attrs.Attribute[Any], value: int | None) -> None:
        if value is None or least <= value <= most:
            return
        rule = f"at least {least}" if value < least else f"at most {most}"
        given = str(value) if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
        raise InvalidOption(f"{attribute.name} must be {rule}, not {given}", f"give {least} to {most}")

    return validate


def _is_plain(instance: Any, attribute: attrs.Attribute[Any], value: str | None) -> None:
    """Refuse a path that the runtime, which parses no escapes, cannot read from the options' JSON."""
    if value is not None and json.dumps(value) != f'"{value}"':
        raise InvalidOption(
            f"{attribute.name} must be a path of plain ASCII text, not {value!r}", "choose another path"
        )


@attrs.frozen(kw_only=True)
class Options:
    """Options of the emulated machine; None is the runtime's default.

    Attributes:
        devices: the number of NPUs.
        memory: bytes of memory per NPU.
        soc: the SoC's name, such as Ascend910B3 or Ascend910_9391. torch_npu chooses code paths by it.
        version: CANN's version, such as 9.1.0. torch_npu chooses code paths by it.
        streams: streams per device, including those of captured graphs.
        tasks: the maximum number of tasks in the captured graphs of a device.
        stall: seconds without any running work after which a wait of the host fails instead of hanging.
        seed: the seed of a deterministic order in which streams run; None lets them run freely.
        trace: the path of a file to which everything that runs is written, in the trace event format of Perfetto.
        races: report races, and end the process with status 66 if there are any; see :func:`emulated_cann.races`.
    """

    devices: int = attrs.field(default=1, validator=_in_range(1, DEVICES))
    memory: int | None = attrs.field(default=None, validator=_in_range(1, MEMORY))
    soc: str = "Ascend910B3"
    version: str | None = None
    streams: int | None = attrs.field(default=None, validator=_in_range(1, COUNT))
    tasks: int | None = attrs.field(default=None, validator=_in_range(1, COUNT))
    stall: int | None = attrs.field(default=None, validator=_in_range(1, SECONDS))
    seed: int | None = attrs.field(default=None, validator=_in_range(0, (1 << 63) - 1))
    trace: str | None = attrs.field(default=None, validator=_is_plain)
    races: bool = False

    def to_json(self) -> str:
        """Return the value of ``EMULATED_CANN_OPTIONS``: the options that are not None."""
        return json.dumps(attrs.asdict(self, filter=lambda _, value: value is not None))


def read_options(given: Mapping[str, Any], where: str) -> Options:
    """Return the options in a mapping.

    Args:
        where: the mapping's name in errors.

    Raises:
        InvalidOption: an option is unknown, has another type, or is out of range.
    """
    kinds = get_type_hints(Options)
    for name, value in given.items():
        if name not in kinds:
            similar = difflib.get_close_matches(name, kinds, n=1, cutoff=0.5)
            meant = f" (did you mean {similar[0]!r}?)" if similar else ""
            raise InvalidOption(f"unknown key {name!r}{meant} @ {where}", f"the options are {', '.join(kinds)}")
        allowed = get_args(kinds[name]) or (kinds[name],)
        if type(value) not in allowed:  # bool is a subclass of int
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise InvalidOption(
                f"expected {names}, found {type(value).__name__} {value!r:.60} @ {where}.{name}", f"correct {name}"
            )
    try:
        return Options(**given)
    except InvalidOption as error:
        raise InvalidOption(f"{error.problem} @ {where}", error.remedy) from None


def from_environment(environ: Mapping[str, str] = os.environ) -> Options:
    """Return the options in ``EMULATED_CANN_OPTIONS``.

    Raises:
        InvalidOption: it is not a JSON object, or has an unknown key or an invalid value.
    """
    text = environ.get(OPTIONS) or "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidOption(f"{OPTIONS} is not valid JSON: {error}", "correct the text") from None
    if not isinstance(value, dict):
        raise InvalidOption(f"{OPTIONS} must hold a JSON object, not {text:.60}", 'write it as {"devices": 2}')
    return read_options(value, OPTIONS)


def switch_in(environ: Mapping[str, str] = os.environ) -> Switch:
    """Return the value of ``EMULATED_CANN``: 1, ``on`` and ``true`` are on; 0, ``off``, ``false`` and nothing are off.

    Raises:
        InvalidOption: the variable has another value.
    """
    values: dict[str, Switch] = {
        **dict.fromkeys(("", "0", "off", "false"), "off"),
        **dict.fromkeys(("1", "on", "true"), "on"),
        "force": "force",
    }
    text = environ.get(SWITCH, "")
    if text not in values:
        raise InvalidOption(f"unknown value {text!r:.60} of the variable {SWITCH}", "set it to 1, force or 0")
    return values[text]
