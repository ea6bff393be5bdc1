"""Python bindings of the C++ kernels that change logits and draw tokens."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.ops.logits import check_words

from .arguments import DTYPES, Bindings, addresses, empty, require, rows

LOGITS_KERNELS = ("mask_logits", "penalize")


class LogitsKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        function = self.function
        self._penalize = function("penalize", None, *[c_void_p] * 7, c_int, *[c_int64] * 3)
        self._mask = function("mask_logits", None, *[c_void_p] * 3, c_int, *[c_int64] * 3)

    def penalize(
        self,
        logits: Tensor,
        counts: Tensor,
        prompted: Tensor,
        repetition_penalty: Tensor,
        frequency_penalty: Tensor,
        presence_penalty: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.penalize`. It rounds where the reference does."""
        penalties = repetition_penalty, frequency_penalty, presence_penalty
        fits = logits.dim() == 2 and counts.shape == prompted.shape == logits.shape
        fits = fits and counts.dtype is torch.int32 and prompted.dtype is torch.bool
        fits = fits and all(each.shape == logits.shape[:1] and each.dtype is torch.float32 for each in penalties)
        require(fits, "penalize", logits, counts, prompted, *penalties)
        logits, (_, stride, _) = rows(logits)
        counts, prompted = counts.contiguous(), prompted.contiguous()
        repetition, frequency, presence = (each.contiguous() for each in penalties)
        y = torch.empty(logits.shape, dtype=torch.float32) if out is None else out
        self._penalize(
            *addresses(logits, counts, prompted, repetition, frequency, presence, y),
            DTYPES[logits.dtype],
            *logits.shape,
            stride,
        )
        return y

    def mask_logits(self, logits: Tensor, allowed: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.mask_logits`. It copies elements as bits.

        Raises:
            OperationError: ``allowed`` has another number of words, or shapes or dtypes differ.
        """
        fits = logits.dim() == allowed.dim() == 2 and allowed.shape[0] == logits.shape[0]
        require(fits and allowed.dtype is torch.int32, "mask_logits", logits, indices=(allowed,))
        check_words(logits.shape[1], allowed.shape[1])
        logits, (_, stride, _) = rows(logits)
        allowed = allowed.contiguous()
        y = empty(logits.shape, logits) if out is None else out
        self._mask(logits.data_ptr(), allowed.data_ptr(), y.data_ptr(), DTYPES[logits.dtype], *logits.shape, stride)
        return y


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
            *addresses(logits, *columns, tokens), DTYPES[logits.dtype], logits.shape[0], logits.shape[1], stride
        )
        return tokens
