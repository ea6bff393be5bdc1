"""Loads the emulator into a process: its libraries before torch loads CUDA's, and its kernels after torch is imported.

torch loads CUDA's libraries from fixed paths, unless a library of the same name is already loaded. So no installed file
is changed. Import hooks register the kernels of packages that are imported later. This module must not import torch or
hal.
"""

from __future__ import annotations

import ctypes
from types import ModuleType

import wrapt

from .libraries import DRIVER, RUNTIME, libraries


def activate() -> None:
    """Load the emulator. This must happen before torch is imported."""
    for name in (RUNTIME, DRIVER):
        ctypes.CDLL(str(libraries() / name), mode=ctypes.RTLD_GLOBAL)
    wrapt.register_post_import_hook(_torch, "torch")
    wrapt.register_post_import_hook(_probe, "hal.backends.cuda.probe")
    wrapt.register_post_import_hook(_triton, "triton.runtime.interpreter")
    wrapt.register_post_import_hook(_flashinfer, "flashinfer")
    wrapt.register_post_import_hook(_inductors_launches, "torch._inductor.runtime.triton_heuristics")
    wrapt.register_post_import_hook(_inductors_functions, "torch._inductor.runtime.triton_helpers")


def _torch(torch: ModuleType) -> None:
    from .kernels import flash_attention, of_torch

    of_torch.register()
    flash_attention.register()


def _triton(interpreter: ModuleType) -> None:
    from .kernels import of_triton

    of_triton.register(interpreter)


def _flashinfer(library: ModuleType) -> None:
    from .kernels import of_flashinfer

    of_flashinfer.register()


def _inductors_launches(heuristics: ModuleType) -> None:
    from .kernels import of_inductor

    of_inductor.register_launches(heuristics)


def _inductors_functions(helpers: ModuleType) -> None:
    from .kernels import of_inductor

    of_inductor.register_functions(helpers)


def _probe(module: ModuleType) -> None:
    """Make the driver's probe look for device files in a folder of the emulator, since this machine has none."""
    devices = libraries() / "dev"
    devices.mkdir(exist_ok=True)
    (devices / "nvidia0").touch()
    function = module.probe
    function.__defaults__ = tuple(devices if each == module.DEVICES else each for each in function.__defaults__)
