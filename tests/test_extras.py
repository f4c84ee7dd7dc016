"""A plain install: training needs no package of an extra; a missing package is named in a line."""

import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = """
import sys
sys.modules.update(dict.fromkeys(["tensorboard", "google", "google_crc32c", "pynvml", "ray"]))
"""
TRAIN = """
import torch
import quorate

rows = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
trainer = quorate.Trainer(
    lambda: torch.nn.Linear(4, 1),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=8, shards=2, devices="cpu", run_dir="run",
    workers=quorate.Workers(2, engine="towers"),
)
trainer.fit(rows, epochs=1)
assert trainer.summaries is None
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )


def test_training_needs_no_extra(tmp_path: Path) -> None:
    ended = run(TRAIN, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (
        "pip install 'quorate-torch[tensorboard]', or pass --summary-every-s none" in ended.stdout
    )
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "summaries").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("from quorate.data.streams import *; LinesDataset(__file__, str)", "google-crc32c"),
        ("import quorate.data.tfrecord", "protobuf"),
    ],
)
def test_a_missing_package_is_named_in_one_line(script: str, package: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("{}\n" * 3)
    ended = run(script.replace("__file__", repr(str(file))), tmp_path)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert f"need the package {package}, which is not installed" in ended.stderr
    assert ended.stderr.endswith("pip install 'quorate-torch[data]'\n")
