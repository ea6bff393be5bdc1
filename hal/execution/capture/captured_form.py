"""The base classes of captured forms: buckets, padding, the capture budget, and checks of addresses.

:mod:`hal.step.padding` implements the padding of a batch; this module chooses the bucket.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.config.bounds import CAPTURES
from hal.device.graph import Graph
from hal.drivers.compiler import PhaseForm, Plan
from hal.errors import CaptureError, ConfigError, DeviceOutOfMemory, GraphError
from hal.execution.capture.capture_sizes import CaptureBudget, tokens_to_capture
from hal.execution.context import FormContext
from hal.execution.state_spec import free_memory
from hal.nn import CausalLM
from hal.step import Batch, StateMemory, StaticBatch, StepShape

log = logging.getLogger("hal.execution")


@attrs.define
class Bucket:
    """The graphs of one shape.

    Attributes:
        shape: the largest shape that the graphs run.
        static: the batch that the graphs read.
        graphs: in the order of execution.
        parts: further parts of the step, for the subclass.
    """

    shape: StepShape
    static: StaticBatch
    graphs: list[Graph] = attrs.Factory(list)
    parts: list[Any] = attrs.Factory(list)

    def drop(self) -> None:
        """Free all graphs."""
        for graph in self.graphs:
            graph.close()
        self.graphs.clear()
        self.parts.clear()


class CapturedForm(PhaseForm):
    """Runs steps on graphs of several sizes, captured largest first into one pool. Smaller batches are padded.

    A subclass chooses the shapes, captures a bucket, and plans a step on a bucket.

    Attributes:
        context: the form's arguments.
        num_graphs: graphs per bucket.
        any_queries: whether a bucket takes steps of any queries. Otherwise it takes those of its own number.

    Raises:
        CaptureError: a graph cannot be captured, or the device has no room for all, and ``on_capture_error`` is
            ``raise``.
        CompileError: the model cannot be traced or a pass failed, and ``on_capture_error`` is ``raise``.
        ConfigError: the configuration does not fit the model.
    """

    num_graphs: int = 1
    any_queries: bool = False

    def __init__(self, context: FormContext) -> None:
        self.context = context
        self._buckets: dict[int, list[Bucket]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._missing = "no size was captured"
        largest = context.attempt(self._prepared, f"{context.phase} batches run uncaptured")
        if isinstance(largest, str):
            self._missing = largest
        else:
            self._capture(largest)
        self._sizes = {key: [bucket.shape.tokens for bucket in found] for key, found in self._buckets.items()}
        first = next((found[-1] for found in self._buckets.values()), None)
        self._addresses = None
        if context.config.debug and first is not None:
            self._addresses = Addresses(context.model, context.states, first.static.batch)
        log.info(
            "captured %s for %s: %s", context.phase, self.describe(), ", ".join(map(str, self.shapes)) or "nothing"
        )

    @abstractmethod
    def prepare(self) -> Sequence[StaticBatch]:
        """Prepare the captures, and return the batch of the largest size for each number of queries."""

    @abstractmethod
    def shapes_to_capture(self) -> Sequence[StepShape]:
        """Return the shapes to capture, the largest first."""

    @abstractmethod
    def warm_up(self, largest: StaticBatch) -> Callable[[], Any]:
        """Return a function that runs the largest step without graphs, for the budget and to warm up."""

    @abstractmethod
    def capture_bucket(self, bucket: Bucket, pool: Any) -> Any:
        """Capture the graphs of a bucket into a pool, and return the pool."""

    @abstractmethod
    def plan_bucket(self, bucket: Bucket, batch: Any) -> Plan | str:
        """Plan a batch on the bucket of its size, or return why it does not fit; see :meth:`PhaseForm.plan`."""

    def describe(self) -> str:
        """Return a description of the captures, for logs."""
        return "whole steps"

    @property
    def shapes(self) -> list[StepShape]:
        """The shapes that were captured, ascending."""
        return [bucket.shape for found in self._buckets.values() for bucket in found]

    def bucket_for(self, shape: StepShape) -> Bucket | None:
        """Return the smallest bucket that holds a step of ``shape``, or None.

        Padding tokens belong to a sequence behind those of the step. A bucket without sequences takes any.
        """
        key = 0 if self.any_queries else shape.queries
        found = self._buckets.get(key, ())
        for bucket in found[bisect_left(self._sizes[key], shape.tokens) :] if found else ():
            captured = bucket.shape
            room = captured.sequences - shape.sequences
            if shape.tokens and (not captured.sequences or room >= (captured.tokens > shape.tokens)):
                return bucket
        return None

    def plan(self, batch: Any, shape: StepShape) -> Plan | str:
        """Plan a batch on the smallest bucket that holds it."""
        bucket = self.bucket_for(shape)
        if bucket is None:
            found = self._buckets.get(0 if self.any_queries else shape.queries)
            if not found:
                return self._missing
            return f"it is larger than the largest captured size ({found[-1].shape})"
        if self._addresses is not None:
            self._addresses.check()
        return self.plan_bucket(bucket, batch)

    def close(self) -> None:
        """Free all graphs."""
        for found in self._buckets.values():
            for bucket in found:
                self.context.backend.captured_graphs.difference_update(bucket.graphs)
                bucket.drop()
        self._buckets.clear()
        self._sizes.clear()
        self._missing = "the form is closed"

    def _prepared(self) -> Sequence[StaticBatch]:
        with self.context.backend.translating_errors():
            largest = self.prepare()
        self._check_budget(largest)
        return largest

    def _check_budget(self, largest: Sequence[StaticBatch]) -> None:
        context, backend = self.context, self.context.backend
        biggest = max(largest, key=lambda static: static.shape.tokens)
        self._check_sizes(biggest)
        try:
            with backend.translating_errors(), torch.inference_mode():
                budget = CaptureBudget.measure(
                    backend,
                    self.shapes_to_capture(),
                    self.warm_up(biggest),
                    phase=context.phase,
                    graphs=self.num_graphs,
                )
        except DeviceOutOfMemory as error:
            raise CaptureError(f"a step of {biggest.shape} does not fit: {error.problem}", error.remedy) from error
        log.info("%s", budget)
        budget.check()

    def _check_sizes(self, biggest: StaticBatch) -> None:
        """Raise an error if a number of queries has too many sizes, or if the largest step cannot fit."""
        context = self.context
        number = max(Counter(each.queries for each in self.shapes_to_capture()).values(), default=0)
        if number > CAPTURES:
            raise ConfigError(
                f"compilation asks for {number} sizes of {context.phase} steps, and the limit is {CAPTURES}",
                "shorten compilation.capture_sizes; smaller batches run in the next larger size",
            )
        if not self.with_logits:
            return
        logits = biggest.shape.tokens * context.model.vocab_size * context.states.spec.dtype.itemsize
        if logits > (free := free_memory(context.backend.device, logits)):
            raise CaptureError(
                f"the logits of a step of {biggest.shape} take {logits >> 20} MiB, and {free >> 20} MiB are free",
                "lower compilation.max_capture_size, or shorten compilation.capture_sizes",
            )

    def _capture(self, largest: Sequence[StaticBatch]) -> None:
        context, pool = self.context, None
        for shape in self.shapes_to_capture():
            whole = next(each for each in largest if self.any_queries or each.shape.queries == shape.queries)
            bucket = Bucket(shape, whole.first(shape))
            otherwise = f"{context.phase} batches of {shape} run in a larger bucket or uncaptured"
            try:
                with torch.inference_mode():
                    made = context.attempt(partial(self.capture_bucket, bucket, pool), otherwise)
            except BaseException:
                bucket.drop()
                self.close()
                raise
            if isinstance(made, str):
                bucket.drop()
                continue
            pool = made
            self._buckets.setdefault(shape.queries, []).insert(0, bucket)  # The shapes descend.
            context.backend.captured_graphs.update(bucket.graphs)


class TokenForm(CapturedForm):
    """Runs steps of any shape on graphs captured for numbers of tokens, not for whole batches.

    The graphs read and write fixed memory with a row for each token of the bucket. Between the graphs, the splitting
    operations run on the rows of the batch, with its lengths and block tables. One set of graphs thus serves any shape.
    """

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


class Addresses:
    """The addresses of a model's weights and buffers, its states and a batch, by name.

    Args:
        model: looked up again at each check, to find replaced tensors.
        states: looked up again at each check.
        batch: the fixed batch that graphs read.
    """

    def __init__(self, model: CausalLM, states: StateMemory, batch: Batch) -> None:
        self._model, self._states, self._batch = model, states, batch
        self._captured = {name: _place(tensor) for name, tensor in self._tensors()}

    def check(self) -> None:
        """Raise GraphError if the address, the shape or the dtype of a tensor has changed."""
        found = {name: _place(tensor) for name, tensor in self._tensors()}
        moved = sorted(name for name in {*found, *self._captured} if found.get(name) != self._captured.get(name))
        if moved:
            shown = ", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
            raise GraphError(
                f"{shown} has another address than at the capture, and the graphs would read the old memory",
                "write into the tensor with copy_() instead of replacing it, or create another Runner",
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
        for name, tensor in self._states.tensors():
            yield f"state {name}", tensor
        for name, tensor in attrs.asdict(self._batch, recurse=False).items():
            yield f"batch.{name}", tensor


def _place(tensor: Tensor) -> tuple[object, ...]:
    # A weight in a layout of the backend's own has no address that torch shows. The graphs hold that tensor itself.
    address = tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
    return address, tuple(tensor.shape), tensor.dtype, str(tensor.device)
