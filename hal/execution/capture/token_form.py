"""The base class of forms whose graphs are captured for numbers of tokens, not for whole batches.

Their graphs read and write fixed memory with a row for each token of the bucket. Between the graphs, the splitting
operations run on the rows of the batch, with its lengths and block tables. One set of graphs thus serves any shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal.execution.capture.capture_sizes import tokens_to_capture
from hal.execution.capture.captured_form import CapturedForm
from hal.step import StaticBatch, StepShape


class TokenForm(CapturedForm):
    """Runs steps of any shape on graphs captured for numbers of tokens."""

    any_queries = True

    def prepare(self) -> Sequence[StaticBatch]:
        """Return a batch of the largest number of tokens."""
        most = tokens_to_capture(self.context)[-1]
        spec = self.context.states.spec
        decodes = self.context.phase == "decode"
        sequences = most if decodes else 1
        # Some kernels reject a sequence longer than the cache. The rows beyond it are not used.
        length = min(most // sequences, spec.num_tokens)
        return [
            self.context.static_batch(
                StepShape(most, sequences, length), max_blocks=1 if decodes else spec.blocks_for(most), length=length
            )
        ]

    def shapes_to_capture(self) -> Sequence[StepShape]:
        """Return a shape for each number of tokens, with any sequences."""
        return [StepShape(size, 0, 0) for size in reversed(tokens_to_capture(self.context))]

    def describe(self) -> str:
        """Return the number of pieces."""
        return f"{self.num_graphs} pieces"
