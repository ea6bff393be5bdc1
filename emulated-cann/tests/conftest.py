"""Fixtures for tests of the emulated CANN, and its activation for torch_npu in the process of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# These are read when torch is imported, or before. Workers of pytest-xdist use the cores, so each has one thread, and
# Inductor's workers would only import torch.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest

pytest.register_assert_rewrite("support")
pytest_plugins = ["helpers.thorough_plugin"]

from emulated_cann import Unavailable, activate, options  # noqa: E402
from emulated_cann.library_cache import CACHE_DIR, cache_folder  # noqa: E402

# npugraph_ex has the attention write into a given output and return it. torch reports that as an error if CI is set in
# the environment, and as a warning otherwise. In these tests and their subprocesses it is always a warning.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "0"
# The libraries are compiled once, for processes with another home folder, too.
os.environ.setdefault(CACHE_DIR, str(cache_folder()))

MISSING = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Activate the emulated CANN for this process."""
    try:
        if sys.platform != "linux":
            raise Unavailable(f"the emulated CANN needs Linux, and this is {sys.platform}", "use Linux")
        activate(devices=2)
    except Unavailable as error:
        config.stash[MISSING] = str(error)
        return
    from torch._functorch import config as functorch_config

    functorch_config.error_on_custom_op_aliasing = False


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip each file if the emulated CANN cannot run here."""
    return Skipped.from_parent(parent, path=module_path) if MISSING in parent.config.stash else None


class Skipped(pytest.Module):
    """A file that cannot be imported without the emulated CANN."""

    def collect(self) -> Iterator[pytest.Item]:
        raise pytest.skip.Exception(self.config.stash[MISSING], allow_module_level=True)


@pytest.fixture(autouse=True)
def _on_the_default_stream() -> Iterator[None]:
    """Reset the current streams: if the end of a capture fails, torch_npu leaves its stream current.

    Streams come from a pool of 32, so a later test could get the same stream as a side stream and deadlock on it.
    """
    yield
    if "torch_npu" not in sys.modules:
        return  # No test of this process has used a stream yet.
    import torch

    for device in (1, 0):
        with torch.npu.device(device):
            torch.npu.set_stream(torch.npu.default_stream())


@pytest.fixture
def internal_formats() -> Iterator[None]:
    """Allow internal formats; otherwise torch_npu silently ignores casts to FRACTAL_NZ."""
    import torch

    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Any]]:
    """Return two ranks of a communicator, the devices of this process."""
    from support.device_ranks import hccl, two_ranks  # needs the emulated CANN

    found = two_ranks()
    yield found
    for each in found:
        each.destroy()
    hccl.cann.aclrtSetDevice(0)


@pytest.fixture
def clean() -> dict[str, str]:
    """Return the environment of a process without the emulated CANN."""
    ours = {options.SWITCH, options.OPTIONS, "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    return {**environ, "PYTHONSAFEPATH": "1"}  # An installed command does not have the current folder on the path.
