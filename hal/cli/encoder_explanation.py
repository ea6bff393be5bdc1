"""The report of ``hal explain`` on a model's encoder."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hal.cli.console import print_table
from hal.cli.explanation import print_rewrites, print_stages
from hal.cli.stdout import echo
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.drivers.backend import Backend
    from hal.nn import Encoder

EMBEDDINGS = 16
"""Embeddings of the image whose launches are counted."""


def explain_encoder(encoder: Encoder, on: Backend) -> None:
    """Print how the backend runs an encoder, and its launches on a backend that counts them.

    Raises:
        HalError: what a runner would raise.
    """
    from hal.drivers.compiler_registry import EAGER
    from hal.execution.encoder_steps import GRAPH, INDUCTOR, encoder_compiler, encoder_sizes, optimized_encoder

    chosen = encoder_compiler(on)
    echo(f"\n{type(encoder).__name__}, {on.name}: a step of the encoder, {chosen}\n")
    if chosen == EAGER:
        echo("the encoder's Python code is run eagerly; no rewrite is applied")
    elif chosen == INDUCTOR:
        echo("Inductor compiles the traced graph for any number of images; no rewrite is applied")
    else:
        with on.translating_errors():
            step = optimized_encoder(encoder, on)
        print_stages(step.stages)
        echo()
        print_rewrites(step, on)
        if chosen == GRAPH:
            sizes = ", ".join(map(str, encoder_sizes(on)))
            echo(f"\nsteps of up to {sizes} embeddings are captured; larger ones run uncaptured")
    _print_launches(encoder, on)


def _print_launches(encoder: Encoder, on: Backend) -> None:
    import torch

    from hal.execution.encoder_steps import encoder_step

    try:
        with on.counting_launches():
            pass
    except ConfigError:
        return
    batch = encoder.batch([encoder.example(EMBEDDINGS * encoder.row_tokens)]).to(on.device.torch)
    token = on.enter()
    try:
        with on.translating_errors(), torch.inference_mode():
            step = encoder_step(encoder, on)
            step(batch)
            on.device.synchronize()
            with on.counting_launches() as found:
                step(batch)
    finally:
        on.leave(token)
    counts = Counter(found)
    kernels = ", ".join(f"{name} {times}" for name, times in counts.items())
    echo()
    print_table(("launches of the encoder", "one image", "kernels"), [("all layers", str(counts.total()), kernels)])
