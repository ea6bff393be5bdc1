"""``hal new-driver``: a package of one's own with a driver that passes conformance, to be filled in."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import keyword
import re
import shlex
from pathlib import Path
from string import Template

import attrs
import click

from hal.cli.stdout import ResultCommand, echo
from hal.errors import ConfigError
from hal.version import API_VERSION, __version__

FILES = {
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    ".gitignore": "gitignore",
    "{package}/__init__.py": "init.py",
    "{package}/driver.py": "driver.py",
    "{package}/kernels.py": "kernels.py",
    "tests/test_conformance.py": "test_conformance.py",
}
"""Where each file goes, and which template it is made of."""
TAKEN = ("torch",)
"""Names whose package would be called as hal's own is: installing the one would remove the other."""


@click.command(cls=ResultCommand)
@click.argument("name")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
def command(name: str, folder: Path | None) -> None:
    """Write a package with the driver NAME into FOLDER.

    FOLDER is NAME-hal by default, and must not exist or be empty. The package passes the conformance suite as written,
    on the CPU; its README.md says what to fill in.
    """
    _check_name(name)
    target = folder or Path(f"{name}-hal")
    _check_folder(target)
    values = _values(name)
    paths = [target / path.format(package=values["package"]) for path in FILES]
    try:
        for path, template in zip(paths, FILES.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_template(template).substitute(values), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the package cannot be written: {error}", "name a folder that you may write to") from error
    echo(f"a package with the driver {name}:\n" + "\n".join(f"  {path}" for path in paths))
    echo(f"\nnext:\n  cd {shlex.quote(str(target))}\n  pip install -e '.[test]'")
    echo(f"  hal doctor --backend {name}\n  pytest\n\nREADME.md says what to fill in, and in which order.")


def _values(name: str) -> dict[str, str]:
    """What the templates ask for."""
    torch = importlib.metadata.version("torch").split("+")[0].split(".")
    return {
        "name": name,
        "upper": name.upper(),
        "package": f"{name}_hal",
        "distribution": _distribution(name),
        "driver": "".join(part[:1].upper() + part[1:] for part in name.split("_")) + "Driver",
        "api_version": ", ".join(map(str, API_VERSION)),
        "version": __version__,
        "torch": ".".join(torch[:2]),
    }


def _distribution(name: str) -> str:
    """What pip calls the package."""
    return f"{name.replace('_', '-')}-hal"


def _template(name: str) -> Template:
    return Template((importlib.resources.files("hal") / "template" / f"{name}.template").read_text(encoding="utf-8"))


def _check_name(name: str) -> None:
    """Raise ConfigError unless a driver, and a package, can have that name."""
    from hal.config import Config
    from hal.drivers.registry import driver_names

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"a driver cannot be called {name!r}, because its Python package and its environment variables are named "
            "after it",
            "take a lower-case Python identifier, such as acme or acme_x1",
        )
    if name in TAKEN:
        raise ConfigError(
            f"a driver cannot be called {name!r}, because its package would be called {_distribution(name)}, as "
            "another is",
            "take another name, such as acme",
        )
    taken = {"auto", *(field.name for field in attrs.fields(Config))}
    if name in taken:
        raise ConfigError(
            f"a driver cannot be called {name!r}, which configurations have for something else",
            f"take another name than {', '.join(sorted(taken))}",
        )
    if name in driver_names():
        raise ConfigError(
            f"a driver {name!r} is installed already",
            "take another name, or uninstall the package that brings it (`hal doctor` names it)",
        )


def _check_folder(folder: Path) -> None:
    """Raise ConfigError if something is there that could be overwritten."""
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ConfigError(f"the folder {folder} is not empty", "name another, or empty it")
    elif folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} is there already, and is no folder", "name another")
