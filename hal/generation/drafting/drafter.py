"""The interface of drafters, and the choice of one by configuration.

A drafter proposes the tokens that follow running texts, and the model checks them in one step. Any package can register
one in the entry-point group ``hal.drafters``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import attrs
from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import Progress
from hal.config import read
from hal.config.bounds import at_most
from hal.config.plugins import Plugins, instance_of
from hal.drivers.backend import Backend
from hal.errors import ConfigError
from hal.execution.runner import Runner
from hal.execution.step_output import StepOutput
from hal.generation.request import Request
from hal.nn import CausalLM
from hal.step.state import StateSpec

GROUP = "hal.drafters"
MOST_TOKENS = 32
"""The most drafted tokens of a text in a step."""


@attrs.frozen
class DraftConfig:
    """How tokens are drafted.

    Attributes:
        method: a drafter's name: ``ngram``, ``model``, ``mtp``, ``eagle3``, or that of a package.
        model: the drafter's checkpoint, as a folder or a name of the hub; None for none, or the model's own.
        tokens: the most drafted tokens of a text in a step.
        adapt: draft fewer tokens, or none, where that is faster by the measured times and acceptance. Ranks that share
            a model always draft ``tokens``.
        examine: compare the drafter with other wirings and with its references on short texts when it is opened, and
            state the acceptance to expect.
        options: options of the drafter.
    """

    method: str
    model: str | None = None
    tokens: int = attrs.field(default=4, validator=at_most(MOST_TOKENS))
    adapt: bool = True
    examine: bool = True
    options: dict[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | DraftConfig) -> DraftConfig:
        """Return what a configuration, a drafter's name, or the folder or name of a drafter's checkpoint says.

        Raises:
            ConfigError: it is neither, or a key is unknown or out of range.
        """
        if isinstance(given, DraftConfig):
            return given
        if isinstance(given, str):
            if given in DRAFTERS.names():
                return cls(given)
            given = {"method": "eagle3" if _is_eagle(given) else "model", "model": given}
        return read(cls, given, "draft")


def _is_eagle(model: str) -> bool:
    return "eagle3" in Checkpoint.open(model).architecture.lower()


@attrs.frozen(eq=False)
class Drafts:
    """Drafted tokens.

    Attributes:
        counts: their number for each request.
        tokens: a list for each request; or ``[requests, most]``, int64, on the device. The first tokens count; others
            fill the step.
    """

    counts: list[int]
    tokens: list[list[int]] | Tensor

    def on_host(self) -> Drafts:
        """Return the same with lists, for which the host may wait for the device."""
        if not isinstance(self.tokens, Tensor):
            return self
        lists = [own[:count] for own, count in zip(self.tokens.tolist(), self.counts, strict=True)]
        return Drafts(self.counts, lists)


class Drafter(ABC):
    """Drafts tokens of running requests. It changes how fast texts are generated, and never the texts.

    Its methods are called inside :meth:`hal.Runner.running` of the model's runner, in one thread.

    Attributes:
        tokens: the most tokens that it drafts for a request.
        predicts: whether it drafts for any text, so that few accepted tokens mean that it does not fit the model.
        drafting: runs its model, which is compared with its references and other wirings; None without a model.
    """

    tokens: int
    predicts: ClassVar[bool] = True
    drafting: Runner | None = None

    @abstractmethod
    def propose(self, requests: Sequence[Request], most: int) -> Drafts:
        """Draft up to ``most`` tokens that follow the known tokens of each request, which are all that were drawn."""

    def ran(  # noqa: B027 (most drafters need some of these methods)
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        counts: Sequence[int],
        output: StepOutput,
        accepted: Sequence[int] | None,
    ) -> None:
        """Read what a step of the model computed.

        Args:
            requests: the requests of the step.
            starts: the position of the first token of each.
            counts: the number of tokens of each.
            output: what it computed, valid until the model's next step.
            accepted: how many drafted tokens of each request are right, which are those behind its first token in the
                step; None for a step of prompts.
        """

    def remembered(self, request: Request) -> int:
        """Return how many of a request's first tokens a later request may find in the drafter's cache."""
        return len(request.tokens)

    def end(self, request: Request) -> None:  # noqa: B027
        """Free what a request holds."""

    def clear(self) -> None:  # noqa: B027
        """Free what all requests hold, such as after a failure."""


class DrafterType(ABC):
    """A kind of drafter, under its name in the entry-point group.

    Attributes:
        name: its name.
    """

    name: ClassVar[str]

    @abstractmethod
    def plan(self, config: DraftConfig, checkpoint: Checkpoint, backend: Backend) -> DraftPlan:
        """Check everything that can be checked before the model is loaded.

        Args:
            checkpoint: the model's.

        Raises:
            ConfigError: the drafter does not fit the model, or an option is unknown or out of range.
            CheckpointError: its checkpoint is missing or damaged.
        """


class DraftPlan(ABC):
    """A drafter that fits the model's checkpoint, and is not loaded yet."""

    def load(self, model: CausalLM, backend: Backend, progress: Progress | None) -> StateSpec | None:
        """Load the weights, if there are any, and return the states of a cache with as few blocks as possible."""
        return None

    @abstractmethod
    def open(self, runner: Runner, stack: ExitStack, max_sequences: int, max_length: int) -> Drafter:
        """Return the drafter for the model's runner.

        Args:
            stack: closes what is opened.
            max_sequences: the most requests that run together.
            max_length: the most tokens of a request.
        """


DRAFTERS: Plugins[DrafterType] = Plugins(GROUP, "drafter", instance_of(DrafterType, GROUP))


def plan_drafter(config: DraftConfig, checkpoint: Checkpoint, backend: Backend) -> DraftPlan:
    """Return the plan of a configuration's drafter.

    Raises:
        ConfigError: there is no such drafter, or as :meth:`DrafterType.plan`.
    """
    if backend.lockstep or backend.mesh.data.size > 1:
        raise ConfigError(
            f"draft is {config.method}, and data ranks step together", "leave out draft, or parallel.data and experts"
        )
    return DRAFTERS.load(config.method).plan(config, checkpoint, backend)
