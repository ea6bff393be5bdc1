"""Compare hal's own families with transformers on random configurations: the long form of tests/models.

    python tools/families/configurations.py --modes eager,graph,piecewise,ranks-2,ranks-4 [--seeds 1:31] [FAMILY]
    .venv/npu/bin/python tools/families/configurations.py --modes npu-bfloat16,npu-float16-eager
    python tools/families/configurations.py --modes cuda-float32,cuda-bfloat16

On a device, a compiler other than ``graph`` follows the dtype. Each line has a family, a mode, the number of
configurations, those that hal refuses, and the largest difference from transformers in float32, in parts of a
sequence's largest logit. Steps are prompts of random lengths, prefills that go on behind a cached prefix, and 16 decode
steps. On the emulated NPU and on a GPU the difference in 16 bits is the median of the prompts' tokens or of the decoded
ones, whichever is larger, beside that of transformers in the same dtype: in both, rounding routes some tokens to other
experts, whose logits then differ by any amount.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "models"))

SECONDS = 120
"""The most processor time of a configuration in one mode."""


def families() -> dict[str, Callable[[int], tuple[Any, Any]]]:
    """Return functions from a seed to a config, and to how older checkpoints spell it, by family."""
    import test_assembled
    from helpers import random_hybrids

    found: dict[str, Callable[[int], tuple[Any, Any]]] = {}
    for family in random_hybrids.FAMILIES:
        found[family] = lambda seed, family=family: (random_hybrids.draw_config(family, seed), None)
    for family in test_assembled.FAMILIES:
        if family not in test_assembled.OUTSIDE:
            spelled = test_assembled.older if family in test_assembled.RESPELLED else None
            found[family] = lambda seed, family=family, spelled=spelled: (
                test_assembled.draw_config(family, seed),
                spelled,
            )
    return found


def on_cpu(case: Any, theirs: list[Any], compiler: str) -> list[float]:
    """Return the differences of prompts, and of prompts behind a prefix, each with 16 decode steps."""
    from helpers.comparison import difference, empty, our_logits

    runner = case.runner(compiler)
    whole = difference(our_logits(runner, case), theirs)
    empty(runner)
    return [whole, difference(our_logits(runner, case, cuts=case.cuts), theirs)]


def on_ranks(case: Any, theirs: list[Any], count: int) -> list[float]:
    """Return the difference of several ranks, of which this process is the first."""
    import torch
    from helpers.comparison import difference, our_logits

    import hal

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    children, rank = [], 0
    for other in range(1, count):
        child = os.fork()
        if not child:
            rank, children = other, []
            break
        children.append(child)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    config = {
        "backend": "cpu",
        "dtype": "float32",
        "compilation": {"compiler": "graph", "capture_sizes": [2, 4, 8]},
        "cache": {"num_tokens": sum(map(len, case.blocks)) * case.block_size, "block_size": case.block_size},
        "parallel": {"tensor": count, "timeout": 60},
    }
    try:
        with hal.open(config) as backend, hal.Runner(hal.load_model(case.path, backend), backend) as runner:
            found = [difference(our_logits(runner, case), theirs)]
    except BaseException:
        if rank:
            os._exit(1)
        raise
    finally:
        for child in children:
            os.waitpid(child, 0)
    if rank:
        os._exit(0)
    return found


DEVICES: dict[str, dict[str, Any]] = {
    "npu": {"backend": "npu", "options": {"emulator": "on"}},
    "cuda": {"backend": "cuda"},
}
"""How to open a backend on a device, by the first word of a mode."""


def on_device(case: Any, theirs: list[Any], kind: str, option: str) -> list[float]:
    """Return the difference on a device, and that of transformers in its dtype on the CPU, from float32."""
    import copy

    import attrs
    import torch
    from helpers.comparison import difference, our_logits, their_logits

    import hal

    blocks = [[place + 1] for place in range(len(case.sequences))]
    case = attrs.evolve(case, block_size=128, blocks=blocks)
    dtype, _, compiler = option.partition("-")
    compilation: dict[str, Any] = {"compiler": compiler or "graph"}
    if compiler != "eager":
        compilation["capture_sizes"] = [2, 4, 8]
    if compiler == "piecewise":
        compilation["prefill"] = {"capture_sizes": [64]}
    config = {
        **DEVICES[kind],
        "dtype": dtype,
        "compilation": compilation,
        "cache": {"num_tokens": 128 * len(blocks), "block_size": 128},
    }
    with hal.open(config) as backend, hal.Runner(hal.load_model(case.path, backend), backend) as runner:
        found = [each.float().cpu() for each in our_logits(runner, case)]
    if dtype == "float32":
        return [difference(found, theirs)]
    narrow = copy.deepcopy(case.model).to(getattr(torch, dtype))
    rounded = [their_logits(narrow, sequence).float() for sequence in case.sequences]
    return [typical_difference(logits, theirs) for logits in (found, rounded)]


def typical_difference(logits: list[Any], theirs: list[Any]) -> float:
    """Return the median difference of a token's logits, of the prompts' tokens or the decoded ones."""
    import torch
    from helpers.comparison import STEPS

    each = [(one - exact).abs().amax(-1) / exact.abs().amax() for one, exact in zip(logits, theirs, strict=True)]
    ends = [tokens.split([len(tokens) - STEPS, STEPS]) for tokens in each]
    return max(float(torch.cat(part).median()) for part in zip(*ends, strict=True))


def differences(family: str, seed: int, modes: list[str]) -> dict[str, Any]:
    """Return what a configuration gives in each mode: numbers, or why not."""
    import hal

    if any(mode.startswith("npu") for mode in modes):
        hal.open(DEVICES["npu"]).close()  # before transformers imports torch_npu
    from helpers import comparison

    config, older = families()[family](seed)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        case = comparison.build(config, seed, Path(folder), older)
        # Exact weights in 16 bits, so that both start from the same.
        theirs = [comparison.their_logits(case.model, sequence) for sequence in case.sequences]
        for mode in modes:
            kind, _, option = mode.partition("-")
            try:
                if kind in DEVICES:
                    found[mode] = on_device(case, theirs, kind, option)
                elif kind == "ranks":
                    found[mode] = on_ranks(case, theirs, int(option))
                else:
                    found[mode] = on_cpu(case, theirs, mode)
            except hal.HalError as error:
                found[mode] = error.problem
            except Exception as error:
                found[mode] = f"{type(error).__name__}: {error!s:.200}"
    return found


def in_forks(family: str, seeds: list[int], modes: list[str]) -> dict[int, dict[str, Any]]:
    """Return what :func:`differences` returns for each seed, of a process that a crash or a timeout replaces.

    Ranks end with their process, so that each seed gets its own.
    """
    found: dict[int, dict[str, Any]] = {}
    each = 1 if any(mode.startswith("ranks") for mode in modes) else len(seeds)
    while left := [seed for seed in seeds if seed not in found][:each]:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
            with os.fdopen(writing, "w", buffering=1) as output:
                for seed in left:
                    signal.setitimer(signal.ITIMER_PROF, SECONDS * len(modes))
                    try:
                        line = json.dumps(differences(family, seed, modes))
                    except BaseException as error:
                        line = json.dumps({"error": f"{type(error).__name__}: {error!s:.200}"})
                    output.write(line + "\n")
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as given:
            found |= {seed: json.loads(line) for seed, line in zip(left, given, strict=False)}
        os.waitpid(child, 0)
        for seed in left:
            if seed not in found:
                found[seed] = {"error": "the process ended"}
                break
    return found


def prepare_inductor() -> None:
    """Do once what Inductor would do in each fork: import itself, and find out which vectors g++ can compile."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # A pool of processes would start in each fork too.
    import torch._inductor.codegen.cpp
    import torch._inductor.cpu_vec_isa
    import torch._inductor.lowering

    import hal.compile.inductor_backend  # noqa: F401

    torch._inductor.cpu_vec_isa.pick_vec_isa()


def main() -> None:
    """Print a line for each family and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="eager,graph,piecewise")
    parser.add_argument("--seeds", default="1:31")
    parser.add_argument("families", nargs="*")
    given = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    modes, (first, end) = given.modes.split(","), map(int, given.seeds.split(":"))
    if not any(mode.startswith("npu") for mode in modes):
        import transformers.modeling_utils  # noqa: F401 - so that each fork has it

        if "inductor" in modes:
            prepare_inductor()
        names = list(families())
    else:
        names = given.families or json.loads(os.environ.get("FAMILIES", "[]"))
    for family in given.families or names:
        found = in_forks(family, list(range(first, end)), modes)
        for mode in modes:
            each = {seed: got.get(mode, got.get("error")) for seed, got in found.items() if got}
            numbers = {seed: got for seed, got in each.items() if isinstance(got, list)}
            refused = {seed: got for seed, got in each.items() if not isinstance(got, list)}
            columns = list(zip(*numbers.values(), strict=True))
            shown = ", ".join(f"{max(column):.1e} (median {median(column):.1e})" for column in columns)
            worst = max(numbers, key=lambda seed: numbers[seed][0], default=None)
            sys.stdout.write(f"{family} {mode}: {len(numbers)} of {len(each)}, worst {shown}, seed {worst}\n")
            for seed, reason in refused.items():
                sys.stdout.write(f"    seed {seed}: {reason}\n")


if __name__ == "__main__":
    random.seed(0)
    main()
