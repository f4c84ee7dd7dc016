"""examples/gan.py: a few updates of it, on few images; and that it says whether it has learned."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from open_data.fashion_mnist import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from support.runs import digests
from support.warm import WARM

EXAMPLE = Path(__file__).parents[2] / "examples" / "gan.py"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Images of one bright square each, on black."""
    folder = tmp_path / "data"
    folder.mkdir()
    for images_name, labels_name, rows in (
        (TRAIN_IMAGES, TRAIN_LABELS, 128),
        (TEST_IMAGES, TEST_LABELS, 64),
    ):
        images = np.zeros((rows, 28, 28), np.uint8)
        images[:, 8:20, 8:20] = 255
        header = np.array([rows, 28, 28], ">i4").tobytes()
        (folder / images_name).write_bytes(b"\0\0\x08\x03" + header + images.tobytes())
        labels = np.array([rows], ">i4").tobytes() + bytes(row % 10 for row in range(rows))
        (folder / labels_name).write_bytes(b"\0\0\x08\x01" + labels)
    return folder


@pytest.mark.slow
def test_it_trains_both_and_says_how_far_it_is(data: Path, tmp_path: Path) -> None:
    found = {}
    for workers, target, code in (("1", "0.01", 1), ("2", "2.0", 0)):
        run_dir = tmp_path / workers
        script = [str(EXAMPLE), "--data", str(data), "--epochs", "2", "--target", target]
        where = ["--run-dir", str(run_dir)]
        words = ["run", "--devices", "cpu", "--workers", workers, *where, *script]
        ended, out, err = WARM.run(words, os.environ, 120)
        assert ended == code, err
        assert "distance from the test images" in out
        assert "d/right" in out
        found[workers] = digests(run_dir)
    assert found["1"] == found["2"]
