"""hal on emulated processors: without AVX-512, as most computers have, and of Arm."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hal.backends.cpu.native import compiler, prebuilt, processor
from hal.backends.cpu.native.compiler import sources_key
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough
from safetensors.torch import load_file

import hal
from hal.config import CompileCache, cache_folder
from hal.quantize.quantize_checkpoint import quantize_checkpoint

TOKENS = list(range(5, 45))
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}
"""The greatest difference of logits from those of this processor in float32, as a share of the greatest logit."""
SCHEMES = ("w8a8_dynamic", "w8a16", "w4a16")

PROGRAM = """
import platform, sys
import torch, hal
from safetensors.torch import save_file
from hal.backends.cpu.native.processor import processor_flags
from hal.backends.cpu import capabilities, packing
from hal.doctor.checks import checks
from hal.nn import WeightUse
from hal.ops.forms import Form

found, instructions, *runs = sys.argv[1:]
if platform.machine() == "x86_64":
    assert not any(each.startswith("avx512") for each in processor_flags())
    assert capabilities.packs(torch.float32) and not capabilities.packs(torch.bfloat16)
packing.SAMPLE_BYTES, packing.MANY_ROWS = 1 << 20, 65  # what is measured here decides nothing
logits = {}
for run in runs:
    path, dtype = run.rsplit(":", 1)
    compilation = {"compiler": "graph", "capture_sizes": [1]}
    backend = hal.open({"backend": "cpu", "dtype": dtype, "options": {"native": True}, "compilation": compilation})
    use = WeightUse("linear", backend.limits.dtypes[0], Form("int8"))
    described = backend.describe_kernel(torch.ones(1, 64, dtype=torch.int8), use)
    assert described.startswith(f"C++ ({instructions}, "), described
    for name, check in checks(backend) if dtype == "float32" else ():
        print(name, check())
    runner = hal.Runner(hal.load_model(path, backend), backend)
    tokens, steps = list(range(5, 45)), []
    for start, stop in ((0, 38), (38, 39), (39, 40)):
        batch = runner.batch([tokens[start:stop]], [[1, 2, 3]], cached=[start])
        steps.append(runner.step(batch).logits.float().clone())
    logits[run] = torch.cat(steps)
save_file(logits, found)
"""

WITHOUT_COMPILER = """
import os
from pathlib import Path
from hal.backends.cpu.native import build, prebuilt, processor
from hal.errors import DriverUnavailable

folder, sys.executable = os.environ["PREBUILT"].split(":")
prebuilt.PREBUILT, os.environ["PATH"] = Path(folder), ""
os.environ["HAL_CACHE_DIR"] = str(Path(sys.executable).parent)
build.load.cache_clear()
options = {"native": True}
print(hal.open({"backend": "cpu", "options": options}).kernels["rms_norm"].__self__.named())
features = processor.processor_flags
for flags in (features, lambda: frozenset(processor.features_of("x86_64", "amx"))):
    processor.processor_flags = flags
    try:
        hal.open({"backend": "cpu", "options": {**options, "instructions": "avx512"}})
    except DriverUnavailable as error:
        print(error)
"""
"""What follows in a process for which PREBUILT names a folder of libraries, and a Python for its children."""


def emulating(processor: str) -> list[str]:
    """Return the command of Python on a processor of qemu's."""
    if processor == "neoverse-n1":
        if "ARM_PYTHON" not in os.environ:
            pytest.skip("ARM_PYTHON names no Python for Arm: see make test-processors")
        return [os.environ["ARM_PYTHON"]]
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64, of Debian's qemu-user, is not installed; .ci/run installs it")
    return [emulator, "-cpu", processor, sys.executable]


def output_of(command: Sequence[str], **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX and AVX-512 are parts of x86 processors")
def test_the_compiler_is_told_what_an_emulated_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system lists the features of the real one, and the processor itself says what it has."""
    features = ("amx_fp16", "amx_tile", "avx512_4vnniw", "avx512_fp16")
    lacks = [name for name in features if not torch.cpu.get_capabilities()[name]]
    assert lacks
    monkeypatch.setattr(processor, "processor_line", lambda: f"flags : made_up sse2 {' '.join(lacks)}")
    assert processor.processor_flags() == {"made_up", "sse2"}
    of_compiler = {"amx_fp16": "-mno-amx-fp16", "amx_tile": "-mno-amx-tile"}
    of_compiler |= {"avx512_4vnniw": "-mno-avx5124vnniw", "avx512_fp16": "-mno-avx512fp16"}
    assert processor.native_flags(None)[1:] == tuple(of_compiler[name] for name in lacks)


@thorough(PROCESSES)
@thorough(EXHAUSTIVE, r"\[(Nehalem|neoverse|Haswell, others)")
@pytest.mark.parametrize(
    ("processor", "instructions", "dtypes", "schemes"),
    [
        ("Haswell", "AVX2", ["float32", "bfloat16"], ["w8a8_dynamic"]),
        ("Haswell", "AVX2", ["float16"], ["w8a16", "w4a16"]),
        ("Nehalem", "SSE4", ["bfloat16", "float16"], SCHEMES),
        ("neoverse-n1", "NEON", ["float32", "bfloat16", "float16"], SCHEMES),
    ],
    ids=["Haswell", "Haswell, others", "Nehalem", "neoverse-n1"],
)
def test_an_emulated_processor(
    processor: str, instructions: str, dtypes: Sequence[str], schemes: Sequence[str], trained: Path, tmp_path: Path
) -> None:
    """Of prebuilt libraries that for AVX-512 is not chosen; where Haswell claims AVX-512, an error names it."""
    command = emulating(processor)
    python, libraries = tmp_path / "python", prebuilt_libraries() if processor == "Haswell" else None
    python.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')  # a child would run on the real processor
    python.chmod(0o755)
    runs = [(trained, dtype) for dtype in dtypes]
    for scheme in schemes:
        quantize_checkpoint(trained, tmp_path / scheme, scheme, group_size=64 if scheme == "w4a16" else None)
        runs.append((tmp_path / scheme, "bfloat16"))
    names, found = [f"{path}:{dtype}" for path, dtype in runs], tmp_path / "logits.safetensors"
    program = PROGRAM if libraries is None else PROGRAM + WITHOUT_COMPILER
    said = output_of([*command, "-c", program, str(found), instructions, *names], PREBUILT=f"{libraries}:{python}")
    logits = load_file(found)
    for name, (path, dtype) in zip(names, runs, strict=True):
        backend = hal.open({"backend": "cpu", "dtype": "float32"})
        runner = hal.Runner(hal.load_model(path, backend), backend)
        expected = runner.step(runner.batch([TOKENS], [[1, 2, 3]]), rows=torch.tensor([37, 38, 39])).logits
        error = (logits[name] - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[dtype], f"{name}: {error}"
    if libraries is not None:
        chosen, lacking, _, claimed, _ = said.splitlines()[-5:]
        assert chosen == "C++ (prebuilt for avx2)"
        assert "instructions is avx512, but this processor, x86_64, has no avx512f or avx512bw" in lacking
        assert "kernels of the cpu driver for SSE4, AVX2, AVX-512 end in SIGILL" in claimed


def prebuilt_libraries() -> Path:
    """Return a folder of libraries, which the cache of the driver's kernels keeps for later runs.

    That for AVX-512, which nothing computes with, is compiled without optimization.
    """

    def made(folder: Path) -> None:
        (avx2,) = prebuilt.build(folder, ["avx2"])
        flags = ["-O0" if each == "-O3" else each for each in compiler.FLAGS]
        flags += processor.portable_flags("x86_64", "avx512")
        compiler.compile_library(avx2.with_name(avx2.name.replace("avx2", "avx512")), flags)

    return CompileCache(cache_folder("cpu")).get_or_put(f"prebuilt-{sources_key()}", made)


CLAIMED = """
import sys, torch, hal
from hal.backends.cpu import packing
found = packing.packs(torch.bfloat16), packing.product_dtype(torch.bfloat16)
assert found == (False, torch.float32), found
packing.product_dtype = lambda dtype: dtype
x, weight = torch.randn(5, 64).bfloat16(), torch.randn(96, 64).bfloat16()
torch.testing.assert_close(packing.linear(x, weight), (x.float() @ weight.float().t()).bfloat16())
packing.packs = lambda dtype: True
packing.kept = lambda key, measure: measure()
try:
    backend = hal.open({"backend": "cpu", "dtype": "bfloat16", "options": {"native": False}})
    hal.load_model(sys.argv[1], backend)
except hal.errors.DriverUnavailable as error:
    print(error)
"""


@thorough(PROCESSES)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's limit of instructions is one of x86 processors")
def test_bfloat16_claimed_where_onednn_refuses_it(trained: Path) -> None:
    """Products are computed by torch, and packing ends in an error that names the dtype."""
    error = output_of([sys.executable, "-c", CLAIMED, str(trained)], ONEDNN_MAX_CPU_ISA="AVX2")
    assert "pack weights of torch.bfloat16, refuses one" in error
    assert "remedy: set the driver's option pack_weights to false" in error


@thorough(EXHAUSTIVE)
def test_the_emulated_cann_is_compiled_for_arm() -> None:
    from emulated_cann.build import LIBRARIES

    built = output_of([*emulating("neoverse-n1"), "-m", "emulated_cann.command", "build"])
    libraries = {path.name: path.read_bytes() for path in Path(built.strip(), "lib64").glob("*.so")}
    assert set(libraries) == {f"lib{each.name}.so" for each in LIBRARIES}
    of_arm = (183).to_bytes(2, "little")
    assert all(each[18:20] == of_arm for each in libraries.values())


@thorough(EXHAUSTIVE)
def test_an_emulated_npu_on_arm(trained: Path) -> None:
    from emulated_cann.build import TORCH_NPU

    python = emulating("neoverse-n1")
    release = output_of([*python, "-c", "from importlib.metadata import version; print(version('torch'))"]).strip()
    if not release.startswith(f"{TORCH_NPU.rpartition('.')[0]}."):
        pytest.skip(f"torch_npu {TORCH_NPU} needs that release of torch, and pip found {release} as CPU build for Arm")
    command = [*python, "-m", "hal", "generate", str(trained), "--dtype", "float16", "--greedy"]
    command += ["--max-new-tokens", "8", "--prompt", "def read_lines(path):", "--backend"]
    assert output_of([*command, "npu", "--emulate"]) == output_of([*command, "cpu"])
