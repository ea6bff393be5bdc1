"""The options that several commands share to set the configuration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from hal.cli.console import progress_bar
from hal.cli.emulation import EMULATE, emulated
from hal.config.bounds import SECONDS
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.config import Config
    from hal.generation.llm.language_model import LLM


OPTIONS = {
    "dtype": ("NAME", "auto (the checkpoint's), float32, bfloat16 or float16."),
    "backend": ("NAME", "A driver, or auto; see `hal backends`."),
    "compiler": ("NAME", "eager, graph, piecewise, or a compiler of the driver."),
    "compilation_config": (
        "JSON",
        "Keys of the table `compilation`, as a JSON object or a path ending in .json or .toml.",
    ),
    "model_source": ("NAME", "Where the model's code comes from: auto, hal, or another source, such as transformers."),
}
RANKS = {"tensor_parallel": "tensor", "data_parallel": "data", "experts": "experts"}
"""The options of how ranks share a model, and their keys of the table `parallel`."""
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@attrs.frozen
class Settings:
    """The configuration of a command.

    Attributes:
        given: the keys that options set.
        emulate: whether the driver runs on an emulated device.
    """

    given: Mapping[str, Any]
    emulate: bool = False

    def merged(self) -> dict[str, Any]:
        """Return the environment's configuration, overridden by the options."""
        from hal.drivers.registry import merged_config

        return merged_config(self.given)

    def config(self) -> Config:
        """Return the configuration, with defaults."""
        from hal.config import Config, read

        return read(Config, self.merged(), "configuration")

    @contextmanager
    def emulated(self) -> Iterator[Settings]:
        """Yield the settings with the driver's options for ``--emulate``. Open the backend inside the block."""
        named = str(self.merged().get("backend", "auto")) if self.emulate else None
        with emulated(self.emulate, named) as options:
            yield attrs.evolve(self, given={**self.given, "options": options}) if options else self

    @contextmanager
    def llm(self, checkpoint: Checkpoint, **limits: Any) -> Iterator[LLM]:
        """Yield the LLM of a checkpoint, whose weights are loaded with a progress bar.

        Args:
            checkpoint: the checkpoint.
            limits: arguments of :class:`hal.LLM`, such as ``max_sequences``.
        """
        import hal
        from hal.parallel.launch import yielding_to_the_cause

        with yielding_to_the_cause(), self.emulated() as settings:
            with progress_bar("loading") as progress:
                llm = hal.LLM(checkpoint, config=settings.given, progress=progress, **limits)
            with llm:
                yield llm


def configured(
    *, emulate: str = EMULATE, ranks: Decorator | None = None, compilation_config: str = "", **several: str
) -> Decorator:
    """Add the options of the configuration to a command, which gets them as one argument ``settings``.

    Args:
        emulate: the help of ``--emulate``.
        ranks: adds options of how ranks share the model, which become settings, too.
        compilation_config: added to the help of ``--compilation-config``.
        several: the help of options that are repeatable, such as ``backend``. The command gets their values as
            arguments, such as ``backends``.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_settings(*args: Any, emulate: bool, **options: Any) -> Any:
            found = {name: options.pop(name) for name in OPTIONS if name not in several}
            parallel = {key: options.pop(name, None) for name, key in RANKS.items()} if ranks else {}
            given = {name: found.get(name) for name in ("backend", "dtype", "model_source")}
            given |= {"compilation": _compilation(found.get("compiler"), found["compilation_config"])}
            given |= {"parallel": {key: value for key, value in parallel.items() if value is not None}}
            given = {key: value for key, value in given.items() if value not in (None, {})}
            return command(*args, settings=Settings(given, emulate), **options)

        made: Callable[..., Any] = with_settings
        if ranks is not None:
            made = ranks(made)
        made = click.option("--emulate", is_flag=True, help=emulate)(made)
        for name, (metavar, text) in reversed(OPTIONS.items()):
            more, option = compilation_config if name == "compilation_config" else "", f"--{name.replace('_', '-')}"
            if name in several:
                made = click.option(option, f"{name}s", multiple=True, metavar=metavar, help=several[name])(made)
            else:
                made = click.option(option, metavar=metavar, help=f"{text}{more}")(made)
        return made

    return decorate


def _compilation(compiler: str | None, source: str | None) -> dict[str, Any]:
    """Return the keys that ``--compiler`` and ``--compilation-config`` set."""
    from hal.config import CompilationConfig, parse_json, read, read_file

    if source is None:
        found: dict[str, Any] = {}
    elif source.lstrip().startswith("{"):
        found = dict(parse_json(source, "--compilation-config"))
    elif source.endswith((".json", ".toml")):
        found = dict(read_file(Path(source)))
    else:
        raise ConfigError(
            f"--compilation-config is {source!r:.70}, neither a JSON object nor a path ending in .json or .toml",
            "write it as {...}, or give such a path",
        )
    read(CompilationConfig, found, "--compilation-config")
    if compiler is not None and found.setdefault("compiler", compiler) != compiler:
        raise ConfigError(
            f"--compiler is {compiler}, but --compilation-config sets {found['compiler']}", "remove one of them"
        )
    return found


class Seconds(click.FloatRange):
    """A number of seconds, from 1 to :data:`~hal.config.bounds.SECONDS`."""

    def __init__(self) -> None:
        super().__init__(1, SECONDS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the number. click takes NaN for a number in every range."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return number
