"""Tests for the compile cache: trusted writers, complete entries only, and several processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.thorough import PROCESSES, thorough

from hal.config import CompileCache, compiler_key, content_key
from hal.errors import ConfigError

KEY = content_key("source", "compiler", "flags")
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the owner of a file")


def write(text: str = "compiled") -> Callable[[Path], None]:
    def into(folder: Path) -> None:
        (folder / "lib").mkdir()
        (folder / "lib" / "library.so").write_text(text)

    return into


def text_of(entry: Path | None) -> str | None:
    return None if entry is None else (entry / "lib" / "library.so").read_text()


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.rglob("*"))}


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "some" / "cache")


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def test_every_part_changes_the_key() -> None:
    keys = {content_key(*parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["ab", "c", ""], [b"ab", b"d"])}
    assert len(keys) == 5
    assert content_key("ab", "c") == content_key(b"ab", b"c")


def test_an_upgrade_of_the_compiler_changes_its_key(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("12")
    before = compiler_key(compiler)
    assert compiler_key(compiler) == before
    compiler.write_text("13.1")
    assert compiler_key(compiler) != before


def test_an_entry_is_made_once_and_for_its_user(cache: CompileCache, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.get(KEY) is None
    with umask(0o002):  # with which new files are writable by their group
        made = cache.get_or_put(KEY, write())
    assert made == cache.folder / KEY
    assert modes(made) <= {0o700, 0o600}
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert cache.get_or_put(KEY, write("again")) == made
    assert text_of(cache.get(KEY)) == "compiled"
    assert not caplog.records


@pytest.mark.parametrize("opened", [".", "lib", "lib/library.so", "contents.json"])
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_what_others_may_write_is_made_anew(
    opened: str, mode: int, cache: CompileCache, caplog: pytest.LogCaptureFixture
) -> None:
    (cache.put(KEY, write()) / opened).chmod(mode)
    assert cache.get(KEY) is None
    assert f"another user could have written {cache.folder / KEY / opened}" in caplog.text
    caplog.clear()
    assert text_of(cache.get_or_put(KEY, write("anew"))) == "anew"
    assert len(caplog.records) == 1, "logged once"
    assert modes(cache.folder / KEY) <= {0o700, 0o600}
    assert text_of(cache.get(KEY)) == "anew"


@AS_ROOT
@pytest.mark.parametrize("given", [".", "lib/library.so"])
def test_what_is_anothers_is_made_anew(given: str, cache: CompileCache, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(cache.put(KEY, write()) / given, 12345, 12345)
    assert cache.get(KEY) is None
    assert f"another user could have written {cache.folder / KEY / given}" in caplog.text
    assert text_of(cache.get_or_put(KEY, write("anew"))) == "anew"


@AS_ROOT
def test_a_cache_in_anothers_folder_is_refused(cache: CompileCache) -> None:
    cache.put(KEY, write())
    os.chown(cache.folder, 12345, 12345)

    for use in (lambda: cache.get(KEY), lambda: cache.put(KEY, write()), lambda: cache.latest("")):
        with pytest.raises(ConfigError, match=f"the cache folder {cache.folder} belongs to user 12345") as caught:
            use()
        assert "set HAL_CACHE_DIR" in caught.value.remedy


def test_an_open_folder_of_the_users_is_closed(cache: CompileCache) -> None:
    cache.put(KEY, write())
    cache.folder.chmod(0o777)
    assert text_of(cache.get(KEY)) == "compiled"
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_a_link_is_not_followed(cache: CompileCache, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another user could have put it into a writable folder; it points to one of this user's files."""
    made = cache.put(KEY, write())
    elsewhere = tmp_path / "elsewhere"
    made.rename(elsewhere)
    made.symlink_to(elsewhere)
    assert cache.get(KEY) is None
    assert "is a link" in caplog.text
    assert text_of(cache.put(KEY, write("anew"))) == "anew"
    assert text_of(elsewhere) == "compiled"


def test_another_entry_in_its_place_is_noticed(cache: CompileCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.put("other", write()).rename(cache.folder / KEY)
    assert cache.get(KEY) is None
    assert f"{cache.folder / KEY} holds another entry" in caplog.text


@pytest.mark.parametrize(
    "damage", ["no contents", "half the contents", "half a file", "a file less", "other contents", "a file"]
)
def test_half_an_entry_is_made_anew(damage: str, cache: CompileCache, caplog: pytest.LogCaptureFixture) -> None:
    made = cache.put(KEY, write())
    contents, library = made / "contents.json", made / "lib" / "library.so"
    if damage == "no contents":
        contents.unlink()
    elif damage == "half the contents":
        contents.write_text(contents.read_text()[:20])
    elif damage == "half a file":
        library.write_text("comp")
    elif damage == "a file less":
        library.unlink()
    elif damage == "other contents":
        contents.write_text(json.dumps(["key", KEY]))
    else:
        made.rename(cache.folder / "away")
        made.write_text("no folder")
        made.chmod(0o600)
    assert cache.get(KEY) is None
    assert "damaged" in caplog.text
    assert text_of(cache.get_or_put(KEY, write("anew"))) == "anew"


def test_a_build_that_fails_leaves_nothing(cache: CompileCache) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_put(KEY, fail)
    assert [each.name for each in cache.folder.iterdir()] == [".lock"]
    assert text_of(cache.get_or_put(KEY, write())) == "compiled"


@thorough(PROCESSES)
def test_processes_that_build_at_once_build_once(cache: CompileCache, tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from hal.config import CompileCache
folder, ready, start = map(Path, sys.argv[1:])
def write(into):
    print("made")
    (into / "a").write_text("1")
    time.sleep(0.5)
    (into / "b").write_text("2")
cache = CompileCache(folder)
ready.touch()
while not start.exists():
    time.sleep(0.01)
entry = cache.get_or_put("key", write)
assert sorted(each.name for each in entry.iterdir()) == ["a", "b", "contents.json"]
"""
    start, ready = tmp_path / "start", [tmp_path / f"ready{number}" for number in range(2)]
    command = [sys.executable, "-c", program, str(cache.folder)]
    processes = [
        subprocess.Popen([*command, str(each), str(start)], stdout=subprocess.PIPE, text=True) for each in ready
    ]
    deadline = time.monotonic() + 120
    while not all(each.exists() for each in ready) and time.monotonic() < deadline:
        time.sleep(0.01)
    start.touch()
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(said) == ["", "made\n"]


def test_one_that_others_replace_meanwhile_is_whole(cache: CompileCache) -> None:
    """Without the lock both build, and one entry stays."""

    def slowly(folder: Path) -> None:
        CompileCache(cache.folder).put(KEY, write("first"))
        write("second")(folder)

    assert text_of(cache.put(KEY, slowly)) == "second"
    assert [each.name for each in cache.folder.iterdir() if not each.name.startswith(".lock")] == [KEY]


def test_the_latest_that_can_be_taken(cache: CompileCache) -> None:
    now = time.time()
    for age, name in enumerate(["a-new", "a-old", "b-newest"]):
        os.utime(cache.put(name, write(name)), (now - 100 * age, now - 100 * age))
    assert text_of(cache.latest("a-")) == "a-new"
    (cache.folder / "a-new").chmod(0o777)
    assert text_of(cache.latest("a-")) == "a-old"
    assert cache.latest("c-") is None


def test_what_a_process_left_is_removed(cache: CompileCache) -> None:
    cache.put("unused", write())
    (cache.folder / ".new-left").mkdir()
    for each in cache.folder.iterdir():
        os.utime(each, (time.time() - 100_000,) * 2)
    cache.put("new", write())
    assert {each.name for each in cache.folder.iterdir()} == {".lock", "unused", "new"}
