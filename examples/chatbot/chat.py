"""A conversation with a trained chatbot, in the terminal.

    python examples/chatbot/chat.py runs/chatbot
    python examples/chatbot/chat.py runs/chatbot --beam 5
    python examples/chatbot/chat.py runs/chatbot --beam 5 < runs/chatbot/held_out.txt

An empty line is passed over, the end of input (Ctrl-D) ends it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import saved_run
import torch
from answers import beam, greedy
from pairs import MOST_QUESTION
from words import text, words

from quorate.errors import UserError


def reply(run: saved_run.SavedRun, said: str, size: int = 1) -> Iterator[str]:
    """Lines of a reply: what was not understood, then the answer, best first if there are more.

    Args:
        run: what answers.
        said: a line of the user's.
        size: of the beam; 1 is greedy.
    """
    asked = words(said, run.language)
    if not asked:
        return
    if len(asked) > MOST_QUESTION:
        yield f"(the first {MOST_QUESTION} words of {len(asked)})"
        asked = asked[:MOST_QUESTION]
    if unknown := run.vocabulary.unknown(asked):
        yield f"(not in the vocabulary: {', '.join(unknown)})"
    batch = torch.tensor([run.vocabulary.numbers(asked)])
    if size == 1:
        yield _text(run, greedy(run.model, batch)[0])
        return
    for answer in beam(run.model, batch, size)[0]:
        yield f"{answer.score:6.2f}  {_text(run, answer.words)}"


def _text(run: saved_run.SavedRun, numbers: list[int]) -> str:
    return text(run.vocabulary.words(numbers), run.language) or "(no answer)"


def main() -> None:
    """Read lines, and answer them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="as given to train.py or single.py")
    parser.add_argument("--beam", type=int, default=1, metavar="K", help="hypotheses; 1 is greedy")
    options = parser.parse_args()
    if options.beam < 1:
        parser.error(f"--beam: got {options.beam}, expected a number >= 1")
    try:
        run = saved_run.load(options.run_dir)
    except UserError as error:
        sys.exit(f"chat.py: {error}")
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            said = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if said.strip() and not is_terminal:
            print(f"> {said}")
        for line in reply(run, said, options.beam):
            print(line, flush=True)


if __name__ == "__main__":
    main()
