"""Tests for the CUDA driver without a GPU: reasons, remedies, and functions that do not need a GPU."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from hal.backends.cuda.driver import CudaDriver
from hal.backends.cuda.graph import nbytes_spanned, weakly
from hal.backends.cuda.libraries import CAPTURE_SIZES, limits
from hal.backends.cuda.probe import INSTALL, probe

import hal
from hal.cli import main
from hal.drivers.registry import candidates, load_driver
from hal.errors import ConfigError, DriverUnavailable

cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
no_gpu = pytest.mark.skipif(probe().available, reason="there is a GPU")


def test_it_is_found_and_stands_before_the_cpu() -> None:
    assert isinstance(load_driver("cuda"), CudaDriver)
    order = [each.name for each in candidates()]
    assert order.index("npu") < order.index("cuda") < order.index("cpu")


@no_gpu
def test_choosing_it_gives_the_reason_and_the_remedy() -> None:
    found = probe()
    with pytest.raises(DriverUnavailable) as caught:
        hal.open("cuda")
    assert caught.value.problem == f"the driver cuda cannot run here: {found.reason}"
    assert caught.value.remedy == found.hint


@cpu_build
def test_a_torch_for_the_cpu_is_told_from_one_for_cuda() -> None:
    with pytest.raises(DriverUnavailable, match=r"torch \S+ is a build for the CPU only") as caught:
        hal.open("cuda")
    assert INSTALL in caught.value.remedy
    # Opening reports the same if the probe is wrong.
    with pytest.raises(DriverUnavailable, match="cannot use CUDA: Torch not compiled with CUDA enabled") as caught:
        CudaDriver().open({})
    assert INSTALL in caught.value.remedy


@no_gpu
@pytest.mark.parametrize("name", ["backends", "ops"])
def test_the_command_says_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    found, result = probe(), CliRunner().invoke(main, [name])
    assert result.exit_code == 0, result.output
    assert found.reason in result.output
    assert found.hint in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_index": -1}, "device_index must be at least 0"),
        ({"device": 1}, "did you mean 'device_index'"),
        ({"kernels": {"rms_norm": "cutlass"}}, "cutlass"),
        ({"kernels": ["torch"]}, "kernels"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CudaDriver().open(options)


def test_limits_by_compute_capability() -> None:
    for capability in ((8, 0), (8, 6), (9, 0), (12, 0)):
        assert limits(capability, pages=False).dtypes == (torch.bfloat16, torch.float16, torch.float32)
    assert limits((7, 5), pages=False).dtypes == (torch.float16, torch.float32)
    assert limits((9, 0), pages=True).block_sizes[0] == 256
    assert limits((9, 0), pages=False).block_sizes == ()
    assert CAPTURE_SIZES[-1] == 256
    assert list(CAPTURE_SIZES) == sorted(set(CAPTURE_SIZES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_weak_tensor_is_the_same_memory_and_does_not_hold_it(dtype: torch.dtype) -> None:
    whole = torch.arange(60).to(dtype).view(5, 12)
    for strong in (whole, whole[1:, 3:7], whole.t(), whole[2, 2], whole[:0], whole[::2, ::3]):
        weak = weakly(strong)
        assert (weak.shape, weak.stride(), weak.dtype) == (strong.shape, strong.stride(), strong.dtype)
        assert torch.equal(weak, strong)
        assert weak.numel() == 0 or weak.data_ptr() == strong.data_ptr()
        assert nbytes_spanned(strong) <= whole.nbytes
    holders = torch._C._storage_Use_Count(whole.untyped_storage()._cdata)
    weak = weakly(whole)
    assert torch._C._storage_Use_Count(whole.untyped_storage()._cdata) == holders
    whole[3, 3] = 77
    assert weak[3, 3].item() == 77
