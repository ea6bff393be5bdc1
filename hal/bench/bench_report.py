"""The report of a benchmark: a table, notes, and all figures as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from hal.bench.hal_side import PEERS
from hal.bench.measurement import Floor, Measurement, Result
from hal.bench.plan import FEWEST_REPEATS
from hal.bench.timing import Agreement, noisy
from hal.device.host_capacity import crowded

FORMAT = 1
"""Version of the JSON format; incremented when a key is removed or changes its meaning."""
NOISE = "~"
"""Marks a ratio of two times that differ by less than their spread."""


def references(result: Result) -> list[str]:
    """Return the contenders that ratios refer to: all except hal's, or hal's first one if it runs alone."""
    names = list(dict.fromkeys(each.contender for each in result.measurements))
    return [name for name in names if not name.startswith("hal ")] or names[:1]


def find(result: Result, batch_size: int, contender: str) -> Measurement:
    """Return the measurement of a contender at a batch size."""
    return next(each for each in result.measurements if (each.batch_size, each.contender) == (batch_size, contender))


def speedup(result: Result, measurement: Measurement, reference: str) -> float:
    """Return the reference's median time divided by the measurement's, at the same batch size."""
    return find(result, measurement.batch_size, reference).summary.median / measurement.summary.median


def tokens_per_second(result: Result, measurement: Measurement) -> float:
    """Return new tokens (decode) or prompt tokens (prefill) per second, over all sequences."""
    each = 1 if result.plan.workload == "decode" else result.plan.length
    return each * measurement.batch_size / measurement.summary.median


def table(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows; the last row of each batch size is its floor."""
    against = references(result)
    columns = ["batch", "contender", "median ms", "spread ms", "tokens/s", *(f"vs {name}" for name in against)]
    columns += ["x floor", "setup s"]
    memory = any(each.peak_bytes is not None for each in result.measurements)
    if memory:
        columns += ["peak / weights"]
    rows = []
    for floor in result.floors:
        for each in (one for one in result.measurements if one.batch_size == floor.batch_size):
            summary = each.summary
            row = [str(each.batch_size), each.contender, _ms(summary.median), _ms(summary.spread)]
            row += [f"{tokens_per_second(result, each):.1f}", *(_ratio(result, each, name) for name in against)]
            row += [f"{summary.median / floor.seconds:.2f}", f"{each.setup_seconds:.1f}"]
            if memory:
                row += ["-" if each.peak_bytes is None else f"{each.peak_bytes / result.weight_bytes:.2f}"]
            rows.append(row)
        rows.append([str(floor.batch_size), "floor", _ms(floor.seconds)] + [""] * (len(columns) - 3))
    return columns, rows


def launches_table(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows: the kernels of each batch size, those of layers first, and their sums."""
    contenders = list(dict.fromkeys(each.contender for each in result.launches))
    columns = ["batch", "kernel", *(f"{name}, {where}" for name in contenders for where in ("a layer", "outside"))]
    rows = []
    for size in dict.fromkeys(each.batch_size for each in result.launches):
        counts = [part for each in result.launches if each.batch_size == size for part in (each.layer, each.outside)]
        kernels = {name for part in counts for name in part}
        for name in sorted(kernels, key=lambda name: (-max(part[name] for part in counts[::2]), name)):
            rows.append([str(size), name, *(str(part[name]) for part in counts)])
        rows.append([str(size), "all", *(str(part.total()) for part in counts)])
    return columns, rows


def launches_notes(result: Result) -> Iterator[str]:
    """Yield notes on the table of launches."""
    yield "a layer: the kernels that a second layer adds to a model of one; outside: the rest, including input copies"
    if result.plan.workload == "decode":
        yield from (f"other implementations, per layer: {number} by {peer}" for peer, number in PEERS.items())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


def _ratio(result: Result, measurement: Measurement, reference: str) -> str:
    if measurement.contender == reference:
        return "1"
    other = find(result, measurement.batch_size, reference)
    mark = f" {NOISE}" if noisy(measurement.summary, other.summary) else ""
    return f"{speedup(result, measurement, reference):.2f}{mark}"


def heading(result: Result) -> str:
    """Return lines that name the workload, the hardware and the versions."""
    plan, where = result.plan, result.environment
    what = "tokens in the cache" if plan.workload == "decode" else "tokens per prompt"
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    ranks = f" on one of {plan.tensor_parallel} ranks" if (plan.tensor_parallel or 1) > 1 else ""
    return (
        f"{plan.workload}: {plan.name}, {result.dtype}, {result.weight_bytes / 1e6:.1f} MB of weights{ranks}, "
        f"{plan.length} {what}, {plan.repeats} repeats\n{where['backend']}: {where['device']}; {where['cpu']}, "
        f"{where['usable_cores']} of {where['cores']} cores, {where['threads']} threads; {versions}"
    )


def notes(result: Result) -> Iterator[str]:
    """Yield notes on the table of times."""
    yield from _agreements(result)
    if found := crowded(result.environment["other_threads"], result.environment["usable_cores"]):
        yield f"{found}, and floor and ratios change with them; measure on an idle machine"
    for floor in result.floors:
        yield _floor_note(floor)
    for one, other in _noisy_pairs(result):
        yield (
            f"batch {one.batch_size}: {one.contender} and {other.contender} differ by "
            f"{_ms(abs(one.summary.median - other.summary.median))} ms, less than their spread "
            f"({_ms(max(one.summary.spread, other.summary.spread))} ms): no difference can be claimed ({NOISE})"
        )
    fewer = [each.contender for each in result.measurements if each.fewer_bits]
    if fewer:
        yield f"{' and '.join(dict.fromkeys(fewer))}: fewer bits than the others' weights, which the floor counts"
    below = [
        each
        for each in result.measurements
        if each.summary.median < _floor_of(result, each).seconds and each.contender not in fewer
    ]
    if below:
        yield (
            "faster than the floor: the weights stay in the processor's caches, a prefill multiplies integers, or the "
            "machine was busier while the floor was measured; ignore the floor"
        )
    if result.plan.workload == "prefill" and "transformers" in result.plan.against:
        yield "transformers compiles only decode steps, so its prefill is eager"
    if result.environment["emulated"]:
        yield "the device is emulated: its times say nothing about hardware"
    if result.plan.repeats < FEWEST_REPEATS:
        yield f"{result.plan.repeats} repeats are too few to quote a figure: use at least {FEWEST_REPEATS} (--repeats)"


def _agreements(result: Result) -> Iterator[str]:
    for size, found in result.agreements.items():
        if found:
            worst = max(found, key=lambda each: each.difference)
            same = sum(each.same_tokens for each in found)
            yield (
                f"batch {size}: {_agreeing(result, found)} agree: logits differ by at most {worst.difference:.2g} of "
                f"their norm ({worst.contender}; the tolerance is {worst.tolerance:.2g}), and {same} of "
                f"{sum(each.sequences for each in found)} next tokens are equal"
            )


def _agreeing(result: Result, found: list[Agreement]) -> str:
    _, *others = dict.fromkeys(each.contender for each in result.measurements)  # compared with the first
    apart = [name for name in others if name not in {each.contender for each in found}]
    return f"all contenders but {', '.join(apart)}, which were not compared," if apart else "all contenders"


def _floor_json(floor: Floor) -> dict[str, Any]:
    products = None if floor.products is None else _floor_json(floor.products)
    return {**attrs.asdict(floor), "rate": floor.rate, "seconds": floor.seconds, "products": products}


def _floor_note(floor: Floor) -> str:
    note = f"batch {floor.batch_size}: floor: {_at_rate(floor)}"
    if floor.products is None:
        return note
    took = f"{_ms(floor.products.seconds)} ms"
    if not floor.excess:
        return f"{note}; products take less time than their weights, {took}: {_at_rate(floor.products)}"
    return f"{note}; products take longer than their weights, and count instead, {took}: {_at_rate(floor.products)}"


def _at_rate(floor: Floor) -> str:
    unit = "B" if floor.work.unit == "bytes" else "FLOP"
    parts = " + ".join(f"{name} {_scaled(amount, unit)}" for name, amount in floor.work.parts.items() if amount)
    return f"{parts}, at {_scaled(floor.rate, unit)}/s ({floor.probe})"


def _scaled(amount: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if amount < 1000:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:.3g} T{unit}"


def _floor_of(result: Result, measurement: Measurement) -> Floor:
    return next(each for each in result.floors if each.batch_size == measurement.batch_size)


def _noisy_pairs(result: Result) -> Iterator[tuple[Measurement, Measurement]]:
    against = references(result)
    seen: set[tuple[int, frozenset[str]]] = set()
    for each in result.measurements:
        for name in against:
            other = find(result, each.batch_size, name)
            pair = (each.batch_size, frozenset({each.contender, name}))
            if each.contender != name and pair not in seen and noisy(each.summary, other.summary):
                seen.add(pair)
                yield each, other


def as_json(result: Result) -> dict[str, Any]:
    """Return all measured and derived figures. Times are in seconds, memory in bytes."""
    against = references(result)
    measurements = [
        {
            **attrs.asdict(each),
            **{f"{key}_seconds": value for key, value in attrs.asdict(each.summary).items()},
            "tokens_per_second": tokens_per_second(result, each),
            "speedup": {name: speedup(result, each, name) for name in against},
            "times_floor": each.summary.median / _floor_of(result, each).seconds,
        }
        for each in result.measurements
    ]
    agreements = [
        {"batch_size": size, **attrs.asdict(each)} for size, found in result.agreements.items() for each in found
    ]
    return {
        "format": FORMAT,
        "plan": attrs.asdict(result.plan),
        "dtype": result.dtype,
        "weight_bytes": result.weight_bytes,
        "environment": result.environment,
        "agreements": agreements,
        "measurements": measurements,
        "floors": [_floor_json(each) for each in result.floors],
        "launches": [{**attrs.asdict(each), "per_layer": each.per_layer} for each in result.launches],
        "launches_per_layer_of_peers": dict(PEERS) if result.launches and result.plan.workload == "decode" else {},
        "notes": list(notes(result)),
    }
