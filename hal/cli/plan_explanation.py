"""The report of ``hal explain --devices``: predicted steps of the deployments on a number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.cli.console import print_table
from hal.cli.stdout import echo
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.bench.prediction.assumptions import Assumptions

WEIGHTLESS = "a checkpoint's folder, a config.json, or the shapes of `hal bench --shapes`"


def explain_devices(model: Path, devices: int, assume: Path) -> None:
    """Print each deployment of a model, of which only the config is read, with its predicted steps.

    Raises:
        ConfigError: there is no such model, or the file of assumptions is invalid.
    """
    from hal.bench.prediction.assumptions import Assumptions
    from hal.bench.prediction.deployments import WORKLOADS, Planner

    assumed = Assumptions.read(assume)
    config = config_of(model)
    planner = Planner(config, assumed)
    echo(f"{model.name} on {devices} of {assumed.name}: predicted, not measured")
    for workload in WORKLOADS:
        found = planner.deployments(devices, workload)
        fastest = min((each.time.total for each in found if each.fits), default=None)
        tokens = f"{workload.sequences} x {workload.queries} new tokens, {workload.context} in the cache"
        echo(f"\n{workload.name}: {tokens}\n")
        print_table(
            (
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
            ),
            [
                (
                    each.name,
                    f"{each.work.held / 2**30:.1f}",
                    *(
                        f"{1e3 * part:.2f}"
                        for part in (
                            each.time.total,
                            each.time.memory,
                            each.time.compute,
                            each.time.launches,
                            each.time.collectives,
                        )
                    ),
                    f"{sum(exchange.sent for exchange in each.layer) / 2**10:.0f}",
                    f"{each.tokens_per_second:.0f}",
                    "does not fit" if not each.fits else "fastest" if each.time.total == fastest else "",
                )
                for each in found
            ],
        )
    echo("\nassumed:")
    for name, figure in figures(assumed).items():
        source = assumed.sources.get(name)
        echo(f"- {name} = {figure}" + (f" ({source})" if source else ""))


def config_of(model: Path) -> Mapping[str, Any]:
    """Return a config.json by its path, its folder, or the name of shapes."""
    from hal.bench.contenders.shapes import SHAPES
    from hal.config import parse_json

    if str(model) in SHAPES:
        return SHAPES[str(model)]
    file = model / "config.json" if model.is_dir() else model
    try:
        return parse_json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no config of a model can be read at {model}: {error}", f"give {WEIGHTLESS}: {', '.join(SHAPES)}"
        ) from None


def figures(assumed: Assumptions) -> dict[str, str]:
    """Return the assumed figures as text, by key."""
    import attrs

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
