"""The interface of compilers, which run a model's steps, and the registry that finds and validates them.

A compiler registered in the entry-point group ``hal.compilers`` is available on every backend that it supports. A
driver passes its own compilers to :class:`hal.Backend`. A compiler makes one form for each runner; the form runs steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
from torch import Tensor

from hal.config import CompilationConfig
from hal.config.plugins import Plugins, instance_of
from hal.errors import ConfigError, DriverIncompatible, nearest
from hal.step import Batch, StepShape

Outputs = tuple[Tensor, ...]
"""What a step computes for its tokens: hidden states ``[tokens, width]``, the model's ``extra`` tensors, and, of a form
that computes them, logits ``[tokens, vocab_size]``. All are valid until the next step."""
Plan = Callable[[], Outputs]
"""Runs a step that was planned. It is called at most once, before the next step is planned."""


class PhaseForm(ABC):
    """The compiled form of a model for one runner, which runs the steps of some shapes.

    Attributes:
        with_logits: whether its steps compute the logits of all their tokens. Otherwise the runner computes those that
            are asked for.
        uncaptured: runs a step of any shape without graphs, if the form has such code. The runner then traces none.
    """

    with_logits: bool = False
    uncaptured: Callable[[Batch], Outputs] | None = None

    @abstractmethod
    def plan(self, batch: Batch, shape: StepShape) -> Plan | str:
        """Decide whether and how the form runs a batch. Nothing is launched, and no memory of a graph is written.

        Returns:
            A function that runs the step, or why the form cannot run it. The runner warns once for each distinct
            reason, so a reason must not contain values that change with each step.
        """

    def stages(self, shape: StepShape) -> tuple[Any, ...]:
        """Return the stages after the rewrites, as ``hal.compile.optimize.Stage`` objects, for ``hal explain``."""
        return ()

    def close(self) -> None:  # noqa: B027 (most forms hold nothing to free explicitly)
        """Free the form's device resources."""


class Compiler(ABC):
    """One way to run steps, selected by ``compilation.compiler``.

    Attributes:
        name: the compiler's name in a configuration.
        reads: the configuration keys that it reads, of ``splitting_ops``, ``passes``, ``torch_compile_max_bs``,
            ``cache_dir`` and ``queries``. A key that no chosen compiler reads is an error. Every compiler reads the
            capture sizes.
        any_shape: whether its forms run steps of any shape. Otherwise they run only steps whose sequences all have the
            same number of queries, which is one of the configured ``queries``.
        invariant: whether its steps run the kernels that the model's Python calls, whatever their size, as
            ``numerics.invariant`` requires.
        traces: whether its steps are traced. If so, a model that cannot be traced for steps that no graph holds is
            refused, unless ``on_capture_error`` is ``eager``. Otherwise such steps run the model's Python.
    """

    name: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    any_shape: ClassVar[bool] = False
    invariant: ClassVar[bool] = False
    traces: ClassVar[bool] = True

    def unsupported(self, backend: Any) -> str | None:
        """Return why the compiler does not support a :class:`hal.Backend`, or None if it does."""
        return None

    @abstractmethod
    def make(self, context: Any) -> PhaseForm:
        """Make the form that runs a model's steps.

        Args:
            context: a :class:`hal.execution.context.FormContext`, with the model, backend, states and configuration.

        Raises:
            CaptureError: the steps cannot be captured.
            CompileError: the steps cannot be compiled.
            ConfigError: the configuration does not fit the model.
        """


GROUP = "hal.compilers"
EAGER = "eager"
"""The setting that runs the model's Python code without a compiler."""
OPTIMIZED = "optimized"
"""The setting that runs an encoder's optimized code, uncaptured."""
SPLITTING_OPS = (
    *("causal_conv1d", "channel_delta_rule", "gated_delta_rule", "hash_ngrams", "pool_groups"),
    *("attend_chosen", "attend_compressed", "select_blocks"),
    *("attend_selected", "latent_attention", "multi_head_latent_attention", "select_and_attend", "select_keys"),
    *("quantized_paged_attention", "paged_attention"),
)
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


def check_invariant(backend: Any, config: CompilationConfig) -> None:
    """Raise ConfigError if a phase's compiler does not keep ``numerics.invariant``."""
    served = [each for each in backend.compilers if each == EAGER or backend.compiler(each).invariant]
    phases: tuple[Literal["decode", "prefill", "encoder"], ...] = ("decode", "prefill", "encoder")
    for phase in phases:
        name = config.of(phase).compiler
        if name not in (*served, OPTIMIZED):
            raise ConfigError(
                f"numerics.invariant is true, but the compiler {name!r} of {phase} may compute steps of other sizes "
                "otherwise",
                f"choose one of {', '.join(served)}",
            )


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
