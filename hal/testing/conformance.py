"""The hook with which a vendor configures the suite, and the cases generated from it."""

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
from hal.testing import (
    closing_cases,
    device_cases,
    error_cases,
    graph_cases,
    invariance_cases,
    leak_cases,
    limit_cases,
    model_cases,
    operation_cases,
    rank_cases,
    rewrite_cases,
    stream_cases,
)
from hal.testing.case import Case, NotApplicable, raised_in
from hal.testing.target import Target

AREAS: tuple[ModuleType, ...] = (
    device_cases,
    stream_cases,
    operation_cases,
    invariance_cases,
    rewrite_cases,
    graph_cases,
    model_cases,
    error_cases,
    limit_cases,
    leak_cases,
    closing_cases,
    rank_cases,
)
"""Modules that generate cases."""


@attrs.frozen(kw_only=True)
class Conformance:
    """The driver under test and its known exceptions; a test module assigns one to the name ``conformance``.

    Patterns match case names with ``fnmatch``, for example ``operations/rms_norm/float16/*``. A pattern that matches no
    case is an error.

    Attributes:
        backend: name of the driver.
        config: configuration keys used to open the backend, for example ``{"options": {"device_index": 0}}``.
        unsupported: pattern to reason, for features that the driver does not support. These cases run. A failure counts
            as skipped; a pass is an error.
        failing: pattern to reason, for cases that fail at present. A pass is an error.
        untried: pattern to reason, for cases that hang or that crash the process or the device. They do not run, so the
            suite cannot report when they would pass.
        only: patterns of the cases to generate; empty generates all. Use it to test a second configuration of a driver.
        open: returns a new backend at each call, in place of the driver's entry point.
        ranks: configuration keys, beside those of `config`, for the processes of the area `ranks`; for example options
            that an environment sets in the process of the tests only.
    """

    backend: str
    config: Mapping[str, Any] = attrs.field(factory=dict)
    unsupported: Mapping[str, str] = attrs.field(factory=dict)
    failing: Mapping[str, str] = attrs.field(factory=dict)
    untried: Mapping[str, str] = attrs.field(factory=dict)
    only: Sequence[str] = ()
    open: Callable[[], Backend] | None = None
    ranks: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if "backend" in self.config:
            raise ConfigError(
                f"`config` sets backend={self.config['backend']!r}, but `backend` is {self.backend!r}",
                "remove `backend` from `config`",
            )
        for pattern, reason in [*self.untried.items(), *self.unsupported.items(), *self.failing.items()]:
            if not (isinstance(reason, str) and reason.strip()):
                raise ConfigError(f"the exception {pattern!r} has no reason", "give the reason as a non-empty string")

    @property
    def title(self) -> str:
        """Return the driver's name followed by its configuration, for the report."""
        return " ".join([self.backend, *(f"{key}={value}" for key, value in self.config.items())])

    @cached_property
    def target(self) -> Target:
        """Return the driver under test."""
        return Target(self.backend, self.config, self.open, self.ranks)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Return the cases for this backend, which is opened to read its limits and compilers.

        An unavailable driver yields one skipped case; a driver that fails to open yields one failing case.
        """
        try:
            self.target.backend  # noqa: B018 (opens it)
        except Exception as error:  # reported by the case, so that collection continues
            return (Case("devices/open", partial(_not_opened, error)),)
        return (Case("devices/open", lambda: None), *self._made())

    def _made(self) -> Iterator[Case]:
        for area in AREAS:
            for case in area.cases(self.target):
                if not self.only or any(fnmatchcase(case.name, pattern) for pattern in self.only):
                    yield case

    def case(self, name: str) -> Case:
        """Return the case with the given name.

        Raises:
            ConfigError: no case has this name.
        """
        for each in self.cases:
            if each.name == name:
                return each
        raise ConfigError(f"no case is called {name!r}", nearest(name, (each.name for each in self.cases)))

    def exception(self, name: str) -> tuple[str, str, str] | None:
        """Return the first exception whose pattern matches the case ``name``, or None.

        Returns:
            ``"untried"``, ``"unsupported"`` or ``"failing"``; the pattern; the reason.
        """
        for kind in ("untried", "unsupported", "failing"):
            for pattern, reason in getattr(self, kind).items():
                if fnmatchcase(name, pattern):
                    return kind, pattern, reason
        return None

    def check_patterns(self) -> None:
        """Raise ConfigError if a pattern matches no case, unless the driver cannot be opened on this machine."""
        names = [each.name for each in self.cases]
        if len(names) == 1:
            return
        for pattern in (*self.untried, *self.unsupported, *self.failing, *self.only):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"the pattern {pattern!r} matches none of the {len(names)} cases of the backend {self.backend}",
                    f"remove or correct it; {nearest(pattern, {_subject(name) for name in names})}",
                )


def _subject(name: str) -> str:
    return "/".join([*name.split("/")[:2], "*"])


def _not_opened(error: Exception) -> None:
    if isinstance(error, DriverUnavailable):
        # `opening` converts an unexpected exception of a driver whose probe reports it as available.
        if error.__cause__ is not None and raised_in(error) == opening.__name__:
            raise AssertionError(
                f"the probe reports the driver as available, but {error.problem}; check this in the probe, or raise "
                "DriverUnavailable with a remedy"
            ) from error
        raise NotApplicable(f"{error.problem}; {error.remedy}")
    raise error
