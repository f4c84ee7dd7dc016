"""A Keras model as it is, on the torch backend.

KERAS_BACKEND=torch quorate run --devices cpu --workers 2 tests/scripts/keras_model.py
"""

from __future__ import annotations

import json

import keras
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import quorate


def loss(model: keras.Model, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, y = batch
    logits = model(x, training=model.training)
    return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(16),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(2),
    ]
)
x = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))
trainer = quorate.Trainer(
    model,
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=16,
    shards=4,
)
data = TensorDataset(x, (x.sum(1) > 0).long())
trainer.fit(data, epochs=8)
statistics = {n: p for n, p in trainer.model.named_parameters() if "moving_mean" in n}
moved = max(float(p.detach().abs().max()) for p in statistics.values())
print(json.dumps({**trainer.evaluate(data), "moved": moved}))
