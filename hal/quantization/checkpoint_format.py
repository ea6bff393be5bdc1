"""Checkpoint formats: their interface, their registry, and which of them describes a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import attrs

from hal.config.plugins import Plugins, instance_of
from hal.errors import CheckpointError, ConfigError
from hal.ops.forms import Form
from hal.quantization.forms import NAMES
from hal.quantization.integer_arithmetic import AGAIN
from hal.quantization.stored_layer import StoredAs, Writer


@attrs.frozen
class CacheQuantization:
    """How a checkpoint says that keys and values are kept.

    Attributes:
        dtype: ``int8`` or ``fp8``.
        scales: the name of a layer's scale of all keys, and of all values, with ``{0}`` for ``k`` or ``v``; None if the
            checkpoint has none.
    """

    dtype: Literal["int8", "fp8"]
    scales: str | None


class Quantization(ABC):
    """The quantization of one checkpoint, as a format describes it.

    Attributes:
        cache: how keys and values are kept; None if it does not say.
        unapplied: parts of the description that hal does not apply, for the log.
    """

    cache: CacheQuantization | None = None
    unapplied: tuple[str, ...] = ()

    @abstractmethod
    def stored_as(self, layer: str) -> StoredAs | None:
        """Return how the checkpoint layer ``layer`` is stored, or None if it is not quantized.

        Raises:
            CheckpointError: hal does not support its quantization, or the description lacks the layer.
        """

    def exclusion(self, layer: str) -> str:
        """Return the statement by which :meth:`stored_as` returns None for a layer, for errors."""
        return "the description"

    def states_dtype(self, layer: str) -> bool:
        """Return whether the description states the type of the layer's weight itself, rather than a rule for layers.

        The loader asks it for weights in floating point. They need no scheme, except where the statement differs.
        """
        return False


@attrs.frozen
class ConfigSection:
    """The section of config.json about quantization.

    Attributes:
        name: the key, for errors.
        content: the section.
    """

    name: str
    content: Mapping[str, Any]

    def value(self, *keys: str, default: Any = None) -> Any:
        """Return the value of keys with one meaning, or the default if all are absent or null. Strings in lower case.

        Raises:
            ConfigError: they have different values.
        """
        given = [(key, self.content[key]) for key in keys if self.content.get(key) is not None]
        found = [(key, each.lower() if isinstance(each, str) else each) for key, each in given]
        for key, value in found:
            if value != found[0][1]:
                raise ConfigError(
                    f"{self.name} has {found[0][0]} {found[0][1]!r:.60} and {key} {value!r:.60}, which mean the same",
                    "remove the wrong one, or download the checkpoint again",
                )
        return found[0][1] if found else default

    def lists(self, *keys: str) -> dict[str, Any]:
        """Return the values of keys by what errors call them."""
        return {f"{key} of {self.name}": self.content.get(key) for key in keys}


@attrs.frozen
class Written:
    """The quantized layers of a checkpoint that is written.

    Attributes:
        scheme: the name of their form.
        form: the form.
        others: the names and forms of layers that have another one, by name in the checkpoint.
    """

    scheme: str
    form: Form
    others: Mapping[str, tuple[str, Form]] = attrs.field(factory=dict)


class CheckpointFormat(ABC):
    """A format of quantized checkpoints, registered in the entry-point group ``hal.formats`` under its name.

    It translates names: from a description to forms of weights, and from a file's tensors to those of a form.

    Attributes:
        name: the entry point's name.
        config_keys: the keys of config.json about quantization that it has beside ``quantization_config``.
        writers: what writes layers in the format, by the name of the form; see :data:`hal.quantization.forms.NAMES`.
    """

    name: ClassVar[str]
    config_keys: ClassVar[tuple[str, ...]] = ()
    writers: ClassVar[Mapping[str, Writer]] = MappingProxyType({})

    @abstractmethod
    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        """Return the quantization of the checkpoint in a folder, or None if this format does not describe it.

        Args:
            folder: the checkpoint's folder. Read files with ``hal.config.untrusted_files.read_json``.
            section: the section of config.json, or None.

        Raises:
            ConfigError: hal does not support the quantization.
            CheckpointError: the description is damaged.
        """

    def describe(
        self, config: Mapping[str, Any], written: Written, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        """Return the JSON files that describe a checkpoint of this format, by name, including config.json.

        Args:
            config: config.json of the original checkpoint.
            written: the quantized layers.
            kept: linear layers that are not quantized.
            tensors: whether each tensor belongs to a quantized layer, by name.

        Raises:
            ConfigError: hal does not write the format, which is the default, or other forms in it.
        """
        raise ConfigError(f"hal does not write the checkpoint format {self.name}", "choose another --format")


def supported() -> str:
    """Return the supported forms, as a remedy of an error."""
    known = "; ".join(f"{summary} ({name})" for name, (_, summary) in NAMES.items())
    return f"hal supports {known}"


GROUP = "hal.formats"
FORMATS: Plugins[CheckpointFormat] = Plugins(GROUP, "checkpoint format", instance_of(CheckpointFormat, GROUP))
SECTION, OLDER = "quantization_config", "compression_config"
"""The keys of the section in config.json. The first versions of compressed-tensors wrote the second in place of the
first."""


def formats() -> Mapping[str, CheckpointFormat]:
    """Return the registered formats, by name. Logs a warning for each that cannot be loaded."""
    return FORMATS.load_all().plugins


def config_keys() -> tuple[str, ...]:
    """Return the keys of config.json about quantization, which models do not read."""
    return (SECTION, OLDER, *(key for each in formats().values() for key in each.config_keys))


def read_quantization(folder: Path, config: Mapping[str, Any]) -> tuple[CheckpointFormat, Quantization] | None:
    """Return the quantization of the checkpoint in ``folder`` with this config.json, and its format; or None.

    Raises:
        ConfigError: hal does not support the quantization.
        CheckpointError: the description is damaged.
    """
    key = SECTION if config.get(SECTION) or not config.get(OLDER) else OLDER
    content, other = config.get(key), config.get(OLDER)
    where = f"{key} in config.json"
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{where} is {content!r:.60}, not an object", AGAIN)
    if other and other != content:
        raise ConfigError(f"config.json has {SECTION} and a {OLDER} that differs", "remove one of them")
    section = ConfigSection(where, content) if content else None
    read = ((each, each.read(folder, section)) for each in formats().values())
    found = [(each, quantization) for each, quantization in read if quantization is not None]
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} describes its quantization in the formats {' and '.join(each.name for each, _ in found)}",
            "remove one of the descriptions",
        )
    if section is not None and not found:
        method = section.content.get("quant_method")
        named = "no quant_method" if method is None else f"the quant_method {method!r:.60}"
        raise ConfigError(
            f"{where} has {named}, which hal does not support",
            f"{supported()}; or use a checkpoint in float32, bfloat16 or float16",
        )
    return found[0] if found else None
