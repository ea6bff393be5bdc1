"""Plots of the figures of ``hal bench``, as SVG, which needs no library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import attrs

from hal.bench.bench_report import FORMAT
from hal.bench.plan import BenchmarkError

WIDTH, ROW, LABELS, VALUES = 720, 20, 240, 60
OURS, OTHERS = "#3b6fb6", "#9aa0a6"
FONT = "font-family='system-ui, sans-serif' font-size='12'"


@attrs.frozen
class Bar:
    """A bar of a plot.

    Attributes:
        quartiles: the ends of the line over it, or None for no line.
    """

    name: str
    value: float
    quartiles: tuple[float, float] | None = None


@attrs.frozen
class Bars:
    """Bars under a common title.

    Attributes:
        floor: the value that a dashed line marks, or None for no line.
    """

    title: str
    bars: Sequence[Bar]
    floor: float | None = None


def draw(title: str, groups: Sequence[Bars], note: str = "") -> str:
    """Return an SVG of horizontal bars, all on one scale."""
    ends = [end for each in groups for bar in each.bars for end in (bar.value, *(bar.quartiles or ()))]
    most = max([*ends, *(each.floor or 0.0 for each in groups)]) or 1.0
    scale = (WIDTH - LABELS - VALUES) / most
    lines, top = [_text(0, 14, title, "font-weight='600'")], ROW + 4
    for group in groups:
        if group.title:
            lines.append(_text(0, top + 14, group.title))
            top += ROW
        start = top
        for bar in group.bars:
            lines += _bar(bar, top, scale)
            top += ROW
        if group.floor is not None:
            place = LABELS + group.floor * scale
            lines.append(f"<path d='M{place:.1f} {start}V{top}' stroke='#222' stroke-dasharray='3 2'/>")
        top += 6
    if note:
        lines.append(_text(0, top + 14, note, "fill='#666' font-size='10'"))
        top += ROW
    frame = f"width='{WIDTH}' height='{top}' viewBox='0 0 {WIDTH} {top}' role='img' aria-label='{escape(title)}' {FONT}"
    body = "\n".join(lines)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {frame}>\n<rect width='100%' height='100%' fill='#fff'/>\n{body}\n"
        "</svg>\n"
    )


def _bar(bar: Bar, top: int, scale: float) -> Iterator[str]:
    length, color = max(1.0, bar.value * scale), OURS if bar.name.startswith("hal ") else OTHERS
    yield _text(12, top + 14, bar.name[:34])
    yield f"<rect x='{LABELS}' y='{top + 3}' width='{length:.1f}' height='{ROW - 6}' fill='{color}'/>"
    end = bar.value
    if bar.quartiles is not None:
        low, end = bar.quartiles[0], max(bar.value, bar.quartiles[1])
        ends = f"M{LABELS + low * scale:.1f} {top + ROW // 2}H{LABELS + bar.quartiles[1] * scale:.1f}"
        yield f"<path d='{ends}' stroke='#222'/>"
    yield _text(LABELS + max(1.0, end * scale) + 6, top + 14, _number(bar.value))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.0f}' y='{y}' {style}>{escape(text)}</text>".replace(" >", ">")


def times(*documents: Mapping[str, Any]) -> str:
    """Return the plot of the times of steps, with the floor of each batch size.

    Args:
        documents: figures of runs on one machine, as ``--figures`` writes them.
    """
    plan, where = documents[0]["plan"], documents[0]["environment"]
    name = plan["shapes"] or Path(plan["checkpoint"]).name
    title = f"{plan['workload']}: {name}, {documents[0]['dtype']}, {plan['length']} tokens"
    groups = [
        Bars(
            f"batch {floor['batch_size']} (dashed: floor, {_number(floor['seconds'] * 1e3)} ms)",
            [_measured(each) for each in document["measurements"] if each["batch_size"] == floor["batch_size"]],
            floor["seconds"] * 1e3,
        )
        for document in documents
        for floor in document["floors"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    note = f"{where['device']}; {where['cpu']}, {where['usable_cores']} cores; {versions}"
    return draw(f"{title}: ms, median and quartiles", groups, note)


def _measured(measurement: Mapping[str, Any]) -> Bar:
    low, middle, high = (
        measurement[f"{name}_seconds"] * 1e3 for name in ("first_quartile", "median", "third_quartile")
    )
    return Bar(measurement["contender"], middle, (low, high))


def launches(document: Mapping[str, Any]) -> str:
    """Return the plot of kernel launches per layer; an empty text if none were counted."""
    bars = [Bar(f"{each['contender']}, batch {each['batch_size']}", each["per_layer"]) for each in document["launches"]]
    bars += [Bar(name, number) for name, number in document["launches_per_layer_of_peers"].items()]
    return draw("Kernel launches per layer", [Bars("", bars)]) if bars else ""


def read_figures(file: Path) -> Mapping[str, Any]:
    """Read a file that ``--figures`` wrote.

    Raises:
        BenchmarkError: it cannot be read, or has another format.
    """
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BenchmarkError(f"{file} cannot be read: {error}", "name a file that --figures wrote") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BenchmarkError(f"{file} has no figures of format {FORMAT}", "name a file that --figures wrote")
    return document
