"""The report of ``hal explain`` on a model's encoder."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hal.cli.console import print_table
from hal.cli.explanation import context_of, print_rewrites, print_stages
from hal.cli.stdout import echo
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.drivers.backend import Backend
    from hal.execution.context import FormContext
    from hal.nn import CausalLM

EMBEDDINGS = 16
"""Embeddings of the image whose launches are counted."""


def explain_encoder(model: CausalLM, on: Backend) -> None:
    """Print how the backend runs a model's encoder, and its launches on a backend that counts them.

    Raises:
        HalError: what a runner would raise.
    """
    from hal.compile.trace import StepSizes
    from hal.drivers.compiler_registry import EAGER
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
    _print_launches(context)


def _print_launches(context: FormContext) -> None:
    import torch

    from hal.drivers.compiler_registry import EAGER, OPTIMIZED
    from hal.execution.steps import Steps
    from hal.execution.uncaptured import Uncaptured

    on, encoder, chosen = context.backend, context.encoder, context.config.compiler
    assert encoder is not None
    try:
        with on.counting_launches():
            pass
    except ConfigError:
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
