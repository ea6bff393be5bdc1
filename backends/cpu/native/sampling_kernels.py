"""Python bindings of the C++ kernels that draw tokens."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from .arguments import DTYPES, Bindings, require, rows

SAMPLING_KERNELS = ("sample",)


class SamplingKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._sample = self.function("sample", None, *[c_void_p] * 8, c_int, *[c_int64] * 3)

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        step: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.sample`. It ranks tokens only for top_k and top_p, and only those near the limit.

        Tokens of logit -inf are never drawn. A row whose largest logit is not finite gives the reference's token: 0 if
        a logit is NaN or all are -inf, or else the first of those that are inf.
        """
        parameters = (temperature, top_k, top_p, min_p, seed, step)
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
        fits = logits.dim() == 2 and logits.shape[1] > 0
        fits = fits and all(each.shape == logits.shape[:1] for each in parameters)
        fits = fits and all(each.dtype is dtype for each, dtype in zip(parameters, dtypes, strict=True))
        require(fits, "sample", logits, indices=parameters)
        logits, (_, stride, _) = rows(logits)
        columns = [each.contiguous() for each in parameters]
        tokens = torch.empty(logits.shape[0], dtype=torch.int64) if out is None else out
        self._sample(
            logits.data_ptr(),
            *(column.data_ptr() for column in columns),
            tokens.data_ptr(),
            DTYPES[logits.dtype],
            logits.shape[0],
            logits.shape[1],
            stride,
        )
        return tokens
