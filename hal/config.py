"""Configuration: frozen attrs classes, read strictly from a dict, JSON or TOML text, a file, or ``HAL_*`` variables.

Reading never coerces and never ignores: an unknown key, a wrong type or a duplicate key is a :class:`ConfigError` that
names the place and the nearest known key. Drivers and models read their own options with :func:`read` too.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
import cattrs
from cattrs.errors import ForbiddenExtraKeysError

from hal.errors import ConfigError, nearest

T = TypeVar("T")
log = logging.getLogger("hal.config")
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


def _positive(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if number is not None and number < 1:
            raise ValueError(f"must be at least 1, not {number}")


ALIASES = {"npugraph": "graph"}
"""Other names that compilers go by."""


def _own_name(compiler: str) -> str:
    return ALIASES.get(compiler, compiler)


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

    compiler: str | None = attrs.field(default=None, converter=attrs.converters.optional(_own_name))
    splitting_ops: tuple[str, ...] | None = attrs.field(default=None, validator=_some)
    passes: dict[str, bool] | None = None
    capture_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=_positive)
    max_capture_size: int | None = attrs.field(default=None, validator=_positive)


@attrs.frozen
class CompilationConfig:
    """How a runner executes the model.

    Attributes:
        compiler: ``eager`` runs the model's Python each step; ``graph`` (also ``npugraph``) captures decode steps
            whole, one graph per bucket; ``piecewise`` captures decode and prefill steps in pieces, between the
            operations that ``splitting_ops`` names, and ``piecewise_eager`` likewise, from the model's own Python,
            without a trace or passes; ``inductor`` compiles decode steps with PyTorch's compiler. Drivers may bring
            more; see ``hal backends``. Prefill is eager unless the compiler captures in pieces, or ``prefill`` says
            otherwise.
        splitting_ops: operations that run eagerly between the pieces of ``piecewise``, by hal's name or the vendor's;
            None (``null``) takes ``paged_attention``.
        passes: rewrites by name, to turn off (false) or on; all that a backend has are on.
        capture_sizes: the decode batch sizes to capture; None (``null``) takes the default list.
        max_capture_size: leaves out larger sizes, of the default list or of ``capture_sizes``.
        torch_compile_max_bs: decode batches above it are captured from the model's own Python; None has no such limit.
        on_capture_error: ``raise``, or ``eager``: run that batch size eagerly and say so once.
        debug: before each replay, check that the weights, caches and inputs lie where they lay at the capture.
        cache_dir: a folder that a driver's own compiler keeps what it compiles in, for the next start; None takes the
            usual one.
        decode: what is otherwise for decode steps.
        prefill: what is otherwise for prefill steps.
    """

    compiler: str = attrs.field(default="eager", converter=_own_name)
    splitting_ops: tuple[str, ...] | None = attrs.field(default=None, validator=_some)
    passes: dict[str, bool] = attrs.field(factory=dict)
    capture_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=_positive)
    max_capture_size: int | None = attrs.field(default=None, validator=_positive)
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
        reuse_prefixes: ``generate`` keeps what is in the cache, and a prompt that begins like an earlier one skips that
            part. The rounding of its logits may then depend on what ran before it, so it is off by default.
    """

    num_tokens: int = attrs.field(default=4096, validator=_positive)
    block_size: int | None = attrs.field(default=None, validator=_positive)
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


def read(cls: type[T], mapping: Mapping[str, Any], where: str = "config") -> T:
    """Build the attrs class ``cls`` from ``mapping``, strictly. ``where`` names the mapping in errors."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} must be a table of keys and values, not {_kind(mapping)}", "write it as {...}")
    try:
        return _CONVERTER.structure(dict(mapping), cls)
    except cattrs.BaseValidationError as error:
        problems = cattrs.transform_error(error, path=where, format_exception=_format)
    except RecursionError:
        problems = [f"{where} is nested too deeply"]
    raise ConfigError("; ".join(problems), f"correct them; the keys here: {', '.join(_keys(cls)) or 'none'}")


Source = Config | Mapping[str, Any] | str | os.PathLike[str] | None


# What a checkpoint's config.json says about training, generation or itself, and what RopeParameters reads.
_INERT_MODEL_KEYS = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip


def read_model_config(cls: type[T], config: Mapping[str, Any]) -> T:
    """Build a model's attrs class from a checkpoint's config.json.

    Keys that cannot change what inference computes (or that others read, as the rope parameters) are left out; any
    other key that ``cls`` does not know is named in a warning. A null stands for the default, unless None is a value.

    Raises:
        ConfigError: a required key is missing, or a value is not one that the model takes.
    """
    known = set(_keys(cls))
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json says the weights are quantised",
            "load it with hal.load_model, which reads int8 weights, or use one in float32, bfloat16 or float16",
        )
    unread = sorted(key for key in config if key not in known | _INERT_MODEL_KEYS and config[key] is not None)
    if unread:
        log.warning("config.json has keys that %s does not read: %s", cls.__name__, ", ".join(unread))
    kinds = get_type_hints(cls)
    given = {key: config[key] for key in known & set(config) if config[key] is not None or _is_optional(kinds[key])}
    return read(cls, given, "config.json")


def load(source: Source = None, *, driver_names: Iterable[str] = ()) -> Config:
    """Read a :class:`Config` from whatever an integrator holds.

    Args:
        source: a Config (returned as it is), a mapping, JSON text (begins with ``{``), a path ending in ``.json`` or
            ``.toml``, a backend's name, or None for the ``HAL_*`` environment variables.
        driver_names: drivers whose own ``HAL_<DRIVER>_*`` variables are left to them, if source is None.

    Raises:
        ConfigError: the source cannot be read or holds a key or value that Config does not know.
    """
    if isinstance(source, Config):
        return source
    if source is None:
        return read(Config, environment_mapping(driver_names=driver_names), "environment")
    return read(Config, to_mapping(source))


def to_mapping(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """The mapping that a source of :func:`load` (other than the environment) spells."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return parse_json(source, "config text")
    if isinstance(source, os.PathLike) or str(source).endswith((".json", ".toml")):
        return read_file(Path(source))
    if not isinstance(source, str):
        raise ConfigError(f"cannot read a config from {_kind(source)}", "pass a mapping, JSON text, a path or a name")
    return {"backend": source}


def read_file(path: Path) -> Mapping[str, Any]:
    """Parse a ``.json`` or ``.toml`` file into a mapping; raises ConfigError for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the config file {path}: {error}", "check the path and its permissions"
        ) from None
    if path.suffix != ".toml":
        return parse_json(text, str(path))
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "correct the file") from None


def parse_json(text: str, where: str) -> Mapping[str, Any]:
    """Parse one JSON object. A key given twice is an error, because one of the two would be silently ignored."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"given twice: {', '.join(twice)}")
        return table

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}", "correct the text") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must hold a JSON object, not {_kind(value)}", "write it as {...}")
    return value


CACHE_DIR = "HAL_CACHE_DIR"
"""The variable that names the folder for what hal compiles; it is no part of a configuration."""


def cache_folder(name: str) -> Path:
    """Where to keep what is compiled for ``name``: in ``HAL_CACHE_DIR``, ``XDG_CACHE_HOME``/torch-hal, or ~/.cache."""
    if own := os.environ.get(CACHE_DIR):
        return Path(own).expanduser().absolute() / name
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home.absolute() / "torch-hal" / name


def environment_mapping(environ: Mapping[str, str] | None = None, driver_names: Iterable[str] = ()) -> dict[str, Any]:
    """Read ``HAL_BACKEND``, ``HAL_CACHE``, ... into a mapping; ``HAL_CACHE__NUM_TOKENS`` sets a key of a table.

    Values are JSON where that parses (``HAL_STRICT=true``), else text. ``HAL_<DRIVER>_*`` is left to that driver (see
    :func:`environment_options`), and ``HAL_CACHE_DIR`` to what it says; any other unknown ``HAL_*`` is reported by
    :func:`read`.
    """
    environ = os.environ if environ is None else environ
    drivers = tuple(driver_names)
    mapping: dict[str, Any] = {}
    wholes: set[tuple[str, ...]] = set()
    for variable, text in sorted(environ.items()):
        if (
            not variable.startswith("HAL_")
            or variable == CACHE_DIR
            or any(_option_of(variable, driver) for driver in drivers)
        ):
            continue
        path = variable.removeprefix("HAL_").lower().split("__")
        table = mapping
        for depth, key in enumerate(path[:-1], start=1):
            if tuple(path[:depth]) in wholes:
                raise ConfigError(f"{variable} sets a key inside {key}, which is set as a whole too", "set one of them")
            table = table.setdefault(key, {})
        if path[-1] in table:  # names differ in case, or a lower-case one came after the keys of its table
            raise ConfigError(f"{variable} sets {'.'.join(path)}, which another variable sets too", "set one of them")
        table[path[-1]] = _environment_value(path, text, variable)
        wholes.add(tuple(path))
    return mapping


def environment_options(driver_name: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A driver's options from ``HAL_<DRIVER>_<OPTION>``: ``HAL_ACME_CARDS=2`` is ``{"cards": 2}`` for ``acme``."""
    environ = os.environ if environ is None else environ
    options = ((_option_of(variable, driver_name), text) for variable, text in sorted(environ.items()))
    return {option: _environment_value(["options", option], text, option) for option, text in options if option}


def _option_of(variable: str, driver_name: str) -> str:
    """The option of a driver that a variable sets, or nothing; two underscores are for the tables of Config."""
    option = variable.removeprefix(f"HAL_{driver_name.upper().replace('-', '_')}_")
    return option.lower() if option != variable and not option.startswith("_") else ""


def _environment_value(path: list[str], text: str, variable: str) -> Any:
    cls: Any = Config
    for key in path:
        cls = get_type_hints(cls).get(key) if attrs.has(cls) else None
    if cls is str or get_origin(cls) is Literal:
        return text
    if text.lstrip().startswith("{"):
        return parse_json(text, variable)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _keys(cls: type) -> list[str]:
    return [field.name for field in attrs.fields(cls)] if attrs.has(cls) else []


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"


def _format(error: BaseException, expected: type | None) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        known = _keys(error.cl)
        return "; ".join(
            f"unknown key {name!r} ({nearest(str(name), known)})" for name in sorted(map(str, error.extra_fields))
        )
    if isinstance(error, KeyError):
        return f"required key {error.args[0]!r} is missing"
    return str(error)


def _has_origin(origin: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) is origin


def _strict(kind: type) -> Any:
    def structure(value: Any, _: Any) -> Any:
        # bool is a subclass of int in Python; a config that says `true` for a number is a mistake.
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ValueError(f"expected {kind.__name__}, found {_kind(value)}")
        return value

    return structure


def _structure_tuple(value: Any, annotation: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list, found {_kind(value)}")
    element = get_args(annotation)[0]
    return tuple(_CONVERTER.structure(item, element) for item in value)


def _structure_union(value: Any, annotation: Any) -> Any:
    if value is None:
        return None
    (some,) = (member for member in get_args(annotation) if member is not type(None))
    return _CONVERTER.structure(value, some)


def _is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType) and type(None) in get_args(annotation)


def _structure_literal(value: Any, annotation: Any) -> Any:
    known = get_args(annotation)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown value {value!r:.60} ({nearest(str(value), known)})")
    return value


def _structure_dict(value: Any, _: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"expected a table with text keys, found {_kind(value)}")
    return value


def _structure_table(cls: type) -> Any:
    structure: Any = cattrs.gen.make_dict_structure_fn(
        cls, _CONVERTER, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True
    )

    def checked(value: Any, kind: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"expected a table, found {_kind(value)}")
        return structure(value, kind)

    return checked


_CONVERTER = cattrs.Converter(detailed_validation=True)
_CONVERTER.register_structure_hook_factory(attrs.has, _structure_table)
for _primitive in (str, int, float, bool):
    _CONVERTER.register_structure_hook(_primitive, _strict(_primitive))
_CONVERTER.register_structure_hook_func(_has_origin(tuple), _structure_tuple)
_CONVERTER.register_structure_hook_func(_has_origin(dict), _structure_dict)
_CONVERTER.register_structure_hook_func(_has_origin(Literal), _structure_literal)
_CONVERTER.register_structure_hook_func(_is_optional, _structure_union)
