"""Strict conversion of a mapping to an attrs class: nothing is coerced, and nothing is ignored."""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
import cattrs
from cattrs.errors import ForbiddenExtraKeysError

from hal.config.text import Digit, kind_of
from hal.errors import ConfigError, HalError, UnknownKey, listed, most_similar, nearest

T = TypeVar("T")
INTEGERS = 1 << 63
"""Integers range from -INTEGERS to INTEGERS - 1: 64 bits, as in torch."""
DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "single": "float32",
    "fp32": "float32",
    "f32": "float32",
}
"""Other words for dtypes, which errors translate."""
REMEDIES = {bool: "give true or false", int: "give an integer", float: "give a number", str: "give a text"}
"""What mends a value of another type."""
log = logging.getLogger("hal.config")


def read(cls: type[T], mapping: Mapping[str, Any], where: str = "config") -> T:
    """Build the attrs class ``cls`` from ``mapping``.

    Args:
        cls: its fields are strings, booleans, 64-bit integers, finite floats, literals, tuples, dicts, or such classes.
        mapping: the fields, by name.
        where: the mapping's name in errors.

    Raises:
        ConfigError: a key is unknown or missing, or a value has another type, is not finite, or is out of range. It has
            the first such key of ``mapping``; an UnknownKey, if one is unknown there.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} must be a table of keys and values, not {kind_of(mapping)}", "write it as {...}")
    return _read(cls, mapping, where, nearest)


def _read(cls: type[T], mapping: Mapping[str, Any], where: str, values: Callable[[str, Iterable[str]], str]) -> T:
    """Do what :func:`read` does. ``values`` describes the known values of a literal, for an unknown one."""

    tables: list[type | None] = []  # of each problem: the class that lacks a key
    remedies: dict[str, None] = {}

    def explained(error: BaseException, expected: type | None) -> str:
        tables.append(error.cl if isinstance(error, ForbiddenExtraKeysError) else None)
        if remedy := _remedy(error):
            remedies[remedy] = None
        return f"{error} ({values(*error.args[2:])})" if isinstance(error, _UnknownValue) else _format(error, expected)

    kind, key = ConfigError, None
    try:
        return _CONVERTER.structure(dict(mapping), cls)
    except cattrs.ClassValidationError as error:
        problems = cattrs.transform_error(error, path=where, format_exception=explained)
        values_of, others = error.group_exceptions()
        extra = (each.extra_fields for each in others if isinstance(each, ForbiddenExtraKeysError))
        if (key := min(map(str, itertools.chain(*extra)), default=None)) is not None:
            kind = UnknownKey
        elif values_of:
            key = values_of[0][1].name
    except RecursionError:
        problems, remedies = [f"{where} is nested too deeply"], {"nest fewer tables and lists": None}
    unknown = {text.rpartition(" @ ")[2]: table for text, table in zip(problems, tables, strict=False) if table}
    keys = [f"the keys of {path}: {', '.join(_keys(table)) or 'none'}" for path, table in unknown.items()]
    raise kind("; ".join(problems), "; ".join([*remedies, *keys]), key=key)


# Keys of config.json that concern training, generation or the file, and those that RopeParameters reads.
INERT_MODEL_KEYS = frozenset(
    {
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "ep_size",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)


def read_model_config(cls: type[T], config: Mapping[str, Any]) -> T:
    """Build a model's attrs class from a checkpoint's config.json.

    Keys that cannot change inference, or that other code reads (such as the rope parameters), are skipped. Any other
    unknown key logs a warning. ``null`` selects the default, unless the field allows None.

    Raises:
        ConfigError: a required key is missing, or a value is invalid for the model.
    """
    known = set(_keys(cls))
    if config.get("quantization_config") not in (None, {}):
        raise ConfigError(
            "config.json has a quantization_config, and this model reads unquantized weights",
            "load the checkpoint with hal.load_model, or use one in float32, bfloat16 or float16",
        )
    unread = sorted(key for key in config if key not in known | INERT_MODEL_KEYS and config[key] is not None)
    if unread:
        log.warning("config.json has keys that %s does not read: %s", cls.__name__, ", ".join(unread))
    kinds = get_type_hints(cls)
    given = {key: config[key] for key in known & set(config) if config[key] is not None or _is_optional(kinds[key])}
    return _read(cls, given, "config.json", lambda value, known: listed(known))


def _keys(cls: type) -> list[str]:
    return [field.name for field in attrs.fields(cls)] if attrs.has(cls) else []


def _format(error: BaseException, expected: type | None) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        known = _keys(error.cl)
        return "; ".join(
            f"unknown key {name!r}{_similar(name, known)}" for name in sorted(map(str, error.extra_fields))
        )
    if isinstance(error, KeyError):
        return f"required key {error.args[0]!r} is missing"
    return error.problem if isinstance(error, HalError) else str(error)


def _remedy(error: BaseException) -> str | None:
    """Return what mends a problem; None for an unknown key, beside which the keys are listed."""
    if isinstance(error, ForbiddenExtraKeysError):
        return None
    if isinstance(error, KeyError):
        return f"add {error.args[0]!r}"
    return error.remedy if isinstance(error, HalError | _InvalidValue) else "give a value that the rule allows"


def _similar(name: str, known: Sequence[str]) -> str:
    close = most_similar(name, known)
    return f" (did you mean {close!r}?)" if close else ""


def _has_origin(origin: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) is origin


def _strict(kind: type) -> Any:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is Digit:
            value = bool(value) if kind is bool else int(value)
        # In Python, bool is a subclass of int. A config with `true` for a number is a mistake.
        if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
        if type(value) is not kind:
            raise _InvalidValue(f"expected {kind.__name__}, found {kind_of(value)}", REMEDIES[kind])
        if isinstance(value, float) and not math.isfinite(value):
            raise _InvalidValue(f"expected a finite number, found {value}", REMEDIES[kind])
        if type(value) is int and not -INTEGERS <= value < INTEGERS:
            raise _InvalidValue(f"expected an integer of at most 64 bits, found {kind_of(value)}", "give a smaller one")
        return value

    return structure


def _structure_tuple(value: Any, annotation: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _InvalidValue(f"expected a list, found {kind_of(value)}", "give a list [...]")
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
    value = int(value) if type(value) is Digit else value
    if any(type(value) is type(each) and value == each for each in known):  # True equals 1
        return value
    problem = f"unknown value {value!r:.60}"
    if all(isinstance(each, str) for each in known):
        raise _UnknownValue(problem, "give a known value", _meant(str(value)), known)
    raise _InvalidValue(f"{problem} (known: {', '.join(map(json.dumps, known))})", "give a known value")


class _InvalidValue(ValueError):
    """A value is none that a key takes. Its arguments are the problem, and the remedy."""

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def remedy(self) -> str:
        return str(self.args[1])


class _UnknownValue(_InvalidValue):
    """The value of a literal is unknown. Two more arguments are the value and the known values."""


def _meant(value: str) -> str:
    name = value.removeprefix("torch.")
    return DTYPES.get(name.lower(), name)


def _structure_dict(value: Any, annotation: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _InvalidValue(f"expected a table with string keys, found {kind_of(value)}", "give a table {...}")
    element = get_args(annotation)[1]
    return {key: _CONVERTER.structure(item, element) for key, item in value.items()}


def _structure_table(cls: type) -> Any:
    structure: Any = cattrs.gen.make_dict_structure_fn(
        cls, _CONVERTER, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True
    )

    def checked(value: Any, kind: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _InvalidValue(f"expected a table, found {kind_of(value)}", "give a table {...}")
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
