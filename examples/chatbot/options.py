"""The options that single.py and train.py have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pairs import LEAST_ANSWER
from words import LANGUAGES


def parse(description: str, run_dir: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data",
        required=True,
        help="insuranceqa (GPL-3.0, for research: your word that this is yours), chatterbot (BSD), "
        "riddles (Apache-2.0), or a file: question, tab, answer",
    )
    parser.add_argument("--language", choices=LANGUAGES, default="zh")
    parser.add_argument("--least-answer", type=int, default=LEAST_ANSWER, help="words")
    parser.add_argument("--skip-bad", action="store_true", help="count bad lines, and go on")
    parser.add_argument("--vocabulary", type=int, default=4000, help="words")
    parser.add_argument("--units", type=int, default=192, help="of embedding and LSTM layers")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per update")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, help="updates, in place of epochs")
    parser.add_argument("--lr", type=float, default=4e-3, help="falls to 0 along a cosine")
    parser.add_argument("--run-dir", type=Path, default=Path(run_dir))
    return parser.parse_args()


def network(options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Arguments of ``Seq2Seq``."""
    return {
        "vocabulary": vocabulary,
        "units": options.units,
        "layers": options.layers,
        "dropout": options.dropout,
    }
