"""Counts the launches of the trained checkpoints in each scheme, which docs/reference/npu-launches.md has.

    python tests/helpers/npu/schemes.py
    python tests/helpers/npu/schemes.py --experts

Prints the tables of the page: the launches of a decode layer, and of one of a prefill. Needs the package installed with
its extra ``test``, and no NPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu is imported after its CANN is loaded.

import click  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import hal  # noqa: E402
from hal.errors import HalError  # noqa: E402
from helpers import held_out  # noqa: E402

TRAINED = TESTS.parent / "checkpoints" / "tiny-python"
EXPERTS = TESTS.parent / "checkpoints" / "tiny-python-moe"
EXPERT_KERNELS = ("Moe", "GroupedMatmul", "SwiGlu", "DequantSwigluQuant")
"""Prefixes of the launches from the routing to the weighted sum."""
WEIGHT_ONLY = ("w4a16", "w4a8_dynamic", "w8a16_group", "fp8")
WEIGHTS = ("w8a16", "w8a8", "w8a8_dynamic", *WEIGHT_ONLY)
"""Schemes whose launches are counted in every mode."""
PREFILLS = (16, 64, 256)


class Made(dict[str, tuple[Path, str]]):
    """The checkpoint of each scheme, made from ``source`` when it is first looked up, and the dtype of computation."""

    def __init__(self, source: Path, folder: Path) -> None:
        super().__init__({each: (source, each) for each in ("float16", "bfloat16")})
        self.source, self.folder = source, folder

    def __missing__(self, scheme: str) -> tuple[Path, str]:
        from click.testing import CliRunner

        from hal.cli import main

        arguments = ["quantize", str(self.source), str(self.folder / scheme), "--scheme", scheme]
        if scheme == "w8a8":
            text = self.folder / "calibration.txt"
            text.write_text("\n".join(held_out.texts()[0][:4]), encoding="utf-8")
            arguments += ["--calibration", str(text), "--calibration-tokens", "512"]
        if scheme in ("w4a16", "w8a16_group"):
            arguments += ["--group-size", "64"]
        if scheme == "w4a8_dynamic":
            arguments += ["--group-size", "-1"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        self[scheme] = self.folder / scheme, "bfloat16"
        return self[scheme]


@contextmanager
def checkpoints(source: Path = TRAINED) -> Iterator[Made]:
    with tempfile.TemporaryDirectory() as folder:
        yield Made(source, Path(folder))


def runner(
    path: Path, dtype: str, backend: str, compiler: str, sequences: int, window: int, **compilation: Any
) -> hal.Runner:
    """Return a runner for batch sizes at and between its buckets."""
    compilation["compiler"] = compiler
    if compiler != "eager":
        compilation["capture_sizes"] = sorted({1, 2, sequences + 1})
    if compiler == "piecewise":
        compilation["prefill"] = {"capture_sizes": list(PREFILLS)}
    config = {
        "backend": backend,
        "dtype": dtype,
        "compilation": compilation,
        "cache": {"num_tokens": (sequences + 1) * (-(-(window + 1) // 128) * 128)},
    }
    opened = hal.open(config)
    return hal.Runner(hal.load_model(path, opened), opened)


def expert_table(made: Made) -> list[str]:
    """Return rows in Markdown: weights, layout of weights, launches of a sparse layer, and those of its experts."""
    rows = []
    for scheme, nz in (("bfloat16", False), ("w8a8_dynamic", False), ("w8a8_dynamic", True), ("w8a8", False)):
        path, dtype = made[scheme]
        options = {"nz_cache": True, "nz_weights": nz}
        (found,) = count_launches(path, dtype, options, (8,), ("graph",))
        experts = sum(count for name, count in found.layer.items() if name.startswith(EXPERT_KERNELS))
        experts += max(0, found.layer["Quantize"] - 1)  # One is that of attention's output.
        rows.append(f"| {scheme} | {'fractal_nz' if nz else 'nd'} | {found.per_layer} | {experts} |")
    return rows


def count_launches(
    path: Path,
    dtype: str,
    options: dict[str, Any],
    sizes: tuple[int, ...],
    modes: tuple[str, ...],
    cache: str = "auto",
    weights: str = "auto",
    **workload: Any,
) -> list[Any]:
    """Return the launches of a step, by default of decode, on the emulated NPU, for each batch size and mode."""
    from hal.bench import hal_side, plan

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HAL_CACHE__DTYPE", cache)
        patched.setenv("HAL_QUANTIZED_WEIGHTS", weights)
        setting = plan.prepare(
            plan.Plan(
                **{"workload": "decode", **workload},
                checkpoint=str(path),
                backend="npu",
                dtype=dtype,
                batch_sizes=sizes,
                compilers=modes,
                options=options,
            )
        )
        return hal_side.count_launches(setting, lambda text: None)


def launch_table(made: Made) -> list[str]:
    """Return rows in Markdown: weights, cache, batch, mode, launches per layer, and launches outside the layers."""
    rows = []
    for scheme, cache, sizes, modes in (
        ("bfloat16", "canonical", (1, 8), ("eager", "graph")),
        ("bfloat16", "fractal_nz", (1, 8), ("graph",)),
        *(("w8a8", cache, (8,), ("graph",)) for cache in ("canonical", "fractal_nz")),
        *(("w8a8_dynamic", cache, (8,), ("graph",)) for cache in ("canonical", "fractal_nz")),
        *((scheme, "canonical", (8,), ("graph",)) for scheme in ("w8a16", *WEIGHT_ONLY)),
        *(("bfloat16", cache, (8,), ("graph",)) for cache in ("int8", "fp8")),
    ):
        path, dtype = made[scheme]
        kept = cache if cache in ("int8", "fp8") else "auto"
        for each in count_launches(path, dtype, {"nz_cache": cache == "fractal_nz"}, sizes, modes, kept):
            mode = each.contender.removeprefix("hal ")
            outside = each.outside.total()
            rows.append(f"| {scheme} | {cache} | {each.batch_size} | {mode} | {each.per_layer} | {outside} |")
    path, dtype = made["fp8"]
    for weights in ("dequantized", "kept"):
        for each in count_launches(path, dtype, {}, (8,), ("graph",), weights=weights):
            outside = each.outside.total()
            rows.append(f"| fp8, {weights} | canonical | 8 | graph | {each.per_layer} | {outside} |")
    return rows


def mode_table(made: Made) -> list[str]:
    """Return rows in Markdown: weights, cache, and launches per layer of a decode of eight sequences, by mode."""
    rows = []
    kept = (*(("bfloat16", cache) for cache in ("model", "int8", "fp8")), *((each, "model") for each in WEIGHTS))
    for scheme, cache in kept:
        path, dtype = made[scheme]
        found = []
        for mode in ("graph", "piecewise", "npugraph_ex"):
            try:
                (each,) = count_launches(path, dtype, {}, (8,), (mode,), cache)
                found.append(str(each.per_layer))
            except HalError as error:
                found.append(error.problem)
        rows.append(f"| {scheme} | {cache} | {' | '.join(found)} |")
    return rows


def prefill_table(path: Path) -> list[str]:
    """Return rows in Markdown: mode, launches per layer, and launches outside the layers."""
    modes = ("eager", "graph", "piecewise")
    return [
        f"| {each.contender.removeprefix('hal ')} | {each.per_layer} | {each.outside.total()} |"
        for each in count_launches(path, "bfloat16", {}, (4,), modes, workload="prefill", length=64)
    ]


@click.command(help=str(__doc__).split("\n", maxsplit=1)[0])
@click.option("--experts", is_flag=True, help="those of the mixture of experts")
def main(experts: bool) -> None:
    import emulated_cann

    emulated_cann.activate()
    torch.set_num_threads(1)
    with checkpoints(EXPERTS if experts else TRAINED) as made:
        tables = (expert_table,) if experts else (launch_table, mode_table, lambda of: prefill_table(of.source))
        click.echo("\n".join(row for table in tables for row in table(made)))


if __name__ == "__main__":
    main()
