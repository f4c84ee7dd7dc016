"""The target: intersection over union on what was never seen, and with what it is compared.

A network that sees one pixel at a time knows the brightness of a class and nothing else. What the
U-Net has above it comes from context.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from table import table
from tiles import Tiles

from quorate.errors import DataError


def reached(found: dict[str, float], test: Tiles, options: argparse.Namespace) -> bool:
    """Print a table of a test set's metrics, and compare their mean.

    Args:
        found: as ``loss.iou`` gives it.
        test: the test set.
        options: target (the least mean; None: any), above (run directory of the baseline), margin
            (how much more than that one's it has to be).
    """
    print(table(found, test.legend, test.tested, None))
    mean, target = found["mean_iou"], options.target
    print(f"test mean IoU {mean:.4f}" + ("" if target is None else f", target {target}"))
    good = target is None or mean >= target
    if options.above is None:
        return good
    other = of_run(options.above)
    print(f"one pixel at a time {other:.4f}: {mean - other:.4f} less, target {options.margin}")
    return good and mean - other >= options.margin


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
