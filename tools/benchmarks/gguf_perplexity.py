"""Perplexity of GGUF files on documentation strings of Python's standard library: hal's beside llama.cpp's.

hal computes with weights that stay packed, and with dequantized ones; llama.cpp computes with the same file, the same
token ids and the same windows, each from an empty cache. Prints a JSON object for each file and contender: the number
of predicted tokens, their negative log-likelihood in nats, and the perplexity, exp(nats / tokens). Everything is
computed on the CPU. Needs the extra ``gguf``, and llama-cpp-python for llama.cpp.

A long run can be divided: ``--part 0 --parts 4`` takes every fourth window from the first one, and so on. Add the nats
and the tokens of all parts.

Arguments: paths of GGUF files; ``--contender kept|dequantized|llama.cpp``, repeatable; ``--dtype NAME``;
``--tokens N``; ``--window N``; ``--compiler NAME``; ``--part N``; ``--parts N``.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hal  # isort: skip  # torch is imported without vendors' extensions

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers import held_out

CONTENDERS = ("kept", "dequantized", "llama.cpp")
Logits = Callable[[list[int]], Tensor]
"""Returns the logits of all tokens of a window, ``[tokens, vocab]``."""


def documentation() -> Iterator[str]:
    """Yield the documentation strings of the standard library's modules, classes and functions."""
    for text in (each for part in held_out.texts() for each in part):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def windows(file: Path, tokens: int, window: int) -> list[list[int]]:
    """Return the token ids in windows, each of which starts with what the tokenizer starts a text with."""
    tokenizer, ids = hal.Checkpoint.open(file).tokenizer(), list[int]()
    start = tokenizer.encode("").ids
    for text in filter(None, documentation()):
        ids += tokenizer.encode(f"{text}\n\n", add_special_tokens=False).ids
        if len(ids) >= tokens:
            break
    size = window - len(start)
    return [start + ids[first : first + size] for first in range(0, tokens, size)]


@contextmanager
def hal_logits(file: Path, weights: str, dtype: str, compiler: str, window: int) -> Iterator[Logits]:
    """Return hal's logits."""
    config = {"backend": "cpu", "dtype": dtype, "quantized_weights": weights, "compilation": {"compiler": compiler}}
    with (
        hal.open({**config, "cache": {"num_tokens": 2 * window}}) as backend,
        hal.Runner(hal.load_model(file, backend), backend) as runner,
    ):
        blocks = runner.blocks.take(runner.spec.blocks_for(window))
        assert blocks is not None
        yield lambda ids: runner.step(runner.batch([ids], [blocks]), hal.step.ALL).logits


@contextmanager
def llama_logits(file: Path, window: int) -> Iterator[Logits]:
    """Return the logits of llama.cpp."""
    import llama_cpp

    threads = torch.get_num_threads()
    model = llama_cpp.Llama(
        str(file),
        n_ctx=window,
        n_batch=window,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )

    def logits(ids: list[int]) -> Tensor:
        model.reset()
        model.eval(ids)
        return torch.from_numpy(model.scores[: len(ids)])

    yield logits
    model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--contender", action="append", choices=CONTENDERS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--compiler", default="eager")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    given = parser.parse_args()
    for file in given.files:
        pieces = windows(file, given.tokens, given.window)[given.part :: given.parts]
        for contender in given.contender or CONTENDERS:
            start, nats, count = time.perf_counter(), 0.0, 0
            if contender == "llama.cpp":
                opened = llama_logits(file, given.window)
            else:
                opened = hal_logits(file, contender, given.dtype, given.compiler, given.window)
            with opened as logits, torch.inference_mode():
                for ids in pieces:
                    targets = torch.tensor(ids[1:])
                    nats += functional.cross_entropy(logits(ids)[:-1].float(), targets, reduction="sum").item()
                    count += len(targets)
            figures = {
                "file": file.name,
                "contender": contender,
                **({} if contender == "llama.cpp" else {"dtype": given.dtype}),
                "tokens": count,
                "nats": round(nats, 3),
                "perplexity": round(math.exp(nats / count), 4),
                "seconds": round(time.perf_counter() - start),
            }
            sys.stdout.write(json.dumps(figures) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
