"""The bar chart of README.md: docs/_static/measured.png, drawn from benchmarks/measured.json.

    python benchmarks/peers.py --workloads seed --precisions fp32 --seconds 1 \
        --only loop quorate DDP --json benchmarks/measured.json
    python docs/chart_of_measured.py

A bar is the median of the rounds, in examples/s; a whisker reaches from the slowest round to the
fastest. It needs matplotlib, of the extra ``bench``.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
DATA, PICTURE = ROOT / "benchmarks" / "measured.json", ROOT / "docs" / "_static" / "measured.png"
LEFT_OUT = ("native", "unconnected")  # another exchange, and bounds of what two workers can do
OURS, THEIRS = "#1f5fa8", "#9aa5b1"


def main() -> None:
    """Draw the first table of the file."""
    table = json.loads(DATA.read_text(encoding="utf-8"))[0]
    shown = [item for item in table["speeds"].items() if not item[0].endswith(LEFT_OUT)]
    speeds = dict(reversed(shown))  # the first one on top
    medians = [statistics.median(rounds) for rounds in speeds.values()]
    reach = [
        [median - min(rounds) for median, rounds in zip(medians, speeds.values(), strict=True)],
        [max(rounds) - median for median, rounds in zip(medians, speeds.values(), strict=True)],
    ]
    figure, axes = plt.subplots(figsize=(8, 0.38 * len(speeds) + 0.7), layout="constrained")
    colors = [OURS if name.startswith("quorate") else THEIRS for name in speeds]
    bars = axes.barh([*speeds], medians, xerr=reach, color=colors, ecolor="#55606b", capsize=2)
    axes.bar_label(
        bars, [f"{median:,.0f}" for median in medians], label_type="center", color="white"
    )
    axes.set_xlabel("examples/s (median of the rounds; more is better)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
