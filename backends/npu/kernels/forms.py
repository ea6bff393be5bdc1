"""The forms of weights: for each operation, which forms a kernel takes, and how weights are prepared for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from hal.ops.declaration.operation import operation
from hal.ops.kernels import torch_kernels
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import Takes, plain

from ..soc import LEAST_GROUP, Generation
from . import experts, kernels, quantized, quantized_experts, w4a8
from .low_bits import LowBits, takes

if TYPE_CHECKING:
    from hal.nn import WeightUse

Prepare = Callable[[Mapping[str, Tensor], "WeightUse"], Mapping[str, Tensor]]


@attrs.frozen(eq=False)
class FormKernel:
    """A kernel of weights in some forms.

    Attributes:
        takes: which forms it takes.
        kernel: takes the operation's arguments by position.
        prepare: returns weights as the kernel takes them; see :meth:`hal.Backend.prepare_weights`.
    """

    takes: Takes
    kernel: Kernel
    prepare: Prepare = lambda weights, use: weights


def form_kernels(device: torch.device, generation: Generation, *, nz: bool) -> dict[str, Sequence[FormKernel]]:
    """Return the kernels of each operation, of which the first that takes a form is its kernel.

    Args:
        device: the device.
        generation: its generation.
        nz: whether weights are in FRACTAL_NZ where the kernel takes it.
    """
    product = experts.grouped_linear if generation.experts else operation("grouped_linear").reference
    low = LowBits(device, product, nz=nz and generation.weight_quant_nz, expert_groups=generation.expert_groups)
    mixed = w4a8.Int8ByInt4(low)
    exact: Takes = attrgetter("exact")
    linear = [
        FormKernel(plain, torch_kernels.linear, partial(kernels.prepared, nz=nz)),
        FormKernel(exact, by_rows(quantized.linear), partial(quantized.prepared, nz=nz)),
        FormKernel(lambda form: takes(form) and form.columns % LEAST_GROUP == 0, by_rows(low.linear), low.prepared),
        FormKernel(lambda form: True, by_rows(low.widened_linear), low.prepared_to_widen),
    ]
    grouped = [
        FormKernel(plain, product, partial(experts.prepared, nz=nz and generation.experts)),
        FormKernel(lambda form: not form.exact, by_rows(low.widened_grouped_linear), low.prepared_to_widen),
    ]
    if generation.experts:
        grouped[1:1] = [
            FormKernel(exact, by_rows(quantized_experts.grouped_linear), partial(quantized_experts.prepared, nz=nz)),
            FormKernel(takes, by_rows(low.grouped_linear), low.prepared_experts),
        ]
    if generation.int8_by_int4:
        linear.insert(1, FormKernel(w4a8.takes, by_rows(mixed.linear), mixed.prepared))
        grouped.insert(1, FormKernel(w4a8.takes, by_rows(mixed.grouped_linear), mixed.prepared))
    embedding = [
        FormKernel(plain, torch_kernels.embedding),
        FormKernel(lambda form: form.inputs == "float", low.embedding),
    ]
    return {"linear": linear, "grouped_linear": grouped, "embedding": embedding}


def by_rows(kernel: Kernel) -> Kernel:
    """Return a kernel of a product with scaled weights that calls another one with x ``[rows, in_features]``.

    The other one gets at least one row, and computes in the dtype of a floating-point x.
    """

    @wraps(kernel)
    def product(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        *given, x_scale, dtype, form = rest
        if x.dim() != 2:
            scale = None if x_scale is None else x_scale.reshape(-1)
            flat = product(x.reshape(-1, x.shape[-1]), weight, *given, scale, dtype, form)
            return flat.view(*x.shape[:-1], weight.shape[-2])
        if not x.shape[0]:
            return x.new_empty(0, weight.shape[-2], dtype=dtype)
        found: Tensor = kernel(x, weight, *rest)
        return found if dtype is None else found.to(dtype)

    return product
