"""Compiles the emulated CANN with the system's g++, once.

    python -m hal.backends.npu.emulator.build        # builds what changed, prints where it lies

Objects are cached one by one, under a hash of what went into them, so that editing a source recompiles that source. The
finished libraries lie in a folder of their own that is named by the hash of everything: a process that has loaded them
never sees them change. They name the folder of the torch that they were linked with, so each environment has its own,
of the same objects. Two processes that build at once take turns.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs

from hal.config import cache_folder
from hal.errors import DriverError, DriverUnavailable

from . import symbols

SOURCES = Path(__file__).parent / "src"
TORCH_NPU = "2.13.0"
"""The release whose interfaces the sources were written against."""
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=default", "-pthread")
PRECOMPILED = "ops/op.h"
"""Nearly all compile time goes into ATen's headers, which every operation includes through this one."""
KEPT_SECONDS = 14 * 24 * 3600
"""What nobody used for so long is swept from the cache."""
SHOWN_LINES = 30
LAYOUT = ("lib64", "opp", "runtime", "compiler")
"""Where ASCEND_HOME_PATH leads, torch_npu looks whether these are there."""
MARK = "hal.emulated"
"""A file beside our libraries, so that nobody takes them for an installed CANN."""


@attrs.frozen
class Library:
    """One of CANN's libraries as torch_npu loads it, by SONAME.

    Attributes:
        name: lib<name>.so.
        folder: of its sources; None for a library that only has to be found, and whose functions are in those it needs.
        needs: other libraries, built before.
        torch: whether it computes with ATen.
    """

    name: str
    folder: str | None = None
    needs: tuple[str, ...] = ("ascendcl",)
    torch: bool = False


LIBRARIES = (
    Library("ascendcl", "runtime", needs=()),
    Library("opapi", "ops", torch=True),
    Library("atb", "atb", needs=("ascendcl", "opapi"), torch=True),
    Library("nnopbase", needs=("ascendcl", "opapi")),
    *(
        Library(name)
        for name in ("acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph", "hccl", "msprofiler", "runtime")
    ),
)


@attrs.frozen
class Toolchain:
    """What the build uses of this machine. Finding it checks it."""

    torch: Path
    torch_npu: Path
    versions: str
    sources: Path = SOURCES

    @classmethod
    def find(cls, sources: Path = SOURCES) -> Toolchain:
        """Find torch and torch_npu, importing neither.

        Raises:
            DriverUnavailable: torch_npu is not installed, or is another release than the one that is emulated.
        """
        spec = importlib.util.find_spec("torch_npu")
        if spec is None or spec.origin is None:
            raise DriverUnavailable(
                "the emulated CANN needs torch_npu, which is not installed", f"pip install torch-npu=={TORCH_NPU}"
            )
        version = importlib.metadata.version("torch_npu")
        if version.partition("+")[0] != TORCH_NPU:
            raise DriverUnavailable(
                f"the emulated CANN serves torch_npu {TORCH_NPU}; this is {version}, which may call other functions",
                f"pip install torch-npu=={TORCH_NPU}",
            )
        torch = importlib.util.find_spec("torch")
        if torch is None or torch.origin is None:
            raise DriverUnavailable("the emulated CANN needs torch, which is not installed", "pip install torch")
        versions = f"torch {importlib.metadata.version('torch')}, torch_npu {version}"
        return cls(Path(torch.origin).parent, Path(spec.origin).parent, versions, sources)

    def includes(self, torch: bool) -> list[Path]:
        """Where headers are looked for."""
        acl = self.torch_npu / "include" / "third_party" / "acl" / "inc"
        hccl = self.torch_npu / "include" / "third_party" / "hccl" / "inc"
        own = [self.sources, self.sources / "ops", acl, hccl]
        return [*own, self.torch / "include"] if torch else own


def compiler() -> str:
    """The path of g++.

    Raises:
        DriverUnavailable: there is none.
    """
    found = shutil.which("g++")
    if found is None:
        raise DriverUnavailable(
            "the emulated CANN is compiled on first use, and there is no g++ on the PATH",
            "install g++ 11 or later (Debian and Ubuntu: apt install g++)",
        )
    return found


def build(sources: Path = SOURCES, cache: Path | None = None) -> Path:
    """Build whatever is not in the cache, and return a folder laid out as an installed CANN is: libraries in lib64.

    Raises:
        DriverUnavailable: torch_npu or g++ is missing, or torch_npu is not the release that is emulated.
        DriverError: a source does not compile; the error shows what the compiler said.
    """
    tools = Toolchain.find(sources)
    cache = cache or cache_folder("emulator")
    plan = Plan.of(tools)
    folder = cache / "lib" / plan.key
    if not folder.is_dir():
        gxx = compiler()
        with _locked(cache / "lock"):
            if not folder.is_dir():  # another process may have built it meanwhile
                _Builder(tools, plan, cache, gxx).run(folder)
                _sweep(cache, keep=folder)
    os.utime(folder)
    return folder


@attrs.frozen
class Source:
    """A file to compile, the library it goes to, and the hash of everything that its object depends on."""

    path: Path
    library: Library
    key: str


@attrs.frozen
class Plan:
    """All sources, and the hash of the whole build."""

    sources: tuple[Source, ...]
    key: str

    @classmethod
    def of(cls, tools: Toolchain) -> Plan:
        """Read the sources."""
        common = "\n".join((tools.versions, *_flags()))
        found = []
        for library in LIBRARIES:
            if library.folder is not None:
                for path in sorted((tools.sources / library.folder).rglob("*.cpp")):
                    texts = (each.read_bytes() for each in _closure(path, tools))
                    found.append(Source(path, library, _hash(common, *texts)))
        names = [f"{each.library.name} {each.path.relative_to(tools.sources)} {each.key}" for each in found]
        recipe = [Path(__file__).read_bytes(), Path(symbols.__file__).read_bytes()]
        return cls(tuple(found), _hash(common, str(tools.torch), *names, *recipe))


class _Builder:
    def __init__(self, tools: Toolchain, plan: Plan, cache: Path, gxx: str) -> None:
        self.tools, self.plan, self.cache, self.gxx = tools, plan, cache, gxx
        for name in ("lib", "objects", "headers"):
            (cache / name).mkdir(parents=True, exist_ok=True)

    def run(self, folder: Path) -> None:
        missing = [each for each in self.plan.sources if not self._object(each).exists()]
        sys.stderr.write("hal: building the emulated CANN, about a minute, once\n" if len(missing) > 3 else "")
        self._compile(missing)
        scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(scratch, ignore_errors=True)
        for part in LAYOUT:
            (scratch / part).mkdir(parents=True)
        try:
            self._link(scratch / "lib64")
            (scratch / "lib64" / MARK).touch()
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _object(self, source: Source) -> Path:
        return self.cache / "objects" / f"{source.path.stem}-{source.key}.o"

    def _compile(self, missing: Sequence[Source]) -> None:
        with_torch = [each for each in missing if each.library.torch]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            # The header takes as long as two sources without it; meanwhile the sources that do not want it compile.
            header = pool.submit(self._precompiled) if len(with_torch) > 2 else None
            jobs = [pool.submit(self._compile_one, each, None) for each in missing if not each.library.torch]
            precompiled = header.result() if header else self._precompiled(only_if_there=True)
            jobs += [pool.submit(self._compile_one, each, precompiled) for each in with_torch]
        _raise_first(jobs)

    def _compile_one(self, source: Source, precompiled: Path | None) -> None:
        target = self._object(source)
        before = [] if precompiled is None else ["-include", str(precompiled)]
        self._gxx(source.path, before, source.library.torch, target)

    def _gxx(self, source: Path, before: Sequence[str], torch: bool, target: Path) -> None:
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        includes = [f"-I{each}" for each in self.tools.includes(torch)]
        self._run(source, [*_flags(), *includes, *before, "-c", str(source), "-o", str(scratch)])
        scratch.replace(target)

    def _precompiled(self, only_if_there: bool = False) -> Path | None:
        """The header that g++ takes instead of reading ATen's text again; None if it would not pay to make it."""
        header = self.tools.sources / PRECOMPILED
        version = subprocess.run([self.gxx, "--version"], capture_output=True, text=True, check=True).stdout
        texts = (each.read_bytes() for each in _closure(header, self.tools))
        folders = (str(self.tools.sources), str(self.tools.torch))  # of what it includes, by path
        key = _hash(self.tools.versions, version, *folders, *_flags(), *texts)
        folder = self.cache / "headers" / key
        stand_in = folder / "op.h"  # beside which g++ looks for op.h.gch
        if (folder / "op.h.gch").exists():
            os.utime(folder)
            return stand_in
        if only_if_there:
            return None
        for old in (self.cache / "headers").iterdir():  # hundreds of megabytes each
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir()
        stand_in.write_text(f'#include "{PRECOMPILED}"\n', encoding="utf-8")
        self._gxx(stand_in, ["-x", "c++-header"], True, folder / "op.h.gch")
        return stand_in

    def _link(self, folder: Path) -> None:
        objects = {each: self._object(each) for each in self.plan.sources}
        defined = set().union(*(symbols.defined(path) for path in objects.values()))
        stubs = symbols.refusing_stubs(self.tools.torch_npu, defined)
        for library in LIBRARIES:
            parts = [path for source, path in objects.items() if source.library is library]
            if library.name in stubs:
                parts.append(self._stubs(library, stubs[library.name]))
            self._link_one(library, parts, folder)

    def _stubs(self, library: Library, text: str) -> Path:
        target = self.cache / "objects" / f"{library.name}_stubs-{_hash(text, *_flags())}.o"
        if not target.exists():
            source = target.with_suffix(".cpp")
            source.write_text(text, encoding="utf-8")
            self._gxx(source, [], False, target)
        return target

    def _link_one(self, library: Library, parts: Sequence[Path], folder: Path) -> None:
        name = f"lib{library.name}.so"
        needs = [f"-l{each}" for each in library.needs]
        torch = [f"-L{self.tools.torch / 'lib'}", f"-Wl,-rpath,{self.tools.torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        flags = ["-shared", "-pthread", f"-Wl,-soname,{name},-rpath,$ORIGIN,--no-undefined,--no-as-needed"]
        objects = [*map(str, parts), f"-L{folder}", *needs, *(torch if library.torch else [])]
        self._run(Path(name), [*flags, "-o", str(folder / name), *objects])

    def _run(self, what: Path, arguments: Sequence[str]) -> None:
        result = subprocess.run([self.gxx, *arguments], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            said = result.stderr.splitlines()
            more = [f"... and {len(said) - SHOWN_LINES} more lines"] if len(said) > SHOWN_LINES else []
            text = "\n".join([*said[:SHOWN_LINES], *more])
            raise DriverError(
                f"the emulated CANN does not build: {what.name}: g++ exited with {result.returncode}\n{text}",
                "if you changed the sources, mend them; if not, install g++ 11 or later, or report it",
            )


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *os.environ.get("EMULATED_CANN_CXXFLAGS", "").split())


INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def _closure(path: Path, tools: Toolchain) -> Iterator[Path]:
    """A source and the project's own headers that it includes, each once, in the order they are met."""
    seen, waiting = {path}, [path]
    while waiting:
        each = waiting.pop()
        yield each
        for name in INCLUDE.findall(each.read_text(encoding="utf-8")):
            for folder in (each.parent, tools.sources, tools.sources / "ops"):
                header = (folder / name).resolve()
                if header.is_file():
                    if header not in seen:
                        seen.add(header)
                        waiting.append(header)
                    break


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:20]


def _raise_first(jobs: Iterable[Future[None]]) -> None:
    errors = [error for job in jobs if (error := job.exception()) is not None]
    if errors:
        raise errors[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(cache: Path, keep: Path) -> None:
    """Remove what has not been used for long. A process that has loaded a library keeps it all the same."""
    oldest = time.time() - KEPT_SECONDS
    for each in [*(cache / "lib").iterdir(), *(cache / "objects").iterdir()]:
        if each != keep and each.stat().st_mtime < oldest:
            shutil.rmtree(each) if each.is_dir() else each.unlink()


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
