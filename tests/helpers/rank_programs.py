"""What ranks do in tests of several devices. Each function runs on every rank; see :mod:`helpers.ranks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal import ops
from helpers import rank_faults

PROMPTS = ("def read_lines(path):", "class Stack:", "def main():")


def tokens(
    checkpoint: str, dtype: str, compilers: list[str], parallel: dict[str, int], on: dict[str, Any] | None = None
) -> dict[str, list[list[int]]]:
    """Generate with each compiler. Returns each prompt's tokens by compiler.

    Args:
        checkpoint: the folder.
        dtype: the dtype of computation.
        compilers: names of compilers.
        parallel: the configuration's table.
        on: the configuration's backend and options; None for the CPU.
    """
    found = {}
    for compiler in compilers:
        config = {
            **(on or {"backend": "cpu"}), "dtype": dtype, "parallel": parallel,
            "compilation": {"compiler": compiler, "capture_sizes": [1, 2, 4]},
        }  # fmt: skip
        with hal.open(config) as backend:
            model = hal.load_model(checkpoint, backend)
            tokenizer = hal.Checkpoint.open(checkpoint).tokenizer()
            prompts = [tokenizer.encode(text).ids for text in PROMPTS]
            texts: list[list[int]] = [[] for _ in prompts]
            with hal.Runner(model, backend) as runner:
                for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=32)):
                    texts[token.prompt].append(token.token_id)
            found[compiler] = texts
    return found


def logits(checkpoint: str, dtype: str, parallel: dict[str, int]) -> dict[str, Any]:
    """Run one prefill, and return its logits, and the bytes of the weights and of what was read of the files."""
    read = 0

    def progress(done: int, total: int) -> None:
        nonlocal read
        read = done

    with hal.open({"backend": "cpu", "dtype": dtype, "parallel": parallel, "options": {"pack_weights": False}}) as on:
        model = hal.load_model(checkpoint, on, progress=progress)
        held = sum(each.numel() * each.element_size() for each in [*model.parameters(), *model.buffers()])
        with hal.Runner(model, on) as runner:
            batch = runner.batch([list(range(40, 57)), list(range(3, 8))], [[1, 2], [3]])
            return {"logits": runner.step(batch).logits.clone(), "held": held, "read": read}


def peak(checkpoint: str, warm: str, dtype: str, tensor: int, on: dict[str, Any]) -> dict[str, int]:
    """Load a checkpoint, and return the bytes of its weights, of what was read, and of the peak of memory.

    Args:
        checkpoint: the folder.
        warm: the folder of a small checkpoint, loaded before, so that the peak has nothing that is made only once.
        dtype: the dtype of computation.
        tensor: the number of ranks.
        on: the configuration's backend and options.
    """
    read = 0

    def progress(done: int, total: int) -> None:
        nonlocal read
        read = done

    with hal.open({**on, "dtype": dtype, "parallel": {"tensor": tensor}}) as backend:
        hal.load_model(warm, backend)
        backend.device.reset_peak()
        before = backend.device.memory_stats().allocated
        model = hal.load_model(checkpoint, backend, progress=progress)
        held = sum(each.numel() * each.element_size() for each in [*model.parameters(), *model.buffers()])
        return {"held": held, "read": read, "peak": backend.device.memory_stats().peak - before}


def collectives(tensor: int, seed: int) -> dict[str, list[Tensor]]:
    """Call each collective with random tensors of many shapes. Returns the arguments and results by operation."""
    found: dict[str, list[Tensor]] = {}
    with hal.open({"backend": "cpu", "parallel": {"tensor": tensor}}) as backend:
        group = backend.mesh.tensor
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            found[name], found[f"{name} of"] = [], []
            for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
                for shape in ((1, 64), (12, 96), (0, 32), (24, 1), (4, 5000)):
                    draw = torch.Generator().manual_seed(seed + 100 * group.rank + index)
                    rows = shape[0] // tensor * tensor if name == "reduce_scatter" else shape[0]
                    x = torch.randn(shape[1], rows, generator=draw).to(dtype).t()  # no unit stride
                    found[f"{name} of"].append(x.contiguous())
                    found[name].append(getattr(ops, name)(x, group.name).clone())
    return found


faulty = rank_faults.faulty
