"""The registry of plugins: drivers, compilers, quantization schemes, models and commands of installed packages.

A package registers a plugin under a name in an entry-point group. :class:`Plugins` finds and loads those of one group.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import attrs

from hal.errors import ConfigError, HalError, describe_exception, listed, nearest

T = TypeVar("T")
log = logging.getLogger("hal.config")


@attrs.frozen(eq=False)
class Plugin:
    """A plugin that an installed package registers under a name."""

    entry: importlib.metadata.EntryPoint

    @property
    def name(self) -> str:
        """The name in configurations."""
        return self.entry.name

    @property
    def target(self) -> str:
        """The object that the entry point names, as ``module:attribute``."""
        return self.entry.value

    @property
    def package(self) -> str:
        """The distribution's name; empty if the metadata lacks it."""
        return self.entry.dist.name if self.entry.dist else ""

    @property
    def version(self) -> str:
        """The distribution's version; empty if the metadata lacks it."""
        return self.entry.dist.version if self.entry.dist else ""

    @property
    def source(self) -> str:
        """The distribution's name and version, for errors."""
        return f"{self.package} {self.version}" if self.package else "an unknown package"


@attrs.frozen
class Loaded(Generic[T]):
    """The plugins of a group.

    Attributes:
        plugins: the usable ones, sorted by name.
        errors: the exception of :meth:`Plugins.load` for each of the others, by name.
    """

    plugins: Mapping[str, T]
    errors: Mapping[str, HalError]


class Plugins(Generic[T]):
    """The plugins of one entry-point group.

    Args:
        kind: the noun for a plugin in errors.
        check: receives a plugin and the object that its entry point names, and returns the result of :meth:`load`.
            It raises HalError for an object of another type; other exceptions are reported as the constructor's.
        error: raised for a plugin that cannot be imported or created, and for a name that several packages register.
        unknown: raised for an unregistered name; defaults to ``error``.
        typed: whether people write the names, so that the error for an unregistered one suggests a similar name. Those
            that checkpoints give are no typing errors.
    """

    def __init__(
        self,
        group: str,
        kind: str,
        check: Callable[[Plugin, Any], T],
        *,
        error: type[HalError] = ConfigError,
        unknown: type[HalError] | None = None,
        typed: bool = True,
    ) -> None:
        self.group = group
        self.kind = kind
        self._check = check
        self._error = error
        self._unknown = unknown or error
        self._names = nearest if typed else lambda name, known: listed(known)
        self._loaded: tuple[Sequence[Plugin], Loaded[T]] | None = None

    def names(self) -> list[str]:
        """Return the registered names, sorted. Imports no plugin."""
        return sorted({each.name for each in registered(self.group)})

    def load(self, name: str) -> T:
        """Load the plugin ``name`` only.

        Raises:
            HalError: the plugin is unknown, broken or of another type, or several packages register its name.
        """
        plugin = self._find(name)
        found = self._import(plugin)
        try:
            return self._check(plugin, found)
        except HalError as error:
            raise _naming_source(error, plugin) from error.__cause__
        except (Exception, SystemExit) as error:
            raise self._error(
                f"creating the {self.kind} {name} failed: {describe_exception(error)}",
                f"report it to the authors of {plugin.source}; for its authors: {plugin.entry.attr}() must take no "
                "arguments and do no work",
            ) from error

    def load_all(self) -> Loaded[T]:
        """Load every plugin, once for each ``sys.path``. A broken one is skipped, with a warning the first time."""
        found = registered(self.group)
        if self._loaded is None or self._loaded[0] is not found:
            plugins: dict[str, T] = {}
            errors: dict[str, HalError] = {}
            warned = set() if self._loaded is None else {str(each) for each in self._loaded[1].errors.values()}
            for name in self.names():
                try:
                    plugins[name] = self.load(name)
                except HalError as error:
                    errors[name] = error
                    if str(error) not in warned:
                        log.warning("%s; remedy: %s", error.problem, error.remedy)
            self._loaded = found, Loaded(plugins, errors)
        return self._loaded[1]

    def _find(self, name: str) -> Plugin:
        known = registered(self.group)
        # Two packages may register the same target, such as a package and its successor: that is no ambiguity.
        found = {each.target: each for each in known if each.name == name}
        if not found:
            sources = ", ".join(sorted({each.source for each in known}))
            names = f"{self._names(name, self.names())} (from {sources})" if known else "none is installed"
            raise self._unknown(
                f"no {self.kind} {name!r} is installed",
                f"{names}; or install the package that registers it in the entry-point group {self.group}",
            )
        if len(found) > 1:
            sources = ", ".join(sorted(each.source for each in found.values()))
            raise self._error(f"several packages register the {self.kind} {name}: {sources}", "uninstall all but one")
        (plugin,) = found.values()
        return plugin

    def _import(self, plugin: Plugin) -> Any:
        try:
            return _imported(self.group, plugin.entry)
        except HalError as error:
            raise _naming_source(error, plugin) from error.__cause__
        except (Exception, SystemExit) as error:  # The import runs foreign code, which may raise anything.
            raise self._error(
                f"the {self.kind} {plugin.name} cannot be imported: {describe_exception(error)}",
                f"reinstall or update {plugin.source}; for its authors: correct the entry point "
                f"{plugin.name} = {plugin.target} in {self.group}, or what it imports",
            ) from error


def _imported(group: str, entry: importlib.metadata.EntryPoint) -> Any:
    """Return the object that an entry point names. Exceptions of the import propagate.

    stevedore would cache its list of entry points for the life of the process, and on disk under a 32-bit hash of the
    folders' times, and miss a package that was just installed or added to ``sys.path``. So it gets the entry point.
    """
    from stevedore.driver import DriverManager  # It takes 15 ms to import, and names() does without.

    class Manager(DriverManager):  # type: ignore[type-arg]  # older releases of stevedore are not generic
        def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
            return [entry]

    def fail(manager: Any, entry: importlib.metadata.EntryPoint, error: BaseException) -> None:
        raise error

    return Manager(group, entry.name, on_load_failure_callback=fail).driver


def instance_of(base: type[Any], group: str) -> Callable[[Plugin, Any], Any]:
    """Return a check for entry points that name a subclass of ``base`` whose ``name`` is the entry point's.

    The check returns an instance of the subclass, and raises ConfigError for any other object.
    """

    def check(plugin: Plugin, found: Any) -> Any:
        if not (isinstance(found, type) and issubclass(found, base)) or getattr(found, "name", None) != plugin.name:
            raise ConfigError(
                f"the entry point {plugin.name} in {group} is {found!r:.70}",
                f"point it at a subclass of {base.__module__}.{base.__qualname__} of the same name",
            )
        return found()

    return check


def registered(group: str) -> Sequence[Plugin]:
    """Return the plugins that installed packages register in a group. Imports no plugin.

    The metadata of all packages is read once for each ``sys.path``, and again when a folder on it changes.
    """
    return _registered(_import_path(), group)


def forget() -> None:
    """Clear the cached metadata of all packages, such as after a test has rewritten a package's in place."""
    importlib.invalidate_caches()
    _scan.cache_clear()
    _registered.cache_clear()


_Folder = tuple[str, int, int]


def _import_path() -> tuple[_Folder, ...]:
    """Return the entries of ``sys.path`` with inode and modification time, by which importlib detects changes too."""
    return tuple(map(_folder, sys.path))


def _folder(path: str) -> _Folder:
    try:
        found = os.stat(path or ".")
    except OSError:
        return str(path), 0, 0
    return str(path), found.st_ino, found.st_mtime_ns


@lru_cache(maxsize=1)
def _scan(path: tuple[_Folder, ...]) -> Any:
    return importlib.metadata.entry_points()


@lru_cache(maxsize=32)
def _registered(path: tuple[_Folder, ...], group: str) -> tuple[Plugin, ...]:
    return tuple(map(Plugin, _scan(path).select(group=group)))


def _naming_source(error: HalError, plugin: Plugin) -> HalError:
    if type(error).__init__ is not HalError.__init__:
        return error
    return error.reworded(error.problem, f"{error.remedy} ({plugin.name} is registered by {plugin.source})")
