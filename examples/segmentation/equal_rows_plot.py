"""What equal_rows.py has written, as a table and a picture.

python examples/segmentation/equal_rows_plot.py runs/equal_rows.jsonl equal_rows.png
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray

KNOWN = 0.2  # IoU
FEW = 20  # values, of which no mean is shown
COLOURS = ("#b03060", "#2060a0", "#30905a", "#c08020")


def main() -> None:
    """Print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="files of equal_rows.py")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    found: dict[tuple[int, float], list[Any]] = defaultdict(list)
    for path in options.runs:
        for line in path.read_text().splitlines():
            run = json.loads(line)
            found[run["batch_size"], run["lr"]].append(run)
    runs = dict(sorted(found.items()))
    print(
        "| tiles | updates | rate | seeds | classes lacking | all there | cosine | "
        "jump, update | jump, rows | lacked | had | mean IoU |"
    )
    print("|---" * 12 + "|")
    rows = max(size for size, _ in runs)
    for (size, lr), some in runs.items():
        print(line_of(size, lr, some, rows))
    draw(runs, options.picture)


def line_of(size: int, lr: float, runs: list[Any], rows: int) -> str:
    """Means over seeds, as a line of a table, with the jump in an update and in so many rows."""
    lacking = np.mean([r["lacking"] for r in runs], 0)
    lacked, had = (np.concatenate(parts) for parts in zip(*map(changes, runs), strict=True))
    words = [
        f"{size}",
        f"{runs[0]['updates']:,}",
        f"{lr:g}",
        f"{len(runs)}",
        f"{lacking @ np.arange(len(lacking)) / lacking.sum():.2f}",
        f"{lacking[0] / lacking.sum():.0%}",
        f"{np.mean([r['cosines'] for r in runs]):.3f}",
        f"{np.mean([jump(r, 1) for r in runs]):.4f}",
        f"{np.mean([jump(r, rows // size) for r in runs]):.4f}",
        *map(_mean, (lacked, had)),
        " ".join(f"{r['iou'][-1]:.3f}" for r in runs),
    ]
    return "| " + " | ".join(words) + " |"


def _mean(values: NDArray[np.float64]) -> str:
    """A mean with its standard error, and of how many, if there are enough."""
    if len(values) < FEW:
        return f"{len(values)} times"
    error = values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():+.4f} ± {error:.4f} ({len(values):,})"


def changes(run: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """By how much an update changed the IoU of a class: which its batch lacked, and which it had.

    Both (n,), of all classes and updates that were looked at closely.
    """
    close = np.array(run["closely"], float)  # (updates + 1, 1 + K + 1)
    change = np.diff(close[:, 1:-1], axis=0)  # row i: by update close[i + 1, 0]
    # close_has[i] is of the batch of update close[0, 0] + i + 1, as updates count from 1.
    has = np.array(run["close_has"], bool)[: len(change)]
    real = ~np.isnan(change)
    return change[~has & real], change[has & real]


def jump(run: Any, updates: int) -> float:
    """How much the IoU of a class changes in so many updates, on average over classes and time."""
    values = np.array(run["closely"], float)[:, 1:-1]  # (updates + 1, K)
    return float(np.nanmean(np.abs(values[updates:] - values[:-updates])))


def draw(runs: dict[tuple[int, float], list[Any]], path: Path) -> None:
    """Four panels: classes lacking; IoU at equal rows; IoU update by update; cosines."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.6), layout="constrained")
    sizes = sorted({size for size, _ in runs})
    lowest = {size: min(lr for s, lr in runs if s == size) for size in sizes}

    panel = axes[0, 0]
    for k, size in enumerate(sizes):
        some = next(r for (s, _), rs in runs.items() if s == size for r in rs)
        counts = np.array(some["lacking"])
        places = np.arange(len(counts)) + (k - (len(sizes) - 1) / 2) * 0.4
        panel.bar(places, counts / counts.sum(), 0.4, color=COLOURS[k], label=f"{size} tiles")
    panel.set(xlabel="classes of 8 that a batch lacks", ylabel="share of batches")
    panel.set_xlim(-0.6, 5.5)
    panel.legend()

    panel = axes[0, 1]
    for (size, lr), some in runs.items():
        curves = np.array([run["curve"] for run in some], float)  # (seeds, points, 1 + K + 1)
        style = "-" if lr == lowest[size] else "--"
        colour = COLOURS[sizes.index(size)]
        label = f"{size} tiles, rate {lr:g}"
        panel.plot(curves[0, :, 0], curves[:, :, -1].mean(0), style, color=colour, label=label)
    panel.set(xlabel="rows", ylabel="mean IoU, mean of the seeds")
    panel.legend()

    # Of the classes that are known by then, the one that the smallest batches lack most often.
    first = runs[sizes[0], lowest[sizes[0]]][0]
    known = [
        np.array(runs[size, lowest[size]][0]["closely"], float)[:, 1:-1].mean(0) for size in sizes
    ]
    rare = int(np.argmax(np.array(first["lacks"]) * (np.min(known, 0) > KNOWN)))
    panel = axes[1, 0]
    for k, size in enumerate(sizes):
        run = runs[size, lowest[size]][0]
        close = np.array(run["closely"], float)
        steps = close[:, 0] - close[0, 0]
        panel.plot(steps, close[:, 1 + rare], color=COLOURS[k], label=f"{size} tiles")
        has = np.array(run["close_has"], bool)[: len(steps) - 1, rare]
        without = np.flatnonzero(~has) + 1
        panel.plot(steps[without], close[without, 1 + rare], "o", ms=3.5, color=COLOURS[k])
    panel.set(xlabel="update in the middle of the run", ylabel=f"IoU of {first['classes'][rare]}")
    panel.set_title("a dot: the batch lacked the class", fontsize=9)
    panel.legend()

    panel = axes[1, 1]
    edges = np.linspace(-1, 1, 41)
    for k, size in enumerate(sizes):
        cosines = np.concatenate([run["cosines"] for run in runs[size, lowest[size]]])
        panel.hist(
            cosines,
            edges,
            density=True,
            histtype="step",
            lw=1.5,
            color=COLOURS[k],
            label=f"{size} tiles",
        )
    panel.set(xlabel="cosine of a gradient and the next", ylabel="density")
    panel.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
