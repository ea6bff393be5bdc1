"""The compilers of a backend, and validation of the compilation settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from hal.config import CompilationConfig
from hal.config.plugins import Plugins, instance_of
from hal.drivers.compiler import Compiler
from hal.errors import ConfigError, DriverIncompatible, nearest

GROUP = "hal.compilers"
EAGER = "eager"
"""The setting that runs the model's Python code without a compiler."""
OPTIMIZED = "optimized"
"""The setting that runs an encoder's optimized code, uncaptured."""
SPLITTING_OPS = ("causal_conv1d", "gated_delta_rule", "quantized_paged_attention", "paged_attention")
"""The default of ``compilation.splitting_ops``: those of these operations that a model calls."""


COMPILERS: Plugins[Compiler] = Plugins(GROUP, "compiler", instance_of(Compiler, GROUP))
"""The registered compilers of all installed packages."""


def compilers_of(backend: Any, own: Iterable[Compiler]) -> dict[str, Compiler]:
    """Return the driver's compilers, and the registered compilers that support the backend, by name."""
    mine = {each.name: each for each in own}
    others = {name: each for name, each in COMPILERS.load_all().plugins.items() if each.unsupported(backend) is None}
    return dict(sorted((others | mine).items()))


def check_compilers(driver: str, own: Sequence[Any]) -> None:
    """Raise DriverIncompatible unless each is a compiler with a unique name."""
    for each in own:
        if not isinstance(each, Compiler):
            raise DriverIncompatible(
                f"the driver {driver} has {each!r:.70} among its compilers",
                "pass hal.vendor.Compiler objects; omit hal's own compilers, which graphs=True makes available",
            )
        if each.name == EAGER or [other.name for other in own].count(each.name) > 1 or each.name in COMPILERS.names():
            raise DriverIncompatible(
                f"the driver {driver} has a compiler named {each.name!r}, a name that another compiler has",
                "give each compiler a unique name",
            )


def check_aliases(driver: str, aliases: Mapping[str, str], served: Collection[str]) -> None:
    """Raise DriverIncompatible for an alias that is a compiler's name, or that refers to an unknown compiler."""
    known = dict.fromkeys((EAGER, *COMPILERS.names(), *served))
    if wrong := [each for each, own in aliases.items() if each in served or own not in known]:
        raise DriverIncompatible(
            f"the driver {driver} has the alias {wrong[0]!r} for the compiler {aliases[wrong[0]]!r}",
            f"choose unused names as aliases, for some of {', '.join(known)}",
        )


def check_compilation(backend: Any, config: CompilationConfig) -> None:
    """Raise ConfigError for features that a :class:`hal.Backend` lacks, and for settings that would be ignored."""
    decode, prefill = config.of("decode"), config.of("prefill")
    any_shape = [name for name in backend.compilers if name == EAGER or backend.compiler(name).any_shape]
    for phase, served, where in ((decode, backend.compilers, ""), (prefill, any_shape, " for prefill")):
        if phase.compiler not in served:
            known = COMPILERS.load(phase.compiler) if phase.compiler in COMPILERS.names() else None
            why = "" if where or known is None else f": {known.unsupported(backend)}"
            raise ConfigError(
                f"the backend {backend.name} has no compiler {phase.compiler!r}{where}{why}",
                nearest(phase.compiler, served),
            )
        for name in phase.splitting_ops or ():
            backend.operation_named(name)
        for name in phase.passes:
            if name not in backend.pass_names:
                raise ConfigError(f"the backend {backend.name} has no pass {name!r}", nearest(name, backend.pass_names))
    _check_readers(backend, config, {"decode": decode.compiler, "prefill": prefill.compiler})


_DEFAULTS = attrs.asdict(CompilationConfig(), recurse=False)


def _check_readers(backend: Any, config: CompilationConfig, compilers: Mapping[str, str]) -> None:
    """Raise ConfigError for a phase's key that its compiler ignores, and for a common key that every phase ignores."""
    known = [backend.compiler(name) for name in backend.compilers if name != EAGER]
    captured = next((each for each in compilers.values() if each != EAGER), EAGER)
    for key in ("splitting_ops", "passes", "torch_compile_max_bs", "cache_dir", "queries"):
        readers = {each.name for each in known if key in each.reads}
        held = []  # the compilers of the phases that use the common value of the key
        for phase, compiler in compilers.items():
            own = getattr(getattr(config, phase), key, None)
            if key == "passes" and getattr(config, phase).compiler != EAGER:
                compiler = captured if compiler == EAGER else compiler  # It rewrites steps that are not captured, too.
            if own and compiler not in readers:
                raise _unread(f"{phase}.{key}", f"the compiler {compiler!r} does not read it", readers)
            if not own or key == "passes":
                held.append(compiler)
        given = getattr(config, key) != _DEFAULTS[key]
        if given and not readers.intersection(held):
            why = f"the compiler {held[0]!r} does not read it" if held else "decode and prefill both override it"
            raise _unread(key, why, readers)
    if set(compilers.values()) == {EAGER}:
        return  # both phases run eagerly, for comparison with the compilers that the rest configures
    captures = {each.name for each in known}
    for phase, readers in (("decode", captures), ("prefill", {each.name for each in known if each.any_shape})):
        given = [name for name in ("capture_sizes", "max_capture_size") if getattr(getattr(config, phase), name)]
        if given and compilers[phase] == EAGER:
            raise _unread(
                f"{phase}.{given[0]}", f"{phase} is eager, which captures no graphs", readers, f"{phase}.compiler "
            )


def _unread(key: str, why: str, readers: Collection[str], where: str = "") -> ConfigError:
    return ConfigError(
        f"compilation.{key} is set, but {why}",
        f"remove it, or use {where}{', '.join(sorted(readers)) or 'another backend'}",
    )


def resolve_aliases(config: CompilationConfig, aliases: Mapping[str, str]) -> CompilationConfig:
    """Return the configuration with each compiler alias replaced by the compiler's name."""
    decode, prefill = (
        attrs.evolve(each, compiler=each.compiler and aliases.get(each.compiler, each.compiler))
        for each in (config.decode, config.prefill)
    )
    compiler = aliases.get(config.compiler, config.compiler)
    return attrs.evolve(config, compiler=compiler, decode=decode, prefill=prefill)


def pass_name(each: Any) -> str:
    """Return the name of a rewrite, or of a function of a graph, in configurations and reports."""
    return str(getattr(each, "__name__", repr(each)) if callable(each) else getattr(each, "name", repr(each)))
