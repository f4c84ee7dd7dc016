"""A GPT of GPT-2's shape: 124 million parameters, 1,024 tokens a row.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Without dropout; the
head has the weight of the embedding of tokens.

Legend: B rows, T tokens of a row, W width, H heads, K tokens of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Shape(NamedTuple):
    """The sizes of a GPT."""

    vocabulary: int = 50_257  # K
    tokens: int = 1_024  # T, at most
    blocks: int = 12
    heads: int = 12  # H
    width: int = 768  # W


TINY = Shape(vocabulary=256, tokens=32, blocks=2, heads=2, width=32)


class Block(nn.Module):
    """Attention to earlier tokens and a perceptron, each added to its input (B, T, W)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, T, W)."""
        heads = self.to_heads(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, W / H)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(attended.transpose(1, 2).flatten(2))
        wide = F.gelu(self.widen(self.norm_2(x)), approximate="tanh")
        added: torch.Tensor = self.narrow(wide)
        return x + added


class GPT(nn.Module):
    """Logits (B, T, K) of the next token, from tokens (B, T)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.blocks)))
        self.norm = nn.LayerNorm(shape.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)  # else the logits begin far from 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        logits: torch.Tensor = F.linear(x, self.tokens.weight)
        return logits
