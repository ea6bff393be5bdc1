"""The sparse block of a mixture of experts, compared with transformers' and with the floor. Run it in a fresh process.

Router, choice and experts of Qwen3-30B-A3B in bfloat16, by turns, with new tokens in each round: by the kernels of the
CPU backend, and by transformers' block with each of its implementations of experts. The read probe of ``hal bench``
takes its turn, too. Prints a JSON object for each number of tokens: each contender's median in milliseconds
(``median_ms``), ``times_floor``, the median over that of the chosen experts' bytes at the probe's bandwidth, and
``speedup``, the fastest of transformers' over ours. Arguments: the numbers of tokens, 1, 32 and 512 by default; and
``--cpu-time``, to run on one thread and measure its processor time, which other processes disturb less.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import hal  # isort: skip  # torch is imported without vendors' extensions

import torch
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.bench.floor import read_probe
from hal.bench.timing import interleave
from hal.bench.transformers_side import only_imported_extensions
from hal.bench.workload import Contender

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
LARGEST_BATCHED = 1
"""Tokens. batched_mm copies the weights of each token's experts, so that it is never the fastest for more."""
ROUNDS = 15


def block() -> Any:
    """Return transformers' block with random weights; the experts' are scaled copies, which are quick to draw."""
    with only_imported_extensions():
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=WIDTH,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=True,
        )
        with torch.device("meta"):
            made = Qwen3MoeSparseMoeBlock(config)
    made = made.to(torch.bfloat16).to_empty(device="cpu").eval()
    for parameter in made.parameters():
        drawn = torch.randn(parameter.shape[-2:]) * parameter.shape[-1] ** -0.5
        scales = 1 + torch.arange(EXPERTS)[:, None, None] / 500 if parameter.dim() == 3 else 1
        parameter.data.copy_((drawn * scales).to(torch.bfloat16))
    made.experts.config = config
    return made


class Turns:
    """Draws the tokens of each step. The n-th steps of all contenders get the same tokens."""

    def __init__(self, tokens: int) -> None:
        self.inputs = [torch.randn(tokens, HIDDEN).to(torch.bfloat16) for _ in range(ROUNDS + 1)]

    def contender(self, name: str, run: Callable[[Tensor], Tensor]) -> Contender:
        rounds = iter(self.inputs)
        first = run(next(rounds))  # untimed
        assert first.isfinite().all()
        return Contender(name, lambda: run(next(rounds)), lambda: None)


@torch.no_grad()
def measure(module: Any, tokens: int, device: hal.vendor.Device, clock: Callable[[], float]) -> dict[str, Any]:
    gate_up, down, router = module.experts.gate_up_proj, module.experts.down_proj, module.gate.weight

    def ours(x: Tensor) -> Tensor:
        weights, experts = ops.topk_route(functional.linear(x, router), None, TOP_K, False, True, 1.0, 1, 1, 1)
        return ops.expert_mlp(x, gate_up, down, weights, experts, None, None, ops.GatedActivation())

    def theirs(name: str) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            module.experts.config._experts_implementation = name
            output: Tensor = module(x[None])[0]
            return output

        return run

    names = [each for each in IMPLEMENTATIONS if each != "batched_mm" or tokens <= LARGEST_BATCHED]
    turns, probe = Turns(tokens), read_probe(device)
    best = functional.linear(turns.inputs[0], router).sort(descending=True).values
    clear = best[:, TOP_K - 1] > best[:, TOP_K]  # transformers may choose any of equal scores
    for name in names:
        torch.testing.assert_close(
            ours(turns.inputs[0])[clear], theirs(name)(turns.inputs[0])[clear], rtol=3e-2, atol=6e-2
        )
    contenders = [turns.contender("hal", ours), *(turns.contender(name, theirs(name)) for name in names)]
    waits = device.synchronize
    seconds = interleave([*contenders, probe.contender], ROUNDS, warm=False, synchronize=waits, clock=clock)
    chosen = [
        ops.topk_route(functional.linear(x, router), None, TOP_K, False, True, 1.0, 1, 1, 1)[1].unique().numel()
        for x in turns.inputs[1:]
    ]
    median = {name: statistics.median(each) for name, each in seconds.items()}
    bandwidth = probe.amount / median[probe.contender.name]
    floor = statistics.mean(chosen) * 3 * HIDDEN * WIDTH * 2 / bandwidth
    return {
        "median_ms": {name: round(each * 1e3, 2) for name, each in median.items()},
        "bandwidth_gb": round(bandwidth / 1e9, 1),
        "chosen_experts": statistics.mean(chosen),
        "times_floor": round(median["hal"] / floor, 2),
        "speedup": round(min(median[name] for name in names) / median["hal"], 2),
    }


def main() -> None:
    torch.manual_seed(0)
    device = hal.open({"backend": "cpu", "options": {"native": True}}).device
    module = block()
    arguments = sys.argv[1:]
    clock = time.perf_counter
    if "--cpu-time" in arguments:
        arguments.remove("--cpu-time")
        torch.set_num_threads(1)
        clock = time.process_time
    for tokens in [int(each) for each in arguments] or [1, 32, 512]:
        figures = {"tokens": tokens, "threads": torch.get_num_threads(), **measure(module, tokens, device, clock)}
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
