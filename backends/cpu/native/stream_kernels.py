"""Python bindings of the C++ kernels of hyper-connections."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.ops import HyperConnectionOptions

from .arguments import DTYPES, Bindings, addresses, empty, require

STREAM_KERNELS = ("collapse_streams", "expand_streams")


class StreamKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them. A token's result does not depend on the other tokens."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._collapse = self.function("collapse_streams", None, *[c_void_p] * 7, c_int, *[c_int64] * 4, *[c_float] * 4)
        self._expand = self.function("expand_streams", None, *[c_void_p] * 5, c_int, *[c_int64] * 3)

    def collapse_streams(
        self,
        streams: Tensor,
        projection: Tensor,
        base: Tensor,
        scale: Tensor,
        options: HyperConnectionOptions,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`hal.ops.collapse_streams`. It reads the projection once for four tokens.

        Raises:
            OperationError: shapes or dtypes differ.
        """
        tokens, count, hidden = streams.shape
        weights, given = options.rows(count), (projection, base, scale)
        shapes = (weights, count * hidden), (weights,), (3 if options.iterations else 2,)
        fits = all(each.shape == shape for each, shape in zip(given, shapes, strict=True))
        fits = fits and all(each.dtype is torch.float32 for each in given)
        require(fits, "collapse_streams", streams, *given)
        streams, projection, base, scale = (each.contiguous() for each in (streams, *given))
        if out is None:
            post, mix = empty((tokens, count), base), empty((tokens, count, count), base)
            out = empty((tokens, hidden), streams), post, mix
        self._collapse(
            *addresses(streams, projection, base, scale, *out),
            DTYPES[streams.dtype],
            *(tokens, count, hidden, options.iterations),
            *(options.norm_eps, options.eps, options.magnitude, options.post_eps),
        )
        return out

    def expand_streams(
        self, streams: Tensor, output: Tensor, post: Tensor, mix: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """See :func:`hal.ops.expand_streams`.

        Raises:
            OperationError: shapes or dtypes differ.
        """
        tokens, count, hidden = streams.shape
        fits = output.shape == (tokens, hidden) and output.dtype is streams.dtype
        fits = fits and post.shape == (tokens, count) and mix.shape == (tokens, count, count)
        fits = fits and post.dtype is mix.dtype is torch.float32
        require(fits, "expand_streams", streams, output, post, mix)
        streams, output, post, mix = (each.contiguous() for each in (streams, output, post, mix))
        found = empty(streams.shape, streams) if out is None else out
        self._expand(*addresses(streams, output, post, mix, found), DTYPES[streams.dtype], tokens, count, hidden)
        return found
