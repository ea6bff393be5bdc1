"""The page of a bring-up: one HTML file with the outcome of each part, and plots of its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from hal.bringup.parts import Outcome, Request

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem; border-top: 1px solid #ddd; padding-top: 1rem }
table { border-collapse: collapse } td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top }
.passed { color: #17743a } .failed, .late { color: #b3261e; font-weight: 600 }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: 12px } svg text { font-size: 12px }
"""
WIDTH, BAR, LABELS = 640, 20, 230


def page(request: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the page."""
    rows = "".join(
        f'<tr><td class="{each.status}">{each.status}</td><td><a href="#{each.name}">{escape(each.title)}</a></td>'
        f"<td>{each.seconds:.0f} s</td></tr>"
        for each in outcomes
    )
    title = f"Bring-up of {request.backend}{' (emulated)' if request.emulate else ''}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1>"
        f"<p>{escape(request.checkpoint)}, {escape(request.dtype)}, beside {escape(request.against)}</p>"
        f"<table>{rows}</table>{''.join(map(_section, outcomes))}</html>\n"
    )


def _section(outcome: Outcome) -> str:
    lines = "".join(f"<li>{escape(each)}</li>" for each in outcome.lines)
    log = "\n".join(outcome.log)
    shown = "" if outcome.status == "passed" else " open"
    details = f"<details{shown}><summary>end of its log</summary><pre>{escape(log)}</pre></details>" if log else ""
    return (
        f'<h2 id="{outcome.name}">{escape(outcome.title)}: <span class="{outcome.status}">{outcome.status}</span></h2>'
        f"<ul>{lines}</ul>{''.join(_plots(outcome))}<p><code>{escape(outcome.command)}</code></p>{details}"
    )


def _plots(outcome: Outcome) -> Iterator[str]:
    """Yield the plots of figures of ``hal bench``."""
    if outcome.name not in ("decode", "prefill") or not outcome.data or not isinstance(outcome.data[0], dict):
        return
    document: dict[str, Any] = outcome.data[0]
    times = [
        (f"{each['contender']}, batch {each['batch_size']}", each["median_seconds"] * 1e3)
        for each in document.get("measurements", ())
    ]
    times += [(f"floor, batch {each['batch_size']}", each["seconds"] * 1e3) for each in document.get("floors", ())]
    if times:
        yield _bars("Time of a step, ms (median)", times)
    launches = [
        (f"{each['contender']}, batch {each['batch_size']}", float(each["per_layer"]))
        for each in document.get("launches", ())
    ]
    launches += [(name, float(number)) for name, number in document.get("launches_per_layer_of_peers", {}).items()]
    if launches:
        yield _bars("Kernel launches per layer", launches)


def _bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    most = max(value for _, value in values) or 1.0
    height = (len(values) + 1) * BAR + 8
    parts = [f'<text x="0" y="14" font-weight="600">{escape(title)}</text>']
    for index, (name, value) in enumerate(values, 1):
        top, length = index * BAR + 4, max(1.0, (WIDTH - LABELS - 70) * value / most)
        parts.append(
            f'<text x="0" y="{top + 13}">{escape(name[:36])}</text>'
            f'<rect x="{LABELS}" y="{top + 2}" width="{length:.0f}" height="{BAR - 6}" fill="#3b6fb6"/>'
            f'<text x="{LABELS + length + 6:.0f}" y="{top + 13}">{value:.4g}</text>'
        )
    return f'<svg width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
