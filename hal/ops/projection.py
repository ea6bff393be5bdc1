"""Linear projections and embedding lookups, with weights in any form."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.errors import OperationError
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.form_samples import drawn_bias, drawn_input, drawn_weight, result_dtype, samples_of_forms
from hal.ops.forms import FLOAT, Form, dequantize, scale_values, spread

WEIGHTS = (FLOATING, torch.int8, torch.uint8, torch.int32, torch.int64)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
ZERO_POINTS = (torch.int8, torch.float32, torch.bfloat16, torch.float16)
BIAS = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


def _linear_samples(draw: Draw) -> Iterator[Sample]:
    none = None, None, None, None, FLOAT
    for tokens, width, out in ((1, 64, 96), (17, 128, 64), (0, 32, 16)):
        yield draw.normal(tokens, width), draw.normal(out, width, scale=width**-0.5), None, *none
        yield draw.normal(tokens, width), draw.normal(out, width, scale=width**-0.5), draw.normal(out), *none
    yield draw.normal(64, 3).t(), draw.normal(32, 64, scale=0.125), draw.normal(64)[::2], *none  # no unit stride
    yield draw.normal(2, 3, 32), draw.normal(48, 32, scale=0.125), None, *none
    for form, place, width, out in samples_of_forms():
        weight, scale, zero = drawn_weight(draw, form, out, width, place=place)
        x, x_scale = drawn_input(draw, form, (3, 17, 0, 1, 5, 2)[place], width)
        given = weight, drawn_bias(draw, form, out, place=place), scale, zero
        yield x, *given, x_scale, result_dtype(draw, x), form
        if not place:
            x_scale = None if x_scale is None else x_scale.view(1, -1)
            yield x.view(1, *x.shape), *given, x_scale, result_dtype(draw, x), form
    yield draw.normal(3, 64), draw.normal(96, 64, scale=0.125), draw.normal(96).float(), *none


@op(
    samples=_linear_samples,
    axes={
        "x": "... in_features",
        "weight": "out_features packed",
        "bias": "out_features",
        "weight_scale": "row_blocks column_blocks",
        "weight_zero_point": "row_blocks column_blocks",
        "x_scale": "...",
        "return": "... out_features",
    },
    dtypes={
        "x": (FLOATING, torch.int8),
        "weight": WEIGHTS,
        "bias": BIAS,
        "weight_scale": SCALES,
        "weight_zero_point": ZERO_POINTS,
        "x_scale": torch.float32,
        "return": (("dtype", "x"),),
    },
    rowwise="...",
    weights=("weight", "bias", "weight_scale", "weight_zero_point"),
)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    form: Form = FLOAT,
) -> Tensor:
    """Return ``x @ weight.T + bias``, accumulated in float32 and rounded once.

    The weight of another form than :data:`~hal.ops.FLOAT` is ``(weight - weight_zero_point) * weight_scale``, and
    a kernel may round it, its scales and zero points to the result's dtype. Of rounded inputs, the product is
    multiplied by ``x_scale`` before the bias is added. If a scale covers a row of int8 numbers, products are summed
    exactly, and multiplied by the row's scale, then by the input's; a bias of int32 is added to the sums. A
    floating-point weight's bias may be rounded to x's dtype.

    Args:
        x: ``[..., in_features]``: floating; or the result of :func:`float8_quantize`, or in int8 of
            :func:`dynamic_quantize` or :func:`quantize`.
        weight: ``[out_features, in_features]``, of x's dtype, or numbers as the form keeps them: int8; for ``int4``,
            int32 ``[out_features, in_features / 8]``, the first number in the lowest four bits, in two's complement;
            for ``float8``, the bits of e4m3 in uint8; for ``float4``, uint8 ``[out_features, in_features / 2]``. Or as
            :meth:`hal.Backend.prepare_weights` returned it, as the next ones.
        bias: ``[out_features]``, floating, or int32 in units of ``weight_scale`` if no row has several scales; or None.
        weight_scale: ``[blocks of rows, blocks of columns]`` of the form: one for each block, and perhaps the bytes of
            :func:`~hal.ops.forms.with_second`; None of floating-point weights. Of a static input, it includes the
            input's scale.
        weight_zero_point: of the same shape; None for 0.
        x_scale: ``[...]``, float32: the scale of each token; None of an input that is static or not rounded.
        dtype: the dtype of the result; None for that of x.
        form: the form of the weight.

    Returns:
        ``[..., out_features]``, of dtype.
    """
    if weight_scale is None:
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return project(x, weight, bias, weight_scale, weight_zero_point, x_scale, dtype, form)


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype | None,
    form: Form,
) -> Tensor:
    """Return what :func:`linear` does with a weight that has scales."""
    if form.exact:
        sums = int8_matmul(x, weight)
        if bias is not None and bias.dtype is torch.int32:
            sums, bias = sums + bias, None
        values = sums.float() * weight_scale.squeeze(-1)
    else:
        values = functional.linear(x.float(), dequantize(form, weight, weight_scale, weight_zero_point))
        bias = floating_bias(bias, weight_scale, form)
    if x_scale is not None:
        values = values * x_scale.unsqueeze(-1)
    if bias is not None:
        values = values + bias
    return values.to(dtype or x.dtype)


def floating_bias(bias: Tensor | None, weight_scale: Tensor, form: Form) -> Tensor | None:
    """Return a bias of floating-point numbers: one of int32 is multiplied by the scales of its rows.

    Args:
        bias: ``[..., out_features]``, or None.
        weight_scale: ``[..., blocks of rows, blocks of columns]``.
        form: the form of the weight.

    Raises:
        OperationError: the bias is int32, and rows have several scales.
    """
    if bias is None or bias.is_floating_point():
        return bias
    if weight_scale.shape[-1] != 1:
        raise OperationError(
            f"a bias of int32 is in units of its row's scale, and rows of {form} have {weight_scale.shape[-1]} scales",
            "give a floating-point bias",
        )
    scaled: Tensor = bias * spread(scale_values(weight_scale, form), form, bias.shape[-1], 1).squeeze(-1)
    return scaled


def int8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in int32. Devices other than the CPU compute it exactly in float64."""
    kind = torch.int32 if x.device.type == "cpu" else torch.float64
    return (x.to(kind) @ weight.to(kind).t()).to(torch.int32)


def _embedding_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, vocabulary, width in ((1, 10, 64), (33, 100, 96), (0, 4, 8)):
        for dtype in (torch.int32, torch.int64):
            ids = draw.integers(0, vocabulary, tokens, dtype=dtype)
            yield ids, draw.normal(vocabulary, width), None, None, None, FLOAT
    for form, place, width, vocabulary in samples_of_forms():
        if form.inputs == "float":
            kind = (torch.int64, torch.int32)[place % 2]
            ids = draw.integers(0, vocabulary, (5, 17, 0, 3, 1, 2)[place], dtype=kind)
            yield ids, *drawn_weight(draw, form, vocabulary, width, place=place), draw.dtype, form


@op(
    samples=_embedding_samples,
    axes={
        "token_ids": "tokens",
        "weight": "vocab_size packed",
        "weight_scale": "row_blocks column_blocks",
        "weight_zero_point": "row_blocks column_blocks",
        "return": "tokens width",
    },
    dtypes={
        "token_ids": (torch.int32, torch.int64),
        "weight": WEIGHTS,
        "weight_scale": SCALES,
        "weight_zero_point": ZERO_POINTS,
        "return": (("dtype", "weight"),),
    },
    rowwise="tokens",
    weights=("weight", "weight_scale", "weight_zero_point"),
    prepared_as="linear",
)
def embedding(
    token_ids: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    dtype: torch.dtype | None = None,
    form: Form = FLOAT,
) -> Tensor:
    """Return row ``token_ids[i]`` of ``weight`` for each token ``i``.

    The table of another form than :data:`~hal.ops.FLOAT` is also an output projection, and has the layout that
    the driver prepared for :func:`linear`. Its rows are computed in float32 and rounded to dtype once; a kernel may
    round scales and zero points to dtype, too.

    Args:
        token_ids: ``[tokens]``, int32 or int64, less than ``vocab_size``, which the caller checks.
        weight: ``[vocab_size, width]``, floating and as it was loaded, or numbers as :func:`linear` takes them.
        weight_scale: see :func:`linear`.
        weight_zero_point: see :func:`linear`.
        dtype: the dtype of the result, floating; None for that of the weight.
        form: the form of the weight.

    Returns:
        ``[tokens, width]``, of dtype.
    """
    if weight_scale is None:
        return functional.embedding(token_ids, weight)
    rows = weight.index_select(0, token_ids)
    blocks = token_ids // (form.rows or weight.shape[0])
    zero = None if weight_zero_point is None else weight_zero_point.index_select(0, blocks)
    scale = weight_scale.index_select(0, blocks)
    values = dequantize(form.of_rows(), rows, scale, zero)
    return values if dtype is None else values.to(dtype)
