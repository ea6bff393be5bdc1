"""The layout of a projection's weight, and who multiplies it: what is measured to be the fastest.

What was measured is kept in the cache of compiled code: a machine measures a shape once, and its processes agree.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import geometric_mean
from typing import Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from hal.config import CompileCache, cache_folder, content_key
from hal.errors import ConfigError, DriverUnavailable

from .capabilities import packs, product_dtype
from .description import ANY, torch_in
from .native.processor import processor_line

ROWS = (1, 8, 32)
"""Batch sizes to measure at if the config names none."""
FEW_ROWS = (1, 8, 32, 64)
"""Numbers of rows to compare the C++ kernel of few rows at."""
MANY_ROWS = 512
"""A further number, where the kernel may serve any number: with tiles, and where torch would widen the weights."""
MIN_SPEEDUP = 1.05
"""Minimum speedup that counts; less is noise."""

SAMPLE_BYTES = 32 << 20
"""Amount of weights to measure: part of a large weight, or copies of a small one."""
MAX_COPIES = 16
LONGEST_TRIAL = 0.1
"""Seconds after which the products with a number of rows are not repeated."""
WIDENED = 1 << 20
"""Elements of a weight that are widened at once."""
MIN_BYTES = 64 << 10
"""Minimum size of a weight to pack. A smaller one fits in a CPU cache, and measuring it costs more than it gains."""

log = logging.getLogger("hal.cpu")

Product = Callable[[Tensor, Tensor], Tensor]
Run = Callable[[Tensor], float]


@attrs.frozen
class Layout:
    """What weights that are multiplied alike have in common."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool

    @classmethod
    def of(cls, weight: Tensor) -> Layout:
        """Return the layout of a weight."""
        return cls(tuple(weight.shape), weight.dtype, weight.is_mkldnn)


@attrs.frozen
class FewRows:
    """How weights of one layout are multiplied with few rows.

    Attributes:
        most: the largest number of rows for which the C++ kernel is used.
        block: rows of a block of the packed layout; 0 for the plain layout.
    """

    most: int
    block: int = 0


class FewRowsKernel(Protocol):
    """The C++ kernel of few rows."""

    path: str  # of the library, which the sources and flags of the kernels determine
    few: dict[Layout, FewRows]
    many: bool  # whether it has tiles, with which it may be the fastest for many rows

    def few_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None, few: FewRows, address: int) -> Tensor:
        """Return the product with the weight at an address."""

    def block_of(self, plain: Tensor, packed: Tensor) -> int:
        """Return the rows of a block of a packed weight, or 0 if the kernel does not know its layout."""

    def address_of(self, weight: Tensor) -> int:
        """Return the address of a weight's elements."""

    def collapse_pages(self, weight: Tensor) -> None:
        """Keep a weight in huge pages if the system gives them."""


@attrs.frozen
class Measured:
    """What was measured for weights of one shape.

    Attributes:
        speedups: of the packed layout over the plain one, for each number of rows; 0 if it cannot be packed.
        few_packed: the most rows for which the C++ kernel multiplies packed weights faster than oneDNN.
        few_plain: the most rows for which it multiplies plain weights faster than torch.
    """

    speedups: list[float]
    few_packed: int = 0
    few_plain: int = 0


_measured: dict[tuple[torch.Size, torch.dtype, tuple[int, ...], int, bool], Measured] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.linear`, of floating-point weights. The weight may be one that :class:`Packing` prepared."""
    bias = None if bias is None else bias.to(x.dtype)
    if weight.is_mkldnn:
        table = getattr(weight, "table", None)
        if table is None or x.numel() <= weight.rows * x.shape[-1]:  # type: ignore[attr-defined]
            values = _packed_linear(x, weight, bias)
            return values if out is None else out.copy_(values)
        weight = table
    if product_dtype(x.dtype) is not x.dtype and x.numel() > x.shape[-1] > 0 and weight.dtype is x.dtype:
        return by_rows(x, weight.shape[0], 1, lambda start, end, dtype: weight[start:end].to(dtype), bias, out)
    if out is None:
        return functional.linear(x, weight, bias)
    if x.dim() != 2:
        return out.copy_(functional.linear(x, weight, bias))
    torch.ops.aten.linear.out(x, weight, bias, out=out)
    return out


def products(weight: Tensor) -> list[tuple[str, int]]:
    """Return who multiplies in :func:`linear` up to how many rows."""
    if weight.is_mkldnn:
        table, packed = getattr(weight, "table", None), "oneDNN (packed)"
        return [(packed, ANY)] if table is None else [(packed, weight.rows), *products(table)]  # type: ignore[attr-defined]
    fast = product_dtype(weight.dtype)
    own = torch_in(weight.dtype), ANY if fast is weight.dtype else 1
    return [own, (torch_in(fast, "widened"), ANY)]


def by_rows(
    x: Tensor,
    count: int,
    unit: int,
    rows_of: Callable[[int, int, torch.dtype], Tensor],
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Return the product with a weight of which some rows at a time are widened, to the dtype with a fast product.

    Args:
        x: ``[..., in_features]``.
        count: the weight's rows.
        unit: of how many a multiple is widened at once.
        rows_of: returns the rows from a start to an end in a dtype.
        bias: ``[count]``, or None.
        out: where to write the result; None for a new tensor.
    """
    dtype = product_dtype(x.dtype)
    output = x.new_empty(*x.shape[:-1], count) if out is None else out
    wide = x.to(dtype)
    step = max(1, WIDENED // (unit * max(1, x.shape[-1]))) * unit
    for start in range(0, count, step):
        end = min(start + step, count)
        added = None if bias is None else bias[start:end].to(dtype)
        output[..., start:end] = functional.linear(wide, rows_of(start, end, dtype), added)
    return output


class Packing:
    """Packs weights where this is faster, measured once for each shape and list of batch sizes.

    Args:
        release: returns freed memory to the system. A measurement takes more than most weights, and what it leaves
            between live tensors would stay resident.
        kernel: the C++ kernel of few rows, or None.
    """

    def __init__(self, release: Callable[[], None] = lambda: None, kernel: FewRowsKernel | None = None) -> None:
        self._release = release
        self._kernel = kernel

    def prepare(self, weight: Tensor, *, shared: bool, sizes: Sequence[int] = ROWS) -> Tensor:
        """Return the weight, or a packed copy of the same size.

        Args:
            weight: ``[out_features, in_features]``.
            shared: whether the plain weight has other uses too. Both forms are then kept, and each call uses the
                faster one for its number of rows. Otherwise only one is kept: the faster one on average.
            sizes: batch sizes in ascending order. Of more than three, the first, middle and last are measured.
        """
        if weight.dim() != 2 or weight.nbytes < MIN_BYTES or not weight.is_floating_point():
            return weight
        rows = tuple(sizes) if len(sizes) <= 3 else (sizes[0], sizes[len(sizes) // 2], sizes[-1])
        key = weight.shape, weight.dtype, rows, torch.get_num_threads(), self._kernel is not None
        if key not in _measured:
            _measured[key] = kept(
                content_key(*map(str, key), "" if self._kernel is None else self._kernel.path),
                lambda: measure(weight[: SAMPLE_BYTES // weight[0].nbytes], rows, self._kernel),
            )
            self._release()
        found = _measured[key]
        speedups = found.speedups
        gains = packs(weight.dtype) and (speedups[0] if shared else geometric_mean(speedups)) > MIN_SPEEDUP
        log.debug(
            "%s %s, measured at %s rows with %d threads: packing is %s times as fast; the C++ kernel serves up to %s "
            "rows packed, %d plain",
            *key[:4],
            [round(each, 2) for each in speedups],
            "any" if found.few_packed == ANY else found.few_packed,
            found.few_plain,
        )
        if not gains:
            self._serve(weight, found.few_plain)
            return weight
        made = packed(weight)
        self._serve(made, found.few_packed, weight)
        if shared and min(speedups) <= MIN_SPEEDUP:
            faster = takewhile(lambda each: each[1] > MIN_SPEEDUP, zip(rows, speedups, strict=True))
            made.table, made.rows = weight, max(size for size, _ in faster)  # type: ignore[attr-defined]
        return made

    def _serve(self, weight: Tensor, most: int, plain: Tensor | None = None) -> None:
        """Let the C++ kernel multiply up to ``most`` rows with weights of this layout."""
        if self._kernel is None:
            return
        layout = Layout.of(weight)
        self._kernel.collapse_pages(weight)
        block = 0 if plain is None or not most else self._kernel.block_of(plain, weight)
        if most and (plain is None or block):
            self._kernel.few[layout] = FewRows(most, block)
        else:
            self._kernel.few.pop(layout, None)


MACHINE = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that change how fast torch's libraries are."""
FILE = "measured.json"


def kept(key: str, measure: Callable[[], Measured]) -> Measured:
    """Return what this machine measured for a key, in an earlier process or now."""
    machine = processor_line(), platform.processor(), torch.__version__, torch.backends.cpu.get_cpu_capability()
    settings = (os.environ.get(name, "") for name in MACHINE)
    whole = content_key(key, Path(__file__).read_bytes(), *machine, *settings, str(SAMPLE_BYTES))

    def write(folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(attrs.asdict(measure())), encoding="utf-8")

    try:
        entry = CompileCache(cache_folder("cpu-products")).get_or_put(whole, write)
        return Measured(**json.loads((entry / FILE).read_text(encoding="utf-8")))
    except (ConfigError, OSError, TypeError, ValueError) as error:
        log.debug("what is measured of products is not kept: %s", error)
        return measure()


def measure(weight: Tensor, sizes: Sequence[int], kernel: FewRowsKernel | None = None) -> Measured:
    """Measure products in both layouts, on weights larger than the caches.

    Args:
        weight: the weight, or some rows of a large one.
        sizes: numbers of rows of the other matrix.
        kernel: the C++ kernel of few rows, or None.
    """
    copies = min(SAMPLE_BYTES // weight.nbytes, MAX_COPIES)
    plain = [weight, *(weight.clone() for _ in range(copies - 1))]
    in_layout = [packed(each) for each in plain] if packs(weight.dtype) else []
    by_torch: dict[bool, Run] = {False: partial(_run, plain, linear)}
    if in_layout:
        by_torch[True] = partial(_run, in_layout, linear)
    by_kernel: dict[bool, Run] = {} if kernel is None else _runs_of(kernel, plain, in_layout)
    took: dict[int, dict[tuple[bool, bool], float]] = {}
    widened = product_dtype(weight.dtype) is not weight.dtype
    many = [layout for layout in by_kernel if (kernel is not None and kernel.many if layout else widened)]
    compared = (*FEW_ROWS, MANY_ROWS) if many else FEW_ROWS
    for rows in sorted({*sizes, *(compared if by_kernel else ())}):
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        contenders = {(layout, False): run for layout, run in by_torch.items()}
        served = by_kernel if rows <= FEW_ROWS[-1] else many
        contenders.update({(layout, True): by_kernel[layout] for layout in served})
        ready = {name: partial(run, x) for name, run in contenders.items()}
        if rows > FEW_ROWS[-1]:  # so long that only one round follows, in which oneDNN would still prepare its product
            for warm in ready.values():
                warm()
        took[rows] = _fastest(ready)
    few = {layout: _most_rows(took, layout) for layout in (False, True)}

    def fastest(rows: int, layout: bool) -> float:
        times = took[rows]
        return times.get((layout, rows <= few[layout]), times.get((layout, False), math.inf))

    speedups = [fastest(rows, False) / fastest(rows, True) for rows in sizes]
    return Measured(speedups, few_packed=few[True], few_plain=few[False])


def _runs_of(kernel: FewRowsKernel, plain: Sequence[Tensor], in_layout: Sequence[Tensor]) -> dict[bool, Run]:
    """Return the runs of the C++ kernel by whether weights are packed, for the layouts that it knows."""
    dtype = plain[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return {}
    forms = {False: (plain, FewRows(0))}
    if in_layout and (block := kernel.block_of(plain[0], in_layout[0])):
        forms[True] = (in_layout, FewRows(0, block))
    return {
        layout: partial(_run, weights, partial(_by_kernel, kernel, few)) for layout, (weights, few) in forms.items()
    }


def _by_kernel(kernel: FewRowsKernel, few: FewRows, x: Tensor, weight: Tensor) -> Tensor:
    return kernel.few_rows(x, weight, None, few, kernel.address_of(weight))


def _most_rows(took: dict[int, dict[tuple[bool, bool], float]], layout: bool) -> int:
    """Return the number of rows up to which the C++ kernel saves the most time, as shares of that of each number.

    Without a difference it is preferred: a captured step calls it without Python.
    """
    most, gain, best = 0, 0.0, 0.0
    for rows, times in took.items():
        if (layout, True) not in times:
            break
        gain += math.log(MIN_SPEEDUP * times[layout, False] / times[layout, True])
        if gain >= best:
            most, best = ANY if rows >= MANY_ROWS else rows, gain
    return most


def _fastest(contenders: Mapping[tuple[bool, bool], Callable[[], float]]) -> dict[tuple[bool, bool], float]:
    """Return the shortest time of each contender. They run in turns, so that noise affects all."""
    rounds: list[dict[tuple[bool, bool], float]] = []
    spent = 0.0
    while len(rounds) < 4 and spent < LONGEST_TRIAL:
        rounds.append({name: run() for name, run in contenders.items()})
        spent += sum(rounds[-1].values())
    return {name: min(each[name] for each in rounds) for name in contenders}


def _run(weights: Sequence[Tensor], product: Product, x: Tensor) -> float:
    start = time.thread_time()  # excludes the time in which other processes have the core
    for weight in weights if x.shape[0] < MANY_ROWS else weights[:1]:
        product(x, weight)
    return time.thread_time() - start


def packed(weight: Tensor) -> Tensor:
    """Return a packed copy of a weight ``[out_features, in_features]``, of a dtype that oneDNN packs.

    Raises:
        DriverUnavailable: oneDNN refuses it.
    """
    try:
        result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    except RuntimeError as error:
        raise DriverUnavailable(
            f"oneDNN, which the cpu driver took to pack weights of {weight.dtype}, refuses one: {error}",
            "set the driver's option pack_weights to false",
        ) from error
    return result


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result
