"""The step of an encoder, and the cache of its results."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from torch import Tensor

from hal.drivers.backend import Backend
from hal.errors import CaptureError, CompileError, ModelError
from hal.execution.encoder_steps import (
    GRAPH,
    INDUCTOR,
    CapturedEncoder,
    EncoderStep,
    eager_encoder,
    encoder_compiler,
    encoder_step,
)
from hal.nn import Encoder, EncoderItem

log = logging.getLogger("hal.execution")


def most_tokens(encoder: Encoder, backend: Backend) -> int:
    """Return the most tokens of an encoder's step, those of ``max_prefill_tokens`` rows. One item may have more."""
    return encoder.row_tokens * backend.config.max_prefill_tokens


class Encoding:
    """Encodes the items of prompts, and keeps the results of the most recent ones.

    Args:
        encoder: a module of a model that is loaded on the backend.
        backend: runs the encoder, as ``compilation.encoder`` says.

    Attributes:
        steps: the steps so far.
        prepared_early: whether the runner calls :meth:`prepare` when it is made, as for all that is captured.
    """

    def __init__(self, encoder: Encoder, backend: Backend) -> None:
        self._encoder, self._backend = encoder, backend
        self._budget = backend.config.cache.num_embeddings
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # the least recently used first
        self._rows = 0
        self._step: EncoderStep | None = None
        self.steps = 0
        self.prepared_early = encoder_compiler(backend) in (GRAPH, INDUCTOR)

    def prepare(self) -> None:
        """Make what runs the steps, unless that is done.

        Raises:
            CaptureError: a size cannot be captured, and ``on_capture_error`` is ``raise``.
            CompileError: the encoder cannot be traced or compiled, and ``on_capture_error`` is ``raise``.
        """
        if self._step is not None:
            return
        try:
            self._step = encoder_step(self._encoder, self._backend)
        except (CaptureError, CompileError) as error:
            if self._backend.config.compilation.on_capture_error == "raise":
                raise
            log.warning("%s runs its Python code: %s", type(self._encoder).__name__, str(error))
            self._step = eager_encoder(self._encoder)

    @property
    def replays(self) -> int:
        """How many steps ran on graphs."""
        return self._step.replays if isinstance(self._step, CapturedEncoder) else 0

    def close(self) -> None:
        """Free the graphs."""
        if isinstance(self._step, CapturedEncoder):
            self._step.close()

    def encode(self, items: Sequence[EncoderItem]) -> list[Tensor]:
        """Return the embeddings of each item, ``[rows, width]``, on the device. Those in the cache are not computed.

        Raises:
            BatchError: an item does not fit the encoder.
            ModelError: the encoder returned tensors of other shapes.
        """
        missing = {each.digest: each for each in items if each.digest not in self._kept}
        found = {each.digest: self._kept[each.digest] for each in items if each.digest not in missing}
        for group in _groups(list(missing.values()), most_tokens(self._encoder, self._backend)):
            found |= {each.digest: made for each, made in zip(group, self._encode(group), strict=True)}
        for digest, embeddings in found.items():
            self._keep(digest, embeddings)
        return [found[each.digest] for each in items]

    def clear(self) -> None:
        """Forget all results, which other weights computed."""
        self._kept.clear()
        self._rows = 0

    def _encode(self, items: list[EncoderItem]) -> list[Tensor]:
        batch = self._encoder.batch(items).to(self._backend.device.torch)
        self.prepare()
        assert self._step is not None
        (embeddings,) = self._step(batch)
        self.steps += 1
        wanted = sum(map(self._encoder.rows, items))
        if embeddings.dim() != 2 or embeddings.shape[0] < wanted:
            raise ModelError(
                f"{type(self._encoder).__name__}.forward returned {list(embeddings.shape)}, not [{wanted}, width]",
                "return a row for every `row_tokens` tokens",
            )
        return [each.clone() for each in self._encoder.per_item(items, embeddings)]

    def _keep(self, digest: bytes, embeddings: Tensor) -> None:
        rows = embeddings.shape[0]
        if digest in self._kept:
            self._kept.move_to_end(digest)
        elif rows <= self._budget:
            self._kept[digest] = embeddings
            self._rows += rows
        while self._rows > self._budget:
            _, dropped = self._kept.popitem(last=False)
            self._rows -= dropped.shape[0]


def _groups(items: list[EncoderItem], most: int) -> Iterator[list[EncoderItem]]:
    """Yield the items in groups of at most so many tokens, or single ones."""
    group: list[EncoderItem] = []
    tokens = 0
    for each in items:
        count = each.values.shape[0]
        if group and tokens + count > most:
            yield group
            group, tokens = [], 0
        group.append(each)
        tokens += count
    if group:
        yield group
