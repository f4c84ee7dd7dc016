"""Pages for newcomers from other libraries: shown code is the run code, and our scripts train."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest
from support.runs import TOWER, command, run

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "coming-from.md"
SCRIPTS = DOCS / "coming-from" / "scripts"

FIRST_LINES = {
    "ddp": "64 rows = 2 shards x 32 on 1 cpu worker (1 thread each), sync",
    "accelerate": "64 rows = 4 shards x 16 on 1 cpu worker (1 thread each), sync",
    "lightning": "64 rows = 2 shards x 32 on 1 cpu worker (1 thread each), sync",
    "hf-trainer": "64 rows = 4 shards x 16 on 1 cpu worker (1 thread each), sync",
}


def scripts(stem: str) -> list[Path]:
    name = stem.replace("-", "_")
    return [SCRIPTS / f"{name}_theirs.py", SCRIPTS / f"{name}_ours.py"]


def section(stem: str) -> str:
    """Return the part of the page with both scripts."""
    theirs = scripts(stem)[0].read_text()
    (found,) = [part for part in re.split(r"^## ", PAGE.read_text(), flags=re.M) if theirs in part]
    return found


def test_all_scripts_are_shown() -> None:
    named = {path for stem in FIRST_LINES for path in scripts(stem)}
    assert named == set(SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("stem", FIRST_LINES)
def test_a_section_shows_both_files_as_they_are(stem: str) -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", section(stem), re.DOTALL | re.MULTILINE)
    assert shown[:2] == [path.read_text() for path in scripts(stem)]


@pytest.mark.parametrize(
    "stem",
    [stem if stem == "ddp" else pytest.param(stem, marks=pytest.mark.slow) for stem in FIRST_LINES],
)
def test_our_script_trains(stem: str, tmp_path: Path) -> None:
    _, ours = scripts(stem)
    ended = run(command(ours, options=(*TOWER, "--run-dir", str(tmp_path))))
    assert ended.code == 0, ended.said
    assert FIRST_LINES[stem] in ended.out
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [update["loss"] for update in map(json.loads, lines) if "rows" in update]
    assert mean(losses[-10:]) < 0.7 * mean(losses[:10])
    if "stopped after" not in ended.out:  # by a metric, whose bits are those of a processor
        (step,) = re.findall(r"saved step (\d+) to runs/", section(stem))
        assert f"saved step {step} to " in ended.out
