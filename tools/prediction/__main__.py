"""Predicts decode steps and a prefill for each way to split a model between devices that nobody measured.

    python -m tools.prediction qwen3-32b --devices 16 --assume tools/prediction/ascend-910b.toml

Run it from the repository's root. The model is a checkpoint's folder, a config.json, or shapes of ``hal bench``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from hal.bench.plan import SHAPES
from hal.cli.console import print_table
from hal.cli.stdout import echo
from hal.config import parse_json
from hal.errors import ConfigError, HalError

from .assumptions import Assumptions
from .deployments import WORKLOADS, Planner

COLUMNS = (
    "copies x ranks",
    "GiB held",
    "step ms",
    "memory",
    "compute",
    "launches",
    "collectives",
    "KiB sent a layer",
    "tokens/s",
    "",
)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--devices", type=click.IntRange(1), metavar="N", required=True)
@click.option("--assume", type=click.Path(path_type=Path), metavar="FILE", required=True)
def main(model: Path, devices: int, assume: Path) -> None:
    """Print each deployment of a model, of which only the config is read, with its predicted steps."""
    try:
        _print(model, devices, assume)
    except HalError as error:
        raise click.UsageError(str(error)) from None


def _print(model: Path, devices: int, assume: Path) -> None:
    assumed = Assumptions.read(assume)
    planner = Planner(config_of(model), assumed)
    echo(f"{model.name} on {devices} of {assumed.name}: predicted, not measured")
    for workload in WORKLOADS:
        found = planner.deployments(devices, workload)
        fastest = min((each.time.total for each in found if each.fits), default=None)
        tokens = f"{workload.sequences} x {workload.queries} new tokens, {workload.context} in the cache"
        echo(f"\n{workload.name}: {tokens}\n")
        rows = []
        for each in found:
            time = each.time
            parts = (time.total, time.memory, time.compute, time.launches, time.collectives)
            rows.append(
                (
                    each.name,
                    f"{each.work.held / 2**30:.1f}",
                    *(f"{1e3 * part:.2f}" for part in parts),
                    f"{sum(exchange.sent for exchange in each.layer) / 2**10:.0f}",
                    f"{each.tokens_per_second:.0f}",
                    "does not fit" if not each.fits else "fastest" if time.total == fastest else "",
                )
            )
        print_table(COLUMNS, rows)
    echo("\nassumed:")
    for name, figure in figures(assumed).items():
        source = assumed.sources.get(name)
        echo(f"- {name} = {figure}" + (f" ({source})" if source else ""))


def config_of(model: Path) -> Mapping[str, Any]:
    """Return a config.json by its path, its folder, or the name of shapes."""
    if str(model) in SHAPES:
        return SHAPES[str(model)]
    file = model / "config.json" if model.is_dir() else model
    try:
        return parse_json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no config of a model can be read at {model}: {error}",
            f"give a checkpoint's folder, a config.json, or one of: {', '.join(SHAPES)}",
        ) from None


def figures(assumed: Assumptions) -> dict[str, str]:
    """Return the assumed figures as text, by key."""
    found: dict[str, Any] = {}
    for name, each in attrs.asdict(assumed, filter=lambda field, _: field.name not in ("name", "sources")).items():
        found |= {f"{name}.{key}": figure for key, figure in each.items()} if isinstance(each, dict) else {name: each}
    return {
        name: (", ".join(each) or "none")
        if isinstance(each, tuple | list)
        else f"{each:g}"
        if isinstance(each, float)
        else str(each)
        for name, each in found.items()
    }


if __name__ == "__main__":
    main()
