"""Versions of the optional libraries that hal works with, which the extras of its distribution declare."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from functools import cache
from typing import Any

from packaging.requirements import Requirement

from hal.errors import ConfigError

DISTRIBUTION = "torch-hal"
DEVELOPERS = frozenset({"test", "docs", "dev"})
"""The extras of people who work on hal itself; the others are those of people who run it."""

DISTRIBUTIONS = {"PIL": "pillow", "llama_cpp": "llama-cpp-python"}
"""Packages whose distributions have other names."""


@cache
def optional_requirements() -> tuple[tuple[str, Requirement], ...]:
    """Return each extra and a library that it requires on this machine; none if hal is not installed."""
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
        extras = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    marked = [(each, each.marker) for each in map(Requirement, declared) if each.name != DISTRIBUTION]
    return tuple(
        (extra, requirement)
        for extra in extras
        if extra not in DEVELOPERS
        for requirement, marker in marked
        if marker is not None and not marker.evaluate({"extra": ""}) and marker.evaluate({"extra": extra})
    )


def distribution_of(module: str) -> str:
    """Return the name under which pip installs a module: the package's with hyphens, except ``DISTRIBUTIONS``."""
    package = module.partition(".")[0]
    return DISTRIBUTIONS.get(package, package.replace("_", "-"))


def need(module: str, extra: str | None, option: str) -> Any:
    """Return a module of an optional library.

    Args:
        extra: the extra of hal's distribution that requires the library; None for a library that none requires.
        option: what needs it, for the error, such as ``hal serve``.

    Raises:
        ConfigError: the library is not installed, cannot be imported, or has a version that no extra names.
    """
    library = distribution_of(module)
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        install = f"pip install {library}" + (f" (or '{DISTRIBUTION}[{extra}]')" if extra else "")
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            install = f"mend or remove the package that fails, which {library} imports (`hal doctor`)"
        raise ConfigError(f"{option} needs {library}, which cannot be imported: {error}", install) from error
    check_version(library, option, extra)
    return found


def check_version(library: str, option: str, extra: str | None = None) -> None:
    """Raise ConfigError if an installed library has a version that no extra names; do nothing if it is absent.

    Args:
        library: the name of its distribution.
        option: what needs it, for the error, such as ``--against transformers``.
        extra: the extra whose requirement counts, if it names the library; else those of all.
    """
    named = [(each, requirement) for each, requirement in optional_requirements() if requirement.name == library]
    own = [each for each in named if each[0] == extra]
    for name, requirement in own or named:
        try:
            found = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            return
        if not requirement.specifier.contains(found, prereleases=True):
            raise ConfigError(
                f"{option} works with {library} {requirement.specifier}, and {found} is installed",
                f"pip install '{DISTRIBUTION}[{name}]'",
            )
