"""Pages for those who come from elsewhere: they show what is run, and our scripts train."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

import pytest
from support.runs import TOWER, command, run

PAGES = Path(__file__).parents[1] / "docs" / "coming-from"
SCRIPTS = PAGES / "scripts"

FIRST_LINES = {
    "ddp": "64 rows = 2 shards x 32 on 1 cpu worker (1 thread each), sync",
    "accelerate": "64 rows = 4 shards x 16 on 1 cpu worker (1 thread each), sync",
    "lightning": "64 rows = 2 shards x 32 on 1 cpu worker (1 thread each), sync",
    "hf-trainer": "64 rows = 4 shards x 16 on 1 cpu worker (1 thread each), sync",
}


def scripts(page: Path) -> list[Path]:
    name = page.stem.replace("-", "_")
    return [SCRIPTS / f"{name}_theirs.py", SCRIPTS / f"{name}_ours.py"]


def test_every_page_is_looked_at() -> None:
    pages = {page.stem for page in PAGES.glob("*.md")}
    assert pages == set(FIRST_LINES)
    named = {path for stem in pages for path in scripts(PAGES / f"{stem}.md")}
    assert named == set(SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("stem", FIRST_LINES)
def test_a_page_shows_both_files_as_they_are(stem: str) -> None:
    page = PAGES / f"{stem}.md"
    shown = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert shown[:2] == [path.read_text() for path in scripts(page)]


@pytest.mark.parametrize(
    "stem",
    [stem if stem == "ddp" else pytest.param(stem, marks=pytest.mark.slow) for stem in FIRST_LINES],
)
def test_our_script_trains(stem: str, tmp_path: Path) -> None:
    _, ours = scripts(PAGES / f"{stem}.md")
    ended = run(command(ours, options=(*TOWER, "--run-dir", str(tmp_path))))
    assert ended.code == 0, ended.said
    assert FIRST_LINES[stem] in ended.out
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [update["loss"] for update in map(json.loads, lines) if "rows" in update]
    assert mean(losses[-10:]) < 0.7 * mean(losses[:10])
    if "stopped after" not in ended.out:  # by a metric, whose bits are those of a processor
        (step,) = re.findall(r"saved step (\d+) to runs/", (PAGES / f"{stem}.md").read_text())
        assert f"saved step {step} to " in ended.out


def test_the_chinese_page_has_the_tables_of_the_english_one() -> None:
    def rows(name: str) -> list[int]:
        sections = (PAGES.parent / name).read_text().split("\n## ")
        return [section.count("\n| ") for section in sections]

    assert rows("from-tensorflow-1.zh.md") == rows("from-tensorflow-1.md")
