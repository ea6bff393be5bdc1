"""The largest numbers that a person or a configuration may give, the same on every machine, and the one for no seed.

:mod:`hal.device.host_capacity` checks numbers against what this machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hal.errors import ConfigError

TOKENS = 2**31 - 1
"""Tokens of a cache, a block or a step: slots are int32."""
NO_SEED = -1
"""The seed of a request that wants none, as in vLLM and llama.cpp."""
SEQUENCES = 1 << 16
"""Sequences or tokens of a captured step, and sequences of a benchmark: beyond the memory of any device."""
CAPTURES = 512
"""Sizes that a phase captures, for each number of queries: each holds memory, and some devices have fewer streams."""
RANKS = 1 << 20
"""Ranks in each direction of a mesh. Planned ones take nothing, and started ones are checked against the machine."""
ADAPTERS = 1 << 12
"""Slots of adapters: composed kernels multiply by all of them."""
ADAPTER_RANK = 1 << 12
"""The rank of an adapter: beyond the width of most projections."""
SECONDS = 30 * 24 * 3600
"""Seconds of a timeout: 30 days."""
REPEATS = 100_000
"""Timed steps of each contender of a benchmark."""


def at_most(limit: int, *, entries: int | None = None) -> Callable[[Any, Any, Any], None]:
    """Return an attrs validator of integers from 1 to ``limit``, which raises :class:`~hal.errors.ConfigError`.

    A field holds an integer, a tuple of them, or None. :func:`hal.config.read` checks the types.

    Args:
        entries: the most entries of the tuple; None for no limit.
    """

    def validate(instance: Any, attribute: Any, value: Any) -> None:
        name = attribute.name
        if value == ():
            raise ConfigError(f"{name} must not be empty; leave the key out for the default", f"leave {name} out")
        numbers = value if isinstance(value, tuple) else (value,)
        if entries is not None and len(numbers) > entries:
            raise ConfigError(f"{name} must have at most {entries} entries, not {len(numbers)}", "give fewer")
        for number in numbers:
            if type(number) is int:
                check_count(number, limit, f"{name} must be")

    return validate


def check_count(number: Any, limit: int, what: str) -> None:
    """Raise ConfigError unless ``number`` is an integer from 1 to ``limit``.

    Args:
        what: the start of the error, such as ``max_sequences must be``.
    """
    if type(number) is not int:
        raise ConfigError(f"{what} an integer, not {number!r:.70}", f"give an integer from 1 to {limit}")
    if number < 1:
        raise ConfigError(f"{what} at least 1, not {_written(number)}", f"give 1 to {limit}")
    if number > limit:
        raise ConfigError(f"{what} at most {limit}, not {_written(number)}", f"give 1 to {limit}")


def _written(number: int) -> str:
    """Return a number as text. Python writes no more than some thousands of digits."""
    return str(number) if number.bit_length() < 128 else f"an integer of {number.bit_length()} bits"
