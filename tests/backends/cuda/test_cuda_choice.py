"""Tests for the choice of a library for each operation, and for the reasons why a kernel is unavailable."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.backends.cuda import libraries
from hal.backends.cuda.attention import ByLength, TorchAttention
from hal.backends.cuda.choice import Library, choose
from hal.backends.cuda.libraries import flashinfer_library, torch_library, triton_library
from torch import Tensor

from hal import ops
from hal.errors import ConfigError
from hal.ops.form_samples import INT8_DYNAMIC
from hal.ops.forms import FLOAT, Form
from hal.ops.kernels.partial_kernel import FormKernels, plain

TORCH = Library("torch", {"rms_norm": torch.add, "paged_attention": torch.sub})
TRITON = Library("triton", {"rms_norm": torch.mul, "paged_attention": torch.div, "silu_and_mul": torch.neg})
FLASHINFER = Library("flashinfer", {"paged_attention": torch.abs, "rms_norm": torch.sin, "add_rms_norm": torch.cos})
ABSENT = Library("flashinfer", problem="flashinfer is not installed", remedy="pip install flashinfer-python")


def libraries_of(found: Any) -> dict[str, str]:
    return {name: each.library for name, each in found.items()}


def test_a_library_goes_before_torch_and_torch_before_ours_where_it_takes_one_launch() -> None:
    found = choose([FLASHINFER, TRITON, TORCH], {})
    its = ("add_rms_norm", "paged_attention", "rms_norm")
    assert libraries_of(found) == {**dict.fromkeys(its, "flashinfer"), "silu_and_mul": "triton"}
    found = choose([ABSENT, TRITON, TORCH], {})
    assert libraries_of(found) == {"paged_attention": "triton", "rms_norm": "torch", "silu_and_mul": "triton"}
    assert found["rms_norm"].kernel is torch.add
    without = Library("triton", problem="triton is not installed", remedy="pip install triton")
    assert libraries_of(choose([ABSENT, without, TORCH], {})) == {"paged_attention": "torch", "rms_norm": "torch"}


def test_the_kernel_of_fewest_launches_adds_and_norms() -> None:
    """FlashInfer's kernel writes to its arguments, so both would have to be copied first."""
    triton = Library("triton", {"add_rms_norm": torch.mul})
    assert choose([FLASHINFER, triton, TORCH], {})["add_rms_norm"].library == "triton"
    assert choose([FLASHINFER, TORCH], {})["add_rms_norm"].library == "flashinfer"
    assert choose([FLASHINFER, triton], {"add_rms_norm": "flashinfer"})["add_rms_norm"].kernel is torch.cos


def test_a_choice_can_be_forced() -> None:
    found = choose([FLASHINFER, TRITON, TORCH], {"rms_norm": "triton", "paged_attention": "torch"})
    others = {"add_rms_norm": "flashinfer", "silu_and_mul": "triton"}
    assert libraries_of(found) == {"paged_attention": "torch", "rms_norm": "triton", **others}
    assert "silu_and_mul" not in choose([FLASHINFER, TRITON, TORCH], {"silu_and_mul": "reference"})


@pytest.mark.parametrize(
    ("forced", "library", "kernels"),
    [
        (None, "torch, other forms triton", (torch.add, torch.sub, torch.mul)),
        ("torch", "torch", (torch.add, torch.sub, torch.div)),
        ("triton", "triton, other forms torch", (torch.add, torch.sub, torch.mul)),
    ],
)
def test_a_projection_has_a_library_for_each_form(forced: str | None, library: str, kernels: tuple[Any, ...]) -> None:
    """Triton multiplies by no floating-point and no int8 weight, and torch by others once they are widened."""
    own = FormKernels("linear", [(plain, torch.add), (lambda form: form.exact, torch.sub)], otherwise=torch.div)
    packed = FormKernels("linear", [(lambda form: not plain(form) and not form.exact, torch.mul)])
    libraries = [ABSENT, Library("triton", {"linear": packed}), Library("torch", {"linear": own})]
    found = choose(libraries, {"linear": forced} if forced else {})["linear"]
    assert found.library == library
    chosen = found.kernel.bound(torch.neg).chosen  # type: ignore[attr-defined]
    assert tuple(chosen(form) for form in (FLOAT, INT8_DYNAMIC, Form("int4"))) == kernels


@pytest.mark.parametrize(
    ("forced", "problem", "remedy"),
    [
        ({"rms_nrm": "torch"}, "names 'rms_nrm', which is not an operation", "did you mean 'rms_norm'"),
        ({"rms_norm": "cutlass"}, "'cutlass', which is not a library", "known: flashinfer, reference, torch, triton"),
        (
            {"rms_norm": "flashinfer"},
            "kernels.rms_norm is 'flashinfer': flashinfer is not installed",
            "pip install flashinfer-python; or use triton, torch, reference",
        ),
        (
            {"silu_and_mul": "torch"},
            "kernels.silu_and_mul is 'torch': torch has no kernel for silu_and_mul",
            "use triton, reference; flashinfer cannot (flashinfer is not installed)",
        ),
    ],
)
def test_what_cannot_be_forced_is_said(forced: dict[str, str], problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose([ABSENT, TRITON, TORCH], forced)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def present(name: str) -> object:
    return name


def test_what_makes_triton_unusable() -> None:
    missing = triton_library((9, 0), lambda name: None)
    assert (missing.problem, missing.remedy) == ("triton is not installed", "pip install triton")
    assert triton_library((7, 5), present).problem == "Triton requires compute capability 8.0, and the GPU has 7.5"
    compiler = triton_library((9, 0), present, lambda name: None, {})
    assert "a C compiler, and none is on the PATH" in compiler.problem
    assert not {*missing.kernels, *compiler.kernels}


def test_what_makes_flashinfer_unusable(tmp_path: Path) -> None:
    device = torch.device("cpu")
    assert flashinfer_library(device, {}, lambda name: None).problem == "flashinfer is not installed"
    only = lambda name: name == "flashinfer" or None  # noqa: E731
    found = flashinfer_library(device, {}, only, lambda name: None, {"CUDA_HOME": str(tmp_path)})
    assert "neither its compiled kernels nor nvcc" in found.problem
    assert "flashinfer-jit-cache" in found.remedy


def test_an_import_that_fails_is_a_reason() -> None:
    """A library that claims to be installed but fails to import, as in a broken installation."""
    import importlib.util

    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("flashinfer is installed and can be imported")
    reference = {name: each.reference for name, each in ops.catalogue().items()}
    found = flashinfer_library(torch.device("cpu"), reference, present, present)  # type: ignore[arg-type]
    assert "flashinfer cannot be used: No module named 'flashinfer'" in found.problem
    assert found.kernels == {}


def test_torch_serves_what_models_cannot_do_without() -> None:
    found = torch_library((8, 0))
    assert {"embedding", "linear", "paged_attention", "rms_norm", "sample", "store_kv_cache"} <= set(found.kernels)
    assert not set(found.kernels) - set(ops.catalogue())


TABLE = """
import json, sys
import torch
from hal.backends.cuda.libraries import kernels_for
found = kernels_for(torch.device("cpu"), tuple(map(int, sys.argv[1:])), {})
print(json.dumps({name: each.library for name, each in found.items()}))
"""


@cache
def table(*capability: int) -> dict[str, str]:
    """Return the table of a subprocess: it imports Triton, which tests of Triton's interpreter must import first."""
    command = [sys.executable, "-c", TABLE, *map(str, capability)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


class TestGraphsWithFlashInfer:
    """FlashInfer plans on the host before every replay, so graphs capture another kernel unless it is requested."""

    @pytest.fixture
    def chosen(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, bool]]:
        """Return the reported attention kernel, and whether graphs use FlashInfer's. FlashInfer is not installed."""

        def flashinfer(device: torch.device, otherwise: Any, *, in_graphs: bool) -> Library:
            def attend() -> bool:
                return in_graphs

            return Library("flashinfer", {"paged_attention": attend})

        def choice(triton: Library, forced: dict[str, str]) -> tuple[str, bool]:
            monkeypatch.setattr(libraries, "flashinfer_library", flashinfer)
            monkeypatch.setattr(libraries, "triton_library", lambda capability: triton)
            found = libraries.kernels_for(torch.device("cpu"), (9, 0), forced)["paged_attention"]
            return found.library, found.kernel()

        return choice

    def test_they_have_tritons(self, chosen: Callable[..., tuple[str, bool]]) -> None:
        assert chosen(TRITON, {}) == ("flashinfer, graphs triton", False)

    def test_they_have_it_where_it_is_asked_for(self, chosen: Callable[..., tuple[str, bool]]) -> None:
        assert chosen(TRITON, {"paged_attention": "flashinfer"}) == ("flashinfer", True)

    def test_they_have_it_where_triton_cannot_be_used(self, chosen: Callable[..., tuple[str, bool]]) -> None:
        assert chosen(Library("triton", problem="triton is not installed"), {}) == ("flashinfer", True)


def of_one_rank() -> set[str]:
    """Return the names of the operations that are no collectives, which the driver does not support."""
    return {name for name, operation in ops.catalogue().items() if not operation.collective}


def test_every_operation_has_a_kernel_where_triton_is() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    found = table(9, 0)
    # A quantized cache is refused when a model is loaded.
    sparse = {"attend_chosen", "attend_selected", "pool_groups", "select_blocks", "select_keys", "store_index_cache"}
    composed = {"multi_head_latent_attention", "select_and_attend"}
    of_v4 = {"attend_compressed", "softplus_route"}
    ngrams = {"hash_ngrams"}
    quantized = {"quantized_paged_attention", "store_quantized_kv_cache"}
    assert of_one_rank() - set(found) == {*quantized, *sparse, *composed, *of_v4, *ngrams}
    assert set(found) <= of_one_rank()
    assert found["rms_norm"] in ("torch", "flashinfer")
    assert found["split_qkv_rmsnorm_rope_cache"] == found["store_kv_cache"] == "triton"


def test_torch_alone_serves_old_gpus() -> None:
    found = table(7, 5)
    assert "triton" not in found.values()
    assert found["paged_attention"] in ("torch", "flashinfer")


def test_the_page_says_which_library_an_operation_gets(repository: Path) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    text = (repository / "docs" / "reference" / "cuda.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`[^|]*) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    named = [(name, columns) for names, *columns in rows for name in re.findall(r"`(\w+)`", names)]
    said = {name: columns for name, columns in named if name in ops.catalogue()}
    assert len(said) == len([name for name, _ in named if name in ops.catalogue()]), "an operation has two rows"
    assert set(said) == of_one_rank()
    with_triton, without = table(9, 0), table(7, 5)
    for name, (_, library, old) in said.items():
        stands_in = "composed" if ops.operation(name).fused else "reference"
        # Only builds of torch for CUDA have the flash attention that is used for long prefills.
        assert with_triton.get(name, stands_in).partition(",")[0] in ("flashinfer", library.partition(",")[0]), name
        assert without.get(name, stands_in) in ("flashinfer", old), name


class TestByLength:
    """Attention chooses one of two kernels by lengths known on the host."""

    @pytest.mark.parametrize(
        ("queries", "softcap", "sinks", "kind"),
        [
            ([1, 1, 1], None, None, "short"),
            ([0, 1, 1], None, None, "short"),
            ([5, 31], None, None, "short"),
            ([1, 32], None, None, "long"),
            ([40], None, None, "long"),
            ([40], 30.0, None, "short"),
            ([40], None, torch.zeros(2), "short"),
        ],
    )
    def test_the_longest_decides(
        self, queries: list[int], softcap: float | None, sinks: Tensor | None, kind: str
    ) -> None:
        called: list[str] = []
        attend = ByLength(lambda *args: called.append("short"), lambda *args: called.append("long"))
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        lengths = torch.tensor(queries, dtype=torch.int32)
        query, cache = torch.zeros(sum(queries), 2, 8), torch.zeros(1, 4, 1, 8)
        table = torch.zeros(len(queries), 1, dtype=torch.int32)
        options = ops.AttentionOptions(1.0, softcap=softcap)
        attend(query, cache, cache, table, starts, lengths, starts, lengths, sinks, options)
        assert called == [kind]
        attend.captured()
        assert called == [kind, "short"]


def test_pages_are_read_in_place_only_by_flash_attention() -> None:
    assert not TorchAttention(flash=False).pages
