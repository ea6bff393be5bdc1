"""The environment variables that a launcher, such as torchrun, sets for each rank."""

from __future__ import annotations

import os

from hal.errors import ConfigError


def is_rank() -> bool:
    """Return whether this process was started as a rank, by :func:`run_ranks` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched() -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Raises:
        ConfigError: the variables of a rank do not hold its numbers.
    """
    texts = os.environ["RANK"], os.environ["WORLD_SIZE"]
    rank, ranks = (int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1 for text in texts)
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"the variables RANK and WORLD_SIZE are {texts[0]!r:.40} and {texts[1]!r:.40}, not a rank and their number",
            "start the process with torchrun, which sets both for each rank, or unset them",
        )
    return rank, ranks
