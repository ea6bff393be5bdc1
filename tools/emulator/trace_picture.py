"""Draw the last replay of a graph in a trace of the emulated CANN, and what surrounds it, as SVG.

emulated-cann run --trace trace.json -- PROGRAM
python tools/emulator/trace_picture.py trace.json --microseconds 2000 > trace.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from html import escape
from typing import Any

WIDTH, ROW, LABELS, CHARACTER = 960, 26, 80, 6.8
BEFORE = 300
"""Microseconds to draw before the replay."""
COLORS = {"kernel": "#3b6fb6", "copy": "#c77f2a", "fill": "#c77f2a", "update": "#8a4fa3", "graph": "#d5dbe3"}


def bar(event: dict[str, Any], top: int, left: float, scale: float) -> Iterator[str]:
    """Yield a bar, and its name where it fits; else a part of it."""
    start = max(LABELS, LABELS + (event["ts"] - left) * scale)
    end = min(WIDTH, LABELS + (event["ts"] + event["dur"] - left) * scale)
    wide, name, color = max(1.0, end - start), event["name"], COLORS.get(event["cat"], "#777")
    yield f"<rect x='{start:.1f}' y='{top}' width='{wide:.1f}' height='{ROW - 6}' fill='{color}'>"
    yield f"<title>{escape(name)}, {event['dur']:.0f} us</title></rect>"
    fits = int((wide - 4) / CHARACTER)
    if fits > 2:
        ink = "#222" if event["cat"] == "graph" else "#fff"
        yield f"<text x='{start + 2:.1f}' y='{top + 14}' fill='{ink}'>{escape(name[:fits])}</text>"


def draw(events: list[dict[str, Any]], microseconds: float) -> str:
    """Return the picture: a row per stream, and one for what the replay launches."""
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    ran = [each for each in events if each["ph"] == "X"]
    replay = [each for each in ran if each["cat"] == "graph"][-1]
    left, scale = replay["ts"] - BEFORE, (WIDTH - LABELS) / microseconds
    seen = [each for each in ran if each["ts"] + each["dur"] > left and each["ts"] < left + microseconds]
    device = [each for each in seen if each["pid"] == replay["pid"]]
    inside = [each for each in device if each["args"]["phase"] == "replay" and each["cat"] != "graph"]
    tracks = [(names[tid], [each for each in device if each["tid"] == tid and each not in inside]) for tid in names]
    tracks = [(name, found) for name, found in tracks if found] + [("in the replay", inside)]
    lines = [
        f"<text x='0' y='{ROW * row + 14}'>{escape(name)}</text>" + "".join(part)
        for row, (name, found) in enumerate(tracks)
        for part in [[text for each in found for text in bar(each, ROW * row, left, scale)]]
    ]
    size = f"width='{WIDTH}' height='{ROW * len(tracks)}' viewBox='0 0 {WIDTH} {ROW * len(tracks)}'"
    style = "font-family='system-ui, sans-serif' font-size='11' role='img' aria-label='A trace of a decode step'"
    paper = "<rect width='100%' height='100%' fill='#fff'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>", paper, *lines, "</svg>\n"])


def main() -> None:
    """Print the picture of a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=argparse.FileType(encoding="utf-8"))
    parser.add_argument("--microseconds", type=float, default=2000)
    given = parser.parse_args()
    sys.stdout.write(draw(json.load(given.trace), given.microseconds))


if __name__ == "__main__":
    main()
