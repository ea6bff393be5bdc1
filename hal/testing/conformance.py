"""The hook: what a vendor says about a driver, and the cases that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import attrs

from hal.drivers import opening
from hal.drivers.backend import Backend
from hal.errors import ConfigError, DriverUnavailable, nearest
from hal.testing.case import Case, NotApplicable, raised_in
from hal.testing.devices import closing_cases, device_cases, memory_cases, stream_cases
from hal.testing.graphs import graph_cases
from hal.testing.models import limit_cases, model_cases, runner_cases
from hal.testing.operations import error_cases, leak_cases, operation_cases, rewrite_cases
from hal.testing.target import Target

AREAS: tuple[ModuleType, ...] = (
    device_cases, stream_cases, memory_cases, operation_cases, rewrite_cases, graph_cases, runner_cases, model_cases,
    error_cases, limit_cases, leak_cases, closing_cases,
)  # fmt: skip
"""The modules that make cases."""


@attrs.frozen(kw_only=True)
class Conformance:
    """A driver to be examined; a test module has one under the name ``conformance``.

    Patterns match names of cases as file names are matched (``fnmatch``): ``operations/rms_norm/float16/*``. One that
    matches no case is an error.

    Attributes:
        backend: the driver's name.
        config: keys of the configuration that it is opened with, such as ``{"options": {"device_index": 0}}``.
        unsupported: by pattern, why the driver does without. Such cases are run, and count as skipped where they fail;
            one that passes is an error.
        failing: by pattern, why cases fail for now. One that passes is an error, too.
        untried: by pattern, why cases may not even be run: they hang, or take the process or the device with them. They
            are skipped, so nothing tells when they would pass.
        only: patterns of the cases to make; empty makes all. For a second configuration of a driver, where the first
            has all.
        open: opens the backend in place of the driver's entry point, each time a new one.
    """

    backend: str
    config: Mapping[str, Any] = attrs.field(factory=dict)
    unsupported: Mapping[str, str] = attrs.field(factory=dict)
    failing: Mapping[str, str] = attrs.field(factory=dict)
    untried: Mapping[str, str] = attrs.field(factory=dict)
    only: Sequence[str] = ()
    open: Callable[[], Backend] | None = None

    def __attrs_post_init__(self) -> None:
        if "backend" in self.config:
            raise ConfigError(
                f"the hook's config names a backend, {self.config['backend']!r}, beside backend={self.backend!r}",
                "leave it out of config",
            )
        for pattern, reason in [*self.untried.items(), *self.unsupported.items(), *self.failing.items()]:
            if not (isinstance(reason, str) and reason.strip()):
                raise ConfigError(f"the exception {pattern!r} has no reason", "say why, in words")

    @property
    def title(self) -> str:
        """What the report calls it: the driver's name, and what it is configured with."""
        return " ".join([self.backend, *(f"{key}={value}" for key, value in self.config.items())])

    @cached_property
    def target(self) -> Target:
        """What is examined."""
        return Target(self.backend, self.config, self.open)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Every case for this backend. Opens it, because its limits and compilers decide which there are.

        A driver that cannot run here has one case, which says so; one that cannot be opened has one that fails.
        """
        try:
            self.target.backend  # noqa: B018 (opens it)
        except Exception as error:  # reported by the case, so that the run goes on
            return (Case("devices/open", partial(_not_opened, error)),)
        return (Case("devices/open", lambda: None), *self._made())

    def _made(self) -> Iterator[Case]:
        for area in AREAS:
            for case in area.cases(self.target):
                if not self.only or any(fnmatchcase(case.name, pattern) for pattern in self.only):
                    yield case

    def case(self, name: str) -> Case:
        """The case of a name.

        Raises:
            ConfigError: there is none.
        """
        for each in self.cases:
            if each.name == name:
                return each
        raise ConfigError(f"there is no case {name!r}", nearest(name, (each.name for each in self.cases)))

    def exception(self, name: str) -> tuple[str, str, str] | None:
        """The first exception whose pattern matches a case's name, or None.

        Returns:
            ``"untried"``, ``"unsupported"`` or ``"failing"``; the pattern; the reason.
        """
        for kind in ("untried", "unsupported", "failing"):
            for pattern, reason in getattr(self, kind).items():
                if fnmatchcase(name, pattern):
                    return kind, pattern, reason
        return None

    def check_patterns(self) -> None:
        """Raise ConfigError if a pattern matches no case, unless the driver could not be opened here."""
        names = [each.name for each in self.cases]
        if len(names) == 1:
            return
        for pattern in (*self.untried, *self.unsupported, *self.failing, *self.only):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"the pattern {pattern!r} matches none of the {len(names)} cases of the backend {self.backend}",
                    f"take it out, or correct it; {nearest(pattern, {_subject(name) for name in names})}",
                )


def _subject(name: str) -> str:
    return "/".join([*name.split("/")[:2], "*"])


def _not_opened(error: Exception) -> None:
    if isinstance(error, DriverUnavailable):
        # What hal made of an exception that the driver did not expect, after its probe had said that it can run here.
        if error.__cause__ is not None and raised_in(error) == opening.__name__:
            raise AssertionError(
                f"its probe says that it can run here, and {error.problem}; let the probe look for that, or raise "
                "DriverUnavailable with a remedy"
            ) from error
        raise NotApplicable(f"{error.problem}; {error.remedy}")
    raise error
