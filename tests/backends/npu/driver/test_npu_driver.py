"""Tests for the NPU driver: options, hardware generations, and the option for an emulated NPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch_npu
from hal.backends.npu import soc
from hal.backends.npu.backend import NpuBackend
from hal.backends.npu.driver import NpuDriver
from hal.backends.npu.installed_cann import installed_cann
from hal.backends.npu.options import NpuOptions
from helpers.npu import processes
from helpers.thorough import PROCESSES, thorough

import hal
from hal import ops
from hal.errors import ConfigError, DriverError, DriverUnavailable
from hal.version import API_VERSION

Opened = Callable[..., NpuBackend]

ON_A_SOC = """
import hal
import torch
from hal.errors import ConfigError, HalError

def opened(**config):
    machine = {"emulator": True, "emulator_options": {"soc": %r}, **config.pop("options", {})}
    return hal.open({"backend": "npu", "options": machine, **config})

def refused(**config):
    try:
        opened(**config)
    except HalError as error:
        return f"{type(error).__name__}: {error.problem} | {error.remedy}"
    raise AssertionError(f"{config} was taken")

%s
"""


def on_a_soc(name: str, program: str, **environ: str) -> str:
    return processes.python("-c", ON_A_SOC % (name, program), **environ).stdout


class TestOptions:
    def test_defaults(self, npu: Opened) -> None:
        backend = npu()
        assert backend.options == NpuOptions(emulator="on", emulator_options=backend.options.emulator_options)
        assert backend.device.torch == torch.device("npu", 0)
        assert backend.device.name == "Ascend910B3 (A2, emulated)"
        assert backend.compilers == ("eager", "graph", "npugraph_ex", "piecewise", "piecewise_eager")
        assert backend.limits.block_sizes == soc.BLOCK_SIZES
        assert backend.limits.max_streams == 2048 - soc.RESERVED_STREAMS
        assert backend.state_layout == "canonical"

    def test_every_operation_has_a_kernel(self, npu: Opened) -> None:
        # CANN has no operators that choose blocks for each key head, hash n-grams, pool groups, or attend to these.
        composed = {"attend_chosen", "attend_compressed", "hash_ngrams", "pool_groups", "select_blocks"}
        # Those of hyper-connections are for 950 alone, and that of this routing is not yet called.
        composed |= {"collapse_streams", "expand_streams", "softplus_route"}
        assert {each.name for each in ops.catalogue().values() if each.namespace == "hal" and not each.fused} == (
            {each for each in npu().kernels if each in ops.catalogue() and not ops.operation(each).fused} | composed
        )

    @pytest.mark.parametrize(
        ("options", "problem", "remedy"),
        [
            ({"devise": 1}, "unknown key 'devise' (did you mean 'device'?", ": device, emulator"),
            ({"device": "0"}, "expected int, found str '0'", ""),
            ({"device": True}, "expected int, found bool True", ""),
            ({"device": -1}, "device must be at least 0, not -1", ""),
            ({"device": 2}, "the option device is 2, and the process sees 2 NPUs", "set device to 0 to 1"),
            ({"emulator": "yes"}, "unknown value 'yes'", ""),
            ({"emulator": 2}, "unknown value 2", ""),
            ({"emulator_options": {"sock": "Ascend910B3"}}, "unknown key 'sock' (did you mean 'soc'?", ""),
            ({"emulator_options": {"devices": 0}}, "devices must be at least 1, not 0", ""),
            ({"emulator_options": "{"}, "expected a table", ""),
            ({"attention": "fuse"}, "unknown value 'fuse' (did you mean 'fused'?", ""),
            ({"nz_weights": 1}, "expected bool, found int 1", ""),
            ({"max_streams": -1}, "max_streams must be at least 0, not -1", ""),
            ({"attention": "atb", "nz_cache": True}, "attention=atb and nz_cache exclude each other", "remove one of"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_what_is_wrong_is_refused(self, npu: Opened, options: dict[str, Any], problem: str, remedy: str) -> None:
        with pytest.raises(ConfigError) as caught:
            npu(options=options)
        assert problem in caught.value.problem
        assert remedy in caught.value.remedy

    def test_options_of_an_emulator_want_the_emulator(self, npu: Opened) -> None:
        with pytest.raises(ConfigError, match=r"emulator_options are .*, but the option emulator is not set"):
            npu(options={"emulator": False, "emulator_options": {"devices": 2}})

    def test_one_process_has_one_emulated_machine(self, npu: Opened) -> None:
        assert npu(options={"emulator_options": {"devices": 2}}).device.torch.index == 0
        with pytest.raises(
            DriverError, match=r"the emulated CANN is active with .*devices=2.*, and cannot be activated"
        ):
            npu(options={"emulator_options": {"devices": 1}})

    def test_streams_are_limited_by_the_option(self, npu: Opened) -> None:
        assert npu(options={"max_streams": 5}).limits == attrs.evolve(npu().limits, max_streams=5)

    @pytest.mark.parametrize("config", [{"dtype": "float32"}, {"cache": {"block_size": 64}}])
    def test_what_it_does_not_compute_in_is_refused(self, npu: Opened, config: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            npu(**config)

    @pytest.mark.parametrize("compilation", [{"compiler": "npugraph"}, {"decode": {"compiler": "npugraph"}}], ids=str)
    def test_graphs_go_by_the_vendors_name_too(self, npu: Opened, compilation: dict[str, Any]) -> None:
        assert npu(compilation=compilation).config.compilation.of("decode").compiler == "graph"
        with pytest.raises(ConfigError, match="no compiler 'npugraph'"):
            hal.open({"backend": "cpu", "compilation": compilation}, activate=False)

    def test_it_has_no_inductor(self, npu: Opened) -> None:
        with pytest.raises(ConfigError, match="the backend npu has no compiler 'inductor'"):
            npu(compilation={"compiler": "inductor"})


class TestOpening:
    def test_twice(self, npu: Opened) -> None:
        first = npu()
        second = npu()
        assert first is not second
        assert (first.active, second.active) == (False, True)
        x, weight = (torch.ones(2, 16, dtype=torch.float16, device="npu:0") for _ in range(2))
        for backend in (first, second):
            assert backend.ops.rms_norm(x, weight[0], 1e-6).tolist() == x.tolist()

    def test_the_other_device(self, npu: Opened) -> None:
        try:
            backend = npu(options={"device": 1})
            assert backend.device.torch == torch.device("npu", 1)
            assert torch_npu.npu.current_device() == 1
            made = backend.allocate(hal.step.StateSpec.key_value(1, 2, 16, torch.float16, 3, 128)).layers[0]["key"]
            assert made.device == backend.device.torch
        finally:
            npu()
        assert torch_npu.npu.current_device() == 0

    def test_without_activating(self, npu: Opened) -> None:
        cpu = hal.open("cpu")
        other = hal.open("npu", activate=False)
        assert (cpu.active, other.active) == (True, False)

    def test_the_emulated_one_is_available(self) -> None:
        assert NpuDriver().probe().reason == "the emulated CANN is active"
        assert NpuDriver().probe_for({"emulator": True}).available

    def test_auto_takes_it(self, npu: Opened) -> None:
        assert hal.open({"backend": "auto"}).name == "npu"

    def test_counting_launches(self, npu: Opened) -> None:
        backend = npu()
        x = torch.ones(2, 16, dtype=torch.float16, device=backend.device.torch)
        backend.device.synchronize()
        with backend.counting_launches() as found:
            for _ in range(3):
                ops.rms_norm(x, x[0], 1e-6)
        assert found == {"RmsNorm": 3}


class TestGenerations:
    @pytest.mark.parametrize(
        ("name", "generation"),
        [("Ascend910B3", "A2"), ("Ascend910_9391", "A3"), ("Ascend310P3", "310P"), ("Ascend950PR_9599", "950")],
    )
    def test_are_told_by_the_soc(self, name: str, generation: str) -> None:
        assert soc.generation_of(name).name == generation

    @pytest.mark.parametrize("name", ["Ascend910A", "Ascend910B", "Ascend310", "Ascend310B1", "ascend910b3", ""])
    def test_others_are_unknown(self, name: str) -> None:
        with pytest.raises(DriverUnavailable, match="does not know the SoC") as caught:
            soc.generation_of(name)
        assert "use one of Ascend910B* (A2), Ascend910_93* (A3), Ascend310P* (310P)" in caught.value.remedy

    @thorough(PROCESSES)
    def test_a_950(self) -> None:
        """It has no ATB and no cache in FRACTAL_NZ, and widens int4 experts whose groups its kernel lacks."""
        program = """
print(refused(options={"attention": "atb"}))
print(refused(options={"nz_cache": True}))
backend = opened()
print(backend.compilers)
from hal.ops import Draw, operation
from hal.ops.form_samples import drawn_weight
from hal.ops.forms import Form

draw = Draw(torch.bfloat16, "npu")
for columns in (256, 512):
    form, counts = Form("int4", columns=columns), draw.tensor([2, 3], torch.int64)
    weight, scale, _ = drawn_weight(draw, form, 2, 64, 1024)
    given = [draw.normal(5, 1024), weight, counts, None, scale, None, None, None, form]
    found = backend.kernels["grouped_linear"](*given).float().cpu()
    given = [each.cpu() if isinstance(each, torch.Tensor) else each for each in given]
    expected = operation("grouped_linear").reference(*given).float()
    print(bool((found - expected).norm() < 1e-2 * expected.norm()))
"""
        assert on_a_soc("Ascend950PR_9599", program).splitlines() == [
            'ConfigError: the option attention is "atb", and Ascend950PR_9599 has no ATB | set attention to "fused"',
            "ConfigError: the option nz_cache is set, and Ascend950PR_9599 has no kernel that writes a cache in "
            "FRACTAL_NZ | remove nz_cache",
            "('eager', 'graph', 'npugraph_ex', 'piecewise', 'piecewise_eager')",
            *["True"] * 2,
        ]

    @thorough(PROCESSES)
    @pytest.mark.parametrize("name", ["Ascend950PR_9599", "Ascend910B3"])
    def test_hyper_connections(self, name: str) -> None:
        """One launch or two of CANN's, unless its operators do not take the streams; or one of Triton's."""
        triton = {} if name == "Ascend950PR_9599" else {"HAL_NPU_TRITON": "1", "TRITON_INTERPRET": "1"}
        if triton:
            pytest.importorskip("triton", reason="Triton is not installed, whose interpreter runs the kernels")
        program = """
from hal.ops import Draw, operation
from hal.ops.tolerance import assert_agree

backend, taken = opened(dtype="bfloat16"), 0
for name in ("collapse_streams", "expand_streams"):
    for given in operation(name).samples(Draw(torch.bfloat16, "npu")):
        with backend.counting_launches() as launches:
            found = getattr(hal.ops, name)(*given)
        fused = name if backend.options.triton else "Mhc"
        own = {each: count for each, count in launches.items() if each.startswith(fused)}
        taken += own in ({"MhcPreV2": 1, "MhcSinkhorn": 1}, {"MhcPost": 1}, {name: 1})
        on_cpu = [each.cpu() if isinstance(each, torch.Tensor) else each for each in given]
        expected = operation(name).reference(*on_cpu)
        for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected))):
            assert_agree(operation(name), one.dtype, one.cpu(), other)
print(taken)
"""
        assert on_a_soc(name, program, **triton) == ("8\n" if triton else "5\n")

    @thorough(PROCESSES)
    def test_a_310p(self) -> None:
        """It has no graphs, computes in float16 alone, and runs the references of experts on plain weights."""
        program = """
from hal.nn import WeightUse
print(refused(compilation={"compiler": "graph"}))
print(refused(dtype="bfloat16"))
backend = opened(dtype="float16", options={"nz_weights": True})
x = torch.ones(3, 16, dtype=torch.float16, device=backend.device.torch)
print(hal.ops.rms_norm(x, x[0], 1e-6).tolist() == x.tolist())
weight = torch.randn(2, 32, 16).half().to(x.device)
prepared = backend.prepare_weights({"weight": weight}, WeightUse("grouped_linear", torch.float16))["weight"]
found = hal.ops.grouped_linear(x, prepared, torch.tensor([1, 2]).to(x.device))
expected = torch.stack([x[0] @ weight[0].t(), *(x[1:] @ weight[1].t())])
print(prepared is weight, torch.allclose(found.cpu(), expected.cpu(), 1e-2, 1e-2))
"""
        graphs, bfloat16, computed, experts = on_a_soc("Ascend310P3", program).splitlines()
        assert graphs.startswith("ConfigError: the backend npu has no compiler 'graph': it cannot capture graphs | ")
        assert bfloat16.startswith("ConfigError: the backend npu does not compute in torch.bfloat16 | ")
        assert "set dtype to one of float16" in bfloat16
        assert (computed, experts) == ("True", "True True")


class TestAskingForAnEmulatedOne:
    @thorough(PROCESSES)
    def test_by_a_variable_alone(self) -> None:
        program = "import hal; backend = hal.open('npu'); import torch; print(backend, torch.npu.device_count())"
        result = processes.python("-c", program, HAL_NPU_EMULATOR="1", HAL_NPU_EMULATOR_OPTIONS='{"devices": 3}')
        assert result.stdout == "<NpuBackend 'npu' on Device('npu:0', 'Ascend910B3 (A2, emulated)')> 3\n"

    @thorough(PROCESSES)
    @pytest.mark.skipif(installed_cann({}) is not None, reason="a real CANN is installed")
    def test_the_list_of_backends(self) -> None:
        lines = processes.hal("backends").stdout.splitlines()
        assert lines[1].split()[:2] == ["npu", "no"]
        assert "no CANN: libascendcl.so was not found" in lines[1]
        remedy = "or run on an emulated NPU: set the driver option emulator, pass --emulate"
        assert any(remedy in line for line in lines)
        assert lines[-1] == "* selected by auto: cpu"

        lines = processes.hal("backends", HAL_NPU_EMULATOR="1").stdout.splitlines()
        api = ".".join(map(str, API_VERSION))
        assert lines[1].split(maxsplit=5) == ["npu", "*", "yes", "20", api, "an emulated NPU"]
        assert lines[-1] == "* selected by auto: npu"
