"""Every operator of torch's `op_db` on the emulated NPU, against the CPU, on torch's own sample inputs.

    emulated-cann run -- python operators_of_torch.py [--seed N] [--draw N] [--samples N] [--only NAME...] [--report F]

Prints a table by dtype. Each case is one sample of an operator, or of its form that mutates the first argument:

- passed: the result has the CPU's shape and dtype, and equals the CPU's within rounding.
- differs: torch_npu itself gives another dtype or shape, or computes something else (DIFFERENT).
- refused: the error names the operation that the emulated CANN lacks or refuses, or is torch_npu's own.
- wrong, failed (another error), crashed (or hung). The exit status is 1 if there are any.

The operators run in a child process. If one crashes or hangs, it is counted, and another child goes on with the next.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import selectors
import subprocess
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ["TASK_QUEUE_ENABLE"] = "0"  # A refused launch raises in the caller, and the next launch works.

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.complex64),
]
"""Without float64, which torch_npu copies to the device as float32."""
OUTCOMES = ("passed", "differs", "refused", "wrong", "failed", "crashed")
BAD = OUTCOMES[3:]
TOLERANCE = {torch.float16: (4e-3, 1e-3), torch.bfloat16: (3e-2, 1e-2)}
PRECISE = (1e-4, 1e-5)
STALL_SECONDS = 300
"""An operator that takes longer in one dtype is counted as crashed."""
UNINITIALIZED = re.compile(r"(new_)?empty(_like|_strided|_permuted)?")
TIES = ("topk", "sort", "argsort")
"""Operators that may order equal elements in any way."""
DIFFERENT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "nn.functional.gelu": (lambda options: options.get("approximate", "none") == "none", "always the tanh form"),
    "native_dropout_backward": (lambda _: True, "the mask has a bit for each element"),
}
"""How torch_npu itself differs from torch: operators, whether a call's options are such, and why."""
REFUSALS = (
    r"the emulated CANN has no (?P<name>\w+)()",
    r"torch_npu runs (?P<name>\w+) through the single-operator interface()",
    r"(?P<name>aclnn\w+): (.*)",
    r"ERR0\d{4}|not (currently )?support|[uU]nsupported|[oO]nly .*support|NotImplemented|DispatchStub|be on cpu",
)
"""The last one matches errors of torch_npu itself and of torch, before they call CANN."""
DEVICE_ERROR = "507015"


def line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}".rstrip(".")


def on_device(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.to("npu")
    return "npu" if argument == "cpu" or argument == torch.device("cpu") else argument


def copied(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument


def doubled(argument: Any) -> Any:
    """Convert floating-point tensors and dtypes to float64 and complex128, and copy other tensors."""
    if isinstance(argument, torch.dtype):
        return torch.float64 if argument.is_floating_point else argument
    if not isinstance(argument, Tensor):
        return argument
    if argument.is_complex():
        return argument.to(torch.complex128)
    return argument.double() if argument.is_floating_point() else argument.clone()


def difference(actual: Any, expected: Any, dtype: torch.dtype) -> str | None:
    """Return how two results differ beyond rounding to a dtype, or None."""
    if not isinstance(actual, Tensor):
        return None if actual == expected or actual != actual else f"{actual} instead of {expected}"
    exact = not (actual.is_floating_point() or actual.is_complex())
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    one, other = (each.detach().resolve_conj().to(wide) for each in (actual, expected))
    rtol, atol = (0, 0) if exact else TOLERANCE.get(actual.dtype, TOLERANCE.get(dtype, PRECISE))
    if (
        torch.equal(actual, expected.to(actual.dtype))
        if exact
        else torch.allclose(one, other, rtol, atol, equal_nan=True)
    ):
        return None
    return f"values {one.flatten()[:4].tolist()} instead of {other.flatten()[:4].tolist()}"


class Randomness(TorchDispatchMode):
    """Notices operators that draw random numbers."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))


def called(function: Callable[..., Any], arguments: Any) -> list[Any]:
    """Return the leaves of a result, on the CPU."""
    given, options = arguments
    return [each.cpu() if isinstance(each, Tensor) else each for each in tree_leaves(function(*given, **options))]


def kind(tensor: Tensor) -> int:
    """Return 0 for integers, 1 for floating point, 2 for complex numbers."""
    return 2 if tensor.is_complex() else int(tensor.is_floating_point())


def as_near(actual: Tensor, expected: Tensor, precise: Tensor) -> bool:
    """Return whether a result is as near to the precise one as the CPU's, which an operator of many roundings moves."""
    errors = [(each.to(precise.dtype) - precise).abs().max() for each in (actual, expected)]
    return bool(errors[0] <= errors[1])


def same_elements(source: Tensor, one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of indices select the same elements along some dimension."""
    return any(
        torch.equal(source.take_along_dim(one, dim), source.take_along_dim(other, dim))
        for dim in range(source.dim())
        if one.dtype == torch.int64
        and source.shape[:dim] + source.shape[dim + 1 :] == one.shape[:dim] + one.shape[dim + 1 :]
    )


def refusal(text: str) -> str | None:
    """Return what refused a call, and why; None if nothing did."""
    for pattern in REFUSALS if DEVICE_ERROR not in text else ():
        if found := re.search(pattern, text):
            named = found.groupdict().get("name")
            return f"{named}: {found[2][:150]}" if named else f"torch_npu: {text.splitlines()[0][:150]}"
    return None


def compared(
    name: str, function: Callable[..., Any], arguments: Any, expected: list[Any], actual: list[Any], dtype: torch.dtype
) -> tuple[str, str]:
    """Compare results with the CPU's in the dtype and, if they are not equal, in float64."""
    precise, noted = None, ""
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(one, Tensor) and one.shape != other.shape:
            noted = f"shape {tuple(one.shape)} instead of {tuple(other.shape)}"
            continue
        if isinstance(one, Tensor) and one.dtype != other.dtype:
            noted = f"dtype {one.dtype} instead of {other.dtype}"
            if kind(one) < kind(other):  # an integer instead of a fraction, or a real number instead of a complex one
                continue
        why = difference(one, other, dtype)
        if why is None or (name in TIES and same_elements(arguments[0][0], one, other)):
            continue
        try:
            precise = precise or called(function, tree_map(doubled, arguments))
        except Exception:
            precise = expected
        if difference(one, precise[index], dtype) and not as_near(one, other, precise[index]):
            applies, noted = DIFFERENT.get(name, (lambda _: False, ""))
            if not applies(arguments[1]):
                return "wrong", why
    return ("differs", noted) if noted else ("passed", "")


def outcome(name: str, function: Callable[..., Any], arguments: Any, dtype: torch.dtype) -> tuple[str, str]:
    """Run one case. Return its outcome, and why."""
    try:
        with Randomness() as randomness:
            expected = called(function, tree_map(copied, arguments))
    except Exception:
        return "skipped", ""
    try:
        actual = called(function, tree_map(on_device, arguments))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        why = refusal(text)
        return ("refused", why) if why else ("failed", text[:600])
    if UNINITIALIZED.fullmatch(name) or randomness.seen:
        alike = [getattr(each, "shape", None) for each in actual] == [getattr(each, "shape", None) for each in expected]
        return ("passed", "") if alike else ("differs", "shapes")
    if len(actual) != len(expected):
        return "wrong", f"{len(actual)} results instead of {len(expected)}"
    return compared(name, function, arguments, expected, actual, dtype)


def cases(info: Any, dtype: torch.dtype, seed: int, most: int) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Yield functions with the positional and keyword arguments of torch's samples."""
    drawn = zlib.crc32(f"{seed} {name_of(info)} {dtype}".encode())
    torch.manual_seed(drawn)
    random.seed(drawn)
    samples = list(info.sample_inputs_func(info, "cpu", dtype, requires_grad=False))
    if most and len(samples) > most:
        samples = random.sample(samples, most)
    for sample in samples:
        arguments = (sample.input, *sample.args), sample.kwargs
        if all(each.layout == torch.strided for each in tree_leaves(arguments) if isinstance(each, Tensor)):
            yield info, arguments
            if info.inplace_variant is not None and not sample.broadcasts_input:
                yield info.inplace_variant, arguments


def work(names: Sequence[str], seed: int, most: int) -> None:
    """Run operators, and print a line of JSON before and after each dtype."""
    import torch_npu  # noqa: F401
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    infos = {name_of(each): each for each in op_db}
    for name in names:
        for dtype in DTYPES:
            if dtype not in infos[name].dtypes:
                continue
            row = {"operator": name, "dtype": str(dtype).removeprefix("torch.")}
            line(json.dumps(row))
            counts: Counter[str] = Counter()
            reasons: Counter[str] = Counter()
            try:
                for function, arguments in cases(infos[name], dtype, seed, most):
                    result, why = outcome(name, function, arguments, dtype)
                    counts[result] += 1
                    reasons[f"{result} {why}"] += result != "passed"
            except Exception as error:
                reasons[f"no samples {error!r}"[:200]] += 1
            line(json.dumps({**row, "counts": counts, "reasons": reasons}))


def lines_of(command: Sequence[str]) -> Iterator[str | None]:
    """Yield the lines that a child prints, and None if it ends or hangs."""
    # Without a buffer, in which the selector would not see a line.
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(child.stdout, selectors.EVENT_READ)
            while ready.select(STALL_SECONDS) and (text := child.stdout.readline()):
                yield text.decode()
        child.kill()
    yield None


def rows(names: list[str], seed: int, most: int) -> Iterator[dict[str, Any]]:
    """Run operators in children; yield a row for each operator and dtype."""
    while names:
        current = None
        for text in lines_of([sys.executable, __file__, f"--seed={seed}", f"--samples={most}", "--work", *names]):
            if text is None:
                if current is not None:
                    yield {**current, "counts": {"crashed": 1}, "reasons": {"crashed": 1}}
            elif text.startswith("{"):
                row = json.loads(text)
                names = names[names.index(row["operator"]) :]
                if "counts" in row:
                    yield row
                current = None if "counts" in row else row
        names = names[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=int, default=0, help="run this many operators, drawn from the seed")
    parser.add_argument("--samples", type=int, default=0, help="at most this many samples of an operator and a dtype")
    parser.add_argument("--only", nargs="*", default=[], help="run these operators")
    parser.add_argument("--report", help="write a line of JSON for each operator and dtype to this file")
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        work(given.work, given.seed, given.samples)
        return
    from torch.testing._internal.common_methods_invocations import op_db

    names = given.only or [name_of(each) for each in op_db]
    if given.draw:
        names = sorted(random.Random(given.seed).sample(names, given.draw))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with open(given.report or os.devnull, "w", encoding="utf-8") as report:
        for row in rows(names, given.seed, given.samples):
            report.write(json.dumps(row) + "\n")
            report.flush()
            counts[row["dtype"]].update(row["counts"])
            for kind in BAD:
                for why in row["reasons"]:
                    if why.startswith(kind):
                        line(f"{row['operator']} {row['dtype']}: {why}")
    line(f"seed {given.seed}, {len(names)} operators")
    line("".join(f"{title:>10}" for title in ("dtype", "run", *OUTCOMES)))
    counts["all"] = sum(counts.values(), Counter())
    for dtype, found in counts.items():
        ran = [found[each] for each in OUTCOMES]
        line("".join(f"{each:>10}" for each in (dtype, sum(ran), *ran)))
    sys.exit(any(counts["all"][each] for each in BAD))


if __name__ == "__main__":
    main()
