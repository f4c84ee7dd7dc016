"""The plot of a bench: speed-up against the number of workers, and the parts of a step's time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from quorate.commands.bench.results import Result
from quorate.commands.bench.split import PARTS
from quorate.machine.atomic_file import write_atomically
from quorate.machine.text import three_digits

# Colours distinguishable with any colour vision (Okabe and Ito, 2008).
COLOURS = dict(
    zip(PARTS, ("#56b4e9", "#009e73", "#e69f00", "#d55e00", "#bbbbbb", "#cc79a7"), strict=True)
)
INK = "#333333"


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a PNG.

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

    # 1. Speed-up, with the range of the rounds.
    least = results[0].contender.workers
    ends = [least, max(result.contender.workers for result in results)]
    speed.plot(ends, [n / least for n in ends], "--", color="#999999", label="ideal", zorder=1)
    for devices in dict.fromkeys(result.contender.devices for result in results):
        # A single line for all lists of devices if each list has a single number of workers.
        group = [r for r in results if r.contender.devices == devices]
        group = group if len(group) > 1 else list(results)
        speed.errorbar(
            [r.contender.workers for r in group],
            [r.speed_up for r in group],
            yerr=[
                [r.speed_up - min(r.ratios) for r in group],
                [max(r.ratios) - r.speed_up for r in group],
            ],
            marker="o",
            capsize=3,
            color=COLOURS["compute"] if len(group) == len(results) else None,
            label="measured" if len(group) == len(results) else devices,
        )
        if group == list(results):
            break
    for result in results:
        speed.annotate(
            f"{three_digits(result.examples_per_s)}/s",
            (result.contender.workers, result.speed_up),
            xytext=(6, -12),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
    speed.set_xticks(sorted({result.contender.workers for result in results}))
    speed.set_ylim(bottom=0)
    speed.margins(x=0.15)
    speed.set_xlabel("workers")
    speed.set_ylabel(f"speed-up over {results[0].contender.label()}")
    speed.legend(frameon=False)

    # 2. The split of a step.
    names = [_name(result) for result in results]
    bottom = [0.0] * len(results)
    for part in PARTS:
        heights = [result.split[part] * result.step_s * 1e3 for result in results]
        parts.bar(names, heights, 0.6, bottom=bottom, color=COLOURS[part], label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    parts.set_ylabel("milliseconds of a step")
    parts.margins(y=0.08)
    handles, labels = parts.get_legend_handles_labels()
    parts.legend(
        handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    for axes in (speed, parts):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(path, picture.getvalue())


def _name(result: Result) -> str:
    workers, devices = result.contender.workers, result.contender.devices
    name = f"{workers} worker{'s' if workers > 1 else ''}"
    return name if devices is None else f"{name}\n{devices}"
