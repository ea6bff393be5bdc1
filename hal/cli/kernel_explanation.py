"""The report of ``hal explain`` on the kernels of a model's weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hal.cli.console import print_table
from hal.cli.stdout import echo

if TYPE_CHECKING:
    from torch import Tensor

    from hal.drivers.backend import Backend
    from hal.nn import CausalLM
    from hal.ops.forms import Form


def explain_kernels(model: CausalLM, on: Backend) -> None:
    """Print what computes with each weight of a projection or an embedding; equal ones of several layers once."""
    from hal.nn import WeightUse
    from hal.ops.forms import FLOAT

    computing = next(model.parameters()).dtype
    rows = Counter[tuple[str, ...]]()
    for path, operation, weight, form in _weights(model):
        floats = form == FLOAT
        width, kind = (weight.shape[-1], weight.dtype) if floats else (form.width(weight), form)
        use = WeightUse(operation, weight.dtype if floats else computing, form)
        shape = " x ".join(map(str, (*weight.shape[:-1], width)))
        described = f"{shape} {str(kind).removeprefix('torch.')}"
        rows[without_numbers(path), operation, described, on.describe_kernel(weight, use)] += 1
    table = [(path, str(times), *others) for (path, *others), times in rows.items()]
    print_table(("layer", "times", "operation", "weight", "computed by"), table)
    echo()


def _weights(model: CausalLM) -> Iterator[tuple[str, str, Tensor, Form]]:
    """Yield the layer's path, the operation, the weight and its form."""
    from hal.nn import Embedding, Projection, QuantizedEmbedding
    from hal.ops.forms import FLOAT

    for path, layer in model.named_modules():
        if isinstance(layer, Projection) and hasattr(layer, "weight"):  # A driver's layer may hold other tensors.
            yield path, layer.operation, layer.weight, layer.form
        elif isinstance(layer, QuantizedEmbedding):
            yield path, "embedding", layer.table.weight, layer.table.form
        elif isinstance(layer, Embedding):
            yield path, "embedding", layer.weight, FLOAT
            if f"{path}.weight" in model.tied.values():
                yield path, "linear", layer.weight if layer.projection is None else layer.projection, FLOAT


def without_numbers(path: str) -> str:
    """Return a layer's path with ``*`` in place of numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
