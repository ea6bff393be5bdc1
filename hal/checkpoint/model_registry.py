"""Where the class of a checkpoint's architecture comes from: the registry of model classes, and other sources.

``hal`` has the models that packages register by architecture. Other sources are asked for the architectures that it has
not. Any package can register a model or a source.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from hal.config.plugins import Plugin, Plugins, instance_of
from hal.errors import CheckpointError, ConfigError, HalError, ModelError, nearest
from hal.nn import CausalLM
from hal.step import SEQUENCE, Batch, SlotBatch, State, fields_of

GROUP, SOURCE_GROUP = "hal.models", "hal.model_sources"
AUTO, HAL = "auto", "hal"
"""The values of ``model_source`` that are no other source's name."""
BASES = ("Model", "TextModel")
"""The ends of the names of base models, of which the second stands for the text model of one that reads images too."""

log = logging.getLogger("hal.checkpoint")


def check_model_class(found: Any, name: str) -> type[CausalLM]:
    """Return ``found``, the value of ``name``, if it is a model class.

    Raises:
        ModelError: it is not a subclass of CausalLM.
    """
    if isinstance(found, type) and issubclass(found, CausalLM):
        return found
    raise ModelError(
        f"{name} is {found!r:.100}, not a class derived from hal.nn.CausalLM",
        "give the model class, not the class of its config or of one of its modules",
    )


def _check(plugin: Plugin, found: Any) -> type[CausalLM]:
    return check_model_class(found, f"the model {plugin.name}, {plugin.target},")


MODELS: Plugins[type[CausalLM]] = Plugins(
    GROUP, "model", _check, error=ModelError, unknown=CheckpointError, typed=False
)


def architectures() -> list[str]:
    """Return the architectures of ``config.json`` that :func:`hal.load_model` knows, sorted. Imports no model."""
    return MODELS.names()


def knows(architecture: str) -> bool:
    """Return whether a class is registered for an architecture. Imports no model."""
    return _registered_name(architecture) in MODELS.names()


def serves(architecture: str, config: Mapping[str, Any]) -> bool:
    """Return whether a class is registered for an architecture and is for the ``model_type`` of a config.

    transformers saves some families with the architecture of another one, whose tensors have other names. A config
    without a ``model_type`` is what its architecture says.

    Args:
        architecture: the architecture in config.json.
        config: the content of config.json.

    Raises:
        ModelError: see :func:`find_model`.
    """
    if not knows(architecture):
        return False
    types = vars(find_model(architecture)).get("model_types", ())  # not those of a base class
    named = config.get("model_type")
    return not types or not isinstance(named, str) or named in types


def find_model(architecture: str) -> type[CausalLM]:
    """Return the model class registered for an architecture. Imports that one only.

    Raises:
        CheckpointError: no class is registered.
        ModelError: it cannot be imported or is not a model class, or several packages register one.
    """
    return MODELS.load(_registered_name(architecture))


def _registered_name(architecture: str) -> str:
    """Return the name of the whole model for a base model that was saved without its head."""
    known = MODELS.names()
    if architecture in known:
        return architecture
    wholes = [architecture.removesuffix(base) + "ForCausalLM" for base in BASES if architecture.endswith(base)]
    return next((each for each in wholes if each in known), architecture)


def make_model(model_class: type[CausalLM], config: Mapping[str, Any]) -> CausalLM:
    """Return the model of a config.json on the meta device, without values.

    Raises:
        ConfigError: the model does not support the config.
        ModelError: the result is not a CausalLM, or lacks an attribute that the runtime needs.
    """
    name = model_class.__name__
    try:
        with torch.device("meta"):
            model = model_class.from_config(config)
    except HalError:
        raise
    except Exception as error:  # The model's code may raise anything, and torch raises for sizes that are too large.
        first = str(error).partition("\n")[0]
        raise ModelError(
            f"{name} cannot be created: {type(error).__name__}: {first}", f"check config.json, and {name}.from_config"
        ) from error
    if not isinstance(model, CausalLM):
        raise ModelError(f"{name}.from_config returned {model!r:.100}, not a hal.nn.CausalLM", "return the model")
    for attribute in ("vocab_size", "max_length"):
        value = getattr(model, attribute, None)
        if type(value) is not int or value < 1:
            raise ModelError(f"{name}.{attribute} is {value!r}", "set it in the model's constructor, to 1 or more")
    _check_states(name, getattr(model, "states", None))
    if not (isinstance(model.batch_type, type) and issubclass(model.batch_type, Batch)):
        raise ModelError(f"{name}.batch_type is {model.batch_type!r:.70}", "set it to hal.step.Batch or a subclass")
    fields_of(model.batch_type)  # Raises for an undeclared field.
    in_slots = any(state.per is SEQUENCE for layer in model.states for state in layer.values())
    if in_slots and not issubclass(model.batch_type, SlotBatch):
        raise ModelError(
            f"{name} keeps a state per sequence, but its batch_type has no slots",
            f"set {name}.batch_type to hal.step.SlotBatch, or a subclass of it",
        )
    return model


def _check_states(name: str, states: Any) -> None:
    """Raise ModelError unless a model declares the states of each layer."""
    remedy = "set it in the model's constructor: for each layer, a mapping from names to hal.step.State"
    if not isinstance(states, Sequence) or not all(isinstance(layer, Mapping) for layer in states):
        raise ModelError(f"{name}.states is {states!r:.70}", remedy)
    for index, layer in enumerate(states):
        for state, declared in layer.items():
            if not (isinstance(state, str) and state.isidentifier() and isinstance(declared, State)):
                raise ModelError(f"{name}.states[{index}] has {state!r}: {declared!r:.70}", remedy)


class ModelSource(ABC):
    """A source of model classes.

    It is registered in the entry-point group ``hal.model_sources`` under its name. Its module is imported when the
    first architecture is looked up there.

    Attributes:
        name: the value of ``model_source`` that selects it.
    """

    name: ClassVar[str]

    @abstractmethod
    def find(self, architecture: str, config: Mapping[str, Any]) -> type[CausalLM]:
        """Return the class for a checkpoint.

        Args:
            architecture: its architecture in config.json.
            config: the content of config.json without quantization keys.

        Raises:
            ConfigError: the source cannot serve it, or lacks a library.
            CheckpointError: the source has no class for it.
        """


SOURCES: Plugins[ModelSource] = Plugins(SOURCE_GROUP, "source of models", instance_of(ModelSource, SOURCE_GROUP))


def find_model_class(architecture: str, config: Mapping[str, Any], source: str = AUTO) -> type[CausalLM]:
    """Return the model class for a checkpoint.

    Args:
        architecture: its architecture in config.json.
        config: the content of config.json without quantization keys.
        source: ``hal``, another source's name, or ``auto``: hal's class if one is registered and is for the config's
            ``model_type``, else the first other source's that has one, in the order of names, else hal's.

    Raises:
        CheckpointError: no source has a class.
        ConfigError: the source is unknown, or cannot serve the checkpoint.
        ModelError: the class cannot be imported, or several packages register one.
    """
    if source not in (AUTO, HAL):
        if source not in (others := SOURCES.names()):
            raise ConfigError(
                f"model_source has the value {source!r:.70}, and no source of models of that name is installed",
                f"{nearest(source, (AUTO, HAL, *others))}; or install the package that registers it in the entry-point "
                f"group {SOURCE_GROUP}",
            )
        return SOURCES.load(source).find(architecture, config)
    if source == HAL or serves(architecture, config):
        return find_model(architecture)
    wanted = architecture
    if knows(architecture):
        wanted += f" for model_type {config['model_type']!r:.70}"
    refusals = []
    for name in SOURCES.names():
        try:
            found = SOURCES.load(name).find(architecture, config)
        except (CheckpointError, ConfigError) as error:
            refusals.append(error)
            continue
        log.info("hal has no model %s; it runs the code of %s (model_source)", wanted, name)
        return found
    try:
        return find_model(architecture)
    except HalError as error:
        problems = "".join(f"; {each.problem}" for each in refusals)
        remedies = "".join(f"; or {each.remedy}" for each in refusals)
        raise error.reworded(f"{error.problem}{problems}", f"{error.remedy}{remedies}") from None
