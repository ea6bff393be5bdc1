"""``hal quantize``: make an int8 checkpoint of a floating-point one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from hal.cli.stdout import ResultCommand
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.quantize.quantize_checkpoint import Format

SCHEME = "w8a8: activations get their scales from a calibration text; w8a8_dynamic: for each token, as the model runs."
FORMAT = "How the result is described: compressed-tensors or modelslim. hal reads both."
CALIBRATION = "Text in UTF-8 like what the model is for; w8a8 needs it."


@click.command(cls=ResultCommand)
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--scheme", metavar="NAME", required=True, help=SCHEME)
@click.option("--format", "format_", metavar="NAME", default="compressed-tensors", show_default=True, help=FORMAT)
@click.option("--calibration", metavar="FILE", type=click.Path(path_type=Path), help=CALIBRATION)
@click.option("--calibration-tokens", type=int, metavar="N", help="Read so many tokens of it; 8192 by default.")
def command(
    source: Path, target: Path, scheme: str, format_: str, calibration: Path | None, calibration_tokens: int | None
) -> None:
    """Quantise the checkpoint in the folder IN to int8, weights and activations, into the new folder OUT.

    All linear layers are quantised but the output projection. `hal generate OUT` runs the result.
    """
    from hal.quantize.quantize_checkpoint import quantize_checkpoint

    text = None if calibration is None else _text(calibration)
    made = quantize_checkpoint(
        source,
        target,
        scheme,
        format=cast("Format", format_),  # what is unknown is refused there
        calibration=text,
        calibration_tokens=calibration_tokens,
    )
    before, after = made.bytes_before / 1e6, made.bytes_after / 1e6
    click.echo(f"{made.path}: {made.layers} layers in int8; weights of {before:.1f} MB are {after:.1f} MB", err=True)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the calibration text {file} cannot be read: {error}", "give a file of text in UTF-8"
        ) from None
