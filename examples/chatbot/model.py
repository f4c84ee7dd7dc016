"""The network: a bidirectional LSTM reads the question, another writes the answer with attention.

Sutskever et al. 2014, with the attention of Luong et al. 2015 ("general"), and one embedding for
questions, answers and the output layer (Press & Wolf 2017).

Legend: B rows, T words of a question, U of an answer, V words of the vocabulary, H units, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from vocabulary import PAD

State = tuple[torch.Tensor, torch.Tensor]  # of the decoder: two of (L, B, H)


class Read(NamedTuple):
    """Questions that were read."""

    values: torch.Tensor  # (B, T, H)
    keys: torch.Tensor  # (B, H, T), the values as attention looks at them
    padding: torch.Tensor  # (B, T) bool


class Seq2Seq(nn.Module):
    """From a question, and an answer's words so far, to its next word.

    Args:
        vocabulary: V.
        units: H, of the embedding and of every layer; a direction of the encoder has half of it.
        layers: L, of the encoder and of the decoder.
        dropout: of what a layer hands on: to the next, to attention, to the output.
        attention: whether the decoder looks at the words of the question. Without it all that it
            knows of them is the state that it begins with.
    """

    def __init__(
        self,
        vocabulary: int,
        units: int = 192,
        layers: int = 2,
        dropout: float = 0.5,
        *,
        attention: bool = True,
    ) -> None:
        super().__init__()
        self._attends = attention
        self.embedding = nn.Embedding(vocabulary, units, padding_idx=PAD)
        between = dropout if layers > 1 else 0.0
        self.encoder = nn.LSTM(
            units, units // 2, layers, dropout=between, bidirectional=True, batch_first=True
        )
        self.decoder = nn.LSTM(units, units, layers, dropout=between, batch_first=True)
        if attention:
            self.attention = nn.Linear(units, units, bias=False)
        self.combined = nn.Linear(2 * units if attention else units, units)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.embedding.weight, std=units**-0.5)
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()

    def read(self, questions: torch.Tensor) -> tuple[Read, State]:
        """Read questions, (B, T), padded on the right; what is padding changes nothing."""
        padding = questions == PAD
        lengths = (~padding).sum(1)
        packed = pack_padded_sequence(
            self.embedded(questions),
            lengths.cpu(),  # where it has to be
            batch_first=True,
            enforce_sorted=False,
        )
        outputs, (h, c) = self.encoder(packed)
        values, _ = pad_packed_sequence(outputs, batch_first=True, total_length=questions.shape[1])
        return self.as_read(values, padding), (joined(h), joined(c))

    def as_read(self, values: torch.Tensor, padding: torch.Tensor) -> Read:
        """What the decoder attends to, of the encoder's outputs (B, T, H)."""
        values = self.dropout(values)
        keys = self.attention(values) if self._attends else values
        return Read(values, keys.transpose(1, 2), padding)

    def write(self, read: Read, state: State, words: torch.Tensor) -> tuple[torch.Tensor, State]:
        """Features of the next word after each of the words (B, U): (B, U, H)."""
        hidden, state = self.decoder(self.embedded(words), state)
        return self.attended(read, hidden), state

    def attended(self, read: Read, hidden: torch.Tensor) -> torch.Tensor:
        """Features of the next words, (B, U, H), of the decoder's outputs (B, U, H)."""
        if not self._attends:
            return torch.tanh(self.combined(hidden))
        scores = torch.bmm(hidden, read.keys)  # (B, U, T)
        scores = scores.masked_fill(read.padding[:, None], float("-inf"))
        context = torch.bmm(scores.softmax(2), read.values)
        return torch.tanh(self.combined(torch.cat([context, hidden], 2)))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """(..., V), of features (..., H)."""
        return nn.functional.linear(self.dropout(features), self.embedding.weight, self.bias)

    def forward(self, questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Features of the next word after each of the words of answers (B, U): (B, U, H)."""
        read, state = self.read(questions)
        return self.write(read, state, answers)[0]

    def embedded(self, words: torch.Tensor) -> torch.Tensor:
        """What the LSTM layers get of words, (..., H) of (...)."""
        # Small as rows of the output layer have to be, of unit variance as layers like their input.
        return self.embedding(words) * self.embedding.embedding_dim**0.5


def joined(state: torch.Tensor) -> torch.Tensor:
    """The last states of both directions, (2 L, B, H / 2), as one: (L, B, H)."""
    forward, backward = state.unflatten(0, (-1, 2)).unbind(1)
    return torch.cat([forward, backward], 2)
