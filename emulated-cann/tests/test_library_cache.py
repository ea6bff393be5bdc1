"""Tests for the cache of libraries: it executes nothing that others could have written, and keeps nothing for ever."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from emulated_cann import Unavailable
from emulated_cann.library_cache import CACHE_DIR, LibraryCache, cache_folder

KEPT = 1000


@pytest.fixture
def cache(tmp_path: Path) -> LibraryCache:
    return LibraryCache(tmp_path / "some" / "cache", KEPT)


def write(text: str) -> Callable[[Path], None]:
    def into(folder: Path) -> None:
        (folder / "lib").mkdir()
        (folder / "lib" / "library.so").write_text(text)

    return into


def text_of(entry: Path) -> str:
    return (entry / "lib" / "library.so").read_text()


def test_an_entry_is_written_once_for_its_user(cache: LibraryCache) -> None:
    entry = cache.get_or_put("key", write("first"))
    assert text_of(cache.get_or_put("key", write("second"))) == "first"
    assert not [each for each in (entry, *entry.rglob("*")) if each.stat().st_mode & 0o077]


def plant_link(entry: Path) -> None:
    other = entry.with_name("other")
    entry.rename(other)
    entry.symlink_to(other)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda entry: (entry / "contents.json").unlink(), "incomplete or damaged"),
        (lambda entry: (entry / "lib" / "library.so").unlink(), "incomplete or damaged"),
        (lambda entry: (entry / "lib" / "library.so").write_text("planted"), "library.so is damaged"),
        (lambda entry: (entry / "lib").chmod(0o777), "another user could have written"),
        (plant_link, "is a link"),
    ],
    ids=["no contents", "a file less", "another text", "open to others", "a link"],
)
def test_an_entry_that_cannot_be_trusted(
    damage: Callable[[Path], None], told: str, cache: LibraryCache, caplog: pytest.LogCaptureFixture
) -> None:
    damage(cache.get_or_put("key", write("first")))
    assert cache.latest("k") is None
    assert text_of(cache.get_or_put("key", write("anew"))) == "anew"
    assert told in caplog.text


def test_a_folder_of_the_users_is_closed(cache: LibraryCache) -> None:
    cache.get_or_put("key", write("first"))
    cache.folder.chmod(0o777)
    assert cache.latest("k") == cache.folder / "key"
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_a_build_that_fails_leaves_nothing(cache: LibraryCache) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_put("key", fail)
    assert [each.name for each in cache.folder.iterdir()] == [".lock"]


def test_what_nobody_used_for_long_is_removed(cache: LibraryCache) -> None:
    for key in ("unused", "used"):
        cache.get_or_put(key, write(key))
    (cache.folder / ".new-left").mkdir()
    for each in cache.folder.iterdir():
        os.utime(each, (time.time() - 100_000,) * 2)
    cache.get_or_put("used", write("used"))
    cache.get_or_put("new", write("new"))
    assert {each.name for each in cache.folder.iterdir()} == {".lock", "used", "new"}


def test_a_workspace_stays(cache: LibraryCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.get_or_put("key", write("first"))
    with cache.workspace("build") as folder:
        (folder / "object.o").write_text("1")
        (folder / "object.o").chmod(0o666)
        (folder / "torch").symlink_to("/usr")
    assert stat.S_IMODE((folder / "object.o").stat().st_mode) == 0o600
    with cache.workspace("build") as again:
        assert (again / "object.o").read_text() == "1"
    assert not caplog.records


@pytest.mark.parametrize("opened", [".", "object.o"])
def test_a_workspace_that_others_may_write_in_is_emptied(opened: str, cache: LibraryCache) -> None:
    cache.get_or_put("key", write("first"))
    with cache.workspace("build") as folder:
        (folder / "object.o").write_text("1")
    (folder / opened).chmod(0o777)
    with cache.workspace("build") as folder:
        assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({CACHE_DIR: "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/emulated-cann"),
        ({"HOME": "/c"}, "/c/.cache/emulated-cann"),
    ],
)
def test_where_it_is(environ: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE_DIR, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_a_home_folder_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR, "~nobody-of-that-name/cache")
    with pytest.raises(Unavailable, match="in a home folder that does not exist"):
        cache_folder()
