"""The page of a bring-up: one HTML file with the outcome of each part, and plots of its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hal.bench.plot import launches, times
from hal.bringup.parts import Outcome, Request

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem; border-top: 1px solid #ddd; padding-top: 1rem }
table { border-collapse: collapse } td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top }
.passed { color: #17743a } .failed, .late { color: #b3261e; font-weight: 600 }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: 12px } svg { display: block; margin: 1rem 0 }
"""


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
    document = outcome.data[0] if outcome.name in ("decode", "prefill") and outcome.data else None
    if isinstance(document, dict) and document.get("measurements"):
        yield times(document)
        yield launches(document)
