"""README.md, followed to the letter: how output is compared, and what needs no data is true."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "follow_readme.py"
A, B = "a" * 64, "b" * 64


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("follow_readme", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


follow_readme = _module()

SAME = {
    "others between": (["a", "b"], ["x", "a", "y", "b"], 0),
    "times": (
        ["step 3  loss 0.5  4,000 examples/s  ETA 0:10"],
        ["step 3  loss 0.5  99 examples/s  ETA 0:42"],
        0,
    ),
    "when it was killed": (
        ["resumed step 136 (epoch 1, 58%) from runs/b/step-000136"],
        ["resumed step 90 (epoch 1, 30%) from runs/b/step-000090"],
        0,
    ),
    "what a worker was at": (
        ["worker 1 (cpu) was killed by signal 9 (SIGKILL); another is starting"],
        ["worker 0 (cpu) was killed by signal 9 (SIGKILL) in step 3; another is starting"],
        0,
    ),
    "another processor": ([f"digest  {A}", "loss 0.4443"], [f"digest  {B}", "loss 0.4451"], 2),
    "a digest twice": ([f"digest  {A}"] * 2, [f"digest  {B}"] * 2, 2),
}
OTHER = {
    "a line that is not there": (["a", "b"], ["b", "a"], "b"),
    "a count": (["saved step 160 to runs"], ["saved step 161 to runs"], "saved step 160 to runs"),
    "a loss far off": (["loss 0.44"], ["loss 0.94"], "loss 0.44"),
    "digests that are to be equal": (
        [f"digest  {A}"] * 2,
        [f"digest  {A}", f"digest  {B}"],
        f"digest  {A}",
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_output_that_is_as_shown(what: str) -> None:
    shown, printed, others = SAME[what]
    comparison = follow_readme.Comparison()
    assert comparison.missing(shown, printed) is None
    assert comparison.others == others


@pytest.mark.parametrize("what", OTHER)
def test_output_that_is_not_as_shown(what: str) -> None:
    shown, printed, line = OTHER[what]
    assert follow_readme.Comparison().missing(shown, printed) == line


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_what_a_page_has_one_do(page: str) -> None:
    steps = list(follow_readme.steps((ROOT / page).read_text()))
    assert [step.file for step in steps if step.file] == ["circle.py"]
    commands = [step.command for step in steps if step.command]
    assert commands[0].startswith("pip install -c constraints.txt .")
    assert sum(command.startswith("quorate run") for command in commands) == 2
    assert sum(len(step.shown) for step in steps if step.command) == 9


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="the README begins with a clone")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
def test_the_readme_is_true() -> None:
    line = [sys.executable, str(FILE), "--environment", sys.prefix, "--without", "kill_it"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("as shown (") == 3
