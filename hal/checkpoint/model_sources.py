"""Sources of models: where the class of a checkpoint's architecture comes from. Any package can register one.

``hal`` has the models that packages register by architecture. Others are asked for the architectures that it has not.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from hal.checkpoint.model_registry import find_model, knows, serves
from hal.config.plugins import Plugins, instance_of
from hal.errors import CheckpointError, ConfigError, HalError, nearest
from hal.nn import CausalLM

GROUP = "hal.model_sources"
AUTO, HAL = "auto", "hal"
"""The values of ``model_source`` that are no other source's name."""

log = logging.getLogger("hal.checkpoint")


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


SOURCES: Plugins[ModelSource] = Plugins(GROUP, "source of models", instance_of(ModelSource, GROUP))


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
                f"group {GROUP}",
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
