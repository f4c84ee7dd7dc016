"""The example that places parts of a model: by names that a user may type."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from quorate.errors import SettingError

EXAMPLE = Path(__file__).parents[2] / "examples" / "placement.py"


@pytest.mark.parametrize("name", ["gpu:2", "GPU:99", "cuda:99", "xpu:7", "mps:3", "cpu:1", "tpu"])
def test_a_device_that_is_not_there_is_refused_before_a_model_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() > 2:
        pytest.skip("it is there")
    monkeypatch.setattr(sys, "argv", ["placement.py", "--devices", f"{name},cpu"])
    with pytest.raises(SettingError, match=f"devices: got '{name}', expected"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.slow
def test_names_as_tensorflow_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["placement.py", "--devices", "/cpu:0,CPU"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "44" in capsys.readouterr().out
