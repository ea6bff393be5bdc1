"""Python bindings of the C++ kernels of products with few rows, and of int8 activations."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from hal.ops.forms import Form

from .. import packing
from ..description import ANY, of_rows
from ..low_bits import describe_exact, exact_linear
from ..packing import FewRows, Layout, linear
from .arguments import DTYPES, Bindings, addresses, empty, require

if TYPE_CHECKING:
    from hal.nn import WeightUse


@attrs.frozen
class _Held:
    weight: weakref.ref[Tensor]
    few: FewRows | None


class LinearKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them.

    Attributes:
        path: that of the library.
        few: how weights are multiplied with few rows, by their layout. Weights of other layouts use torch.
        many: whether the kernel of packed weights may be the fastest for many rows, too: in tiles of AMX.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._packed = self.function("packed_linear", None, *[c_void_p] * 4, *[c_int64] * 5)
        self._plain = self.function("plain_linear", None, *[c_void_p] * 4, c_int, *[c_int64] * 4)
        self._block = self.function("packed_block", c_int64, c_void_p, c_void_p, *[c_int64] * 3)
        self._collapse = self.function("collapse_pages", c_int, c_void_p, c_int64)
        self.many = bool(self.function("multiplies_tiles", c_int)())
        self.path = str(library._name)
        self.few: dict[Layout, FewRows] = {}
        self._held: dict[int, _Held] = {}

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, out: Tensor | None = None
    ) -> Tensor:
        """See :func:`hal.ops.linear`, of floating-point weights. Few rows read one once, in the layout that it has."""
        held = self._held.get(id(weight))
        if held is None or held.weight() is not weight:
            held = self._hold(weight)
        few = held.few
        if few is not None and 0 < x.numel() <= few.most * x.shape[-1] and _alike(x, weight, bias):
            return self.few_rows(x, weight, bias, few, self.address_of(weight), out=out)
        return linear(x, weight, bias, out=out)

    def any_rows(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, out: Tensor | None = None
    ) -> Tensor:
        """See :func:`hal.ops.linear`, of floating-point weights in their plain layout. A dot does not depend on rows.

        Raises:
            OperationError: shapes or dtypes differ.
        """
        bias, weight = None if bias is None else bias.to(x.dtype), weight.contiguous()
        require(_alike(x, weight, bias), "linear", x, weight, *(() if bias is None else (bias,)))
        return self.few_rows(x, weight, bias, FewRows(x.numel()), weight.data_ptr(), out=out)

    def describe(self, weight: Tensor, use: WeightUse) -> str:
        """Return who multiplies in :meth:`linear`."""
        few = self._hold(weight).few
        return of_rows((self.named(), 0 if few is None else few.most), *packing.products(weight))

    def few_rows(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        few: FewRows,
        address: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the product with the weight at an address, which has the layout that ``few`` names."""
        features, width = weight.shape
        y = empty((*x.shape[:-1], features), x) if out is None else out
        x = x if x.dim() == 2 else x.reshape(-1, width)
        x = x if x.stride(1) == 1 else x.contiguous()
        bias = None if bias is None else bias.contiguous()
        given = x.data_ptr(), address, None if bias is None else bias.data_ptr(), y.data_ptr()
        if few.block:
            self._packed(*given, x.shape[0], width, features, few.block, x.stride(0))
        else:
            self._plain(*given, DTYPES[x.dtype], x.shape[0], width, features, x.stride(0))
        return y

    def block_of(self, plain: Tensor, packed: Tensor) -> int:
        """Return the rows of a block of a packed weight, or 0 if the kernel does not know its layout."""
        if plain.dtype is not torch.bfloat16:
            return 0
        plain = plain.contiguous()
        nbytes = torch.ops.mkldnn._nbytes(packed)
        return int(self._block(plain.data_ptr(), torch.ops.mkldnn.data_ptr(packed), *plain.shape, nbytes))

    def address_of(self, weight: Tensor) -> int:
        """Return the address of a weight's elements."""
        return int(torch.ops.mkldnn.data_ptr(weight)) if weight.is_mkldnn else weight.data_ptr()

    def collapse_pages(self, weight: Tensor) -> None:
        """Keep a weight in huge pages if the system gives them."""
        if weight.is_mkldnn or weight.is_contiguous():
            nbytes = torch.ops.mkldnn._nbytes(weight) if weight.is_mkldnn else weight.nbytes
            self._collapse(self.address_of(weight), nbytes)

    def _hold(self, weight: Tensor) -> _Held:
        """Note how a weight is multiplied, for as long as it lives."""
        key = id(weight)
        few = self.few.get(Layout.of(weight)) if weight.is_mkldnn or weight.is_contiguous() else None
        held = _Held(weakref.ref(weight, lambda _: self._held.pop(key, None)), few)
        self._held[key] = held
        return held


def _alike(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernels can multiply the tensors. torch refuses others."""
    features, width = weight.shape
    fits = bias is None or (bias.shape == (features,) and bias.dtype is x.dtype and bias.is_cpu)
    return fits and x.is_cpu and x.shape[-1] == width and x.dtype is weight.dtype


INT8_KERNELS = ("dynamic_quantize", "quantize")
MOST_ROWS = 64
"""The default of ``most``."""


class Int8Kernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them.

    Args:
        library: the C++ kernels.
        most: rows above which torch's product is used.
    """

    def __init__(self, library: ctypes.CDLL, most: int = MOST_ROWS) -> None:
        super().__init__(library)
        self._most = most
        self._quantize = self.function("quantize", None, *[c_void_p] * 4, c_int, *[c_int64] * 2)
        self._dynamic = self.function("dynamic_quantize", None, *[c_void_p] * 3, c_int, *[c_int64] * 2)
        self._linear = self.function("int8_linear", None, *[c_void_p] * 7, *[c_int] * 2, *[c_int64] * 3)

    def describe(self, weight: Tensor, use: WeightUse) -> str:
        """Return who multiplies in :meth:`linear`."""
        return of_rows((self.named("int8"), MOST_ROWS), (describe_exact(weight, use), ANY))

    def quantize(self, x: Tensor, scale: Tensor, offset: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.quantize`."""
        fits = scale.dtype is torch.float32 and scale.numel() > 0
        fits = fits and (offset is None or (offset.dtype is torch.int32 and offset.shape == scale.shape))
        require(fits and x.dim() > 0, "quantize", x, scale, *([] if offset is None else [offset]))
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=torch.int8) if out is None else out
        at = None if offset is None else offset.data_ptr()
        width = x.shape[-1]
        rows = x.numel() // max(width, 1)
        self._quantize(x.data_ptr(), scale.data_ptr(), at, y.data_ptr(), DTYPES[x.dtype], rows, width)
        return y

    def dynamic_quantize(self, x: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.dynamic_quantize`. It reads each row from memory once."""
        require(x.dim() > 0, "dynamic_quantize", x)
        x = x.contiguous()
        *leading, width = x.shape
        new = torch.empty(x.shape, dtype=torch.int8), torch.empty(leading, dtype=torch.float32)
        y, scales = new if out is None else out
        rows = x.numel() // max(width, 1)
        self._dynamic(x.data_ptr(), y.data_ptr(), scales.data_ptr(), DTYPES[x.dtype], rows, width)
        return y, scales

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        x_scale: Tensor | None,
        dtype: torch.dtype,
        form: Form,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.linear`, of forms whose sums are exact. Few rows read the weight once."""
        if x.numel() > self._most * x.shape[-1] or not _fits(x, weight, bias, weight_scale, x_scale, dtype):
            return exact_linear(x, weight, bias, weight_scale, None, x_scale, dtype, form, out=out)
        features, width = weight.shape
        y = torch.empty((*x.shape[:-1], features), dtype=dtype) if out is None else out
        x, weight, scale = x.contiguous(), weight.contiguous(), weight_scale.contiguous()
        x_scale, bias = (None if each is None else each.contiguous() for each in (x_scale, bias))
        added = None if bias is None else bias.data_ptr()
        of_sums = bias is not None and bias.dtype is torch.int32
        self._linear(
            *addresses(x, x_scale, weight, scale),
            added if of_sums else None,
            None if of_sums else added,
            y.data_ptr(),
            DTYPES[dtype],
            bias is not None and bias.dtype is torch.float32,
            x.numel() // width,
            width,
            features,
        )
        return y


def _fits(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, x_scale: Tensor | None, dtype: torch.dtype
) -> bool:
    """Return whether the C++ kernel takes the tensors: some rows, of the shapes and dtypes of the declaration."""
    features, width = weight.shape
    fits = x.dtype is weight.dtype is torch.int8 and x.shape[-1] == width and dtype in DTYPES
    fits = fits and x.numel() > 0 and scale.dtype is torch.float32 and scale.shape == (features, 1)
    dtypes = torch.int32, torch.float32, dtype
    fits = fits and (bias is None or (bias.dtype in dtypes and bias.shape == (features,)))
    fits = fits and (x_scale is None or (x_scale.dtype is torch.float32 and x_scale.shape == x.shape[:-1]))
    return fits and all(each is None or each.is_cpu for each in (x, weight, bias, scale, x_scale))
