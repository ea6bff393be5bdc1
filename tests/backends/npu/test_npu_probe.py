"""Tests for the NPU driver's probe: it names what is missing, with a remedy, and does not import torch_npu."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hal.backends.npu import emulation
from hal.backends.npu.autoload import autoload
from hal.backends.npu.driver import NpuDriver, probe, probe_emulated
from hal.backends.npu.installed_cann import installed_cann
from hal.backends.npu.torch_build import install_command

from hal.config import environment_options
from hal.errors import ConfigError, DriverUnavailable

CUDA_BUILD = "CUDA_BUILD_PYTHON"
"""The variable that names the Python of an environment with hal, torch_npu and a build of torch for CUDA."""

pytestmark = pytest.mark.skipif(
    emulation.is_active() or installed_cann({}) is not None,
    reason="a real or emulated CANN is installed, which the probe always finds",
)
needs_emulated_cann = pytest.mark.skipif(not emulation.is_installed(), reason="emulated_cann is not installed")


def installed(name: str) -> object:
    return name


def missing(name: str) -> None:
    return None


@pytest.fixture
def cann(tmp_path: Path) -> dict[str, str]:
    """Return the environment of an installed CANN."""
    (tmp_path / "cann" / "lib64").mkdir(parents=True)
    (tmp_path / "cann" / "lib64" / "libascendcl.so").touch()
    return {"ASCEND_HOME_PATH": str(tmp_path / "cann")}


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return a folder with the device files of two NPUs."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager", "davincitty"):
        (folder / name).touch()
    return folder


def test_torch_npu_is_missing(cann: dict[str, str], devices: Path) -> None:
    found = probe(cann, devices, missing)
    assert not found.available
    assert found.reason == "torch_npu is not installed"
    assert "pip install torch-npu" in found.hint
    assert "HAL_NPU_EMULATOR=1" in found.hint


def test_cann_is_missing(tmp_path: Path, devices: Path) -> None:
    for environ in ({}, {"ASCEND_HOME_PATH": str(tmp_path / "nowhere"), "LD_LIBRARY_PATH": f":{tmp_path}"}):
        found = probe(environ, devices, installed)
        assert not found.available
        assert "no CANN" in found.reason
        assert "source its set_env.sh" in found.hint


@pytest.mark.parametrize(
    ("version", "platform", "refused"),
    [
        ("2.13.0+cpu", "", ""),
        ("2.13.0", "", ""),
        ("2.13.0+cu130", "cuda: Optional[str] = '13.0'", "torch 2.13.0+cu130 is a build for CUDA 13.0"),
        ("2.12.1+rocm7.0", "hip: Optional[str] = '7.0.1'", "torch 2.12.1+rocm7.0 is a build for ROCm 7.0.1"),
    ],
)
def test_the_build_of_torch(
    version: str, platform: str, refused: str, tmp_path: Path, cann: dict[str, str], devices: Path
) -> None:
    """torch_npu aborts the process beside libraries for CUDA, whether CANN is real or emulated."""
    (tmp_path / "version.py").write_text(
        f"__version__ = '{version}'\n{platform or 'cuda: Optional[str] = None'}\ngit_version = 'cf30153c'\n",
        encoding="utf-8",
    )

    def find_spec(name: str) -> object:
        return ModuleSpec(name, None, origin=str(tmp_path / "__init__.py"))

    for found in (probe(cann, devices, find_spec), probe_emulated(find_spec, lambda name: f"/usr/bin/{name}")):
        assert found.available == (not refused)
        assert refused in found.reason
        assert not refused or f"pip install torch=={version.partition('+')[0]}+cpu --index-url" in found.hint


@pytest.mark.skipif(CUDA_BUILD not in os.environ, reason=f"{CUDA_BUILD} names no environment with torch for CUDA")
@pytest.mark.parametrize(
    "command",
    [
        "-m hal generate {checkpoint} --backend npu --emulate --dtype float16 --prompt a",
        "-m hal generate {checkpoint} --backend npu --emulate --tensor-parallel 2 --prompt a",
        "-m hal generate {checkpoint} --backend npu --prompt a",
        "-m hal bench decode {checkpoint} --backend npu --emulate --dtype float16",
        "-m hal compare {checkpoint} --backend cpu --backend npu --emulate --dtype float16 --prompt a",
        "-m hal explain {checkpoint} --backend npu --emulate --dtype float16",
        "-m hal emulate -- python -c 'import torch_npu'",
        "-m hal doctor --backend npu --emulate",
        "-m hal doctor --backend npu",
        """-c "import hal; hal.open({'backend': 'npu', 'options': {'emulator': True}})" """,
        """-c "import hal; hal.open('npu')" """,
        """-c "import emulated_cann; emulated_cann.activate()" """,
    ],
)
def test_a_build_for_cuda_is_refused_before_it_aborts(command: str, trained: Path, tmp_path: Path) -> None:
    arguments = [str(trained) if each == "{checkpoint}" else each for each in shlex.split(command)]
    result = subprocess.run(
        [os.environ[CUDA_BUILD], *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode in (1, 2), result
    text = " ".join((result.stdout + result.stderr).split())
    assert "is a build for CUDA 13.0, beside which torch_npu aborts the process" in text
    assert install_command("2.13.0") in text
    assert "Duplicated key" not in text


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"])
def test_cann_is_found_by(variable: str, cann: dict[str, str], devices: Path) -> None:
    (home,) = cann.values()
    place = f"/usr/lib:{home}/lib64" if variable == "LD_LIBRARY_PATH" else home
    found = probe({variable: place}, devices, installed)
    assert found.available
    assert found.reason == "CANN and 2 NPUs"


@needs_emulated_cann
def test_the_emulated_cann_is_not_taken_for_an_installed_one(tmp_path: Path, cann: dict[str, str]) -> None:
    from emulated_cann.build import MARK

    (tmp_path / "cann" / "lib64" / MARK).touch()
    assert "no CANN" in probe(cann, tmp_path, installed).reason


@pytest.mark.parametrize("there", [(), ("davinci_manager", "davincitty")])
def test_an_npu_is_missing(there: tuple[str, ...], cann: dict[str, str], tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).touch()
    found = probe(cann, tmp_path, installed)
    assert not found.available
    assert found.reason == f"CANN is installed, but no NPU was found: {tmp_path}/davinci0 does not exist"
    assert "install the Ascend driver; in a container, pass the devices" in found.hint


@pytest.mark.parametrize(
    ("closed", "named"),
    [
        ({"davinci0", "davinci1"}, "davinci0"),
        ({"davinci0", "davinci1", "davinci_manager"}, "davinci0"),
        ({"davinci_manager"}, "davinci_manager"),
    ],
)
def test_the_permission_is_missing(closed: set[str], named: str, cann: dict[str, str], devices: Path) -> None:
    found = probe(cann, devices, installed, lambda path, mode: path.name not in closed)
    assert not found.available
    assert found.reason == f"no permission to use {devices / named}"
    assert "HwHiAiUser" in found.hint


def test_one_npu_that_may_be_used_is_enough(cann: dict[str, str], devices: Path) -> None:
    found = probe(cann, devices, installed, lambda path, mode: path.name != "davinci0")
    assert found.available
    assert found.reason == "CANN and 1 NPU"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can open every file")
def test_the_permission_is_that_of_the_files(cann: dict[str, str], devices: Path) -> None:
    (devices / "davinci_manager").chmod(0)
    assert probe(cann, devices, installed).reason == f"no permission to use {devices}/davinci_manager"


@pytest.mark.parametrize("text", ["", "0", "off", "false"])
def test_a_switch_that_is_off(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch affects the driver, activation by the environment, and the import of torch."""
    monkeypatch.setenv("HAL_NPU_EMULATOR", text)
    emulation.activate_from_environment()
    autoload()
    assert not emulation.is_active()
    assert NpuDriver()._read(environment_options("npu")).emulator == "off"


@pytest.mark.parametrize(("text", "emulator"), [("1", "on"), ("on", "on"), ("true", "on"), ("force", "force")])
def test_a_switch_that_is_on(text: str, emulator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(emulation, "activate", lambda *, force, **options: asked.append(force))
    monkeypatch.setenv("HAL_NPU_EMULATOR", text)
    emulation.activate_from_environment()
    autoload()
    assert asked == [emulator == "force"] * 2
    assert NpuDriver()._read(environment_options("npu")).emulator == emulator


@pytest.mark.parametrize("text", ["yes", "2", "ON", "[]"])
def test_a_switch_that_is_neither(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_NPU_EMULATOR", text)
    for read in (autoload, lambda: NpuDriver()._read(environment_options("npu"))):
        with pytest.raises(ConfigError, match="unknown value"):
            read()


@needs_emulated_cann
def test_what_an_emulated_npu_needs() -> None:
    assert probe_emulated(installed, lambda name: f"/usr/bin/{name}").available
    assert "torch_npu is not installed" in probe_emulated(missing).reason
    no_compiler = probe_emulated(installed, lambda name: None)
    assert "there is no g++ on the PATH" in no_compiler.reason
    assert "install g++" in no_compiler.hint


def test_without_the_emulated_cann(cann: dict[str, str], devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "emulated_cann", None)
    assert probe(cann, devices, installed).reason == "CANN and 2 NPUs"
    driver = NpuDriver()
    assert not driver.probe_for({"emulator": True}).available
    with pytest.raises(DriverUnavailable, match="requires the package emulated-cann, which is not installed") as caught:
        driver.open({"emulator": True})
    assert "pip install ./emulated-cann" in caught.value.remedy
    program = "import sys; sys.modules['emulated_cann'] = None; from hal.cli import main; main()"
    for given, status in ((["emulate", "--", "true"], 2), (["emulate", "--help"], 2), (["--help"], 0)):
        ran = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True, check=False)
        assert ran.returncode == status, ran.stderr
        assert status == 0 or "pip install ./emulated-cann" in ran.stderr


@needs_emulated_cann
def test_the_emulated_cann_is_kept_in_hals_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EMULATED_CANN_CACHE_DIR", raising=False)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    emulation.keep_in_cache()
    assert os.environ["EMULATED_CANN_CACHE_DIR"] == str(tmp_path / "emulator")


def test_the_option_decides_what_is_probed() -> None:
    driver = NpuDriver()
    for off in ({}, {"emulator": False}, {"emulator": "off"}, {"emulator": 0}, {"emulator": ""}):
        assert driver.probe_for(off) == driver.probe(), off
    for on in ({"emulator": True}, {"emulator": 1}, {"emulator": "on"}, {"emulator": "force"}):
        assert driver.probe_for(on) == probe_emulated(), on
    with pytest.raises(ConfigError, match="unknown value 'onn'"):
        driver.probe_for({"emulator": "onn"})


def test_nothing_of_torch_npu_is_imported() -> None:
    program = """
import sys
from hal.drivers.registry import candidates
found = {each.name: each.probe for each in candidates()}
assert not found["npu"].available, found
print([name for name in sys.modules if name.partition(".")[0] in ("torch_npu", "torchair")])
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HAL_")}
    result = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


@pytest.mark.parametrize("text", ["first", "", "-1", "1.0"])
def test_a_local_rank_that_is_no_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", text)
    with pytest.raises(ConfigError, match=f"the environment variable LOCAL_RANK is '{text}', which is no number"):
        NpuDriver().probe_for({})
    assert NpuDriver()._read({"device": 1}).device == 1
