"""The thread that runs the requests of all callers together."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import attrs

from hal.errors import BatchError, ClosedError, HalError
from hal.execution.runner import Runner
from hal.generation.llm.prompt_pass import PromptPass
from hal.generation.request import Request, Token
from hal.generation.scheduler import Scheduler

Deliver = Callable[[Request, Token | HalError], None]
"""Called in the loop's thread with each token of a request, or with the error that ended it. It must not block."""

log = logging.getLogger("hal.generation")


@attrs.frozen
class Occupancy:
    """What a model has to do.

    Attributes:
        running: the texts that are generated.
        waiting: the texts, and the batches of texts to score or embed, that wait.
        blocks: the blocks of the cache that running texts hold.
        num_blocks: all blocks.
    """

    running: int
    waiting: int
    blocks: int
    num_blocks: int


class ServingLoop:
    """Runs requests and passes over prompts in one thread. Those that come later join the running ones.

    If a step fails, every request that waits or runs gets the error, and the loop goes on. Threading: any thread may
    call the methods.

    Args:
        runner: runs the steps. Nobody else uses it.
        max_requests: the most requests that run together.
        max_length: the most tokens of a request.
    """

    def __init__(self, runner: Runner, max_requests: int, max_length: int) -> None:
        self._runner = runner
        self._limits = {"max_requests": max_requests, "max_length": max_length}
        self._scheduler = Scheduler(runner, **self._limits)
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._passes: deque[tuple[PromptPass, Future[None]]] = deque()
        self._deliver: dict[Request, Deliver] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hal.LLM", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Run requests, and deliver their tokens.

        Raises:
            ClosedError: the loop is closed.
        """
        self._call(lambda: self._add(requests, deliver))

    def cancel(self, requests: Sequence[Request]) -> None:
        """Drop requests, and free what they hold. Nothing more is delivered soon after."""
        with suppress(ClosedError):  # It has ended them.
            self._call(lambda: self._cancel(requests))

    def start(self, prompt_pass: PromptPass) -> Future[None]:
        """Run a pass over prompts, between the steps of requests.

        Returns:
            Its end. It raises a HalError if a step fails, or a prompt has no room in the cache. A pass that has not
            begun can be cancelled.

        Raises:
            ClosedError: the loop is closed.
        """
        done: Future[None] = Future()
        if prompt_pass.finished:
            done.set_result(None)
        else:
            self._call(lambda: self._passes.append((prompt_pass, done)))
        return done

    @property
    def occupancy(self) -> Occupancy:
        """How many requests run and wait, and what they hold."""
        scheduler, passes = self._scheduler, len(self._passes)
        blocks = scheduler.blocks_in_use
        return Occupancy(scheduler.num_running, scheduler.num_waiting + passes, blocks, self._runner.spec.num_blocks)

    def close(self) -> None:
        """End the thread. Every request gets a ClosedError."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, call: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise _closed()
            self._calls.append(call)
            self._wake.notify()

    def _add(self, requests: Sequence[Request], deliver: Deliver) -> None:
        for each in requests:
            self._deliver[each] = deliver
            self._scheduler.add(each)

    def _cancel(self, requests: Sequence[Request]) -> None:
        for each in requests:
            if self._deliver.pop(each, None) is not None:
                self._scheduler.cancel(each)

    def _run(self) -> None:
        while self._await_work():
            try:
                if not self._run_passes() or not self._scheduler.idle:
                    self._step()
            except HalError as error:
                self._fail(error)
            except Exception as error:
                log.exception("a step of hal.LLM failed")
                self._fail(_explained(error))
        self._fail(_closed())

    def _step(self) -> None:
        for request, token in self._scheduler.step():
            self._hand_over(request, _explained(token) if isinstance(token, Exception) else token)

    def _await_work(self) -> bool:
        """Wait for work, and make the calls of other threads. Return whether the loop is open."""
        with self._wake:
            while not (self._closed or self._calls or self._passes or not self._scheduler.idle):
                self._wake.wait()
            calls, self._calls = self._calls, deque()
        for each in calls:
            each()
        return not self._closed

    def _run_passes(self) -> bool:
        """Run a step of the first pass. Return False if there is none, or it waits for room."""
        if not self._passes:
            return False
        first, done = self._passes[0]
        if not (done.running() or done.set_running_or_notify_cancel()):
            self._passes.popleft()
            return True
        try:
            if not first.step():
                if not self._scheduler.idle:
                    return False
                raise BatchError("a prompt has no room in the cache", "raise cache.num_tokens, or shorten the prompt")
        except Exception as error:
            self._passes.popleft()
            done.set_exception(error)
            return True
        if first.finished:
            self._passes.popleft()
            done.set_result(None)
        return True

    def _hand_over(self, request: Request, token: Token | HalError) -> None:
        last = isinstance(token, HalError) or token.finished is not None
        deliver = self._deliver.pop(request, None) if last else self._deliver.get(request)
        if deliver is None:
            return
        try:
            deliver(request, token)
        except RuntimeError:  # The caller's event loop is closed.
            self._deliver.pop(request, None)
            self._scheduler.cancel(request)

    def _fail(self, error: HalError) -> None:
        """End all requests and passes with an error."""
        self._scheduler.close()
        for request in list(self._deliver):
            self._hand_over(request, error)
        while self._passes:
            done = self._passes.popleft()[1]
            if done.running() or done.set_running_or_notify_cancel():
                done.set_exception(error)
        if not self._closed:
            self._scheduler = Scheduler(self._runner, **self._limits)


def _explained(error: Exception) -> HalError:
    if isinstance(error, HalError):
        return error
    failed = BatchError(f"a step failed: {type(error).__name__}: {error}", "see the cause")
    failed.__cause__ = error
    return failed


def _closed() -> ClosedError:
    return ClosedError("this hal.LLM is closed", "create another")
