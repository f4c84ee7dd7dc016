"""A Keras model on worker processes: the same bits, and the model learns."""

import importlib.util
from pathlib import Path

import pytest
from support.runs import TOWER, command, digests, last_json, run_all

KERAS = """
import json, keras, torch, quorate
import torch.nn.functional as F
from keras import layers
from torch.utils.data import TensorDataset

def loss(model, batch):
    logits = model(batch[0], training=model.training)
    right = (logits.argmax(1) == batch[1]).float().mean()
    return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": right}

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.BatchNormalization(),
    layers.Dropout(0.3), layers.Dense(2)])
x = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
trainer = quorate.Trainer(model, loss, batch_size=16, shards=4,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
trainer.fit(data, epochs=8)
means = [p for name, p in trainer.model.named_parameters() if "moving_mean" in name]
moved = max(float(p.detach().abs().max()) for p in means)
print(json.dumps({**trainer.evaluate(data), "moved": moved}))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_a_keras_model(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(KERAS)
    commands = {"tower": command(script, options=TOWER)}
    for name in "12":
        options = ("--engine", "processes", "--workers", name, "--run-dir", str(tmp_path / name))
        commands[name] = command(script, options=options)
    ended = run_all(commands, {"KERAS_BACKEND": "torch"})
    for name in "12":
        assert ended[name].code == 0, ended[name].said
        # The model learns, and so do the running statistics.
        found = last_json(ended[name].out)
        assert found["accuracy"] > 0.85, ended[name].out
        assert found["moved"] > 0.01, ended[name].out
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    # Deep copies would have different parameters, never trained.
    assert ended["tower"].code == 2
    assert "use engine='processes'" in ended["tower"].err
