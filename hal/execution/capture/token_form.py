"""Steps that are captured for numbers of tokens, not for whole batches: what all ways to do so have in common.

Their graphs read and write fixed memory with a row for each token of their bucket. What cannot be captured runs between
the graphs, on the rows that a batch fills and on its own lengths and block tables; so one set of graphs serves steps of
any shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal.execution.capture.capture_sizes import tokens_to_capture
from hal.execution.capture.captured_form import CapturedForm
from hal.step import StaticBatch, StepShape


class TokenForm(CapturedForm):
    """Runs steps of any shape by graphs for numbers of tokens."""

    def prepare(self) -> Sequence[StaticBatch]:
        """A batch of the largest number of tokens."""
        most = tokens_to_capture(self.context)[-1]
        spec = self.context.states.spec
        decodes = self.context.phase == "decode"
        sequences = most if decodes else 1
        # There are kernels that refuse a sequence that is longer than the cache: what it leaves is nobody's.
        length = min(most // sequences, spec.num_tokens)
        return [self.context.static_batch(
            StepShape(most, sequences, length), max_blocks=1 if decodes else spec.blocks_for(most), rows=sequences,
            length=length,
        )]  # fmt: skip

    def shapes_to_capture(self) -> Sequence[StepShape]:
        """For each number of tokens, whatever its sequences."""
        return [StepShape(size, 0, 0) for size in reversed(tokens_to_capture(self.context))]

    def size_of(self, shape: StepShape) -> tuple[int, int]:
        """All buckets together, by tokens."""
        return 0, shape.tokens

    def describe(self) -> str:
        """How many pieces."""
        return f"{self.num_graphs} pieces"
