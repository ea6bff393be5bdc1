"""``hal emulate``: the command ``emulated-cann run``, with hal's errors and hal's cache."""

from __future__ import annotations

import os
from typing import Any

import click

from .emulation import OPTIONS, as_errors_of_hal, emulated_cann, is_installed, keep_in_cache

NAME = "emulate"


def _command() -> click.Command:
    if not is_installed():
        taking_all = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
        # Its error says what to install.
        return click.Command(NAME, callback=emulated_cann, short_help="(not installed)", context_settings=taking_all)
    from emulated_cann.command import run

    def emulate(**given: Any) -> None:
        os.environ.pop(OPTIONS, None)  # The options of the command replace it, also in the program.
        assert run.callback is not None
        with as_errors_of_hal():
            keep_in_cache()
            run.callback(**given)

    return click.Command(
        NAME,
        callback=emulate,
        params=run.params,
        help=(run.help or "").replace("emulated-cann run", "hal emulate"),
        short_help=run.short_help,
        context_settings=run.context_settings,
    )


command = _command()
