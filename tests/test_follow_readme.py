"""README.md, followed to the letter: the comparison of output, and truths without data."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "follow_readme.py"
DIGEST_A, DIGEST_B = f"digest  {'a' * 64}", f"digest  {'b' * 64}"
FOLLOW = runpy.run_path(str(FILE))

# The shown and the printed output; the missing line, and the number of differing numbers.
COMPARED = {
    "others between": (["a", "b"], ["x", "a", "y", "b"], None, 0),
    "times": (["loss 0.5  4,000 examples/s"], ["loss 0.5  99 examples/s"], None, 0),
    "another processor": ([DIGEST_A, "loss 0.4443"], [DIGEST_B, "loss 0.4451"], None, 2),
    "not there": (["a", "b"], ["b", "a"], "b", None),
    "a count": (["saved step 160 to a"], ["saved step 161 to a"], "saved step 160 to a", None),
    "a loss far off": (["loss 0.44"], ["loss 0.94"], "loss 0.44", None),
    "digests that are to be equal": ([DIGEST_A] * 2, [DIGEST_A, DIGEST_B], DIGEST_A, None),
}


@pytest.mark.parametrize("what", COMPARED)
def test_how_output_is_compared(what: str) -> None:
    shown, printed, missing, others = COMPARED[what]
    comparison = FOLLOW["Comparison"]()
    assert comparison.missing(shown, printed) == missing
    assert others is None or comparison.others == others


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_what_a_page_has_one_do(page: str) -> None:
    steps = list(FOLLOW["steps"]((ROOT / page).read_text()))
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
