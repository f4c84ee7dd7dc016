"""The options that single.py and train.py have in common: every number of a recipe is one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import recipes
import torch
from pairs import LEAST_ANSWER
from words import LANGUAGES

TARGETS = (recipes.UNIGRAM, recipes.OTHERS, recipes.RECALLED)


def parse(description: str, run_dir: str) -> argparse.Namespace:
    """The command line, with what the data set's recipe says where it is silent."""
    parser = argparse.ArgumentParser(description=description)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="NAME",
        help="insuranceqa (GPL-3.0, for research: your word that this is yours), chatterbot (BSD), "
        "riddles (Apache-2.0), small_talk (of this example), or a file: question, tab, answer; "
        "several are mixed",
    )
    data.add_argument(
        "--times", type=int, nargs="+", metavar="N", help="each of them in an epoch (1)"
    )
    data.add_argument("--language", choices=LANGUAGES, default="zh")
    data.add_argument("--least-answer", type=int, metavar="WORDS", help="3; of short talk 1")
    data.add_argument("--skip-bad", action="store_true", help="count bad lines, and go on")
    data.add_argument("--spell", type=float, help="share of questions read letter by letter")

    network = parser.add_argument_group("network")
    network.add_argument("--vocabulary", type=int, help="words and characters")
    network.add_argument("--units", type=int, help="of embedding and LSTM layers")
    network.add_argument("--layers", type=int)
    network.add_argument("--dropout", type=float)
    network.add_argument("--attention", action=argparse.BooleanOptionalAction, default=True)

    training = parser.add_argument_group("training")
    training.add_argument("--batch-size", type=int, help="pairs per update")
    training.add_argument("--epochs", type=int)
    training.add_argument("--steps", type=int, help="updates, in place of epochs")
    training.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    training.add_argument("--lr", type=float, help="at the beginning")
    training.add_argument(
        "--lr-end", type=float, default=0.0, help="of it at the end of a cosine (0); 1: it stays"
    )
    training.add_argument(
        "--weight-decay", type=float, default=0.0, help="L2 penalty, times parameters (0)"
    )
    training.add_argument("--clip-norm", type=float, default=5.0, help="of the gradient; 0: none")
    training.add_argument("--window", type=int, default=40, help="batches sorted by length at once")
    training.add_argument("--seed", type=int, default=0)

    end = parser.add_argument_group("answers and the end")
    end.add_argument(
        "--no-repeat", type=int, default=2, help="so many words in a row not twice; 0: any (2)"
    )
    end.add_argument(
        "--decline", type=float, default=0.1, help="validation questions that it says no to (0.1)"
    )
    end.add_argument(
        "--target",
        type=_target,
        action="append",
        metavar="NAME=NUMBER",
        help=f"what the run has to reach, {', '.join(TARGETS)}; NAME= drops it",
    )
    end.add_argument("--run-dir", type=Path, default=Path(run_dir))
    options = parser.parse_args()

    chosen = recipes.recipe(options.data[0])
    for name, value in chosen.items():
        if name != "targets" and getattr(options, name) is None:
            setattr(options, name, value)
    targets = dict(chosen["targets"]) | dict(options.target or [])
    options.target = {name: value for name, value in targets.items() if value is not None}
    least = options.least_answer
    options.least_answer = [
        recipes.LEAST_ANSWER.get(name, LEAST_ANSWER) if least is None else least
        for name in options.data
    ]
    return options


def network(options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Arguments of ``Seq2Seq``."""
    return {
        "vocabulary": vocabulary,
        "units": options.units,
        "layers": options.layers,
        "dropout": options.dropout,
        "attention": options.attention,
    }


def optimizer(options: argparse.Namespace, params: Any) -> torch.optim.Optimizer:
    """What --optimizer names."""
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options.optimizer]
    return kind(params, lr=options.lr, weight_decay=options.weight_decay)


def schedule(
    options: argparse.Namespace, optimizer: torch.optim.Optimizer, updates: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """A cosine from --lr to --lr-end of it."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, updates, eta_min=options.lr * options.lr_end
    )


def _target(text: str) -> tuple[str, float | None]:
    name, _, number = text.partition("=")
    if name not in TARGETS or "=" not in text:
        raise argparse.ArgumentTypeError(f"got {text}, expected NAME=NUMBER of {TARGETS}")
    return name, float(number) if number else None
