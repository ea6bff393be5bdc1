"""Compilation of the emulated CANN with the system's C++ compiler, with a cache.

``emulated-cann build`` builds what changed, and prints the folder.

Ninja compiles changed sources in a folder of the cache. The libraries are a cache entry, keyed by the hash of all
inputs, so loaded libraries never change. They contain the path of the torch that they are linked with, so each
environment has its own libraries, from shared objects. Concurrent builds wait for each other.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import attrs

from . import ninja_build, symbols
from .errors import Unavailable
from .library_cache import CACHE_DIR, LibraryCache, cache_folder, content_key
from .ninja_build import Library, Recipe
from .torch_build import check_build, install_command

SOURCES = Path(__file__).parent / "src"
TORCH_NPU = "2.13.0"
"""The release whose interfaces the sources emulate."""
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=default", "-pthread")
KEPT_SECONDS = 14 * 24 * 3600
"""Entries unused for this long are deleted from the cache."""
LAYOUT = ("lib64", "opp", "runtime", "compiler")
"""Folders that torch_npu requires in ASCEND_HOME_PATH."""
HOME = "home/"
"""The folder of the sources whose files an installed CANN has in ASCEND_HOME_PATH: programs, pyACL, a header."""
MARK = "cann.emulated"
"""A file next to the libraries that distinguishes them from an installed CANN."""


LIBRARIES = (
    Library("ascendcl", "runtime", needs=()),
    Library("hccl", "hccl"),
    Library("opapi", "ops", needs=("ascendcl", "hccl"), torch=True),
    Library("atb", "atb", needs=("ascendcl", "opapi"), torch=True),
    Library("nnopbase", needs=("ascendcl", "opapi")),
    *(Library(name) for name in ("acl_op_compiler", "acl_tdt_channel", "ascend_protobuf", "fmk_parser", "ge_runner")),
    *(Library(name) for name in ("graph", "msprofiler", "runtime")),
    Library("hcomm", needs=("ascendcl", "hccl")),
)


@attrs.frozen
class Toolchain:
    """The installed packages that the build uses."""

    torch: Path
    torch_npu: Path
    versions: str
    sources: Path = SOURCES

    @classmethod
    def find(cls, sources: Path = SOURCES) -> Toolchain:
        """Find torch and torch_npu without importing them.

        Raises:
            Unavailable: torch_npu is not installed, is not the emulated release, or cannot be imported beside the
                installed build of torch.
        """
        spec = importlib.util.find_spec("torch_npu")
        if spec is None or spec.origin is None:
            raise Unavailable(
                "the emulated CANN requires torch_npu, which is not installed",
                f"pip install torch-npu=={TORCH_NPU} in a separate environment with torch's CPU build",
            )
        version = importlib.metadata.version("torch_npu")
        if version.partition("+")[0] != TORCH_NPU:
            raise Unavailable(
                f"the emulated CANN supports torch_npu {TORCH_NPU}, and {version} is installed",
                f"pip install torch-npu=={TORCH_NPU}",
            )
        torch = importlib.util.find_spec("torch")
        if torch is None or torch.origin is None:
            raise Unavailable("the emulated CANN requires torch, which is not installed", install_command(TORCH_NPU))
        folder, release = Path(torch.origin).parent, importlib.metadata.version("torch")
        check_build(folder, release)
        return cls(folder, Path(spec.origin).parent, f"torch {release}, torch_npu {version}", sources)


def compiler(which: Callable[[str], str | None] = shutil.which) -> list[str]:
    """Return ``CXX`` with its arguments, or g++; the program is an absolute path.

    Raises:
        Unavailable: it is not on the PATH.
    """
    program, *arguments = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    found = which(program)
    if found is None:
        raise Unavailable(
            f"a compiler is needed for the emulated CANN, but there is no {program} on the PATH",
            "install g++ 11 or later (Debian and Ubuntu: apt install g++), or set CXX to another compiler",
        )
    return [found, *arguments]


def compiler_key(compiler: Path) -> str:
    """Return a hash of a compiler's path, size and modification time, which an upgrade changes."""
    found = compiler.stat()
    return content_key(str(compiler.resolve()), str(found.st_size), str(found.st_mtime_ns))[:8]


def compiler_flags() -> tuple[str, ...]:
    """Return the compiler's flags: ours, then those of the variable ``EMULATED_CANN_CXXFLAGS``."""
    return (*FLAGS, *os.environ.get("EMULATED_CANN_CXXFLAGS", "").split())


def build(sources: Path = SOURCES, cache: Path | None = None) -> Path:
    """Build the libraries if they are not cached; return a folder with the layout of an installed CANN.

    Raises:
        Unavailable: torch_npu, the compiler, ninja or nm is missing, torch_npu is not the emulated release or
            cannot be imported beside the installed build of torch, or the cache cannot be written or is writable by
            another user.
        EmulationError: a source does not compile; the error contains the compiler's output.
    """
    tools = Toolchain.find(sources)
    kept = LibraryCache(cache or cache_folder(), KEPT_SECONDS)
    flags = compiler_flags()
    # Those of an installed package, with which a checkout then shares its libraries.
    everything = (each for each in sorted(sources.rglob("*")) if each.is_file())
    files = (each for each in everything if each.suffix != ".pyc" and not each.name.startswith("."))
    texts = {str(each.relative_to(sources)): each.read_bytes() for each in files}
    recipe = (Path(each).read_bytes() for each in (__file__, ninja_build.__file__, symbols.__file__))
    named = (part for item in texts.items() for part in item)
    key = content_key(tools.versions, str(tools.torch), *flags, *recipe, *named)
    try:
        try:
            chosen = compiler()
        except Unavailable:
            if (found := kept.latest(f"{key}-")) is None:
                raise
            return found
        made_by = compiler_key(Path(chosen[0]))
        work = f"build-{content_key(tools.versions, *flags, *chosen, made_by)}"
        plan = Recipe(texts, sources, LIBRARIES, chosen, flags, tools.torch, tools.torch_npu)
        return kept.get_or_put(f"{key}-{made_by}", lambda folder: _make(plan, kept, work, folder))
    except OSError as error:
        raise Unavailable(
            f"the emulated CANN cannot be stored in {kept.folder}: {error}", f"set {CACHE_DIR} to a writable folder"
        ) from error


def _make(plan: Recipe, cache: LibraryCache, work: str, folder: Path) -> None:
    """Build in the cache's workspace, and copy the libraries to the folder of an entry."""
    for part in LAYOUT[1:]:
        (folder / part).mkdir(parents=True)
    for other in cache.folder.glob("build-*/pch/*.gch"):  # hundreds of megabytes each
        if work not in other.parts:
            other.unlink()
    with cache.workspace(work) as workspace:
        libraries = ninja_build.build_libraries(plan, workspace)
        (folder / LAYOUT[0]).mkdir()
        for library in plan.libraries:
            name = f"lib{library.name}.so"
            shutil.copyfile(libraries / name, folder / LAYOUT[0] / name)
    for each in plan.sources:
        if each.startswith(HOME):
            target = folder / each.removeprefix(HOME)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(plan.sources[each])
            target.chmod(0o755 if target.parent.name == "bin" else 0o644)
    (folder / LAYOUT[0] / MARK).touch()
