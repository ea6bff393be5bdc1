"""``hal quantize``: create a quantized checkpoint from a floating-point one."""

from __future__ import annotations

from pathlib import Path

import click

from hal.cli.console import print_table, progress_on_stderr
from hal.cli.stdout import ResultCommand
from hal.errors import ConfigError

SCHEME = (
    "w8a8: activation scales from a calibration text; w8a8_dynamic: activation scales per token at run time; "
    "w8a16: weights only; w4a16 and w8a16_group: weights of 4 or 8 bits in groups; w4a8_dynamic: w4a16 with activation "
    "scales per token at run time; fp8: weights in float8; fp8_dynamic: the same with "
    "activations in float8, scaled per token at run time."
)
GROUP_SIZE = "Inputs that share a scale, in w4a16, w4a8_dynamic and w8a16_group; -1 for a whole row.  [default: 128]"
KEEP = "A layer to leave as it is: its name, or consecutive parts of it, such as layers.0.mlp. May be repeated."
HEAD = (
    "Quantize the output projection, too, in int8 with a scale for each row. If it is the table of embeddings, the new "
    "checkpoint has both."
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
@click.option("--group-size", type=int, metavar="N", help=GROUP_SIZE)
@click.option("--keep", metavar="NAME", multiple=True, help=KEEP)
@click.option("--head", is_flag=True, help=HEAD)
def command(
    source: Path,
    target: Path,
    scheme: str,
    format_: str,
    calibration: Path | None,
    calibration_tokens: int | None,
    group_size: int | None,
    keep: tuple[str, ...],
    head: bool,
) -> None:
    """Quantize the checkpoint in the folder IN into the new folder OUT.

    All linear layers except the output projection and an encoder's are quantized; --head adds the former. The relative
    error of each layer's weight is printed. `hal generate OUT` runs the result.
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
        group_size=group_size,
        keep=keep,
        head=head,
        say=progress_on_stderr(),
    )
    print_table(("layer", "relative error"), [(name, f"{each:.4f}") for name, each in made.errors.items()])
    before, after = made.bytes_before / 1e6, made.bytes_after / 1e6
    sizes = f"{before:.1f} MB before, {after:.1f} MB after"
    click.echo(f"{made.path}: {made.layers} layers in {scheme}; weights: {sizes}", err=True)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration text {file} cannot be read: {error}", "use a UTF-8 text file") from None
