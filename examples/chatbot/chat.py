"""A conversation with a trained chatbot, in the terminal.

    python examples/chatbot/chat.py runs/chatbot
    python examples/chatbot/chat.py runs/chatbot --beam 5
    python examples/chatbot/chat.py runs/chatbot --beam 5 < runs/chatbot/held_out.txt
    python examples/chatbot/chat.py runs/chatbot --table < examples/chatbot/questions.zh.txt

It says that it does not know where it is less sure of its answer than the run's threshold, which
confidence.py chooses. An empty line is passed over, the end of input (Ctrl-D) ends it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import saved_run
import torch
from answers import beam, greedy
from confidence import UNKNOWN, Confidence
from export import Exported
from pairs import MOST_QUESTION
from words import question_words, text

from quorate.errors import UserError


class Bot:
    """Answers of a run.

    Args:
        run: what answers.
        confidence: below which it says that it does not know; None: never.
        network: greedy and beam search ask it. Default: the run's.
    """

    def __init__(
        self, run: saved_run.SavedRun, confidence: Confidence | None = None, network: Any = None
    ) -> None:
        self._run = run
        self._confidence = confidence
        self._network = run.model if network is None else network

    def reply(self, said: str, size: int = 1) -> Iterator[str]:
        """Lines of a reply: what was not read as it is, then the answer; of a beam all, best first.

        Args:
            said: a line of the user's.
            size: of the beam; 1 is greedy.
        """
        asked = question_words(said, self._run.language)
        if not asked:
            return
        if len(asked) > MOST_QUESTION:
            yield f"(the first {MOST_QUESTION} words of {len(asked)})"
            asked = asked[:MOST_QUESTION]
        if spelt := self._run.vocabulary.not_whole(asked):
            yield f"(not in the vocabulary, read by its parts: {', '.join(spelt)})"
        question = self._run.vocabulary.numbers(asked)
        first, sure = self._greedy(question)
        if self._is_unsure(sure):
            yield f"{UNKNOWN[self._run.language]} ({sure:.2f})"
        elif size == 1:
            yield self._text(first)
        else:
            for answer in self._beam(question, size):
                yield f"{answer.score:6.2f}  {self._text(answer.words)}"

    def row(self, said: str, size: int) -> str:
        """A row of a table: question, greedy answer, the beam's best, and how sure it is."""
        asked = question_words(said, self._run.language)[:MOST_QUESTION]
        question = self._run.vocabulary.numbers(asked)
        first, sure = self._greedy(question)
        if self._is_unsure(sure):
            plain = best = UNKNOWN[self._run.language]
        else:
            plain, best = self._text(first), self._text(self._beam(question, size)[0].words)
        how_sure = "not measured" if sure is None else f"{sure:.2f}"
        return f"| {said} | {plain} | {best} | {how_sure} |"

    def _greedy(self, question: list[int]) -> tuple[list[int], float | None]:
        """The greedy answer, and how sure the network is of it; None: that is not asked for."""
        batch = torch.tensor([question])
        (found,) = greedy(self._network, batch, no_repeat=self._run.no_repeat)
        if self._confidence is None:
            return found, None
        return found, self._confidence.of(self._run.model, [question], [found])[0]

    def _is_unsure(self, sure: float | None) -> bool:
        return (
            self._confidence is not None and sure is not None and sure < self._confidence.threshold
        )

    def _beam(self, question: list[int], size: int) -> list[Any]:
        batch = torch.tensor([question])
        return beam(self._network, batch, size, no_repeat=self._run.no_repeat)[0]

    def _text(self, numbers: list[int]) -> str:
        said = text(self._run.vocabulary.words(numbers), self._run.language)
        return said or "(no answer)"


def lines() -> Iterator[str]:
    """What the user says; from a file or a pipe it is shown, too."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            yield input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            return


def conversation(bot: Bot, said: Iterable[str], size: int) -> None:
    """Read lines, and answer them."""
    for line in said:
        if line.strip() and not sys.stdin.isatty():
            print(f"> {line}")
        for answer in bot.reply(line, size):
            print(answer, flush=True)
    print()


def table(bot: Bot, said: Iterable[str], size: int) -> None:
    """A table in Markdown of all lines."""
    print(f"| question | greedy | beam of {size} | sure |\n|---|---|---|---|")
    for line in said:
        if line.strip():
            print(bot.row(line.strip(), size), flush=True)


def main() -> None:
    """Answer what comes on standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="as given to train.py or single.py")
    parser.add_argument("--beam", type=int, metavar="K", help="hypotheses; 1 is greedy (1; 5)")
    parser.add_argument("--always", action="store_true", help="answer, however unsure it is")
    parser.add_argument("--exported", action="store_true", help="ask what export.py has written")
    parser.add_argument("--table", action="store_true", help="greedy and beam search side by side")
    options = parser.parse_args()
    size = options.beam if options.beam is not None else 5 if options.table else 1
    if size < 1:
        parser.error(f"--beam: got {size}, expected a number >= 1")
    try:
        bot = Bot(
            saved_run.load(options.run_dir),
            None if options.always else Confidence.load(options.run_dir),
            Exported.load(options.run_dir) if options.exported else None,
        )
        (table if options.table else conversation)(bot, lines(), size)
    except UserError as error:
        sys.exit(f"chat.py: {error}")


if __name__ == "__main__":
    main()
