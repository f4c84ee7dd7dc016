"""A trained chatbot as two programs of torch.export, which need nothing of this example.

    python examples/chatbot/export.py runs/chatbot
    python examples/chatbot/chat.py runs/chatbot --exported --beam 5

``reader.pt2`` takes a question's numbers, (1, 40) int64, padded with 0, and gives what the writer
wants of it: values (1, 40, H), keys (1, H, 40), padding (1, 40), and the state h, c, (L, 1, H).
``writer.pt2`` takes these, K times, and the last word of K hypotheses, (K, 1); it gives logits of
the next words, (K, 1, V), and their states (L, K, H).

torch.export cannot follow an LSTM over a question of any length: the reader has its steps one after
the other, for the longest that it takes, and what is padding leaves the state as it is.

Both are checked before they stay: for the first 200 questions of ``held_out.txt`` greedy and beam
search have to say the same as with the network, word for word, and the reader's and the writer's
numbers to differ by no more than 1e-5.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import saved_run
import torch
import torch.nn.functional as F
from answers import beam, greedy
from model import Read, Seq2Seq, State, joined
from torch import nn
from torch.export import Dim, ExportedProgram
from vocabulary import BEGIN, END, PAD
from words import question_words

from quorate.errors import DataError, UserError

READER, WRITER = "reader.pt2", "writer.pt2"
LONGEST = 40  # pieces of a question

_MOST_HYPOTHESES = 4096
_TOLERANCE = 1e-5
_MOST_ASKED = 200  # questions


class Reader(nn.Module):
    """The half of a network that reads, for one question of up to ``LONGEST`` pieces."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, question: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values, keys, padding, h and c."""
        padding = question == PAD
        values, states = self.model.embedded(question), []
        for layer in range(self.model.encoder.num_layers):
            ahead, last = self._read(values, ~padding, f"l{layer}")
            back, first = self._read(values, ~padding, f"l{layer}_reverse")
            values = torch.cat([ahead, back], 2)
            states += [last, first]
        h, c = (joined(torch.stack(part)) for part in zip(*states, strict=True))
        return (*self.model.as_read(values, padding), h, c)

    def _read(
        self, inputs: torch.Tensor, real: torch.Tensor, name: str
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """One direction of a layer.

        Args:
            inputs: (1, T, inputs).
            real: (1, T) bool, what is no padding.
            name: the end of its parameters' names.

        Returns:
            Outputs (1, T, H / 2), 0 where there is padding, and the last h and c, (1, H / 2).
        """
        of = self.model.encoder
        h = c = inputs.new_zeros(len(inputs), of.hidden_size)
        outputs = [h] * LONGEST
        order = range(LONGEST)
        for step in reversed(order) if name.endswith("reverse") else order:
            new_h, new_c = lstm_step(of, name, inputs[:, step], h, c)
            here = real[:, step, None]
            h, c = torch.where(here, new_h, h), torch.where(here, new_c, c)
            outputs[step] = torch.where(here, new_h, 0.0)
        return torch.stack(outputs, 1), (h, c)


class Writer(nn.Module):
    """The half of a network that writes, a word at a time."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        values: torch.Tensor,
        keys: torch.Tensor,
        padding: torch.Tensor,
        h: torch.Tensor,
        c: torch.Tensor,
        words: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Logits, h and c."""
        outputs, states = self.model.embedded(words)[:, 0], []
        for layer in range(self.model.decoder.num_layers):
            new = lstm_step(self.model.decoder, f"l{layer}", outputs, h[layer], c[layer])
            outputs = new[0]
            states.append(new)
        features = self.model.attended(Read(values, keys, padding), outputs[:, None])
        return (self.model.logits(features), *map(torch.stack, zip(*states, strict=True)))


def lstm_step(
    layers: nn.LSTM, name: str, inputs: torch.Tensor, h: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a layer, as ``nn.LSTM`` computes it (Hochreiter & Schmidhuber 1997).

    Args:
        layers: has its parameters.
        name: the end of their names.
        inputs: (N, inputs).
        h: (N, units).
        c: likewise.

    Returns:
        The next h and c.
    """
    of_inputs, of_state = (
        F.linear(
            part, getattr(layers, f"weight_{kind}_{name}"), getattr(layers, f"bias_{kind}_{name}")
        )
        for part, kind in ((inputs, "ih"), (h, "hh"))
    )
    let_in, keep, new, let_out = (of_inputs + of_state).chunk(4, 1)
    c = keep.sigmoid() * c + let_in.sigmoid() * new.tanh()
    return let_out.sigmoid() * c.tanh(), c


class Exported:
    """Two programs, to be asked like a ``Seq2Seq`` by greedy and beam search, one question at once.

    Args:
        reader: of ``Reader``.
        writer: of ``Writer``.
    """

    def __init__(self, reader: ExportedProgram, writer: ExportedProgram) -> None:
        self._reader, self._writer = reader.module(), writer.module()

    @classmethod
    def load(cls, run_dir: Path) -> Exported:
        """Read what this program wrote.

        Raises:
            DataError: it is not there, or damaged.
        """
        found = []
        for name in (READER, WRITER):
            try:
                found.append(torch.export.load(run_dir / name))
            except Exception as error:  # torch has no class for what is no archive of its own
                raise DataError(
                    run_dir / name,
                    got=f"{type(error).__name__}: {error}".splitlines()[0],
                    expected="an exported program",
                    fix="run export.py",
                ) from error
        return cls(*found)

    def read(self, questions: torch.Tensor) -> tuple[Read, State]:
        """As ``Seq2Seq.read``, of one question.

        Raises:
            DataError: it is longer than the program takes.
        """
        if (pieces := questions.shape[1]) > LONGEST:
            got, expected = f"{pieces} pieces", f"at most {LONGEST}"
            raise DataError("the question", got=got, expected=expected, fix="ask a shorter one")
        questions = F.pad(questions, (0, LONGEST - pieces), value=PAD)
        values, keys, padding, h, c = self._reader(questions)
        return Read(values, keys, padding), (h, c)

    def write(self, read: Read, state: State, words: torch.Tensor) -> tuple[torch.Tensor, State]:
        """Logits where ``Seq2Seq.write`` has features."""
        logits, h, c = self._writer(*read, *state, words)
        return logits, (h, c)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """What they are already."""
        return features


def exported(model: Seq2Seq) -> tuple[ExportedProgram, ExportedProgram]:
    """The two programs of a network in evaluation mode."""
    with torch.no_grad():
        question = torch.full((1, LONGEST), PAD)
        question[0, :7] = END + 1  # of any kind
        reader = torch.export.export(Reader(model), (question,))
        *read, h, c = Reader(model)(question)
        several = (part.repeat_interleave(3, 0) for part in read)
        states = (part.repeat_interleave(3, 1) for part in (h, c))
        count = Dim("K", min=1, max=_MOST_HYPOTHESES)
        first, second = {0: count}, {1: count}
        writer = torch.export.export(
            Writer(model),
            (*several, *states, torch.full((3, 1), BEGIN)),
            dynamic_shapes=(first, first, first, second, second, first),
        )
    return reader, writer


def difference(run: saved_run.SavedRun, programs: Any, questions: list[list[int]]) -> float:
    """The most that the programs' numbers differ by from the network's; they say the same words.

    Args:
        run: with the network.
        programs: an ``Exported``.
        questions: to ask both.

    Raises:
        DataError: an answer is another.
    """
    most = 0.0
    for question in questions:
        asked = torch.tensor([question])
        own, own_state = run.model.read(F.pad(asked, (0, LONGEST - len(question)), value=PAD))
        read, state = programs.read(asked)
        first = torch.full((1, 1), BEGIN)
        with torch.no_grad():
            features, own_state = run.model.write(own, own_state, first)
            logits, state = programs.write(read, state, first)
            pairs = [*zip(own, read, strict=True), *zip(own_state, state, strict=True)]
            pairs.append((run.model.logits(features), logits))
        most = max([most, *((a.float() - b.float()).abs().max().item() for a, b in pairs)])
        for size in (1, 5):
            said, expected = (
                beam(one, asked, size, no_repeat=run.no_repeat)[0][0].words
                if size > 1
                else greedy(one, asked, no_repeat=run.no_repeat)[0]
                for one in (programs, run.model)
            )
            if said != expected:
                raise DataError(
                    f"the exported programs, asked {run.vocabulary.words(question)}",
                    got=run.vocabulary.words(said),
                    expected=run.vocabulary.words(expected),
                )
    return most


def main() -> None:
    """Export, check, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="as given to train.py or single.py")
    options = parser.parse_args()
    try:
        run = saved_run.load(options.run_dir)
        lines = saved_run.questions(options.run_dir)[:_MOST_ASKED]
        asked = [run.vocabulary.numbers(question_words(line, run.language)) for line in lines]
        shortest = min(asked, key=len)[:1]  # one piece: a case of its own for a compiler
        fresh = [options.run_dir / f".{name}" for name in (READER, WRITER)]
        for program, path in zip(exported(run.model), fresh, strict=True):
            torch.export.save(program, path)
        programs = Exported(*(torch.export.load(path) for path in fresh))  # what a user will have
        found = difference(run, programs, [shortest, *asked])
        if found > _TOLERANCE:
            got, expected = f"numbers that differ by {found:.1e}", f"at most {_TOLERANCE}"
            raise DataError("the exported programs", got=got, expected=expected)
        for path in fresh:
            os.replace(path, path.with_name(path.name[1:]))
    except UserError as error:
        sys.exit(f"export.py: {error}")
    sizes = " and ".join(
        f"{options.run_dir / name} ({(options.run_dir / name).stat().st_size / 1e6:.1f} MB)"
        for name in (READER, WRITER)
    )
    print(
        f"{sizes}: {1 + len(asked):,} questions answered word for word as the network does, "
        f"greedily and by a beam of 5; numbers differ by at most {found:.1e}"
    )


if __name__ == "__main__":
    main()
