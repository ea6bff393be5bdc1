"""llama.cpp as a contender: the same weights in a GGUF file, in the model's dtype and in 8 and 4 bits.

It computes on the CPU, whatever the backend. Its cache is in float16, its default.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.bench.bench_errors import BenchmarkError, need
from hal.bench.contenders.gguf_writing import write_gguf
from hal.bench.contenders.llama_process import Prepare, serve
from hal.bench.contenders.prefilled_cache import prompts
from hal.bench.contenders.workload import Contender, Inputs
from hal.bench.plan import Setting
from hal.checkpoint.gguf.gguf_header import is_gguf

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
QUANTIZED = ("Q8_0", "Q4_0")


class LlamaSide:
    """llama.cpp with the checkpoint's own GGUF file, or with files that are written for it.

    Raises:
        BenchmarkError: llama-cpp-python is not installed, or the weights cannot be written as GGUF.
    """

    def __init__(self, setting: Setting) -> None:
        need("llama_cpp", "--against llama.cpp")
        self._setting, self._exact = setting, TYPES[setting.dtype]
        plan = setting.plan
        self._file = Path(plan.checkpoint) if plan.checkpoint and is_gguf(Path(plan.checkpoint)) else None
        self.modes = ("file",) if self._file else (self._exact, *QUANTIZED)

    def contender(self, mode: str, inputs: Inputs) -> Contender:
        """Start a process with the weights in ``mode`` and fill its caches."""
        start = time.perf_counter()
        process = _Process(self._setting, mode, self._file)
        decode, tokens = inputs.workload == "decode", inputs.tokens.tolist()
        try:
            rows = prompts(inputs.setting.meta.vocab_size, len(tokens) if inputs.prefilled else 1, inputs.length)
            cached = [rows[each % len(rows)] for each in range(len(tokens))] if decode else []
            process.ask(Prepare(cached, tokens, torch.get_num_threads()))
            process.ask("step")
        except BaseException:
            process.close()
            raise

        def logits(_: object) -> Tensor:
            values = torch.frombuffer(bytearray(process.ask("logits")), dtype=torch.float32)
            return values.view(inputs.batch_size, -1)

        return Contender(
            f"llama.cpp {mode}",
            lambda: process.ask("step"),
            lambda: process.ask("reset"),
            time.perf_counter() - start,
            process.close,
            logits=logits,
            # Of random weights the cache is random, too, and 4 bits are no rounding.
            comparable=mode not in QUANTIZED and (bool(inputs.prefilled) or not decode),
        )


class _Process:
    """A process that runs llama.cpp, with the file that it reads."""

    def __init__(self, setting: Setting, mode: str, file: Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hal-bench-")
        if file is None:
            file = Path(self._folder.name) / "model.gguf"
            write_gguf(setting.checkpoint, file, mode)
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, str(file)), daemon=True)
        self._process.start()
        other.close()

    def ask(self, request: Any) -> Any:
        """Return the answer to a request of :func:`hal.bench.contenders.llama_process.serve`."""
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise BenchmarkError(
                f"the process of llama.cpp ended with the exit code {self._process.exitcode}",
                "omit --against llama.cpp, or try a smaller model or another build of llama-cpp-python",
            ) from error
        if isinstance(answer, Exception):
            raise BenchmarkError(str(answer), "omit --against llama.cpp") from answer
        return answer

    def close(self) -> None:
        """End the process and remove its file."""
        self._connection.close()
        self._process.join()
        self._folder.cleanup()
