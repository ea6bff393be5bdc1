"""The compilers that hal brings, and what a configuration may ask of a backend's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from hal.config import CompilationConfig
from hal.errors import ConfigError, DriverIncompatible, nearest

if TYPE_CHECKING:
    from hal.backend import Backend

SPLITTING_OPS = ("paged_attention",)
"""Where steps are split, unless the config says otherwise."""
IN_PIECES = ("piecewise", "piecewise_eager")
"""Those that capture a step in pieces."""
OWN_COMPILERS = ("eager", "graph", "inductor", *IN_PIECES)
"""Those that hal itself brings; a driver's others are its own."""
PREFILL_COMPILERS = ("eager", *IN_PIECES)
"""What prefill steps can run with: each has a number of tokens and sequences of its own."""


def all_compilers(named: Sequence[str], *, inductor: bool) -> tuple[str, ...]:
    """What ``compilation.compiler`` may be on a backend whose driver names some, and that serves Inductor or not."""
    served = dict.fromkeys(("eager", *named))
    if "graph" in served:  # what can be captured whole can be captured in pieces
        served |= dict.fromkeys(IN_PIECES)
    if inductor:
        served["inductor"] = None
    return tuple(served)


def check_aliases(driver: str, aliases: Mapping[str, str], served: Sequence[str]) -> None:
    """Raise DriverIncompatible for an alias that is a compiler's own name, or stands for none."""
    known = dict.fromkeys((*OWN_COMPILERS, *served))
    if wrong := [each for each, own in aliases.items() if each in served or own not in known]:
        raise DriverIncompatible(
            f"the driver {driver} has the alias {wrong[0]!r} for the compiler {aliases[wrong[0]]!r}",
            f"give new names for some of {', '.join(known)}",
        )


def check_compilation(backend: Backend, config: CompilationConfig) -> None:
    """Raise ConfigError for what the backend does not have, and for settings that nothing would read."""
    decode, prefill = config.of("decode"), config.of("prefill")
    for phase, served, where in (
        (decode, backend.compilers, ""),
        (prefill, [each for each in backend.compilers if each in PREFILL_COMPILERS], " for prefill"),
    ):
        if phase.compiler not in served:
            raise ConfigError(
                f"the backend {backend.name} has no compiler {phase.compiler!r}{where}",
                nearest(phase.compiler, served),
            )
        for name in phase.splitting_ops or ():
            backend.operation_named(name)
        for name in phase.passes:
            if name not in backend.pass_names:
                raise ConfigError(f"the backend {backend.name} has no pass {name!r}", nearest(name, backend.pass_names))
    _check_readers(backend, config, {"decode": decode.compiler, "prefill": prefill.compiler})


def _check_readers(backend: Backend, config: CompilationConfig, compilers: Mapping[str, str]) -> None:
    """Refuse what would be ignored without a word: keys of a phase that it does not read, and of both if none does."""
    captures = set(backend.compilers) - {"eager"}
    for key, readers in (
        ("splitting_ops", set(IN_PIECES)),
        ("passes", captures - {"inductor", "piecewise_eager"}),
        ("torch_compile_max_bs", {"graph"}),
        ("cache_dir", set(backend.compilers) - set(OWN_COMPILERS)),
    ):
        held = []  # the compilers of the phases for which the key of both holds
        for phase, compiler in compilers.items():
            own = getattr(getattr(config, phase), key, None)
            if own and compiler not in readers:
                raise _unread(f"{phase}.{key}", f"the compiler {compiler!r} does not read it", readers)
            if not own or key == "passes":
                held.append(compiler)
        if getattr(config, key) and not readers.intersection(held):
            why = f"the compiler {held[0]!r} does not read it" if held else "decode and prefill each have their own"
            raise _unread(key, why, readers)
    if set(compilers.values()) == {"eager"}:
        return  # a configuration of other compilers, run without them to compare
    for phase, readers in (("decode", captures), ("prefill", set(IN_PIECES))):
        given = [name for name in ("capture_sizes", "max_capture_size") if getattr(getattr(config, phase), name)]
        if given and compilers[phase] == "eager":
            raise _unread(
                f"{phase}.{given[0]}", f"{phase} is eager, which captures nothing", readers, f"{phase}.compiler "
            )


def _unread(key: str, why: str, readers: Collection[str], where: str = "") -> ConfigError:
    return ConfigError(
        f"compilation.{key} is given, and {why}",
        f"leave it out, or use {where}{', '.join(sorted(readers)) or 'another backend'}",
    )


def by_own_names(config: CompilationConfig, aliases: Mapping[str, str]) -> CompilationConfig:
    """With hal's names of the compilers in place of a driver's."""
    decode, prefill = (
        attrs.evolve(each, compiler=each.compiler and aliases.get(each.compiler, each.compiler))
        for each in (config.decode, config.prefill)
    )
    compiler = aliases.get(config.compiler, config.compiler)
    return attrs.evolve(config, compiler=compiler, decode=decode, prefill=prefill)


def pass_name(each: Any) -> str:
    """What a rewrite, or a function of a graph, is called in configurations and reports."""
    return str(getattr(each, "__name__", repr(each)) if callable(each) else getattr(each, "name", repr(each)))
