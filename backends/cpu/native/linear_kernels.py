"""Python bindings of the C++ kernels of products with few rows."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import attrs
import torch
from torch import Tensor

from ..packing import FewRows, Layout, linear
from .arguments import DTYPES, Bindings, empty


@attrs.frozen
class _Held:
    weight: weakref.ref[Tensor]
    few: FewRows | None


class LinearKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them.

    Attributes:
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
