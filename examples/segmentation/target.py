"""The target: intersection over union on bands that were never seen, and with what it is compared.

A network that sees one pixel at a time knows the brightness of a class and nothing else. What the
U-Net has above it comes from context.
"""

from __future__ import annotations

import json
from pathlib import Path

from data import CLASSES
from loss import SHORT
from tiles import TESTED

from quorate.errors import DataError


def reached(found: dict[str, float], target: float, above: Path | None, margin: float) -> bool:
    """Print a table of a test set's metrics, and compare their mean.

    Args:
        found: as ``loss.iou`` gives it.
        target: the least mean.
        above: run directory of the baseline.
        margin: how much more than that one's it has to be.
    """
    columns = {"all": ""} | {f"1/{2**k}" if k else "full": f"_{k}" for k in range(TESTED)}
    print(f"{'IoU':<12}" + "".join(f"{title:>8}" for title in columns))
    for title, name in (*zip(CLASSES, SHORT, strict=True), ("mean", "mean")):
        row = (found[f"{name}_iou{suffix}"] for suffix in columns.values())
        print(f"{title:<12}" + "".join(f"{value:>8.3f}" for value in row))
    mean = found["mean_iou"]
    print(f"test mean IoU {mean:.4f}, target {target}")
    if above is None:
        return mean >= target
    other = of_run(above)
    print(f"one pixel at a time {other:.4f}: {mean - other:.4f} less, target {margin}")
    return mean >= target and mean - other >= margin


def of_run(run_dir: Path) -> float:
    """The mean IoU that a run ended with.

    Raises:
        DataError: it has none.
    """
    path = run_dir / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return float([line["validation"] for line in lines if "validation" in line][-1]["mean_iou"])
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise DataError(
            path,
            got=f"{type(error).__name__}: {error}",
            expected="a run that was evaluated",
            fix="run train.py --baseline --run-dir " + str(run_dir),
        ) from error
