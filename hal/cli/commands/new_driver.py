"""``hal new-driver``: create a package with a driver that passes conformance."""

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
"""File in the package to its template."""
TAKEN = ("torch",)
"""Names whose distribution would have the name of hal's, so that installing one would replace the other."""


@click.command("new-driver", cls=ResultCommand)
@click.argument("name")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
def command(name: str, folder: Path | None) -> None:
    """Create a package with the driver NAME in FOLDER.

    FOLDER defaults to NAME-hal, and must not exist or be empty. The package passes the conformance suite on the CPU;
    its README.md lists what to implement.
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
        raise ConfigError(f"the package cannot be written: {error}", "choose a writable folder") from error
    echo(f"created a package with the driver {name}:\n" + "\n".join(f"  {path}" for path in paths))
    echo(f"\nnext:\n  cd {shlex.quote(str(target))}\n  pip install -e '.[test]'")
    echo(f"  hal doctor --backend {name}\n  pytest\n")
    echo("pytest takes minutes. README.md has a short form, and lists what to implement, in order.")


def _values(name: str) -> dict[str, str]:
    """Return the values of the templates' variables."""
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
    """Return the name of the distribution."""
    return f"{name.replace('_', '-')}-hal"


def _template(name: str) -> Template:
    return Template((importlib.resources.files("hal") / "template" / f"{name}.template").read_text(encoding="utf-8"))


def _check_name(name: str) -> None:
    """Raise ConfigError unless ``name`` is valid for a driver and its package."""
    from hal.config import Config
    from hal.drivers.registry import driver_names

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} is not a valid driver name: its Python package and environment variables are named after it",
            "choose a lower-case Python identifier, such as acme or acme_x1",
        )
    if name in TAKEN:
        raise ConfigError(
            f"{name!r} is not a valid driver name: its distribution would be {_distribution(name)}, like another",
            "choose another name, such as acme",
        )
    taken = {"auto", *(field.name for field in attrs.fields(Config))}
    if name in taken:
        raise ConfigError(
            f"{name!r} is not a valid driver name: it is a reserved word of configurations",
            f"choose another name; reserved are {', '.join(sorted(taken))}",
        )
    if name in driver_names():
        raise ConfigError(
            f"a driver {name!r} is already installed",
            "choose another name, or uninstall its package (`hal doctor` prints it)",
        )


def _check_folder(folder: Path) -> None:
    """Raise ConfigError if ``folder`` exists and is not an empty folder."""
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ConfigError(f"the folder {folder} is not empty", "choose another, or empty it")
    elif folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists and is not a folder", "choose another")
