"""llama.cpp in a process, so that its threads and torch's do not spin beside each other; see ``llama_side``.

It calls the C interface through the package llama-cpp-python. Everything is computed on the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs


@attrs.frozen
class Prepare:
    """Makes a context for steps.

    Attributes:
        cached: the tokens that are in the cache of a sequence before its step; equal prompts are computed once.
        tokens: the tokens of a step, by sequence.
        threads: the number of threads.
    """

    cached: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    threads: int


def serve(connection: Connection, file: str) -> None:
    """Answer requests until the other end is closed.

    A request is a :class:`Prepare`, ``reset``, ``step`` or ``logits``; the answer is None, or ``[sequences, vocab]``
    float32 logits as bytes, or an exception.
    """
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
    steps: _Steps | None = None
    try:
        while True:
            request = connection.recv()
            try:
                if model is None:
                    raise RuntimeError(f"llama.cpp cannot load {file}")
                if isinstance(request, Prepare):
                    if steps is not None:
                        steps.close()
                    steps, answer = _Steps(llama_cpp, model, request), None
                else:
                    answer = getattr(steps, request)()
            except Exception as error:  # the other process raises it
                answer = error
            connection.send(answer)
    except (EOFError, KeyboardInterrupt):
        return


class _Steps:
    """A context whose caches are filled."""

    def __init__(self, library: Any, model: Any, request: Prepare) -> None:
        self._library, self._request = library, request
        sequences = len(request.tokens)
        self._length = len(request.cached[0]) if request.cached else 0
        longest = self._length + len(request.tokens[0])
        parameters = library.llama_context_default_params()
        parameters.n_ctx = sequences * -(-longest // 256) * 256
        parameters.n_batch = max(sequences * len(request.tokens[0]), self._length, 32)
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = request.threads
        parameters.kv_unified = False  # a sequence attends to its own cache alone
        self._context = library.llama_init_from_model(model, parameters)
        if self._context is None:
            raise RuntimeError(f"llama.cpp cannot make a context of {parameters.n_ctx} tokens")
        self._memory = library.llama_get_memory(self._context)
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        first: dict[tuple[int, ...], int] = {}
        for sequence, prompt in enumerate(request.cached):
            source = first.setdefault(tuple(prompt), sequence)
            if source == sequence:
                self._decode([(sequence, prompt)], 0)
            else:
                library.llama_memory_seq_cp(self._memory, source, sequence, -1, -1)

    def reset(self) -> None:
        """Remove the tokens of a step from the caches."""
        for sequence in range(len(self._request.tokens)):
            self._library.llama_memory_seq_rm(self._memory, sequence, self._length, -1)

    def step(self) -> None:
        """Run a step."""
        self._decode(list(enumerate(self._request.tokens)), self._length)

    def logits(self) -> bytes:
        """Return the logits of each sequence's last token of the last step."""
        size, each = len(self._request.tokens), len(self._request.tokens[0])
        rows = (self._library.llama_get_logits_ith(self._context, (row + 1) * each - 1) for row in range(size))
        return b"".join(ctypes.string_at(row, 4 * self._vocabulary) for row in rows)

    def close(self) -> None:
        """Free the context."""
        self._library.llama_free(self._context)

    def _decode(self, rows: Sequence[tuple[int, Sequence[int]]], start: int) -> None:
        count = sum(len(tokens) for _, tokens in rows)
        batch = self._library.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            entry = 0
            for sequence, tokens in rows:
                for offset, token in enumerate(tokens):
                    batch.token[entry], batch.pos[entry] = token, start + offset
                    batch.n_seq_id[entry], batch.seq_id[entry][0] = 1, sequence
                    batch.logits[entry] = offset == len(tokens) - 1
                    entry += 1
            if code := self._library.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            self._library.llama_synchronize(self._context)
        finally:
            self._library.llama_batch_free(batch)
