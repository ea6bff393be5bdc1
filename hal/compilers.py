"""The compilers that hal brings, and what a configuration may ask of a backend's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.config import CompilationConfig
from hal.errors import ConfigError, nearest

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
    # What no phase reads would be ignored without a word.
    compilers = {decode.compiler, prefill.compiler}
    for key, given, readers in (
        ("splitting_ops", decode.splitting_ops or prefill.splitting_ops, set(IN_PIECES)),
        ("passes", decode.passes or prefill.passes, set(backend.compilers) - {"eager", "inductor", "piecewise_eager"}),
        ("torch_compile_max_bs", decode.torch_compile_max_bs, {"graph"}),
        ("cache_dir", config.cache_dir, set(backend.compilers) - set(OWN_COMPILERS)),
    ):
        if given and not compilers & readers:
            raise ConfigError(
                f"compilation.{key} is given, and the compiler {decode.compiler!r} does not read it",
                f"leave it out, or use {', '.join(sorted(readers)) or 'another backend'}",
            )
