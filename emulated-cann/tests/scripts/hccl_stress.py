"""Random collectives and messages on overlapping groups of ranks, eager and replayed; every rank draws the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hccl import Buffer, Communicator, connect, run

SIZES, DTYPES = (1, 3, 64, 1000, 20000), ("float32", "float16", "int32", "int8")
KINDS = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "scatter", "all_gather", "all_to_all")
KINDS += ("all_to_all_v", "pair")
REPLAYS = 3
"""How often a graph is replayed."""
Drawn = tuple[Communicator, int, int]
"""A group, the seed of a call on it, and a number that all ranks give the call."""


def data(rank: int, salt: int, size: int, dtype: str) -> np.ndarray:
    """Return small integers, whose sums and products are exact in every type."""
    return ((np.arange(size) * 7 + rank * 13 + salt) % 5).astype(dtype)


class Draw:
    """One random call on a communicator: its buffers, and the results that are due."""

    def __init__(self, random: random.Random, group: Communicator, salt: int) -> None:
        self.group, self.kind, self.dtype = group, random.choice(KINDS), random.choice(DTYPES)
        self.size, self.root, self.op = (
            random.choice(SIZES),
            random.randrange(group.ranks),
            random.choice(("sum", "max")),
        )
        self.matrix = [[random.randrange(5) for _ in range(group.ranks)] for _ in range(group.ranks)]
        self.label = f"{salt}: {self.kind} of {self.size} {self.dtype} on {group.name}"
        getattr(self, f"_{self.kind}")(salt)

    def _inputs(self, salt: int, sizes: list[int]) -> list[np.ndarray]:
        return [data(rank, salt, size, self.dtype) for rank, size in enumerate(sizes)]

    def _reduced(self, inputs: list[np.ndarray]) -> np.ndarray:
        stacked = np.stack(inputs).astype(np.float64)
        return (stacked.sum(0) if self.op == "sum" else stacked.max(0)).astype(self.dtype)

    def _set(self, send: np.ndarray, due: np.ndarray, call: Callable[[Buffer, Buffer], None]) -> None:
        self.send, self.receive, self.due = Buffer(send), Buffer(np.full(due.shape, 99, self.dtype)), due
        self.call = lambda: call(self.send, self.receive)

    def _all_reduce(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [self.size] * self.group.ranks), self.group
        self._set(
            inputs[g.rank], self._reduced(inputs), lambda a, b: g.all_reduce(a, b, self.size, self.dtype, self.op)
        )

    def _reduce(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [self.size] * self.group.ranks), self.group
        due = self._reduced(inputs) if g.rank == self.root else np.full(self.size, 99, self.dtype)
        self._set(inputs[g.rank], due, lambda a, b: g.reduce(a, b, self.size, self.dtype, self.op, self.root))

    def _reduce_scatter(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [self.size * self.group.ranks] * self.group.ranks), self.group
        due = self._reduced(inputs).reshape(g.ranks, -1)[g.rank]
        self._set(inputs[g.rank], due, lambda a, b: g.reduce_scatter(a, b, self.size, self.dtype, self.op))

    def _broadcast(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [self.size] * self.group.ranks), self.group
        self._set(inputs[g.rank], inputs[self.root], lambda a, b: g.broadcast(a, self.size, self.dtype, self.root))
        self.receive = self.send

    def _scatter(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [self.size * self.group.ranks] * self.group.ranks), self.group
        due = inputs[self.root].reshape(g.ranks, -1)[g.rank]
        self._set(inputs[g.rank], due, lambda a, b: g.scatter(a, b, self.size, self.dtype, self.root))

    def _all_gather(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [self.size] * self.group.ranks), self.group
        self._set(inputs[g.rank], np.concatenate(inputs), lambda a, b: g.all_gather(a, b, self.size, self.dtype))

    def _all_to_all(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [self.size * self.group.ranks] * self.group.ranks), self.group
        due = np.concatenate([each.reshape(g.ranks, -1)[g.rank] for each in inputs])
        self._set(inputs[g.rank], due, lambda a, b: g.all_to_all(a, b, self.size, self.dtype))

    def _all_to_all_v(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [sum(row) for row in self.matrix]), self.group
        received = [row[g.rank] for row in self.matrix]
        parts = [np.split(each, np.cumsum(row)[:-1])[g.rank] for each, row in zip(inputs, self.matrix, strict=True)]
        sent = self.matrix[g.rank]
        self._set(inputs[g.rank], np.concatenate(parts), lambda a, b: g.all_to_all_v(a, b, sent, received, self.dtype))

    def _pair(self, salt: int) -> None:
        inputs, g = self._inputs(salt, [self.size] * self.group.ranks), self.group
        other = (self.root + 1) % g.ranks
        due = inputs[self.root] if g.rank == other else np.full(self.size, 99, self.dtype)

        def call(send: Buffer, receive: Buffer) -> None:
            if g.rank == self.root:
                g.send(send, self.size, other, self.dtype)
            elif g.rank == other:
                g.receive(receive, self.size, self.root, self.dtype)

        self._set(inputs[g.rank], due, call)

    def wrong(self) -> list[str]:
        found = [] if np.array_equal(self.receive.read(), self.due) else [f"rank {self.group.rank}: {self.label}"]
        for each in {id(each): each for each in (self.send, self.receive)}.values():
            each.free()
        return found


def stress(rank: int, ranks: int, folder: str, seed: int, count: int) -> dict[str, Any]:
    """Run `count` calls; return how many, how many replays, and descriptions of the wrong ones."""
    draws = random.Random(seed)
    world = connect(rank, ranks, folder)
    members = [list(range(ranks)), [0, 1, 2], [1, 2, 3], [3, 1], [0, 2]]
    made = [world, *(world.part(each, number + 1) for number, each in enumerate(members))]
    wrong: list[str] = []
    done = replayed = replayed_in_parts = 0
    while done < count:
        batch: list[Draw] = []
        for _ in range(20):
            group, state = draws.choice(made), draws.getrandbits(32)
            done += 1
            if group is not None:
                batch.append(Draw(random.Random(state), group, done))
                batch[-1].call()
        for group in filter(None, made):
            group.synchronize()
        wrong += [each for draw in batch for each in draw.wrong()]
        calls = _drawn(draws, made, done)
        # Half of the time, one graph has all calls on one stream, in the same order on every rank. Otherwise, each
        # group has its own graph and stream, so that replays of overlapping groups run concurrently.
        streams = [world] * len(calls) if draws.random() < 0.5 else [group for group, _, _ in calls]
        wrong += _replays(calls, streams)
        replayed += REPLAYS * len(calls)
        replayed_in_parts += REPLAYS * sum(group.ranks < ranks for group, _, _ in calls)
    for group in filter(None, reversed(made)):
        group.destroy()
    return {"done": done, "replayed": replayed, "replayed in parts": replayed_in_parts, "wrong": wrong}


def _drawn(draws: random.Random, made: list[Communicator | None], salt: int) -> list[Drawn]:
    """Draw calls, and return those on this rank's groups."""
    found = []
    for number in range(draws.randrange(3, 11)):
        group, state = draws.choice(made), draws.getrandbits(32)
        if group is not None:
            found.append((group, state, salt + number))
    return found


def _replays(drawn: list[Drawn], streams: list[Communicator]) -> list[str]:
    """Capture each call on the stream of the communicator beside it, and replay each graph several times."""
    calls = [
        Draw(random.Random(state), group.on(each.stream), salt)
        for (group, state, salt), each in zip(drawn, streams, strict=True)
    ]
    graphs = []
    for stream in dict.fromkeys(streams):
        with stream.capture() as graph:
            for call, each in zip(calls, streams, strict=True):
                if each is stream:
                    call.call()
        graphs.append(graph)
    for _ in range(REPLAYS):
        for graph in graphs:
            graph.replay()
    for stream in dict.fromkeys(streams):
        stream.synchronize()
    for graph in graphs:
        graph.destroy()
    return [f"replayed {each}" for call in calls for each in call.wrong()]


if __name__ == "__main__":
    run({"stress": stress})
