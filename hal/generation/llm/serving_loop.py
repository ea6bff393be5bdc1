"""The thread that runs the requests of all callers together, on every rank that shares the model."""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import attrs
from tokenizers import Tokenizer

from hal.errors import AsleepError, BatchError, ClosedError, ConfigError, HalError, NumericsError
from hal.generation.llm.engine import Engine
from hal.generation.llm.loop_pass import Pass
from hal.generation.llm.model_weights import asleep
from hal.generation.request import Request, Token, checked
from hal.generation.scheduler import Scheduler
from hal.parallel.host_values import RankMessages

P = TypeVar("P", bound=Pass)

Deliver = Callable[[Request, Token | HalError], None]
"""Called in the loop's thread with each token of a request, or with the error that ended it. It must not block."""

Call = tuple[str, Any]
"""A call that every rank makes before the same step: the name of a method without ``_``, and its argument."""
OF_ALL_RANKS = (AsleepError, BatchError, ConfigError, NumericsError)
"""Errors that every rank raises in the same step, so that they can go on."""

log = logging.getLogger("hal.generation")


@attrs.frozen
class Occupancy:
    """What a model has to do.

    Attributes:
        running: the texts that are generated.
        waiting: the texts, and the batches of texts to score or embed, that wait.
        blocks: the blocks of the cache that running texts hold.
    """

    running: int
    waiting: int
    blocks: int
    num_blocks: int


class ServingLoop:
    """Runs requests and passes over prompts in one thread. Those that come later join the running ones.

    If a step fails, every request that waits or runs gets the error, and the loop goes on. Threading: any thread may
    call the methods.

    Ranks that share the model each have a loop. The first one takes the calls, and the others make them before the same
    step. An error that not all ranks have ends the loop.

    Args:
        engine: runs the steps. Nobody else uses it.
        max_requests: the most requests that run together.

    Raises:
        CommunicationError: the ranks do not reach each other.
    """

    def __init__(self, engine: Engine, max_requests: int, tokenizer: Callable[[], Tokenizer]) -> None:
        self._engine, self._runner, self._tokenizer = engine, engine.runner, functools.cache(tokenizer)
        self._max_length = engine.max_length
        limits: dict[str, Any] = {"max_requests": max_requests, "max_length": engine.max_length}
        self._new_scheduler = functools.partial(Scheduler, self._runner, **limits, speculation=engine.speculation)
        self._scheduler = self._new_scheduler()
        self._ranks = RankMessages(self._runner.backend.mesh)
        self._wake = threading.Condition()
        self._numbers = itertools.count()
        self._calls: deque[Call] = deque()
        self._passes: deque[tuple[Callable[[Engine], Pass], Pass, Future[Any]]] = deque()
        self._pass: tuple[Pass, Future[Any]] | None = None
        self._live: dict[int, tuple[Request, Deliver]] = {}
        self._closed = False
        self._failure: HalError | None = None
        self._thread = threading.Thread(target=self._run, name="hal.LLM", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Run requests, and deliver their tokens.

        Raises:
            ClosedError: the loop is closed.
            AsleepError: the model sleeps.
            ConfigError: a request has a mask that cannot be passed on to other ranks.
            HalError: an error has ended the loop, or this is not the first rank.
        """
        if not self._ranks.alone and any(each.params.mask is not None for each in requests):
            raise ConfigError(
                "mask is a function, which ranks that share hal.LLM cannot pass on",
                "give json_schema or regex, or call hal.generate in each rank",
                key="mask",
            )
        if (error := asleep(self._engine)) is not None:
            raise error
        for each in requests:
            each.number = next(self._numbers)
        self._call("add", [(each, deliver) for each in requests])

    def cancel(self, requests: Sequence[Request]) -> None:
        """Drop requests, and free what they hold. Nothing more is delivered soon after."""
        with suppress(HalError):  # It has ended them.
            self._call("cancel", [each.number for each in requests])

    def tokens_of(self, requests: Sequence[Request]) -> dict[Request, list[Token]]:
        """Run requests, and return the tokens of each.

        Raises:
            HalError: as :meth:`submit`, or a step failed.
        """
        found: dict[Request, list[Token]] = {each: [] for each in requests}
        failed: list[HalError] = []
        left, done = set(requests), threading.Event()

        def deliver(request: Request, token: Token | HalError) -> None:
            if isinstance(token, HalError):
                failed.append(token)
            else:
                found[request].append(token)
            if isinstance(token, HalError) or token.finished:
                left.discard(request)
                if not left:
                    done.set()

        self.submit(requests, deliver)
        try:
            done.wait()
        finally:
            if left:
                self.cancel(requests)
        if failed:
            raise failed[0]
        return found

    def start(self, make: Callable[[Engine], P]) -> Future[P]:
        """Run a pass, between the steps of requests. One that is to run alone waits until the running ones have ended.

        Args:
            make: returns the pass. Other ranks get it by pickle.

        Returns:
            The pass at its end. It raises a HalError if a step fails, or a prompt has no room in the cache. A pass that
            has not begun can be cancelled.

        Raises:
            HalError: as :meth:`submit`.
        """
        made, done = make(self._engine), Future[P]()
        if made.finished:
            done.set_result(made)
        else:
            with self._wake:
                self._check_open()
                self._passes.append((make, made, done))
                self._wake.notify()
        return done

    @property
    def occupancy(self) -> Occupancy:
        """How many requests run and wait, and what they hold."""
        scheduler, passes = self._scheduler, len(self._passes) + (self._pass is not None)
        blocks = scheduler.blocks_in_use
        return Occupancy(scheduler.num_running, scheduler.num_waiting + passes, blocks, self._runner.spec.num_blocks)

    @property
    def ended(self) -> bool:
        """Whether the loop has ended, or will end soon."""
        return self._closed

    def close(self) -> None:
        """End the thread. Every request gets a ClosedError. A rank but the first waits until that one closes its loop.

        Raises:
            HalError: the error that ended the loop before.
        """
        if self._ranks.first:
            with self._wake:
                self._closed = True
                self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            if self._failure is not None:
                raise self._failure

    def _check_open(self) -> None:
        if not self._ranks.first:
            raise ConfigError("this is not the first rank, which takes the requests of hal.LLM", "call it in rank 0")
        if self._closed:
            raise self._failure or _closed()

    def _call(self, name: str, argument: Any) -> None:
        with self._wake:
            self._check_open()
            self._calls.append((name, argument))
            self._wake.notify()

    def _add(self, requests: Sequence[tuple[Request, Deliver]]) -> None:
        sleeps = asleep(self._engine)
        for request, deliver in requests:
            self._live[request.number] = request, deliver
            try:
                if sleeps is not None:
                    raise sleeps
                self._scheduler.add(request)
            except (AsleepError, ConfigError) as error:
                self._hand_over(request, error)

    def _order(self, orders: Sequence[tuple[int, int | None, int, tuple[Any, ...], str | None]]) -> None:
        """Make the requests that the first rank adds, and add them."""
        for number, leader, sample_index, (index, tokens, params, items), adapter in orders:
            more: dict[str, Any] = {"tokenizer": self._tokenizer()} if params.in_text else {}
            more |= {"max_length": self._max_length, "items": items}
            request = checked(self._runner, index, tokens, params, **more)
            request.number, request.sample_index, request.adapter = number, sample_index, adapter
            request.leader = self._live[leader][0] if leader in self._live else None
            self._add([(request, lambda request, token: None)])

    def _cancel(self, numbers: Sequence[int]) -> None:
        for each in numbers:
            if each in self._live:
                self._scheduler.cancel(self._live.pop(each)[0])

    def _begin(self, make: Callable[[Engine], Pass]) -> None:
        if self._pass is None:  # in another rank
            self._pass = make(self._engine), Future()

    def _run(self) -> None:
        try:
            while self._make_calls():
                try:
                    self._run_pass()
                    if not self._scheduler.idle:
                        self._step()
                except Exception as error:
                    self._fail(self._survived(error))
        except Exception as error:
            self._failure = _explained(error)
        finally:
            with self._wake:
                self._closed = True
            for name, argument in self._calls:
                if name == "add":
                    self._add(argument)
            self._fail(self._failure or _closed())
            self._ranks.close()

    def _step(self) -> None:
        for request, token in self._scheduler.step():
            self._hand_over(request, self._survived(token) if isinstance(token, Exception) else token)

    def _survived(self, error: Exception) -> HalError:
        """Return the error that requests get. Raise one that ends the loop."""
        if not (self._ranks.alone or isinstance(error, OF_ALL_RANKS)):
            raise error
        return _explained(error)

    def _make_calls(self) -> bool:
        """Wait for work, and make the calls of other threads or the first rank. Return whether the loop is open."""
        calls = self._awaited() if self._ranks.first else []
        if self._ranks.first:
            self._ranks.passed_on(b"" if calls == [] or self._ranks.alone else _packed(calls))
        elif message := self._ranks.passed_on(b""):
            calls = pickle.loads(message)
        for name, argument in calls or ():
            getattr(self, f"_{name}")(argument)
        return calls is not None

    def _awaited(self) -> list[Call] | None:
        """Wait for work, and return the calls that begin it; None if the loop is to end. Ranks do not wait for long."""
        with self._wake:
            while not (self._closed or self._calls or self._passes or self._pass or not self._scheduler.idle):
                if not self._wake.wait(self._ranks.interval):
                    break
            if self._closed:
                return None
            calls = self._taken()
            while self._passes and self._pass is None:
                make, made, done = self._passes.popleft()
                if done.set_running_or_notify_cancel():
                    self._pass = made, done
                    calls.append(("begin", make))
        return calls

    def _taken(self) -> list[Call]:
        """Return the calls to make now. While a pass waits to run alone, these are cancellations of what runs."""
        held = self._pass is not None and self._pass[0].alone
        calls, later = list[Call](), deque[Call]()
        for each in self._calls:
            waits = held and (each[0] != "cancel" or self._live.keys().isdisjoint(each[1]))
            (later if waits else calls).append(each)
        self._calls = later
        return calls

    def _run_pass(self) -> None:
        """Run a step of the pass, unless there is none, or it waits for room or for requests."""
        if self._pass is None:
            return
        found, done = self._pass
        if found.alone and not self._scheduler.idle:
            return
        try:
            if not found.step():
                if not self._scheduler.idle:
                    return
                raise BatchError("a prompt has no room in the cache", "raise cache.num_tokens, or shorten the prompt")
        except Exception as error:
            self._survived(error)
            self._pass = None
            done.set_exception(error)
            return
        if found.finished:
            self._pass = None
            done.set_result(found)

    def _hand_over(self, request: Request, token: Token | HalError) -> None:
        last = isinstance(token, HalError) or token.finished is not None
        _, deliver = self._live.pop(request.number, _NOBODY) if last else self._live.get(request.number, _NOBODY)
        if deliver is None:
            return
        try:
            deliver(request, token)
        except RuntimeError:  # The caller's event loop is closed.
            self.cancel([request])

    def _fail(self, error: HalError) -> None:
        """End all requests and passes with an error."""
        self._scheduler.close()
        for request, _ in list(self._live.values()):
            self._hand_over(request, error)
        waiting = [done for _, _, done in self._passes if done.set_running_or_notify_cancel()]
        self._passes.clear()
        for done in [*waiting, *([self._pass[1]] if self._pass else [])]:
            done.set_exception(error)
        self._pass = None
        if not self._closed:
            self._scheduler = self._new_scheduler()


_NOBODY: tuple[None, None] = None, None


def _packed(calls: Sequence[Call] | None) -> bytes:
    """Return calls for other ranks, which make the requests themselves."""

    def order(request: Request) -> tuple[int, int | None, int, tuple[Any, ...], str | None]:
        items = () if request.inputs is None else request.inputs.items
        made = request.prompt_index, request.tokens[: request.length], request.params, items
        leader = None if request.leader is None else request.leader.number
        return request.number, leader, request.sample_index, made, request.adapter

    packed = [
        ("order", [order(each) for each, _ in given]) if name == "add" else (name, given) for name, given in calls or ()
    ]
    return pickle.dumps(None if calls is None else packed)


def _explained(error: Exception) -> HalError:
    if isinstance(error, HalError):
        return error
    log.error("a step of hal.LLM failed", exc_info=error)
    failed = BatchError(f"a step failed: {type(error).__name__}: {error}", "see the cause")
    failed.__cause__ = error
    return failed


def _closed() -> ClosedError:
    return ClosedError("this hal.LLM is closed", "create another")
