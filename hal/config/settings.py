"""What can be configured: frozen attrs classes, whose docstrings are the documentation of the keys."""

from __future__ import annotations

from typing import Any, Literal

import attrs

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


def _positive(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value == ():
        raise ValueError("must name one at least; leave it out for the default")
    for number in value if isinstance(value, tuple) else (value,):
        if number is not None and number < 1:
            raise ValueError(f"must be at least 1, not {number}")


def _some(instance: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...] | None) -> None:
    if value is not None and not value:
        raise ValueError("must name an operation; leave it out for the default")


@attrs.frozen
class PhaseConfig:
    """What :class:`CompilationConfig` says, for one phase; None (``null``) leaves it as it is there.

    Attributes:
        compiler: as there.
        splitting_ops: as there.
        passes: as there; added to those.
        capture_sizes: batch sizes of decode steps, or token counts of prefill steps, to capture.
        max_capture_size: as there.
    """

    compiler: str | None = None
    splitting_ops: tuple[str, ...] | None = attrs.field(default=None, validator=_some)
    passes: dict[str, bool] | None = None
    capture_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=_positive)
    max_capture_size: int | None = attrs.field(default=None, validator=_positive)


@attrs.frozen
class CompilationConfig:
    """How a runner executes the model.

    Attributes:
        compiler: ``eager`` runs the model's Python each step; ``graph`` captures decode steps whole, one graph per
            bucket; ``piecewise`` captures decode and prefill steps in pieces, between the operations that
            ``splitting_ops`` names, and ``piecewise_eager`` likewise, from the model's own Python, without a trace or
            passes; ``inductor`` compiles decode steps with PyTorch's compiler. Drivers may bring more, and other names
            for these; see ``hal backends``. Prefill is eager unless the compiler captures in pieces, or ``prefill``
            says otherwise.
        splitting_ops: operations that run eagerly between the pieces of ``piecewise``, by hal's name or the vendor's;
            None (``null``) takes ``paged_attention``.
        passes: rewrites by name, to turn off (false), or to ask for (true), which warns where one is applied nowhere;
            all that a backend has are on.
        capture_sizes: the decode batch sizes to capture; None (``null``) takes the default list.
        max_capture_size: leaves out larger sizes, of the default list or of ``capture_sizes``.
        queries: numbers of new tokens a sequence that count as decode steps, and that whole steps are captured for; a
            verifier of ``k`` drafted tokens adds ``k + 1``.
        torch_compile_max_bs: decode batches above it are captured from the model's own Python; None has no such limit.
        on_capture_error: ``raise``, or ``eager``: run that batch size eagerly and say so once.
        debug: before each replay, check that the weights, caches and inputs lie where they lay at the capture.
        cache_dir: a folder that a driver's own compiler keeps what it compiles in, for the next start; None takes the
            usual one.
        decode: what is otherwise for decode steps.
        prefill: what is otherwise for prefill steps.
    """

    compiler: str = "eager"
    splitting_ops: tuple[str, ...] | None = attrs.field(default=None, validator=_some)
    passes: dict[str, bool] = attrs.field(factory=dict)
    capture_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=_positive)
    max_capture_size: int | None = attrs.field(default=None, validator=_positive)
    queries: tuple[int, ...] = attrs.field(default=(1,), validator=_positive)
    torch_compile_max_bs: int | None = attrs.field(default=None, validator=_positive)
    on_capture_error: Literal["raise", "eager"] = "raise"
    debug: bool = False
    cache_dir: str | None = None
    decode: PhaseConfig = attrs.field(factory=PhaseConfig)
    prefill: PhaseConfig = attrs.field(factory=PhaseConfig)

    def of(self, phase: Literal["decode", "prefill"]) -> CompilationConfig:
        """What holds for one phase."""
        given = {name: each for name, each in attrs.asdict(getattr(self, phase)).items() if each is not None}
        if phase == "prefill":
            # The sizes above are of decode batches, and only pieces can be captured for any number of tokens.
            rest = {"compiler": self.compiler if self.compiler.startswith("piecewise") else "eager",
                    "capture_sizes": None, "max_capture_size": None}  # fmt: skip
            given = rest | given
        given["passes"] = self.passes | given.get("passes", {})
        return attrs.evolve(self, **given, decode=PhaseConfig(), prefill=PhaseConfig())


@attrs.frozen
class CacheConfig:
    """How large the paged KV cache is.

    Attributes:
        num_tokens: tokens that all sequences together may hold; rounded up to whole blocks.
        block_size: tokens per block; None (``null``) takes the backend's preferred size.
        num_sequences: sequences that may run at once, where a model keeps a state for each; others have no such limit.
        reuse_prefixes: ``generate`` keeps what is in the cache, and a prompt that begins like an earlier one skips that
            part. The rounding of its logits may then depend on what ran before it, so it is off by default.
    """

    num_tokens: int = attrs.field(default=4096, validator=_positive)
    block_size: int | None = attrs.field(default=None, validator=_positive)
    num_sequences: int = attrs.field(default=64, validator=_positive)
    reuse_prefixes: bool = False


@attrs.frozen
class Config:
    """What :func:`hal.open` needs to know.

    Attributes:
        backend: a driver's name, or ``auto`` for the available driver of highest priority.
        dtype: what weights and caches are held in; ``auto`` takes the checkpoint's own.
        strict: an operation without a kernel raises instead of running its reference.
        max_prefill_tokens: a prefill runs in steps of at most so many tokens, which bounds the memory that it takes.
        compilation: see :class:`CompilationConfig`.
        cache: see :class:`CacheConfig`.
        options: the driver's own options, read by the driver.
    """

    backend: str = "auto"
    dtype: DTypeName = "auto"
    strict: bool = False
    max_prefill_tokens: int = attrs.field(default=2048, validator=_positive)
    compilation: CompilationConfig = attrs.field(factory=CompilationConfig)
    cache: CacheConfig = attrs.field(factory=CacheConfig)
    options: dict[str, Any] = attrs.field(factory=dict)
