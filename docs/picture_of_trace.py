"""Draw a trace: `python docs/picture_of_trace.py trace.json picture.png --steps 4:6`.

A row per thread, in the order of the trace; a colour per kind of work; steps as they are in the
file. It needs matplotlib, which the extra ``bench`` brings. docs/trace.png is of

    quorate run --devices cpu --workers 2 --trace t.json --steps 12 examples/fashion_mnist.py

``--rows stage`` draws the rows alone whose names have that word. docs/pipeline.png is so, of

    quorate run --devices cpu+cpu --shards 8 --trace t.json train.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

COLOURS = {
    "fetching": "#b8b8b8",
    "forward": "#4c8bbf",
    "backward": "#e08e45",
    "backward input": "#e08e45",
    "backward weight": "#f2c9a1",
    "pushing": "#8a6bb1",
    "update": "#4f9e5d",
    "collecting": "#a7d3ae",
    "publishing": "#a7d3ae",
    "evaluation": "#c5b358",
    "writing a checkpoint": "#7f5f3f",
    "copying the state": "#7f5f3f",
    "between updates": "#dddddd",
}
IDLE = {"waiting", "waiting for workers", "answering", "starting"}
HEIGHT = 0.8


def main() -> int:
    """Draw the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--steps", help="A:B, from A to before B; default: all", default=":")
    parser.add_argument("--rows", help="a word of the names of the rows; default: all", default="")
    given = parser.parse_args()
    first, _, last = given.steps.partition(":")
    steps = range(int(first or 0), int(last or 1 << 62))
    draw(given.trace, given.picture, steps, given.rows)
    return 0


def draw(trace: Path, picture: Path, steps: range, word: str = "") -> None:
    """Draw the spans of some steps, in the rows whose names have a word."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    spans = [
        event
        for event in events
        if event["ph"] == "X"
        and event["args"]["step"] in steps
        and event["name"] not in IDLE
        and word in names[event["pid"], event["tid"]]
    ]
    if not spans:
        raise SystemExit(f"{trace} has no span of steps {steps.start} to {steps.stop}")
    rows = {where: n for n, where in enumerate(sorted({(s["pid"], s["tid"]) for s in spans}))}
    origin = min(span["ts"] for span in spans)
    figure, axes = pyplot.subplots(figsize=(10, 0.9 + 0.6 * len(rows)), dpi=110)
    # Long ones first: what lies within others is drawn over them.
    for span in sorted(spans, key=lambda span: -span["dur"]):
        row = rows[span["pid"], span["tid"]]
        begin, length = (span["ts"] - origin) / 1e3, span["dur"] / 1e3
        colour = COLOURS.get(span["name"], "#cccccc")
        axes.broken_barh(
            [(begin, length)],
            (row - HEIGHT / 2, HEIGHT),
            facecolors=colour,
            edgecolors="white",
            linewidth=0.4,
        )
        is_told = span["name"] == "backward" or ("stage" in word and span["name"] == "forward")
        if (shard := span["args"].get("shard")) is not None and is_told:
            axes.text(begin + length / 2, row, str(shard), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [names[where] for where in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    there = [name for name in COLOURS if any(span["name"] == name for span in spans)]
    figure.legend(
        handles=[Patch(color=COLOURS[name], label=name) for name in there],
        loc="upper center",
        ncols=min(len(there), 7),
        frameon=False,
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(picture)


if __name__ == "__main__":
    raise SystemExit(main())
