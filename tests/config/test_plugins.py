"""Tests for the registry of entry points: names without imports, loading one by name, and errors for each plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers.distributions import install

import hal
from hal.config import plugins
from hal.config.plugins import Plugin, Plugins, instance_of
from hal.errors import ConfigError, DriverError, DriverNotFound

GROUP = "tests.shapes"


class Shape:
    """The class that the group registers."""

    name = ""


MODULE = f"""
from {__name__} import Shape

class {{cls}}(Shape):
    name = "{{name}}"

class Named(Shape):
    name = "another"

class Raising(Shape):
    name = "raising"
    def __init__(self):
        raise RuntimeError("no paint")

number = 3
"""


@attrs.frozen
class Site:
    """A folder on ``sys.path`` in which packages are installed."""

    folder: Path

    def install(self, package: str, group: str = GROUP, **entries: str) -> None:
        lines = [f"{name} = {target}" for name, target in entries.items()]
        install(self.folder, package, "\n".join([f"[{group}]", *lines]), version="1.5")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a site with the modules of two shapes, and one that cannot be imported."""
    for name in ("circle", "square"):
        (tmp_path / f"shapes_{name}.py").write_text(MODULE.format(cls=name.title(), name=name))
        monkeypatch.delitem(sys.modules, f"shapes_{name}", raising=False)
    (tmp_path / "shapes_exiting.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Site(tmp_path)


@pytest.fixture
def shapes() -> Plugins[Shape]:
    return Plugins(GROUP, "shape", instance_of(Shape, GROUP))


def test_one_is_loaded_by_name_and_no_other_is_imported(site: Site, shapes: Plugins[Shape]) -> None:
    site.install("circles", circle="shapes_circle:Circle")
    site.install("squares", square="shapes_square:Square")
    assert shapes.names() == ["circle", "square"]
    assert not {"shapes_circle", "shapes_square"} & sys.modules.keys()
    assert type(shapes.load("circle")).__name__ == "Circle"
    assert "shapes_square" not in sys.modules
    assert shapes.load("circle") is not shapes.load("circle"), "each load creates an instance"


def test_what_is_registered_names_its_package(site: Site) -> None:
    site.install("circles", circle="shapes_circle:Circle")
    (found,) = plugins.registered(GROUP)
    assert (found.name, found.target, found.package, found.version, found.source) == (
        "circle",
        "shapes_circle:Circle",
        "circles",
        "1.5",
        "circles 1.5",
    )


@pytest.mark.parametrize(
    ("target", "problem", "remedy"),
    [
        (
            "shapes_missing:Wrong",
            "the shape wrong cannot be imported: ModuleNotFoundError: No module named 'shapes_m",
            "update bad 1.5; for its authors: correct the entry point wrong = shapes_missing:Wrong in tests.shapes",
        ),
        ("shapes_circle:Wrong", "cannot be imported: AttributeError: ", "update bad 1.5"),
        ("shapes_exiting:Wrong", "the shape wrong cannot be imported: SystemExit: 3", "update bad 1.5"),
        ("shapes_circle:Raising", "is <class 'shapes_circle.Raising'>", "test_plugins.Shape of the same name"),
        ("shapes_circle:Named", "is <class 'shapes_circle.Named'>", "(wrong is registered by bad 1.5)"),
        ("shapes_circle:number", "the entry point wrong in tests.shapes is 3", "(wrong is registered by bad 1.5)"),
        ("shapes_circle", "is <module 'shapes_circle'", "(wrong is registered by bad 1.5)"),
    ],
)
def test_a_broken_one_is_reported_beside_the_others(
    target: str, problem: str, remedy: str, site: Site, shapes: Plugins[Shape], caplog: pytest.LogCaptureFixture
) -> None:
    site.install("squares", square="shapes_square:Square")
    site.install("bad", wrong=target)
    with pytest.raises(ConfigError) as caught:
        shapes.load("wrong")
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    for time in range(3):
        os.utime(site.folder, (time, time))  # A changed folder is read again, without a second warning.
        loaded = shapes.load_all()
        assert list(loaded.plugins) == ["square"]
        assert {name: str(error) for name, error in loaded.errors.items()} == {"wrong": str(caught.value)}
    (warned,) = [each.getMessage() for each in caplog.records]
    assert warned == f"{caught.value.problem}; remedy: {caught.value.remedy}"


def test_a_constructor_that_raises(site: Site, shapes: Plugins[Shape]) -> None:
    site.install("circles", raising="shapes_circle:Raising")
    message = r"creating the shape raising failed: RuntimeError: no paint\n.*circles 1\.5; .* Raising\(\) must take"
    with pytest.raises(ConfigError, match=message):
        shapes.load("raising")


def test_a_name_that_two_packages_register_is_refused(site: Site, shapes: Plugins[Shape]) -> None:
    site.install("circles", circle="shapes_circle:Circle", square="shapes_square:Square")
    site.install("rounds", circle="shapes_square:Square", square="shapes_square:Square")
    message = r"several packages register the shape circle: circles 1\.5, rounds 1\.5\n  remedy: uninstall all but one"
    with pytest.raises(ConfigError, match=message):
        shapes.load("circle")
    assert "shapes_circle" not in sys.modules
    loaded = shapes.load_all()
    assert list(loaded.plugins) == ["square"], "both register the same class"
    assert list(loaded.errors) == ["circle"]


def test_an_unknown_name_names_the_nearest_and_the_packages(site: Site) -> None:
    def check(plugin: Plugin, found: Any) -> Any:
        return found

    shapes: Plugins[Any] = Plugins(GROUP, "shape", check, error=DriverError, unknown=DriverNotFound)
    with pytest.raises(
        DriverNotFound, match=r"no shape 'cirle' .*\n  remedy: none is installed; .* group tests\.shapes"
    ):
        shapes.load("cirle")
    site.install("rounds", circle="shapes_circle:Circle")
    site.install("squares", square="shapes_square:Square", wide="shapes_square:Square")
    plugins.forget()
    message = r"no shape 'cirle' .*\n.*'circle'\? known: circle, square, wide \(from rounds 1\.5, squares 1\.5\)"
    with pytest.raises(DriverNotFound, match=message):
        shapes.load("cirle")
    assert shapes.load("wide").name == "square", "the check decides which are valid"


def test_a_broken_compiler_is_no_fault_of_a_backends(site: Site) -> None:
    """Opening ignores it; a configuration that names it gets an error with the reason."""
    site.install("bad", "hal.compilers", broken="shapes_missing:Broken", another="shapes_circle:Named")
    backend = hal.open("cpu", activate=False)
    assert "graph" in backend.compilers
    assert not {"broken", "another"} & set(backend.compilers)
    for name, problem in (
        ("broken", "the compiler broken cannot be imported"),
        ("another", "the entry point another in"),
    ):
        with pytest.raises(ConfigError, match=rf"^{problem}.*\n.*bad 1\.5"):
            hal.open({"backend": "cpu", "compilation": {"compiler": name}}, activate=False)


class TestChanges:
    """The metadata is cached, and read again when it may have changed."""

    def test_a_folder_on_the_path_that_changes(self, site: Site, shapes: Plugins[Shape]) -> None:
        site.install("circles", circle="shapes_circle:Circle")
        assert list(shapes.load_all().plugins) == ["circle"]
        assert plugins.registered(GROUP) is plugins.registered(GROUP)
        assert shapes.load_all() is shapes.load_all()
        site.install("squares", square="shapes_square:Square")
        later = site.folder.stat().st_mtime_ns + 1_000_000_000  # a change within the clock's resolution is not seen
        os.utime(site.folder, ns=(later, later))
        assert list(shapes.load_all().plugins) == ["circle", "square"]

    def test_a_path_that_changes(self, site: Site, shapes: Plugins[Shape], monkeypatch: pytest.MonkeyPatch) -> None:
        site.install("circles", circle="shapes_circle:Circle")
        assert shapes.names() == ["circle"]
        monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(site.folder)])
        assert shapes.names() == []

    def test_metadata_rewritten_in_place(self, site: Site, shapes: Plugins[Shape]) -> None:
        site.install("circles", circle="shapes_circle:Circle")
        assert shapes.names() == ["circle"]
        site.install("circles", round="shapes_circle:Circle")
        plugins.forget()
        assert shapes.names() == ["round"]


def test_names_need_no_stevedore_and_nothing_is_written(tmp_path: Path) -> None:
    """The import of stevedore takes 15 ms, and it caches entry points on disk.

    `import hal` and driver names avoid both.
    """
    program = (
        "import sys, hal; from hal.config.plugins import registered; registered('hal.drivers')\n"
        "assert 'stevedore' not in sys.modules\n"
        "hal.open('cpu')\n"
        "assert 'stevedore' in sys.modules\n"
    )
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HAL_CPU_NATIVE": "false"}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=300)
    assert not list(tmp_path.iterdir())
