"""Libraries of C++ kernels for machines without a compiler: how they are made, which one is chosen, and its trial."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hal.backends.cpu.command import command
from hal.backends.cpu.native import build, compiler, prebuilt, processor
from hal.backends.cpu.native.arguments import Bindings
from helpers.thorough import PROCESSES, thorough

from hal.errors import ConfigError, DriverUnavailable

X86 = processor.features_of("x86_64", "amx")
ARM = processor.features_of("aarch64", "armv8.2")


@pytest.fixture
def real() -> bytes:
    """Return the library that is compiled for this processor."""
    return Path(build.load()._name).read_bytes()


@pytest.fixture
def bare(real: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Take away the compiler and what it has compiled. Return the file with a line for each process of this Python."""
    started, counting = tmp_path / "started", tmp_path / "counting"
    started.touch()
    counting.write_text(f'#!/bin/sh\necho >> {started}\nexec {sys.executable} "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(counting))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    return started


def place(folder: Path, name: str, library: bytes = b"", of: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    placed = prebuilt._library(folder, of or processor.architecture(), name)
    placed.write_bytes(library)
    return placed


@pytest.mark.parametrize(
    ("machine", "features", "limit", "chosen"),
    [
        ("x86_64", X86, None, "amx"),
        ("AMD64", X86, "avx512", "avx512"),
        ("x86_64", [each for each in X86 if each != "avx512bw"], None, "avx2"),
        ("x86_64", ["avx512f", *processor.features_of("x86_64", "avx2")], None, "avx2"),
        ("x86_64", ["avx512f", "amx_tile", "sse4_2", "popcnt"], None, "sse4"),
        ("x86_64", ["avx512f"], None, None),
        ("aarch64", ARM, None, "armv8.2"),
        ("arm64", ["lse", "fp16"], None, "armv8"),
        ("riscv64", [], None, None),
    ],
    ids=str,
)
def test_the_highest_set_that_the_processor_has_as_a_whole(
    machine: str,
    features: list[str],
    limit: str | None,
    chosen: str | None,
    not_prebuilt: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One feature of a set does not stand for the others, such as AVX512F for AVX512BW."""
    placed = {name: place(not_prebuilt, name, of=of) for of, names in processor.SETS.items() for name in names}
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(processor, "processor_flags", lambda: frozenset(features))
    assert prebuilt.highest(limit) == (None if chosen is None else placed[chosen])
    for each in placed.values():
        each.rename(each.with_name(each.name.replace("-", "-of-other-sources-")))
    assert prebuilt.highest(limit) is None


def test_a_library_is_tried_once(real: bytes, bare: Path, not_prebuilt: Path) -> None:
    lowest, *_ = processor.SETS[processor.architecture()]
    library = place(not_prebuilt, lowest, real)
    for _ in range(2):
        assert build.load.__wrapped__()._name == str(library)
        assert bare.read_text().count("\n") == 1
    assert Bindings(build.load.__wrapped__()).named("widened") == f"C++ (prebuilt for {lowest}, widened)"


def test_without_a_cache_a_library_is_tried_at_each_start(
    real: bytes, bare: Path, not_prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_CACHE_DIR", "~no-such-user/cache")
    lowest, *_ = processor.SETS[processor.architecture()]
    place(not_prebuilt, lowest, real)
    for times in (1, 2):
        assert build.load.__wrapped__().rms_norm
        assert bare.read_text().count("\n") == times


def test_an_instruction_that_the_processor_only_reports(
    tmp_path: Path, not_prebuilt: Path, request: pytest.FixtureRequest
) -> None:
    """An unknown instruction ends another process, and the error names the library's instructions."""
    source, library = tmp_path / "unknown.cpp", tmp_path / "unknown.so"
    source.write_text(
        'extern "C" const char* instructions() { return "AVX-1024 "; }\n'
        'extern "C" int try_instructions() { __builtin_trap(); }\n'
    )
    subprocess.run([*compiler.compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    lowest, *_ = processor.SETS[processor.architecture()]
    place(not_prebuilt, lowest, library.read_bytes())
    request.getfixturevalue("bare")
    for _ in range(2):
        with pytest.raises(DriverUnavailable, match=r"for AVX-1024 end in SIG\w+: this processor, .*, does not know"):
            build.load.__wrapped__()


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set CXX to a program that only notes its arguments, which is quick. Return the file that it writes."""
    fast, noted = tmp_path / "fast", tmp_path / "noted"
    fast.write_text(
        f'#!/bin/sh\necho "$@" >> {noted}\n[ "$1" = -dumpmachine ] && exec echo "$TARGET"\n'
        'for last; do :; done\nexec touch "$last"\n'
    )
    fast.chmod(0o755)
    monkeypatch.setenv("CXX", str(fast))
    monkeypatch.setenv("TARGET", "x86_64-linux-gnu")
    return noted


def run(*arguments: str | Path) -> Result:
    return CliRunner(catch_exceptions=False).invoke(command, [str(each) for each in arguments])


def test_the_command_compiles_for_others_than_this_processor(
    compiling: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "libraries"
    names = "--instructions", "avx2", "--instructions", "avx512_bf16"
    printed = run(folder, *names).output.splitlines()
    assert printed == [str(prebuilt._library(folder, "x86_64", each)) for each in names[1::2]]
    flags = compiling.read_text()
    assert "-march=x86-64 -mavx2 -mfma -mf16c -msse4.2 -mpopcnt -c" in flags
    assert "-march=x86-64 -mavx512bf16 -mavx512vnni -mavx512f " in flags
    assert "=native" not in flags
    older = folder / "x86_64-sse4-0123456789ab.so"
    older.touch()
    monkeypatch.setenv("TARGET", "arm64-apple-darwin23")
    run(folder, "--instructions", "armv8.2")
    assert "-march=armv8.2-a+lse+fp16+dotprod" in compiling.read_text()
    assert older.exists()
    monkeypatch.setenv("TARGET", "x86_64-linux-gnu")
    run(folder, "--instructions", "avx2")
    assert not older.exists()
    assert {each.name.rpartition("-")[0] for each in folder.iterdir()} == {
        "aarch64-armv8.2",
        "x86_64-avx2",
        "x86_64-avx512_bf16",
    }


def test_what_cannot_be_built(compiling: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"x86_64-linux-gnu, which has no instruction set armv8\n.*sse4, avx2, avx512"
    ):
        run(tmp_path, "--instructions", "armv8")
    with pytest.raises(ConfigError, match="library for sse4 cannot be written"):
        run(compiling / "folder", "--instructions", "sse4")
    monkeypatch.setenv("TARGET", "riscv64-linux-gnu")
    with pytest.raises(DriverUnavailable, match=r"for riscv64-linux-gnu, of which .*\n.*for x86_64 or aarch64"):
        run(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DriverUnavailable, match="there is no no-such-compiler on the PATH"):
        run(tmp_path)


@thorough(PROCESSES)
def test_without_any_library_torch_computes_and_a_command_says_so_once(tmp_path: Path, trained: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom hal.backends.cpu.native import prebuilt\nfrom hal.cli import main\n"
        "prebuilt.PREBUILT = Path('absent')\nmain(sys.argv[1:])\n"
    )
    environment = {name: text for name, text in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(tmp_path), "HAL_CACHE_DIR": str(tmp_path / "cache")}
    arguments = ["generate", str(trained), "--backend", "cpu", "--prompt", "def f", "--greedy", "--max-new-tokens", "4"]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1
    assert done.stderr.count("the cpu driver runs without its C++ kernels") == 1, done.stderr
    assert "install g++" in done.stderr
    assert "hal build-kernels" in done.stderr
