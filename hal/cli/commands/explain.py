"""``hal explain``: report how a model's step is compiled, stage by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hal.cli.config_options import Settings, configured, parallel
from hal.cli.console import print_table
from hal.cli.explanation import (
    captures_python,
    context_of,
    explain_kernels,
    explain_step,
    print_rewrites,
    print_stages,
)
from hal.cli.rank_explanation import explain_ranks, without_ranks
from hal.cli.stdout import ResultCommand, check_folder, echo, writing
from hal.config import bounds
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.compile.optimize import Stage
    from hal.compile.split import SplitStep
    from hal.drivers.backend import Backend
    from hal.execution.context import FormContext
    from hal.nn import CausalLM

EMBEDDINGS = 16
"""Embeddings of the image whose launches are counted."""

PLANNED = "Split the model between N ranks, and report one of them and its collectives. No ranks are started."
COPIES = "Plan N copies of the model, which share experts if --experts says so, and otherwise exchange nothing."
SEQUENCES = click.IntRange(1, bounds.SEQUENCES)


@click.command("explain", cls=ResultCommand, short_help="Show how a decode step is compiled.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@configured(ranks=parallel(COPIES, PLANNED))
@click.option("--batch-size", type=SEQUENCES, default=2, show_default=True, help="Of the decode step.")
@click.option(
    "--dump", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write each stage's graph to DIR."
)
def command(checkpoint: Path, settings: Settings, batch_size: int, dump: Path | None) -> None:
    """Compile a decode step of the model in the folder CHECKPOINT, and report each stage.

    Prints the kernel that computes with each weight; the calls and duration of each stage; for each rewrite, the number
    of sites where it was applied, and of matching sites where it was skipped, with reasons; the fused operations
    without a kernel on the backend; the options that a kernel lacks; where the step is split; and, on devices that
    count them, the launches of a layer before and after. Reports if the compiler applies no rewrites. The encoder of a
    model that reads images follows.

    With --tensor-parallel, --data-parallel and --experts, prints a rank's weights, and for each layer its collectives:
    how many a step has, the bytes that a rank sends, and whether they are fused with other operations. Among the
    launches, a copy stands for a collective.
    """
    import hal
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.parallel import Mesh

    if dump is not None:
        check_folder(dump)
    shared = settings.config().parallel
    opened = Checkpoint.open(checkpoint)
    planned = Mesh.planned(shared.tensor, shared.data, experts=shared.experts != "split")
    with settings.emulated() as settings:
        on = hal.open(settings.config(), mesh=planned)
    model = hal.load_model(opened, on)
    config = on.config.compilation.of("decode")
    echo(
        f"{opened.architecture}, {len(model.states)} layers, on {on.name}: a decode step of {batch_size}, "
        f"{config.compiler}\n{_cache(model, on)}\n{_quantized(model)}"
    )
    explain_kernels(model, on)
    _layers(opened, model, on)
    if shared.size > 1:
        explain_ranks(opened, model, on, batch_size)
    with without_ranks(on):
        with on.translating_errors():
            stages, split = explain_step(model, on, batch_size)
        _launches(opened, checkpoint, on, batch_size)
        if model.encoder is not None:
            _explain_encoder(model, on)
    if dump is not None and stages:
        with writing(dump):
            _dump(dump, stages, split)
        echo(f"\ngraphs written to {dump}")
    elif dump is not None:
        echo(f"\nno graph to write to {dump}")


def _cache(model: CausalLM, on: Backend) -> str:
    """Return the bytes that states take per token, their dtypes, and how they divide among layers and states."""
    from hal.checkpoint.cache_dtype import DTYPES
    from hal.execution.state_spec import spec_of
    from hal.step.state import TOKEN

    spec = spec_of(model, on)
    dtypes = {str(spec.dtype_of(each)).removeprefix("torch.") for _, _, each in spec.states()}
    kept = [name for name, dtype in DTYPES.items() if str(dtype).removeprefix("torch.") in dtypes]
    quantized = f", quantized to {kept[0]}" if kept else ""
    sizes = [
        {name: spec.token_bytes_of(each) for name, each in layer.items() if each.per is TOKEN} for layer in spec.layers
    ]
    layers = Counter(tuple(each.items()) for each in sizes if each)
    parts = ", ".join(
        f"{count} {'layer' if count == 1 else 'layers'} of {sum(size for _, size in layer):,} "
        f"({', '.join(f'{name} {size:,}' for name, size in layer)})"
        for layer, count in layers.items()
    )
    divided = f": {parts}" if parts else ""
    dtype = " and ".join(sorted(dtypes))
    return f"states take {spec.token_bytes:,} bytes per token, in {dtype}{quantized}{divided}"


def _quantized(model: CausalLM) -> str:
    """Return a line with the bytes of the quantized layers, or nothing if there are none."""
    from hal.nn import Projection

    layers = [each for each in model.modules() if isinstance(each, Projection) and each.quantized]
    held = sum(tensor.nbytes for each in layers for tensor in each.buffers(recurse=False))
    forms = "; ".join(sorted({str(each.form) for each in layers}))
    return f"{len(layers)} quantized layers take {held:,} bytes: {forms}\n" if layers else ""


def _layers(opened: Checkpoint, model: CausalLM, on: Backend) -> None:
    """Print which of hal's layers the driver replaced, and how many."""
    if not on.layers:
        return
    from hal.checkpoint.driver_layers import replaced
    from hal.checkpoint.loading import build_for

    made = replaced(model, build_for(on, opened))
    found = Counter((old.__name__, new.__name__) for old, new in made)
    rows = [(*names, str(times)) for names, times in found.items()]
    if rows:
        print_table(("layer", "the driver's", "times"), rows)
        echo()


def _counts_launches(on: Backend) -> bool:
    try:
        with on.counting_launches():
            return True
    except ConfigError:
        return False


def _launches(opened: Checkpoint, path: Path, on: Backend, size: int) -> None:
    """Print a layer's launches, eager and compiled, on a backend that counts launches."""
    from hal.bench.hal_side import count_launches
    from hal.bench.plan import Plan, prepare

    config = on.config.compilation.of("decode")
    if not _counts_launches(on):
        return
    if on.mesh.expert.size > 1:
        echo("\nlaunches are not counted for ranks that share whole experts")
        return
    # A captured eager step launches the same kernels as eager.
    modes = ("eager",) if config.compiler == "eager" or captures_python(config, size) else ("eager", config.compiler)
    kept = {"passes": dict(config.passes), "splitting_ops": config.splitting_ops}
    plan = Plan(
        workload="decode",
        checkpoint=str(path),
        backend=on.name,
        dtype=None if on.config.dtype == "auto" else on.config.dtype,
        batch_sizes=(size,),
        length=20,
        compilers=modes,
        trace=True,
        model_source=on.config.model_source,
        options=dict(on.config.options),
        compilation=kept,
    )
    found = count_launches(prepare(plan, mesh=on.mesh), say=lambda text: None)
    echo()
    print_table(
        ("launches", "per layer", "kernels of a layer"),
        [
            (each.contender, str(each.per_layer), ", ".join(f"{name} {times}" for name, times in each.layer.items()))
            for each in found
        ],
    )


def _dump(folder: Path, stages: Sequence[Stage], split: SplitStep | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, stage in enumerate(stages):
        (folder / f"{number}-{stage.name}.py").write_text(stage.code, encoding="utf-8")
    if split is None:
        return
    lines = []
    for number, each in enumerate(split.segments):
        kind = "captured" if each.captured else f"eager: {', '.join(each.operations) or 'rows of logits'}"
        outputs = ", ".join(output.name for output in each.outputs)
        lines.append(f"{number} {kind}\n  reads {', '.join(each.inputs)}\n  gives {outputs or 'nothing'}\n")
    (folder / f"{len(stages)}-split.txt").write_text("".join(lines), encoding="utf-8")


def _explain_encoder(model: CausalLM, on: Backend) -> None:
    """Print how the backend runs a model's encoder, and its launches on a backend that counts them.

    Raises:
        HalError: what a runner would raise.
    """
    from hal.compile.trace import StepSizes
    from hal.drivers.compiler import EAGER
    from hal.execution.capture.capture_sizes import embeddings_to_capture
    from hal.execution.optimized_model import optimized_step

    context = context_of(model, on, 2, "encoder")
    chosen = context.config.compiler
    echo(f"\n{type(model.encoder).__name__}, {on.name}: a step of the encoder, {chosen}\n")
    if chosen == EAGER:
        echo("the encoder's Python code is run eagerly; no rewrite is applied")
    elif chosen == "inductor":
        echo("Inductor compiles the traced graph for any number of images; no rewrite is applied")
    else:
        with on.translating_errors():
            step = optimized_step(context, StepSizes(None))
        print_stages(step.stages)
        echo()
        print_rewrites(step, on)
        if chosen == "graph":
            sizes = ", ".join(map(str, embeddings_to_capture(context.config, on.config.max_prefill_tokens)))
            echo(f"\nsteps of up to {sizes} embeddings are captured; larger ones run uncaptured")
    _print_encoder_launches(context)


def _print_encoder_launches(context: FormContext) -> None:
    import torch

    from hal.drivers.compiler import EAGER, OPTIMIZED
    from hal.execution.steps import Steps, Uncaptured

    on, encoder, chosen = context.backend, context.encoder, context.config.compiler
    assert encoder is not None
    if not _counts_launches(on):
        return
    steps = Steps(context.model, on, {"encoder": Uncaptured(context, chosen != EAGER)}, None)
    batch = encoder.batch([encoder.example(EMBEDDINGS * encoder.row_tokens)]).to(on.device.torch)
    token = on.enter()
    try:
        with on.translating_errors(), torch.inference_mode():
            if chosen not in (EAGER, OPTIMIZED):
                steps.forms["encoder"] = on.compiler(chosen).make(context)
            steps.encode(batch)
            on.device.synchronize()
            with on.counting_launches() as found:
                steps.encode(batch)
    finally:
        on.leave(token)
    counts = Counter(found)
    kernels = ", ".join(f"{name} {times}" for name, times in counts.items())
    echo()
    print_table(("launches of the encoder", "one image", "kernels"), [("all layers", str(counts.total()), kernels)])
