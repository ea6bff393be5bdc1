"""What the command line says to a name that is no command: the help, another tool's command, or the nearest name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import click

from hal.errors import most_similar

HELP = "help"
_RUN = "'hal generate MODEL --prompt TEXT', or 'hal chat MODEL' for a conversation"
_DOWNLOADED = "'hf cache ls' for the downloaded models; a MODEL is a folder, a GGUF file, or a name of the Hub"
_FETCH = "'hf download NAME', or only run the model: hal downloads what it needs"
_MACHINE = "'hal backends' for the drivers, or 'hal doctor' to check this machine"
_COMPLETION = """'eval "$(_HAL_COMPLETE=bash_source hal)"' in bash; zsh_source and fish_source are for other shells"""

OTHER_TOOLS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("run", "complete", "prompt", "ask"), _RUN),
        **dict.fromkeys(("list", "ls", "models", "ps"), _DOWNLOADED),
        **dict.fromkeys(("pull", "download", "fetch"), _FETCH),
        **dict.fromkeys(("devices", "env", "info", "status"), _MACHINE),
        **dict.fromkeys(("completion", "completions"), _COMPLETION),
        "rm": "'hf cache rm NAME'",
        "show": "'hal explain MODEL'",
        "start": "'hal serve MODEL'",
        "version": "'hal --version'",
    }
)
"""Commands that other tools have, such as ollama, vLLM and pip, with what hal has for them."""


class SuggestingGroup(click.Group):
    """A command group that has ``help``, and that suggests commands for a name that it does not know.

    Attributes:
        takers: the names of commands that take a checkpoint.
        known_elsewhere: names that people know from other tools, with what to use.
    """

    takers: tuple[str, ...] = ()
    known_elsewhere: Mapping[str, str] = MappingProxyType({})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. ``help`` names the next one, whose help it asks for."""
        given, *others = args
        completing = ctx.resilient_parsing  # in a shell, which is told of no error
        if not completing and self.get_command(ctx, given) is None and not given.startswith("-"):
            if given != HELP:
                raise click.UsageError(self._no_command(ctx, given), ctx)
            if not others:
                click.echo(ctx.get_help())
                ctx.exit()
            return self.resolve_command(ctx, [*others, "--help"])
        return super().resolve_command(ctx, args)

    def _no_command(self, ctx: click.Context, given: str) -> str:
        if (instead := self.known_elsewhere.get(given)) is not None:
            return f"No such command '{given}'. Use {instead}."
        if self.takers and ("/" in given or Path(given).exists()):
            commands = [f"'{ctx.command_path} {name} {given}'" for name in self.takers]
            return f"'{given}' is no command. For a checkpoint, use {', '.join(commands[:-1])} or {commands[-1]}."
        names = self.list_commands(ctx)
        if (similar := most_similar(given, [*names, HELP])) is not None:
            return f"No such command '{given}'. Did you mean '{similar}'?"
        return f"No such command '{given}'. The commands are {', '.join(names)}."
