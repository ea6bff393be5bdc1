"""The options that several commands share to set the configuration: ranks, ``--emulate`` and others."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import attrs
import click

from hal.cli.console import progress_bar
from hal.cli.stdout import result_stream
from hal.config.bounds import RANKS, SECONDS
from hal.config.settings import ExpertsMode, ParallelConfig
from hal.errors import ConfigError, DriverNotFound, UnknownKey

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.config import Config
    from hal.drivers.registry import Candidate
    from hal.generation.llm.language_model import LLM

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
TENSOR_PARALLEL = "Split the model between N ranks of this machine, which are started if this process is none."
EXPERTS = "How the ranks share mixtures of experts; by default, each holds a part of every expert."


def tensor_parallel(text: str = TENSOR_PARALLEL) -> Decorator:
    """Add the option with a help text. Its value is None if it is not given."""
    return click.option("--tensor-parallel", type=click.IntRange(1, RANKS), metavar="N", help=text)


def parallel(data: str, tensor: str = TENSOR_PARALLEL) -> Decorator:
    """Add all options of how ranks share a model, with help texts for two. Their values are None if not given."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--experts", type=click.Choice(get_args(ExpertsMode)), help=EXPERTS)(command)
        command = click.option("--data-parallel", type=click.IntRange(1, RANKS), metavar="N", help=data)(command)
        return tensor_parallel(tensor)(command)

    return decorate


def start_ranks(
    parallel: ParallelConfig,
    checkpoint: Checkpoint,
    stdin: bytes | None = None,
    source: str = "auto",
    *,
    leads: bool = False,
) -> bool:
    """Run this process's command in several ranks, unless it is one of them or the only one.

    Args:
        checkpoint: of the model that they share.
        stdin: what this process has read from stdin.
        source: ``model_source`` of the configuration.
        leads: whether rank 0 decides when all end; see :func:`run_ranks`.

    Returns:
        Whether ranks ran the command; if so, this process has nothing left to do.

    Raises:
        ConfigError: the machine cannot run as many ranks, or they cannot share the model. None is started.
        SystemExit: a rank failed. The status is that of the first one.
    """
    from hal.checkpoint.loading import check_shared
    from hal.device.host_capacity import check_ranks
    from hal.parallel.launch import run_ranks
    from hal.parallel.mesh import is_rank

    if (ranks := parallel.size) == 1 or is_rank():
        return False
    check_ranks(ranks)
    check_shared(checkpoint, parallel, source)
    command = ["-m", "hal_command", *sys.argv[1:]]
    failure = run_ranks(command, ranks, stdin=stdin, stdout=result_stream(), leads=leads)
    if failure is None:
        return True
    if failure.text:
        click.echo(f"rank {failure.rank} of {ranks} failed:\n{failure.text.rstrip()}", err=True)
    assert failure.status is not None  # There is no time limit.
    if failure.ending is not None:
        click.echo("error: {}\nremedy: {}".format(*failure.ending), err=True)
    raise SystemExit(failure.status if failure.status > 0 else 128 - failure.status)


EMULATE_EACH = "Run drivers with an emulator on an emulated device; sets their option emulator."
EMULATE = "Run the backend's driver on an emulated device; sets its option emulator."


@contextmanager
def emulated(emulate: bool, backend: str | None) -> Iterator[dict[str, Any]]:
    """Yield the driver options that ``--emulate`` adds. Open the backend inside the block.

    Args:
        emulate: whether the option was given; if not, nothing is added.
        backend: the driver's name; None or ``auto`` for none.

    Raises:
        ConfigError: no driver is named, or it has no such option.
    """
    if not emulate:
        yield {}
        return
    from hal.config import environment_options

    if backend in (None, "auto"):
        raise ConfigError(
            "--emulate needs a driver, and none is named",
            "use --backend NAME or HAL_BACKEND; `hal backends` lists the drivers",
        )
    try:
        # The variable may request more than True does, for example to hide a real device.
        yield {"emulator": environment_options(str(backend)).get("emulator") or True}
    except ConfigError as error:
        if not has_no_emulator(error):
            raise
        raise UnknownKey(
            f"the driver {backend} has no emulated device (--emulate): {error.problem}",
            "omit --emulate, or choose another --backend",
            key=error.key,
        ) from error


def has_no_emulator(error: ConfigError) -> bool:
    """Return whether a driver raised the error for its option ``emulator``, which it does not have."""
    return isinstance(error, UnknownKey) and error.key == "emulator"


def probed(emulate: bool, only: str | None = None) -> list[tuple[Candidate, dict[str, Any]]]:
    """Return the installed drivers with the options to open them, in descending priority.

    Args:
        emulate: probe each for its emulated device; a driver without one may refuse the option only when it is opened.
        only: a driver's name; None for all.

    Raises:
        DriverNotFound: no driver is named ``only``.
    """
    from hal.config import environment_options
    from hal.drivers.opening import probe_driver
    from hal.drivers.registry import candidates, load_driver

    tried = candidates()
    if only is not None and not (tried := [each for each in tried if each.name == only]):
        load_driver(only)  # raises
        raise DriverNotFound(f"no driver {only!r} is installed", "choose another --backend")
    found: list[tuple[Candidate, dict[str, Any]]] = []
    for each in tried:
        options: dict[str, Any] = {} if each.driver is None else dict(environment_options(each.name))
        if emulate and each.driver is not None:
            asked = {**options, "emulator": options.get("emulator") or True}
            try:
                each, options = attrs.evolve(each, probe=probe_driver(each.driver, asked)), asked
            except ConfigError as error:
                if not has_no_emulator(error):
                    raise
        found.append((each, options))
    return found


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
PARALLEL = {"tensor_parallel": "tensor", "data_parallel": "data", "experts": "experts"}
"""The options of how ranks share a model, and their keys of the table `parallel`."""


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
        ranks: adds options of how ranks share the model, which become settings, too.
        compilation_config: added to the help of ``--compilation-config``.
        several: the help of options that are repeatable, such as ``backend``. The command gets their values as
            arguments, such as ``backends``.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_settings(*args: Any, emulate: bool, **options: Any) -> Any:
            found = {name: options.pop(name) for name in OPTIONS if name not in several}
            parallel = {key: options.pop(name, None) for name, key in PARALLEL.items()} if ranks else {}
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
