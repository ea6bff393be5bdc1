"""The configuration's attrs classes. Their docstrings document the keys.

A key has one name: to rename it, rename the attribute and every use. There are no aliases: reading.py refuses the old
name, and the error gives the nearest known key. An alias would be accepted in ``checked`` of reading.py, which sees the
keys of every table. Compilers may have aliases, which drivers declare.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from hal.config.bounds import ADAPTER_RANK, ADAPTERS, CAPTURES, RANKS, SECONDS, SEQUENCES, TOKENS, at_most
from hal.errors import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
QuantizedWeights = Literal["auto", "kept", "dequantized", "w8a16", "w8a8_dynamic"]
CacheDType = Literal["auto", "model", "int8", "fp8"]
ExpertsMode = Literal["split", "all_gather", "all_to_all", "dispatch"]


def _non_empty(instance: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...] | None) -> None:
    if value is not None and not value:
        raise ConfigError("must name at least one operation; leave the key out for the default", "leave the key out")


@attrs.frozen
class PhaseConfig:
    """Overrides of :class:`CompilationConfig` for one phase; None (``null``) keeps its value.

    Attributes:
        compiler: overrides ``compilation.compiler`` for this phase.
        splitting_ops: overrides ``compilation.splitting_ops`` for this phase.
        passes: merged into ``compilation.passes``; an entry here takes precedence.
        capture_sizes: batch sizes of decode steps, or token counts of prefill steps, to capture.
        max_capture_size: the largest size to capture in this phase.
    """

    compiler: str | None = None
    splitting_ops: tuple[str, ...] | None = attrs.field(default=None, validator=_non_empty)
    passes: dict[str, bool] | None = None
    capture_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=at_most(SEQUENCES, entries=CAPTURES))
    max_capture_size: int | None = attrs.field(default=None, validator=at_most(TOKENS))


@attrs.frozen
class EncoderConfig:
    """How the encoder of a model runs, such as that of images. None (``null``) means the default.

    Attributes:
        compiler: ``eager`` runs the encoder's Python code, and ``optimized`` its optimized code, uncaptured. ``graph``
            captures that code, one graph per number of embeddings; what no graph holds runs uncaptured. ``inductor``
            compiles it with torch.compile, for any size. The default is ``eager`` if all steps are, else
            ``optimized``.
        capture_sizes: the numbers of embeddings to capture with ``graph``; those of all images of a step count. The
            default is 64, 256 and 1024, up to ``max_prefill_tokens``.
    """

    compiler: Literal["eager", "optimized", "graph", "inductor"] | None = None
    capture_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=at_most(TOKENS, entries=CAPTURES))

    def __attrs_post_init__(self) -> None:
        if self.capture_sizes is not None and self.compiler != "graph":
            raise ConfigError(
                f"compilation.encoder has capture_sizes, and its compiler is {self.compiler}",
                "set compilation.encoder.compiler to graph, or leave capture_sizes out",
            )


@attrs.frozen
class CompilationConfig:
    """How a runner executes the model.

    Attributes:
        compiler: ``eager`` runs the model's Python code in each step. ``graph`` captures whole decode steps, one graph
            per batch size. ``piecewise`` captures decode and prefill steps in pieces, between the ``splitting_ops``.
            ``piecewise_eager`` does so from the model's Python code, without a trace or passes. ``inductor`` compiles
            decode steps with torch.compile. Drivers add others; ``hal backends`` lists them. Prefill is captured if
            the compiler captures pieces or ``prefill`` says so; otherwise it runs optimized code, uncaptured.
        splitting_ops: operations that run eagerly between the pieces of ``piecewise``, by hal's name or the vendor's;
            None (``null``) means attention and the operations of recurrent layers, as far as the model calls them.
        passes: passes by name. False disables one. True warns if a rewrite matches nowhere. All are on by default.
        capture_sizes: the decode batch sizes to capture; None (``null``) means the default list.
        max_capture_size: the largest size to capture, of the default list or of ``capture_sizes``.
        queries: the numbers of new tokens per sequence that count as decode steps and are captured whole. A verifier
            of ``k`` draft tokens adds ``k + 1``.
        torch_compile_max_bs: larger decode batches are captured from the model's Python code; None sets no limit.
        on_capture_error: ``raise`` refuses a model when the runner is made, if a size cannot be captured or compiled,
            or if the steps that no graph holds cannot be traced. ``eager`` logs a warning once: that size runs
            uncaptured, and steps that cannot be traced run the model's Python. If ranks step together, all of them do.
        debug: check before each replay that the addresses of weights, caches and inputs are those of the capture, and
            fill what a step returned with NaN in the next.
        cache_dir: the folder of the cache of a driver's compiler, for the next start; None means its default.
        decode: overrides for decode steps.
        prefill: overrides for prefill steps.
        encoder: how the encoder of a model runs.
    """

    compiler: str = "eager"
    splitting_ops: tuple[str, ...] | None = attrs.field(default=None, validator=_non_empty)
    passes: dict[str, bool] = attrs.field(factory=dict)
    capture_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=at_most(SEQUENCES, entries=CAPTURES))
    max_capture_size: int | None = attrs.field(default=None, validator=at_most(TOKENS))
    queries: tuple[int, ...] = attrs.field(default=(1,), validator=at_most(SEQUENCES, entries=CAPTURES))
    torch_compile_max_bs: int | None = attrs.field(default=None, validator=at_most(TOKENS))
    on_capture_error: Literal["raise", "eager"] = "raise"
    debug: bool = False
    cache_dir: str | None = None
    decode: PhaseConfig = attrs.field(factory=PhaseConfig)
    prefill: PhaseConfig = attrs.field(factory=PhaseConfig)
    encoder: EncoderConfig = attrs.field(factory=EncoderConfig)

    def of(self, phase: Literal["decode", "prefill", "encoder"]) -> CompilationConfig:
        """Return the configuration of one phase, with its overrides applied. An encoder has the passes of prefill."""
        given = {name: each for name, each in attrs.asdict(getattr(self, phase)).items() if each is not None}
        if phase == "encoder":
            chosen = {"compiler": "eager" if self.compiler == "eager" else "optimized", "capture_sizes": None} | given
            return attrs.evolve(self.of("prefill"), **chosen, max_capture_size=None, torch_compile_max_bs=None)
        if phase == "prefill":
            # The sizes above are decode batch sizes, and only pieces can be captured for any number of tokens.
            rest = {
                "compiler": self.compiler if self.compiler.startswith("piecewise") else "eager",
                "capture_sizes": None,
                "max_capture_size": None,
            }
            given = rest | given
        given["passes"] = self.passes | given.get("passes", {})
        return attrs.evolve(self, **given, decode=PhaseConfig(), prefill=PhaseConfig())


@attrs.frozen
class CacheConfig:
    """The size of the paged KV cache, and its numbers.

    Attributes:
        dtype: how keys and values are kept. ``model``: in the dtype of the model. ``int8`` and ``fp8``: in 8 bits,
            with a scale for each token and head; fp8 is float8 (e4m3). ``auto``: as the checkpoint says, with its
            scales, or else as ``model``.
        num_tokens: the tokens that all sequences together can hold; rounded up to whole blocks.
        block_size: tokens per block; None (``null``) means the backend's preferred size, or the least multiple of it
            that suits states which groups of tokens share.
        num_sequences: concurrent sequences, for models that keep a state per sequence. Other models have no limit.
        reuse_prefixes: ``generate`` keeps finished prompts in the cache, and a new prompt skips the prefix it shares
            with one of them. The rounding of its logits then depends on earlier prompts, so it is off by default.
        saved_states: the prefixes whose states ``reuse_prefixes`` saves, for models that keep a state per sequence.
            Each takes the memory of a sequence's states. The least recently used one is dropped first.
        saved_states_interval: the tokens between two places of a sequence where its states are saved, a multiple of
            the block size. A prefix that is shared ends at such a place, and steps of prompts end there. None
            (``null``) means the smallest multiple of 256 or more.
        num_embeddings: the embeddings of images and other inputs that are kept for prompts which repeat an input, for
            models with an encoder. The least recently used input is dropped first.
    """

    dtype: CacheDType = "auto"
    num_tokens: int = attrs.field(default=4096, validator=at_most(TOKENS))
    block_size: int | None = attrs.field(default=None, validator=at_most(TOKENS))
    num_sequences: int = attrs.field(default=64, validator=at_most(SEQUENCES))
    reuse_prefixes: bool = False
    saved_states: int | None = attrs.field(default=None, validator=at_most(SEQUENCES))
    saved_states_interval: int | None = attrs.field(default=None, validator=at_most(TOKENS))
    num_embeddings: int = attrs.field(default=16384, validator=at_most(TOKENS))


@attrs.frozen
class ParallelConfig:
    """How the ranks of a job share a model. Each rank is a process with one device.

    Attributes:
        tensor: the number of ranks that split each layer.
        data: the number of groups of ranks that hold a copy of the model. Each group runs separate batches.
        experts: how the ranks share mixtures of experts. ``split``: each of the ``tensor`` ranks holds a part of every
            expert. With the others, each rank of the job holds whole experts. ``all_gather``: the ranks exchange their
            tokens and add their results. ``all_to_all``: each token is sent to the ranks of its experts. ``dispatch``:
            as ``all_to_all``, with the driver's kernels for it.
        timeout: seconds after which a collective that a rank has not joined fails.
    """

    tensor: int = attrs.field(default=1, validator=at_most(RANKS))
    data: int = attrs.field(default=1, validator=at_most(RANKS))
    experts: ExpertsMode = "split"
    timeout: int = attrs.field(default=600, validator=at_most(SECONDS))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor * self.data


@attrs.frozen
class AdaptersConfig:
    """The room for adapters (LoRA) of a model's projections, which is allocated once, when the model is loaded.

    Attributes:
        slots: the most adapters at once; None (``null``) for no room. ``hal.LLM`` and the commands that are given
            adapters make room for one more than these.
        rank: the largest rank of an adapter. Each slot takes memory for this rank in each projection.
        experts: whether routed experts take adapters, too. Each slot takes memory for all of them.
    """

    slots: int | None = attrs.field(default=None, validator=at_most(ADAPTERS))
    rank: int = attrs.field(default=16, validator=at_most(ADAPTER_RANK))
    experts: bool = False


@attrs.frozen
class NumericsConfig:
    """What results depend on.

    Attributes:
        invariant: the bits of a token's logits depend on its sequence alone: not on other sequences, padding, the
            split of prompts into steps, reused prefixes, the number of threads, or whether a graph runs the step.
            Kernels that do not hold this are replaced, by slower ones; an operation that has none refuses its calls.
    """

    invariant: bool = False


@attrs.frozen
class Config:
    """The configuration of :func:`hal.open`.

    Attributes:
        backend: a driver's name, or ``auto`` for the available driver of highest priority.
        dtype: the dtype of weights and caches; ``auto`` means the checkpoint's.
        quantized_weights: what becomes of quantized weights at load. ``kept``: they stay as the checkpoint has them;
            in a GGUF file, those of types Q4_0 to Q8_0 and Q4_K to Q6_K. ``dequantized``: they become floating-point
            weights of ``dtype``. ``w8a16`` and ``w8a8_dynamic``: they are quantized anew, to that scheme. ``auto``:
            ``dequantized`` for a GGUF file; ``w8a8_dynamic`` for the schemes in ``limits.requantized`` of the driver;
            ``kept`` for others. Without quantized weights, only ``auto`` is possible.
        strict: an operation without a kernel raises instead of running its reference.
        model_source: where a model's code comes from: ``hal`` for the models that packages register with hal, or
            another source's name, such as ``transformers``. ``auto`` means hal's if there is one, else another's.
        check_model: at load, a model of another source compares its logits with those of its source's own code.
        max_prefill_tokens: the most tokens of a prefill step, which bounds its memory.
        compilation: how a runner executes the model; see :class:`CompilationConfig`.
        cache: the size of the paged KV cache; see :class:`CacheConfig`.
        parallel: how several ranks share the model; see :class:`ParallelConfig`.
        adapters: the room for adapters; see :class:`AdaptersConfig`.
        numerics: what results depend on; see :class:`NumericsConfig`.
        options: options of the driver; the driver's page lists them.
    """

    backend: str = "auto"
    dtype: DTypeName = "auto"
    quantized_weights: QuantizedWeights = "auto"
    strict: bool = False
    model_source: str = "auto"
    check_model: bool = True
    max_prefill_tokens: int = attrs.field(default=2048, validator=at_most(TOKENS))
    compilation: CompilationConfig = attrs.field(factory=CompilationConfig)
    cache: CacheConfig = attrs.field(factory=CacheConfig)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    adapters: AdaptersConfig = attrs.field(factory=AdaptersConfig)
    numerics: NumericsConfig = attrs.field(factory=NumericsConfig)
    options: dict[str, Any] = attrs.field(factory=dict)


CONFIGS = (
    *(Config, CompilationConfig, PhaseConfig, EncoderConfig, CacheConfig),
    *(ParallelConfig, AdaptersConfig, NumericsConfig),
)
"""The classes of the configuration and of its tables."""
