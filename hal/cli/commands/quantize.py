"""``hal quantize``: create an int8 checkpoint from a floating-point one."""

from __future__ import annotations

from pathlib import Path

import click

from hal.cli.console import progress_on_stderr
from hal.cli.stdout import ResultCommand
from hal.errors import ConfigError

SCHEME = (
    "w8a8: activation scales from a calibration text; w8a8_dynamic: activation scales per token at run time; "
    "w8a16: weights only."
)
FORMAT = "Format of the checkpoint: compressed-tensors or modelslim. hal reads both."
CALIBRATION = "A UTF-8 text representative of the model's use; required by w8a8."


@click.command("quantize", cls=ResultCommand)
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--scheme", metavar="NAME", required=True, help=SCHEME)
@click.option("--format", "format_", metavar="NAME", default="compressed-tensors", show_default=True, help=FORMAT)
@click.option("--calibration", metavar="FILE", type=click.Path(path_type=Path), help=CALIBRATION)
@click.option("--calibration-tokens", type=int, metavar="N", help="Number of its tokens to read.  [default: 8192]")
def command(
    source: Path, target: Path, scheme: str, format_: str, calibration: Path | None, calibration_tokens: int | None
) -> None:
    """Quantize the checkpoint in the folder IN to int8 into the new folder OUT.

    All linear layers except the output projection are quantized. `hal generate OUT` runs the result.
    """
    from hal.quantize.quantize_checkpoint import quantize_checkpoint

    text = None if calibration is None else _text(calibration)
    made = quantize_checkpoint(
        source,
        target,
        scheme,
        format=format_,
        calibration=text,
        calibration_tokens=calibration_tokens,
        say=progress_on_stderr(),
    )
    before, after = made.bytes_before / 1e6, made.bytes_after / 1e6
    sizes = f"{before:.1f} MB before, {after:.1f} MB after"
    click.echo(f"{made.path}: {made.layers} layers in int8; weights: {sizes}", err=True)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration text {file} cannot be read: {error}", "use a UTF-8 text file") from None
