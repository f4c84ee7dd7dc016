"""The plot of a plan: examples/s and the parts of the time, against the number of workers."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from quorate.commands.plan.table import HEADS, cells
from quorate.machine.atomic_file import write_atomically
from quorate.simulation.prediction import PARTS, Prediction

# Colours distinguishable with any colour vision (Okabe and Ito, 2008).
COLOURS = dict(
    zip(
        PARTS,
        ("#009e73", "#0072b2", "#f0e442", "#d55e00", "#e69f00", "#56b4e9", "#bbbbbb", "#cc79a7"),
        strict=True,
    )
)
INK = "#333333"
MARKERS = "osv^Dx"


def plot(rows: Sequence[Prediction], title: str, path: Path) -> None:
    """Write a PNG, or an HTML page with the picture and the table, depending on the suffix.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color=INK)
    speed, parts = figure.subplots(1, 2)

    # 1. Examples/s: a line per rule and number of spares.
    by_line = sorted(rows, key=_line)
    for number, (label, group) in enumerate(groupby(by_line, key=_line)):
        listed = sorted(group, key=lambda told: told.workers)
        speed.plot(
            [told.workers for told in listed],
            [told.examples_per_s for told in listed],
            marker=MARKERS[number % len(MARKERS)],
            label=label,
        )
    least = min(rows, key=lambda told: told.workers)
    ends = [least.workers, max(told.workers for told in rows)]
    ideal = least.examples_per_s / least.efficiency / least.goodput / (least.workers + least.spares)
    speed.plot(ends, [n * ideal for n in ends], "--", color="#999999", label="ideal", zorder=1)
    if ends[1] > 4 * ends[0]:
        speed.set_xscale("log", base=2)
        speed.set_yscale("log", base=2)
    speed.set_xticks(numbers := sorted({told.workers for told in rows}), map(str, numbers))
    speed.set_xlabel("workers, without spares")
    speed.set_ylabel("examples/s, failures and checkpoints counted")
    speed.legend(frameon=False, fontsize=8)

    # 2. The parts of the time, for the first number of spares of each.
    shown = list({(told.workers, told.update): told for told in reversed(rows)}.values())[::-1]
    names = [f"{told.workers}\n{told.update}" for told in shown]
    bottom = [0.0] * len(shown)
    for part in PARTS:
        heights = [100 * told.shares[part] for told in shown]
        parts.bar(names, heights, 0.6, bottom=bottom, color=COLOURS[part], label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    parts.set_ylabel("% of the time")
    parts.tick_params(axis="x", labelsize=7, rotation=45 if len(shown) > 5 else 0)
    handles, labels = parts.get_legend_handles_labels()
    parts.legend(
        handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    for axes in (speed, parts):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)

    is_page = path.suffix == ".html"
    picture = io.BytesIO()
    figure.savefig(picture, format="svg" if is_page else "png", dpi=120)
    data = picture.getvalue()
    write_atomically(path, _page(rows, title, data.decode()) if is_page else data)


def _line(told: Prediction) -> str:
    rule = "quorum" if told.update == f"quorum:{told.workers}" else told.update
    many = f"{told.spares} spare{'s' if told.spares > 1 else ''}"
    return f"{rule}, {many}" if told.spares else rule


def _page(rows: Sequence[Prediction], title: str, svg: str) -> str:
    """Return a self-contained page."""
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in HEADS)
    lines = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(told)) + "</tr>"
        for told in rows
    )
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        "<style>body{font:14px sans-serif;color:#333;max-width:72em;margin:2em auto}"
        "td,th{padding:.2em .8em;text-align:right}svg{max-width:100%;height:auto}</style>\n"
        f"<h1>{name}</h1>\n{svg[svg.index('<svg') :]}\n"
        f"<table><tr>{heads}</tr>\n{lines}</table></html>\n"
    )
