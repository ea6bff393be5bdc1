"""Tests for building the emulated CANN once, loading it for torch_npu, and the errors if that fails."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import emulated_cann
import pytest
import torch
import torch_npu
from emulated_cann import activation, build, ninja_build, options, symbols
from emulated_cann.errors import EmulationError, InvalidOption, Unavailable
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough
from support.children import emulate, python

NPU = Path(torch_npu.__file__).parent
SCRIPT = "import torch, torch_npu\nprint((torch.ones(3).npu() + 1).tolist(), torch.npu.device_count())\n"
ACTIVATED = "import emulated_cann\nemulated_cann.activate()\n"

# A minimal runtime and operator library.
TINY = {
    "runtime/launch.h": "#include <string>\nnamespace emulator { int fail(int, const std::string&); }\n",
    "runtime/tiny.cpp": '#include "launch.h"\nnamespace emulator { std::string why;\n'
    "int fail(int code, const std::string& reason) { why = reason; return code; } }\n"
    'extern "C" const char* aclGetRecentErrMsg() { return emulator::why.c_str(); }\n',
    "runtime/other.cpp": '#include "other.h"\nextern "C" int tiny() { return other; }\n',
    "runtime/other.h": "constexpr int other = 1;\n",
    "ops/op.h": "#pragma once\n",
    "ops/tiny.cpp": '#include "op.h"\nextern "C" int aclnnAdd() { return 7; }\n',
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small tree of sources for two libraries without stubs, which builds in a second or two."""
    monkeypatch.setattr(build, "LIBRARIES", (build.LIBRARIES[0], build.Library("opapi", "ops", torch=True)))
    monkeypatch.setattr(symbols, "refusing_stubs", lambda *_: {})
    monkeypatch.setattr(ninja_build, "UNIT_BYTES", 1)  # every source is a unit
    for name, text in TINY.items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "src"


def run(program: str, environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-c", program, *arguments, environ=environ)


# The cache.


def compiled(cache: Path) -> dict[str, int]:
    """Return the modification times of the object files."""
    found = sorted(cache.glob("build-*/obj/*/*.o"))
    return {str(each.relative_to(each.parents[1])): each.stat().st_mtime_ns for each in found}


def entries(cache: Path) -> list[Path]:
    """Return the folders of the finished libraries."""
    return [each.parent.parent for each in cache.glob("*/lib64/cann.emulated")]


def test_nothing_is_compiled_twice(
    sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = build.build(sources, cache)
    before = compiled(cache)
    assert list(before) == ["ops/tiny.o", "runtime/other.o", "runtime/tiny.o"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))  # without a compiler
        assert build.build(sources, cache) == first

    (sources / "runtime" / "tiny.cpp").touch()  # as in a new checkout
    (sources / "runtime" / "other.h").write_text("constexpr int other = 2;\n")
    second = build.build(sources, cache)
    assert second != first
    assert dict(compiled(cache).items() - before.items()).keys() == {"runtime/other.o"}
    assert [ctypes.CDLL(str(home / "lib64" / "libascendcl.so")).tiny() for home in (first, second)] == [1, 2]

    libraries = [{each.name for each in (home / "lib64").iterdir()} for home in (first, second)]
    assert libraries[0] == libraries[1]
    assert sorted(entries(cache)) == sorted([first, second])
    assert capfd.readouterr().err == "", "a build of a few seconds prints nothing"

    (sources / "runtime" / "other.cpp").unlink()
    assert "tiny" not in symbols.defined(build.build(sources, cache) / "lib64" / "libascendcl.so")
    assert not list(cache.glob("build-*/src/runtime/other.cpp"))


@thorough(PROCESSES)
def test_a_header_of_all_operations_compiles_them_again(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build.build(sources, cache)
    (sources / "ops" / "op.h").write_text("#pragma once\nconstexpr int seven = 8;\n")
    (sources / "ops" / "tiny.cpp").write_text('#include "op.h"\nextern "C" int aclnnAdd() { return seven; }\n')
    build.build(sources, cache)
    before = compiled(cache)
    (sources / "ops" / "op.h").write_text("#pragma once\nconstexpr int seven = 9;\n")
    home = build.build(sources, cache)
    assert dict(compiled(cache).items() - before.items()).keys() == {"ops/tiny.o"}
    load = "import ctypes, sys, torch\nprint(ctypes.CDLL(sys.argv[1] + '/lib64/libopapi.so').aclnnAdd())"
    result = run(load, {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, str(home))
    assert result.stdout == "9\n", result.stderr


@thorough(PROCESSES)
def test_the_first_build_says_so_once(sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        (sources / "ops" / f"more{number}.cpp").write_text(f'extern "C" int more{number}() {{ return 0; }}\n')
    build.build(sources, tmp_path / "cache")
    assert capfd.readouterr().err == "emulated-cann: building the emulated CANN, once; this takes minutes\n"
    build.build(sources, tmp_path / "cache")
    assert capfd.readouterr().err == ""


def test_two_processes_that_build_at_once_build_once(sources: Path, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from emulated_cann import build, ninja_build, symbols
build.LIBRARIES = build.LIBRARIES[:2]
symbols.refusing_stubs = lambda *_: {{}}
ran = []
run = ninja_build.build_libraries
ninja_build.build_libraries = lambda *arguments: (ran.append(1), run(*arguments))[1]
print(len(ran), build.build(Path({str(sources)!r}), Path({str(tmp_path / "cache")!r})), len(ran))
"""
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: run(program, os.environ), range(2)))
    lines = [result.stdout.split() for result in results]
    assert all(result.returncode == 0 for result in results), [result.stderr for result in results]
    assert sorted(line[2] for line in lines) == ["0", "1"], "one process builds, the other waits and uses the result"
    assert lines[0][1] == lines[1][1]


@thorough(PROCESSES)
@pytest.mark.parametrize("opened", [".", "lib64", "lib64/libascendcl.so"])
def test_libraries_that_others_may_write_are_made_anew(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: str
) -> None:
    home = build.build(sources, tmp_path / "cache")
    library = home / "lib64" / "libascendcl.so"
    library.write_bytes(b"planted")
    (home / opened).chmod(0o777)
    assert build.build(sources, tmp_path / "cache") == home
    assert f"another user could have written {home / opened}; it is recreated" in caplog.text
    assert ctypes.CDLL(str(library)).tiny() == 1
    assert not [each for each in (home, *home.rglob("*")) if each.stat().st_mode & 0o077]


def test_half_a_folder_is_made_anew(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = build.build(sources, tmp_path / "cache")
    for each in home.rglob("*.*"):
        each.unlink()
    assert build.build(sources, tmp_path / "cache") == home
    assert f"{home} is incomplete or damaged" in caplog.text
    assert ctypes.CDLL(str(home / "lib64" / "libascendcl.so")).tiny() == 1


@thorough(PROCESSES)
def test_objects_that_others_may_write_are_not_linked(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build.build(sources, cache)
    (planted,) = cache.glob("build-*/obj/runtime/tiny.o")
    planted.write_bytes(b"planted")
    planted.chmod(0o666)
    (sources / "runtime" / "other.h").write_text("constexpr int other = 2;\n")
    home = build.build(sources, cache)
    assert ctypes.CDLL(str(home / "lib64" / "libascendcl.so")).tiny() == 2


@pytest.mark.parametrize(
    "reason",
    [
        pytest.param("the cache folder", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root may chown")),
        "cannot be stored in",
    ],
)
def test_a_cache_that_cannot_be_used(sources: Path, tmp_path: Path, reason: str) -> None:
    cache = tmp_path / "cache"
    if reason == "the cache folder":
        cache.mkdir()
        os.chown(cache, 12345, 12345)
    else:
        cache.touch()
    with pytest.raises(Unavailable, match=f"{reason} {cache}") as caught:
        build.build(sources, cache)
    assert "set EMULATED_CANN_CACHE_DIR" in caught.value.remedy


@thorough(PROCESSES)
def test_each_environment_has_libraries_of_its_own(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without torch finds libtorch_cpu.so at the path stored in the library, if it still exists."""
    cache, found = tmp_path / "cache", build.Toolchain.find(sources)
    gone = tmp_path / "gone"
    gone.symlink_to(found.torch)
    with monkeypatch.context() as patch:
        patch.setattr(build.Toolchain, "find", lambda _: attrs.evolve(found, torch=gone))
        other = build.build(sources, cache)
    before = compiled(cache)
    gone.unlink()
    ours = build.build(sources, cache)
    assert compiled(cache) == before, "must only be linked again"
    load = "import ctypes, sys\nctypes.CDLL(sys.argv[1] + '/lib64/libopapi.so')\nprint('torch' in sys.modules)"
    results = {home: run(load, os.environ, str(home)) for home in (other, ours)}
    assert "libtorch_cpu.so: cannot open" in results[other].stderr
    assert results[ours].stdout == "False\n", results[ours].stderr


def test_a_source_that_does_not_compile_is_shown(sources: Path, tmp_path: Path) -> None:
    (sources / "ops" / "tiny.cpp").write_text("int broken() { return nothing; }\n")
    with pytest.raises(EmulationError, match=r"does not build: obj/ops/tiny.o failed") as caught:
        build.build(sources, tmp_path / "cache")
    assert f"{sources / 'ops' / 'tiny.cpp'}:1:" in caught.value.problem, (
        "the message has the path of the source, not of a copy"
    )
    assert "'nothing' was not declared" in caught.value.problem.replace("‘", "'").replace("’", "'")  # noqa: RUF001
    assert "-std=c++20" not in caught.value.problem, "the message must not have the whole compiler command"
    assert not entries(tmp_path / "cache")
    (sources / "ops" / "tiny.cpp").write_text("int mended() { return 0; }\n")
    assert build.build(sources, tmp_path / "cache").is_dir()


@thorough(PROCESSES)
def test_what_nobody_used_for_long_is_swept(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old = build.build(sources, cache)
    long_ago = time.time() - build.KEPT_SECONDS - 10
    os.utime(old, (long_ago, long_ago))
    (sources / "runtime" / "other.h").write_text("constexpr int other = 3;\n")
    new = build.build(sources, cache)
    assert new.is_dir()
    assert not old.exists()
    assert build.build(sources, cache) == new


def test_more_flags_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CANN_CXXFLAGS", "-DADDED -g")
    assert build.compiler_flags()[-2:] == ("-DADDED", "-g")


# Missing prerequisites.


def test_without_a_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"no g\+\+") as caught:
        build.build(sources, tmp_path / "cache")
    assert "apt install g++" in caught.value.remedy


@pytest.mark.parametrize("missing", ["package", "program"])
def test_without_ninja(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "package":
        monkeypatch.setitem(sys.modules, "ninja", None)
    else:
        monkeypatch.setattr("ninja.BIN_DIR", str(tmp_path))
        monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    with pytest.raises(Unavailable, match="the Python package ninja") as caught:
        build.build(sources, tmp_path / "cache")
    assert "pip install ninja" in caught.value.remedy
    assert not entries(tmp_path / "cache")


def test_without_nm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="requires nm, but there is no nm on the PATH") as caught:
        symbols.linked(NPU)
    assert "apt install binutils" in caught.value.remedy


def test_a_file_without_symbols(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(
        EmulationError, match=f"nm cannot read the symbols of {tmp_path / 'text.so'}: .*not recogni[sz]ed"
    ):
        symbols.defined(tmp_path / "text.so")


@thorough(PROCESSES)
def test_without_torch_npu(clean: dict[str, str]) -> None:
    result = run(f"import sys; sys.modules['torch_npu'] = None\n{ACTIVATED}", clean)
    assert result.returncode == 1
    assert "Unavailable: the emulated CANN requires torch_npu, which is not installed" in result.stderr
    assert "pip install torch-npu==2.13.0" in result.stderr


def test_with_another_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TORCH_NPU", "2.14.0")
    with pytest.raises(Unavailable, match=r"supports torch_npu 2.14.0, and 2.13.0"):
        build.Toolchain.find()


@thorough(PROCESSES)
def test_a_real_cann_is_not_hidden_unless_forced(clean: dict[str, str], tmp_path: Path) -> None:
    library = tmp_path / "lib64" / "libascendcl.so"
    library.parent.mkdir()
    library.touch()
    places = {"ASCEND_HOME_PATH": tmp_path, "ASCEND_TOOLKIT_HOME": tmp_path, "LD_LIBRARY_PATH": library.parent}
    for name, value in places.items():
        environ = {**clean, name: str(value)}
        with pytest.raises(Unavailable, match=f"a real CANN is installed .{re.escape(str(library))}"):
            activation.refuse_real_cann(environ)
    refused = emulate("--", sys.executable, "-c", SCRIPT, environ=environ)
    assert refused.returncode == 2
    assert "a real CANN is installed" in refused.stderr
    assert "emulated-cann run --force" in refused.stderr
    forced = emulate("--force", "--", sys.executable, "-c", SCRIPT, environ=environ)
    assert forced.stdout == "[2.0, 2.0, 2.0] 1\n", forced.stderr


# Activation.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": 2}, "unknown key.*device"),
        ({"devices": 0}, "devices must be at least 1, not 0"),
        ({"memory": "lots"}, "memory"),
    ],
    ids=["unknown", "out of range", "of the wrong kind"],
)
def test_wrong_options(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        emulated_cann.activate(**given)
    with pytest.raises(InvalidOption, match=message):
        options.from_environment({options.OPTIONS: json.dumps(given)})


@thorough(PROCESSES)
@pytest.mark.parametrize(
    "attempt",
    ["import torch", "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch_npu"],
    ids=["by torch", "by itself"],
)
def test_after_torch_npu_failed_to_import(clean: dict[str, str], attempt: str) -> None:
    program = f"try:\n    {attempt}\nexcept Exception: print('failed')\n{ACTIVATED}"
    result = run(program, clean)
    assert result.stdout == "failed\n"
    assert "EmulationError: torch_npu's import has already been attempted" in result.stderr
    assert "emulated-cann run -- python" in result.stderr


@thorough(PROCESSES)
def test_a_child_process_has_the_same_machine(clean: dict[str, str]) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SCRIPT!r}], check=True)"
    result = run(f"import emulated_cann\nemulated_cann.activate(devices=3)\n{child}", clean)
    assert result.stdout == "[2.0, 2.0, 2.0] 3\n", result.stderr


@thorough(PROCESSES)
def test_a_child_activates_again_for_nothing(clean: dict[str, str]) -> None:
    again = "emulated_cann.activate(devices=3)\nprint(emulated_cann.is_active())\n"
    program = f"import torch, torch_npu\nimport emulated_cann\n{again}"
    result = emulate("--devices", "3", "--", sys.executable, "-c", program, environ=clean)
    assert result.stdout == "True\n", result.stderr


@thorough(PROCESSES, r"\[torch(, |-ours)|\[torch-another")
@thorough(EXHAUSTIVE, r"\[(torch-ours taken out|torch, torch_npu-another)")
@pytest.mark.parametrize("kept", [True, False], ids=["another put before ours", "ours taken out"])
@pytest.mark.parametrize("first", ["torch", "torch, torch_npu"])
def test_a_package_changes_the_library_path(clean: dict[str, str], tmp_path: Path, first: str, kept: bool) -> None:
    """opencv-python does so when it is imported.

    `emulated-cann run` still knows the libraries that it loaded for this process.
    """
    path = f"{str(tmp_path)!r} + ':' + os.environ['LD_LIBRARY_PATH']" if kept else repr(str(tmp_path))
    program = (
        f"import os, subprocess, sys, {first}\nos.environ['LD_LIBRARY_PATH'] = {path}\n"
        f"{ACTIVATED.replace('()', '(devices=3)')}"
        "import torch_npu\nprint(emulated_cann.is_active(), torch.npu.get_device_name())\n"
        f"{SCRIPT}"
    )
    shown = "True Ascend910B3\n[2.0, 2.0, 2.0] 3\n"
    if kept:
        child = "import emulated_cann; print(emulated_cann.is_active())"
        program += f"sys.stdout.flush()\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
        shown += "True\n"
    environ = {**clean, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    result = emulate("--devices", "3", "--", sys.executable, "-c", program, environ=environ)
    assert result.stdout == shown, result.stderr


@thorough(PROCESSES)
@pytest.mark.parametrize("first", [True, False])
def test_a_real_cann_before_ours_is_taken_for_what_it_is(clean: dict[str, str], tmp_path: Path, first: bool) -> None:
    ours = str(activation.loaded()[0].parent)
    (tmp_path / activation.RUNTIME).touch()
    paths = [str(tmp_path), ours] if first else [ours, str(tmp_path)]
    program = "import emulated_cann\nprint(emulated_cann.is_active())"
    result = run(program, {**clean, "LD_LIBRARY_PATH": ":".join(paths)})
    assert result.stdout == f"{not first}\n", result.stderr


# The command `emulated-cann run`.


@thorough(PROCESSES, r"\[1")
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_an_unmodified_script(clean: dict[str, str], tmp_path: Path, autoload: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT if autoload == "0" else SCRIPT.replace(", torch_npu", ""))
    options = ("--devices", "2", "--memory", "1GiB", "--soc", "Ascend910_9391")
    script.write_text(f"{script.read_text()}print(torch.npu.mem_get_info()[1], torch.npu.get_device_name())\n")
    environ = {**clean, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    result = emulate(*options, "--", sys.executable, str(script), environ=environ)
    assert result.stdout == f"[2.0, 2.0, 2.0] 2\n{1 << 30} Ascend910_9391\n", result.stderr


@thorough(PROCESSES)
def test_how_long_a_wait_may_see_nothing_run(clean: dict[str, str]) -> None:
    ask = "import ctypes; print(ctypes.CDLL('libascendcl.so').emulated_cann_get(b'stall'))"
    assert emulate("--", sys.executable, "-c", ask, environ=clean).stdout == "30\n"
    assert emulate("--stall", "7", "--", sys.executable, "-c", ask, environ=clean).stdout == "7\n"


@thorough(PROCESSES)
def test_the_exit_status_is_the_programs(clean: dict[str, str]) -> None:
    assert emulate("--", sys.executable, "-c", "raise SystemExit(7)", environ=clean).returncode == 7
    missing = emulate("--", "no-such-program", environ=clean)
    assert missing.returncode == 2
    assert "The program 'no-such-program' is not on the PATH" in missing.stderr


@thorough(PROCESSES)
def test_by_the_environment_alone(clean: dict[str, str]) -> None:
    """Works only if torch loads this entry point before torch_npu's, which depends on the file system's order."""
    listing = (
        "from importlib.metadata import entry_points as e; print(*(each.name for each in e(group='torch.backends')))"
    )
    order = run(listing, clean).stdout.split()
    environ = {**clean, options.SWITCH: "1", options.OPTIONS: '{"devices": 4}'}
    result = run(SCRIPT.replace(", torch_npu", ""), environ)
    if order.index("emulated_cann") < order.index("torch_npu"):
        assert result.stdout == "[2.0, 2.0, 2.0] 4\n", result.stderr
    else:
        assert "Failed to load the backend extension: torch_npu" in result.stderr


# Operations that are not emulated.


@pytest.fixture(scope="module")
def stubs() -> dict[str, str]:
    return symbols.refusing_stubs(NPU, set())


def test_every_function_that_torch_npu_links_has_a_stub(stubs: dict[str, str]) -> None:
    defined = set(re.findall(r"^\S+ (\w+)\(\)", "".join(stubs.values()), re.MULTILINE))
    linked = symbols.linked(NPU)
    assert {"aclrtMalloc", "aclInit", "aclopCompileAndExecute", "rtKernelLaunch"} < linked
    assert linked <= defined
    assert {"aclnnAdd", "aclnnAddGetWorkspaceSize", "aclrtValueWait", "HcclAllReduce"} <= defined


def test_what_is_not_emulated_fails_by_name() -> None:
    x, weight = torch.ones(4, 8, dtype=torch.float16, device="npu"), torch.ones(8, dtype=torch.float16, device="npu")

    def call() -> None:
        torch_npu.npu_group_norm_swish(x, 2, weight, weight)
        torch.npu.synchronize()

    with pytest.raises(RuntimeError, match="the emulated CANN has no aclnnGroupNormSwish"):
        call()
    assert x.sum().item() == 32, "the next call works"


def test_every_library_that_torch_npu_loads_is_there() -> None:
    folder = activation.loaded()[0].parent
    needed = set()
    for library in symbols.libraries(NPU):
        names = re.findall(rb"\0(lib(?:ascendcl|acl_\w+|hccl|ge_runner|graph|atb)\.so)(?=\0)", library.read_bytes())
        needed |= {name.decode() for name in names}
    assert {"libhccl.so", "libgraph.so", "libatb.so"} < needed
    assert needed <= {each.name for each in folder.iterdir()}
